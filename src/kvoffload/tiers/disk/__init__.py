"""The disk tier: a slab of slots and its journal in a directory. It may forget blocks, but it never serves
wrong bytes.

`tier` is the `SecondaryTier`, `placement` knows where its blocks are, and `pipeline` owns its threads; `slab`
reads and writes blocks, `journal` and `recovery` record which blocks are there, `opening` and `lock` open a
directory for one owner, `format` defines every byte (docs/formats.md), and `files` makes all system calls.
"""

from kvoffload.tiers.disk.tier import DiskTier

__all__ = ["DiskTier"]
