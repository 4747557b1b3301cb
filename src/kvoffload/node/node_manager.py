"""An offloading manager whose state several processes share."""

from __future__ import annotations

import functools
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from kvoffload.core.expected import Expected, most_expected
from kvoffload.core.hints import NO_HINTS, Hints, Labels
from kvoffload.core.kernels import blocks
from kvoffload.core.manager import OffloadingManager
from kvoffload.core.miss_record import BUSY as BUSY_BLOCK
from kvoffload.core.plans import (
    ON_COMPUTE,
    LoadPlan,
    LookupResult,
    ManagerStats,
    OffloadingEvent,
    PrefixLookup,
)
from kvoffload.core.policy import CompiledPolicy, EvictionPolicy
from kvoffload.core.request import RequestContext
from kvoffload.core.slots import FREE, WRITING, SlotArray
from kvoffload.core.state import blank_load, entering
from kvoffload.core.tenants import Quota, Tenants
from kvoffload.errors import ConfigError, GoneError, MisuseError, UnavailableError
from kvoffload.node import mutex
from kvoffload.node.event_ring import EventRing
from kvoffload.node.keeper import MAX_MEMBERS
from kvoffload.node.mutex import ACQUIRED, BUSY, NEWS, OWNER_DIED
from kvoffload.node.pool_directory import STATE, PoolDirectory, locked
from kvoffload.node.shares import owner_of, shares_of, take_share, update_owners
from kvoffload.node.state import COUNTERS, DEPARTED, StateFile
from kvoffload.structures.index import ABSENT
from kvoffload.structures.keys import Keys
from kvoffload.structures.placement import Placement

if TYPE_CHECKING:
    from kvoffload.core.policy_change import PolicyChange

PATIENCE_S, RESET_PATIENCE_S = 0.05, 5.0
"""Longest wait for the lock, in seconds: `PATIENCE_S` in most calls, `RESET_PATIENCE_S` in rare calls such as
`reset` and `close`. After a time-out, further calls do not wait, so that a suspended process slows an
engine down only once. They wait again after a call has got the lock."""
MOST_DEFERRED = 1000
"""Limit of deferred reports of uses. There is a limit because the next call that gets the lock executes
all of them, while other engines wait."""
REPORT_S = 1.0
"""Seconds without the lock after which a warning is logged. Shorter waits are normal on a busy system."""
CHECK_S, GRACE_S = 0.5, 1.0
"""Interval of the checks for dead engines, and delay from an engine's end to the reuse of its slots, in
seconds. During the delay, a device may still copy to these slots."""
_UNKNOWN = -1
_BEFORE_A_CHANGE = (MisuseError, ValueError, TypeError)
"""Exceptions for wrong arguments. Methods raise them before any change, so the pool stays consistent."""
logger = logging.getLogger("kvoffload.node")


