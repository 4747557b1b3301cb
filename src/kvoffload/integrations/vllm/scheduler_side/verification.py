"""Verifies blocks in RAM before they count as hits (``verify: always``).

Owns the pending checks, and the pins that keep a verified block unchanged until its load.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

from kvoffload.core.plans import LoadPlan, LookupResult
from kvoffload.core.request import RequestContext
from kvoffload.core.slots import SlotArray
from kvoffload.errors import GoneError
from kvoffload.integrations.vllm.shared.logs import logger
from kvoffload.integrations.vllm.shared.pool import SharedPool
from kvoffload.tiering.tiered_manager import AnyManager, TieredManager
from kvoffload.tiers.contract import Checksums
from kvoffload.tiers.rate_limited_log import RateLimitedLog


class _Check(NamedTuple):
    """The check of a block for a request. Its plan pins the block from the first lookup until
    `Verifier.release`.
    """

    plan: LoadPlan
    is_sound: Future[bool]

    @property
    def found_damage(self) -> bool:
        return self.is_sound.done() and not self.is_sound.result()


Checks = dict[bytes, _Check]
"""The checks of one request, by key."""


class Verifier:
    """Verifies blocks on a separate thread.

    `lookup` returns RETRY until a block is verified, then HIT. For a damaged block `lookup` returns MISS, and
    the manager forgets the block.

    All engines of a pool together pin at most half of the usable slots for checks. At this limit `lookup`
    returns MISS. Without the limit, requests could wait for ever: for blocks that other waiting requests have
    pinned, or for more blocks than the pool has.

    Thread: the scheduler's, for all methods. Another thread runs the checks, at the speed of memory.
    """

    def __init__(self, manager: AnyManager, pool: SharedPool, on_damage: Callable[[bytes], None]) -> None:
        self._manager, self._pool, self._on_damage = manager, pool, on_damage
        self._ram = manager.ram_manager if isinstance(manager, TieredManager) else manager
        self._held, self._log = 0, RateLimitedLog(logger.name)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kvoffload-verify")

    def lookup(self, key: bytes, checks: Checks, ctx: RequestContext) -> LookupResult:
        """Verify a block that is ready in RAM, for this request: return HIT, MISS, or RETRY while the check
        runs.

        The first call for a block starts its check.
        """
        check = checks.get(key)
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
            is_sound = self._thread.submit(self._verify, plan.slots, plan.keys.digests)
            check = checks[key] = _Check(plan, is_sound)
            self._held += 1
        if not check.is_sound.done():
            return LookupResult.RETRY
        if check.is_sound.result():
            return LookupResult.HIT
        self._release(checks, key, damaged=True)
        self._on_damage(key)
        return LookupResult.MISS

    def release(self, checks: Checks) -> None:
        """Unpin the blocks of a request, whether it has loaded them or not.

        A block whose check is still pending stays in RAM. The next request that needs the block checks it
        again.
        """
        for key in list(checks):
            self._release(checks, key, damaged=checks[key].found_damage)

    def reset(self) -> None:
        """Set the number of pinned blocks to 0. Called after a reset of the manager, which ends all pins."""
        self._held = 0

    def close(self) -> None:
        """Cancel the queued checks, and wait for the running check."""
        self._thread.shutdown(cancel_futures=True)

    def _release(self, checks: Checks, key: bytes, *, damaged: bool) -> None:
        check = checks.pop(key)
        self._held -= 1
        self._manager.unpin(check.plan, damaged=[0] if damaged else [])

    def _verify(self, slots: SlotArray, digests: Checksums) -> bool:
        try:
            return bool(self._pool.verify(slots, digests).all())
        except Exception as error:
            text = "kvoffload: a block cannot be verified, and counts as damaged: %s: %s"
            self._log.error("verify", text, type(error).__name__, error)
            return False
