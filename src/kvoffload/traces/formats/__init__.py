"""Formats of trace files, one file each. Their contract is `traces.format.TraceFormat`."""
