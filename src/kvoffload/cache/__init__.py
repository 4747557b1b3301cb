"""The engine-neutral API: `kvoffload.open` creates a cache of manager, RAM and tiers for one process.

`cache` and `request` are the interface for users. `kv_layout` describes the engine's tensors, and `key_chain`
hashes tokens. `jobs` runs on the thread that owns the manager (`owner`).
"""
