"""What an engine knows of a request besides its blocks: labels that a policy may learn from, never orders.

Owns the words and their numbers. Does not know what a label is worth: that is for policies to find out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

NUM_COARSE, NUM_LABELS = 8, 16
_SHORTEST_S, _LONGEST_S = 1e-3, 1e9


@dataclass(frozen=True, slots=True)
class Hints:
    """What is known of a request. Every part may be missing; a wrong one costs little, because a policy
    learns what each is worth.

    Attributes:
        finish_reason: how it ended: ``stop``, ``length``, ``abort``, ``tool_calls``, or any other word.
        session_over: nobody will continue this conversation.
        priority: as the engine counts it.
        time_to_live_s: how long its blocks will be of use, at most.
        tenant: who sent it.
    """

    finish_reason: str = ""
    session_over: bool = False
    priority: int = 0
    time_to_live_s: float | None = None
    tenant: str = ""

    @property
    def at_begin(self) -> Hints:
        """The part that is known when the request begins."""
        return self if self is NO_HINTS else replace(self, finish_reason="", session_over=False)

    @property
    def at_end(self) -> Hints:
        """The part that only its end tells."""
        return self if self is NO_HINTS else Hints(self.finish_reason, self.session_over)

    def updated(self, later: Hints) -> Hints:
        """With what is known later, as far as it says anything."""
        said = {name: value for name, value in _parts(later).items() if value != getattr(NO_HINTS, name)}
        return replace(self, **said) if said else self


NO_HINTS = Hints()


def _parts(hints: Hints) -> dict[str, Any]:
    return {name: getattr(hints, name) for name in Hints.__slots__}


class Labels:
    """Numbers for the labels that requests bring: 0 means that nothing is known.

    Numbers are given as labels come, `NUM_LABELS` at most, since a policy has to learn something of each. How
    a request ended has a number of its own first; who sent it, and for how long, may divide that as long as
    there are numbers.
    """

    def __init__(self) -> None:
        self._coarse: dict[tuple[object, ...], int] = {}
        self._fine: dict[tuple[object, ...], int] = {}
        self._known: dict[Hints, int] = {NO_HINTS: 0}

    def number(self, hints: Hints) -> int:
        """The number of this label, from 0 to ``NUM_LABELS - 1``. Cost: a look into a dict."""
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
        rest = (hints.priority, octave, hints.tenant)
        number = 0
        if coarse != ("", False):
            number = _give(self._coarse, coarse, 1, NUM_COARSE)
        if rest != (0, None, ""):
            number = _give(self._fine, (number, *rest), NUM_COARSE, NUM_LABELS) or number
        return number


def _give(numbers: dict[tuple[object, ...], int], label: tuple[object, ...], first: int, stop: int) -> int:
    """Its number; the next one from `first` on if it is new, and 0 if they are all given."""
    if label not in numbers and first + len(numbers) < stop:
        numbers[label] = first + len(numbers)
    return numbers.get(label, 0)
