"""Conversion of recordings to traces: files of other formats, texts of conversations, tables of lengths.

Each kind of recording has a file in `sources`, which implements `source.Source`. `convert.convert` uses it.
"""
