"""`ObjectStore`: objects of any size in tiers, against a dictionary; deadlines, failures, late jobs."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvoffload import DiskTier
from kvoffload.integrations.objects import KEY_BYTES, MOST_PARTS, Extents, ObjectStore, _Batch
from kvoffload.tiers.contract import SecondaryTier
from support.scripted_tier import ScriptedJob, ScriptedSharedTier, ScriptedTier

BLOCK = 4096
Memory = npt.NDArray[np.uint8]


class TickingClock:
    """A clock that advances 0.5 s whenever it is read, so that deadlines pass without waiting."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 0.5
        return self.now


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def content(number: int, size: int) -> bytes:
    return np.random.default_rng(number).integers(0, 256, size, np.uint8).tobytes()


def memory_of(contents: list[bytes]) -> Memory:
    return np.frombuffer(b"".join(contents), np.uint8).copy()


def extents(memory: Memory, size: int) -> Extents:
    start = memory.ctypes.data
    return Extents.of_buffers([start + offset for offset in range(0, memory.nbytes, size)], size)


def store_of(*tiers: SecondaryTier, staging: int = 1 << 20, **options: object) -> ObjectStore:
    options.setdefault("deadline_s", 10.0)
    return ObjectStore(tiers, block_bytes=BLOCK, staging_bytes=staging, **options)  # type: ignore[arg-type]


def write(store: ObjectStore, numbers: list[int], size: int) -> list[bool]:
    memory = memory_of([content(number, size) for number in numbers])
    ok: list[bool] = store.store([key(number) for number in numbers], extents(memory, size)).tolist()
    return ok


def read(store: ObjectStore, numbers: list[int], size: int) -> list[bytes | None]:
    memory = np.full(len(numbers) * size, 0xA5, np.uint8)
    ok = store.load([key(number) for number in numbers], extents(memory, size)).tolist()
    buffers = [memory[start : start + size].tobytes() for start in range(0, memory.nbytes, size)]
    assert all(is_there or set(bytes_) == {0xA5} for is_there, bytes_ in zip(ok, buffers, strict=True))
    return [bytes_ if is_there else None for is_there, bytes_ in zip(ok, buffers, strict=True)]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[ObjectStore]:
    tier = DiskTier(tmp_path / "kv", 64 << 20, BLOCK, key_bytes=KEY_BYTES, fingerprint="objects")
    store = store_of(tier)
    yield store
    store.close()


@pytest.mark.parametrize("size", [1, 100, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK, 100_001])
def test_objects_of_any_size(disk: ObjectStore, size: int) -> None:
    numbers = list(range(30))
    assert all(write(disk, numbers, size))
    assert disk.find([key(number) for number in [*numbers, 99]], size).tolist() == [True] * 30 + [False]
    assert read(disk, [3, 99, 29], size) == [content(3, size), None, content(29, size)]


@given(st.data())
def test_against_a_dictionary(data: st.DataObject) -> None:
    tiers = [ScriptedTier(BLOCK, immediate=True), ScriptedTier(BLOCK, identity=1, immediate=True)]
    store, twin = store_of(*tiers, staging=8 * BLOCK), dict[int, int]()
    sizes = [100, BLOCK, 2 * BLOCK + 5]
    for _ in range(data.draw(st.integers(1, 8))):
        numbers = data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=6, unique=True))
        size = data.draw(st.sampled_from(sizes))
        numbers = [number for number in numbers if twin.get(number, size) == size]
        action = data.draw(st.sampled_from(["store", "load", "delete", "find"]))
        if not numbers:
            continue
        if action == "store":
            assert all(write(store, numbers, size))
            twin.update(dict.fromkeys(numbers, size))
        elif action == "load":
            expected = [content(number, size) if number in twin else None for number in numbers]
            assert read(store, numbers, size) == expected
        elif action == "find":
            present = store.find([key(number) for number in numbers], size).tolist()
            assert present == [number in twin for number in numbers]
        else:
            store.delete([key(number) for number in numbers], size)
            for number in numbers:
                twin.pop(number, None)


