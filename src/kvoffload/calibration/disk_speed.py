"""Measures a disk through the real disk tier, so that the times include checksums, journal and syncs."""

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
from kvoffload.tiers.disk.files import Files, aligned
from kvoffload.tiers.disk.slab_layout import LOCK_FILE_BYTES, Layout

_KEY_BYTES = 32
_TIMEOUT_S = 600.0


def disk_speed(
    directory: Path, block_bytes: int, num_blocks: int, repeats: int, files: Files | None = None
) -> dict[str, Quantity]:
    """Measure rate and latency of durable writes and verified reads.

    Returns the quantities ``disk_{read,write}_bytes_per_s`` and ``disk_{read,write}_latency_s``. Writes to a
    temporary directory below `directory`. Needs free disk space for at least ``2 * num_blocks + repeats + 2``
    blocks.

    Raises:
        ConfigError: the directory cannot be used, the disk has too little free space, or a read or write
            fails.
    """
    with _temporary_directory(directory) as temporary:
        # Slots for the batches of this repetition and the previous one, and for all single blocks.
        num_slots = 2 * num_blocks + repeats + 2
        tier = DiskTier(
            temporary,
            Layout.holding(block_bytes, _KEY_BYTES, num_slots).file_bytes + LOCK_FILE_BYTES,
            block_bytes,
            key_bytes=_KEY_BYTES,
            fingerprint="kvoffload calibrate",
            queue_bytes=2 * (num_blocks + 1) * max(block_bytes, 4096),
            files=files,
        )
        try:
            return _measure(_Jobs(tier, directory), block_bytes, num_blocks, repeats)
        finally:
            tier.close()


def _measure(jobs: _Jobs, block_bytes: int, num_blocks: int, repeats: int) -> dict[str, Quantity]:
    samples: dict[tuple[str, int], list[float]] = {}
    # Random bytes, because the disk cannot compress them.
    pool = aligned(num_blocks * block_bytes).reshape(num_blocks, block_bytes)
    pool[:] = np.random.default_rng(0).integers(0, 256, pool.shape, np.uint8)
    for repeat in range(repeats + 1):
        for count in (num_blocks, 1):
            keys = _new_keys(repeat, count)
            for verb, submit in (("write", jobs.write), ("read", jobs.read)):
                seconds = submit(keys, pool)
                if repeat:  # the first repetition warms up
                    samples.setdefault((verb, count), []).append(seconds)
    quantities: dict[str, Quantity] = {}
    for verb in ("read", "write"):
        label = f"the disk tier {verb}s blocks of {block_bytes:,} bytes"
        batch_s, block_s = samples[verb, num_blocks], samples[verb, 1]
        rate, latency = rate_and_latency(batch_s, num_blocks * block_bytes, block_s, block_bytes, label)
        quantities |= {f"disk_{verb}_bytes_per_s": rate, f"disk_{verb}_latency_s": latency}
    return quantities


class _Jobs:
    """Runs jobs of a tier one at a time and waits for each."""

    def __init__(self, tier: DiskTier, directory: Path) -> None:
        self._tier, self._directory = tier, directory

    def write(self, keys: Keys, pool: npt.NDArray[np.uint8]) -> float:
        """Write blocks with these keys and sync. Returns the seconds that this took."""
        start = time.perf_counter()
        _, accepted = self._tier.submit_write(keys, pool, np.arange(len(keys)))
        return self._wait(start, "written", bool(accepted.all()))

    def read(self, keys: Keys, pool: npt.NDArray[np.uint8]) -> float:
        """Read and verify the blocks with these keys. Returns the seconds that this took."""
        start = time.perf_counter()
        self._tier.submit_read(keys, pool, np.arange(len(keys)))
        return self._wait(start, "read", True)

    def _wait(self, start: float, verb: str, accepted: bool) -> float:
        is_drained = self._tier.drain(_TIMEOUT_S)
        seconds = time.perf_counter() - start
        if not is_drained or not accepted or not all(result.ok.all() for result in self._tier.finished()):
            raise ConfigError("disk", str(self._directory), f"blocks could not be {verb}: check the disk")
        return seconds


def _new_keys(repeat: int, count: int) -> Keys:
    words = np.zeros((count, _KEY_BYTES // 8), np.uint64)
    words[:, 0], words[:, 1] = np.arange(count), 2 * repeat + (count == 1)
    return Keys(words, _KEY_BYTES)


@contextlib.contextmanager
def _temporary_directory(directory: Path) -> Iterator[Path]:
    """Yield a path below `directory` at which the caller can create a directory. Delete the created directory
    at the end.
    """
    try:
        temporary = Path(tempfile.mkdtemp(prefix="kvoffload-calibrate-", dir=directory))
    except OSError as error:
        allowed = f"allowed: a writable directory ({error.strerror})"
        raise ConfigError("disk", str(directory), allowed) from None
    try:
        yield temporary / "tier"
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
