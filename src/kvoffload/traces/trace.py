"""A trace in memory: requests to an LLM server as chains of block ids.

`traces.format` reads traces from files; `traces.sessions` generates them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from kvoffload.core.hints import NO_HINTS, Hints
from kvoffload.errors import ConfigError
from kvoffload.text import duration

SECONDS, MILLISECONDS = "s", "ms"
_MANY_REQUESTS = 100
"""Least number of requests for which `Trace.warnings` examines a recording."""
_SHORT_S = 60
"""Duration in seconds. If the time unit was assumed, a shorter recording of many requests is suspicious."""


def offsets_of(lengths: npt.NDArray[np.integer]) -> npt.NDArray[np.int64]:
    """Return the offsets of consecutive runs with these lengths: all starts, then the end of the last run."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])


def codes_by_appearance(
    ids: npt.NDArray[Any],
) -> tuple[npt.NDArray[Any], npt.NDArray[np.int32], npt.NDArray[np.int64]]:
    """Number distinct ids in order of first appearance.

    Returns three arrays: (1) the distinct ids in this order, (2) for each element of `ids`, the number of its
    id, (3) for each distinct id, the index of its first appearance in `ids`.
    """
    distinct, first_seen, refs = np.unique(ids, return_index=True, return_inverse=True)
    order = np.argsort(first_seen)
    code_of = np.empty(len(distinct), np.int32)
    code_of[order] = np.arange(len(distinct), dtype=np.int32)
    return distinct[order], code_of[refs.reshape(-1)], first_seen[order]


@dataclass(frozen=True)
class TraceHints:
    """Hints of all requests. Most requests have `NO_HINTS`.

    Attributes:
        different: distinct hints, in order of first appearance.
        numbers: for each request, the index of its hints in `different`; int32.
    """

    different: tuple[Hints, ...]
    numbers: npt.NDArray[np.int32]

    @classmethod
    def of(cls, hints: Iterable[Hints]) -> TraceHints | None:
        """Collect the hints of all requests, in order; None if no request has hints."""
        number_of: dict[Hints, int] = {}
        numbers = [number_of.setdefault(of_request, len(number_of)) for of_request in hints]
        if not number_of.keys() - {NO_HINTS}:
            return None
        return cls(tuple(number_of), np.array(numbers, np.int32))


