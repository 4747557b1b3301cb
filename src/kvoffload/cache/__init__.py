"""The engine-neutral API: `kvoffload.open` joins manager, RAM, tiers and copies for one process.

`layout` describes the engine's tensors, `keys` hashes tokens, `jobs` runs on the one thread that owns the
manager (`owner`), and `cache` is the interface for users.
"""