class NodeManager(OffloadingManager):
    """An `OffloadingManager` of RAM that all engines of a pool share, with one policy and one index.

    Every call holds the pool's lock. The differences from a manager of one process:

    - Another process may evict a block between `lookup` and `prepare_load`. `prepare_load` and `pin` then
      raise `GoneError`, and the caller must look the block up again. Pinned blocks are not evicted.
    - If a process is suspended (SIGSTOP) inside a call, calls of other processes time out: `lookup` returns
      MISS, and `prepare_store` returns None. Reports such as `complete_load` are deferred until a later call
      gets the lock. Once `MOST_DEFERRED` calls are deferred, further reports of uses are lost.
    - If an engine ends without `close`, another member releases its pins and slots within seconds.
    - If an engine dies inside a call, the pool is emptied, because its state may be inconsistent.
    - `reset` empties the pool for all engines. Events and `stats` cover all engines; `counters` covers only
      this engine.
    - The admission rule of each engine counts only the engine's own requests.
    - Engines can have shares of the pool. A share protects an engine's blocks like the minimum quota of a
      tenant (`OffloadingManager.set_tenants`). An engine owns the blocks that it stores. Blocks of ended
      engines are evicted first, unless a running engine loads the block and thereby becomes its owner.

    Args:
        directory: the membership in the pool. `close` does not end this membership.
        share_blocks: number of blocks of this engine that other engines cannot evict while this engine runs.
            Other engines may use the unfilled part of the share.
        capacity_blocks, policy, key_bytes, block_size: see `OffloadingManager`. All members must give equal
            values.
        admission, enable_events, medium: see `OffloadingManager`.
        clock: monotonic seconds.

    Attributes:
        num_timeouts: calls that did not get the lock in time.

    Thread: use one thread in each process. Cost of a call, in addition to the cost in an `OffloadingManager`:
    0.5 to 1.5 us for up to 64 blocks, and up to 3 us for 1,024 blocks.

    Raises:
        ConfigError: the policy is not compiled, the shares of the running engines exceed the pool, or `store`
            is not ``on-compute`` (a victim tier belongs to one device).
        UnavailableError: ``/dev/shm`` is full, the pool has another version, or a process is suspended inside
            a call.
    """

    def __init__(
        self,
        capacity_blocks: int,
        *,
        directory: PoolDirectory,
        share_blocks: int = 0,
        store: str = ON_COMPUTE,
        enable_events: bool = False,
        clock: Callable[[], float] = time.monotonic,
        **manager: Any,
    ) -> None:
        if store != ON_COMPUTE:
            raise ConfigError("store", store, f"allowed with a shared pool: {ON_COMPUTE}")
        super().__init__(capacity_blocks, store=store, **manager)
        policy = self.check_policy(self.policy)
        self._directory, self._clock = directory, clock
        self._is_inside = self._is_torn = self._is_closed = False
        self._next_check = math.inf
        self._patience_s, self.num_timeouts, self._stalled_since = PATIENCE_S, 0, 0.0
        self._is_reported = False
        self._deferred: list[Callable[[], Any]] = []
        self._deferred_resets: set[bool] = set()
        expected, tenants = Expected(most_expected(capacity_blocks), self.key_bytes), Tenants(capacity_blocks)
        self._state.exchange("expected", expected)
        self._state.exchange("tenants", tenants)
        self.queue = self.new_queue(self._expected_share)
        state = self._state
        parts = [
            self.index, self.slots, state.duplicates, state.known, expected, tenants, state.misses,
            policy.state,
        ]  # fmt: skip
        num_words, path = self.index.keys.shape[1], directory.path / STATE
        with locked(directory.path.parent):
            directory.begin_manager()
            is_alone = not directory.has_others()
            try:
                self._file = StateFile(path, Placement(parts), capacity_blocks, num_words, is_alone=is_alone)
            except BaseException:
                directory.end_manager()
                raise
        self._mutex, self._numbers = self._file.mutex, self._file.numbers
        self._door, self._news, self._generation = self._mutex.door, -1, self._numbers.generation
        self._event_ring = EventRing(self._file, self._contents, self.key_bytes, self.block_size, self.medium)
        try:
            self._join(enable_events, share_blocks)
        except BaseException as error:
            self._file.close()
            directory.end_manager()
            if isinstance(error, TimeoutError):
                raise UnavailableError("ram", "shared", str(error)) from None
            raise

    not_ready_error = GoneError

    def _join(self, enable_events: bool, share_blocks: int) -> None:
        with self._locked(RESET_PATIENCE_S):
            # First, because it may fail for lack of memory. Nothing may have changed for the others then.
            self._holds = self._file.adopt(self._state, self._directory.number)
            self._take_share(share_blocks)
            self._cache = self._state.memory
            self.store_mode.bind()
            self._labels = Labels(self._file.labels)
            self._listens = self._file.listening[self._directory.number] = enable_events
            if not len(self.slots.ready()):
                self._event_ring.ignore_earlier()
            self._next_check = 0.0
            self._announce()

    def _take_share(self, share_blocks: int) -> None:
        """Set the share of this engine. If this raises `ConfigError`, no share has changed."""
        number, tenants = self._directory.number, self._state.tenants
        living = [other for other in range(MAX_MEMBERS) if self._directory.is_alive(other)]
        take_share(tenants, number, share_blocks, living, self.capacity_blocks)
        self._state.member = owner_of(number)
        if share_blocks and not self._numbers.has_shares:
            tenants.recount(self.slots.filled(), self.slots.idle())
            self._numbers.has_shares = 1
        self._update_owners()

    def _update_owners(self) -> None:
        """Record the present engines as owners of blocks, after an engine has joined or left."""
        numbers = [number for number in range(MAX_MEMBERS) if self._directory.is_member(number)]
        update_owners(self._state.tenants, numbers)

    @staticmethod
    def check_policy(policy: EvictionPolicy) -> CompiledPolicy:
        """Return the policy. Raises `ConfigError` for a policy in Python, which could have private state."""
        in_python = any(name in vars(type(policy)) for name in ("expect", "observe", "finished"))
        if isinstance(policy, CompiledPolicy) and policy.is_compiled and not in_python:
            return policy
        why = "a policy in Python cannot be shared by processes; allowed: policies with compiled functions"
        raise ConfigError("policy", policy.name, why)

    def prepare_policy_change(self, policy: str | type[EvictionPolicy]) -> PolicyChange:
        """Refuse to change the policy, which all engines share. Raises: `ConfigError`."""
        raise ConfigError("policy", policy, "the policy of a shared pool cannot be changed")

    def begin_resize(self, num_blocks: int) -> None:
        """Refuse to resize the pool, which all engines share. Raises: `ConfigError`."""
        raise ConfigError("num_blocks", num_blocks, "the used part of a shared pool cannot be changed")

    # ---- the lock

    def _acquired(self, result: int, patience_s: float) -> bool:
        """Finish `try_lock`: wait for a busy lock, repair an inconsistent state, apply others' changes.

        Returns True if this process now holds the lock, False on time-out.
        """
        if result == BUSY:
            result = self._mutex.wait(patience_s)
        if result not in (ACQUIRED, NEWS, OWNER_DIED):
            self._stall()
            return False
        self._is_inside = self._is_torn = True
        try:
            if result == OWNER_DIED:
                self._numbers.num_died_inside += 1
                self._start_over("a process died inside a call")
                self._mutex.repaired()
                result = ACQUIRED
            self._catch_up()
            self._look_around()
            self._is_torn = False
        except BaseException:
            # A torn state stays locked until this process ends. Another member then repairs it.
            if result != OWNER_DIED:
                self._interrupted()
            self._exit()
            raise
        return True

    def _exit(self) -> None:
        """Release the lock, unless the state may be inconsistent."""
        self._is_inside = False
        if not self._is_torn:
            mutex.unlock(self._door)

    def _release_after_exception(self) -> None:
        """Release the lock if this process has it, after a signal handler raised during the acquisition.

        Otherwise the lock would stay locked until this process ends.
        """
        if self._is_torn or not self._mutex.holds():
            return
        self._is_inside = True
        try:
            if self._mutex.needs_repair():
                self._numbers.num_died_inside += 1
                self._interrupted()
        finally:
            self._exit()

    def _failed(self, error: BaseException) -> None:
        """Empty the pool if an exception may have left the pool's state inconsistent. Requires the lock."""
        if not isinstance(error, _BEFORE_A_CHANGE):
            self._interrupted()

    def _interrupted(self) -> None:
        self._is_torn = True
        self._start_over("a call was interrupted")
        self._is_torn = False

    @contextmanager
    def _locked(self, patience_s: float) -> Iterator[None]:
        """Hold the lock, for rare operations. Raises `TimeoutError` after `patience_s` seconds."""
        if self._is_inside:
            yield
            return
        try:
            has_lock = self._acquired(mutex.try_lock(self._door), patience_s)
        except BaseException:
            self._release_after_exception()
            raise
        if not has_lock:
            raise TimeoutError(f"the pool's lock was not free for {patience_s:g} s: is a process stopped?")
        try:
            yield
        except BaseException as error:
            self._failed(error)
            raise
        finally:
            self._exit()

    def _stall(self) -> None:
        self.num_timeouts += 1
        self._patience_s = 0.0
        self._news = _UNKNOWN
        self._mutex.forget()
        now = self._clock()
        self._stalled_since = self._stalled_since or now
        if now - self._stalled_since >= REPORT_S and not self._is_reported:
            self._is_reported = True
            logger.warning(
                "kvoffload: a process of the pool %s does not release the lock; until it does, nothing is "
                "loaded or stored", self._directory.path.name
            )  # fmt: skip

    def _catch_up(self) -> None:
        """Apply the changes of other members (`Numbers.news`), then run the deferred calls."""
        if self._stalled_since:
            seconds, self._stalled_since = self._clock() - self._stalled_since, 0.0
            self._patience_s = PATIENCE_S
            if self._is_reported:
                self._is_reported = False
                logger.warning("kvoffload: the pool's lock is free again after %.1f s", seconds)
        if self._news != self._numbers.news:
            self._news = self._numbers.news
            self._mutex.heard()
            self._epoch = self._numbers.epoch
            self._state.has_tenants = self._numbers.has_shares
            self.num_members = max(1, self._directory.num_members)
            self._events = self._event_ring if self._file.listening.any() else None
            if self._generation != self._numbers.generation:
                self._generation = self._numbers.generation
                self.queue.renew()
        deferred, self._deferred = self._deferred, []
        self._deferred_resets.clear()
        for call in deferred:
            try:
                call()
            except Exception as error:
                # No caller can handle the error, and the next deferred calls must not be lost.
                logger.exception("kvoffload: a call that waited for the pool's lock has failed")
                self._failed(error)

    def _announce(self) -> None:
        """Announce a change. This member applies it now, others when they next acquire the lock."""
        self._numbers.news += 1
        self._catch_up()

    # ---- ends of other engines

    def _look_around(self) -> None:
        """Release pins and slots of dead engines, at most once in `CHECK_S` seconds."""
        now = self._clock()
        if now < self._next_check:
            return
        self._next_check = now + CHECK_S
        self._directory.note_use()
        for number in self._directory.dead(GRACE_S):
            self._bury(number)

    def _bury(self, number: int) -> None:
        """Release the pins and slots of a dead engine, and forget the blocks that the engine was writing."""
        holds, slots = self._file.holds_of(number), self.slots
        writing = np.flatnonzero(holds == WRITING).astype(np.int32)
        pinned = np.flatnonzero(holds > 0).astype(np.int32)
        new = writing[~slots.condemned[writing]]
        if len(new):
            self.policy.remove(new)
            plan = entering(self.index.keys_at(new), new, 0)
            plan.count = len(new)
            saved = self._holds[new].copy()
            blocks.abandon(self._cache, plan.memory)
            self._holds[new] = saved
        slots.ref_cnt[pinned] -= holds[pinned]
        idle = pinned[(slots.ref_cnt[pinned] == 0) & ~slots.condemned[pinned]]
        slots.num_evictable += len(idle)
        tenants = self._state.tenants
        if self._state.has_tenants:
            tenants.evictable[:] += np.bincount(tenants.owner[idle], minlength=len(tenants.evictable))
        slots.release(np.concatenate([pinned, writing]))
        self._file.counters[DEPARTED] += self._file.counters[number]
        self._file.counters[number] = 0
        self._file.listening[number] = False
        holds.fill(0)
        self._forget_expected()
        self._numbers.num_buried += 1
        self._directory.bury(number)
        self._update_owners()
        logger.warning(
            "kvoffload: engine %d of the pool %s has ended without leaving: %d pinned and %d unfinished "
            "slots are released", number, self._directory.path.name, len(pinned), len(writing)
        )  # fmt: skip
        self._announce()

    def _expected_share(self) -> int:
        """Return the largest number of keys that one engine's waiting requests may mark as expected."""
        return most_expected(self.capacity_blocks) // self.num_members

    def _forget_expected(self) -> None:
        """Clear the expected keys, and make each member add the keys of its waiting requests again."""
        expected = self._state.expected
        expected.keys.clear()
        expected.counts.fill(0)
        self._numbers.generation += 1

    def _start_over(self, reason: str) -> None:
        """Empty the pool, because its state may be inconsistent.

        Slots that a live engine uses stay reserved, as after any reset. All listeners receive a reset.
        """
        logger.error("kvoffload: %s of the pool %s: the pool is emptied", reason, self._directory.path.name)
        self._epoch, self._events = self._numbers.epoch, None
        self._state.has_tenants = self._numbers.has_shares
        self._empty()
        self._update_owners()
        self._event_ring.skip()
        self._forget_expected()
        self._balance_counters()
        self._numbers.news += 1
        self._mutex.forget()

    def _empty(self) -> None:
        """Forget every block. Slots that an engine pins or writes stay reserved."""
        super().reset(drop_in_flight=False)
        ref_cnt = self.slots.ref_cnt
        ref_cnt.fill(FREE)
        for number in range(MAX_MEMBERS):
            if self._directory.is_member(number):
                held = self._file.holds_of(number)
                pinned, writing = held > 0, held == WRITING
                ref_cnt[pinned] = np.maximum(ref_cnt[pinned], 0) + held[pinned]
                ref_cnt[writing] = WRITING
        self.slots.reset(drop_in_flight=False)
        self._numbers.epoch = self._epoch

    def _balance_counters(self) -> None:
        """Restore the invariant ``stored == ready + evicted + discarded`` after the pool was emptied."""
        total = dict(zip(COUNTERS, self._file.counters.sum(axis=0).tolist(), strict=True))
        missing = total["stored"] - total["evicted"] - total["discarded"]
        self._file.counters[DEPARTED, COUNTERS.index("discarded")] += missing

    # ---- calls that need more than the lock

    def begin_request(
        self, request_id: str, keys: Sequence[bytes] = (), *, hints: Hints = NO_HINTS
    ) -> RequestContext:
        """Create the context of a request (see `OffloadingManager.begin_request`).

        If the lock is not free in time, the hints are ignored.
        """
        if hints is not NO_HINTS:
            try:
                with self._locked(self._patience_s):
                    return super().begin_request(request_id, keys, hints=hints)
            except TimeoutError:
                pass
        return super().begin_request(request_id, keys)

    def reset(self, *, drop_in_flight: bool = False) -> None:
        """Forget all blocks, and all that the policy has learnt, for all engines. Cost: O(capacity).

        Slots of a transfer in flight, of any engine, stay reserved until the transfer is completed. If the
        lock is not free in `RESET_PATIENCE_S`, this engine's next call that gets the lock does the reset.

        Args:
            drop_in_flight: True if the caller guarantees that no transfer of this engine is in flight. If a
                load or store from before the reset is completed later, the completion is ignored.
        """
        try:
            with self._locked(self._patience_s and RESET_PATIENCE_S):
                self._reset(drop_in_flight)
        except TimeoutError:
            # Nothing is stored before the deferred reset, so a second reset of the same kind is not needed.
            if drop_in_flight not in self._deferred_resets:
                self._deferred_resets.add(drop_in_flight)
                self._deferred.append(lambda: self._reset(drop_in_flight))

    @property
    def has_deferred_reset(self) -> bool:
        """True while a `reset` waits for the lock."""
        return bool(self._deferred_resets)

    def _reset(self, drop_in_flight: bool) -> None:
        if drop_in_flight:
            self._holds.fill(0)
        self._epoch = self._numbers.epoch
        self._empty()
        if drop_in_flight:
            self._void_before = self._epoch
        self._announce()

    def set_tenants(self, quotas: Mapping[str, Quota]) -> None:
        """Raise `ConfigError`, because a pool has no tenants: engines own the blocks (`share_blocks`)."""
        raise ConfigError(
            "tenants", ", ".join(quotas), "allowed only without a shared pool: each engine's own RAM"
        )

    # ---- reports

    def stats(self) -> ManagerStats:
        """Return the counters of all engines, the use of the slots, and the policy's statistics.

        If an engine of the pool has a share, the result's `tenants` has three keys: ``own`` (this engine),
        ``others`` (other running engines) and ``ended`` (ended engines).
        """
        stats = super().stats()
        if self._state.has_tenants:
            stats.tenants = shares_of(self._state.tenants, self._state.member)
        for name, value in zip(COUNTERS, self._file.counters.sum(axis=0).tolist(), strict=True):
            setattr(stats, name, value)
        return stats

    def take_events(self) -> list[OffloadingEvent]:
        """Return the events of all engines since the last call, in order; [] if the lock is not free in time.

        If this engine has missed events, because it fell behind or has just joined a pool that holds blocks,
        return a reset event, then an event with the present contents.
        """
        return self._event_ring.take() if self._listens else []

    def close(self) -> None:
        """Leave the pool. Idempotent.

        Call it when no transfer is in flight; otherwise slots in flight stay reserved until all processes of
        this engine have ended. If the lock is not free in time, other members treat this engine as killed.
        """
        if self._is_closed:
            return
        self._is_closed = True
        try:
            with self._locked(self._patience_s and RESET_PATIENCE_S):
                self._leave()
        except TimeoutError as error:
            logger.warning("kvoffload: an engine leaves the pool without a report: %s", error)
        self._file.close()

    def _contents(self) -> Keys:
        return self.index.keys_at(self.slots.ready())

    def _leave(self) -> None:
        self._file.listening[self._directory.number] = False
        self.queue = self.new_queue(self._expected_share)
        self._forget_expected()
        self._announce()
        if not self._holds.any():
            self._file.counters[DEPARTED] += self._file.counters[self._directory.number]
            self._file.counters[self._directory.number] = 0
            self._directory.bury(self._directory.number)
            self._update_owners()


