"""Formats of trace files, one module for each format. Each implements `traces.format.TraceFormat`."""
