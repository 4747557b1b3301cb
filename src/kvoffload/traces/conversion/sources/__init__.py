"""Kinds of sources, one file each. Their contract is `traces.conversion.source.Source`."""
