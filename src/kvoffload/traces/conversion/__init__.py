"""Conversion of other recordings to traces: other formats, conversations in text, and tables of lengths.

Each kind of source is a file in `sources`. The contract is `source.Source`; `convert.convert` runs a source.
"""
