"""Timed replays: who waits how long, by hand; and the hits of a replay without a clock, one at a time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from kvoffload.core.request import RequestContext
from kvoffload.errors import ConfigError
from kvoffload.replay.replay import Replay, ReplayConfig
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
    """A run whose parts one can look into."""
    events, pool = Events(), DevicePool(device)
    arrivals = AtOnce(trace, timing.at_once) if timing.at_once else Recorded(trace, timing.load)
    engine, behind = Engine(trace, timing, events, pool, arrivals), NoOffload()
    if offload is not None:
        kind = VictimOffload if offload.store == "on-device-eviction" else Offload
        behind = kind(trace, offload, timing, events, pool, engine.wake)
    engine.begin(behind, lambda ended: None)
    events.run()
    engine.check_ended()
    return engine, behind


def first_tokens(trace: Trace, timing: Timing, device: int = 100, **options: Any) -> list[float]:
    """When each request had its first token."""
    found: list[float] = run(trace, timing, device, **options)[0].first_token_s.tolist()
    return found


# ---- the engine, by hand: a block takes a second, a generated token too


def test_prompts_are_computed_one_after_the_other() -> None:
    trace = trace_of((0, "abc"), (1, "de"), (20, "f"))
    # Steps have room for ten blocks: the second waits for the step of the first.
    assert first_tokens(trace, timing()) == [3, 5, 21]


def test_what_fits_into_one_step_ends_with_it() -> None:
    trace = trace_of((0, "a"), (0.5, "bc"), (0.5, "de"))
    assert first_tokens(trace, timing()) == [1, 5, 5]
    # In steps of two blocks each of them has its own.
    assert first_tokens(trace, timing(step_tokens=20)) == [1, 3, 5]


def test_a_long_prompt_goes_in_chunks_and_lets_others_in_behind_it() -> None:
    trace = trace_of((0, "abcdefg"), (0.5, "h"))
    assert first_tokens(trace, timing(step_tokens=40)) == [8, 8]
    assert first_tokens(trace, timing(step_tokens=40, max_running=1)) == [7, 8]


def test_a_step_costs_and_a_prompt_gets_dearer_with_its_length() -> None:
    on = machine(step_s=0.5, prefill_s_per_token_squared=0.01)
    # Two chunks of one block: 1 + 1, then 1 + 3 for attention to 20 tokens less that to 10.
    assert first_tokens(trace_of((0, "ab")), timing(on, step_tokens=10)) == pytest.approx([7.0])


def test_answers_are_generated_side_by_side_and_a_token_a_step() -> None:
    trace = trace_of((0, "a", 4), (0, "b", 2), (20, "c"))
    engine, _ = run(trace, timing(), 100)
    assert engine.first_token_s.tolist() == [2, 2, 21]
    assert engine.ended_s == 21
    # One that generates gets one token while a prompt of five blocks is computed, and not five.
    engine, _ = run(trace_of((0, "a", 4), (1.5, "bcdef")), timing(), 100)
    assert engine.first_token_s.tolist() == [1, 6.5]
    # From 1 to 1.5 half a token, until 6.5 one, then 1.5 more.
    assert engine.ended_s == pytest.approx(8.0)


@pytest.mark.parametrize("begin_s", [0.0, 1e7 / 3, 1.79e9 / 7, 1.79e9, 9e12 / 7])
def test_answers_end_after_any_time(begin_s: float) -> None:
    """One request with time 0 among times since 1970: the clock then has steps of 0.24 us."""
    generating = _Generating(tokens_per_s=1600.0)
    for number in range(100):
        now = begin_s + number / 7
        generating.advance(now)
        generating.add(_Request(number, [], 1, None), 1 + number)
        generating.advance(now + generating.seconds_to_next_end())
        assert [ended.number for ended in generating.take_ended()] == [number]


def test_only_so_many_run_at_a_time() -> None:
    trace = trace_of((0, "a", 10), (0, "b", 10), (0, "c"))
    # A seat is free again when the first two have generated nine more tokens.
    assert first_tokens(trace, timing(max_running=2)) == [2, 2, 12]


def test_a_request_waits_for_room_and_nobody_passes_it() -> None:
    trace = trace_of((0, "abcd", 5), (0.5, "efgh"), (0.5, "i"))
    engine, _ = run(trace, timing(), 7)
    # Four blocks and one for the answer are held until 8; two are free, and would do for the last.
    assert engine.first_token_s.tolist() == [4, 13, 13]
    assert (engine.began_s - engine.came_s).tolist() == [0, 7.5, 7.5]


def test_the_last_block_is_computed_even_if_it_is_there() -> None:
    engine, _ = run(trace_of((0, "abc"), (10, "abc")), timing(), 100)
    assert engine.first_token_s.tolist() == [3, 11]
    assert engine.device_hits == 2


def test_a_prompt_shorter_than_a_block_takes_a_token() -> None:
    engine, _ = run(trace_of((0, ""), (1, "a")), timing(), 100)
    assert engine.first_token_s.tolist() == pytest.approx([0.1, 2.0])


def exact(trace: Trace, *tokens: int) -> Trace:
    """The trace with the lengths of its prompts."""
    return replace(trace, prompt_tokens=np.array(tokens, np.int64))


def test_tokens_behind_the_last_whole_block_are_computed_instead_of_that_block() -> None:
    """As in vLLM: all whole blocks of a prompt are hits if at least one token follows them."""
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
"""Between its two requests another one takes all of a device of 17 blocks, and of RAM of 16."""


def test_a_load_takes_its_time_and_others_pass() -> None:
    # The device has room for one request at a time, so what comes between drops the first one's blocks.
    trace = trace_of((0, "abcd"), (10, "uvwxyz"), (20, "abcd"), (20.5, "q"))
    slow, fast = machine(load_bytes_per_s=500.0), machine(load_bytes_per_s=4000.0)
    assert first_tokens(trace, timing(slow), 7, offload=config(50, 7))[2:] == [27, 21.5]
    # Three blocks in 0.75 s, while the other is computed; then the last one.
    assert first_tokens(trace, timing(fast), 7, offload=config(50, 7))[2:] == [22.5, 21.5]
    assert first_tokens(trace, timing(), 7)[2:] == [24, 25]


def test_a_block_can_be_loaded_only_when_its_store_has_ended() -> None:
    trace = trace_of((0, "abc"), (3, "vwxyz"), (8.5, "abcd"))
    stored_by = {speed: timing(machine(store_bytes_per_s=speed)) for speed in (1000.0, 250.0)}
    done, _ = run(trace, stored_by[1000.0], 6, config(50, 6))
    assert done.began_s[2] == 8.5
    # Stores end at 15: the request does not compute what is on its way, it waits for it.
    waits, behind = run(trace, stored_by[250.0], 6, config(50, 6))
    assert waits.began_s[2] == 15
    assert behind.hits() == 3


def test_what_waits_for_very_long_asks_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = trace_of((0, "abc"), (3, "vwxyz"), (8.5, "abcd"))
    asked, lookup = list[int](), Offload.lookup

    def counted(self: Offload, request: int, ctx: RequestContext | None, first: int, end: int) -> int | None:
        asked.append(request)
        return lookup(self, request, ctx, first, end)

    monkeypatch.setattr(Offload, "lookup", counted)
    waits, behind = run(trace, timing(machine(store_bytes_per_s=0.25)), 6, config(50, 6))
    # Three blocks of 4,000 s each, as in the test above.
    assert waits.began_s[2] == pytest.approx(12_003)
    assert behind.hits() == 3
    assert len(asked) < 12_003 + 100, "once a second, and not twenty times"


def test_ram_that_is_too_small_keeps_the_head() -> None:
    trace = trace_of((0, "abcdef"), (10, "stuvwx"), (30, "abcdef"))
    outcome = run_in_time(trace, timing(), 7, config(8, 7))
    assert outcome.offload_hit_blocks == 2  # of six blocks in eight slots, the tail left first
    assert outcome.tiers[0].evicted == 8


def test_what_the_device_drops_is_stored_before_it_leaves() -> None:
    trace = trace_of((0, "abc"), (10, "def"), (20, "ghi"), (30, "abc"))
    given = config(20, 6, store="on-device-eviction")
    engine, behind = run(trace, timing(step_tokens=30), 6, given)
    # The window has three blocks: all that a step may take.
    assert behind.counts["lost"] == 0
    assert behind.hits() == 2
    assert engine.first_token_s[3] == 33


def test_what_leaves_faster_than_the_window_is_lost() -> None:
    # The third drops five blocks of the first, each offered before. The last one loads them at once: the
    # block of an answer is free, and four leave, of which a window of one block has seen none.
    trace = trace_of((0, "abcdef"), (20, "uvwxyz"), (40, "mnopqr"), (60, "abcdefg"))
    given = config(50, 14, store="on-device-eviction")
    _, behind = run(trace, timing(step_tokens=BLOCK_TOKENS), 14, given)
    assert (behind.hits(), behind.counts["lost"]) == (5, 4)
    _, behind = run(trace, timing(step_tokens=10 * BLOCK_TOKENS), 14, given)
    assert (behind.hits(), behind.counts["lost"]) == (5, 0)


def test_a_victim_tier_stores_at_once_where_little_is_free() -> None:
    trace = trace_of((0, "abcdef"), (20, "uvwxyz"), (40, "abcdef"))
    _, behind = run(trace, timing(step_tokens=BLOCK_TOKENS), 7, config(50, 7, store="on-device-eviction"))
    assert behind.counts["lost"] == 0
    assert behind.hits() > 0


def test_a_disk_brings_what_ram_has_dropped() -> None:
    behind = (SimulatedOptions(capacity="50"),)
    patient = timing(SLOW_GPU, deadline_s=10.0)
    outcome = run_in_time(AWAY_AND_BACK, patient, 17, config(16, 17, tiers=behind))
    assert [tier.name for tier in outcome.tiers] == ["ram", "simulated"]
    assert outcome.tiers[1].hit_blocks == 3
    links = {link.name: link for link in outcome.links}
    assert links["simulated read"].bytes_moved == 3 * BLOCK_BYTES
    assert links["simulated read"].busy_s == 3.0
    # Read, then loaded.
    assert outcome.waiting_s.p99 == 3.0
    assert outcome.loading_s.p99 == 3.0
    # One that waits for no longer than two seconds computes all of it.
    outcome = run_in_time(AWAY_AND_BACK, timing(SLOW_GPU), 17, config(16, 17, tiers=behind))
    assert (outcome.gave_up, outcome.tiers[1].hit_blocks) == (1, 0)
    assert 2.0 <= outcome.waiting_s.p99 < 2.5


def test_what_takes_longer_to_read_than_to_compute_is_left_alone() -> None:
    requests = [(30.0 * turn, letters) for turn, letters in enumerate(["abc", "stuvwx", "abc"] * 6)]
    behind = (SimulatedOptions(capacity="50"),)
    slow = timing(machine(disk_read_bytes_per_s=100.0), deadline_s=100.0)
    outcome = run_in_time(trace_of(*requests), slow, 8, config(6, 8, tiers=behind))
    # A read teaches how slow it is; then there is one every ten seconds, to see whether it still is.
    assert outcome.not_worth + outcome.gave_up > 0
    fast = timing(machine(disk_read_bytes_per_s=INSTANT), deadline_s=100.0)
    outcome = run_in_time(trace_of(*requests), fast, 8, config(6, 8, tiers=behind))
    assert outcome.not_worth == outcome.gave_up == 0
    assert outcome.tiers[1].hit_blocks > 0


def test_a_disk_that_writes_too_slowly_does_not_keep_up() -> None:
    letters = [chr(97 + number) for number in range(26)]
    trace = trace_of(*((3.0 * number, "".join(letters[number : number + 3])) for number in range(0, 24, 3)))
    behind = (SimulatedOptions(capacity="50"),)
    for speed, keeps_up in ((10.0, False), (INSTANT, True)):
        on = timing(machine(disk_write_bytes_per_s=speed))
        outcome = run_in_time(trace, on, 8, config(6, 8, tiers=behind))
        assert outcome.tiers[1].keeps_up is keeps_up
        assert (outcome.tiers[1].not_offered > 0) is not keeps_up


@pytest.mark.parametrize("speed_up", [1.0, 3.0])
def test_a_write_budget_is_kept_in_simulated_time(speed_up: float) -> None:
    """24 requests in 69 s, or a third of it, store 24 blocks; a budget of a day allows 5, or 1."""
    trace = trace_of(*((3.0 * number, chr(97 + number)) for number in range(24)))
    behind = (SimulatedOptions(capacity="50", max_write_blocks_per_day=5.1 * 86_400 / 69),)
    disk = (DiskOptions(path=("/not/there",), capacity="50", max_write_bytes_per_day=0),)
    on = timing(machine(disk_write_bytes_per_s=INSTANT), load=speed_up)
    for tiers, most in ((behind, int(5.1 / speed_up)), (disk, 0)):
        outcome = run_in_time(trace, on, 8, config(6, 8, tiers=tiers))
        assert outcome.tiers[1].written == most


def test_a_disk_that_is_named_is_not_opened_and_two_are_twice_as_fast() -> None:
    busy = []
    for paths in (("/not/there",), ("/not/there", "/nor/there")):
        disk: tuple[TierOptions, ...] = (DiskOptions(path=paths, capacity="50"),)
        outcome = run_in_time(AWAY_AND_BACK, timing(SLOW_GPU), 17, config(16, 17, tiers=disk))
        busy.append({link.name: link.busy_s for link in outcome.links}["disk read"])
    assert busy == [3.0, 1.5]


# ---- the same decisions as without a clock


@given(
    st.lists(st.text("ab", max_size=6), max_size=30),
    st.sampled_from(["lru", "arc", "s3fifo", "lfu"]),
    st.integers(1, 12),
    st.integers(8, 20),
)
def test_one_at_a_time_and_at_once_hits_what_a_replay_without_a_clock_hits(
    paths: list[str], policy: str, ram: int, device: int
) -> None:
    trace = alone([*paths, "a"])
    given = config(ram, device, policy=policy)
    plain = Replay(trace, given).run()
    instant = machine(load_bytes_per_s=INSTANT, store_bytes_per_s=INSTANT)
    engine, behind = run(trace, timing(instant, at_once=1), device, given)
    assert isinstance(behind, Offload)
    hits = (engine.device_hits, behind.hits(), behind.manager.stats().stored)
    assert hits == (plain.device_hit_blocks, plain.offload_hit_blocks, plain.blocks_written)


@pytest.fixture(scope="module")
def chat() -> Trace:
    return generate(builtin("chat", sessions=120))


def on_chat(chat: Trace, **options: Any) -> Any:
    device = 2 * chat.longest_request
    return replay_in_time(chat, config(3 * device, device, **options), Timing(QUICK, BLOCK_BYTES))


@pytest.mark.parametrize("store", ["on-compute", "on-device-eviction"])
@pytest.mark.parametrize("tiers", ["none", "simulated:2000,policy=hazard"])
def test_a_run_is_the_same_every_time_and_adds_up(chat: Trace, store: str, tiers: str) -> None:
    behind = parse_tiers("tiers", tiers)
    report = on_chat(chat, store=store, tiers=behind)
    assert report.to_json() == on_chat(chat, store=store, tiers=behind).to_json()
    done, without = report.with_offload, report.without
    for one in (done, without):
        assert one.requests == chat.requests
        hits = one.device_hit_blocks + one.offload_hit_blocks
        assert one.prefill_tokens == (chat.block_refs - hits) * chat.block_tokens
        assert one.ttft_s.mean >= one.waiting_s.mean + one.loading_s.mean
        assert 0 < one.device_busy_share <= 1
    assert done.offload_hit_blocks == sum(tier.hit_blocks for tier in done.tiers)
    loaded = next(link for link in done.links if link.name == "load")
    assert loaded.bytes_moved == done.offload_hit_blocks * BLOCK_BYTES
    assert report.gpu_seconds_saved == pytest.approx(without.prefill_s - done.prefill_s)
    assert done.hit_ratio > without.hit_ratio


def test_the_run_without_is_made_once_if_it_is_given(chat: Trace) -> None:
    told = list[int]()
    device = 2 * chat.longest_request
    on = Timing(QUICK, BLOCK_BYTES)
    without = run_in_time(chat, on, device)
    whole = replay_in_time(chat, config(device, device), on)
    assert replay_in_time(chat, config(device, device), on, told.append, without) == whole
    assert max(told) <= chat.requests


def test_denser_sessions_wait_longer(chat: Trace) -> None:
    device = 2 * chat.longest_request
    on = Timing(QUICK, BLOCK_BYTES, max_running=4)
    waits = [run_in_time(chat, replace(on, load=load), device).waiting_s.mean for load in (0.5, 2.0, 8.0)]
    assert waits == sorted(waits)
    assert waits[0] < waits[2]


def test_what_cannot_be_is_one_clear_error() -> None:
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
        behind = (SimulatedOptions(capacity="4"),)
        given = config(3, 8, store=store, tiers=behind)
        report = replay_in_time(trace, given, timing(at_once=at_once, step_tokens=7))
        assert report.with_offload.requests == trace.requests
        assert report.with_offload.ttft_s.p50 > 0
        assert report.with_offload.prefill_s <= report.without.prefill_s + 1e-9


def test_block_tokens_of_the_trace_are_those_of_the_machine() -> None:
    assert np.diff(trace_of((0, "ab")).offsets).tolist() == [2]
    assert first_tokens(trace_of((0, "ab")), timing(machine(prefill_s_per_token=1 / BLOCK_TOKENS))) == [2]
