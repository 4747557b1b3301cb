"""Integrations into inference engines. Each engine has its own package or module here.

No other package of kvoffload imports an engine.
"""
