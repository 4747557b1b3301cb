"""`miss_blocks`: every looked-up block of a request that began is loaded, or has one reason."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.kv_offload import base

from kvoffload.core.miss_reasons import LIVE_REASONS
from support.vllm_needs import CONNECTOR, POSITIONS, needs
from support.vllm_traffic import Expected, check_nothing_is_left, drive
from support.vllm_world import World, key

pytestmark = [pytest.mark.filterwarnings("ignore")]

PREFIX = "vllm:kvoffload_"


class Tally:
    """Sum of the counts that a manager has reported to vLLM."""

    def __init__(self, manager: Any) -> None:
        self.manager, self.lookups, self.hits, self.misses = manager, 0, 0, Counter[str]()
        manager.metrics.interval_s = 0.0
        self._get_stats = manager.get_stats

    def watch(self) -> Tally:
        """Add up the reports that the engine takes from now on."""
        self.manager.get_stats = self.take
        return self

    def take(self) -> Any:
        taken = self._get_stats()
        values = vars(taken)["data"]["data"] if taken is not None else {}
        self.lookups += sum(values.get(f"{PREFIX}lookup_blocks", {}).values())
        self.hits += sum(values.get(f"{PREFIX}hit_blocks", {}).values())
        for (reason,), count in values.get(f"{PREFIX}miss_blocks", {}).items():
            assert reason in LIVE_REASONS
            assert count >= 0
            self.misses[reason] += int(count)
        assert self.lookups == self.hits + self.misses.total(), (self.lookups, self.hits, self.misses)
        return taken

    def of(self, call: Callable[[], Any]) -> dict[str, int]:
        """Return the misses by reason that a call adds."""
        self.take()
        before = self.misses.copy()
        call()
        self.take()
        return dict(self.misses - before)


def serve(rig: World, name: str, keys: list[bytes], *, at_once: bool) -> None:
    """Serve a request in vLLM's order: the step ends after the load and before the store."""
    ctx = rig.request(name, keys)
    hits = rig.manager.lookup_prefix(keys, ctx)[0] if at_once else rig.hits(ctx, keys)
    if hits:
        rig.manager.prepare_load(keys[:hits], ctx)
    rig.manager.on_schedule_end(base.ScheduleEndContext([] if hits else [name], []))
    rig.manager.complete_load({*keys[:hits]}, ctx)
    output = rig.store(ctx, keys[hits:]) if hits < len(keys) else None
    rig.manager.complete_store({*(output.keys_to_store if output else ())}, ctx)
    rig.manager.on_request_finished(ctx)


