"""The engine-neutral API: `kvoffload.open` creates a cache of manager, RAM and tiers for one process.

`cache` is the interface for users. `layout` describes the engine's tensors, and `keys` hashes tokens. `jobs`
runs on the thread that owns the manager (`owner`).
"""
