"""kvoffload inside vLLM."""
