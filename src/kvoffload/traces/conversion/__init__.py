"""Traces made from what people have: recordings of other formats, conversations as text, tables of lengths.

A kind of source is one file in `sources`. Its contract is `source.Source`; `convert.convert` runs it.
"""
