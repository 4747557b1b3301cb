"""Managers that share their state equal one manager, also when members die between two calls.

Hypothesis draws the machine's steps, or a seed for long runs. KVOFFLOAD_STEPS is the length of the long run
(`make soak`: a million steps); KVOFFLOAD_SEED repeats a failed round.
"""

from __future__ import annotations

import logging
import os
import random
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from kvoffload.errors import ConfigError, GoneError, UnavailableError
from kvoffload.node import mutex
from kvoffload.node.node_manager import NodeManager
from kvoffload.node.pool_directory import PoolDirectory
from kvoffload.node.state import StateFile
from kvoffload.testing.audit import audit
from kvoffload.testing.state_machine import NUM_KEYS, Job, Request
from support.node_machine import MembersMachine
from support.node_members import Members
from support.share_machine import ShareMachine
from support.small_hazard import SmallHazard

KEYS = [bytes([number]) * 32 for number in (1, 2, 3)]
QUICK = (Phase.explicit, Phase.reuse, Phase.generate)
"""Phases without shrinking, which would take minutes because each example creates files."""
EXAMPLES = settings().max_examples // 3
"""Examples of each of 15 machines; `test_any_number_of_steps` draws more policies, members and shares."""


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("kvoffload.node.node_manager.GRACE_S", 0.0)
    logging.getLogger("kvoffload.node").setLevel(logging.CRITICAL)
    yield
    logging.getLogger("kvoffload.node").setLevel(logging.NOTSET)


def machine_of(
    num_members: int, policy: Any, shares: Sequence[int] | None = None, **manager: Any
) -> type[MembersMachine]:
    def make() -> Members:
        return Members(num_members, 5, policy=policy, enable_events=True, shares=shares, **manager)

    base = ShareMachine if shares else MembersMachine
    return type("Machine", (base,), {"make": staticmethod(make)})


@pytest.mark.parametrize("policy", ["lru", "arc", SmallHazard])
@pytest.mark.parametrize("num_members", [1, 3])
def test_members_equal_one_manager(policy: Any, num_members: int) -> None:
    run_state_machine_as_test(
        machine_of(num_members, policy),
        settings=settings(max_examples=EXAMPLES, stateful_step_count=30, deadline=None, phases=QUICK),
    )


@pytest.mark.parametrize("policy", ["lru", "arc", SmallHazard])
@pytest.mark.parametrize("shares", [(5,), (2, 1, 0), (2, 3)], ids=str)
def test_members_with_shares_equal_the_model(policy: Any, shares: tuple[int, ...]) -> None:
    run_state_machine_as_test(
        machine_of(len(shares), policy, shares),
        settings=settings(max_examples=EXAMPLES, stateful_step_count=30, deadline=None, phases=QUICK),
    )


ROUND_STEPS, SHORT_STEPS = 1000, 3000
WEIGHTS = {
    "begin": 8, "begin_without_context": 1, "finish": 6, "expect": 4, "withdraw": 3, "touch": 6,
    "lookup": 8, "lookup_key": 2, "prepare_store": 12, "serve": 10, "complete_store": 12,
    "prepare_load": 9, "pin": 2, "complete_load": 10, "discard": 2, "reset": 1,
    "reset_after_jobs_were_lost": 1, "kill": 1,
}  # fmt: skip
"""Weights of the calls; the sum is about 100. A kill and the start of a new member cost 50 other steps."""


