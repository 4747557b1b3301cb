"""Deadlines, threads, `asyncio`, closing with work in flight, and killed processes."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import linecache
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

import kvoffload
from kvoffload import KVCache, MemoryTier, MisuseError, TieredManager
from kvoffload.cache import owner
from kvoffload.cache.jobs import Jobs
from kvoffload.cache.key_chain import KEY_BYTES, KeyChain
from kvoffload.cache.owner import Limit
from kvoffload.structures.keys import Keys
from support.scripted_tier import ScriptedTier
from support.timeouts import HANGS_S
from support.token_engine import BLOCK_TOKENS, TokenEngine, layout_of, serve_requests

LAYOUT = layout_of()
TOKENS, IDS = [*range(17)], [*range(5)]


class Rig:
    """A cache over a tier whose jobs the test ends."""

    def __init__(self, deadline_s: float = HANGS_S, clock: Callable[[], float] = time.monotonic) -> None:
        self.tier = ScriptedTier(LAYOUT.block_bytes)
        self.memory = MemoryTier(64, LAYOUT.block_bytes)
        self.manager = TieredManager(
            64,
            ram=self.memory,
            tiers=[self.tier],
            key_bytes=KEY_BYTES,
            deadline_s=deadline_s,
            clock=clock,
        )
        self.cache = KVCache(Jobs(self.manager, self.memory, BLOCK_TOKENS), LAYOUT, deadline_s)
        self.engine = TokenEngine(LAYOUT)

    def put_below(self, tokens: list[int]) -> None:
        """Put the blocks of a prompt into the tier only."""
        chain = KeyChain(BLOCK_TOKENS)
        chain.extend(tokens)
        source = TokenEngine(LAYOUT)
        source.compute(tokens, {"block_ids": IDS})
        for number, key in enumerate(chain.keys):
            self.tier.blocks[key] = b"".join(array[number].tobytes() for array in source.arrays)

    def wait_for_job(self) -> None:
        until(lambda: bool(self.tier.jobs))

    def end_jobs(self) -> None:
        for job in [*self.tier.jobs]:
            self.tier.end(job)


def until(condition: Callable[[], bool]) -> None:
    limit = time.monotonic() + HANGS_S
    while not condition():
        assert time.monotonic() < limit, "nothing happened"
        time.sleep(0.001)


def in_thread(call: Callable[[], Any]) -> Future[Any]:
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def test_a_load_waits_for_the_tier() -> None:
    rig = Rig()
    rig.put_below(TOKENS)
    with rig.cache, rig.cache.request(TOKENS) as request:
        load = in_thread(lambda: request.load_into(rig.engine.kv, IDS))
        rig.wait_for_job()
        assert not load.done()
        rig.end_jobs()
        assert load.result(HANGS_S) == 16
        rig.engine.check(TOKENS, {"block_ids": IDS}, 16)


def test_a_load_ends_at_its_deadline_with_the_blocks_that_are_ready() -> None:
    rig = Rig()
    with rig.cache:
        with rig.cache.request(TOKENS[:9]) as request:
            rig.engine.compute(TOKENS, {"block_ids": IDS})
            request.store_from(rig.engine.kv, IDS)
        rig.put_below(TOKENS)
        with rig.cache.request(TOKENS) as request:
            assert request.load_into(rig.engine.kv, IDS, timeout_s=0.01) == 8
            assert any(job.is_read for job in rig.tier.jobs), "the read has not ended"
        rig.end_jobs()
        with rig.cache.request(TOKENS) as request:
            assert request.load_into(rig.engine.kv, IDS) == 16


def test_the_deadline_of_the_cache_holds_for_each_load() -> None:
    rig = Rig(deadline_s=0.01)
    rig.put_below(TOKENS)
    with rig.cache, rig.cache.request(TOKENS) as request:
        assert request.load_into(rig.engine.kv, IDS) == 0
        rig.end_jobs()


def test_a_load_waits_again_after_a_load_that_timed_out() -> None:
    """The manager ends a request's wait permanently; each load begins a new wait."""
    now = [0.0]
    rig = Rig(clock=lambda: now[0])
    rig.put_below(TOKENS)
    lookups, lookup = [0], rig.manager.lookup

    def counted(*arguments: Any) -> Any:
        lookups[0] += 1
        return lookup(*arguments)

    rig.manager.lookup = counted  # type: ignore[method-assign]
    with rig.cache, rig.cache.request(TOKENS) as request:
        load = in_thread(lambda: request.load_into(rig.engine.kv, IDS))
        rig.wait_for_job()
        for _ in range(2):  # two pauses, because one pause longer than the deadline would begin a new wait
            now[0] += 0.8 * HANGS_S
            until(lambda target=lookups[0] + 2: load.done() or lookups[0] >= target)
        assert load.result(HANGS_S) == 0, "the deadline has passed"
        before = lookups[0]
        load = in_thread(lambda: request.load_into(rig.engine.kv, IDS))
        until(lambda: load.done() or lookups[0] > before + 3)
        waits = not load.done()
        rig.end_jobs()
        assert waits, "a load that does not wait makes one lookup"
        assert load.result(HANGS_S) == 16


