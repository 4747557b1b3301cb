"""The state machine of `testing.state_machine` on several members of a pool."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import Bundle, initialize, rule

from kvoffload.core.hints import NO_HINTS, Hints
from kvoffload.core.plans import LoadPlan
from kvoffload.core.request import RequestContext
from kvoffload.testing.scripts import any_hints
from kvoffload.testing.state_machine import ManagerMachine, Request, batches
from support.node_members import Members


class MembersMachine(ManagerMachine):
    """Several members of a pool, compared with the model of one manager."""

    manager: Members
    requests: Bundle[Request] = Bundle("requests")

    @initialize()
    def start(self) -> None:
        super().start()
        self.all_requests: list[Request] = []
        self.full: set[object] = set()

    @rule(target=requests, numbers=batches, hints=any_hints)
    def begin(self, numbers: list[int], hints: Hints = NO_HINTS) -> Request:
        request: Any = super().begin(numbers, hints)
        self.all_requests.append(request)
        return request  # type: ignore[no-any-return]

    @rule(request=Bundle("requests"))
    def expect(self, request: Request) -> None:
        if request.ctx is not None:
            self.manager.expect(request.ctx)
            self.waiting.setdefault(request.ctx, [])
            if not self._expect_all(request.ctx):
                self.full.add(request.ctx.owner)

    def _expect_all(self, ctx: RequestContext) -> bool:
        """Expect the keys of a request, head first, within the share of its member."""
        room = self.manager.capacity_blocks * 7 // 8
        share = room // len(self.manager.managers)
        waiting = [other for other in self.waiting if other.owner is ctx.owner and other is not ctx]
        most = share - sum(len(self.waiting[other]) for other in waiting)
        own = self.waiting[ctx]
        for key in list(ctx.keys())[len(own) :]:
            expected = {key for keys in self.waiting.values() for key in keys}
            if len(own) >= most or len(expected | {key}) > room:
                return False
            own.append(key)
        return True

    def _end_wait(self, ctx: RequestContext) -> None:
        """Remove a waiting request; its room goes to the waiting requests of the same member."""
        if self.waiting.pop(ctx, None) is not None and ctx.owner in self.full:
            own = [other for other in self.waiting if other.owner is ctx.owner]
            if all(map(self._expect_all, own)):
                self.full.discard(ctx.owner)

    @rule(number=st.integers(0, 3))
    def kill(self, number: int) -> None:
        """Kill a member between two calls: its blocks in flight are lost, its pins are released."""
        members = self.manager.managers
        dead = self.manager.kill(number % len(members))
        for job in [job for job in self.jobs if job.plan.request.owner is dead and not job.void]:
            slots = job.plan.slots.tolist()
            if isinstance(job.plan, LoadPlan):
                self.pins.subtract(slots)
                self.condemned -= {slot for slot in slots if not self.pins[slot]}
            elif job.stale:
                self.condemned.difference_update(slots)
            else:
                for key in job.plan.keys:
                    del self.state[key], self.slot_of[key]
            job.stale, job.void = False, True
        for request in self.all_requests:
            if request.ctx is not None and request.ctx.owner is dead:
                self._end_wait(request.ctx)
                request.ctx, request.path, request.accessed = None, {}, set()
        # Each member expects the keys of its requests anew, in its own order.
        for ctx in [*self.waiting]:
            self.manager.withdraw(ctx)
        self.waiting.clear()
        self.full.clear()

    def teardown(self) -> None:
        if hasattr(self, "manager"):
            self.manager.close()
