"""Kinds of sources, one file each. The contract is `traces.conversion.source.Source`."""