def test_closing_ends_a_load_that_waits() -> None:
    rig = Rig()
    rig.put_below(TOKENS)
    request = rig.cache.request(TOKENS)
    load = in_thread(lambda: request.load_into(rig.engine.kv, IDS))
    rig.wait_for_job()
    closing = in_thread(lambda: rig.cache.close(flush_s=0.01))
    assert load.result(HANGS_S) == 0
    closing.result(HANGS_S)
    assert rig.tier.closed
    request.finish()


def test_a_cancelled_load_ends_its_wait_and_the_request_continues() -> None:
    rig = Rig()
    rig.put_below(TOKENS)

    async def serve() -> int:
        async with rig.cache.request(TOKENS) as request:
            load = asyncio.create_task(request.load_into_async(rig.engine.kv, IDS))
            while not rig.tier.jobs:
                await asyncio.sleep(0.001)
            load.cancel()
            with pytest.raises(asyncio.CancelledError):
                await load
            rig.end_jobs()
            return await request.load_into_async(rig.engine.kv, IDS)

    with rig.cache:
        assert asyncio.run(serve()) == 16


def test_a_cancelled_load_waits_for_its_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the call no thread writes into the engine's tensors."""
    copying, may_go_on = threading.Event(), threading.Event()
    rig = Rig()
    rig.tier.immediate = True
    load_parts = kvoffload.transfer.parts.HostParts.load

    def slowly(*arguments: Any) -> None:
        copying.set()
        assert may_go_on.wait(HANGS_S)
        load_parts(*arguments)

    async def serve() -> bool:
        async with rig.cache.request(TOKENS) as request:
            load = asyncio.create_task(request.load_into_async(rig.engine.kv, IDS))
            while not copying.is_set():
                await asyncio.sleep(0.001)
            for _ in range(3):  # anyio cancels again until the task ends
                load.cancel()
                for _ in range(5):
                    await asyncio.sleep(0)
            was_done = load.done()
            may_go_on.set()
            with pytest.raises(asyncio.CancelledError):
                await load
            rig.engine.check(TOKENS, {"block_ids": IDS}, 16)
            return was_done

    rig.put_below(TOKENS)
    monkeypatch.setattr("kvoffload.transfer.parts.HostParts.load", slowly)
    with rig.cache:
        assert not asyncio.run(serve())


