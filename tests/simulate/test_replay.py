"""Timed replays: waits by hand, and equality with replays without a clock for one request at a time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from kvoffload.core.request import RequestContext
from kvoffload.errors import ConfigError
from kvoffload.replay.config import ReplayConfig
from kvoffload.replay.replay import Replay
from kvoffload.simulate.arrivals import AtOnce, Recorded
from kvoffload.simulate.config import Timing
from kvoffload.simulate.engine import Engine, _Generating, _Request
from kvoffload.simulate.event_queue import Events
from kvoffload.simulate.offload import NoOffload, Offload, VictimOffload
from kvoffload.simulate.pool import DevicePool
from kvoffload.simulate.timed import replay_in_time, run_in_time
from kvoffload.tiers.kinds.disk import DiskOptions
from kvoffload.tiers.kinds.simulated import SimulatedOptions
from kvoffload.tiers.spec import TierOptions, parse_tiers
from kvoffload.traces.sessions import generate
from kvoffload.traces.trace import Trace
from kvoffload.traces.workloads import builtin
from support.simulated_machine import (
    BLOCK_BYTES,
    BLOCK_TOKENS,
    INSTANT,
    QUICK,
    alone,
    config,
    machine,
    timing,
    trace_of,
)


def run(
    trace: Trace, timing: Timing, device: int, offload: ReplayConfig | None = None
) -> tuple[Engine, NoOffload]:
    """Run a timed replay; returns its engine and offload for inspection."""
    events, pool = Events(), DevicePool(device)
    arrivals = AtOnce(trace, timing.at_once) if timing.at_once else Recorded(trace, timing.load)
    engine, offload_of_run = Engine(trace, timing, events, pool, arrivals), NoOffload()
    if offload is not None:
        kind = VictimOffload if offload.store == "on-device-eviction" else Offload
        offload_of_run = kind(trace, offload, timing, events, pool, engine.wake)
    engine.begin(offload_of_run, lambda ended: None)
    events.run()
    engine.check_ended()
    return engine, offload_of_run


def first_tokens(trace: Trace, timing: Timing, device: int = 100, **options: Any) -> list[float]:
    """Run a timed replay; returns the time of each request's first token."""
    times_s: list[float] = run(trace, timing, device, **options)[0].first_token_s.tolist()
    return times_s


# ---- the engine, by hand: a block and a generated token take a second each


def test_prompts_are_computed_one_after_the_other() -> None:
    trace = trace_of((0, "abc"), (1, "de"), (20, "f"))
    # Steps have room for ten blocks: the second prompt waits for the step of the first.
    assert first_tokens(trace, timing()) == [3, 5, 21]


def test_prompts_of_one_step_end_together() -> None:
    trace = trace_of((0, "a"), (0.5, "bc"), (0.5, "de"))
    assert first_tokens(trace, timing()) == [1, 5, 5]
    # With steps of two blocks, each prompt has its own step.
    assert first_tokens(trace, timing(step_tokens=20)) == [1, 3, 5]


def test_other_prompts_run_behind_the_chunks_of_a_long_prompt() -> None:
    trace = trace_of((0, "abcdefg"), (0.5, "h"))
    assert first_tokens(trace, timing(step_tokens=40)) == [8, 8]
    assert first_tokens(trace, timing(step_tokens=40, max_running=1)) == [7, 8]


def test_costs_of_a_step_and_of_attention() -> None:
    on = machine(step_s=0.5, prefill_s_per_token_squared=0.01)
    # Two chunks of one block: 1 + 1, then 1 + 3 for attention to 20 tokens minus attention to 10.
    assert first_tokens(trace_of((0, "ab")), timing(on, step_tokens=10)) == pytest.approx([7.0])


def test_answers_are_generated_in_parallel_one_token_per_step() -> None:
    trace = trace_of((0, "a", 4), (0, "b", 2), (20, "c"))
    engine, _ = run(trace, timing(), 100)
    assert engine.first_token_s.tolist() == [2, 2, 21]
    assert engine.ended_s == 21
    # A generating request gets one token, not five, while a prompt of five blocks is computed.
    engine, _ = run(trace_of((0, "a", 4), (1.5, "bcdef")), timing(), 100)
    assert engine.first_token_s.tolist() == [1, 6.5]
    # Half a token from 1 to 1.5, one token until 6.5, then 1.5 tokens.
    assert engine.ended_s == pytest.approx(8.0)