@pytest.fixture(params=[False, True], ids=["key by key", "prefix"])
def at_once(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@needs(*POSITIONS)
def test_every_block_behind_the_first_miss_has_a_reason(tmp_path: Path, at_once: bool) -> None:
    rig = World(tmp_path, 4)
    tally = Tally(rig.manager)
    first_path, second_path = [key(n) for n in range(3)], [key(n) for n in range(10, 13)]
    assert tally.of(lambda: serve(rig, "a", first_path, at_once=at_once)) == {"never_seen": 3}
    assert tally.of(lambda: serve(rig, "b", second_path, at_once=at_once)) == {"never_seen": 3}
    assert tally.of(lambda: serve(rig, "c", first_path, at_once=at_once)) == {"evicted": 2}
    assert tally.of(lambda: serve(rig, "d", [key(99), *first_path], at_once=at_once)) == {
        "never_seen": 1,
        "behind_a_gap": 3,
    }
    rig.manager.reset_cache()
    assert tally.of(lambda: serve(rig, "e", first_path[:1], at_once=at_once)) == {"reset": 1}
    assert tally.hits == 1
    rig.close()


@needs(*POSITIONS)
def test_requests_that_may_load_nothing(tmp_path: Path, at_once: bool) -> None:
    keys = [key(n) for n in range(4)]
    rig = World(tmp_path, 8, audit="share=1")
    tally = Tally(rig.manager)
    serve(rig, "a", keys[:3], at_once=at_once)
    assert tally.of(lambda: serve(rig, "b", keys, at_once=at_once)) == {"audit": 3, "never_seen": 1}
    rig.manager.stop_after_error("a test")
    assert tally.of(lambda: serve(rig, "c", keys, at_once=at_once)) == {"paused": 4}
    rig.close()


@needs(*POSITIONS)
def test_requests_that_end_in_the_queue_do_not_count(tmp_path: Path, at_once: bool) -> None:
    rig, keys = World(tmp_path, 8), [key(n) for n in range(4)]
    tally = Tally(rig.manager)

    def wait_and_end() -> None:
        ctx = rig.request("a", keys)
        for _ in range(3):
            rig.manager.lookup_prefix(keys, ctx) if at_once else rig.lookup(ctx, keys)
            rig.manager.on_schedule_end(base.ScheduleEndContext([], []))
        rig.manager.on_request_finished(ctx)

    assert tally.of(wait_and_end) == {}
    assert tally.lookups == 0
    rig.close()


@pytest.mark.parametrize("options", [{}, {"verify": "always"}, {"admission": "reuse:2"}, {"policy": "arc"}])
@pytest.mark.parametrize("seed", range(3))
def test_the_sum_in_any_order(tmp_path: Path, at_once: bool, options: dict[str, Any], seed: int) -> None:
    """Requests overlap, wait, end early and fail, with resets; the seed is in the name."""
    rng, rig = random.Random(seed), World(tmp_path, 10, **options)
    tally, running = Tally(rig.manager), dict[str, tuple[Any, list[bytes], int]]()
    for number in range(150):
        name, trunk = f"r{number}", rng.randrange(4)
        keys = [key(100 * trunk + place) for place in range(rng.randrange(1, 7))]
        ctx = rig.request(name, keys)
        num_on_device = rng.randrange(len(keys)) if rng.random() < 0.3 else 0
        wanted = keys[num_on_device:]
        hits = None
        while hits is None and rng.random() < 0.999:
            if at_once:
                num_hits, waits = rig.manager.lookup_prefix(wanted, ctx)
                hits = None if waits else num_hits
            else:
                hits = rig.lookup(ctx, wanted)
            if hits is None:
                rig.manager.on_schedule_end(base.ScheduleEndContext([], []))
        begun = hits is not None and rng.random() < 0.9
        if begun and hits:
            rig.manager.prepare_load(wanted[:hits], ctx)
        rig.manager.on_schedule_end(base.ScheduleEndContext([name] if begun and not hits else [], []))
        if begun and hits:
            rig.manager.complete_load({*wanted[:hits]}, ctx)
        if not begun:
            rig.manager.on_request_finished(ctx)
            continue
        output = rig.store(ctx, wanted[hits:]) if hits < len(wanted) else None
        stored = output.keys_to_store if output else []
        running[name] = ctx, stored, hits
        if rng.random() < 0.02:
            rig.manager.reset_cache()
            running = {other: (context, [], 0) for other, (context, _, _) in running.items()}
        while len(running) > 2:
            other = rng.choice(list(running))
            context, stored, _ = running.pop(other)
            rig.manager.complete_store({*stored}, context, rng.random() < 0.9)
            rig.manager.on_request_finished(context)
        tally.take()
    assert not rig.manager.broken
    assert tally.hits > 20
    assert tally.misses["evicted"] > 20 or options.get("admission")
    assert bool(tally.misses["not_admitted"]) == bool(options.get("admission"))
    rig.close()


@needs(*CONNECTOR)
@pytest.mark.parametrize(
    ("connector", "options", "likely"),
    [
        (True, {"ram": "4MiB"}, "evicted"),
        (False, {"ram": "4MiB"}, "evicted"),
        (True, {"ram": "32MiB", "admission": "reuse:2"}, "not_admitted"),
        (True, {"ram": "4MiB", "store": "on-device-eviction"}, "evicted"),
    ],
)
def test_engines_under_load(
    start_engine: Callable[..., Any],
    llama: Path,
    on_llama: Expected,
    connector: bool,
    options: dict[str, Any],
    likely: str,
) -> None:
    """With preemption, aborts and eviction in a real engine the sum is exact in every report."""
    engine = start_engine(llama, options, connector=connector)
    tally = Tally(engine.manager).watch()
    outcome = drive(engine, on_llama.chats, on_llama.chat_answers, seed=4, requests=60, aborts=0.1)
    engine.drain()
    tally.take()
    assert not outcome.wrong, outcome
    assert tally.hits > 0
    assert tally.misses[likely] > 0
    assert tally.misses["never_seen"] > 0
    assert not tally.misses["paused"]
    check_nothing_is_left(engine)


@needs(*CONNECTOR)
@pytest.mark.parametrize("connector", [False, True])
def test_two_kv_groups(
    start_engine: Callable[..., Any], hybrid: Path, on_hybrid: Expected, connector: bool
) -> None:
    settings = {"num_gpu_blocks_override": 48, "disable_hybrid_kv_cache_manager": False}
    engine = start_engine(hybrid, {"ram": "4MiB"}, connector=connector, **settings)
    tally = Tally(engine.manager).watch()
    outcome = drive(engine, on_hybrid.chats, on_hybrid.chat_answers, seed=4, requests=40)
    engine.drain()
    tally.take()
    assert not outcome.wrong, outcome
    assert tally.hits > 0
    assert tally.misses["never_seen"] > 0
    assert tally.misses["evicted"] > 0, tally.misses
    check_nothing_is_left(engine)