@pytest.mark.parametrize("strides", [(100, 300), (64, 4096), (1, 7)])
def test_scattered_extents(disk: ObjectStore, strides: tuple[int, int]) -> None:
    sizes = (3000, 5000)
    area = np.random.default_rng(1).integers(0, 256, 200_000, np.uint8)
    starts = np.array([[i * (8000 + strides[0]), 100_000 + i * (5000 + strides[1])] for i in range(5)])
    original = [
        b"".join(area[s : s + n].tobytes() for s, n in zip(row, sizes, strict=True)) for row in starts
    ]
    memory = Extents(area.ctypes.data + starts, sizes)
    keys = [key(number) for number in range(5)]
    assert disk.store(keys, memory).all()
    area[:] = 0
    assert disk.load(keys, memory.take(slice(0, 5))).all()
    assert [
        b"".join(area[s : s + n].tobytes() for s, n in zip(row, sizes, strict=True)) for row in starts
    ] == original
    assert np.count_nonzero(area) <= 5 * sum(sizes)


def test_zero_copy_moves_the_callers_own_memory() -> None:
    tier = ScriptedTier(BLOCK, immediate=True)
    pools = list[int]()
    submit = tier._submit
    tier._submit = lambda job: (pools.append(job.pool.ctypes.data), submit(job))[1]  # type: ignore[method-assign, union-attr, func-returns-value]
    memory = memory_of([content(number, BLOCK) for number in range(3)])
    for allowed in (False, True):
        store = store_of(tier, zero_copy=allowed)
        assert store.store([key(number) for number in range(3)], extents(memory, BLOCK)).all()
        assert store.load([key(number) for number in range(3)], extents(memory, BLOCK)).all()
        assert (pools[-1] == memory.ctypes.data) is allowed
        tier.blocks.clear()


def test_shared_tiers_allow_zero_copy_and_disks_do_not() -> None:
    shared, local = ScriptedSharedTier(BLOCK), ScriptedTier(BLOCK)
    memory = extents(memory_of([bytes(BLOCK)]), BLOCK)
    assert store_of(shared, zero_copy=None)._is_direct(memory)
    assert not store_of(shared, local, zero_copy=None)._is_direct(memory)
    assert not store_of(shared, zero_copy=False)._is_direct(memory)


def test_a_late_read_does_not_touch_the_callers_memory() -> None:
    tier = ScriptedTier(BLOCK, immediate=True)
    store = store_of(tier, clock=TickingClock())
    assert all(write(store, [1, 2], BLOCK))
    tier.immediate = False
    memory = np.full(2 * BLOCK, 0xA5, np.uint8)
    assert not store.load([key(1), key(2)], extents(memory, BLOCK)).any()
    assert store.num_late == 1
    (job,) = tier.jobs
    assert job.pool is not None
    # Another call must not get the buffer of the job that is still running.
    busy = bytes(job.pool.tobytes())
    tier.immediate = True
    assert read(store, [1], BLOCK) == [content(1, BLOCK)]
    assert job.pool.tobytes() == busy
    tier.end(job)
    assert (memory == 0xA5).all()
    assert read(store, [2], BLOCK) == [content(2, BLOCK)]


@pytest.mark.parametrize("kind", ["load", "store"])
def test_a_job_that_ends_just_after_the_deadline_frees_its_buffer(kind: str) -> None:
    """Another thread takes the result between the caller's last poll of the job and the end of its call."""
    tier = ScriptedTier(BLOCK, immediate=True)
    store = store_of(tier, staging=4 * BLOCK, clock=TickingClock())
    assert all(write(store, [1], BLOCK))
    collect = store._collect

    def collect_and_let_others_poll(batch: _Batch) -> None:
        collect(batch)
        for job in [*tier.jobs]:
            tier.end(job)
        with store._lock:
            store._poll()

    store._collect = collect_and_let_others_poll  # type: ignore[method-assign]
    tier.immediate = False
    for number in range(2, 12):
        if kind == "load":
            assert read(store, [1], BLOCK) == [None]
        else:
            assert write(store, [number], BLOCK) == [False]
    assert not store._staging._late
    assert store.num_late == 10
    store._collect = collect  # type: ignore[method-assign]
    tier.immediate = True
    assert read(store, [1], BLOCK) == [content(1, BLOCK)]
    assert all(write(store, [20], BLOCK))


