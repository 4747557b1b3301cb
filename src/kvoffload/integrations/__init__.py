"""Integrations into inference engines, with a package or module for each engine.

No other package imports an engine.
"""
