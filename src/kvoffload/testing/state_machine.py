"""A Hypothesis state machine that compares a manager with a model of two dicts and a list.

Hypothesis chooses when a job completes, fails or is lost, so that a single-threaded test explores the
interleavings of jobs. The model checks that every victim was evictable, that duplicates in a victim tier are
evicted first, and that nothing else changes. The model does not know in which order a policy evicts: only
tests of that policy check that the victims are *right*.

    TestMine = manager_machine(policy="mine.policies:Mine", capacity_blocks=5).TestCase
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field, replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    precondition,
    rule,
)

from kvoffload.core.admission import Admission
from kvoffload.core.hints import NO_HINTS, Hints
from kvoffload.core.manager import OffloadingManager
from kvoffload.core.plans import (
    COUNTERS,
    ON_COMPUTE,
    LoadPlan,
    LookupResult,
    ManagerStats,
    PrefixLookup,
    StorePlan,
)
from kvoffload.core.policy import EvictionPolicy
from kvoffload.core.request import RequestContext
from kvoffload.errors import MisuseError
from kvoffload.structures.keys import Keys
from kvoffload.testing.audit import audit, duplicate_slots, snapshot
from kvoffload.testing.scripts import any_hints, colliding_keys

NUM_KEYS = 20
"""Number of different keys: more than the initial size of a request's path (`core.request`), so that paths
grow."""
WRITING, READY = LookupResult.HIT_PENDING, LookupResult.HIT
_SCRATCH = ("dropped", "givers", "usable_free", "is_owed", "on_path")
"""Names of the fields that a refused store may change: a counter, and values that every store sets."""

runs = st.tuples(st.integers(0, NUM_KEYS - 1), st.integers(0, 8)).map(lambda r: [*range(r[0], sum(r))])
batches = st.one_of(runs, st.lists(st.integers(0, NUM_KEYS - 1), max_size=8))
"""Lists of key numbers: parts of a chain, as in engines, or arbitrary lists with repeats."""


@dataclass
class Request:
    """An inference request and its path so far. Stores of the request do not evict blocks of the path.

    Attributes:
        accessed: keys that the request has touched or stored.
        cut: key of the block that the policy refused. As long as this block is absent, no later block of the
            path can be stored.
    """

    ctx: RequestContext | None
    path: dict[bytes, None] = field(default_factory=dict)
    accessed: set[bytes] = field(default_factory=set)
    cut: bytes | None = None


@dataclass
class Job:
    """A transfer in flight.

    Attributes:
        stale: True after a `reset`, which has forgotten the job's blocks.
        void: True after a reset with `drop_in_flight`; then the completion of the job has no effect.
    """

    plan: LoadPlan | StorePlan
    stale: bool = False
    void: bool = False
    to_device: bool = True


class ManagerMachine(RuleBasedStateMachine):
    """The rules and the model. `manager_machine` creates subclasses.

    Attributes:
        state, slot_of: state (WRITING or READY) and slot of each key, according to the model.
        pins: number of readers of each slot.
        memory: contents of each slot; the bytes of a block are its key.
        duplicates: in a victim tier, keys of blocks that the device also holds, in order of eviction.
        waiting: the requests in the engine's queue, in order of arrival, each with its expected keys: blocks
            that the manager evicts only if no other block can leave.
        condemned: slots of forgotten blocks that a transfer still uses.
        readable: keys of readable blocks, according to the events.
    """

    make: Callable[[], OffloadingManager]

    requests: Bundle[Request] = Bundle("requests")
    stores: Bundle[Job] = Bundle("stores")
    loads: Bundle[Job] = Bundle("loads")

    @initialize()
    def start(self) -> None:
        self.manager = type(self).make()
        self.universe = colliding_keys(NUM_KEYS, self.manager.capacity_blocks, self.manager.key_bytes)
        self.state: dict[bytes, LookupResult] = {}
        self.slot_of: dict[bytes, int] = {}
        self.pins: Counter[int] = Counter()
        self.condemned: set[int] = set()
        self.memory: dict[int, bytes] = {}
        self.readable: set[bytes] = set()
        self.duplicates: list[bytes] = []
        self.jobs: list[Job] = []
        self.waiting: dict[RequestContext, list[bytes]] = {}
        self.is_full = False
        self.before = ManagerStats()

    # ---- requests

    @rule(target=requests, numbers=batches, hints=any_hints)
    def begin(self, numbers: list[int], hints: Hints = NO_HINTS) -> Request:
        keys = self._keys(numbers)
        request = Request(self.manager.begin_request("test", keys, hints=hints), dict.fromkeys(keys))
        self._begun(request, hints)
        return request

    @rule(target=requests)
    def begin_without_context(self) -> Request:
        """Create a request that passes no context to the manager. Each call then counts as a new request."""
        return Request(None)

    @rule(request=consumes(requests), hints=any_hints)
    def finish(self, request: Request, hints: Hints = NO_HINTS) -> None:
        if request.ctx is not None:
            self.manager.finish_request(request.ctx, hints=hints)
            self._end_wait(request.ctx)
            self._mark_duplicates([*request.path])
            self._expect_misuse(lambda: self.manager.finish_request(request.ctx))  # type: ignore[arg-type]
            self._expect_misuse(lambda: self.manager.touch(self.universe, request.ctx))

    @rule(request=requests)
    def expect(self, request: Request) -> None:
        if request.ctx is not None:
            self.manager.expect(request.ctx)
            self.waiting.setdefault(request.ctx, [])
            self.is_full = self.is_full or not self._expect_all(request.ctx)

    @rule(request=requests)
    def withdraw(self, request: Request) -> None:
        if request.ctx is not None:
            self.manager.withdraw(request.ctx)
            self._end_wait(request.ctx)

    @rule(request=requests, numbers=batches)
    def touch(self, request: Request, numbers: list[int]) -> None:
        keys = self._add_to_path(request, numbers)
        self.manager.touch(keys, request.ctx)
        self._mark_duplicates([key for key in keys if key not in request.accessed])
        if request.ctx is not None:
            request.accessed.update(keys)

    @rule(request=requests, numbers=batches)
    def lookup(self, request: Request, numbers: list[int]) -> None:
        keys = self._add_to_path(request, numbers)
        assert self.manager.lookup(keys, request.ctx) == self._expected_lookup(keys)
        assert self.manager.contains(keys, request.ctx).tolist() == [key in self.state for key in keys]

    @rule(request=requests, number=st.integers(0, NUM_KEYS - 1))
    def lookup_key(self, request: Request, number: int) -> None:
        [key] = self._add_to_path(request, [number])
        assert self.manager.lookup_key(key, request.ctx) is self.state.get(key, LookupResult.MISS)

    # ---- jobs

    @rule(target=stores, request=requests, numbers=batches, promoted=st.sampled_from([False, False, True]))
    def prepare_store(self, request: Request, numbers: list[int], promoted: bool = False) -> Job:
        """Start a store. If `promoted` is True, neither admission rule nor policy may refuse the blocks."""
        manager, keys = self.manager, self._add_to_path(request, numbers)
        protected = {*request.path, *keys}
        missing = [key for key in dict.fromkeys(keys) if key not in self.state]
        may_leave = {key for key in self.state if self._is_evictable(key) and key not in protected}
        num_free = manager.capacity_blocks - len(self.state) - len(self.condemned)
        room, num_free = self._limit(request, len(missing), may_leave, num_free)
        expected = {key for keys in self.waiting.values() for key in keys} - {*self.duplicates}
        if min(len(missing), room) - num_free <= len(may_leave - expected):
            may_leave -= expected
        admitted = self._admitted(missing) if self._is_victim_tier and not promoted else None
        before = snapshot(manager, ignore=_SCRATCH)
        plan = manager.prepare_store(keys, request.ctx, admitted=promoted)
        if plan is None:
            assert missing, "None, although nothing is to be stored"
            assert room == 0, f"None, although there is room for {room}"
            assert snapshot(manager, ignore=_SCRATCH) == before, "a refusal changed the manager"
            # A refused store cannot be completed, so an empty store replaces it.
            return self._add_job(manager.prepare_store([]))
        assert room or not missing, "an empty plan, although there is no room"
        assert [keys[row] for row in plan.rows] == list(plan.keys), "rows do not match the keys"
        evicted = list(plan.evicted)
        assert len(set(evicted)) == len(evicted) == max(0, len(plan.keys) - num_free)
        assert may_leave.issuperset(evicted), f"evicted, although protected: {set(evicted) - may_leave}"
        first_to_leave = [key for key in self.duplicates if key in may_leave]
        assert evicted[: len(first_to_leave)] == first_to_leave[: len(evicted)], (
            "duplicates did not leave first"
        )
        num_given = num_free + len(first_to_leave)
        if promoted:
            assert plan.keys == missing[:room], "not all blocks with room are stored"
            assert plan.num_refused == 0, "admitted blocks were refused"
            assert plan.num_dropped == len(missing) - len(plan.keys)
        elif admitted is None and plan.num_refused == len(missing) and self._is_cut(request, missing):
            assert plan.num_dropped == 0
        elif admitted is None:
            self._check_prefix(plan, missing, room, num_given)
            if plan.num_refused:
                request.cut = missing[len(plan.keys)]
        else:
            self._check_one_by_one(plan, keys, missing, admitted, room, num_given)
        self._unmark_duplicates(evicted)
        self._unmark_duplicates(keys)
        if request.ctx is not None:  # A call without a context has no path.
            request.accessed.update(plan.keys)
        for key in evicted:
            del self.state[key], self.slot_of[key]
        slots = plan.slots.tolist()
        busy = {*self.slot_of.values(), *self.condemned}
        assert len({*slots, *busy}) == len(slots) + len(busy), f"slots {slots} are in use: {busy}"
        for key, slot in zip(plan.keys, slots, strict=True):
            self.state[key], self.slot_of[key], self.memory[slot] = WRITING, slot, b"half written"
        self._stored(request, plan)
        return self._add_job(plan)

    @rule(numbers=runs)
    def serve(self, numbers: list[int]) -> None:
        """Run a whole request: load the blocks that are resident, and store the other blocks."""
        request = self.begin(numbers)
        self.complete_load(self.prepare_load(request, numbers), damaged=set())
        if self._is_victim_tier:
            self.finish(request)
            # The device drops the blocks at once.
            self.complete_store(self.prepare_store(self.begin_without_context(), numbers), success=True)
        else:
            self.complete_store(self.prepare_store(request, numbers), success=True)
            self.finish(request)

    @rule(job=consumes(stores), success=st.booleans())
    def complete_store(self, job: Job, success: bool) -> None:
        plan = job.plan
        assert isinstance(plan, StorePlan)
        self.manager.complete_store(plan, success)
        self._expect_misuse(lambda: self.manager.complete_store(plan))
        self.jobs.remove(job)
        for key, slot in zip(plan.keys, plan.slots.tolist(), strict=True):
            if job.stale:
                self.condemned.discard(slot)
            elif success and not job.void:
                self.state[key], self.memory[slot] = READY, key
            elif not job.void:
                del self.state[key], self.slot_of[key]

    @rule(target=loads, request=requests, numbers=batches)
    def prepare_load(self, request: Request, numbers: list[int]) -> Job:
        keys = self._add_to_path(request, numbers)
        ready, _ = self._expected_lookup(keys)
        if ready < len(keys):
            message = self._expect_misuse(lambda: self.manager.prepare_load(keys, request.ctx))
            assert keys[ready].hex() in message, "the error does not name the key"
        plan = self.manager.prepare_load(keys[:ready], request.ctx)
        assert plan.slots.tolist() == [self.slot_of[key] for key in keys[:ready]]
        self.pins.update(plan.slots.tolist())
        return self._add_job(plan)

    @rule(target=loads, numbers=batches)
    def pin(self, numbers: list[int]) -> Job:
        """Pin blocks, as for a write to another tier."""
        keys = self._keys(numbers)
        ready, _ = self._expected_lookup(keys)
        if ready < len(keys):
            assert keys[ready].hex() in self._expect_misuse(lambda: self.manager.pin(keys))
        before = self.manager.stats()
        plan = self.manager.pin(keys[:ready])
        assert replace(self.manager.stats(), evictable=before.evictable) == before, "a pin was counted"
        self.pins.update(plan.slots.tolist())
        job = self._add_job(plan)
        job.to_device = False
        return job

    @rule(job=consumes(loads), damaged=st.sets(st.integers(0, 7), max_size=2))
    def complete_load(self, job: Job, damaged: set[int]) -> None:
        plan = job.plan
        assert isinstance(plan, LoadPlan)
        slots = plan.slots.tolist()
        if not job.void:
            assert [self.memory[slot] for slot in slots] == list(plan.keys), "a pinned block changed"
        rows = sorted(row for row in damaged if row < len(slots))
        complete = self.manager.complete_load if job.to_device else self.manager.unpin
        complete(plan, rows)
        self._expect_misuse(lambda: complete(plan))
        self.jobs.remove(job)
        if job.void:
            return
        self.pins.subtract(slots)
        self.condemned -= {slot for slot in slots if not self.pins[slot]}
        for row in rows:
            if self.slot_of.get(plan.keys[row]) == slots[row]:
                self._forget(plan.keys[row])
        if job.to_device and not job.stale:
            loaded = zip(plan.keys, slots, strict=True)
            self._mark_duplicates([key for key, slot in loaded if self.slot_of.get(key) == slot])

    @rule(numbers=batches)
    def discard(self, numbers: list[int]) -> None:
        keys = self._keys(numbers)
        ready = {key for key in keys if self.state.get(key) is READY}
        assert self.manager.discard(keys) == len(ready)
        for key in ready:
            self._forget(key)

    # Only full managers are reset. Otherwise resets would be too frequent.

    @precondition(lambda self: len(self.state) == self.manager.capacity_blocks)
    @rule()
    def reset(self) -> None:
        self.manager.reset()
        self.condemned |= {slot for key, slot in self.slot_of.items() if not self._is_evictable(key)}
        for job in self.jobs:
            job.stale = not job.void
        for collection in (self.state, self.slot_of, self.duplicates):
            collection.clear()

    @precondition(lambda self: len(self.state) == self.manager.capacity_blocks)
    @rule()
    def reset_after_jobs_were_lost(self) -> None:
        """Reset the cache and drop the transfers in flight, as after a lost connection. Completions of these
        transfers must have no effect."""
        self.manager.reset(drop_in_flight=True)
        for job in self.jobs:
            job.stale, job.void = False, True
        for collection in (self.state, self.slot_of, self.duplicates, self.pins, self.condemned):
            collection.clear()

    # ---- invariants

    @invariant()
    def sound_inside(self) -> None:
        audit(self.manager)

    @invariant()
    def equals_the_model(self) -> None:
        for key in self.universe:
            assert self.manager.lookup_key(key) is self.state.get(key, LookupResult.MISS), key.hex()

    @invariant()
    def duplicates_equal_the_model(self) -> None:
        reported = duplicate_slots(self.manager) or []
        expected = [self.slot_of[key] for key in self.duplicates]
        assert reported == expected, f"duplicates {reported}, expected {expected}"
        assert self.manager.stats().duplicates == len(self.duplicates)

    @invariant()
    def events_give_the_readable_blocks(self) -> None:
        for event in self.manager.take_events():
            keys = set(event.keys)
            assert len(keys) == len(event.keys) > 0, f"no keys, or a key twice: {event}"
            if event.removed:
                assert keys <= self.readable, f"removed, but was not readable: {event}"
            else:
                assert not keys & self.readable, f"stored twice: {event}"
            self.readable ^= keys
        assert self.readable == {key for key, state in self.state.items() if state is READY}

    @invariant()
    def statistics_agree(self) -> None:
        stats = self.manager.stats()
        states = Counter(self.state.values())
        assert (stats.writing, stats.ready) == (states[WRITING], states[READY])
        assert stats.condemned == len(self.condemned)
        assert stats.expected == len({key for keys in self.waiting.values() for key in keys})
        assert stats.evictable == sum(map(self._is_evictable, self.state))
        for name in COUNTERS:
            assert getattr(stats, name) >= getattr(self.before, name), f"{name} went down"
        self.before = stats

    # ---- checks of plans

    def _is_cut(self, request: Request, missing: list[bytes]) -> bool:
        """Return True if an earlier block of the request was refused and is still absent.

        The missing blocks then cannot be stored.
        """
        if request.ctx is None or request.cut is None or request.cut in self.state or not missing:
            return False
        path = [*request.path]
        return path.index(missing[0]) > path.index(request.cut)

    def _check_prefix(self, plan: StorePlan, missing: list[bytes], room: int, num_given: int) -> None:
        """Check that a plan stores the head of the missing blocks: all blocks that are admitted and fit."""
        stored = len(plan.keys)
        assert plan.keys == missing[:stored], "not the head of the missing blocks"
        assert stored + plan.num_dropped + plan.num_refused == len(missing), (
            "blocks are lost or counted twice"
        )
        if not self.manager.policy.refuses:
            assert plan.num_dropped == max(0, len(missing) - plan.num_refused - room)
            assert stored == min(len(missing) - plan.num_refused, room), "there was room for more"
        elif self.manager.admission is None:
            assert plan.num_dropped == max(0, len(missing) - room)
            assert stored >= min(len(missing), num_given), "free slots were refused"

    def _check_one_by_one(
        self,
        plan: StorePlan,
        keys: list[bytes],
        missing: list[bytes],
        admitted: list[bytes],
        room: int,
        num_given: int,
    ) -> None:
        """Check a plan of blocks that the device drops. Each block may be stored without its predecessors."""
        considered, dropped = admitted[:room], admitted[room:]
        stored = list(plan.keys)
        refused = [key for key in considered if key not in stored]
        assert stored == [key for key in considered if key in stored], (
            "blocks that may not enter, or no order"
        )
        assert not refused or self.manager.policy.refuses, "there was room for more"
        assert stored[:num_given] == considered[: min(num_given, len(stored))], "free slots were refused"
        assert len(stored) >= min(num_given, len(considered)), "free slots were refused"
        left_out = [*dropped, *refused, *(key for key in missing if key not in admitted)]
        assert [keys[row] for row in plan.missing_rows] == [*stored, *left_out], "wrong missing_rows"
        assert plan.num_dropped == len(dropped)
        assert plan.num_refused == len(missing) - len(stored) - len(dropped)

    # ---- private

    def _begun(self, request: Request, hints: Hints) -> None:
        """Called when a request has begun. Subclasses with quotas record the request's tenant."""

    def _stored(self, request: Request, plan: StorePlan) -> None:
        """Called when a store has begun. Subclasses with quotas check the quotas."""

    def _limit(
        self, request: Request, num_missing: int, may_leave: set[bytes], num_free: int
    ) -> tuple[int, int]:
        """Return two numbers: how many blocks a store has room for, and how many free slots it may use.

        Subclasses with quotas remove blocks from `may_leave`.
        """
        return num_free + len(may_leave), num_free

    @property
    def _is_victim_tier(self) -> bool:
        return duplicate_slots(self.manager) is not None

    def _admitted(self, missing: list[bytes]) -> list[bytes]:
        """Return the blocks of `missing` that the admission rule admits. Each block is judged separately."""
        if self.manager.admission is None:
            return missing
        # A copy of the rule, because a call of `admit` may change its state.
        allowed = deepcopy(self.manager.admission).admit(Keys.pack(missing, self.manager.key_bytes))
        return [key for key, is_allowed in zip(missing, allowed.tolist(), strict=True) if is_allowed]

    def _mark_duplicates(self, keys: list[bytes]) -> None:
        """In a victim tier, mark the ready blocks of `keys` as duplicates."""
        if self._is_victim_tier:
            latest = [key for key in dict.fromkeys(keys) if self.state.get(key) is READY]
            self.duplicates = [*latest, *(key for key in self.duplicates if key not in latest)]

    def _unmark_duplicates(self, keys: list[bytes]) -> None:
        self.duplicates = [key for key in self.duplicates if key not in keys]

    def _keys(self, numbers: list[int]) -> list[bytes]:
        return [self.universe[number % NUM_KEYS] for number in numbers]

    def _add_to_path(self, request: Request, numbers: list[int]) -> list[bytes]:
        keys = self._keys(numbers)
        if request.ctx is not None:
            request.path.update(dict.fromkeys(keys))
        return keys

    def _expected_lookup(self, keys: list[bytes]) -> PrefixLookup:
        states = [self.state.get(key, LookupResult.MISS) for key in keys]
        ready = next((i for i, state in enumerate(states) if state is not READY), len(keys))
        return PrefixLookup(ready, (*states, READY)[ready])

    def _expect_all(self, ctx: RequestContext) -> bool:
        """Add the keys of a waiting request to its expected keys, in path order.

        Returns False if there are too many expected keys to add all.
        """
        expected, own = {key for keys in self.waiting.values() for key in keys}, self.waiting[ctx]
        for key in list(ctx.keys())[len(own) :]:
            if len(expected | {key}) > self.manager.capacity_blocks * 7 // 8:
                return False
            own.append(key)
            expected.add(key)
        return True

    def _end_wait(self, ctx: RequestContext) -> None:
        """Remove a waiting request, and use the room to add expected keys of the others, oldest first."""
        if self.waiting.pop(ctx, None) is not None:
            self.is_full = self.is_full and not all(map(self._expect_all, self.waiting))

    def _is_evictable(self, key: bytes) -> bool:
        return self.state[key] is READY and not self.pins[self.slot_of[key]]

    def _forget(self, key: bytes) -> None:
        self._unmark_duplicates([key])
        slot = self.slot_of.pop(key)
        del self.state[key]
        if self.pins[slot]:
            self.condemned.add(slot)

    def _add_job(self, plan: LoadPlan | StorePlan | None) -> Job:
        assert plan is not None
        job = Job(plan)
        self.jobs.append(job)
        return job

    def _expect_misuse(self, call: Callable[[], object]) -> str:
        """Check that a call raises `MisuseError` and changes nothing. Returns the message."""
        before = snapshot(self.manager)
        try:
            call()
        except MisuseError as error:
            assert snapshot(self.manager) == before, "a misuse changed the manager"
            return str(error)
        raise AssertionError("a misuse was accepted")


