"""How fast a disk is, through the tier that serves in production: checksums, journal and syncs included."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvoffload.calibration.samples import rate_and_latency
from kvoffload.errors import ConfigError
from kvoffload.simulate.machine import Quantity
from kvoffload.structures.keys import Keys
from kvoffload.tiers.disk import DiskTier
from kvoffload.tiers.disk.files import aligned
from kvoffload.tiers.disk.layout import LOCK_FILE_BYTES, Layout

_KEY_BYTES = 32
_TIMEOUT_S = 600.0


def disk_speed(directory: Path, block_bytes: int, num_blocks: int, repeats: int) -> dict[str, Quantity]:
    """Reads and writes of so many blocks at a time, and of one: `disk_read_bytes_per_s` and its like.

    A write has ended when its blocks would survive a power loss. Takes three times as much room as it writes
    at a time, in a directory of its own below `directory`, and leaves nothing. Raises: `ConfigError` for a
    directory that cannot be used, has no room, or fails.
    """
    with _own_directory(directory) as own:
        # For a pass, the one before it, and single blocks.
        slots = 2 * num_blocks + repeats + 2
        capacity = Layout.holding(block_bytes, _KEY_BYTES, slots).file_bytes + LOCK_FILE_BYTES
        queue_bytes = 2 * (num_blocks + 1) * max(block_bytes, 4096)
        tier = DiskTier(
            own,
            capacity,
            block_bytes,
            key_bytes=_KEY_BYTES,
            fingerprint="kvoffload calibrate",
            queue_bytes=queue_bytes,
        )
        try:
            return _passes(_Jobs(tier, directory), block_bytes, num_blocks, repeats)
        finally:
            tier.close()


def _passes(jobs: _Jobs, block_bytes: int, num_blocks: int, repeats: int) -> dict[str, Quantity]:
    seconds: dict[tuple[str, int], list[float]] = {}
    # Bytes that no disk can compress.
    pool = aligned(num_blocks * block_bytes).reshape(num_blocks, block_bytes)
    pool[:] = np.random.default_rng(0).integers(0, 256, pool.shape, np.uint8)
    for repeat in range(repeats + 1):
        for count in (num_blocks, 1):
            keys = _fresh_keys(repeat, count)
            for what, submit in (("write", jobs.write), ("read", jobs.read)):
                took = submit(keys, pool)
                if repeat:  # the first pass finds the files cold
                    seconds.setdefault((what, count), []).append(took)
    found = {}
    for what in ("read", "write"):
        many, one = seconds[what, num_blocks], seconds[what, 1]
        said = f"the disk tier {what}s blocks of {block_bytes:,} bytes"
        rate, latency = rate_and_latency(many, num_blocks * block_bytes, one, block_bytes, said)
        found[f"disk_{what}_bytes_per_s"], found[f"disk_{what}_latency_s"] = rate, latency
    return found


class _Jobs:
    """Jobs of a tier, one at a time, waited for."""

    def __init__(self, tier: DiskTier, directory: Path) -> None:
        self._tier, self._directory = tier, directory

    def write(self, keys: Keys, pool: npt.NDArray[np.uint8]) -> float:
        """Seconds until all of it is durable."""
        began = time.perf_counter()
        _, taken = self._tier.submit_write(keys, pool, np.arange(len(keys)))
        return self._wait(began, "written", bool(taken.all()))

    def read(self, keys: Keys, pool: npt.NDArray[np.uint8]) -> float:
        """Seconds until all of it is in RAM and verified."""
        began = time.perf_counter()
        self._tier.submit_read(keys, pool, np.arange(len(keys)))
        return self._wait(began, "read", True)

    def _wait(self, began: float, done: str, is_taken: bool) -> float:
        has_ended = self._tier.drain(_TIMEOUT_S)
        seconds = time.perf_counter() - began
        if not has_ended or not is_taken or not all(result.ok.all() for result in self._tier.finished()):
            raise ConfigError("disk", str(self._directory), f"a disk that works: blocks could not be {done}")
        return seconds


def _fresh_keys(repeat: int, count: int) -> Keys:
    words = np.zeros((count, _KEY_BYTES // 8), np.uint64)
    words[:, 0], words[:, 1] = np.arange(count), 2 * repeat + (count == 1)
    return Keys(words, _KEY_BYTES)


@contextlib.contextmanager
def _own_directory(directory: Path) -> Iterator[Path]:
    """A new directory below this one, removed at the end."""
    try:
        own = Path(tempfile.mkdtemp(prefix="kvoffload-calibrate-", dir=directory))
    except OSError as error:
        why = f"a directory that can be written ({error.strerror})"
        raise ConfigError("disk", str(directory), why) from None
    try:
        yield own / "tier"
    finally:
        shutil.rmtree(own, ignore_errors=True)
