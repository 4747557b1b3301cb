"""Integrations into inference engines, a package for each. No other package imports an engine."""