def test_a_late_write_is_not_reported_as_stored() -> None:
    tier = ScriptedTier(BLOCK)
    store = store_of(tier, clock=TickingClock())
    memory = memory_of([content(1, BLOCK)])
    assert not store.store([key(1)], extents(memory, BLOCK)).any()
    memory[:] = 0  # the engine reuses its memory
    (job,) = tier.jobs
    tier.end(job)
    tier.immediate = True
    assert read(store, [1], BLOCK) == [content(1, BLOCK)]


def test_all_buffers_late_is_a_miss() -> None:
    tier = ScriptedTier(BLOCK, immediate=True)
    store = store_of(tier, staging=BLOCK, clock=TickingClock())
    assert all(write(store, [1], BLOCK))
    tier.immediate = False
    assert read(store, [1], BLOCK) == [None]
    assert read(store, [1], BLOCK) == [None]
    assert len(tier.jobs) == 1
    tier.end(tier.jobs[0])
    tier.immediate = True
    assert read(store, [1], BLOCK) == [content(1, BLOCK)]


def test_an_object_above_the_limit_of_a_tier_is_read_in_parts() -> None:
    tier = ScriptedTier(BLOCK, immediate=True)
    store = store_of(tier)
    assert write(store, [1], 5 * BLOCK) == [True]
    tier.read_limit = 2
    assert read(store, [1], 5 * BLOCK) == [content(1, 5 * BLOCK)]


def test_a_load_waits_for_room_in_a_tier() -> None:
    tier = ScriptedTier(BLOCK, immediate=True)
    store = store_of(tier)
    assert write(store, [1, 2], BLOCK) == [True, True]
    tier.read_limit, asked, loaded = 0, threading.Event(), list[bytes | None]()
    tier.on_call = lambda method: asked.set() if method == "read_room" else None
    reader = threading.Thread(target=lambda: loaded.extend(read(store, [1, 2], BLOCK)))
    reader.start()
    asked.wait()
    tier.read_limit = 1
    reader.join()
    assert loaded == [content(1, BLOCK), content(2, BLOCK)]


def test_a_load_without_room_ends_at_its_deadline() -> None:
    tier = ScriptedTier(BLOCK, immediate=True)
    store = store_of(tier)
    write(store, [1], BLOCK)
    tier.read_limit = 0
    assert read(store_of(tier, deadline_s=0.01), [1], BLOCK) == [None]
    tier.read_limit = 1
    assert read(store, [1], BLOCK) == [content(1, BLOCK)]


@pytest.mark.parametrize("zero_copy", [False, True])
def test_a_load_begins_no_reads_after_its_deadline(zero_copy: bool) -> None:
    tier, now = ScriptedTier(BLOCK, immediate=True), [0.0]
    store = store_of(tier, zero_copy=zero_copy, clock=lambda: now[0])
    write(store, [*range(40)], BLOCK)

    def take_a_second(method: str) -> None:
        now[0] += method == "submit_read"

    tier.read_limit, tier.on_call = 1, take_a_second
    memory = np.zeros(40 * BLOCK, np.uint8)
    assert store.load([key(number) for number in range(40)], extents(memory, BLOCK)).sum() == 10
    assert now[0] == 10.0, "deadline_s"


def test_too_large_an_object_is_a_miss(caplog: pytest.LogCaptureFixture) -> None:
    store = store_of(ScriptedTier(BLOCK, immediate=True), staging=4 * BLOCK)
    assert write(store, [1], 5 * BLOCK) == [False]
    assert read(store, [1], 5 * BLOCK) == [None]
    assert "does not fit into the staging memory" in caplog.text


