"""Formats of trace files. Each module here has one format. The contract is `traces.format.TraceFormat`."""
