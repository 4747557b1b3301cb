"""A state machine over a tiered manager: every order of calls and completions."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from kvoffload.admission.reuse import ReuseAdmission
from kvoffload.core.plans import ON_DEVICE_EVICTION, StorePlan
from kvoffload.core.request import RequestContext
from kvoffload.testing.audit import audit
from support.letters import HIT, MISS, keys
from support.scripted_tier import ScriptedSharedTier
from support.tiering_rig import BLOCK_BYTES, RETRY, Rig

LETTERS = "abcdefghijkl"
runs = st.tuples(st.integers(0, 8), st.integers(1, 8)).map(lambda run: LETTERS[run[0] : run[0] + run[1]])


class TieringMachine(RuleBasedStateMachine):
    """Random steps over real bytes: each ready block, in RAM or in a tier, has the bytes of its key."""

    requests: Bundle[RequestContext] = Bundle("requests")
    stores: Bundle[StorePlan] = Bundle("stores")

    @initialize(
        policy=st.sampled_from(["lru", "arc", "hazard"]),
        is_gated=st.booleans(),
        store=st.sampled_from(["on-compute", ON_DEVICE_EVICTION]),
        max_in_flight=st.sampled_from([0.3, 1.0]),
        recompute=st.sampled_from([None, 0.05]),
        tiers=st.integers(1, 2),
        shared=st.booleans(),
    )
    def start(
        self,
        policy: str,
        is_gated: bool,
        store: str,
        max_in_flight: float,
        recompute: float | None,
        tiers: int,
        shared: bool,
    ) -> None:
        self.rig = Rig(
            5,
            tiers=tiers,
            shared=shared,
            immediate=False,
            policy=policy,
            admission=ReuseAdmission(1, 2, 8) if is_gated else "all",
            store=store,
            max_in_flight=max_in_flight,
            recompute_s_per_block=recompute,
            deadline_s=1.0,
        )
        self.unfinished: list[RequestContext] = []
        self.in_flight: list[StorePlan] = []

    @rule(target=requests, letters=runs)
    def begin(self, letters: str) -> RequestContext:
        ctx = self.rig.begin(letters)
        self.unfinished.append(ctx)
        return ctx

    @rule(ctx=requests, letters=runs)
    def ask(self, ctx: RequestContext, letters: str) -> None:
        if ctx.finished:
            return
        num_ready, stopped_by = self.rig.ask(letters, ctx)
        if stopped_by is not RETRY:
            self.rig.load(letters[:num_ready], ctx)

    @rule(ctx=requests, letters=runs)
    def ask_key_by_key(self, ctx: RequestContext, letters: str) -> None:
        if ctx.finished:
            return
        for key in keys(letters):
            if self.rig.manager.lookup_key(key, ctx) is MISS:
                break

    @rule(target=stores, ctx=st.one_of(requests, st.none()), letters=runs)
    def store(self, ctx: RequestContext | None, letters: str) -> StorePlan | None:
        if ctx is not None and ctx.finished:
            ctx = None
        plan = self.rig.manager.prepare_store(keys(letters), ctx)
        if plan is not None:
            self.rig.pool[plan.slots] = 0xDD
            self.rig.ram.erase(plan.slots)
            self.in_flight.append(plan)
        return plan

    @rule(plan=consumes(stores), success=st.booleans())
    def complete(self, plan: StorePlan | None, success: bool) -> None:
        if plan is not None:
            self.in_flight.remove(plan)
            self.rig.manager.complete_store(self.rig.compute(plan), success)

    @rule(ctx=consumes(requests))
    def finish(self, ctx: RequestContext) -> None:
        if not ctx.finished:
            self.unfinished.remove(ctx)
            self.rig.manager.finish_request(ctx)

    @rule(data=st.data())
    def end_a_job(self, data: st.DataObject) -> None:
        jobs = [(tier, job) for tier in self.rig.tiers for job in tier.jobs]
        if jobs:
            tier, job = data.draw(st.sampled_from(jobs))
            job.fail = {key for key in job.keys if data.draw(st.integers(0, 4)) == 0}
            job.seconds = data.draw(st.sampled_from([0.001, 1.0]))
            tier.end(job)

    @rule()
    def poll(self) -> None:
        self.rig.manager.poll()

    @rule(seconds=st.sampled_from([0.1, 1.5, 20.0]))
    def wait(self, seconds: float) -> None:
        self.rig.clock.now += seconds

    @rule(letters=runs, last=st.booleans())
    def evict_from_a_tier(self, letters: str, last: bool) -> None:
        """Evict blocks; a shared tier evicts without notice to this process."""
        for key in keys(letters):
            self.rig.tiers[-last].blocks.pop(key, None)

    @rule(letters=runs)
    def another_client_writes(self, letters: str) -> None:
        if isinstance(self.rig.tiers[-1], ScriptedSharedTier):
            self.rig.below(letters, tier=-1)

    @rule(letters=runs)
    def expire_presence(self, letters: str) -> None:
        for key in keys(letters):
            self.rig.presence.pop(key, None)

    @rule(takes=st.booleans())
    def set_busy(self, takes: bool) -> None:
        self.rig.tier.takes = takes

    @rule(limit=st.integers(1, 5), last=st.booleans())
    def limit_reads(self, limit: int, last: bool) -> None:
        self.rig.tiers[-last].read_limit = limit

    @rule(letters=runs)
    def discard(self, letters: str) -> None:
        self.rig.manager.discard(keys(letters))

    @rule(chance=st.integers(0, 9))
    def reset(self, chance: int) -> None:
        if chance == 0:
            self.rig.manager.reset()

    @invariant()
    def bytes_match_keys(self) -> None:
        manager = self.rig.manager
        audit(manager)
        for key in keys(LETTERS):
            if manager.lookup_key(key) is HIT:
                plan = manager.pin([key])
                assert self.rig.pool[plan.slots].tobytes() == key * BLOCK_BYTES
                manager.unpin(plan)
        for tier in self.rig.tiers:
            for key, block in tier.blocks.items():
                assert block == key * BLOCK_BYTES

    def teardown(self) -> None:
        """End all requests and jobs, and check that nothing remains."""
        if not hasattr(self, "rig"):
            return
        for plan in self.in_flight:
            self.rig.manager.complete_store(self.rig.compute(plan))
        for ctx in self.unfinished:
            self.rig.manager.finish_request(ctx)
        for _ in range(3 + 2 * len(LETTERS)):  # one block after the other, if tiers may pin only one
            self.rig.end_all()
        assert self.rig.manager.settle(0.0)
        stats = self.rig.manager.stats()
        assert stats.writing == stats.condemned == 0
        assert stats.evictable == stats.ready
        assert all(not tier.open_requests for tier in self.rig.tiers)
        assert not self.rig.manager.waits
        assert not self.rig.manager.promotion.promoting


TestTieringMachine = TieringMachine.TestCase
TestTieringMachine.settings = settings(
    max_examples=settings().max_examples // 4, stateful_step_count=50, deadline=None
)
