"""Common part of the adapters of kvoffload's tiers to `contract`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvoffload.structures.keys import Keys
from kvoffload.tiers.contract import NO_JOB, SecondaryTier
from peers.contract import KEY_BYTES, Pool, key, parts, until_ended

_Jobs: TypeAlias = dict[int, npt.NDArray[np.int64]]


class KvoffloadTier:
    """Reads and writes of a `Product`, for every kvoffload tier."""

    pool: Pool
    _tier: SecondaryTier

    def write(self, numbers: Sequence[int], blocks_per_job: int) -> list[bool]:
        jobs: _Jobs = {}
        stored = [False] * len(numbers)
        for piece in parts(len(numbers), blocks_per_job):
            rows = np.arange(piece.start, piece.stop)
            job, taken = self._tier.submit_write(keys_of(numbers[piece.start : piece.stop]), self.pool, rows)
            if job != NO_JOB:
                jobs[job] = rows[taken]
        self._collect(jobs, stored)
        return stored

    def read(self, numbers: Sequence[int], blocks_per_job: int) -> list[bool]:
        jobs: _Jobs = {}
        loaded = [False] * len(numbers)
        for piece in parts(len(numbers), blocks_per_job):
            keys = keys_of(numbers[piece.start : piece.stop])
            rows = np.arange(piece.start, piece.stop)[self._tier.contains(keys)]
            if len(rows):
                jobs[self._tier.submit_read(keys_of([numbers[row] for row in rows]), self.pool, rows)] = rows
        self._collect(jobs, loaded)
        return loaded

    def _collect(self, jobs: _Jobs, outcomes: list[bool]) -> None:
        in_flight = set(jobs)

        def poll() -> None:
            for result in self._tier.finished():
                in_flight.discard(result.job)
                for row, ok in zip(jobs[result.job].tolist(), result.ok.tolist(), strict=True):
                    outcomes[row] = ok

        until_ended(in_flight, poll)

    def close(self) -> None:
        self._tier.close()


def keys_of(numbers: Sequence[int]) -> Keys:
    return Keys.pack([key(number) for number in numbers], KEY_BYTES)
