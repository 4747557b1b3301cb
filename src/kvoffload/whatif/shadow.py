"""A shadow, a manager without bytes that serves the sampled blocks of every request.

The manager and its policy are of the same classes as a serving manager's. A request's whole life is run at
once when it has finished: look up, store the missing blocks, finish.
"""

from __future__ import annotations

import numpy as np

from kvoffload.core import kernels
from kvoffload.core.admission import ADMISSIONS, Admission, create_admission
from kvoffload.core.hints import NO_HINTS, Hints, Labels
from kvoffload.core.manager import OffloadingManager
from kvoffload.core.policy import EvictionPolicy
from kvoffload.core.state import Entering, blank_store
from kvoffload.errors import PolicyError
from kvoffload.structures.index import MAX_POSITIONS
from kvoffload.whatif.estimate import GROUPS, Counted
from kvoffload.whatif.sample import Sampled
from kvoffload.whatif.setting import WhatIf

_MOST_HINTS = 1024


def _scaled(admission: str | type[Admission] | None, one_in: int) -> type[Admission] | None:
    """Return the class of a rule whose tracker, if any, has room for the sampled keys of a serving rule's."""
    if admission is None:
        return None
    rule = ADMISSIONS.find(admission)
    tracked: int | None = getattr(rule, "max_tracker_size", None)
    if tracked is None:
        return rule
    return type(rule.__name__, (rule,), {"max_tracker_size": max(1, round(tracked / one_in))})


class Shadow:
    """A setting under trial.

    Args:
        setting: the changes of the serving manager's settings.
        capacity_blocks: slots of the serving manager. The shadow has `one_in` times fewer.
        most_slots: limit of the shadow's slots.
        policy, admission, key_bytes, refuses_unasked: of the serving manager, as for `OffloadingManager`.

    Attributes:
        manager: the shadow's manager.
        missed: sampled blocks that were looked up and not ready, by group of keys.

    Thread: the scheduler's.
    """

    def __init__(
        self,
        setting: WhatIf,
        capacity_blocks: int,
        one_in: int,
        *,
        most_slots: int,
        key_bytes: int,
        policy: str | type[EvictionPolicy],
        admission: str | type[Admission] | None,
        refuses_unasked: bool = True,
    ) -> None:
        self.setting = setting
        slots = round(capacity_blocks * setting.capacity / one_in)
        slots = min(max(1, slots), most_slots, MAX_POSITIONS // 2)
        rule = _scaled(setting.admission or admission, one_in)
        self.manager = OffloadingManager(
            slots,
            key_bytes=key_bytes,
            policy=setting.policy or policy,
            admission=create_admission(rule, key_bytes, slots),
        )
        if not refuses_unasked:
            self.manager.refuse_only_if_asked()
        self.missed = np.zeros(GROUPS, np.int64)
        self._before = np.zeros(GROUPS, np.int64)
        self._labels, self._numbers = Labels(), {NO_HINTS: (0, 0)}
        self._cache = self.manager.memory
        self._room, self._new = 0, blank_store(1, key_bytes)

    def live(self, sampled: Sampled) -> None:
        """Run the life of a request."""
        request, hints = sampled.request, sampled.request.hints
        if not self.manager.store_mode.is_compiled:
            self._live_by_calls(sampled)
            return
        if request.room > self._room:
            self._room = request.room
            self._new = blank_store(self._room, request.key_bytes)
            Entering.over(self._new).admitted = not self.manager.policy_may_refuse
        label, end_label = self._numbers.get(hints) or self._number(hints)
        result = kernels.live(
            self._cache, request.memory, self._new, sampled.end, label, end_label, self.missed
        )
        if result < 0:
            raise PolicyError(f"policy {self.manager.policy.name!r} named an invalid victim")

    def _number(self, hints: Hints) -> tuple[int, int]:
        """Return the numbers of a request's hints before and after its end."""
        numbers = self._labels.number(hints.at_begin), self._labels.number(hints)
        if len(self._numbers) < _MOST_HINTS:
            self._numbers[hints] = numbers
        return numbers

    def _live_by_calls(self, sampled: Sampled) -> None:
        """Run a life with a policy or an admission rule in Python."""
        manager, hints = self.manager, sampled.request.hints
        keys, first, asked = sampled.request.keys(), sampled.first, sampled.end
        ctx = manager.begin_request(sampled.request.request_id, keys, hints=hints.at_begin)
        end = first + manager.lookup(keys[first:asked], ctx).num_ready
        kernels.count_by_group(keys.words[end:asked], self.missed)
        plan = manager.prepare_store(keys, ctx)
        if plan is not None:
            manager.complete_store(plan)
        manager.finish_request(ctx, hints=hints)

    def counted(self) -> Counted:
        """Return the results since the last `rotate` but one."""
        return Counted(self.setting.label, self.missed + self._before, self.manager.capacity_blocks)

    def rotate(self) -> None:
        """Begin new counts; `counted` still includes the counts before."""
        self._before, self.missed = self.missed, np.zeros(GROUPS, np.int64)

    def reset(self) -> None:
        """Forget all blocks. The counts are kept."""
        self.manager.reset()
