"""Our manager behind vLLM's interface, without an engine: the connector's calls in every order."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvoffload.core.hints import NO_HINTS, Hints
from kvoffload.core.policy import POLICIES
from kvoffload.tiers.spec import TierOwner, open_tiers
from support.scripted_tier import ScriptedTier
from support.timeouts import HANGS_S
from support.vllm_needs import POSITIONS, needs
from support.vllm_world import HIT, MISS, PENDING, World, base, key

USUAL_KEY_BYTES = pytest.importorskip("kvoffload.integrations.vllm.shared.tiers").USUAL_KEY_BYTES
user_hints = pytest.importorskip("kvoffload.integrations.vllm.scheduler_side.hints").user_hints

BUILTIN = [name for name in POLICIES.names() if ":" not in name]


@pytest.fixture
def world(tmp_path: Path) -> Iterator[Callable[..., World]]:
    made: list[World] = []

    def make(capacity: int = 8, **options: Any) -> World:
        made.append(World(tmp_path, capacity, **options))
        return made[-1]

    yield make
    for item in made:
        item.close()


@pytest.mark.parametrize("policy", BUILTIN)
@pytest.mark.parametrize("verify", ["tiers", "always"])
def test_every_policy_serves_stored_blocks(world: Callable[..., World], policy: str, verify: str) -> None:
    """Serve random trees of requests; every hit is read and compared."""
    rng, rig = (
        random.Random(f"{policy}{verify}"),
        world(24, policy=policy, verify=verify, admission="reuse:2"),
    )
    served = 0
    for number in range(150):
        trunk, length = rng.randrange(4), rng.randrange(1, 9)
        keys = [key(1000 * trunk + position) for position in range(length)]
        if rng.random() < 0.5:
            keys += [key(10**6 + 100 * rng.randrange(40) + position) for position in range(rng.randrange(4))]
        served += rig.serve(str(number), keys)[0]
        rig.check()
    assert served > 100


def test_a_hit_refreshes_the_blocks_served_by_the_device(world: Callable[..., World]) -> None:
    rig = world(4)
    path = [key(1), key(2), key(3)]
    rig.serve("first", path)
    rig.serve("other", [key(8)])
    ctx = rig.request("turn 2", path)
    # The device has the first two blocks: vLLM looks up the third, and has noted all of them.
    assert rig.hits(ctx, path[2:]) == 1
    rig.manager.prepare_load(path[2:], ctx)
    rig.manager.complete_load(set(path[2:]), ctx)
    rig.manager.on_request_finished(ctx)
    rig.serve("new", [key(9)])
    assert [rig.manager.core.lookup_key(k).name for k in [*path, key(8)]] == ["HIT", "HIT", "HIT", "MISS"]


def test_retries_count_once(world: Callable[..., World]) -> None:
    rig = world(4, admission="reuse:2")
    ctx = rig.request("r", [key(1)])
    for _ in range(5):
        assert rig.manager.lookup(key(1), ctx) is MISS
        assert rig.manager.prepare_store([key(1)], ctx).keys_to_store == []
        rig.manager.on_schedule_end(base.ScheduleEndContext([], ["r"]))
    rig.manager.on_request_finished(ctx)
    assert rig.serve("again", [key(1)])[1] == [key(1)]


@needs(*POSITIONS)
def test_a_partial_store_keeps_the_head_of_every_group(world: Callable[..., World]) -> None:
    """vLLM offers one group after the other; the stored keys keep the order of the offer."""
    rig = world(4)
    keys = [key(number, group) for group in (0, 1) for number in range(5)]
    ctx = rig.request("r", keys, groups=2)
    output = rig.store(ctx, keys)
    assert output.keys_to_store == [key(0, 0), key(1, 0), key(0, 1), key(1, 1)]
    assert rig.read(output.store_spec) == output.keys_to_store, "slots in the same order"


def test_a_prefix_larger_than_the_pool_keeps_its_head_and_ends(world: Callable[..., World]) -> None:
    rig = world(4)
    path = [key(number) for number in range(9)]
    assert rig.serve("r", path) == (0, path[:4])
    ctx = rig.request("again", path)
    assert rig.hits(ctx, path) == 4
    rig.manager.prepare_load(path[:4], ctx)
    assert rig.manager.prepare_store(path[4:], ctx) is None, "refused for now, while a transfer runs"
    rig.manager.complete_load(set(path[:4]), ctx)
    output = rig.manager.prepare_store(path[4:], ctx)
    assert output.keys_to_store == [], "refused forever, so that vLLM does not offer it in each step"


def test_transfers_end_late_and_in_pieces(world: Callable[..., World]) -> None:
    rig = world(8)
    path = [key(number) for number in range(4)]
    ctx = rig.request("r", path)
    rig.store(ctx, path)
    rig.manager.on_request_finished(ctx)
    rig.manager.complete_store({path[2], path[0]}, ctx)
    other = rig.request("s", path)
    assert [rig.manager.lookup(k, other) for k in path] == [HIT, PENDING, HIT, PENDING]
    rig.manager.complete_store({path[1]}, ctx, success=False)
    rig.manager.complete_store({path[3]}, ctx)
    assert [rig.manager.lookup(k, other) for k in path] == [HIT, MISS, HIT, HIT]
    spec = rig.manager.prepare_load([path[0], path[2]], other)
    assert rig.read(spec) == [path[0], path[2]]
    rig.manager.on_request_finished(other)
    rig.manager.complete_load({path[2]}, other)
    assert rig.manager.core.stats().ready - rig.manager.core.stats().evictable == 1
    rig.manager.complete_load({path[0]}, other)
    rig.check()
    assert rig.manager.core.stats().evictable == 3


def test_blocks_that_a_worker_could_not_copy_are_forgotten(world: Callable[..., World]) -> None:
    rig = world(8)
    path = [key(number) for number in range(4)]
    ctx = rig.request("r", path)
    output = rig.store(ctx, path)
    rig.pool.fail(0, output.store_spec.block_ids[1:2])
    rig.manager.complete_store(set(path), ctx)
    assert rig.hits(ctx, path) == 1
    spec = rig.manager.prepare_load([path[0], path[2]], ctx)
    rig.pool.fail(0, spec.block_ids[:1])
    rig.manager.complete_load({path[0], path[2]}, ctx)
    assert rig.hits(ctx, path) == 0
    assert rig.manager.lookup(path[2], ctx) is HIT
    rig.manager.on_request_finished(ctx)
    rig.check()
    assert rig.serve("again", path) == (0, path[:2]), "the blocks can be stored again"


def test_damaged_block_is_a_miss(world: Callable[..., World]) -> None:
    rig = world(24, verify="always")
    path = [key(number) for number in range(6)]
    rig.serve("r", path)
    later = rig.manager._verifier._thread = Later()
    plan = rig.manager.core.prepare_load([path[3]])
    rig.pool.part(0)[plan.slots[0], 17] ^= 4
    rig.manager.core.unpin(plan)
    ctx, same_time = rig.request("a", path), rig.request("b", path)
    assert rig.lookup(ctx, path) is None
    assert rig.lookup(same_time, path) is None
    while later.tasks:
        later.run()
    assert rig.hits(ctx, path) == 3
    assert rig.hits(same_time, path) == 3
    assert rig.manager.metrics.counts["verification_failures"] in (1, 2)
    for request in (ctx, same_time):
        rig.manager.on_request_finished(request)
    assert rig.manager.core.lookup(path).num_ready == 3, "the damaged block is forgotten"
    rig.check()


def test_a_verification_that_fails_is_a_miss(
    world: Callable[..., World], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rig = world(8, verify="always")
    path = [key(number) for number in range(3)]
    rig.serve("r", path)

    def fail(*_: Any) -> None:
        raise OSError("gone")

    monkeypatch.setattr(rig.pool, "verify", fail)
    ctx = rig.request("a", path)
    with caplog.at_level("ERROR", "vllm.kvoffload"):
        assert rig.hits(ctx, path) == 0
    assert "a block cannot be verified, and counts as damaged: OSError: gone" in caplog.text
    rig.manager.on_request_finished(ctx)
    rig.check()


def test_a_wait_for_verification_blocks_no_other_request(world: Callable[..., World]) -> None:
    """Verified blocks of waiting requests pin at most half of the pool; other requests get the rest."""
    rig = world(8, verify="always")
    path = [key(number) for number in range(8)]
    rig.serve("r", path)
    waiting = rig.request("waits", path)
    assert rig.hits(waiting, path) == 4
    other = rig.request("other", path)
    assert rig.hits(other, path) == 0
    assert rig.store(rig.request("new", [key(99)]), [key(99)]).keys_to_store == [key(99)]
    rig.manager.on_schedule_end(base.ScheduleEndContext(["waits"], []))
    assert rig.hits(other, path) > 0
    for request in (waiting, other):
        rig.manager.on_request_finished(request)
    rig.check()


@pytest.mark.parametrize("begins", ["loads", "stores", "runs"])
def test_a_preempted_request_loads_in_the_step_after_the_report(
    world: Callable[..., World], begins: str
) -> None:
    """vLLM crashes if the step that reports a preemption by a reset also begins a load of the request."""
    rig, path = world(8), [key(number) for number in range(4)]
    rig.serve("r", path)
    ctx = rig.request("a", path)
    assert rig.hits(ctx, path) == 4
    if begins == "loads":
        rig.manager.prepare_load(path, ctx)
        rig.manager.complete_load({*path}, ctx)
    elif begins == "stores":
        rig.manager.on_schedule_end(base.ScheduleEndContext(["a"], []))
        rig.store(ctx, [key(50)])  # like vLLM: in the same step, after the report of the request's end
    else:
        rig.manager.on_schedule_end(base.ScheduleEndContext(["a"], []))
    assert rig.lookup(ctx, path) is None
    assert rig.lookup(ctx, path) is None
    rig.manager.on_schedule_end(base.ScheduleEndContext([], ["a"]))
    assert rig.hits(ctx, path) == 4
    # A preemption without a report, as after a failed load: the request waits for one step.
    rig.manager.prepare_load(path, ctx)
    rig.manager.complete_load({*path}, ctx)
    assert rig.lookup(ctx, path) is None
    rig.manager.on_schedule_end(base.ScheduleEndContext([], []))
    # vLLM does not report that a preempted request resumes without a load: it may run after any answer.
    for _ in range(3):
        assert rig.lookup(ctx, path) == 4
        rig.manager.on_schedule_end(base.ScheduleEndContext([], []))
        assert rig.lookup(ctx, path) is None
        rig.manager.on_schedule_end(base.ScheduleEndContext([], []))
    rig.manager.on_request_finished(ctx)
    rig.check()


def test_a_request_that_ran_without_a_lookup_waits_for_a_step_as_well(world: Callable[..., World]) -> None:
    """vLLM makes no lookup if the GPU's cache covers the prompt."""
    rig, path = world(8), [key(number) for number in range(4)]
    rig.serve("r", path)
    ctx = rig.request("a", path)
    rig.manager.on_schedule_end(base.ScheduleEndContext(["a"], []))
    assert rig.lookup(ctx, path) is None
    rig.manager.on_schedule_end(base.ScheduleEndContext([], ["a"]))
    assert rig.lookup(ctx, path) == 4
    rig.manager.on_request_finished(ctx)
    assert not rig.manager._arrivals
    rig.check()