def test_an_object_of_too_many_blocks_is_a_miss(caplog: pytest.LogCaptureFixture) -> None:
    store = ObjectStore([ScriptedTier(1)], block_bytes=1, staging_bytes=1 << 20, deadline_s=10.0)
    size = MOST_PARTS + 1
    path = store.open_path()
    store.extend_path(path, [key(1)], size)
    store.finish_path(path)
    assert write(store, [1], size) == [False]
    assert read(store, [1], size) == [None]
    assert store.find([key(1)], size).tolist() == [False]
    store.delete([key(1)], size)
    assert "use larger blocks" in caplog.text


def test_a_store_that_a_reset_overtakes_writes_nothing() -> None:
    """The objects may belong to the weights before the reset."""
    tier = ScriptedTier(BLOCK, immediate=True)
    tier.room, waits, written = 0, threading.Event(), list[bool]()
    tier.on_call = lambda method: waits.set() if method == "queue_room" else None
    store = store_of(tier)
    writer = threading.Thread(target=lambda: written.extend(write(store, [1], BLOCK)))
    writer.start()
    waits.wait()
    assert store.clear()
    tier.room = 1 << 20
    writer.join()
    assert written == [False]
    assert not tier.blocks
    assert write(store, [1], BLOCK) == [True]


class SlowTier(ScriptedTier):
    """A tier that confirms a reset when the test sets `confirmed`."""

    def __init__(self) -> None:
        super().__init__(BLOCK, immediate=True)
        self.drain_called, self.confirmed = threading.Event(), threading.Event()

    def drain(self, timeout_s: float) -> bool:
        self.drain_called.set()
        return self.confirmed.wait(timeout_s)


def test_other_calls_continue_while_a_reset_waits_for_a_tier() -> None:
    tier, answers = SlowTier(), list[bool]()
    store = store_of(tier)
    assert write(store, [1], BLOCK) == [True]
    clearing = threading.Thread(target=lambda: answers.append(store.clear(60.0)))
    clearing.start()
    tier.drain_called.wait()
    assert not store.find([key(1)], BLOCK).any()
    assert write(store, [2], BLOCK) == [True]
    assert read(store, [1, 2], BLOCK) == [None, content(2, BLOCK)]
    assert answers == [], "the tier has not confirmed"
    tier.confirmed.set()
    clearing.join()
    assert answers == [True]


def test_the_next_tier_is_tried_for_failed_blocks() -> None:
    tiers = [ScriptedTier(BLOCK, immediate=True), ScriptedTier(BLOCK, identity=1, immediate=True)]
    store = store_of(*tiers)
    assert all(write(store, [1, 2, 3], 2 * BLOCK))
    lost = [name for name in tiers[0].blocks if name[:32] == key(2)][:1]

    def fail(job: ScriptedJob) -> None:
        job.fail.update(lost)

    submit = tiers[0]._submit
    tiers[0]._submit = lambda job: (fail(job), submit(job))[1]  # type: ignore[method-assign, func-returns-value]
    assert read(store, [1, 2, 3], 2 * BLOCK) == [content(number, 2 * BLOCK) for number in (1, 2, 3)]
    assert tiers[1]._stats.read == 1


def test_a_lost_part_loses_the_object() -> None:
    tier = ScriptedTier(BLOCK, immediate=True)
    store = store_of(tier)
    assert all(write(store, [1, 2], 3 * BLOCK))
    del tier.blocks[key(1) + b"\1\0"]
    assert store.find([key(1), key(2)], 3 * BLOCK).tolist() == [False, True]
    assert read(store, [1, 2], 3 * BLOCK) == [None, content(2, 3 * BLOCK)]


