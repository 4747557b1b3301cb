"""A process is stopped inside a call: the others answer MISS, lose nothing, and continue afterwards."""

from __future__ import annotations

import logging
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from kvoffload.core.plans import LookupResult, PrefixLookup
from kvoffload.errors import GoneError, UnavailableError
from kvoffload.node.mutex import unlock
from kvoffload.testing.audit import audit
from support.node_process import KEYS, Child, Process, contents
from support.node_ptrace import owner_of


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logging.getLogger("kvoffload.node").setLevel(logging.CRITICAL)
    yield
    logging.getLogger("kvoffload.node").setLevel(logging.NOTSET)


@pytest.fixture
def process(root: Path) -> Process:
    return Process(root, "survivor", 1)


def store(process: Process, keys: object) -> None:
    plan = process.manager.prepare_store(keys)
    assert plan is not None
    process.slots[plan.slots] = contents(plan.keys)
    process.manager.complete_store(plan)


@contextmanager
def stopped_inside(root: Path) -> Iterator[int]:
    """Run a process that is stopped while it holds the lock; it continues at the end of the block."""
    pid = os.fork()
    if pid == 0:
        try:
            other = Process(root, f"stopped-{os.getpid()}", 2)
            with other.manager._locked(5.0):
                os.kill(os.getpid(), signal.SIGSTOP)
            other.close()
        finally:
            os._exit(0)
    assert os.WIFSTOPPED(os.waitpid(pid, os.WUNTRACED)[1])
    try:
        yield pid
    finally:
        os.kill(pid, signal.SIGCONT)
        os.waitpid(pid, 0)


def test_calls_give_up_quickly_and_once(root: Path, process: Process) -> None:
    manager, keys = process.manager, KEYS[:4]
    store(process, keys)
    with stopped_inside(root):
        start = time.monotonic()
        assert manager.lookup(keys) == PrefixLookup(0, LookupResult.MISS)
        assert time.monotonic() - start < 1.0, "the first call waits for 0.05 s"
        waited_s = time.process_time(), time.monotonic()
        for _ in range(1000):
            assert manager.lookup(keys) == PrefixLookup(0, LookupResult.MISS)
            assert manager.prepare_store(keys) is None
            assert manager.lookup_key(keys[0]) is LookupResult.MISS
            assert not manager.contains(keys).any()
            assert manager.take_events() == []
            with pytest.raises(GoneError):
                manager.prepare_load(keys)
            with pytest.raises(GoneError):
                manager.pin(keys)
        # A wait of 0.05 s in each of 7,000 calls would take six minutes.
        assert time.monotonic() - waited_s[1] < 30
        assert manager.num_timeouts > 7000
    assert manager.lookup(keys).num_ready == 4
    audit(manager)


def test_misses_without_the_lock_are_busy(root: Path, process: Process) -> None:
    manager = process.manager
    store(process, KEYS[:4])
    ctx = manager.begin_request("r", KEYS[:6])
    with stopped_inside(root):
        assert manager.count_misses(ctx, 0) == 6
        assert manager.count_misses(ctx, 0, KEYS[:2]) == 2
    assert manager.stats().misses == {"busy": 8}