@pytest.mark.parametrize("begin_s", [0.0, 1e7 / 3, 1.79e9 / 7, 1.79e9, 9e12 / 7])
def test_answers_end_after_any_time(begin_s: float) -> None:
    """A request at time 0 among times since 1970 makes the clock's resolution 0.24 us."""
    generating = _Generating(tokens_per_s=1600.0)
    for number in range(100):
        now = begin_s + number / 7
        generating.advance(now)
        generating.add(_Request(number, [], 1, None), 1 + number)
        generating.advance(now + generating.seconds_to_next_end())
        assert [ended.number for ended in generating.take_ended()] == [number]


def test_max_running_limits_the_requests() -> None:
    trace = trace_of((0, "a", 10), (0, "b", 10), (0, "c"))
    # A slot is free after the first two requests have generated nine more tokens.
    assert first_tokens(trace, timing(max_running=2)) == [2, 2, 12]


def test_a_request_waits_for_blocks_and_is_not_overtaken() -> None:
    trace = trace_of((0, "abcd", 5), (0.5, "efgh"), (0.5, "i"))
    engine, _ = run(trace, timing(), 7)
    # Five blocks, one for the answer, are held until 8; two are free, enough for the last request.
    assert engine.first_token_s.tolist() == [4, 13, 13]
    assert (engine.began_s - engine.came_s).tolist() == [0, 7.5, 7.5]


def test_the_last_block_is_always_computed() -> None:
    engine, _ = run(trace_of((0, "abc"), (10, "abc")), timing(), 100)
    assert engine.first_token_s.tolist() == [3, 11]
    assert engine.device_hits == 2


def test_a_prompt_shorter_than_a_block_takes_a_token() -> None:
    engine, _ = run(trace_of((0, ""), (1, "a")), timing(), 100)
    assert engine.first_token_s.tolist() == pytest.approx([0.1, 2.0])


def exact(trace: Trace, *tokens: int) -> Trace:
    """Add prompt lengths to a trace."""
    return replace(trace, prompt_tokens=np.array(tokens, np.int64))


def test_tokens_behind_the_last_full_block_are_computed_instead_of_that_block() -> None:
    """All full blocks of a prompt are hits if at least one token follows, as in vLLM."""
    trace = exact(trace_of((0, "abc"), (10, "abc"), (20, "abc"), (30, "")), 31, 36, 30, 4)
    engine, _ = run(trace, timing(), 100)
    assert engine.device_hits == 3 + 2
    assert engine.prefill_tokens == 31 + 6 + 10 + 4
    assert engine.first_token_s.tolist() == pytest.approx([3.1, 10.6, 21, 30.4])


def test_an_answer_begins_in_the_last_block_of_its_prompt() -> None:
    trace = exact(trace_of((0, "ab", 5)), 25)
    assert run_in_time(trace, timing(), 3).requests == 1
    with pytest.raises(ConfigError, match=r"need 4 blocks"):
        run_in_time(exact(trace_of((0, "ab", 6)), 25), timing(), 3)


# ---- offloading, by hand

SLOW_GPU = machine(prefill_s_per_token=1.0)
AWAY_AND_BACK = trace_of((0, "abc"), (100, "defghijklmnopqrs"), (500, "abcz"))
"""Between the two equal requests, another request fills a device of 17 blocks and RAM of 16 blocks."""


def test_other_requests_run_during_a_load() -> None:
    # The device has room for one request, so the request in between evicts the first request's blocks.
    trace = trace_of((0, "abcd"), (10, "uvwxyz"), (20, "abcd"), (20.5, "q"))
    slow, fast = machine(load_bytes_per_s=500.0), machine(load_bytes_per_s=4000.0)
    assert first_tokens(trace, timing(slow), 7, offload=config(50, 7))[2:] == [27, 21.5]
    # Three blocks are loaded in 0.75 s while the other request is computed; then the last block is computed.
    assert first_tokens(trace, timing(fast), 7, offload=config(50, 7))[2:] == [22.5, 21.5]
    assert first_tokens(trace, timing(), 7)[2:] == [24, 25]


def test_a_block_can_be_loaded_only_after_the_end_of_its_store() -> None:
    trace = trace_of((0, "abc"), (3, "vwxyz"), (8.5, "abcd"))
    stored_by = {speed: timing(machine(store_bytes_per_s=speed)) for speed in (1000.0, 250.0)}
    done, _ = run(trace, stored_by[1000.0], 6, config(50, 6))
    assert done.began_s[2] == 8.5
    # Stores end at 15: the request waits for blocks in flight and does not compute them.
    waits, offload_of_run = run(trace, stored_by[250.0], 6, config(50, 6))
    assert waits.began_s[2] == 15
    assert offload_of_run.hits() == 3


