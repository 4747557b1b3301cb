"""The disk tier: blocks in a directory. The tier may forget blocks, but never serves wrong bytes.

A directory has one *slab* for each producer (a model with its dtype, layout and parallel shape). A slab is a
file of block slots with a journal.

- `disk_tier` implements `SecondaryTier`.
- `placement` maps blocks to slots, `pipeline` moves blocks, and `committer` makes blocks durable.
- `slab` reads and writes slots. `journal` and `recovery` record which blocks exist.
- `slab_directory`, `room` and `lock` share a directory among producers. One process at a time owns the
  directory.
- `slab_format` and `slab_layout` define every byte (docs/formats.md). `files` makes all system calls.
"""

from kvoffload.tiers.disk.disk_tier import DiskTier

__all__ = ["DiskTier"]