@dataclass(frozen=True)
class Trace:
    """Requests in order of arrival, each a chain of block ids. Immutable; arrays are shared, not copied.

    An id identifies the whole prefix up to the end of its block. Ids are renumbered to dense *codes* in order
    of first appearance, so that arrays can be indexed by code.

    Attributes:
        name: name for reports: a file name without suffixes, or a workload.
        block_tokens: tokens in one block.
        block_ids: for each code, the block's id in the file; int64.
        refs: codes of the blocks of all requests, one request after the other; int32.
        offsets: start of each request in `refs`, then the end of the last request; int64. The blocks of
            request `i` are ``refs[offsets[i]:offsets[i + 1]]``.
        timestamps_ms: arrival time of each request; int64.
        output_tokens: number of generated tokens of each request; int64.
        skipped_lines: number of bad lines that were skipped.
        time_unit: unit of the times in the file, ``s`` or ``ms``, as the file or the user states it. Empty if
            the unit is not stated; then ms is assumed.
        hints: hints of the requests; None if there are none.
        prompt_tokens: length of each prompt, including the tokens after its last whole block; int64. None if
            the source counts only whole blocks.
        assumed: assumptions that the conversion to this file made; empty for none. They are also part of
            `name`.
        sessions: for each request, the number of its session, or -1 if the recording does not name it; int32.
            None if the recording names no sessions.
        served_tokens: for each cache of the recorded server (``gpu``, ``host``, ...), an array with the
            number of prompt tokens that it served to each request; int64. None if the recording lacks them.
    """

    name: str
    block_tokens: int
    block_ids: npt.NDArray[np.int64]
    refs: npt.NDArray[np.int32]
    offsets: npt.NDArray[np.int64]
    timestamps_ms: npt.NDArray[np.int64]
    output_tokens: npt.NDArray[np.int64]
    skipped_lines: int = 0
    time_unit: str = MILLISECONDS
    hints: TraceHints | None = None
    prompt_tokens: npt.NDArray[np.int64] | None = None
    sessions: npt.NDArray[np.int32] | None = None
    assumed: str = ""
    served_tokens: Mapping[str, npt.NDArray[np.int64]] | None = None

    @property
    def requests(self) -> int:
        return len(self.offsets) - 1

    @property
    def block_refs(self) -> int:
        """Number of block references. Each block counts once for every request that has it."""
        return len(self.refs)

    @property
    def unique_blocks(self) -> int:
        """Number of different blocks."""
        return len(self.block_ids)

    @property
    def longest_request(self) -> int:
        """Number of blocks of the longest request; 0 for an empty trace."""
        return int(np.diff(self.offsets).max(initial=0))

    @property
    def request_of(self) -> npt.NDArray[np.int64]:
        """Index of the request of each block reference."""
        return np.repeat(np.arange(self.requests), np.diff(self.offsets))

    @property
    def depths(self) -> npt.NDArray[np.int64]:
        """Depth of each block reference, that is, the number of blocks before it in its request."""
        return np.arange(self.block_refs) - np.repeat(self.offsets[:-1], np.diff(self.offsets))

    @property
    def share_outside_blocks(self) -> float | None:
        """Share of the prompt tokens that are in no whole block; None if `prompt_tokens` is None."""
        if self.prompt_tokens is None:
            return None
        return 1 - self.block_refs * self.block_tokens / max(1, int(self.prompt_tokens.sum()))

    @property
    def duration_s(self) -> float:
        """Time from the first arrival to the last, in seconds; 0 if the recording has no times."""
        times = self.timestamps_ms
        return int(times.max() - times.min()) / 1000 if len(times) else 0.0

    @property
    def has_one_session(self) -> bool:
        """True if the recording names the same session in every request."""
        if self.sessions is None or not self.requests or self.sessions[0] < 0:
            return False
        return bool((self.sessions == self.sessions[0]).all())

    @property
    def warnings(self) -> list[str]:
        """Sentences about defects of the recording that change results; empty if there are none."""
        if self.requests < _MANY_REQUESTS:
            return []
        warnings = []
        if not self.time_unit and 0 < self.duration_s < _SHORT_S:
            warnings.append(
                f"the times of {self.name} are read as ms, so its {self.requests:,} requests arrive within "
                f"{duration(self.duration_s)}: give --time-unit s if the times are in seconds, or "
                "--time-unit ms if this is right"
            )
        if self.has_one_session:
            warnings.append(
                f"all {self.requests:,} requests of {self.name} name the same session: they count as one "
                "conversation. If the field is a constant, remove it; sessions are then inferred."
            )
        return warnings

    def check_blocks(self, name: str) -> None:
        """Raise `ConfigError` if no request has a block. The error calls the trace `name`."""
        if self.block_refs == 0:
            why = f"it must have a request of at least one block ({self.block_tokens} tokens)"
            raise ConfigError("trace", name, why)

    def places_of(
        self, requests: npt.NDArray[np.integer]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return the positions in `refs` of the blocks of these requests, as two arrays, offsets and indices.

        The indices are the positions, one request after the other. Like `Trace.offsets`, the offsets are the
        start of each request in the indices, then the end of the last request.
        """
        lengths = np.diff(self.offsets)[requests]
        offsets = offsets_of(lengths)
        starts = np.repeat(self.offsets[:-1][requests] - offsets[:-1], lengths)
        return offsets, starts + np.arange(offsets[-1])

    def of_requests(self, requests: npt.NDArray[np.integer]) -> Trace:
        """Return a trace of only these requests, in this order. Cost: 0.1 s per million block references."""
        offsets, places = self.places_of(requests)
        refs = self.refs[places]
        first = np.full(self.unique_blocks, len(refs), np.int64)
        first[refs[::-1]] = np.arange(len(refs) - 1, -1, -1)
        by_appearance = np.argsort(first, kind="stable")[: np.count_nonzero(first < len(refs))]
        code_of = np.empty(self.unique_blocks, np.int32)
        code_of[by_appearance] = np.arange(len(by_appearance), dtype=np.int32)
        hints = self.hints and TraceHints(self.hints.different, self.hints.numbers[requests])
        return replace(
            self,
            block_ids=self.block_ids[by_appearance],
            refs=code_of[refs],
            offsets=offsets,
            timestamps_ms=self.timestamps_ms[requests],
            output_tokens=self.output_tokens[requests],
            hints=hints,
            prompt_tokens=None if self.prompt_tokens is None else self.prompt_tokens[requests],
            sessions=None if self.sessions is None else self.sessions[requests],
            served_tokens=self.served_tokens
            and {source: tokens[requests] for source, tokens in self.served_tokens.items()},
        )

    def hints_of(self, request: int) -> Hints:
        """Return the hints of a request."""
        return NO_HINTS if self.hints is None else self.hints.different[self.hints.numbers[request]]
