"""`kvoffload.open` on a pool of the machine: processes, kills, resets, damage, a busy lock, refusals."""

from __future__ import annotations

import asyncio
import errno
import gc
import json
import logging
import multiprocessing
import os
import random
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import kvoffload
from kvoffload import ConfigError, EvictionPolicy, GoneError, KVCache, NodeManager
from kvoffload.cache.jobs import Jobs
from kvoffload.errors import CombinedConfigError, UnavailableError
from kvoffload.node.mutex import ACQUIRED, unlock
from kvoffload.node.pool_directory import FACTS, SHARED_MEMORY, SLOTS, pools
from kvoffload.structures.jit import compile_all
from kvoffload.testing.audit import audit
from support.node_process import KILLS
from support.timeouts import HANGS_S
from support.token_engine import BLOCK_TOKENS, TokenEngine, layout_of, serve_requests

LAYOUT = layout_of()
TOKENS, IDS = [*range(17)], [*range(5)]
PLACE = {"block_ids": IDS}


@pytest.fixture(autouse=True)
def root(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory for the pools; pools have no keeper."""
    path = Path(tempfile.mkdtemp(prefix="kvoffload-test-", dir=SHARED_MEMORY))
    monkeypatch.setattr("kvoffload.cache.shared_ram.SHARED_MEMORY", path)
    monkeypatch.setattr("kvoffload.node.keeper.start", lambda *_: None)
    yield path
    shutil.rmtree(path)


def opened(blocks: int = 60, model: str = "toy", ram: str = "", **options: Any) -> KVCache:
    ram = f"{blocks * LAYOUT.block_bytes},shared=node{ram}"
    return kvoffload.open(model=model, layout=LAYOUT, ram=ram, **{"deadline_s": HANGS_S, **options})


def store(cache: KVCache, tokens: list[int] = TOKENS, salt: str = "") -> int:
    engine = TokenEngine(LAYOUT)
    engine.compute(tokens, PLACE)
    with cache.request(tokens, salt=salt) as request:
        return request.store_from(engine.kv, IDS)


def load(cache: KVCache, tokens: list[int] = TOKENS, salt: str = "", **limit: float) -> int:
    """Return the number of loaded tokens, whose bytes are checked."""
    engine = TokenEngine(LAYOUT)
    with cache.request(tokens, salt=salt) as request:
        count = request.load_into(engine.kv, IDS, **limit)
        engine.check(tokens, PLACE, count)
        return count


def manager_of(cache: KVCache) -> NodeManager:
    manager = cache.manager.ram_manager
    assert isinstance(manager, NodeManager)
    return manager


class Child:
    """A forked process that runs `function` with one end of a pipe. Fork before this process has threads."""

    def __init__(self, function: Callable[..., None], *arguments: Any) -> None:
        compile_all()
        context = multiprocessing.get_context("fork")
        self.pipe, child_end = context.Pipe()
        self.process = context.Process(target=function, args=(child_end, *arguments), daemon=True)
        self.process.start()
        child_end.close()

    def receive(self) -> Any:
        assert self.pipe.poll(HANGS_S), "the process sends nothing"
        return self.pipe.recv()

    def kill(self) -> None:
        assert self.process.is_alive()
        self.process.kill()
        self.process.join()

    def end(self) -> None:
        self.pipe.send("end")
        self.process.join(HANGS_S)
        assert self.process.exitcode == 0


def _stores(pipe: Any) -> None:
    cache = opened()
    pipe.send([store(cache), store(cache, salt="a")])
    pipe.recv()
    cache.close()


def test_a_process_loads_the_blocks_of_another(root: Path) -> None:
    child = Child(_stores)
    assert child.receive() == [16, 16]
    with opened() as cache:
        assert load(cache) == load(cache, salt="a") == 16
        assert load(cache, salt="b") == 0
        assert store(cache) == 0, "the prompt is present"
        (pool,) = pools(root)
        assert sorted(pool.pids) == sorted([os.getpid(), child.process.pid])
        child.end()
        assert load(cache) == 16
        assert cache.stats().hit_tokens == {"ram": 48}
        audit(manager_of(cache))


def test_other_blocks_have_another_pool(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    other_layout = layout_of(head_dim=4)
    with opened() as cache, opened(model="toy 2") as other, opened(policy="hazard") as third:
        store(cache)
        assert load(other) == load(third) == 0
        with kvoffload.open(model="toy", layout=other_layout, ram="1MiB,shared=node") as fourth:
            engine = TokenEngine(other_layout)
            with fourth.request(TOKENS) as request:
                assert request.load_into(engine.kv, IDS) == 0
        assert len(pools(root)) == 4
    assert "producer differs" in caplog.text
    assert "policy differs" in caplog.text


def _hangs_in_a_store(pipe: Any) -> None:
    cache, copy_in = opened(), Jobs._copy_in

    def half(jobs: Jobs, keys: Any, slots: Any, parts: Any, rows: Any) -> None:
        copy_in(jobs, keys[:2], slots[:2], parts, rows[:2])
        pipe.send("half")
        threading.Event().wait()

    store(cache, [*range(100, 117)])
    Jobs._copy_in = half  # type: ignore[method-assign]
    store(cache)


def test_a_process_is_killed_in_a_store(fast_burials: None) -> None:
    """Complete blocks of the process stay; unfinished blocks are misses and can be stored again."""
    child = Child(_hangs_in_a_store)
    assert child.receive() == "half"
    with opened() as cache:
        assert load(cache, timeout_s=0.0) == 0
        assert store(cache) == 0, "another process writes the blocks"
        child.kill()
        assert load(cache) == 0
        assert store(cache) == 16
        assert load(cache) == load(cache, [*range(100, 117)]) == 16
        assert cache.stats().ram.writing == 0
        audit(manager_of(cache))


def test_a_killed_process_leaves_its_blocks() -> None:
    child = Child(_stores)
    child.receive()
    child.kill()
    with opened() as cache:
        assert load(cache) == 16


def test_the_pool_survives_its_last_process_for_its_time(root: Path) -> None:
    for expected in (0, 16):
        with opened() as cache:
            assert load(cache) == expected
            store(cache)
    with opened(ram=",keep=0") as cache:
        assert load(cache) == 16
    assert not list(root.iterdir())


def test_a_reset_empties_the_pool_for_all() -> None:
    with opened() as cache, opened() as other:
        store(cache)
        assert load(other) == 16
        assert other.reset()
        assert load(cache) == load(other) == 0
        assert store(cache) == load(other) == 16


def test_a_damaged_block_ends_the_prefix_in_every_process() -> None:
    with opened() as cache, opened() as other:
        store(cache)
        with cache.request(TOKENS) as request:
            slots = manager_of(cache).slots_of(request._keys())
        cache._jobs.ram.pool[slots[2]] ^= 1
        assert load(other) == load(cache) == 2 * BLOCK_TOKENS
        assert store(other) == BLOCK_TOKENS
        assert load(cache) == 16


def test_a_busy_lock_is_a_miss() -> None:
    """Another process is stopped inside a call."""
    with opened() as cache, opened() as other:
        store(cache)
        mutex = manager_of(cache)._mutex
        assert mutex.wait(HANGS_S) == ACQUIRED
        assert load(other) == 0
        assert store(other, [*range(50, 67)]) == 0
        unlock(mutex.door)
        assert load(other) == 16
        assert store(other, [*range(50, 67)]) == 16
        audit(manager_of(other))


def test_a_reset_with_a_busy_lock_returns_false(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvoffload.node.node_manager.RESET_PATIENCE_S", 0.01)
    with opened() as cache, opened() as other:
        store(cache)
        mutex = manager_of(cache)._mutex
        assert mutex.wait(HANGS_S) == ACQUIRED
        assert not other.reset()
        unlock(mutex.door)
        assert load(other) == 0, "the reset is made before the lookup"
        assert store(cache) == 16
        assert other.reset()
        assert load(cache) == 0


@pytest.mark.parametrize(("num_gone", "expected"), [(1, 16), (2, 16), (99, 0)])
def test_a_block_that_leaves_after_the_lookup_is_looked_up_again(
    num_gone: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened() as cache:
        store(cache)
        prepare_load, errors = cache.manager.prepare_load, [GoneError("it has left")] * num_gone

        def prepare(*arguments: Any) -> Any:
            if errors:
                raise errors.pop()
            return prepare_load(*arguments)

        monkeypatch.setattr(cache.manager, "prepare_load", prepare)
        assert load(cache) == expected


def test_a_block_from_the_disk_of_one_process_serves_all(tmp_path: Path) -> None:
    tiers = [f"disk:{tmp_path}:16MiB"]
    with opened(ram=",keep=0", tiers=tiers) as cache:
        store(cache)
    with opened(tiers=tiers) as cache, opened() as other:
        assert load(other) == 0
        assert load(cache) == 16
        assert cache.stats().hit_tokens == {"ram": 0, "disk": 16}
        assert load(other) == 16
        with pytest.raises(UnavailableError, match="one owner at a time"):
            opened(tiers=tiers)


@pytest.mark.parametrize("disk", [False, True])
def test_threads_and_tasks_share_a_pool(tmp_path: Path, disk: bool) -> None:
    """Two members, four threads and four tasks; every loaded byte is checked. RAM is small."""

    async def task(cache: KVCache, seed: int) -> int:
        chance, engine, hits = random.Random(seed), TokenEngine(LAYOUT), 0
        for _ in range(8):
            family, length = chance.randrange(2), chance.randrange(1, 60)
            tokens, ids = [family * 100 + n for n in range(length)], chance.sample(range(24), 16)
            async with cache.request(tokens) as request:
                hit = await request.load_into_async(engine.kv, ids)
                engine.check(tokens, {"block_ids": ids}, hit)
                engine.compute(tokens, {"block_ids": ids}, first=hit)
                await request.store_from_async(engine.kv, ids)
            hits += hit
        return hits

    async def tasks(caches: list[KVCache]) -> int:
        return sum(await asyncio.gather(*(task(caches[seed % 2], seed) for seed in range(4))))

    tiers = [[f"disk:{tmp_path / name}:16MiB"] if disk else [] for name in "ab"]
    with opened(tiers=tiers[0]) as cache, opened(tiers=tiers[1]) as other:
        caches = [cache, other]
        with ThreadPoolExecutor(5) as threads:
            jobs = [threads.submit(serve_requests, caches[seed % 2], LAYOUT, seed, 12) for seed in range(4)]
            assert threads.submit(asyncio.run, tasks(caches)).result() > 0
            assert sum(job.result() for job in jobs) > 0
        cache.flush(HANGS_S)  # ends the writes, which pin blocks
        other.flush(HANGS_S)
        stats = cache.stats().ram
        assert stats.writing == 0
        assert stats.evictable == stats.ready
        audit(manager_of(cache))


def test_nothing_stays_open() -> None:
    opened().close()
    gc.collect()
    before = sorted(os.listdir("/proc/self/fd")), threading.active_count()
    for _ in range(3):
        opened().close()
        with opened(ram=f",share={40 * LAYOUT.block_bytes}"), pytest.raises(ConfigError, match="share"):
            opened(ram=f",share={40 * LAYOUT.block_bytes}")
    gc.collect()  # a manager that could not start is in a reference cycle
    assert (sorted(os.listdir("/proc/self/fd")), threading.active_count()) == before


class InPython(EvictionPolicy):
    """A policy whose state is private to a process."""

    name = "in-python"

    def access(self, slots: Any, reused: Any) -> None: ...
    def replace(self, keys: Any, slots: Any, num_free: int, protected: Any) -> None: ...
    def remove(self, slots: Any) -> None: ...
    def reset(self) -> None: ...


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"ram": "1MiB,shared=nodes"}, "ram.shared: 'nodes' is invalid; allowed: node"),
        ({"ram": "1MiB,share=64KiB"}, "ram.share: '64KiB' is invalid; allowed with shared=node"),
        ({"ram": "1MiB,keep=1h"}, "ram.keep: '1h' is invalid; allowed with shared=node"),
        ({"ram": "1MiB,shared=node,keep=-1"}, "ram.keep: '-1' is invalid; allowed: 0, or a time"),
        ({"ram": "1MiB,shared=node,share=2MiB"}, "ram.share: '2MiB' is invalid; allowed: up to the size"),
        ({"ram": "1MiB,shared=node,sice=2"}, "ram.sice: '2' is invalid; there is no such option"),
        ({"ram": "1MiB,size=2MiB"}, "ram.size: '2MiB' is invalid; it is given twice"),
        ({"ram": {"shared": "node"}}, "ram.size: missing"),
        ({"ram": "9,shared=node"}, "ram: '9,shared=node' is invalid; allowed: 384 bytes or more"),
        (
            {"ram": "1MiB,shared=node", "policy": InPython},
            "policy: 'in-python' is invalid; a policy in Python",
        ),
    ],
)
def test_options_that_do_not_fit_are_named(given: dict[str, Any], message: str, root: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        kvoffload.open(model="toy", layout=LAYOUT, **given)
    assert message in str(caught.value)
    assert not list(root.iterdir())


def test_a_share_is_kept_from_other_processes() -> None:
    with opened(20, ram=f",share={10 * LAYOUT.block_bytes}") as cache, opened(20) as other:
        store(cache)
        for number in range(10):
            store(other, [*range(number * 100 + 50, number * 100 + 67)])
        assert load(cache) == 16
        assert cache.stats().ram.tenants["own"].min == 10


def test_a_pool_that_was_made_for_other_blocks_is_refused(root: Path) -> None:
    with opened():
        (pool,) = pools(root)
    facts = json.loads((pool.path / FACTS).read_text())
    (pool.path / FACTS).write_text(json.dumps({**facts, "producer": "another"}))
    with pytest.raises(UnavailableError, match="the pool was made for another model, layout"):
        opened()


@pytest.mark.parametrize("damage", ["header", "length"])
def test_a_damaged_file_is_replaced_unless_it_is_used(root: Path, damage: str) -> None:
    def hurt(path: Path) -> None:
        if damage == "length":
            with path.open("ab") as file:
                file.write(b"1")
        else:
            with path.open("r+b") as file:
                file.write(b"1")

    with opened() as cache:
        store(cache)
        (pool,) = pools(root)
        hurt(pool.path / SLOTS)
        with pytest.raises(UnavailableError, match="slots"):
            opened()
        assert load(cache) == 16
    with opened() as cache:
        assert load(cache) == 0, "the bytes are lost"
        assert store(cache) == load(cache) == 16


def test_a_lack_of_memory_is_an_error_that_leaves_nothing(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("kvoffload.cache.shared_ram.os.posix_fallocate", full)
        with pytest.raises(UnavailableError, match="no room"):
            opened()
    with monkeypatch.context() as patch:
        patch.setattr("kvoffload.cache.shared_ram.available_bytes", lambda: 1000)
        with pytest.raises(UnavailableError, match="1000 B free"):
            opened()
    assert not list(root.iterdir())
    opened().close()


def test_all_wrong_options_are_reported_at_once() -> None:
    with pytest.raises(CombinedConfigError) as caught:
        kvoffload.open(model="", layout=LAYOUT, ram="1MiB,shared=x", policy="lruu")
    assert [problem.field for problem in caught.value.problems] == ["model", "ram.shared", "policy"]


def _works(pipe: Any, seed: int) -> None:
    cache, chance, engine = opened(), random.Random(seed), TokenEngine(LAYOUT)
    pipe.send("ready")
    while not pipe.poll():
        tokens = [chance.randrange(6) * 100 + n // 12 for n in range(chance.randrange(1, 60))]
        ids = chance.sample(range(24), 16)
        with cache.request(tokens) as request:
            hit = request.load_into(engine.kv, ids, timeout_s=0.05)
            engine.check(tokens, {"block_ids": ids}, hit)
            engine.compute(tokens, {"block_ids": ids}, first=hit)
            request.store_from(engine.kv, ids)
    cache.close()


@pytest.mark.slow
def test_processes_are_killed_under_load(fast_burials: None) -> None:
    """The other processes check every load, and no byte is wrong."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    children = [Child(_works, chance.randrange(1 << 30)) for _ in range(3)]
    for child in children:
        assert child.receive() == "ready"
    for _ in range(KILLS):
        number = chance.randrange(3)
        threading.Event().wait(chance.random() * 0.1)
        children[number].kill()
        children[number] = Child(_works, chance.randrange(1 << 30))
        assert children[number].receive() == "ready"
    for child in children:
        child.end()
    with opened() as cache:
        load(cache)
        assert cache.stats().ram.writing == 0
        audit(manager_of(cache))