def test_probes_of_shared_tiers() -> None:
    tier = ScriptedSharedTier(BLOCK, immediate=True)
    store = store_of(tier)
    assert all(write(store, [1], BLOCK))
    tier.presence.clear()
    assert store.find([key(1), key(2)], BLOCK).tolist() == [True, False]


def test_a_silent_server_is_a_miss() -> None:
    tier = ScriptedSharedTier(BLOCK)
    store = store_of(tier, clock=TickingClock())
    assert not store.find([key(1)], BLOCK).any()
    assert not write(store, [1], BLOCK)[0]


def test_refused_counts_as_done_and_busy_does_not(disk: ObjectStore, tmp_path: Path) -> None:
    tier = DiskTier(
        tmp_path / "picky", 64 << 20, BLOCK, key_bytes=KEY_BYTES, fingerprint="objects", admission="reuse:2"
    )
    picky = store_of(tier)
    memory = extents(memory_of([content(1, BLOCK)]), BLOCK)
    for _ in range(2):
        path = picky.open_path()
        picky.extend_path(path, [key(1)], BLOCK)
        assert picky.store([key(1)], memory, path).all()
        picky.finish_path(path)
    assert picky.stats()[0].refused == 1
    assert picky.find([key(1)], BLOCK).all()
    picky.close()
    busy = ScriptedTier(BLOCK)
    busy.room = 0
    assert write(store_of(busy, clock=TickingClock()), [1], BLOCK) == [False]


def test_a_path_keeps_its_beginning(tmp_path: Path) -> None:
    """Under LRU the tail of a path is evicted first, and the path read last stays."""
    tier = DiskTier(tmp_path / "small", 2 << 20, BLOCK, key_bytes=KEY_BYTES, fingerprint="objects")
    store, room = store_of(tier), tier.stats().capacity
    for start in range(0, 3 * room, 10):
        numbers = list(range(start, start + 10))
        path = store.open_path()
        store.extend_path(path, [key(number) for number in numbers], BLOCK)
        memory = memory_of([content(number, BLOCK) for number in numbers])
        assert store.store([key(number) for number in numbers], extents(memory, BLOCK), path).all()
        store.finish_path(path)
    present = store.find([key(number) for number in range(3 * room)], BLOCK).reshape(-1, 10)
    assert present[-1].all()
    assert not present[0].any()
    for row in present.tolist():  # heads, never a tail without them
        assert row == sorted(row, reverse=True)
    store.close()


def test_a_raising_tier_is_a_miss() -> None:
    tier = ScriptedTier(BLOCK, immediate=True)
    store = store_of(tier, clock=TickingClock())
    assert all(write(store, [1], BLOCK))

    def fail(method: str) -> None:
        raise OSError(5, method)

    tier.on_call = fail
    assert read(store, [1], BLOCK) == [None]
    assert write(store, [2], BLOCK) == [False]
    assert not store.find([key(1)], BLOCK).any()
    store.delete([key(1)], BLOCK)
    assert not store.clear(0.0)
    store.close()


def test_threads_at_once(disk: ObjectStore) -> None:
    """Four threads write, read and look up overlapping objects; no thread gets wrong bytes."""
    seed = random.randrange(1 << 30)
    print("seed", seed)
    errors = list[BaseException]()
    size = 2 * BLOCK + 77

    def work(number: int) -> None:
        chance = random.Random(seed + number)
        try:
            for _ in range(40):
                chosen = chance.sample(range(60), 12)
                if chance.random() < 0.5:
                    write(disk, chosen, size)
                for wanted, result in zip(chosen, read(disk, chosen, size), strict=True):
                    assert result is None or result == content(wanted, size)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors
    assert sum(served is not None for served in read(disk, list(range(60)), size)) > 50


def test_after_close_everything_is_a_miss(disk: ObjectStore) -> None:
    assert all(write(disk, [1], BLOCK))
    disk.close()
    disk.close()
    assert read(disk, [1], BLOCK) == [None]
    assert write(disk, [1], BLOCK) == [False]
    assert not disk.find([key(1)], BLOCK).any()