def _no_lock_gone(self: NodeManager, keys: Sequence[bytes], *_: Any) -> LoadPlan:
    raise GoneError("the pool's lock was not free in time: look the blocks up again")


def _no_lock_none_ready(self: NodeManager, keys: Sequence[bytes]) -> tuple[LoadPlan, SlotArray]:
    plan = LoadPlan(RequestContext("", self.key_bytes, self), [], blank_load(0), self.epoch)
    return plan, np.empty(0, np.int32)


def _no_lock_all_busy(
    self: NodeManager, ctx: RequestContext, start: int, keys: Sequence[bytes] | None = None
) -> int:
    count = ctx.length - start if keys is None else len(keys)
    self.miss_counts[BUSY_BLOCK] += count
    return count


_WITHOUT_LOCK: dict[str, Callable[..., Any]] = {
    "lookup": lambda self, keys, *_: PrefixLookup(0, LookupResult.MISS),
    "lookup_key": lambda self, key, *_: LookupResult.MISS,
    "contains": lambda self, keys, *_: np.zeros(len(keys), np.bool_),
    "slots_of": lambda self, keys: np.full(len(keys), ABSENT, np.int32),
    "ready_slots_of": lambda self, keys: np.full(len(keys), ABSENT, np.int32),
    "prepare_load": _no_lock_gone,
    "pin": _no_lock_gone,
    "pin_ready": _no_lock_none_ready,
    "prepare_store": lambda self, keys, *_, **__: None,
    "count_misses": _no_lock_all_busy,
    "keep": lambda self, keys: len(keys),
    "take_events": lambda self: [],
}
"""Name of a method -> function that replaces the method if the lock is not free in time."""
_REPEATED = ("complete_load", "complete_store", "unpin", "discard", "note_absent")
"""Methods that only report something. If the lock is not free in time, the call is deferred."""
_REPEATED_IF_FEW = ("touch", "expect", "withdraw", "finish_request")
"""Methods whose calls are deferred, too, unless `MOST_DEFERRED` calls are deferred already."""