def test_long_waits_look_up_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = trace_of((0, "abc"), (3, "vwxyz"), (8.5, "abcd"))
    lookups, lookup = list[int](), Offload.lookup

    def counted(self: Offload, request: int, ctx: RequestContext | None, first: int, end: int) -> int | None:
        lookups.append(request)
        return lookup(self, request, ctx, first, end)

    monkeypatch.setattr(Offload, "lookup", counted)
    waits, offload_of_run = run(trace, timing(machine(store_bytes_per_s=0.25)), 6, config(50, 6))
    # Three blocks of 4,000 s each, as in the test above.
    assert waits.began_s[2] == pytest.approx(12_003)
    assert offload_of_run.hits() == 3
    assert len(lookups) < 12_003 + 100, "one lookup per second, not twenty"


def test_small_ram_keeps_the_head_of_a_prompt() -> None:
    trace = trace_of((0, "abcdef"), (10, "stuvwx"), (30, "abcdef"))
    outcome = run_in_time(trace, timing(), 7, config(8, 7))
    assert outcome.offload_hit_blocks == 2  # of six blocks in eight slots, the tail was evicted first
    assert outcome.tiers[0].evicted == 8


def test_evicted_blocks_of_the_device_are_stored_first() -> None:
    trace = trace_of((0, "abc"), (10, "def"), (20, "ghi"), (30, "abc"))
    given = config(20, 6, store="on-device-eviction")
    engine, offload_of_run = run(trace, timing(step_tokens=30), 6, given)
    # The window has three blocks: the most that a step can allocate.
    assert offload_of_run.counts["lost"] == 0
    assert offload_of_run.hits() == 2
    assert engine.first_token_s[3] == 33


def test_blocks_evicted_faster_than_the_window_are_lost() -> None:
    # The third request evicts five blocks of the first, all offered before. The last request loads them at
    # once: an answer's block is free, and four blocks are evicted, which a window of one block never saw.
    trace = trace_of((0, "abcdef"), (20, "uvwxyz"), (40, "mnopqr"), (60, "abcdefg"))
    given = config(50, 14, store="on-device-eviction")
    _, offload_of_run = run(trace, timing(step_tokens=BLOCK_TOKENS), 14, given)
    assert (offload_of_run.hits(), offload_of_run.counts["lost"]) == (5, 4)
    _, offload_of_run = run(trace, timing(step_tokens=10 * BLOCK_TOKENS), 14, given)
    assert (offload_of_run.hits(), offload_of_run.counts["lost"]) == (5, 0)


def test_a_victim_tier_stores_at_once_if_few_blocks_are_free() -> None:
    trace = trace_of((0, "abcdef"), (20, "uvwxyz"), (40, "abcdef"))
    _, offload_of_run = run(
        trace, timing(step_tokens=BLOCK_TOKENS), 7, config(50, 7, store="on-device-eviction")
    )
    assert offload_of_run.counts["lost"] == 0
    assert offload_of_run.hits() > 0


def test_a_disk_serves_blocks_evicted_by_ram() -> None:
    disk = (SimulatedOptions(capacity="50"),)
    patient = timing(SLOW_GPU, deadline_s=10.0)
    outcome = run_in_time(AWAY_AND_BACK, patient, 17, config(16, 17, tiers=disk))
    assert [tier.name for tier in outcome.tiers] == ["ram", "simulated"]
    assert outcome.tiers[1].hit_blocks == 3
    links = {link.name: link for link in outcome.links}
    assert links["simulated read"].bytes_moved == 3 * BLOCK_BYTES
    assert links["simulated read"].busy_s == 3.0
    # Read from the disk, then loaded.
    assert outcome.waiting_s.p99 == 3.0
    assert outcome.loading_s.p99 == 3.0
    # A request with a deadline of two seconds computes all blocks.
    outcome = run_in_time(AWAY_AND_BACK, timing(SLOW_GPU), 17, config(16, 17, tiers=disk))
    assert (outcome.gave_up, outcome.tiers[1].hit_blocks) == (1, 0)
    assert 2.0 <= outcome.waiting_s.p99 < 2.5


