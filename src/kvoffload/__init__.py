"""Keep an LLM server's KV-cache blocks in host RAM and behind it, and decide which are worth keeping."""

__version__ = "0.1.0"
