"""The shadows of one serving manager: their common sample, their work, their estimates.

The owner of the serving manager reports each finished request in one short call, which records the request's
sampled blocks. The shadows replay all recorded requests later, in one call per shadow, which another thread
may make. A request that exceeds the limits of the sample is left out and counted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvoffload.core.admission import DEFAULT_ADMISSION, Admission
from kvoffload.core.hints import Labels
from kvoffload.core.policy import DEFAULT_POLICY, EvictionPolicy
from kvoffload.core.request import RequestContext, room_for
from kvoffload.errors import ConfigError, Problems, check_integer
from kvoffload.whatif.estimate import Estimate, estimates
from kvoffload.whatif.sample import KEY_BYTES, Sample
from kvoffload.whatif.setting import MOST_ONE_IN, WhatIf
from kvoffload.whatif.shadow import Shadow

ONE_IN = 8
"""Default sampling rate. One block in `ONE_IN` is sampled."""
ENOUGH_REQUESTS, ENOUGH_BLOCKS = 1024, 8192
"""`Shadows.work` is due if this many requests are recorded, or if they have this many sampled blocks."""


class Shadows:
    """Shadows that share a sample: a shadow with the current setting, and a shadow for each setting to try.

    Args:
        settings: the settings to try.
        capacity_blocks, policy, admission: settings of the serving manager, see `OffloadingManager`.
            `admission` must be a name or a class, because each shadow creates its own rule.
        one_in: one block in this many is sampled.
        most_blocks: number of different blocks in all requests, if known. It limits the slots of the shadows,
            because more slots would stay empty.
        refuses_unasked: see `OffloadingManager`. Must be False if the serving manager has tiers behind RAM.
        seed: selects the sampled blocks.

    Attributes:
        on_failure: called after a setting's policy or admission rule has failed, with the setting's label and
            the error. If it is None (the default), the error is raised.
        members: the shadows, first the shadow of the current setting. A failed shadow is removed.
        num_looked_up: number of looked-up blocks in the requests that the estimates cover (see `rotate`).
        num_left_out: number of requests that exceeded the limits of the sample.

    Thread: the scheduler's; while another thread runs `serve` or `reset_blocks`, only `finished`, `forget`,
    `is_due` and `is_waiting` may run. Memory: two samples, and for each shadow a manager with `one_in` times
    fewer slots.

    Raises:
        ConfigError: the shadow of a setting cannot be created. The error names the setting.
    """

    def __init__(
        self,
        settings: Sequence[WhatIf],
        capacity_blocks: int,
        *,
        policy: str | type[EvictionPolicy] = DEFAULT_POLICY,
        admission: str | type[Admission] | None = DEFAULT_ADMISSION,
        one_in: int = ONE_IN,
        most_blocks: int = 1 << 60,
        refuses_unasked: bool = True,
        seed: int = 0,
    ) -> None:
        self.one_in, self.seed = check_integer("what_if_sample", one_in, MOST_ONE_IN), seed
        self.on_failure: Callable[[str, Exception], None] | None = None
        self.members, problems = list[Shadow](), Problems("what_if")
        for number, setting in enumerate((WhatIf(), *settings)):
            with problems:
                try:
                    shadow = Shadow(
                        setting,
                        capacity_blocks,
                        one_in,
                        most_slots=2 * most_blocks // one_in + 64,
                        policy=policy,
                        admission=admission,
                        refuses_unasked=refuses_unasked,
                    )
                except ConfigError as error:
                    where = f"what_if[{number - 1}]." if number else ""
                    raise ConfigError(f"{where}{error.field}", error.value, error.allowed) from None
                self.members.append(shadow)
        problems.check()
        self._recording, self._spare = (Sample(self.one_in, seed) for _ in range(2))
        self._labels, self._path = Labels(), RequestContext("", KEY_BYTES)
        self._looked_up = self._looked_up_before = self.num_left_out = 0

    @property
    def labels(self) -> list[str]:
        """The labels of the settings; the first is the current setting's."""
        return [shadow.setting.label for shadow in self.members]

    @property
    def num_looked_up(self) -> int:
        return self._looked_up + self._looked_up_before

    @property
    def is_due(self) -> bool:
        """True if enough requests are recorded for a call of `work`.

        It is inefficient to call `work` for few requests, because each call starts with cold CPU caches.
        """
        recorded = self._recording.state
        return recorded.num_requests >= ENOUGH_REQUESTS or recorded.num_keys >= ENOUGH_BLOCKS

    @property
    def is_waiting(self) -> bool:
        """True if recorded requests wait for `work`."""
        recorded = self._recording.state
        return recorded.num_requests > 0 or recorded.num_looked_up > 0

    def finished(self, ctx: RequestContext, num_skipped: int = -1, asked_end: int = -1) -> None:
        """Record a request that the serving manager has finished (`finish_request`).

        `num_skipped` and `asked_end` are arguments of `Sample.take`.

        Cost: a microsecond, and a nanosecond for each block of the request.
        """
        if not self._recording.take(ctx, self._labels, num_skipped, asked_end):
            self.num_left_out += 1

    def work(self) -> None:
        """Replay the recorded requests in all shadows."""
        self.serve(self.take())

    def take(self) -> Sample:
        """Return the recorded requests as a sample, to be passed to `serve`.

        Before this method is called again, the sample must have been served.
        """
        taken, self._recording, self._spare = self._recording, self._spare, self._recording
        return taken

    def serve(self, sample: Sample) -> None:
        """Replay the requests of a sample in all shadows, then clear the sample."""
        recorded = sample.state
        if recorded.longest > self._path.room:
            self._path = RequestContext("", KEY_BYTES, None, room_for(recorded.longest))
        self._looked_up += recorded.num_looked_up
        keys = sample.keys()
        for shadow in [*self.members] if recorded.num_requests else ():
            try:
                shadow.live(sample, keys, self._path)
            except Exception as error:
                if self.on_failure is None:
                    raise
                self._remove(shadow, error, self.on_failure)
        sample.clear()

    def _remove(self, shadow: Shadow, error: Exception, on_failure: Callable[[str, Exception], None]) -> None:
        """Remove a shadow after an error. If it has the current setting, remove all shadows.

        Without an estimate for the current setting, no other shadow can have a gain.
        """
        is_current = bool(self.members) and shadow is self.members[0]
        self.members = [] if is_current else [other for other in self.members if other is not shadow]
        on_failure(shadow.setting.label, error)

    def estimates(self) -> list[Estimate]:
        """Estimate the hit ratio of each setting, the current setting first; empty before any lookup.

        The estimates include only requests that `work` or `serve` has replayed.
        """
        if not self.members or not self.num_looked_up:
            return []
        counted = [shadow.counted() for shadow in self.members]
        return estimates(counted, self.num_looked_up, self.one_in)

    def rotate(self) -> None:
        """Start new counts. Estimates use the new counts and the previous counts, but no older ones."""
        for shadow in self.members:
            shadow.rotate()
        self._looked_up_before, self._looked_up = self._looked_up, 0

    def forget(self) -> None:
        """Forget the recorded requests."""
        self._recording.clear()

    def reset(self) -> None:
        """Forget all blocks and recorded requests, but keep the counts.

        Call this when the serving manager has forgotten its blocks.
        """
        self.forget()
        self.reset_blocks()

    def reset_blocks(self) -> None:
        """Forget the blocks of all shadows. Cost: O(slots of all shadows)."""
        for shadow in self.members:
            shadow.reset()
