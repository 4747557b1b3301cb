"""The engine-neutral API: `kvoffload.open` creates a cache for one process, with a manager, RAM and tiers.

The modules `cache` and `request` are the interface for users. `kv_layout` describes the engine's tensors, and
`key_chain` hashes tokens. The coroutines of `jobs` run on the thread that owns the manager (`owner`).
"""
