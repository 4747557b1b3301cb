"""The state machine of `testing.machine` with tenants: quotas change, and limit the victims of stores."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule

from kvoffload.core.hints import Hints
from kvoffload.core.plans import StorePlan
from kvoffload.core.tenants import OTHER, Quota
from kvoffload.testing.state_machine import ManagerMachine, Request, batches
from support.naive.tenants import Blocks, room_of_store

NAMES = ("a", "b", "c")
known_tenants = st.sampled_from(["", *NAMES, "unknown"])


class TenantMachine(ManagerMachine):
    """Rules and model for tenants.

    Attributes:
        owner: the model: tenant of each resident block.
        wanted: size of the last resize in blocks, which limits the minimums; 0 without a resize.
        quotas: the model: quotas by name; None until the first change.
        tenant_of: tenant of each request that had a quota when the request began.
        held_before: blocks of each tenant before the current store.
        evicted_before: blocks that were evicted before the first change of quotas.
    """

    requests = ManagerMachine.requests
    wanted = 0

    @initialize()
    def start(self) -> None:
        super().start()
        self.owner: dict[bytes, str] = {}
        self.quotas: dict[str, Quota] | None = None
        self.tenant_of: dict[Any, str] = {}
        self.held_before: dict[str, int] = {}
        self.evicted_before = 0

    @rule(numbers=st.lists(st.tuples(st.integers(0, 3), st.none() | st.integers(1, 4)), max_size=4))
    def set_tenants(self, numbers: list[tuple[int, int | None]]) -> None:
        remaining, quotas = self.wanted or self.manager.capacity_blocks, {}
        for name, (low, high) in zip([*NAMES, OTHER], numbers, strict=False):
            low = min(low, remaining)
            remaining -= low
            quotas[name] = Quota(low, None if high is None else max(1, low, high))
        self.manager.set_tenants(quotas)
        if quotas or self.quotas is not None:
            if self.quotas is None:
                self.evicted_before = self.manager.counters().evicted
            # Every stride of one block remembers a place, and two lists can share a row of them.
            self.manager.store_mode.cache.tenants.stride = 1
            self.quotas = quotas

    @rule(target=requests, numbers=batches, tenant=known_tenants)
    def begin_as(self, numbers: list[int], tenant: str) -> Request:
        return self.begin(numbers, Hints(tenant=tenant))

    def _begun(self, request: Request, hints: Hints) -> None:
        if hints.tenant in self._quotas():
            self.tenant_of[request.ctx] = hints.tenant

    def _stored(self, request: Request, plan: StorePlan) -> None:
        tenant = self.tenant_of.get(request.ctx, OTHER)
        self.owner.update(dict.fromkeys(plan.keys, tenant))
        after = self._held()
        for name, quota in self._quotas().items():
            grown = after[name] - self.held_before[name]
            if name != tenant and grown < 0:
                assert after[name] >= quota.min_blocks, f"{name} fell below its minimum"
            if quota.max_blocks is not None and grown > 0:
                assert after[name] <= quota.max_blocks, f"{name} grew beyond its maximum"

    def _limit(
        self, request: Request, num_missing: int, may_leave: set[bytes], num_free: int
    ) -> tuple[int, int]:
        self.held_before = self._held()
        if self.quotas is None:
            return super()._limit(request, num_missing, may_leave, num_free)
        tenants = {}
        for name, held in self.held_before.items():
            own = {key for key in self.state if self._owner(key) == name}
            tenants[name] = Blocks(held, sum(map(self._is_evictable, own)), len(own & may_leave))
        tenant = self.tenant_of.get(request.ctx, OTHER)
        room = room_of_store(tenants, self.quotas, tenant, num_missing, num_free)
        may_leave -= {key for key in may_leave if self._owner(key) not in room.givers}
        return room.room, room.usable_free

    @invariant()
    def tenants_agree(self) -> None:
        stats = self.manager.stats().tenants
        if self.quotas is None:
            assert not stats
            return
        named = {name: held for name, held in self._held().items() if name in self.quotas and name != OTHER}
        assert set(stats) == {*self.quotas, OTHER}
        assert {name: stats[name].held for name in named} == named
        assert stats[OTHER].held == len(self.state) - sum(named.values())
        evicted = int(self.manager.store_mode.cache.tenants.evicted.sum())
        assert evicted == self.manager.counters().evicted - self.evicted_before

    def _quotas(self) -> dict[str, Quota]:
        return self.quotas or {}

    def _owner(self, key: bytes) -> str:
        return self.owner[key] if self.quotas is not None else OTHER

    def _held(self) -> dict[str, int]:
        held = dict.fromkeys([*NAMES, OTHER], 0)
        for key in self.state:
            held[self._owner(key)] += 1
        return held
