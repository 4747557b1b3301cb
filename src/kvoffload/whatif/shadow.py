"""A shadow: a manager that holds no bytes of blocks, and serves the sampled blocks of every request.

The manager and its policy have the same classes as the serving manager and its policy. After a request has
finished in the serving manager, the shadow makes the same calls for it: look up, store the missing blocks,
finish. If the policy is compiled and there is no admission rule, a kernel makes the calls for many requests
without the GIL.
"""

from __future__ import annotations

import time

import numpy as np

from kvoffload.core.admission import ADMISSIONS, Admission, create_admission
from kvoffload.core.hints import Hints
from kvoffload.core.kernels import whole_requests
from kvoffload.core.kernels.whole_requests import ASKED_END, END_ROW, ON_DEVICE
from kvoffload.core.manager import OffloadingManager
from kvoffload.core.policy import EvictionPolicy
from kvoffload.core.request import RequestContext
from kvoffload.core.state import Entering, blank_store
from kvoffload.errors import PolicyError
from kvoffload.structures.index import MAX_POSITIONS
from kvoffload.structures.keys import Keys
from kvoffload.whatif.estimate import GROUPS, Counted
from kvoffload.whatif.sample import KEY_BYTES, Sample
from kvoffload.whatif.setting import WhatIf


def _scaled(admission: str | type[Admission] | None, one_in: int) -> type[Admission] | None:
    """Return the class of an admission rule for a shadow; None if there is no rule.

    If the rule remembers at most `max_tracker_size` keys, the returned class remembers fewer by the factor
    `one_in`, because the shadow sees fewer keys.
    """
    if admission is None:
        return None
    rule = ADMISSIONS.find(admission)
    tracked: int | None = getattr(rule, "max_tracker_size", None)
    if tracked is None:
        return rule
    return type(rule.__name__, (rule,), {"max_tracker_size": max(1, round(tracked / one_in))})


class Shadow:
    """A manager without bytes that shows the effect of a setting on a sample of the blocks.

    Args:
        setting: the changes to the serving manager's settings.
        capacity_blocks: number of slots of the serving manager. The shadow has
            ``capacity_blocks * setting.capacity / one_in`` slots.
        one_in: one block in `one_in` is in the sample.
        most_slots: largest number of slots of the shadow.
        policy, admission, refuses_unasked: settings of the serving manager, see `OffloadingManager`.

    Attributes:
        manager: the shadow's manager.
        missed: array with the number of misses in each group of keys. A miss is a sampled block that was
            looked up but was not ready.

    Thread: one at a time.
    """

    def __init__(
        self,
        setting: WhatIf,
        capacity_blocks: int,
        one_in: int,
        *,
        most_slots: int,
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
            key_bytes=KEY_BYTES,
            policy=setting.policy or policy,
            admission=create_admission(rule, KEY_BYTES, slots),
        )
        if not refuses_unasked:
            self.manager.refuse_only_if_asked()
        self.missed = np.zeros(GROUPS, np.int64)
        self._before = np.zeros(GROUPS, np.int64)
        self._cache = self.manager.memory
        self._room, self._new = 0, blank_store(1, KEY_BYTES)

    @property
    def is_compiled(self) -> bool:
        """True if the policy is compiled and there is no admission rule."""
        return self.manager.store_mode.is_compiled

    def live(self, sample: Sample, keys: Keys, path: RequestContext) -> None:
        """Replay all requests of a sample, each from its first lookup to its end.

        Args:
            sample: the requests.
            keys: keys of the sampled blocks of all requests, one request after the other.
            path: a context with room for the keys of the longest request. Its contents are overwritten.
        """
        recorded = sample.state
        if not self.is_compiled:
            self._live_by_calls(sample, keys)
            return
        if path.room > self._room:
            self._room = path.room
            self._new = blank_store(self._room, KEY_BYTES)
            Entering.over(self._new).admitted = not self.manager.policy_may_refuse
        result = whole_requests.live_all(
            self._cache,
            path.memory,
            self._new,
            keys.words,
            recorded.requests,
            recorded.num_requests,
            self.missed,
        )
        if result < 0:
            raise PolicyError(f"policy {self.manager.policy.name!r} named an invalid victim")

    def _live_by_calls(self, sample: Sample, keys: Keys) -> None:
        """Replay the sample: call the shadow's manager for each request. Needed if the policy is
        in Python or there is an admission rule.

        Releases the GIL for a moment after each request.
        """
        recorded, start = sample.state, 0
        for row, hints in zip(recorded.requests[: recorded.num_requests].tolist(), sample.hints, strict=True):
            end = row[END_ROW]
            self._live_one(keys[start:end], row[ON_DEVICE], row[ASKED_END], hints)
            start = end
            time.sleep(0)

    def _live_one(self, keys: Keys, first: int, asked: int, hints: Hints) -> None:
        manager = self.manager
        ctx = manager.begin_request("", keys, hints=hints.at_begin)
        end = first + manager.lookup(keys[first:asked], ctx).num_ready
        whole_requests.count_by_group(keys.words[end:asked], self.missed)
        plan = manager.prepare_store(keys, ctx)
        if plan is not None:
            manager.complete_store(plan)
        manager.finish_request(ctx, hints=hints)

    def counted(self) -> Counted:
        """Return the counts of the present and the previous period. `rotate` begins a period."""
        return Counted(self.setting.label, self.missed + self._before, self.manager.capacity_blocks)

    def rotate(self) -> None:
        """Begin a new period of counting. `counted` covers the new and the previous period."""
        self._before, self.missed = self.missed, np.zeros(GROUPS, np.int64)

    def reset(self) -> None:
        """Forget all blocks. The counts are kept."""
        self.manager.reset()
