"""kvoffload inside other people's engines: one room each, and the only ones that import an engine."""
