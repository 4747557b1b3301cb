"""The state machine of a shared pool whose members have shares."""

from __future__ import annotations

from collections import Counter
from typing import Any

from hypothesis.stateful import initialize, invariant, rule

from kvoffload.core.plans import StorePlan
from kvoffload.core.tenants import Quota
from kvoffload.testing.state_machine import Job, Request, batches
from support.naive.tenants import Blocks, room_of_store
from support.node_machine import MembersMachine


class ShareMachine(MembersMachine):
    """Model of the shares.

    Attributes:
        owner: number of the member that owns each resident block.
        held_before: blocks of each member before the current store.
    """

    requests = MembersMachine.requests
    loads = MembersMachine.loads

    @initialize()
    def start(self) -> None:
        super().start()
        self.owner: dict[bytes, int] = {}
        self.held_before: Counter[int] = Counter()
        # Every stride of one block remembers a place.
        self.manager.store_mode.cache.tenants.stride = 1

    @rule(target=loads, request=requests, numbers=batches)
    def prepare_load(self, request: Request, numbers: list[int]) -> Job:
        job: Any = super().prepare_load(request, numbers)
        living, member = self.manager.shares(), self.manager.number_of(job.plan.request.owner)
        for key in job.plan.keys:
            if self.owner[key] not in living:
                self.owner[key] = member
        return job  # type: ignore[no-any-return]

    def _stored(self, request: Request, plan: StorePlan) -> None:
        member = self.manager.number_of(plan.request.owner)  # type: ignore[arg-type]
        self.owner.update(dict.fromkeys(plan.keys, member))
        after = self._held()
        for number, share in self.manager.shares().items():
            if number != member and after[number] < self.held_before[number]:
                assert after[number] >= share, f"member {number} fell below its share"

    def _limit(
        self, request: Request, num_missing: int, may_leave: set[bytes], num_free: int
    ) -> tuple[int, int]:
        self.held_before = held = self._held()
        shares = self.manager.shares()
        members = {}
        for number in {*shares, *held}:
            own = {key for key in self.state if self.owner[key] == number}
            members[str(number)] = Blocks(
                held[number], sum(map(self._is_evictable, own)), len(own & may_leave)
            )
        quotas = {str(number): Quota(share) for number, share in shares.items()}
        member = str(self.manager.number_of(request.ctx and request.ctx.owner))  # type: ignore[arg-type]
        room = room_of_store(members, quotas, member, num_missing, num_free, members.keys() - quotas.keys())
        may_leave -= {key for key in may_leave if str(self.owner[key]) not in room.givers}
        return room.room, room.usable_free

    @invariant()
    def shares_agree(self) -> None:
        held, living = self._held(), self.manager.shares()
        for manager in self.manager.managers:
            number, stats = self.manager.number_of(manager), manager.stats().tenants
            held_by_others = sum(held[other] for other in living if other != number)
            counts = {name: tenant.held for name, tenant in stats.items()}
            total = len(self.state)
            assert counts == {
                "own": held[number],
                "others": held_by_others,
                "ended": total - held[number] - held_by_others,
            }
            assert stats["own"].min == living[number]

    def _held(self) -> Counter[int]:
        return Counter(self.owner[key] for key in self.state)
