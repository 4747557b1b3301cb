"""Measurement of the speed of a shared tier, for `kvoffload tier bench`."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import numpy as np

from kvoffload.errors import UnavailableError
from kvoffload.structures.keys import Keys
from kvoffload.tiers.contract import NO_JOB, GroupedTier, JobResult, SharedTier
from kvoffload.tiers.memory import MemoryTier

_PROBED, _KEY_BYTES = 64, 36
_MOST_BYTES, _MOST_BLOCKS = 64 << 20, 64
_STEP_S = 0.0002


@dataclass(frozen=True, kw_only=True)
class Speeds:
    """Median speeds of a shared tier, for one block size.

    Attributes:
        num_blocks: number of blocks in a batch.
        probe_s: seconds to probe 64 blocks.
        first_s: seconds to read one block.
        put_bytes_per_s, get_bytes_per_s: speeds of writing and of reading a batch; both include checksums.
        num_wrong: number of blocks that were read with wrong bytes; 0 unless the server is faulty.
    """

    block_bytes: int
    num_blocks: int
    probe_s: float
    first_s: float
    put_bytes_per_s: float
    get_bytes_per_s: float
    num_wrong: int

    def seconds_for(self, num_bytes: float) -> float:
        """Return how many seconds a probe and then a read of `num_bytes` would take."""
        waiting_s = max(0.0, self.first_s - self.block_bytes / self.get_bytes_per_s)
        return self.probe_s + waiting_s + num_bytes / self.get_bytes_per_s

    def worth_from_bytes(self, computed_bytes_per_s: float) -> float | None:
        """Return the break-even size in bytes. A larger read is faster than computing the blocks again.

        Returns None if computing is always faster.

        Args:
            computed_bytes_per_s: number of bytes of KV cache that the engine computes in a second.
        """
        gained = 1.0 / computed_bytes_per_s - 1.0 / self.get_bytes_per_s
        return self.seconds_for(0.0) / gained if gained > 0 else None


def measure_speeds(tier: SharedTier, rounds: int, timeout_s: float) -> Speeds:
    """Measure the speeds of a tier without other users. Each round resets the tier and writes all blocks.

    Args:
        timeout_s: longest wait for a reset or a job.

    Raises: `UnavailableError` if the tier loses a block, accepts no block, or exceeds `timeout_s`.
    """
    size = tier.block_bytes
    group = tier.group_blocks if isinstance(tier, GroupedTier) else 1
    # Only whole groups are written.
    count = max(1, min(_MOST_BLOCKS, _MOST_BYTES // size) // group) * group
    keys = Keys.pack(
        [number.to_bytes(_KEY_BYTES, "big") for number in range(max(count, _PROBED))], _KEY_BYTES
    )
    if isinstance(tier, GroupedTier):
        tier.extend_path(tier.begin_request("speeds"), keys)
    pool, rows = MemoryTier(count, size).pool, np.arange(count)
    content = np.random.default_rng(1).integers(0, 256, (count, size), np.uint8)
    probes, firsts, puts, gets, num_wrong = [], [], [], [], 0
    for _ in range(rounds):
        tier.clear()
        if not tier.drain(timeout_s):
            raise UnavailableError("tier", tier.name, "it does not confirm a reset")
        pool[:] = content
        job, _ = tier.submit_write(keys[:count], pool, rows)
        puts.append(_wait(tier, job, timeout_s).seconds)
        pool[:] = 0
        gets.append(_wait(tier, tier.submit_read(keys[:count], pool, rows), timeout_s).seconds)
        num_wrong += int(np.count_nonzero((pool != content).any(axis=1)))
        firsts.append(_wait(tier, tier.submit_read(keys[:1], pool, rows[:1]), timeout_s).seconds)
        probe = _wait(tier, tier.submit_probe(keys[:_PROBED]), timeout_s, all_there=False)
        probes.append(probe.seconds)
    moved = count * size
    return Speeds(
        block_bytes=size,
        num_blocks=count,
        probe_s=statistics.median(probes),
        first_s=statistics.median(firsts),
        put_bytes_per_s=moved / statistics.median(puts),
        get_bytes_per_s=moved / statistics.median(gets),
        num_wrong=num_wrong,
    )


def _wait(tier: SharedTier, job: int, timeout_s: float, all_there: bool = True) -> JobResult:
    """Wait for the only job in flight; returns its result.

    Raises: `UnavailableError` on time-out, if `job` is `NO_JOB`, or if `all_there` is True and the result
        lacks blocks.
    """
    until = time.monotonic() + timeout_s
    while job != NO_JOB and time.monotonic() < until:
        for result in tier.finished():
            if all_there and not result.ok.all():
                lost = int(np.count_nonzero(~result.ok))
                raise UnavailableError("tier", tier.name, f"{lost} of {len(result.ok)} blocks were lost")
            return result
        time.sleep(_STEP_S)
    raise UnavailableError("tier", tier.name, "it does not answer, or accepts no blocks")
