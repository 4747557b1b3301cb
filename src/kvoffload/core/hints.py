"""Hints: labels that an engine gives a request, such as tenant or priority. A policy may learn from them.

Owns the fields of hints, and the numbers that stand for hints in kernels. Does not know how useful a hint is:
a policy measures that.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, replace

import numpy as np

from kvoffload.structures.jit import U64Array

NUM_COARSE, NUM_LABELS = 8, 16
_SHORTEST_S, _LONGEST_S = 1e-3, 1e9


@dataclass(frozen=True, slots=True)
class Hints:
    """Labels of a request, all optional. A wrong label costs little, because a policy learns which labels
    help.

    Attributes:
        finish_reason: ``stop``, ``length``, ``abort``, ``tool_calls``, or any other word.
        session_over: True if the conversation will not continue.
        priority: the request's priority in the engine.
        time_to_live_s: time in seconds after which the request's blocks are useless; None if unknown.
        tenant: the user or application that sent the request.
    """

    finish_reason: str = ""
    session_over: bool = False
    priority: int = 0
    time_to_live_s: float | None = None
    tenant: str = ""

    @property
    def at_begin(self) -> Hints:
        """The part of these hints that is known when the request begins."""
        return self if self is NO_HINTS else replace(self, finish_reason="", session_over=False)

    @property
    def at_end(self) -> Hints:
        """The part of these hints that is known only when the request ends."""
        return self if self is NO_HINTS else Hints(self.finish_reason, self.session_over)

    def updated(self, later: Hints) -> Hints:
        """Return a copy of these hints. Fields that are set in `later` have the values of `later`."""
        values = {name: getattr(later, name) for name in Hints.__slots__}
        changes = {name: value for name, value in values.items() if value != getattr(NO_HINTS, name)}
        return replace(self, **changes) if changes else self


NO_HINTS = Hints()


class Labels:
    """Assigns numbers to the hints of requests. Number 0 stands for no hints, and for hints for which no
    number is left.

    Numbers are assigned in order of appearance. There are at most `NUM_LABELS`, because a policy learns each
    number separately. A number below `NUM_COARSE` stands for a combination of `finish_reason` and
    `session_over`. A higher number stands for a combination of all fields. When all higher numbers are
    assigned, further hints get the number of their `finish_reason` and `session_over` only.

    Args:
        digests: digest of each label by number, 0 for a free number; shape ``(NUM_LABELS,)``, uint64.
            Processes that share a cache share this array, so that they use the same numbers.
    """

    def __init__(self, digests: U64Array | None = None) -> None:
        self._digests = np.zeros(NUM_LABELS, np.uint64) if digests is None else digests
        self._known: dict[Hints, int] = {NO_HINTS: 0}

    def number(self, hints: Hints) -> int:
        """Return the number that stands for these hints, below `NUM_LABELS`. Cost: a dictionary lookup."""
        number = self._known.get(hints)
        if number is None:
            number = self._number(hints)
            if len(self._known) < 4096:
                self._known[hints] = number
        return number

    def _number(self, hints: Hints) -> int:
        coarse = (hints.finish_reason, hints.session_over)
        seconds = hints.time_to_live_s
        octave = None if seconds is None else round(math.log2(min(max(_SHORTEST_S, seconds), _LONGEST_S)))
        fine = (hints.priority, octave, hints.tenant)
        number = 0
        if coarse != ("", False):
            number = self._assign(coarse, 1, NUM_COARSE)
        if fine != (0, None, ""):
            number = self._assign((number, *fine), NUM_COARSE, NUM_LABELS) or number
        return number

    def _assign(self, label: tuple[object, ...], first: int, stop: int) -> int:
        """Return the number that stands for a label.

        A new label gets the next free number from `first` to ``stop - 1``, or 0 if no number is free.
        """
        digest = np.uint64(
            int.from_bytes(hashlib.blake2b(repr(label).encode(), digest_size=8).digest(), "little") | 1
        )
        for number in range(first, stop):
            if self._digests[number] == 0:
                self._digests[number] = digest
            if self._digests[number] == digest:
                return number
        return 0
