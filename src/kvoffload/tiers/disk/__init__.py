"""The disk tier: a slab of slots and its journal in each directory. It may forget, but it never lies.

`tier` is the `SecondaryTier`; `volume` is one directory as the scheduler's thread sees it, `pipeline` its
threads; `slab` reads and writes blocks, `journal` and `recovery` remember which are there, `format` is every
byte of it (docs/formats.md), and `files` is the one door to the operating system.
"""

from kvoffload.tiers.disk.tier import DiskTier

__all__ = ["DiskTier"]
