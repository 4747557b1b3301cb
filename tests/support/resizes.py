"""Resizes of the used part of a pool, as rules of a state machine."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule

from kvoffload.testing.state_machine import ManagerMachine, Request


def with_resizes(machine: type[ManagerMachine]) -> type[ManagerMachine]:
    """Add rules to a state machine that change the number of slots in use."""

    class Resizing(machine):  # type: ignore[misc, valid-type]
        wanted = 0

        @rule(share=st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0, 1.0]))
        def begin_resize(self, share: float) -> None:
            # A resize below the minimums of a `TenantMachine` is refused.
            quotas = getattr(self, "quotas", None) or {}
            least = sum(quota.min_blocks for quota in quotas.values())
            self.wanted = max(1, least, round(share * self.manager.capacity_blocks))
            before = self.manager.counters()
            self.manager.begin_resize(self.wanted)
            assert self.manager.counters() == before

        @rule(num_blocks=st.integers(1, 4))
        def advance_resize(self, num_blocks: int) -> None:
            """Evict at most `num_blocks` blocks: only unpinned, readable blocks, duplicates first."""
            before, expected = self.manager.counters(), {k for keys in self.waiting.values() for k in keys}
            may_leave = {key for key in self.state if self._is_evictable(key)}
            goes_on = self.manager.advance_resize(num_blocks)
            after = self.manager.counters()
            evicted = {key for key in self.state if not self.manager.contains([key])[0]}
            assert evicted <= may_leave
            assert len(evicted) == after.evicted - before.evicted <= num_blocks
            assert evicted <= {*self.duplicates} or {*self.duplicates} & may_leave <= evicted
            if len(evicted - {*self.duplicates}) <= len(may_leave - expected - {*self.duplicates}):
                assert not (evicted & expected) - {*self.duplicates}, "expected blocks were evicted first"
            assert goes_on == (after.capacity != (self.wanted or self.manager.capacity_blocks))
            if goes_on and not self.manager.store_mode.cache.has_tenants:
                # Evicted: the requested number, all evictable blocks, or fewer because slots were free.
                assert len(evicted) == num_blocks or evicted == may_leave or before.free
            self._unmark_duplicates([*evicted])
            for key in evicted:
                del self.state[key], self.slot_of[key]

        @invariant()
        def unused_slots_stay_unused(self) -> None:
            slots = self.manager.slots
            assert not {*self.slot_of.values()} & {*slots.unused().tolist()}
            assert self.manager.usable_blocks == self.manager.capacity_blocks - slots.num_unused

        def _limit(
            self, request: Request, num_missing: int, may_leave: set[bytes], num_free: int
        ) -> tuple[int, int]:
            room: tuple[int, int] = super()._limit(
                request, num_missing, may_leave, num_free - self.manager.slots.num_unused
            )
            return room

    made: Any = Resizing
    return made  # type: ignore[no-any-return]