def test_reset_during_loads_and_stores(world: Callable[..., World]) -> None:
    rig = world(8, verify="always")
    path = [key(number) for number in range(4)]
    rig.serve("r", path)
    ctx = rig.request("a", path)
    assert rig.hits(ctx, path) == 4
    rig.manager.prepare_load(path, ctx)
    other = rig.request("b", path)
    rig.lookup(other, path)
    rig.store(other, [key(50), key(51)])
    rig.manager.reset_cache()
    rig.check()
    assert rig.manager.core.stats().free == 8
    # Neither transfer is ever completed. Both requests continue, and store no block from before the reset.
    assert rig.hits(ctx, path) == 0
    assert rig.store(ctx, path).keys_to_store == []
    for request in (ctx, other):
        rig.manager.on_request_finished(request)
    assert rig.serve("again", path) == (0, path)
    assert rig.serve("again", path) == (4, [])
    assert not rig.manager._arrivals


def test_an_internal_error_does_not_stop_the_engine(
    world: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = world(8)
    path = [key(number) for number in range(4)]
    rig.serve("r", path)
    rig.manager.metrics.interval_s = 0.0

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("a bug")

    for call in ("lookup_key", "prepare_load", "prepare_store", "finish_request", "take_events", "counters"):
        with monkeypatch.context() as broken:
            broken.setattr(rig.manager.core, call, fail)
            ctx = rig.request(call, path)
            if rig.lookup(ctx, path):
                spec = rig.manager.prepare_load(path, ctx)
                assert (spec.block_ids.tolist() == [-1] * 4) == (call == "prepare_load")
                rig.manager.complete_load(set(path), ctx)
            output = rig.manager.prepare_store([key(70)], ctx)
            rig.manager.complete_store(set(output.keys_to_store), ctx)
            rig.manager.on_request_finished(ctx)
            assert rig.manager.take_events() is not None
            reported = rig.manager.get_stats()
        assert rig.manager.broken, call
        assert "'vllm:kvoffload_internal_errors': {(): 1}" in repr(reported.data), (
            "errors are reported nevertheless"
        )
        assert "'vllm:kvoffload_paused': {(): 1}" in repr(reported.data), call
        assert rig.manager.lookup(path[0], rig.request("after", path)) is MISS
        rig.manager.reset_cache()
        assert not rig.manager.broken
        assert "'vllm:kvoffload_paused': {(): 0}" in repr(rig.manager.get_stats().data), call
        rig.manager.take_events()
        rig.resident.clear()
        assert rig.serve("again", path) == (0, path)
        rig.check()


def test_keys_of_another_length(world: Callable[..., World]) -> None:
    rig = world(8)
    path = [bytes([number]) * 20 for number in range(4)]
    ctx = rig.request("r", path)
    assert rig.hits(ctx, path) == 0
    output = rig.manager.prepare_store(path, ctx)
    assert output.keys_to_store == path
    rig.manager.complete_store(set(path), ctx)
    assert rig.hits(ctx, path) == 4
    rig.check()


def test_dropped_blocks_with_keys_of_another_length(world: Callable[..., World]) -> None:
    """Before the first request with a whole block in its prompt, the device may drop blocks of answers."""
    rig = world(8, store="on-device-eviction")
    keys = [bytes([number]) * 20 for number in range(4)]
    rig.manager.keep_dropped(keys[:1])
    assert rig.manager.metrics.counts["lost_blocks"] == 1
    output = rig.manager.store_dropped(keys)
    assert output.keys_to_store == keys
    rig.manager.complete_store(set(keys), base.ReqContext(""))
    rig.check()


class Later:
    """An executor that runs its work on request."""

    def __init__(self) -> None:
        self.tasks: list[Callable[[], None]] = []

    def submit(self, work: Callable[..., Any], *args: Any) -> Future[Any]:
        future = Future[Any]()
        self.tasks.append(lambda: future.set_result(work(*args)))
        return future

    def run(self) -> None:
        if self.tasks:
            self.tasks.pop(0)()

    def shutdown(self, **_: Any) -> None:
        self.tasks.clear()


class Script:
    """A connector that makes any permitted call, chosen by `draw`."""

    def __init__(self, world: World, draw: Callable[[int], int]) -> None:
        self.world, self.manager, self.draw = world, world.manager, draw
        self.live: dict[str, tuple[Any, list[bytes], bool]] = {}
        self.jobs: list[tuple[Any, set[bytes], bool]] = []
        self.made, self.later = 0, Later()
        if self.manager._verifier is not None:
            self.manager._verifier._thread = self.later

    def step(self) -> None:
        steps = (self.begin, self.look, self.verify, self.look, self.offer, self.end, self.end, self.finish)
        (*steps, self.reset)[self.draw(len(steps) + 1)]()
        self.world.check()

    def begin(self) -> None:
        start, self.made = self.draw(12), self.made + 1
        keys = [key(number) for number in range(start, start + 1 + self.draw(6))]
        name = f"r{self.made}"
        self.live[name] = (self.world.request(name, keys), keys, False)

    def verify(self) -> None:
        for _ in range(self.draw(6)):
            self.later.run()

    def pick(self) -> str | None:
        return sorted(self.live)[self.draw(len(self.live))] if self.live else None

    def look(self) -> None:
        name = self.pick()
        if name is None or any(ctx.req_id == name for ctx, _, _ in self.jobs):
            return
        ctx, keys, _ = self.live[name]
        hits = self.world.lookup(ctx, keys)
        if hits and self.draw(4):
            assert self.world.read(self.manager.prepare_load(keys[:hits], ctx)) == keys[:hits]
            self.jobs.append((ctx, set(keys[:hits]), False))

    def offer(self) -> None:
        name = self.pick()
        if name is None or any(ctx.req_id == name and not store for ctx, _, store in self.jobs):
            return
        ctx, keys, _ = self.live[name]
        output = self.world.store(ctx, keys[self.draw(len(keys)) :])
        if output is not None and output.keys_to_store:
            self.jobs.append((ctx, set(output.keys_to_store), True))

    def end(self) -> None:
        if not self.jobs:
            return
        ctx, keys, store = self.jobs.pop(self.draw(len(self.jobs)))
        ended = set(sorted(keys)[: 1 + self.draw(len(keys))])
        if keys - ended:
            self.jobs.append((ctx, keys - ended, store))
        (self.manager.complete_store if store else self.manager.complete_load)(ended, ctx)

    def finish(self) -> None:
        name = self.pick()
        if name is not None:
            self.manager.on_request_finished(self.live.pop(name)[0])

    def reset(self) -> None:
        if self.draw(5) == 0:
            self.manager.reset_cache()
            self.jobs.clear()

    def drain(self) -> None:
        for ctx, keys, store in self.jobs:
            (self.manager.complete_store if store else self.manager.complete_load)(keys, ctx)
        while self.live:
            self.finish()
        self.world.check()
        stats = self.manager.core.stats()
        assert (stats.writing, stats.condemned, stats.ready - stats.evictable) == (0, 0, 0)
        assert (len(self.manager._loads), len(self.manager._stores)) == (0, 0)
        assert not self.manager._requests


@pytest.mark.parametrize("verify", ["tiers", "always"])
@given(data=st.data(), policy=st.sampled_from(["lru", "arc", "s3fifo"]))
def test_any_order(tmp_path_factory: pytest.TempPathFactory, verify: str, data: Any, policy: str) -> None:
    """Requests begin, look up, load, store, end in pieces and finish in any order, with resets in between."""
    rig = World(tmp_path_factory.mktemp("pool"), 6, verify=verify, policy=policy)
    script = Script(rig, lambda below: data.draw(st.integers(0, below - 1)))
    for _ in range(data.draw(st.integers(5, 60))):
        script.step()
    script.drain()
    rig.close()


def with_parameters(parameters: Any, name: str = "a") -> Any:
    return base.ReqContext(name, kv_transfer_params=parameters)


def test_hints_of_a_user_reach_the_manager(tmp_path: Path) -> None:
    rig = World(tmp_path, 4)
    given = {"session_over": True, "priority": 3, "time_to_live_s": 600, "tenant": "them"}
    ctx = with_parameters({"kvoffload": given, "other": 1})
    rig.manager.on_new_request(ctx)
    rig.manager.lookup(key(1), ctx)
    began = rig.manager._requests["a"].ctx
    assert began.hints == Hints("", True, 3, 600.0, "them")
    rig.manager.add_hints("a", Hints("stop"))
    rig.manager.on_request_finished(ctx)
    assert began.hints == Hints("stop", True, 3, 600.0, "them")
    assert not rig.manager._arrivals


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"tenants": "a"}, "unknown field `tenants`"),
        ({"time_to_live_s": -1}, r">= 0.* - at `\$.time_to_live_s`"),
        ({"session_over": "yes"}, r"Expected `bool`, got `str` - at `\$.session_over`"),
        ("session_over", "Expected `object`, got `str`"),
        ({"priority": 10**30}, r"Expected `int` .* - at `\$.priority`"),
        ({"\ud800": 1}, "surrogates not allowed"),
    ],
)
def test_wrong_hints_of_a_user_are_named_and_ignored(
    tmp_path: Path, given: Any, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    parameters = {"kvoffload": given}
    with pytest.raises(
        ValueError, match=f"kv_transfer_params: kvoffload: .*{why}.*allowed: session_over, pri"
    ):
        user_hints(parameters)
    rig = World(tmp_path, 4)
    ctx = with_parameters(parameters)
    rig.manager.on_new_request(ctx)
    assert rig.manager.lookup(key(1), ctx) is MISS
    rig.manager.on_request_finished(ctx)
    assert not rig.manager.broken


def with_actions(*actions: tuple[str, Any], name: str = "a") -> Any:
    protocol = pytest.importorskip("vllm.v1.kv_hints.protocol", reason="vLLM before 0.31 has no kv_hints")
    made = [protocol.KvHintAction(str(n), kind, "1.0", payload) for n, (kind, payload) in enumerate(actions)]
    return base.ReqContext(name, kv_hints=protocol.KvHintsEnvelope("0.1", "message", made))


@pytest.mark.parametrize(
    ("actions", "hints", "counted"),
    [
        (
            [("kv.retain", {"priority": 5, "duration_ms": 1500})],
            Hints(priority=5, time_to_live_s=1.5),
            ["retain"],
        ),
        ([("Pin", {"ttl_s": 60, "target": "session"})], Hints(priority=1, time_to_live_s=60.0), ["retain"]),
        ([("kv.demote", {})], Hints(priority=-1), ["demote"]),
        ([("kv.retain", {}), ("kv.demote", {})], Hints(priority=-1), ["retain", "demote"]),
        ([("end-session", {})], Hints(session_over=True), ["end_session"]),
        ([("kv.prefetch", {"hash": "00"})], NO_HINTS, ["prefetch"]),
        ([("kv.share", {}), ("", {})], NO_HINTS, ["unknown", "unknown"]),
        ([("kv.retain", {"ttl_s": -1})], NO_HINTS, ["invalid"]),
        ([("kv.retain", {"priority": "high"})], NO_HINTS, ["invalid"]),
        ([("kv.retain", None)], NO_HINTS, ["invalid"]),
        ([("kv.retain", {"\ud800": 1}), ("kv.retain", {"priority": 10**30})], NO_HINTS, ["invalid"] * 2),
        ([], NO_HINTS, []),
    ],
)
def test_hints_of_an_orchestrator_are_labels(
    tmp_path: Path, actions: list[tuple[str, Any]], hints: Hints, counted: list[str]
) -> None:
    rig = World(tmp_path, 4)
    ctx = with_actions(*actions)
    rig.manager.on_new_request(ctx)
    rig.manager.lookup(key(1), ctx)
    began = rig.manager._requests["a"].ctx
    assert began.hints == hints
    rig.manager.on_request_finished(ctx)
    assert began.hints == hints
    assert rig.manager.metrics.kv_hints == Counter(counted)
    assert "vllm:kvoffload_kv_hint_actions" in repr(rig.manager.get_stats().data)
    assert "vllm:kvoffload_kv_hint_actions" not in repr(rig.manager.get_stats().data), "reported once"
    assert not rig.manager.broken


@pytest.mark.parametrize("parameters", [None, {}, {"kvoffload": None}, {"do_remote_prefill": True}])
def test_parameters_without_hints_give_none(parameters: Any) -> None:
    assert user_hints(parameters) is NO_HINTS


def test_a_request_that_ends_after_an_error_leaves_nothing(tmp_path: Path) -> None:
    rig = World(tmp_path, 4)
    ctx = with_parameters({"kvoffload": {"priority": 1}})
    rig.manager.on_new_request(ctx)
    rig.manager.broken = True
    rig.manager.on_request_finished(ctx)
    assert not rig.manager._arrivals


def test_a_request_that_ends_during_a_pause_is_forgotten_by_the_reset(world: Callable[..., World]) -> None:
    rig = world(8)
    path = [key(number) for number in range(4)]
    waiting, running = (rig.request(name, path) for name in ("waiting", "running"))
    for ctx in (waiting, running):
        rig.manager.expect(ctx)
    rig.manager.stop_after_error("a test")
    rig.manager.on_request_finished(waiting)
    rig.manager.reset_cache()
    assert [*rig.manager._requests] == ["running"]
    assert rig.manager.core.stats().expected == 4, "the blocks of the running request"
    rig.manager.on_request_finished(running)
    assert not rig.manager._requests
    assert rig.manager.core.stats().expected == 0


def test_a_reset_during_a_hanging_job_of_a_tier_loses_no_slot(world: Callable[..., World]) -> None:
    """Until the job ends, slots in flight stay reserved. vLLM never reports the old transfers as ended."""
    rig, tier = world(8, tier_deadline_s=0.001), ScriptedTier(4096)
    rig.put_behind(tier)
    path = [key(number) for number in range(4)]
    rig.serve("r", path[:2])
    rig.manager.on_schedule_end(base.ScheduleEndContext([], []))
    assert len(tier.jobs) == 1
    loading, storing = rig.request("loading", path[:2]), rig.request("storing", path)
    assert rig.hits(loading, path[:2]) == 2
    rig.manager.prepare_load(path[:2], loading)
    rig.store(storing, path[2:])
    rig.manager.reset_cache()
    assert rig.manager.core.stats().condemned == 4
    for ctx in (loading, storing):
        rig.manager.on_request_finished(ctx)
    tier.end(tier.jobs[0])
    rig.serve("again", path)
    rig.manager.on_schedule_end(base.ScheduleEndContext([], []))
    assert rig.manager.core.stats().condemned == 0
    tier.immediate = True
    for job in [*tier.jobs]:
        tier.end(job)
    assert not rig.manager.broken


@pytest.mark.parametrize("load", [False, True])
def test_a_reset_while_every_slot_is_in_flight_frees_the_slots_after_some_steps(
    world: Callable[..., World], load: bool
) -> None:
    """No transfer can begin before a slot is free, so the end of a later transfer cannot free the slots."""
    rig, tier = world(2, steps_in_flight=2), ScriptedTier(4096, immediate=True)
    rig.put_behind(tier)
    path = [key(1), key(2)]
    if load:
        rig.serve("stored", path)
    ctx = rig.request("in flight", path)
    if load:
        assert rig.hits(ctx, path) == 2
        rig.manager.prepare_load(path, ctx)
    else:
        rig.store(ctx, path)
    rig.manager.on_request_finished(ctx)
    rig.manager.reset_cache()
    for _ in range(3):  # the step that waits for the transfers may be in flight until the third step
        assert rig.manager.core.stats().condemned == 2
        rig.manager.on_schedule_end(base.ScheduleEndContext([], []))
    rig.manager.on_schedule_end(base.ScheduleEndContext([], []))
    assert rig.manager.core.stats().condemned == 0
    rig.serve("later", [key(3)])
    rig.check()


def test_a_promotion_after_a_reset_takes_no_slot_of_an_old_transfer(world: Callable[..., World]) -> None:
    """vLLM's worker begins a store one step late: after a reset, the old copy may follow a promotion."""
    rig, tier = world(8), ScriptedTier(4096, immediate=True)
    rig.put_behind(tier)
    old, new = [key(number) for number in range(4)], [key(number) for number in range(10, 14)]
    late = rig.manager.prepare_store(old, rig.request("old", old))
    rig.manager.reset_cache()
    tier.blocks.update({name: np.resize(np.frombuffer(name, np.uint8), 4096).tobytes() for name in new})
    ctx = rig.request("new", new)
    assert rig.hits(ctx, new) == 4
    rig.write(late)
    assert rig.read(rig.manager.prepare_load(new, ctx)) == new
    rig.manager.complete_load(set(new), ctx)
    assert rig.manager.core.stats().condemned == 0
    assert not rig.manager.broken


def test_tenants_have_quotas_of_disks(tmp_path: Path) -> None:
    quotas = {"a": {"tiers": {"disk": {"min": "4MiB"}}}, "b": {"tiers": {"disk": {"max": "16KiB"}}}}
    rig = World(tmp_path, 16, tiers=[f"disk:{tmp_path / 'kv'}:16MiB"], tenants=quotas)
    rig.put_behind(*open_tiers(rig.manager.options.tiers, TierOwner(rig.pool.slot_stride, 36, "world")))
    for number, tenant in enumerate(["a", "b", "b"]):
        rig.manager.add_hints(str(number), Hints(tenant=tenant))
        rig.serve(str(number), [key(10 * number + block) for block in range(4)])
        assert rig.manager.core.settle(HANGS_S)
    [counts] = rig.manager.core.tier_tenants()
    assert counts["a"].min > 3 * counts["b"].max == 9
    assert {name: tenant.held for name, tenant in counts.items()} == {"a": 4, "b": 3, "other": 0}
    assert "tenant_tier_held_blocks" in repr(rig.manager.get_stats().data)
    rig.check()


def test_tenants_have_quotas_and_metrics(world: Callable[..., World], tmp_path: Path) -> None:
    path = tmp_path / "live.json"
    rig = world(4, live_settings=str(path), tenants={"a": {"min": 2048}})
    share = rig.manager.options.ram_bytes // 4
    path.write_text(json.dumps({"tenants": {"a": {"min": 2 * share}, "b": {"max": 2 * share}}}))
    rig.manager.on_schedule_end(base.ScheduleEndContext([], []))
    for number, tenant in enumerate(["a", "b", "b", "b"]):
        rig.manager.add_hints(str(number), Hints(tenant=tenant))
        rig.serve(str(number), [key(10 * number), key(10 * number + 1)])
    held = {name: tenant.held for name, tenant in rig.manager.core.stats().tenants.items()}
    assert held == {"a": 2, "b": 2, "other": 0}
    taken = repr(rig.manager.get_stats().data)
    assert "tenant_held_blocks" in taken
    assert "tenant_evicted_blocks" in taken
    rig.check()
