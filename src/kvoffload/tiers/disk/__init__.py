"""The disk tier: a slab of slots and its journal in a directory. It may forget, but it never lies.

`tier` is the `SecondaryTier`, `placement` says where its blocks lie, and `pipeline` is its threads; `slab`
reads and writes blocks, `journal` and `recovery` remember which are there, `opening` and `lock` make a
directory ours, `format` is every byte of it (docs/formats.md), and `files` is the one door to the operating
system.
"""

from kvoffload.tiers.disk.tier import DiskTier

__all__ = ["DiskTier"]