def manager_machine(
    policy: str | type[EvictionPolicy] = "lru",
    admission: str | Callable[[], Admission] = "all",
    *,
    store: str = ON_COMPUTE,
    capacity_blocks: int = 5,
    key_bytes: int = 32,
    max_examples: int | None = None,
    step_count: int = 40,
    base: type[ManagerMachine] = ManagerMachine,
) -> type[ManagerMachine]:
    """Create a Hypothesis state machine that tests managers. pytest runs the machine's `TestCase`.

    Args:
        policy: argument of `OffloadingManager`.
        admission: name of an admission rule, or a function that creates an admission rule. The function is
            called for each manager, because two managers must not share an admission rule.
        store: ``on-compute``, or ``on-device-eviction`` for a victim tier.
        capacity_blocks: number of slots. Choose a small number, so that there is often no room.
        key_bytes: length of the keys.
        max_examples: number of random histories. If it is None, Hypothesis' profile states the number.
        step_count: maximum number of steps in a history.
        base: class that the state machine extends: `ManagerMachine`, or a subclass of `ManagerMachine` that
            adds Hypothesis rules.
    """

    def make() -> OffloadingManager:
        rule = admission if isinstance(admission, str) else admission()
        return OffloadingManager(
            capacity_blocks,
            key_bytes=key_bytes,
            policy=policy,
            admission=rule,
            store=store,
            enable_events=True,
        )

    machine: type[ManagerMachine] = type("Machine", (base,), {"make": staticmethod(make)})
    machine.TestCase.settings = settings(
        max_examples=max_examples or settings().max_examples,
        stateful_step_count=step_count,
        deadline=None,
    )
    return machine
