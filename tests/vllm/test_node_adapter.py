"""Our manager behind vLLM's interface for several engines on one pool, without engines."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvoffload.node.pool_directory import SHARED_MEMORY, PoolDirectory
from support.vllm_world import MISS, PENDING, World, base, key

SHARED = {"ram": {"size": "1GiB", "shared": "node"}}
PATH = [key(number) for number in range(4)]


@pytest.fixture
def engine() -> Iterator[Callable[..., World]]:
    """A function that starts an engine on one pool of 16 blocks."""
    root = Path(tempfile.mkdtemp(prefix="kvoffload-test-", dir=SHARED_MEMORY))
    made: list[World] = []
    directories: list[PoolDirectory] = []

    def start(**options: Any) -> World:
        directory = PoolDirectory.join({"test": 1}, f"engine-{len(made)}", keep_s=60.0, root=root)
        directories.append(directory)
        made.append(World(root, 16, directory, **(SHARED | options)))
        return made[-1]

    yield start
    for world, directory in zip(made, directories, strict=True):
        world.close()
        directory.close()
    shutil.rmtree(root)


def test_an_engine_finds_the_blocks_of_another(engine: Callable[..., World]) -> None:
    one, two = engine(), engine()
    assert one.serve("first", PATH) == (0, PATH)
    assert two.serve("second", PATH) == (4, [])
    assert two.manager.core.stats().stored == 4
    assert (one.manager.core.counters().stored, two.manager.core.counters().stored) == (4, 0)
    one.check()
    two.check()


def test_damage_by_another_engine_is_a_miss(engine: Callable[..., World]) -> None:
    one, two = engine(), engine()
    one.serve("first", PATH)
    slot = one.manager.core.slots_of([PATH[2]])[0]
    one.pool.part(0)[slot, 100] ^= 1
    assert two.serve("second", PATH) == (2, [PATH[2]]), "only the damaged block is stored again"


def test_a_block_that_another_engine_writes_is_awaited_until_the_deadline(
    engine: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr("kvoffload.integrations.vllm.scheduler_side.lookups.time.monotonic", lambda: now[0])
    one, two = engine(), engine(tier_deadline_s=2.0)
    one.store(one.request("first", PATH), PATH)
    ctx = two.request("second", PATH)
    assert two.manager.lookup(PATH[0], ctx) is PENDING
    now[0] += 1.9
    assert two.manager.lookup(PATH[0], ctx) is PENDING
    now[0] += 0.2
    assert two.manager.lookup(PATH[0], ctx) is MISS


def test_a_reset_keeps_the_slots_of_transfers_that_still_run(engine: Callable[..., World]) -> None:
    """Otherwise a late copy of one engine would overwrite blocks of another before their checksums."""
    one, two = engine(), engine()
    ctx = one.request("first", PATH)
    writing = one.store(ctx, PATH).store_spec.block_ids.tolist()
    loading = one.request("load", [key(7)])
    two.serve("other", [key(7)])
    assert one.hits(loading, [key(7)]) == 1
    pinned = one.manager.prepare_load([key(7)], loading).block_ids.tolist()
    one.manager.reset_cache()
    plenty = [key(100 + number) for number in range(16)]
    busy = {*writing, *pinned}
    stored = two.store(two.request("second", plenty), plenty)
    assert busy.isdisjoint(stored.store_spec.block_ids.tolist())
    assert len(stored.keys_to_store) == 16 - len(busy)
    assert one.manager.core.stats().condemned == len(busy)
    two.manager.complete_store(set(stored.keys_to_store), two.request("second", plenty))
    # A transfer that began after the reset has ended, so the others have ended before.
    assert one.serve("third", [key(200)]) == (0, [key(200)])
    assert one.manager.core.stats().condemned == 0
    assert not one.manager.broken


def test_a_reset_by_another_engine_between_lookup_and_load(engine: Callable[..., World]) -> None:
    """The load fails, its request is computed, and offloading goes on."""
    one, two = engine(), engine()
    one.serve("first", PATH)
    ctx = one.request("second", PATH)
    assert one.hits(ctx, PATH) == 4
    two.manager.reset_cache()
    assert one.manager.prepare_load(PATH, ctx).block_ids.tolist() == [-1] * 4
    one.manager.complete_load(set(PATH), ctx)
    assert one.hits(ctx, PATH) == 0
    one.manager.on_request_finished(ctx)
    assert one.serve("third", PATH) == (0, PATH)
    assert two.serve("fourth", PATH) == (4, [])
    one.check()


def test_requests_with_an_adapter_use_no_shared_pool(engine: Callable[..., World]) -> None:
    one, two = engine(), engine()
    one.serve("first", PATH)
    ctx = two.request("adapter", PATH)
    two.manager.note_adapter("adapter")
    assert two.manager.lookup(PATH[0], ctx) is MISS
    assert two.manager.lookup_prefix(PATH, ctx) == (0, False)
    assert two.manager.prepare_store([key(50)], ctx).keys_to_store == []
    two.manager.on_request_finished(ctx)
    assert two.manager.lookup(key(50), two.request("r", [key(50)])) is MISS


def test_keys_of_another_length_are_refused_once(engine: Callable[..., World]) -> None:
    """The pool's keys have 36 bytes: the engine continues without offloading."""
    one = engine()
    short = base.make_offload_key(bytes(8), 0)
    assert one.manager.lookup(short, one.request("r", [short])) is MISS
    assert one.manager.broken


def test_a_block_that_was_stored_again_is_verified_again(engine: Callable[..., World]) -> None:
    one, two = engine(), engine()
    one.serve("first", PATH)
    ctx = one.request("second", PATH)
    assert one.hits(ctx, PATH) == 4
    two.manager.core.discard(PATH)
    two.serve("third", PATH)
    slots = one.manager.core.slots_of(PATH)
    one.pool.part(0)[slots[0], 100] ^= 1
    assert one.hits(ctx, PATH) == 0, "the new block is damaged"
    one.manager.on_request_finished(ctx)
    assert not one.manager.broken


def test_an_engine_that_stops_after_an_error_releases_its_pins(engine: Callable[..., World]) -> None:
    one, two = engine(), engine()
    two.serve("first", PATH)
    storing, loading, checking = (one.request(name, keys) for name, keys in (
        ("store", [key(50)]), ("load", PATH[:1]), ("check", PATH[1:])
    ))  # fmt: skip
    one.store(storing, [key(50)])
    assert one.hits(loading, PATH[:1]) == 1
    one.manager.prepare_load(PATH[:1], loading)
    assert one.hits(checking, PATH[1:]) == 3
    one.manager.stop_after_error("test")
    assert one.manager.broken
    one.manager.complete_store({key(50)}, storing)
    one.manager.complete_load({PATH[0]}, loading)
    stats = two.manager.core.stats()
    assert (stats.writing, stats.condemned, stats.ready - stats.evictable) == (0, 0, 0)
    assert two.serve("again", PATH) == (4, [])
    assert two.serve("and again", [key(50)]) == (1, [])