def _with_lock(method: Callable[..., Any], otherwise: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(*arguments: Any, **keywords: Any) -> Any:
        # The tuple is passed on as it is: a signature with `self` would cost 0.07 us for another tuple.
        self = arguments[0]
        if self._is_inside:
            return method(*arguments, **keywords)
        try:
            result = mutex.try_lock(self._door)
            has_lock = not result or self._acquired(result, self._patience_s)
        except BaseException:
            self._release_after_exception()
            raise
        if not has_lock:
            return otherwise(*arguments, **keywords)
        self._is_inside = True
        try:
            return method(*arguments, **keywords) if keywords else method(*arguments)
        except BaseException as error:
            self._failed(error)
            raise
        finally:
            # `_exit`, inlined: a tenth of the cost of the lock.
            self._is_inside = False
            if not self._is_torn:
                mutex.unlock(self._door)

    return call


def _repeated(method: Callable[..., Any]) -> Callable[..., Any]:
    def later(self: Any, *arguments: Any, **keywords: Any) -> int:
        self._deferred.append(lambda: method(self, *arguments, **keywords))
        return 0

    return later


def _repeated_if_few(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that defers a call of `method` if fewer than `MOST_DEFERRED` calls are deferred.

    At the limit, reports of uses are lost. Only the removal of a request from the queue is still deferred.
    """
    name = method.__name__

    def later(self: Any, *arguments: Any, **keywords: Any) -> int:
        values = (*arguments, *keywords.values())
        ctx = next((value for value in values if isinstance(value, RequestContext)), None)
        if len(self._deferred) < MOST_DEFERRED:
            # The request may have ended meanwhile, and its end may not have been deferred.
            self._deferred.append(
                lambda: None if ctx is not None and ctx.finished else method(self, *arguments, **keywords)
            )
        elif ctx is not None and name in ("finish_request", "withdraw"):
            ctx.finished = ctx.finished or name == "finish_request"
            if self.queue.has(ctx):
                self._deferred.append(lambda: self.queue.leave(ctx))
        return 0

    return later


for _name, _answer in _WITHOUT_LOCK.items():
    setattr(NodeManager, _name, _with_lock(getattr(NodeManager, _name), _answer))
for _name in _REPEATED:
    _method = getattr(NodeManager, _name)
    setattr(NodeManager, _name, _with_lock(_method, _repeated(_method)))
for _name in _REPEATED_IF_FEW:
    _method = getattr(NodeManager, _name)
    setattr(NodeManager, _name, _with_lock(_method, _repeated_if_few(_method)))