def test_an_interrupted_caller_waits_for_its_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second interrupt does not end the wait."""
    rig = Rig()
    rig.put_below(TOKENS)

    interrupts = [KeyboardInterrupt, KeyboardInterrupt, KeyboardInterrupt]

    class Interrupted(SimpleQueue[Any]):
        def get(self, *arguments: Any) -> Any:
            if interrupts:
                rig.wait_for_job()
                raise interrupts.pop()
            return super().get(*arguments)

    with rig.cache, rig.cache.request(TOKENS) as request:
        monkeypatch.setattr(owner, "SimpleQueue", Interrupted)
        with pytest.raises(KeyboardInterrupt):
            request.load_into(rig.engine.kv, IDS)
        monkeypatch.undo()
        assert not interrupts
        assert not request._work.turn.locked(), "the job has ended"
        rig.end_jobs()


def test_an_interrupted_close_closes_the_tiers(monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupted close writes no further blocks, and raises at its end."""
    rig = Rig()
    rig.engine.compute(TOKENS, {"block_ids": IDS})
    with rig.cache.request(TOKENS) as request:
        request.store_from(rig.engine.kv, IDS)
    rig.wait_for_job()
    interrupts = [KeyboardInterrupt]

    class Interrupted(SimpleQueue[Any]):
        def get(self, *arguments: Any) -> Any:
            if interrupts:
                raise interrupts.pop()
            return super().get(*arguments)

    close = rig.manager.close

    def end_and_close() -> None:
        rig.end_jobs()
        close()

    monkeypatch.setattr(rig.manager, "close", end_and_close)
    monkeypatch.setattr(owner, "SimpleQueue", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        rig.cache.close(flush_s=HANGS_S)
    monkeypatch.undo()
    assert rig.tier.closed
    assert not rig.cache._owner._thread.is_alive()
    rig.cache.close()


def test_a_request_may_end_while_the_cache_closes(monkeypatch: pytest.MonkeyPatch) -> None:
    """`close` begins after `finish` has first checked the cache."""
    rig = Rig()
    for ends in ("finish", "finish_async"):
        rig = Rig()
        request, pack = rig.cache.request(TOKENS), Keys.pack

        def closing(*arguments: Any, rig: Rig = rig, pack: Callable[..., Keys] = pack) -> Keys:
            rig.cache.close()
            return pack(*arguments)

        with monkeypatch.context() as patch:
            patch.setattr("kvoffload.cache.request.Keys.pack", closing)
            if ends == "finish":
                request.finish()
            else:
                asyncio.run(request.finish_async())
        assert rig.tier.closed


_TRACED = {owner.__file__, asyncio.base_events.__file__, threading.__file__, futures._base.__file__}


@contextlib.contextmanager
def traced(trace: Any) -> Iterator[None]:
    """Trace the lines of this thread, without those of the garbage collector."""
    gc.disable()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(None)
        gc.enable()


def closed_in_line(number: int, call: str) -> tuple[Any, bool]:
    """Make a call in which the same thread closes the cache before line `number`, as a signal handler would.

    Returns the result or the text of the `MisuseError`, and True if the call has reached the line.
    """
    rig, lines = Rig(), itertools.count()
    request = rig.cache.request(TOKENS)

    def trace(frame: Any, event: str, _: object) -> Any:
        if event == "line" and frame.f_code.co_filename in _TRACED and next(lines) == number:
            sys.settrace(None)
            rig.cache.close()
            assert not rig.cache._owner._thread.is_alive() or call == "close"
        return trace

    def interrupted() -> Any:
        try:
            with traced(trace):
                return request.load_into(rig.engine.kv, IDS) if call == "load" else rig.cache.close()
        except MisuseError as error:
            return str(error)

    outcome = in_thread(interrupted).result(HANGS_S)
    rig.cache.close()
    assert not rig.cache._owner._thread.is_alive()
    return outcome, next(lines) > number


@pytest.mark.parametrize("call", ["load", "close"])
def test_a_signal_handler_may_close_the_cache_in_any_line_of_a_call(call: str) -> None:
    outcomes = set[object]()
    for number in itertools.count():
        outcome, is_reached = closed_in_line(number, call)
        outcomes.add(outcome)
        if not is_reached:
            break
    assert outcomes == ({None} if call == "close" else {0, "this cache is closed"})


def interrupted_in_line(number: int) -> bool:
    """Interrupt a load before line `number`; returns False if the load has ended before."""
    rig, lines = Rig(), itertools.count()
    rig.put_below(TOKENS)
    request = rig.cache.request(TOKENS)

    def trace(frame: Any, event: str, _: object) -> Any:
        file = frame.f_code.co_filename
        # Python runs no signal handler between the body of `with` and `__exit__`.
        is_with = file in _TRACED and linecache.getline(file, frame.f_lineno).lstrip().startswith("with ")
        if event == "line" and file in _TRACED and not is_with and next(lines) == number:
            raise KeyboardInterrupt
        return trace

    def interrupted() -> bool:
        try:
            with traced(trace):
                request.load_into(rig.engine.kv, IDS, timeout_s=0.2)
        except KeyboardInterrupt:
            rig.cache.stats()  # behind the load
            assert not request._work.turn.locked(), f"the load goes on after an interrupt in line {number}"
            return True
        return False

    is_reached = in_thread(interrupted).result(HANGS_S)
    rig.end_jobs()
    rig.cache.close()
    return is_reached


# An interrupt may come before the owner has the job.
@pytest.mark.filterwarnings("ignore:coroutine 'Jobs.load' was never awaited")
def test_no_load_goes_on_after_an_interrupt_in_any_line() -> None:
    assert next(number for number in itertools.count() if not interrupted_in_line(number)) > 10
    gc.collect()


def test_a_forked_child_is_refused() -> None:
    """The child has no thread that owns the manager, so a wait for it would never end."""
    code = FORKED.format(tests=str(Path(__file__).parents[1]))
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=HANGS_S, check=False
    )
    assert run.stdout.splitlines() == [
        "load: this cache was opened in another process",
        "finish, close",
        "child ended with 0",
        "parent: 8",
    ], run.stderr


