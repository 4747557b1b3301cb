"""Verification of blocks in RAM before they count as hits (``verify: always``).

Owns the pending checks, and the pins that keep a verified block unchanged until its load.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np

from kvoffload.core.plans import LoadPlan, LookupResult
from kvoffload.core.request import RequestContext
from kvoffload.errors import GoneError
from kvoffload.integrations.vllm.shared.pool import SharedPool
from kvoffload.tiering.tiered_manager import AnyManager, TieredManager
from kvoffload.tiers.contract import Checksums


@dataclass(eq=False)
class _Check:
    """The check of a block for a request. The block is pinned from the first lookup until `release`."""

    key: bytes
    plan: LoadPlan
    digests: Checksums
    sound: bool | None = None


@dataclass(eq=False)
class Checks:
    """The checks of one request."""

    by_key: dict[bytes, _Check] = field(default_factory=dict)


class Verifier:
    """Verifies blocks on a thread.

    `lookup` returns RETRY until a block is verified, then HIT. For a damaged block `lookup` returns MISS, and
    the manager forgets the block.

    All engines of a pool together pin at most half of the usable slots for checks. Beyond this limit `lookup`
    returns MISS. Without the limit requests could wait forever for each other's blocks, or for more blocks
    than the pool has.

    Thread: all methods on the scheduler's. One more thread runs the checks, at memory speed.
    """

    def __init__(self, manager: AnyManager, pool: SharedPool, on_damage: Callable[[bytes], None]) -> None:
        self._manager, self._pool, self._on_damage = manager, pool, on_damage
        self._ram = manager.ram_manager if isinstance(manager, TieredManager) else manager
        self._held = 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kvoffload-verify")

    def lookup(self, key: bytes, checks: Checks, ctx: RequestContext) -> LookupResult:
        """Return the state of a ready block for this request. Starts a check if the block has none."""
        check = checks.by_key.get(key)
        if check is not None and self._manager.ready_slots_of([key])[0] != check.plan.slots[0]:
            # The block has left the cache, and was stored again in another slot.
            self._release(checks, key, damaged=False)
            check = None
        if check is None:
            if self._held >= max(1, self._ram.usable_blocks // 2) // self._ram.num_members:
                return LookupResult.MISS
            try:
                plan = self._manager.prepare_load([key], ctx)
            except GoneError:
                return LookupResult.MISS
            check = checks.by_key[key] = _Check(key, plan, plan.keys.digests)
            self._held += 1
            self._thread.submit(self._verify, check)
        if check.sound is None:
            return LookupResult.RETRY
        if check.sound:
            return LookupResult.HIT
        self._release(checks, key, damaged=True)
        self._on_damage(key)
        return LookupResult.MISS

    def release(self, checks: Checks) -> None:
        """Unpin the blocks of a request, after the load or without a load.

        Blocks with a pending check stay in RAM. The next request checks them again.
        """
        for key in list(checks.by_key):
            self._release(checks, key, damaged=checks.by_key[key].sound is False)

    def reset(self) -> None:
        """Forget all checks. Call this after a reset: the plans of the checks are then void."""
        self._held = 0

    def close(self) -> None:
        """Cancel the queued checks, and wait for the running check."""
        self._thread.shutdown(cancel_futures=True)

    def _release(self, checks: Checks, key: bytes, *, damaged: bool) -> None:
        check = checks.by_key.pop(key)
        self._held -= 1
        self._manager.unpin(check.plan, damaged=[0] if damaged else [])

    def _verify(self, check: _Check) -> None:
        sound = False
        try:
            sound = bool(np.all(self._pool.verify(check.plan.slots, check.digests)))
        finally:
            # Also set after an error, otherwise the request would wait forever.
            check.sound = sound
