"""A tiered manager over scripted tiers, with a clock that tests advance.

Keys are letters; the bytes of a block are its letter, eight times.
"""

from __future__ import annotations

from typing import Any

from kvoffload.core.plans import LoadPlan, LookupResult, PrefixLookup, StorePlan
from kvoffload.core.request import RequestContext
from kvoffload.testing.audit import audit
from kvoffload.tiering.tiered_manager import TieredManager
from kvoffload.tiers.memory import MemoryTier
from support.letters import keys, text
from support.scripted_tier import ScriptedSharedTier, ScriptedTier

RETRY = LookupResult.RETRY


BLOCK_BYTES = 8


class Clock:
    """A clock that tests advance."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Rig:
    """A manager with tiers, its pool, and an engine that computes blocks."""

    def __init__(
        self,
        capacity: int = 4,
        *,
        tiers: int = 1,
        immediate: bool = True,
        shared: bool = False,
        **options: Any,
    ) -> None:
        self.tiers: list[ScriptedTier] = [
            ScriptedTier(BLOCK_BYTES, name=f"t{n}", immediate=immediate) for n in range(tiers)
        ]
        if shared:
            self.tiers.append(ScriptedSharedTier(BLOCK_BYTES, name="far", immediate=immediate))
        self.ram = MemoryTier(capacity, BLOCK_BYTES)
        self.pool = self.ram.pool
        self.clock = Clock()
        self.manager = TieredManager(
            capacity,
            ram=self.ram,
            tiers=self.tiers,
            key_bytes=1,
            clock=self.clock,
            **({"max_in_flight": 1.0, "enable_events": True} | options),
        )

    @property
    def tier(self) -> ScriptedTier:
        return self.tiers[0]

    @property
    def presence(self) -> dict[bytes, bool]:
        """Presence cache of the last tier; for an unshared tier, a dictionary without effect."""
        last = self.tiers[-1]
        return last.presence if isinstance(last, ScriptedSharedTier) else {}

    def begin(self, letters: str = "") -> RequestContext:
        return self.manager.begin_request("r", keys(letters))

    def compute(self, plan: StorePlan | None) -> StorePlan:
        """Fill the plan's slots, as an engine would."""
        assert plan is not None
        for key, slot in zip(plan.keys, plan.slots.tolist(), strict=True):
            self.pool[slot] = key[0]
        self.ram.seal(plan.keys, plan.slots)
        return plan

    def store(self, letters: str, ctx: RequestContext | None = None) -> StorePlan:
        plan = self.compute(self.manager.prepare_store(keys(letters), ctx))
        self.manager.complete_store(plan)
        self.manager.poll()
        return plan

    def below(self, letters: str, tier: int = 0) -> None:
        """Put blocks into a tier."""
        for key in keys(letters):
            self.tiers[tier].blocks[key] = key * BLOCK_BYTES

    def load(self, letters: str, ctx: RequestContext | None = None) -> LoadPlan:
        plan = self.manager.prepare_load(keys(letters), ctx)
        assert bytes(self.pool[plan.slots].tobytes()) == b"".join(key * BLOCK_BYTES for key in plan.keys)
        self.manager.complete_load(plan)
        return plan

    def ask(self, letters: str, ctx: RequestContext) -> tuple[int, LookupResult]:
        answer: PrefixLookup = self.manager.lookup(keys(letters), ctx)
        audit(self.manager)
        return answer.num_ready, answer.stopped_by

    def end_all(self) -> None:
        for tier in self.tiers:
            for job in [*tier.jobs]:
                tier.end(job)
        self.manager.poll()


def shared_rig(**options: Any) -> Rig:
    """Return a manager whose only tier is shared; the test ends its jobs."""
    return Rig(**({"capacity": 8, "tiers": 0, "immediate": False, "shared": True} | options))


def jobs(rig: Rig, tier: int = 0) -> list[tuple[str, str]]:
    """Return the kind and the blocks of each job of a tier."""
    kinds = {(True, False): "read", (False, False): "write", (False, True): "probe"}
    return [(kinds[job.is_read, job.pool is None], text(job.keys)) for job in rig.tiers[tier].jobs]


def end_reads(rig: Rig, seconds: float, tier: int = 0, *, failing: bool = False) -> None:
    """End all jobs; the jobs of `tier` take `seconds`, or fail."""
    for job in rig.tiers[tier].jobs:
        job.seconds = seconds
        job.fail = {*job.keys} if failing else set()
    rig.end_all()


def expect(rig: Rig, letters: str) -> RequestContext:
    """Begin a request that waits in the engine's queue."""
    ctx = rig.begin(letters)
    rig.manager.expect(ctx)
    return ctx


def fails(*_: Any) -> Any:
    """Replaces a method of a tier whose medium has failed."""
    raise OSError("out of order")