class Seeded:
    """A machine whose steps a seed chooses; faster than Hypothesis."""

    def __init__(self, seed: int) -> None:
        self._random = rng = random.Random(seed)
        policy = rng.choice(["lru", "arc", "s3fifo", "lirs", "wtinylfu", SmallHazard])
        num_members = rng.randrange(1, 5)
        shares = [rng.randrange(1 + 5 // num_members) for _ in range(num_members)]
        has_shares = any(shares) and rng.random() < 0.5
        self.machine = machine_of(num_members, policy, shares if has_shares else None)()
        self.machine.start()
        self.requests: list[Request] = []
        self.stores: list[Job] = []
        self.loads: list[Job] = []

    def numbers(self) -> list[int]:
        first, rng = self._random.randrange(NUM_KEYS), self._random
        if rng.random() < 0.7:
            return [*range(first, min(NUM_KEYS, first + rng.randrange(9)))]
        return [rng.randrange(NUM_KEYS) for _ in range(rng.randrange(9))]

    def step(self) -> None:
        (name,) = self._random.choices([*WEIGHTS], [*WEIGHTS.values()])
        getattr(self, f"_{name}", lambda: self._call(name))()
        for check in (
            "sound_inside", "equals_the_model", "events_give_the_readable_blocks", "statistics_agree"
        ):  # fmt: skip
            getattr(self.machine, check)()
        if isinstance(self.machine, ShareMachine):
            self.machine.shares_agree()

    def _call(self, name: str) -> None:
        """Call a rule with a request, numbers of keys, or neither; skip it without a request."""
        call, rng = getattr(self.machine, name), self._random
        if name in ("begin", "serve", "discard"):
            made = call(self.numbers())
            self.requests += [made] if name == "begin" else []
        elif name == "begin_without_context":
            self.requests.append(call())
        elif name.startswith("reset"):
            if len(self.machine.state) == self.machine.manager.capacity_blocks:
                call()
        elif name == "kill":
            call(rng.randrange(4))
        elif self.requests:
            request = rng.choice(self.requests)
            if name in ("expect", "withdraw"):
                call(request)
            elif name == "lookup_key":
                call(request, rng.randrange(NUM_KEYS))
            else:
                call(request, self.numbers())

    def _take(self, items: list[Any]) -> list[Any]:
        return [items.pop(self._random.randrange(len(items)))] if items else []

    def _finish(self) -> None:
        for request in self._take(self.requests):
            self.machine.finish(request)

    def _prepare_store(self) -> None:
        for request in self.requests[-1:]:
            promoted = self._random.random() < 0.3
            self.stores.append(self.machine.prepare_store(request, self.numbers(), promoted))

    def _complete_store(self) -> None:
        for job in self._take(self.stores):
            self.machine.complete_store(job, self._random.random() < 0.8)

    def _prepare_load(self) -> None:
        for request in self.requests[-1:]:
            self.loads.append(self.machine.prepare_load(request, self.numbers()))

    def _pin(self) -> None:
        self.loads.append(self.machine.pin(self.numbers()))

    def _complete_load(self) -> None:
        for job in self._take(self.loads):
            damaged = {self._random.randrange(8)} if self._random.random() < 0.2 else set()
            self.machine.complete_load(job, damaged)


@pytest.mark.slow
def test_any_number_of_steps() -> None:
    steps = int(os.environ.get("KVOFFLOAD_STEPS") or SHORT_STEPS)
    first_seed = int(os.environ.get("KVOFFLOAD_SEED") or random.SystemRandom().randrange(10**9))
    began = reported = time.monotonic()
    for number in range(-(-steps // ROUND_STEPS)):
        seed, step = first_seed + number, 0
        seeded = Seeded(seed)
        try:
            for step in range(ROUND_STEPS):  # noqa: B007  (the message has it)
                seeded.step()
            seeded.machine.teardown()
        except Exception as error:
            raise AssertionError(f"KVOFFLOAD_SEED={seed}, step {step}: {error!r}") from error
        done, now = (number + 1) * ROUND_STEPS, time.monotonic()
        if now - reported > 30 or done >= steps:
            reported = now
            print(f"{done:,} steps, {done / (now - began):.0f}/s", flush=True)


def test_an_exception_inside_a_call_empties_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """After Ctrl-C in the middle of a discard, another member must not see a torn state."""
    members = Members(2, 5, policy="lru", enable_events=True)
    first, second = members.managers
    ctx = first.begin_request("r", KEYS)
    plan = first.prepare_store(KEYS, ctx)
    assert plan is not None
    first.complete_store(plan)
    load = second.prepare_load(KEYS[:1])

    def interrupt(slots: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(first.slots, "condemn", interrupt)
    with pytest.raises(KeyboardInterrupt):
        first.discard(KEYS[1:2])
    assert second.lookup(KEYS).num_ready == 0
    assert second.stats().condemned == 1, "the slot of the running load"
    assert [event.is_reset for event in second.take_events()][-2:] == [True, False]
    second.complete_load(load)
    plan = second.prepare_store(KEYS)
    assert plan is not None
    assert len(plan) == 3
    audit(second)
    members.close()


def test_wrong_arguments_do_not_empty_the_pool() -> None:
    members = Members(2, 5, policy="lru")
    first, second = members.managers
    plan = first.prepare_store(KEYS)
    assert plan is not None
    first.complete_store(plan)
    with pytest.raises(GoneError):
        first.prepare_load([b"?" * 32])
    with pytest.raises(ValueError, match="bytes"):
        second.lookup([b"short"])
    assert second.lookup(KEYS).num_ready == 3
    members.close()


def test_a_second_engine_with_the_same_id_is_refused() -> None:
    members = Members(1, 5, policy="lru")
    [member] = members.managers
    plan = member.prepare_store(KEYS)
    assert plan is not None
    root = members.root
    twin = PoolDirectory.join({"test": 1}, "engine-0", keep_s=60.0, root=root, has_keeper=False)
    with pytest.raises(ConfigError, match=r"engine_id.*a different id for each engine"):
        NodeManager(5, directory=twin, policy="lru")
    twin.close()
    member.complete_store(plan)
    assert member.lookup(KEYS).num_ready == 3
    members.close()


def test_a_member_without_memory_for_its_record_is_buried(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a full file system even a read of that record would kill the other members."""
    members = Members(1, 5, policy="lru")
    [member] = members.managers
    directory = PoolDirectory.join({"test": 1}, "poor", keep_s=60.0, root=members.root, has_keeper=False)

    def no_room(self: StateFile, start: int, num_bytes: int) -> None:
        raise UnavailableError("ram", "shared", "no room")

    monkeypatch.setattr(StateFile, "_allocate", no_room)
    with pytest.raises(UnavailableError, match="no room"):
        NodeManager(5, directory=directory, policy="lru")
    directory.close()
    file = os.open(members.root / member._directory.path.name / "state", os.O_RDONLY)
    blocks = os.fstat(file).st_blocks
    members.look_around()
    assert member._numbers.num_buried == 1
    assert os.fstat(file).st_blocks == blocks, "the record was read"
    os.close(file)
    members.close()


def test_a_member_that_leaves_expects_nothing() -> None:
    members = Members(2, 8, policy="lru")
    first, second = members.managers
    first.expect(first.begin_request("r", KEYS))
    assert second.stats().expected == 3
    members.leave(0)
    assert second.stats().expected == 0
    members.close()


def test_an_exception_after_a_repair_releases_the_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process has died inside a call, and Ctrl-C arrives when another process has repaired the state."""
    members = Members(2, 5, policy="lru")
    first, second = members.managers
    if os.fork() == 0:
        first._mutex.wait(1.0)
        os._exit(0)
    os.wait()

    def interrupt() -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(first, "_look_around", interrupt)
        with pytest.raises(KeyboardInterrupt):
            first.lookup(KEYS)
    plan = second.prepare_store(KEYS)
    assert plan is not None
    second.complete_store(plan)
    assert first.lookup(KEYS).num_ready == 3
    assert first.num_timeouts == second.num_timeouts == 0
    members.close()


@pytest.mark.parametrize("died_inside", [False, True])
@pytest.mark.parametrize("name", ["try_lock", "wait"])
@pytest.mark.parametrize("call", ["lookup", "reset"])
def test_an_exception_that_hides_the_lock_releases_it(
    monkeypatch: pytest.MonkeyPatch, name: str, call: str, died_inside: bool
) -> None:
    """Ctrl-C arrives while a kernel or the C library takes the lock, so that the call does not know of it."""
    members = Members(2, 5, policy="lru")
    first, second = members.managers
    plan = second.prepare_store(KEYS)
    assert plan is not None
    second.complete_store(plan)
    if died_inside:
        if os.fork() == 0:
            first._mutex.wait(1.0)
            os._exit(0)
        os.wait()
    place, take = (mutex, mutex.try_lock) if name == "try_lock" else (first._mutex, first._mutex.wait)

    def interrupted(argument: Any) -> int:
        take(argument)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(place, name, interrupted)
        if name == "wait":
            patch.setattr(mutex, "try_lock", lambda door: mutex.BUSY)
        with pytest.raises(KeyboardInterrupt):
            first.lookup(KEYS) if call == "lookup" else first.reset()
    num_ready = 0 if died_inside else 3
    assert second.lookup(KEYS).num_ready == first.lookup(KEYS).num_ready == num_ready
    assert first.num_timeouts == second.num_timeouts == 0
    audit(second)
    members.close()


def test_an_exception_without_the_lock_leaves_the_lock_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C arrives while another member has the lock."""
    members = Members(2, 5, policy="lru")
    first, second = members.managers
    locked, done = threading.Event(), threading.Event()

    def hold() -> None:
        second._mutex.wait(1.0)
        locked.set()
        done.wait(10)
        mutex.unlock(second._mutex.door)

    def interrupted(door: Any) -> int:
        raise KeyboardInterrupt

    thread = threading.Thread(target=hold)
    thread.start()
    locked.wait(10)
    with monkeypatch.context() as patch:
        patch.setattr(mutex, "try_lock", interrupted)
        with pytest.raises(KeyboardInterrupt):
            first.lookup(KEYS)
    assert first._mutex.wait(0.001) == mutex.BUSY
    done.set()
    thread.join()
    assert first.prepare_store(KEYS) is not None
    members.close()


def test_a_late_call_that_fails_in_the_middle_empties_the_pool() -> None:
    members = Members(2, 5, policy="lru")
    first, second = members.managers
    plan = first.prepare_store(KEYS)
    assert plan is not None
    first.complete_store(plan)

    def torn() -> None:
        first.index.clear()
        raise RuntimeError("in the middle of a call")

    first._deferred.append(torn)
    first._mutex.forget()
    assert first.lookup(KEYS).num_ready == 0
    audit(second)
    plan = second.prepare_store(KEYS)
    assert plan is not None
    assert len(plan) == 3
    members.close()


def test_a_second_close_does_not_take_the_record_of_a_newcomer() -> None:
    members = Members(2, 5, policy="lru")
    member = members.managers[0]
    member.close()
    newcomer = PoolDirectory.join({"test": 1}, "newcomer", keep_s=60.0, root=members.root, has_keeper=False)
    assert newcomer.number == 0
    member.close()
    assert newcomer.is_member(0)
    newcomer.close()
    members.close()
