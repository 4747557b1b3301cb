"""Readers of recordings, one file for each format. Each implements `traces.conversion.source.Source`."""