def test_only_a_long_stop_is_logged_once(
    root: Path, process: Process, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    manager, now = process.manager, 100.0
    monkeypatch.setattr(manager, "_clock", lambda: now)
    with caplog.at_level(logging.WARNING, "kvoffload.node"):
        with stopped_inside(root):
            manager.lookup(KEYS[:4])
        manager.lookup(KEYS[:4])
        assert caplog.text == ""
        with stopped_inside(root):
            for now in (100.0, 100.5, 101.5, 102.0, 103.0):  # noqa: B007
                manager.lookup(KEYS[:4])
        manager.lookup(KEYS[:4])
    stopped, free = (record.getMessage() for record in caplog.records)
    assert "does not release the lock" in stopped
    assert "free again after 3.0 s" in free


def test_reports_without_the_lock_are_made_later(root: Path, process: Process) -> None:
    manager = process.manager
    store(process, KEYS[:4])
    load, failed, stored = (
        manager.prepare_load(KEYS[:4]), manager.prepare_store(KEYS[4:8]), manager.prepare_store(KEYS[8:12])
    )  # fmt: skip
    ctx, waiting = manager.begin_request("a", KEYS[:8]), manager.begin_request("b", KEYS[20:30])
    assert failed is not None
    assert stored is not None
    with stopped_inside(root):
        manager.expect(waiting)
        manager.complete_load(load)
        manager.complete_store(failed, success=False)
        manager.complete_store(stored)
        manager.touch(KEYS[:4], ctx)
        manager.finish_request(ctx)
        assert manager.discard(KEYS[:1]) == 0
        begun = manager.begin_request("c", KEYS[:2])
        manager.finish_request(begun)
    assert manager.contains(KEYS[:12]).tolist() == [False] + [True] * 3 + [False] * 4 + [True] * 4
    assert ctx.finished
    assert begun.finished
    assert not any(manager._file.holds_of(number).any() for number in range(64))
    assert manager.stats().loaded == 4
    audit(manager)
    manager.withdraw(waiting)


def test_a_long_stop_collects_a_bounded_number_of_reports(
    root: Path, process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One call makes all reports: without a bound the other engines would wait for seconds."""
    monkeypatch.setattr("kvoffload.node.node_manager.MOST_DEFERRED", 50)
    monkeypatch.setattr("kvoffload.node.node_manager.RESET_PATIENCE_S", 0.01)
    manager = process.manager
    waiting, served = manager.begin_request("a", KEYS[:8]), manager.begin_request("b", KEYS[8:16])
    manager.expect(waiting)
    manager.expect(served)
    plan = manager.prepare_store(KEYS[20:24])
    assert plan is not None
    contexts = []
    with stopped_inside(root):
        for number in range(500):
            ctx = manager.begin_request("r", KEYS[:8])
            manager.expect(ctx)
            manager.touch(KEYS[:8], ctx)
            manager.finish_request(ctx)
            manager.reset(drop_in_flight=number % 2 == 0)
            contexts.append(ctx)
        manager.withdraw(served)
        manager.finish_request(waiting)
        manager.complete_store(plan)
        assert len(manager._deferred) < 60
    manager.contains([])
    assert manager.epoch == 2
    assert all(ctx.finished for ctx in [*contexts, waiting])
    assert manager.stats().expected == 0
    assert manager.stats().free == manager.capacity_blocks
    audit(manager)


def test_reports_are_made_before_the_very_next_call(
    root: Path, process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in an otherwise idle pool: a report made after new calls would free slots that these calls use."""
    monkeypatch.setattr("kvoffload.node.node_manager.RESET_PATIENCE_S", 0.01)
    other = Process(root, "other", 2)
    manager = process.manager
    plan = manager.prepare_store(KEYS[:4])
    assert plan is not None
    for num_calls in range(20):
        for _ in range(num_calls):
            manager.contains([])
        locked, done = threading.Event(), threading.Event()

        def hold(locked: threading.Event = locked, done: threading.Event = done) -> None:
            assert other.manager._mutex.wait(5.0) == 0
            locked.set()
            done.wait(10)
            unlock(other.manager._mutex.door)

        thread = threading.Thread(target=hold)
        thread.start()
        assert locked.wait(10)
        manager.reset(drop_in_flight=True)
        manager.complete_store(plan)
        done.set()
        thread.join()
        plan = manager.prepare_store(KEYS[:4])
        assert plan is not None
        assert plan.epoch == num_calls + 1, "the reset comes after the store that followed it"
        assert manager._patience_s > 0


def test_a_reset_without_the_lock_is_made_later(
    root: Path, process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvoffload.node.node_manager.RESET_PATIENCE_S", 0.01)
    manager = process.manager
    store(process, KEYS[:4])
    load, in_flight = manager.prepare_load(KEYS[:4]), manager.prepare_store(KEYS[4:8])
    assert in_flight is not None
    with stopped_inside(root):
        manager.reset(drop_in_flight=True)
        manager.complete_load(load)
        manager.complete_store(in_flight)
    assert not manager.contains(KEYS[:8]).any()
    assert manager.stats().free == manager.capacity_blocks
    audit(manager)


def test_a_wrong_report_does_not_lose_the_reports_after_it(root: Path, process: Process) -> None:
    """A deferred call that raises is logged: its caller has returned, and no other call may fail for it."""
    manager = process.manager
    first, second = manager.prepare_store(KEYS[:4]), manager.prepare_store(KEYS[4:8])
    assert first is not None
    assert second is not None
    with stopped_inside(root):
        manager.complete_store(first)
        manager.complete_store(first)
        manager.complete_store(second)
    assert manager.contains(KEYS[:8]).all()
    with stopped_inside(root):
        assert manager.lookup(KEYS[:8]).num_ready == 0
    assert Process(root, "another", 3).manager.contains(KEYS[:8]).all(), "the lock was not released"


def test_an_engine_leaves_while_another_is_stopped(
    root: Path, process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvoffload.node.node_manager.RESET_PATIENCE_S", 0.01)
    monkeypatch.setattr("kvoffload.node.node_manager.GRACE_S", 0.0)
    monkeypatch.setattr("kvoffload.node.node_manager.CHECK_S", 0.0)
    other = Process(root, "leaving", 2)
    load_of = other.manager.prepare_store(KEYS[:4])
    assert load_of is not None
    with stopped_inside(root):
        other.close()
    for _ in range(50):
        process.manager.contains([])
    assert process.manager.stats().writing == 0
    audit(process.manager)


def test_a_start_while_a_process_is_stopped_is_refused(
    root: Path, process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvoffload.node.node_manager.RESET_PATIENCE_S", 0.01)
    with stopped_inside(root), pytest.raises(UnavailableError, match="stopped"):
        Process(root, "late", 2)


def stops_at_random(root: Path, num_stops: int, seconds: float) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    survivor = Process(root, "survivor", rng.randrange(1 << 30))
    children = [Child(root, f"p{n}", rng.randrange(1 << 30), 3600) for n in range(2)]
    inside, longest_s = 0, 0.0
    address = survivor.manager._mutex._address
    try:
        for stop in range(num_stops):
            child = children[rng.randrange(2)]
            # Every other stop is inside the lock: a random moment rarely is.
            for _ in range(10_000):
                time.sleep(rng.random() * 0.002)
                os.kill(child.pid, signal.SIGSTOP)
                os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
                if stop % 2 or owner_of(address) == child.pid:
                    break
                os.kill(child.pid, signal.SIGCONT)
            inside += owner_of(address) == child.pid
            until = time.monotonic() + seconds
            while (now := time.monotonic()) < until:
                survivor.step()
                longest_s = max(longest_s, time.monotonic() - now)
            os.kill(child.pid, signal.SIGCONT)
            for _ in range(100):
                survivor.step()
    finally:
        for child in children:
            os.kill(child.pid, signal.SIGCONT)
            child.kill()
    assert inside >= num_stops // 2
    assert survivor.manager._numbers.num_died_inside <= 2, "a stopped process counts as dead"
    print(f"{num_stops} stops, {inside} inside the lock, longest request {longest_s:.3f} s")
    load = survivor.manager.prepare_store(KEYS[:4])
    assert load is not None or np.all(survivor.manager.contains(KEYS[:4]))


def test_stops_at_random_moments(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvoffload.node.node_manager.RESET_PATIENCE_S", 0.05)
    stops_at_random(root, 2, 0.2)


@pytest.mark.slow
def test_stops_of_a_second(root: Path) -> None:
    stops_at_random(root, 10, 1.0)


@pytest.mark.slow
@pytest.mark.long
def test_a_stop_of_a_minute(root: Path) -> None:
    stops_at_random(root, 1, 60.0)
