"""A fast check of a policy with short scripts. A failing script is reduced in bounded time.

In about a second the check finds the worst faults: an evicted block that was protected, a leaked slot, a
method that raises. State machines search deeper and need longer.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from kvoffload.core.hints import NO_HINTS
from kvoffload.core.manager import OffloadingManager
from kvoffload.core.plans import STORES
from kvoffload.core.policy import EvictionPolicy
from kvoffload.testing.audit import audit
from kvoffload.testing.scripts import Player, Step, random_script

_LENGTHS, _SEEDS, _CAPACITIES = (4, 8, 16, 32), range(10), (1, 3)
_MAX_REPLAYS = 300
_TEXTS = {
    "stored": "the store completes",
    "failed": "the store fails",
    "loaded": "the load completes",
    "damaged": "the load completes, its first block is damaged",
    "served": "withdraw request {}",
    "finish": "finish request {}",
}


@dataclass
class Failure:
    """A script whose last step raises `error` in a manager with these slots and this store mode."""

    script: list[Step]
    error: Exception
    capacity_blocks: int
    store: str

    def __str__(self) -> str:
        steps = [f"    {number}. {_described(step)}" for number, step in enumerate(self.script, 1)]
        error = str(self.error)
        if not isinstance(self.error, AssertionError):
            error = f"{type(self.error).__name__}: {error}"
        head = f"fails with capacity_blocks={self.capacity_blocks}, store={self.store!r} and these steps:"
        return "\n".join([head, *steps, error + _place_in_policy(self.error)])


def first_failure(make: Callable[[int, str], OffloadingManager]) -> Failure | None:
    """Play short random scripts, with an audit after each step.

    Returns the first failure, with its script shortened; None if every script succeeds.

    Args:
        make: function that takes a capacity in blocks and a store mode, and creates a manager.

    Cost: 160 scripts of 4 to 32 steps. After a failure, at most 300 more scripts.
    """
    for length, seed in product(_LENGTHS, _SEEDS):
        for capacity_blocks, store in product(_CAPACITIES, STORES):
            failure = _play(make, random_script(seed, length), capacity_blocks, store)
            if failure is not None:
                return _reduced(make, failure)
    return None


def _play(
    make: Callable[[int, str], OffloadingManager], script: list[Step], capacity_blocks: int, store: str
) -> Failure | None:
    played: list[Step] = []
    try:
        player = Player(make(capacity_blocks, store), (NO_HINTS,))
        for step in script:
            played.append(step)
            player.play(step)
            audit(player.manager)
    except Exception as error:
        return Failure(played, error, capacity_blocks, store)
    return None


def _reduced(make: Callable[[int, str], OffloadingManager], failure: Failure) -> Failure:
    """Remove steps and keys, one at a time, as long as the script raises the same type of error."""
    replays = 0
    while True:
        for script in _shorter(failure.script):
            replays += 1
            shorter = _play(make, script, failure.capacity_blocks, failure.store)
            if shorter is not None and type(shorter.error) is type(failure.error):
                failure = shorter
                break
            if replays == _MAX_REPLAYS:
                return failure
        else:
            return failure


def _shorter(script: list[Step]) -> Iterator[list[Step]]:
    for row in reversed(range(len(script))):
        yield [*script[:row], *script[row + 1 :]]
    for row, (action, number, keys) in enumerate(script):
        if len(keys) > 1:
            yield [*script[:row], (action, number, keys[:-1]), *script[row + 1 :]]


def _described(step: Step) -> str:
    action, number, keys = step
    text = _TEXTS.get(action, f"{action} blocks {keys} of request {{}}")
    return text.format(number)


def _place_in_policy(error: Exception) -> str:
    """Return the name of the innermost policy method in the error's traceback; empty if there is none."""
    for frame, line in reversed([*traceback.walk_tb(error.__traceback__)]):
        policy = frame.f_locals.get("self")
        if isinstance(policy, EvictionPolicy):
            file = Path(frame.f_code.co_filename).name
            return f", in {type(policy).__name__}.{frame.f_code.co_name}, line {line} of {file}"
    return ""
