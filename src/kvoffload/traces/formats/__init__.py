"""Formats of trace files, one file each. The contract is `traces.format.TraceFormat`."""