def test_blocks_that_read_slower_than_they_compute_are_not_read() -> None:
    requests = [(30.0 * turn, letters) for turn, letters in enumerate(["abc", "stuvwx", "abc"] * 6)]
    disk = (SimulatedOptions(capacity="50"),)
    slow = timing(machine(disk_read_bytes_per_s=100.0), deadline_s=100.0)
    outcome = run_in_time(trace_of(*requests), slow, 8, config(6, 8, tiers=disk))
    # The first read measures the slow disk; then one read every ten seconds measures it again.
    assert outcome.not_worth + outcome.gave_up > 0
    fast = timing(machine(disk_read_bytes_per_s=INSTANT), deadline_s=100.0)
    outcome = run_in_time(trace_of(*requests), fast, 8, config(6, 8, tiers=disk))
    assert outcome.not_worth == outcome.gave_up == 0
    assert outcome.tiers[1].hit_blocks > 0


def test_a_disk_that_writes_too_slowly_does_not_keep_up() -> None:
    letters = [chr(97 + number) for number in range(26)]
    trace = trace_of(*((3.0 * number, "".join(letters[number : number + 3])) for number in range(0, 24, 3)))
    disk = (SimulatedOptions(capacity="50"),)
    for speed, keeps_up in ((10.0, False), (INSTANT, True)):
        on = timing(machine(disk_write_bytes_per_s=speed))
        outcome = run_in_time(trace, on, 8, config(6, 8, tiers=disk))
        assert outcome.tiers[1].keeps_up is keeps_up
        assert (outcome.tiers[1].not_offered > 0) is not keeps_up


@pytest.mark.parametrize("speed_up", [1.0, 3.0])
def test_a_write_budget_is_kept_in_simulated_time(speed_up: float) -> None:
    """24 requests store 24 blocks in 69 s, or a third of that; the budget allows 5 blocks, or 1."""
    trace = trace_of(*((3.0 * number, chr(97 + number)) for number in range(24)))
    simulated = (SimulatedOptions(capacity="50", max_write_blocks_per_day=5.1 * 86_400 / 69),)
    disk = (DiskOptions(path=("/not/there",), capacity="50", max_write_bytes_per_day=0),)
    on = timing(machine(disk_write_bytes_per_s=INSTANT), load=speed_up)
    for tiers, most in ((simulated, int(5.1 / speed_up)), (disk, 0)):
        outcome = run_in_time(trace, on, 8, config(6, 8, tiers=tiers))
        assert outcome.tiers[1].written == most


def test_disks_are_not_opened_and_two_are_twice_as_fast() -> None:
    busy = []
    for paths in (("/not/there",), ("/not/there", "/nor/there")):
        disk: tuple[TierOptions, ...] = (DiskOptions(path=paths, capacity="50"),)
        outcome = run_in_time(AWAY_AND_BACK, timing(SLOW_GPU), 17, config(16, 17, tiers=disk))
        busy.append({link.name: link.busy_s for link in outcome.links}["disk read"])
    assert busy == [3.0, 1.5]


# ---- against a replay without a clock


@given(
    st.lists(st.text("ab", max_size=6), max_size=30),
    st.sampled_from(["lru", "arc", "s3fifo", "lfu"]),
    st.integers(1, 12),
    st.integers(8, 20),
)
def test_one_request_at_a_time_hits_as_in_a_replay_without_a_clock(
    paths: list[str], policy: str, ram: int, device: int
) -> None:
    trace = alone([*paths, "a"])
    given = config(ram, device, policy=policy)
    plain = Replay(trace, given).run()
    instant = machine(load_bytes_per_s=INSTANT, store_bytes_per_s=INSTANT)
    engine, offload_of_run = run(trace, timing(instant, at_once=1), device, given)
    assert isinstance(offload_of_run, Offload)
    hits = (engine.device_hits, offload_of_run.hits(), offload_of_run.manager.stats().stored)
    assert hits == (plain.device_hit_blocks, plain.offload_hit_blocks, plain.blocks_written)


@pytest.fixture(scope="module")
def chat() -> Trace:
    return generate(builtin("chat", sessions=120))


def on_chat(chat: Trace, **options: Any) -> Any:
    device = 2 * chat.longest_request
    return replay_in_time(chat, config(3 * device, device, **options), Timing(QUICK, BLOCK_BYTES))