FORKED = """
import os, signal, sys
sys.path.insert(0, {tests!r})
import kvoffload
from support.token_engine import TokenEngine, layout_of
engine = TokenEngine(layout_of())
with kvoffload.open(model="toy", layout=layout_of(), ram="1MiB") as cache:
    request = cache.request(range(9))
    request.store_from(engine.kv, [0, 1, 2])
    sys.stdout.flush()
    if (child := os.fork()) == 0:
        signal.alarm(60)  # a hanging child dies
        try:
            request.load_into(engine.kv, [0, 1, 2])
        except kvoffload.MisuseError as error:
            print("load:", error)
        request.finish()
        cache.close()
        print("finish, close", flush=True)
        os._exit(0)
    print("child ended with", os.waitpid(child, 0)[1])
    print("parent:", request.load_into(engine.kv, [0, 1, 2]))
    request.finish()
"""


AFTER_MAIN = """
import atexit, sys, threading
sys.path.insert(0, {tests!r})
import kvoffload
from support.token_engine import TokenEngine, layout_of
engine = TokenEngine(layout_of())
cache = kvoffload.open(model="toy", layout=layout_of(), ram="1MiB", tiers=["disk:{disk}:16MiB"])
def serve(when, tokens):
    with cache.request(tokens) as request:
        hit = request.load_into(engine.kv, [0, 1, 2])
        engine.check(tokens, {{"block_ids": [0, 1, 2]}}, hit)
        engine.compute(tokens, {{"block_ids": [0, 1, 2]}})
        print(when, hit, request.store_from(engine.kv, [0, 1, 2]))
def work():
    threading.main_thread().join()
    serve("thread:", range(9))
    serve("thread:", range(9))
    print("flush:", cache.flush())
def end():
    serve("exit:", range(9))
    serve("exit:", range(5, 14))
    cache.close()
    print("closed")
atexit.register(end)
threading.Thread(target=work).start()
"""


def test_a_cache_works_after_the_end_of_the_main_thread(tmp_path: Path) -> None:
    """Threads of an engine may outlive the main thread, and functions of `atexit` may store and close."""
    code = AFTER_MAIN.format(tests=str(Path(__file__).parents[1]), disk=tmp_path)
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=HANGS_S, check=False
    )
    assert run.stdout.splitlines() == [
        "thread: 0 8",
        "thread: 8 0",
        "flush: True",
        "exit: 8 0",
        "exit: 0 8",
        "closed",
    ], run.stderr
    assert not run.stderr


def test_a_reset_is_durable_and_confirmed() -> None:
    rig = Rig()
    rig.tier.immediate = True
    with rig.cache:
        with rig.cache.request(TOKENS) as request:
            rig.engine.compute(TOKENS, {"block_ids": IDS})
            request.store_from(rig.engine.kv, IDS)
        assert rig.cache.flush()
        assert len(rig.tier.durable) == 4
        assert rig.cache.reset()
        assert rig.tier.durable == {}


def test_a_reset_that_a_tier_does_not_confirm_returns_false() -> None:
    """Tried with a tier that hangs, and a tier that fails; other jobs run during the wait."""
    rig = Rig()

    def fails(method: str) -> None:
        if method == "clear":
            raise OSError("the server is down")

    with rig.cache:
        with rig.cache.request(TOKENS) as request:
            rig.engine.compute(TOKENS, {"block_ids": IDS})
            request.store_from(rig.engine.kv, IDS)
        rig.wait_for_job()
        reset = in_thread(lambda: rig.cache.reset(timeout_s=HANGS_S))
        assert rig.cache.stats().tiers, "the thread that owns the manager is free"
        assert not reset.done()
        rig.end_jobs()
        assert reset.result(HANGS_S)
        rig.tier.on_call = fails
        assert not rig.cache.reset(timeout_s=0.01)
        rig.tier.on_call = lambda method: None
        assert rig.cache.reset()


def test_flush_waits_for_the_tier_while_others_load() -> None:
    rig = Rig()
    with rig.cache:
        with rig.cache.request(TOKENS) as request:
            rig.engine.compute(TOKENS, {"block_ids": IDS})
            request.store_from(rig.engine.kv, IDS)
        flush = in_thread(rig.cache.flush)
        rig.wait_for_job()
        with rig.cache.request(TOKENS) as request:
            assert request.load_into(rig.engine.kv, IDS) == 16
        assert not flush.done()
        until(lambda: bool(rig.end_jobs() or flush.done()))
        assert flush.result()
        assert len(rig.tier.durable) == 4
        with rig.cache.request([99, *TOKENS]) as request:
            request.store_from(rig.engine.kv, IDS)
        assert not rig.cache.flush(timeout_s=0.01), "the tier has not written"
        rig.end_jobs()


