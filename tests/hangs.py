"""How long a test waits for something that should happen at once."""

HANGS_S = 600.0
"""Seconds. Nothing takes as long, however busy a machine is: what has not happened until then never will."""
