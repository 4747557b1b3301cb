"""The disk tier: a slab of slots and its journal in a directory. It may forget blocks, but it never serves
wrong bytes.

`tier` is the `SecondaryTier`, `placement` knows where its blocks are, `pipeline` moves them, and `committer`
makes them durable; `slab` reads and writes blocks, `journal` and `recovery` record which blocks are there;
`directory`, `room` and `lock` share a directory among producers, one owner at a time; `format` defines every
byte (docs/formats.md), and `files` makes all system calls.
"""

from kvoffload.tiers.disk.tier import DiskTier

__all__ = ["DiskTier"]