@pytest.mark.parametrize("store", ["on-compute", "on-device-eviction"])
@pytest.mark.parametrize("tiers", ["none", "simulated:2000,policy=hazard"])
def test_a_run_adds_up_and_is_deterministic(chat: Trace, store: str, tiers: str) -> None:
    tier_options = parse_tiers("tiers", tiers)
    report = on_chat(chat, store=store, tiers=tier_options)
    assert report.to_json() == on_chat(chat, store=store, tiers=tier_options).to_json()
    done, without = report.with_offload, report.without
    for outcome in (done, without):
        assert outcome.requests == chat.requests
        hits = outcome.device_hit_blocks + outcome.offload_hit_blocks
        assert outcome.prefill_tokens == (chat.block_refs - hits) * chat.block_tokens
        assert outcome.ttft_s.mean >= outcome.waiting_s.mean + outcome.loading_s.mean
        assert 0 < outcome.device_busy_share <= 1
    assert done.offload_hit_blocks == sum(tier.hit_blocks for tier in done.tiers)
    loaded = next(link for link in done.links if link.name == "load")
    assert loaded.bytes_moved == done.offload_hit_blocks * BLOCK_BYTES
    assert report.gpu_seconds_saved == pytest.approx(without.prefill_s - done.prefill_s)
    assert done.hit_ratio > without.hit_ratio


def test_tiers_have_their_labels(chat: Trace) -> None:
    behind = parse_tiers("tiers", ["simulated:2000,label=near", "simulated:3000"])
    done = on_chat(chat, tiers=behind).with_offload
    assert [tier.name for tier in done.tiers] == ["ram", "near", "simulated"]
    disks = ["near read", "near write", "simulated read", "simulated write"]
    assert [link.name for link in done.links[2:]] == disks


def test_a_given_run_without_offload_is_not_repeated(chat: Trace) -> None:
    updates = list[int]()
    device = 2 * chat.longest_request
    on = Timing(QUICK, BLOCK_BYTES)
    without = run_in_time(chat, on, device)
    whole = replay_in_time(chat, config(device, device), on)
    assert replay_in_time(chat, config(device, device), on, updates.append, without) == whole
    assert max(updates) <= chat.requests


def test_a_higher_load_waits_longer(chat: Trace) -> None:
    device = 2 * chat.longest_request
    on = Timing(QUICK, BLOCK_BYTES, max_running=4)
    waits = [run_in_time(chat, replace(on, load=load), device).waiting_s.mean for load in (0.5, 2.0, 8.0)]
    assert waits == sorted(waits)
    assert waits[0] < waits[2]


def test_all_mistakes_are_one_error() -> None:
    trace = trace_of((0, "abcdef", 20))
    with pytest.raises(ConfigError, match=r"device-blocks: 7 is invalid.*need 8 blocks"):
        run_in_time(trace, timing(), 7)
    run_in_time(trace, timing(), 8)
    with pytest.raises(ConfigError, match="leave both out"):
        replay_in_time(trace, config(8, 8, queue_requests=3), timing())
    with pytest.raises(ConfigError, match="as in config"):
        run_in_time(trace, timing(), 8, config(8, 9))
    lacking = replace(timing(), machine=machine().__class__(name="mine"))
    with pytest.raises(ConfigError, match="it has no prefill_s_per_token"):
        run_in_time(trace, lacking, 8)
    valkey = parse_tiers("tiers", "valkey://127.0.0.1:1/kv")
    with pytest.raises(ConfigError, match="this tier cannot be simulated"):
        run_in_time(trace, timing(), 8, config(8, 8, tiers=valkey))


@pytest.mark.parametrize(
    "trace",
    [
        trace_of((5, "ab")),
        trace_of((5, "a"), (5, "a"), (5, "ab"), (5, "ab")),
        trace_of((9, "abc"), (1, "ab"), (4, "x"), (0, "abcd")),
        trace_of((0, "ab"), (7 * 86400, "abc", 0)),
    ],
    ids=["one request", "equal times", "out of order", "a week between two"],
)
@pytest.mark.parametrize("at_once", [0, 3])
def test_odd_traces_are_served(trace: Trace, at_once: int) -> None:
    for store in ("on-compute", "on-device-eviction"):
        disk = (SimulatedOptions(capacity="4"),)
        given = config(3, 8, store=store, tiers=disk)
        report = replay_in_time(trace, given, timing(at_once=at_once, step_tokens=7))
        assert report.with_offload.requests == trace.requests
        assert report.with_offload.ttft_s.p50 > 0
        assert report.with_offload.prefill_s <= report.without.prefill_s + 1e-9


def test_the_timing_uses_the_block_tokens_of_the_trace() -> None:
    assert np.diff(trace_of((0, "ab")).offsets).tolist() == [2]
    assert first_tokens(trace_of((0, "ab")), timing(machine(prefill_s_per_token=1 / BLOCK_TOKENS))) == [2]
