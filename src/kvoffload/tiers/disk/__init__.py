"""The disk tier: a directory with a slab of block slots and its journal. It may forget blocks, but never
serves wrong bytes.

`tier` implements `SecondaryTier`; `placement` maps its blocks to slots; `pipeline` moves blocks; `committer`
makes them durable. `slab` reads and writes blocks; `journal` and `recovery` record which blocks exist.
`directory`, `room` and `lock` share a directory among producers, with one owner at a time. `format` defines
every byte (docs/formats.md); `files` makes all system calls.
"""

from kvoffload.tiers.disk.tier import DiskTier

__all__ = ["DiskTier"]
