"""The shadows of one serving manager: their common sample, their work, their estimates.

The serving side reports each request when it has finished, in one short call. The shadows run it later, when
the caller has time. If more requests wait than fit, the newest are left out of the sample, and counted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from kvoffload.core.admission import DEFAULT_ADMISSION, Admission
from kvoffload.core.policy import DEFAULT_POLICY, EvictionPolicy
from kvoffload.core.request import RequestContext
from kvoffload.errors import ConfigError, Problems, check_integer
from kvoffload.whatif.estimate import Estimate, estimates
from kvoffload.whatif.sample import Sampled
from kvoffload.whatif.setting import MOST_ONE_IN, WhatIf
from kvoffload.whatif.shadow import Shadow

ONE_IN = 8
"""Default of `one_in`."""
ENOUGH_WAITING, MOST_WAITING = 64, 1024
"""Requests that wait for the shadows: enough for a call of `work`, and at most."""
ENOUGH_BLOCKS = 512
"""Sampled blocks of waiting requests that are enough for a call of `work`."""


class Shadows:
    """One shadow for the current setting, and one for each setting to try, on one sample.

    Args:
        settings: the settings to try.
        capacity_blocks, key_bytes, policy, admission: of the serving manager, as for `OffloadingManager`;
            the rule by its name or class, because each manager has its own rule.
        one_in: one block in this many is sampled.
        most_blocks: number of different blocks, if known; limits the slots of each shadow to the sampled
            blocks.
        refuses_unasked: as for `OffloadingManager`; False if the serving manager has tiers behind RAM.
        seed: selects the sampled blocks.
        on_failure: called with the label and the error of a setting whose policy or rule has failed. Its
            shadow is removed. None: the error is raised.

    Attributes:
        num_looked_up: looked-up blocks of the requests that the shadows have served since the last `rotate`
            but one.
        num_left_out: requests that found no room to wait.

    Thread: the scheduler's. Memory: for each shadow that of a manager with `one_in` times fewer slots.

    Raises:
        ConfigError: a setting cannot be created; names the setting.
    """

    def __init__(
        self,
        settings: Sequence[WhatIf],
        capacity_blocks: int,
        *,
        key_bytes: int = 32,
        policy: str | type[EvictionPolicy] = DEFAULT_POLICY,
        admission: str | type[Admission] | None = DEFAULT_ADMISSION,
        one_in: int = ONE_IN,
        most_blocks: int = 1 << 60,
        refuses_unasked: bool = True,
        seed: int = 0,
        on_failure: Callable[[str, Exception], None] | None = None,
    ) -> None:
        self.one_in, self.seed = check_integer("what_if_sample", one_in, MOST_ONE_IN), seed
        self.on_failure = on_failure
        self._shadows, problems = list[Shadow](), Problems("what_if")
        for number, setting in enumerate((WhatIf(), *settings)):
            with problems:
                try:
                    shadow = Shadow(
                        setting,
                        capacity_blocks,
                        one_in,
                        most_slots=2 * most_blocks // one_in + 64,
                        key_bytes=key_bytes,
                        policy=policy,
                        admission=admission,
                        refuses_unasked=refuses_unasked,
                    )
                except ConfigError as error:
                    where = f"what_if[{number - 1}]." if number else ""
                    raise ConfigError(f"{where}{error.field}", error.value, error.allowed) from None
                self._shadows.append(shadow)
        problems.check()
        self._key_bytes, self._unused = key_bytes, list[Sampled]()
        self._waiting: deque[Sampled] = deque()
        self._num_waiting_blocks = 0
        self._looked_up = self._looked_up_before = self.num_left_out = 0

    @property
    def labels(self) -> list[str]:
        """The labels of the settings; the first is the current setting's."""
        return [shadow.setting.label for shadow in self._shadows]

    @property
    def num_looked_up(self) -> int:
        return self._looked_up + self._looked_up_before

    @property
    def is_due(self) -> bool:
        """True if so many requests or sampled blocks wait that a call of `work` is worth its cold caches."""
        return len(self._waiting) >= ENOUGH_WAITING or self._num_waiting_blocks >= ENOUGH_BLOCKS

    @property
    def is_waiting(self) -> bool:
        """True if a request waits."""
        return bool(self._waiting)

    def finished(self, ctx: RequestContext, num_skipped: int = -1, asked_end: int = -1) -> None:
        """Report a request of the serving manager, after its `finish_request`.

        `num_skipped`, `asked_end`: as for `Sampled.take`.

        Cost: a nanosecond for each block of the request, and a microsecond.
        """
        if len(self._waiting) >= MOST_WAITING:
            self.num_left_out += 1
            return
        sampled = self._unused.pop() if self._unused else Sampled(self._key_bytes)
        sampled.take(ctx, self.one_in, self.seed, num_skipped, asked_end)
        if sampled.num_blocks:
            self._waiting.append(sampled)
            self._num_waiting_blocks += sampled.num_blocks
            return
        self._unused.append(sampled)
        if self._waiting:
            self._waiting[-1].num_looked_up += sampled.num_looked_up
        else:
            self._looked_up += sampled.num_looked_up

    def work(self, most_blocks: int = 1 << 60) -> None:
        """Serve waiting requests in all shadows, until they had `most_blocks` sampled blocks or more."""
        waiting, batch, num_blocks = self._waiting, list[Sampled](), 0
        while waiting and num_blocks < most_blocks:
            batch.append(waiting.popleft())
            num_blocks += batch[-1].num_blocks
        self._num_waiting_blocks -= num_blocks
        self._looked_up += sum(sampled.num_looked_up for sampled in batch)
        for shadow in [*self._shadows] if batch else ():
            try:
                for sampled in batch:
                    shadow.live(sampled)
            except Exception as error:
                if self.on_failure is None:
                    raise
                self._remove(shadow, error, self.on_failure)
        self._unused += batch

    def _remove(self, shadow: Shadow, error: Exception, on_failure: Callable[[str, Exception], None]) -> None:
        """Remove a shadow; without the current setting's, all."""
        is_current = bool(self._shadows) and shadow is self._shadows[0]
        self._shadows = [] if is_current else [other for other in self._shadows if other is not shadow]
        on_failure(shadow.setting.label, error)

    def estimates(self) -> list[Estimate]:
        """Estimate the hit ratio of each setting, the current setting's first; empty before any lookup.

        Waiting requests are not included: call `work` first to include them.
        """
        if not self._shadows or not self.num_looked_up:
            return []
        counted = [shadow.counted() for shadow in self._shadows]
        return estimates(counted, self.num_looked_up, self.one_in)

    def rotate(self) -> None:
        """Begin new counts. Estimates are of the requests served since the last rotation but one."""
        for shadow in self._shadows:
            shadow.rotate()
        self._looked_up_before, self._looked_up = self._looked_up, 0

    def reset(self) -> None:
        """Forget all blocks and waiting requests, as the serving manager does. Counts are kept."""
        self._unused += self._waiting
        self._waiting.clear()
        self._num_waiting_blocks = 0
        for shadow in self._shadows:
            shadow.reset()