def test_a_slow_drain_stops_no_other_job() -> None:
    """The tier never confirms; an interrupt ends the flush, although the tier still drains."""
    rig = Rig()
    waits: list[float] = []

    def drain(timeout_s: float) -> bool:
        waits.append(timeout_s)
        return False

    with rig.cache:
        rig.manager.lanes[0].tier.drain = drain  # type: ignore[method-assign]
        limit = Limit(HANGS_S)
        flushed = in_thread(lambda: rig.cache._owner.run(rig.cache._jobs.flush(limit), limit))
        until(lambda: bool(waits))
        with rig.cache.request(TOKENS) as request:
            assert request.load_into(rig.engine.kv, IDS) == 0
        assert not flushed.done()
        limit.stop()
        assert not flushed.result(HANGS_S)
        assert max(waits) < 1.0, "the thread that owns the manager waits for no longer"
        rig.cache.close(flush_s=0.0)


@pytest.mark.parametrize("disk", [False, True])
def test_threads_share_a_cache(tmp_path: Path, disk: bool) -> None:
    """Eight threads with separate tensors and a small RAM; every loaded byte is checked."""
    tiers = [f"disk:{tmp_path}:16MiB"] if disk else []
    with kvoffload.open(model="toy", layout=LAYOUT, ram=60 * LAYOUT.block_bytes, tiers=tiers) as cache:
        with ThreadPoolExecutor(8) as threads:
            assert sum(threads.map(lambda seed: serve_requests(cache, LAYOUT, seed, 15), range(8))) > 0
        manager = cache.manager
        assert cache.stats().ram.writing == 0
        until(lambda: not manager.has_jobs)
        assert not manager.waits
        assert not (manager.slots.ref_cnt > 0).any()


def test_tasks_share_a_cache(tmp_path: Path) -> None:
    async def serve(cache: KVCache, seed: int) -> int:
        chance, engine, hits = random.Random(seed), TokenEngine(LAYOUT), 0
        for _ in range(10):
            tokens = [chance.randrange(4) * 100 + n // 20 for n in range(chance.randrange(1, 60))]
            ids = chance.sample(range(24), 16)
            async with cache.request(tokens) as request:
                hit = await request.load_into_async(engine.kv, ids)
                engine.check(tokens, {"block_ids": ids}, hit)
                engine.compute(tokens, {"block_ids": ids}, first=hit)
                await request.store_from_async(engine.kv, ids)
                if chance.randrange(4) == 0:
                    await cache.flush_async()
            hits += hit
        return hits

    async def all_of(cache: KVCache) -> int:
        return sum(await asyncio.gather(*(serve(cache, seed) for seed in range(6))))

    with kvoffload.open(
        model="toy", layout=LAYOUT, ram=60 * LAYOUT.block_bytes, tiers=[f"disk:{tmp_path}:16MiB"]
    ) as cache:
        assert asyncio.run(all_of(cache)) > 0
        assert not cache.manager.waits


KILLED = """
import itertools, sys
sys.path.insert(0, {tests!r})
import kvoffload
from support.token_engine import TokenEngine, layout_of
layout, engine = layout_of(), TokenEngine(layout_of())
cache = kvoffload.open(model="toy", layout=layout, ram="1MiB", tiers=["disk:{disk}:16MiB"])
for number in itertools.count():
    tokens = [number * 100 + n for n in range(41)]
    with cache.request(tokens) as request:
        engine.compute(tokens, {{"block_ids": [*range(11)]}})
        request.store_from(engine.kv, [*range(11)])
    if number % 3 == 2:
        cache.flush()
        print(number, flush=True)
"""


def test_a_killed_process_leaves_its_flushed_blocks(tmp_path: Path) -> None:
    code = KILLED.format(tests=str(Path(__file__).parents[1]), disk=tmp_path)
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        flushed = [int(process.stdout.readline()) for _ in range(3)][-1]
        os.kill(process.pid, signal.SIGKILL)
    engine = TokenEngine(LAYOUT)
    with kvoffload.open(
        model="toy", layout=LAYOUT, tiers=[f"disk:{tmp_path}:16MiB"], deadline_s=HANGS_S
    ) as cache:
        for number in range(flushed + 1):
            tokens = [number * 100 + n for n in range(41)]
            with cache.request(tokens) as request:
                assert request.load_into(engine.kv, [*range(11)]) == 40
                engine.check(tokens, {"block_ids": [*range(11)]}, 40)
