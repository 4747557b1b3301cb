"""Time to open a disk tier of any size. The slab is a sparse file, so that only metadata exist.

python bench/disk_open.py --capacity 1TiB --block-bytes 64KiB --path DIRECTORY
"""

from __future__ import annotations

import argparse
import resource
import shutil
import time
from pathlib import Path

import numpy as np

from kvoffload.settings.read import parse_size
from kvoffload.tiers.disk import DiskTier
from kvoffload.tiers.disk.files import Files
from kvoffload.tiers.disk.recovery import Contents
from kvoffload.tiers.disk.slab_directory import Geometry, open_directory
from kvoffload.tiers.disk.slab_layout import Layout
from kvoffload.tiers.rate_limited_log import RateLimitedLog
from support.recording_files import SparseFiles

KEY_BYTES, FINGERPRINT = 36, "bench"


def fill(path: Path, capacity_bytes: int, block_bytes: int, files: Files) -> int:
    """Make a slab with a journal in which every slot holds a block; returns the number of slots."""
    layout = Layout.within(capacity_bytes, block_bytes, KEY_BYTES)
    log = RateLimitedLog("kvoffload.disk")
    geometry = Geometry(layout, capacity_bytes, FINGERPRINT)
    lock, slab, journal, _ = open_directory(path, geometry, files, log, None)
    contents, chance = Contents(layout), np.random.default_rng(0)
    n = layout.num_slots
    contents.generation[:] = np.arange(1, n + 1)
    contents.stamp[:] = chance.permutation(n) + 1
    contents.uses[:] = chance.integers(0, 3, n)
    contents.written_at_s[:] = int(time.time())
    contents.words[:] = chance.integers(0, 1 << 63, contents.words.shape, np.uint64)
    contents.words[:, -1] &= np.uint64(0xFFFFFFFF)
    journal.checkpoint(contents)
    slab.close()
    lock.release()
    return n


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--path", type=Path, required=True)
    parser.add_argument("--capacity", default="1TiB")
    parser.add_argument("--block-bytes", default="2MiB")
    parser.add_argument("--policy", default="lru")
    arguments = parser.parse_args()
    capacity_bytes = parse_size("capacity", arguments.capacity)
    block_bytes = parse_size("block-bytes", arguments.block_bytes)
    path, files, last = arguments.path / "kvoffload-bench-open", SparseFiles(), -1.0

    def progress(done: int, total: int) -> None:
        nonlocal last
        if time.perf_counter() - last > 1:
            last = time.perf_counter()
            print(f"  {done / 2**20:,.0f} of {total / 2**20:,.0f} MiB of metadata")

    path.mkdir(parents=True)
    try:
        n = fill(path, capacity_bytes, block_bytes, files)
        began, worked = time.perf_counter(), time.process_time()
        tier = DiskTier(
            path, capacity_bytes, block_bytes, key_bytes=KEY_BYTES, fingerprint=FINGERPRINT,
            policy=arguments.policy, files=files, progress=progress,
        )  # fmt: skip
        seconds, cpu = time.perf_counter() - began, time.process_time() - worked
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        print(
            f"{n:,} blocks of {arguments.block_bytes} ({arguments.policy}): "
            f"opened in {seconds:.2f} s ({cpu:.2f} s of CPU), {tier.stats().restored:,} restored; "
            f"at most {memory:.1f} GiB of memory"
        )
        tier.close()
    finally:
        shutil.rmtree(path)


if __name__ == "__main__":
    main()
