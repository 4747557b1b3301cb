"""Plans with a machine: waits computed by hand, waits of timed replays, TTFT targets, and missing data."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from kvoffload.errors import ConfigError
from kvoffload.pages.plan import plan_page
from kvoffload.plan import clock
from kvoffload.plan.clock import Clock
from kvoffload.plan.evidence import gather
from kvoffload.plan.fleet import NOTHING, Fleet, Purchase
from kvoffload.plan.plan import Plan, PlanAnswer
from kvoffload.plan.prices import Ram, as_toml
from kvoffload.plan.rows import Measured, PlanRow, nothing
from kvoffload.plan.targets import Target
from kvoffload.plan.waits import choose_by_wait
from kvoffload.replay.config import ReplayConfig
from kvoffload.replay.routing import route
from kvoffload.simulate.classes import machine_of_class
from kvoffload.simulate.config import Timing
from kvoffload.simulate.machine import QUANTITIES, Machine
from kvoffload.simulate.report import Distribution, TimedOutcome
from kvoffload.simulate.timed import run_in_time
from kvoffload.sweep.measuring import Progress, Work
from kvoffload.sweep.task import TraceSource
from kvoffload.text import duration
from kvoffload.tiers.spec import parse_tiers
from kvoffload.traces.sources import load_trace
from support.plan_rows import MIB, PLAIN, drives, fleet, planned, prices, words, written
from support.run_cli import kvoffload
from support.simulated_machine import machine

A_BLOCK = 512
"""Tokens."""


def by_hand(**changes: float) -> Machine:
    """A machine that computes a block in 1 s, and transfers it in 0.25 s plus 0.1 s latency."""
    speeds = {"prefill_s_per_token": 1 / A_BLOCK, "copy_latency_s": 0.1}
    rates = ("load_bytes_per_s", "store_bytes_per_s", "disk_read_bytes_per_s", "disk_write_bytes_per_s")
    return machine(**{**speeds, **dict.fromkeys(rates, 4.0 * MIB), **changes})


TURNS = [tuple(range(4 * (number % 25), 4 * (number % 25) + 4)) for number in range(500)]


@pytest.fixture(scope="module")
def turns(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Write a recording: 25 conversations of four blocks in turns, 20 times, a request every ten seconds."""
    return written(tmp_path_factory.mktemp("in-time") / "turns.jsonl", TURNS)


def timed(trace: str, on: Machine | None = None, **options: Any) -> PlanAnswer:
    target = options.pop("target", {"saved": 0.5})
    return planned(trace, fleet(machine=on or by_hand(), **options), **target)


# ---- by hand


def test_waits_are_computed_again_after_a_change_of_the_code(
    turns: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Includes the waits without a purchase, which use no policy."""
    source, of = TraceSource(turns, None, False), fleet(machine=by_hand())
    evidence = gather(source, of)
    row, own = nothing(of, evidence).row, Clock(by_hand(), of, evidence)
    before = own.cache_key(row, of_all=False)
    assert own.cache_key(row, of_all=False) == before
    monkeypatch.setattr("kvoffload.sweep.task.code_digest", lambda *names: f"other code of {names}")
    assert own.cache_key(row, of_all=False) != before


def test_waits_by_hand(turns: str) -> None:
    answer = timed(turns)
    assert answer.chosen.purchase == Purchase(20, 0), "100 blocks"
    assert answer.in_time is not None
    with_ram, alone = answer.in_time.with_offload.ttft_s, answer.in_time.without.ttft_s
    # Alone the GPU computes four blocks. With RAM it loads three, 0.1 + 3 / 4 s, and computes the last.
    assert (alone.mean, alone.p50, alone.p90, alone.p99) == pytest.approx((4, 4, 4, 4))
    assert (with_ram.p50, with_ram.p90, with_ram.p99) == pytest.approx((1.85, 1.85, 4))
    assert with_ram.mean == pytest.approx((25 * 4 + 475 * 1.85) / 500)
    expected = (
        "Time to first token: p90 from 4 s to 1.85 s, mean from 4 s to 1.96 s, p50 from 4 s to 1.85 s, "
    )
    assert f"{expected}p99 from 4 s to 4 s." in answer.words
    loading = round(100 * 0.85 * 475 / 500 / with_ram.mean)
    assert f"Of the mean, 0% is waiting in the queue and {loading}% loading; without the purchase, " \
           "0% is waiting." in answer.words  # fmt: skip
    assert "RAM keeps up with its writes." in answer.words
    # 475 of 500 requests load three of four blocks; the untimed replay counts all four.
    expected = "The timed replay saves 71.2%, not 95.0%: the last token of each prompt is always computed"
    assert f"{expected}, and requests overlap." in answer.words
    # A load has a latency of 0.1 s, and saves 0.75 / 512 s per token.
    assert answer.in_time.ram_break_even_tokens == pytest.approx(0.1 * A_BLOCK / 0.75)
    assert answer.in_time.ssd_break_even_tokens is None
    assert "Loading from RAM beats computing from 68 tokens on." in answer.words
    assert "SSD" not in words(answer)


def test_the_choice_equals_the_choice_without_a_machine(turns: str) -> None:
    answer, before = timed(turns), planned(turns, saved=0.5)
    assert answer.rows == [
        msgspec.structs.replace(
            row,
            gpus_worth=timed_row.gpus_worth,
            ttft_p90_s=timed_row.ttft_p90_s,
            gpu_hours_a_day=timed_row.gpu_hours_a_day,
        )
        for row, timed_row in zip(before.rows, answer.rows, strict=True)
    ]
    timed_rows = [row for row in answer.rows if row.ttft_p90_s is not None]
    assert [row.purchase for row in timed_rows] == [NOTHING, answer.chosen.purchase]
    assert before.in_time is None
    assert [sentence for sentence in answer.words if sentence in before.words] == before.words[1:]
    unknown = "Times to first token are unknown: give --machine"
    assert [sentence for sentence in before.cannot_tell if sentence.startswith(unknown)]
    assert unknown not in " ".join(answer.cannot_tell)
    assert [assumption for assumption in before.assumptions if assumption not in answer.assumptions] == []
    assert json.loads(before.to_json())["in_time"] is None


def test_loads_slower_than_computing_are_reported(turns: str) -> None:
    answer = timed(turns, by_hand(load_bytes_per_s=MIB / 2))
    assert answer.in_time is not None
    assert answer.in_time.ram_break_even_tokens is None
    assert "Loading from RAM never beats computing on this machine." in answer.words
    assert answer.in_time.with_offload.ttft_s.p90 > answer.in_time.without.ttft_s.p90
    answer = timed(turns, by_hand(copy_latency_s=0.0))
    assert "Loading from RAM beats computing at any length." in answer.words


def test_without_a_purchase_both_timed_runs_are_equal(turns: str) -> None:
    answer = timed(turns, kv_bytes=200 * MIB)
    assert (answer.outcome, answer.chosen.purchase) == ("BUY_NOTHING", NOTHING)
    assert answer.in_time is not None
    assert answer.in_time.with_offload == answer.in_time.without
    expected = "Time to first token: p90 1 s, mean 1.15 s, p50 1 s, p99 4 s."
    assert [sentence for sentence in answer.words if sentence.startswith(expected)]


# ---- tiers


@pytest.mark.slow
def test_ssds_are_as_fast_as_the_slower_of_machine_and_price_list(turns: str) -> None:
    slow = drives(read_per_s="3MiB", write_per_s="8MiB")
    waits = timed(turns, for_sale=prices(ssd=slow)).in_time
    assert waits is not None
    read, write = waits.machine.disk_read_bytes_per_s, waits.machine.disk_write_bytes_per_s
    assert read is not None
    assert write is not None
    assert (read.value, write.value) == (3 * MIB, 4 * MIB)
    assert "ssd.read_per_s" in read.source
    assert "by hand" in write.source
    # Per block 1/4 s from RAM and 1/3 s from the drive; and the latency of the copy.
    assert waits.ssd_break_even_tokens == pytest.approx(0.1 * A_BLOCK / (1 - 1 / 4 - 1 / 3))


@pytest.mark.slow
def test_an_engine_has_its_share_of_the_drives(turns: str) -> None:
    of = {"gpus": 4, "replicas": 4, "for_sale": prices(ssd=drives()), "target": {"saved": 0.1}}
    waits = timed(turns, **of).in_time
    assert waits is not None
    read = waits.machine.disk_read_bytes_per_s
    assert read is not None
    assert read.value == 4 * MIB / 4
    assert "times 0.25, the drives of an engine" in read.source


@pytest.mark.slow
def test_a_tier_that_cannot_keep_up_with_writes_is_reported(turns: str, tmp_path: Path) -> None:
    for_sale = prices(Ram(module="5MiB", price=100, slots=4), drives())
    answer = timed(turns, for_sale=for_sale)
    assert answer.chosen.ssd_drives == 1
    assert "RAM and SSDs keep up with their writes." in answer.words
    assert "is waiting in the queue or for SSDs" in words(answer)
    slow = timed(turns, by_hand(disk_write_bytes_per_s=1000.0), for_sale=for_sale)
    assert slow.chosen == msgspec.structs.replace(answer.chosen, ttft_p90_s=slow.chosen.ttft_p90_s)
    assert [sentence for sentence in slow.words if sentence.startswith("The SSDs do not keep up with writes")]
    assert not [sentence for sentence in slow.words if "keep up with their writes" in sentence]
    # At the end, every ten seconds four new blocks arrive, and storing them takes 16 s.
    new = [tuple(range(1000 + 4 * number, 1004 + 4 * number)) for number in range(20)]
    path = written(tmp_path / "new-at-the-end.jsonl", TURNS + new)
    slow = timed(path, by_hand(store_bytes_per_s=MIB / 4))
    (sentence,) = [sentence for sentence in slow.words if "keep" in sentence]
    assert sentence.startswith("RAM does not keep up with writes: more than 30 s")


# ---- the numbers of timed replays


def test_the_busiest_engine_is_timed(turns: str, tmp_path: Path) -> None:
    path = tmp_path / "uneven.jsonl"
    path.write_text("".join(Path(turns).read_text().splitlines(keepends=True)[:190]))
    of = fleet(gpus=2, replicas=2, routing="random", kv_bytes=8 * MIB, machine=by_hand())
    answer, trace = planned(str(path), of, saved=0.3), load_trace(str(path))
    chosen = route(trace, 2, "random")
    parts = [trace.of_requests(np.flatnonzero(chosen == number)) for number in range(2)]
    assert parts[0].block_refs != parts[1].block_refs
    busiest = max(parts, key=lambda part: part.block_refs)
    waits, row = answer.in_time, answer.chosen
    assert waits is not None
    assert (waits.engines, waits.requests) == (2, busiest.requests)
    config = ReplayConfig(row.ram_blocks, device_blocks=8)
    timing = Timing(by_hand(), MIB)
    assert waits.with_offload == run_in_time(busiest, timing, 8, config)
    assert waits.without == run_in_time(busiest, timing, 8)
    assert "on the busiest of 2 engines." in words(answer)
    assert f"The timed replay saves {100 * waits.with_offload.hit_ratio:.1f}% on that engine, not" in words(
        answer
    )
    assert [assumption.source for assumption in answer.assumptions if assumption.name == "timed engine"]


def test_scaled_traffic_arrives_faster_at_whole_caches(turns: str) -> None:
    of = fleet(kv_bytes=10 * MIB, scale=2.0, machine=by_hand())
    answer = planned(turns, of, saved=0.5)
    waits, row = answer.in_time, answer.chosen
    assert waits is not None
    assert row.ram_blocks == 100
    timing = Timing(by_hand(), MIB, load=2.0)
    assert waits.with_offload == run_in_time(
        load_trace(turns), timing, 10, ReplayConfig(200, device_blocks=10)
    )
    assert waits.load == 2
    assert "caches are empty at the start of a recording that is shortened" in words(answer)
    assert "arrival rate" in [assumption.name for assumption in answer.assumptions]


@pytest.mark.slow
def test_the_purchased_ssds_are_replayed(turns: str) -> None:
    for_sale = prices(Ram(module="5MiB", price=100, slots=4), drives())
    answer = timed(turns, for_sale=for_sale)
    waits, row = answer.in_time, answer.chosen
    assert waits is not None
    tiers = parse_tiers("tiers", f"{row.ssd_blocks},policy=lru,admission=all")
    config = ReplayConfig(row.ram_blocks, device_blocks=5, tiers=tiers)
    again = run_in_time(load_trace(turns), Timing(waits.machine, MIB), 5, config)
    assert waits.with_offload.ttft_s == again.ttft_s
    assert waits.with_offload.tiers[1].hit_blocks == again.tiers[1].hit_blocks > 0


# ---- assumptions and limits


def test_the_machine_and_its_sources_are_assumptions(turns: str) -> None:
    answer = timed(turns)
    by_name = {assumption.name: assumption for assumption in answer.assumptions}
    assert by_name["machine"].value == "by hand"
    assert {name for name in QUANTITIES if name in by_name} == set(QUANTITIES) - {"memory_copy_bytes_per_s"}
    assert by_name["copy_latency_s"].value == "100 ms"
    assert by_name["copy_latency_s"].source == "assumed: by hand"
    assert by_name["requests at a time"].value == "256"


def test_the_prefill_speed_comes_from_the_machine(turns: str) -> None:
    answer, given = timed(turns), timed(turns, prefill_tokens_per_s=256.0)
    assert answer.chosen.gpus_worth is not None
    assert given.chosen.gpus_worth == pytest.approx(2 * answer.chosen.gpus_worth)
    # 475 of 500 requests hit four blocks in 4,990 s; a GPU computes one block per second.
    assert answer.chosen.gpus_worth == pytest.approx(475 * 4 / 4990)
    sources = [
        next(assumption.source for assumption in plan.assumptions if assumption.name == "prefill")
        for plan in (answer, given)
    ]
    assert sources == [
        "the machine's, without attention",
        "given; not measured here; waits are the machine's",
    ]
    assert given.in_time == answer.in_time
    hours = timed(turns, target={"gpu_hours_a_day": 1.0})
    assert hours.outcome == "BUY"


def test_an_engine_of_four_gpus_is_four_times_as_fast() -> None:
    single, four = machine_of_class("h100-pcie5"), machine_of_class("h100-pcie5", gpus=4)
    assert four.name == "4 x h100-pcie5"
    assert single.prefill_s(0, 8192) == pytest.approx(4 * four.prefill_s(0, 8192))
    assert four.value("load_bytes_per_s") == 4 * single.value("load_bytes_per_s")
    assert four.value("decode_tokens_per_s") == 4 * single.value("decode_tokens_per_s")
    assert four.value("disk_read_bytes_per_s") == single.value("disk_read_bytes_per_s")
    speeds = [
        Fleet(4, MIB, MIB, prices(), replicas, machine=on).tokens_per_s
        for replicas, on in ((4, single), (1, four))
    ]
    assert speeds[0] == pytest.approx(speeds[1])
    assert Fleet(1, MIB, MIB, prices(), machine=by_hand(prefill_s_per_token=0.0)).tokens_per_s == 0


@pytest.mark.parametrize(
    ("step_ms", "warning", "first", "waits"),
    [
        (
            1000,
            "Requests arrive faster than the GPUs compute",
            "takes 3.94 times as long",
            "grow without end",
        ),
        (
            2500,
            "Without the purchase: requests arrive faster",
            "takes 1.60 times as long",
            "; without the purchase",
        ),
        (10_000, None, "Buy ", "p90 from 4 s to "),
    ],
)
def test_overload_is_reported_first(
    step_ms: int, warning: str | None, first: str, waits: str, tmp_path: Path
) -> None:
    """Regression: an overloaded fleet got a purchase, and waits that depend on the recording's length."""
    pytest.importorskip("plotly", reason="pages take plotly: pip install 'kvoffload[report]'")
    answer = timed(written(tmp_path / "dense.jsonl", TURNS, step_ms))
    assert answer.in_time is not None
    assert first in answer.words[0]
    assert any(waits in sentence for sentence in answer.words)
    warnings = [sentence for sentence in answer.cannot_tell if "faster than the GPUs compute" in sentence]
    assert len(warnings) == (warning is not None)
    assert warning is None or warnings[0].startswith(warning)
    content = plan_page(answer, "kvoffload plan")
    for name in ("recommended", "the GPUs alone"):
        has_bars = f"The time to first token of {name} grows without end." not in content
        run = answer.in_time.with_offload if name == "recommended" else answer.in_time.without
        assert has_bars == (not run.is_overloaded), name
    assert ('id="waits"' in content) == (not answer.in_time.with_offload.is_overloaded)


def test_a_recording_without_times_has_no_waits(tmp_path: Path) -> None:
    path = written(tmp_path / "at-once.jsonl", [(1, 2, 3)] * 40, step_ms=0)
    answer = timed(path, target={})
    assert answer.in_time is None
    assert "The recording has no times, so waits are unknown." in answer.cannot_tell


def test_a_machine_that_lacks_a_number_is_refused_before_the_work(turns: str) -> None:
    no_disk = msgspec.structs.replace(by_hand(), disk_write_bytes_per_s=None)
    with pytest.raises(ConfigError, match=r"machine: 'by hand' .* no disk_write_bytes_per_s: .*--rest-from"):
        fleet(prices(ssd=drives()), machine=no_disk)
    assert timed(turns, no_disk).in_time is not None, "a disk is needed only if SSDs are for sale"
    for name in ("prefill_s_per_token", "store_bytes_per_s"):
        with pytest.raises(ConfigError, match=f"it has no {name}: .*--rest-from"):
            fleet(machine=msgspec.structs.replace(by_hand(), **{name: None}))


def test_a_request_that_no_engine_has_room_for_is_refused(turns: str) -> None:
    of = fleet(kv_bytes=4 * MIB, machine=by_hand())
    with pytest.raises(
        ConfigError, match=r"kv-per-gpu: 4194304 .* have 4 blocks; the longest request and its answer need 5"
    ):
        planned(turns, of)
    planned(turns, replace(of, machine=None), budget=0)


# ---- a target in seconds


def test_the_cheapest_purchase_that_reaches_a_ttft_target_is_found(turns: str) -> None:
    answer = timed(turns, target={"ttft_p90_s": 2.0})
    # LRU with less than 100 blocks has no hits in a loop of 100 blocks.
    assert (answer.outcome, answer.chosen.purchase) == ("BUY", Purchase(20, 0))
    assert answer.chosen.ttft_p90_s == pytest.approx(1.85)
    expected = "Buy 100 MiB of RAM for 2,000 USD: p90 of time to first token is 1.85 s, and the target is 2 s"
    in_time = (
        "It saves 71.2% of the prefill in time, 95.0% of the prefill (87.1% to 100.0%) without a clock: "
    )
    assert answer.words[0].startswith(f"{expected}. {in_time}")
    assert answer.words[0].endswith("The purchase does the work of 0.29 GPUs."), "savings of the timed replay"
    assert answer.chosen.gpus_worth == pytest.approx(0.38, abs=0.005), "savings of the untimed replay"
    assert answer.smaller is not None
    assert answer.smaller.ttft_p90_s == pytest.approx(4), (
        "the next smaller purchase was timed, and misses the target"
    )
    assert answer.smaller.purchase == Purchase(19, 0), "single modules"
    assert (answer.needed, answer.needed_ttft_p90_s) == (None, 2.0)
    assert "A wait comes from one simulated run" in " ".join(answer.cannot_tell)
    assert "No target was given" not in words(answer)
    assert len([row for row in answer.rows if row.ttft_p90_s is not None]) < len(answer.rows)


def test_nothing_is_bought_if_the_gpus_alone_reach_a_ttft_target(turns: str) -> None:
    answer = timed(turns, target={"ttft_p90_s": 4.1})
    assert (answer.outcome, answer.chosen.purchase) == ("BUY_NOTHING", NOTHING)
    expected = (
        "Buy nothing: with the GPUs' own memory p90 of time to first token is 4 s, and the target is 4.1 s"
    )
    assert answer.words[0] == f"{expected}."
    assert [row.purchase for row in answer.rows if row.ttft_p90_s is not None] == [NOTHING]


@pytest.mark.parametrize(("budget", "nearest"), [(None, 1.85), (1999, 4.0)])
def test_an_unreachable_ttft_target_names_the_nearest_purchase(
    turns: str, budget: float | None, nearest: float
) -> None:
    answer = timed(turns, target={"ttft_p90_s": 1.0, "budget": budget})
    assert answer.outcome == "NOT_REACHED"
    assert answer.chosen.ttft_p90_s == pytest.approx(nearest)
    expected = "No feasible purchase{} that was timed reaches a p90 of time to first token of 1 s."
    assert answer.words[0].startswith(expected.format("" if budget is None else " for 1,999 USD"))
    assert f"The nearest is {duration(nearest)}, with " in answer.words[0]
    assert budget is None or answer.chosen.price <= budget


@pytest.mark.slow
@pytest.mark.parametrize(("read_bytes_per_s", "num_drives"), [(40 * MIB, 1), (MIB / 16, 0)])
def test_slow_ssds_are_not_bought_for_a_ttft_target(
    turns: str, read_bytes_per_s: float, num_drives: int
) -> None:
    """The slow disk reads a block in 16 s that a GPU computes in 1 s."""
    on = by_hand(disk_read_bytes_per_s=read_bytes_per_s, disk_write_bytes_per_s=40.0 * MIB)
    answer = timed(turns, on, for_sale=prices(ssd=drives(read_per_s="1GB")), target={"ttft_p90_s": 2.5})
    assert (answer.outcome, answer.chosen.ssd_drives) == ("BUY", num_drives)
    assert (answer.chosen.price < 2000) == bool(num_drives)
    assert planned(turns, fleet(prices(ssd=drives())), saved=0.5).chosen.purchase == Purchase(1, 1)


@pytest.mark.parametrize("one_in", [2, 5])
@pytest.mark.slow
def test_a_search_on_a_sample_gives_the_wait_of_all_sessions(turns: str, one_in: int) -> None:
    """A sample of the sessions needs less RAM; with all sessions this RAM misses the target."""
    source, of = TraceSource(turns, None, False), fleet(machine=by_hand())
    answer = Plan(source, of, Target(ttft_p90_s=2.0), PLAIN, work=Work(jobs=1), one_in=one_in).run()
    everything = timed(turns, target={"ttft_p90_s": 2.0})
    assert (answer.outcome, answer.chosen) == (everything.outcome, everything.chosen)
    assert answer.smaller == everything.smaller
    assert answer.in_time == everything.in_time
    assert {row.one_in for row in answer.rows} == {1}
    assert min(row.ram_modules for row in answer.rows[1:]) < 20 // one_in + 2, (
        "the sample needs fewer modules"
    )
    assert {row.ttft_p90_s for row in answer.sampled} == {None}, "waits are measured with all sessions"
    assert f"Searched on one of {one_in} sessions" in words(answer)


class ByHand(Clock):
    """A clock with given waits, by number of modules."""

    def __init__(self, waits_s: Sequence[float]) -> None:
        self.waits_s, self.timed = waits_s, list[int]()

    def outcome(self, row: PlanRow, later: int = 0) -> TimedOutcome:
        if row.ram_modules not in self.timed:
            self.timed.append(row.ram_modules)
        wait = Distribution.of(np.full(10, self.waits_s[row.ram_modules]))
        return TimedOutcome(**{**dict.fromkeys(TimedOutcome.__struct_fields__[:13], 0), "ttft_s": wait})

    def known(self, row: PlanRow) -> TimedOutcome | None:
        return self.outcome(row) if row.ram_modules in self.timed else None


@pytest.mark.parametrize(
    ("waits_s", "modules", "outcome"),
    [
        ((9, 8, 2, 1), 2, "BUY"),
        ((9, 5, 3, 1, 7, 8), 2, "BUY"),  # more RAM can be worse: searched from the top down while waits fall
        ((9, 8, 7, 6), 3, "NOT_REACHED"),
        ((9, 2, 7, 6), 3, "NOT_REACHED"),  # not searched beyond a local maximum
        ((9, 8, 5, 6), 2, "NOT_REACHED"),  # the nearest, not the largest
        ((4, 8, 8, 8), 0, "BUY_NOTHING"),
        ((*[9] * 41, *[1] * 24), 41, "BUY"),
    ],
)
def test_purchases_are_bisected_by_their_wait(waits_s: Sequence[float], modules: int, outcome: str) -> None:
    none = nothing(fleet(), gather(TraceSource("chat", None, False), fleet())).row
    rows = [msgspec.structs.replace(none, ram_modules=n, price=n, saved=n) for n in range(len(waits_s))]
    by_hand = ByHand(waits_s)
    choice = choose_by_wait([Measured(row, np.zeros(1, np.int64)) for row in rows], 4.0, by_hand)
    assert (choice.chosen.row.ram_modules, choice.outcome.name) == (modules, outcome)
    assert len(by_hand.timed) <= max(6, 2 + len(waits_s).bit_length()), "not every purchase is timed"
    if outcome == "BUY":
        assert modules - 1 in by_hand.timed
        assert choice.smaller is not None
        assert choice.smaller.row.ram_modules == modules - 1


@pytest.mark.parametrize("on", [None, "by hand"])
def test_a_ttft_target_needs_a_machine_and_arrival_times(on: str | None, turns: str, tmp_path: Path) -> None:
    path = written(tmp_path / "at-once.jsonl", [(1, 2, 3)] * 40, step_ms=0) if on else turns
    with pytest.raises(ConfigError, match=r"target-ttft-p90: 2\.0 is invalid; it needs --machine, and a"):
        planned(path, fleet(machine=by_hand() if on else None), ttft_p90_s=2.0)


def test_invalid_ttft_targets_are_refused() -> None:
    for wrong in (0.0, -1.0, math.inf):
        with pytest.raises(ConfigError, match=r"target-ttft-p90: .* seconds, more than 0"):
            Target(ttft_p90_s=wrong)
    with pytest.raises(ConfigError, match=r"target-saved: 0\.5 .* one target .* leave out target-ttft-p90"):
        Target(saved=0.5, ttft_p90_s=1.0)


@pytest.mark.slow
def test_timed_replays_are_kept_in_the_journal(
    turns: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[ReplayConfig | None] = []

    def counted(
        trace: Any, timing: Timing, blocks: int, config: ReplayConfig | None, updates: Any, **engines: Any
    ) -> Any:
        runs.append(config)
        if len(runs) == 2:
            raise KeyboardInterrupt
        return run_in_time(trace, timing, blocks, config, updates, **engines)

    monkeypatch.setattr(clock, "run_in_time", counted)
    updates: list[Progress] = []

    def run(ttft_p90_s: float) -> PlanAnswer:
        source = TraceSource(turns, None, False)
        of, target = fleet(machine=by_hand()), Target(ttft_p90_s=ttft_p90_s)
        return Plan(source, of, target, PLAIN, work=Work(jobs=1, output=tmp_path / "rows.csv")).run(
            updates.append
        )

    with pytest.raises(KeyboardInterrupt):
        run(2.0)
    answer = run(2.0)
    once = len(runs) - 1
    assert len(set(map(str, runs))) == once, "each replay once, the interrupted replay twice"
    assert run(2.0) == answer
    assert run(4.1).outcome == "BUY_NOTHING"
    assert len(runs) == once + 1, "another target uses the kept replays"
    timed_rows = [now for now in updates if now.of == "timed replays"]
    assert timed_rows[-1].refs_done == timed_rows[-1].rows_done * 500
    assert {now.of for now in updates} == {"rows", "timed replays"}
    written_rows = (tmp_path / "rows.csv").read_text().splitlines()
    assert "ttft_p90_s" in written_rows[0].split(",")


# ---- the command


def command(trace: str, tmp_path: Path, on: Machine, *extra: str) -> tuple[str, ...]:
    (tmp_path / "prices.toml").write_text(as_toml(prices(Ram(module="5MiB", price=100, slots=4), drives())))
    (tmp_path / "machine.json").write_bytes(on.to_json())
    return ("plan", trace, "--bytes-per-token", "2KiB", "--gpus", "1", "--kv-per-gpu", "5MiB",
            "--prices", str(tmp_path / "prices.toml"), "--policies", "lru", "--admissions", "all",
            "--jobs", "1", "--ssd-admissions", "all", "--stores", "on-compute",
            "--machine", str(tmp_path / "machine.json"),
            *extra)  # fmt: skip


@pytest.mark.slow
def test_the_command_prints_waits(turns: str, tmp_path: Path) -> None:
    # A disk so slow that the plan warns.
    on = by_hand(disk_write_bytes_per_s=1000.0)
    arguments = command(turns, tmp_path, on, "--target-saved", "0.5", "--quiet")
    done = kvoffload(*arguments, "--format", "json")
    assert (done.returncode, done.stderr) == (0, "")
    answer = msgspec.json.decode(done.stdout, type=PlanAnswer)
    assert answer.in_time is not None
    assert answer.chosen.ssd_drives == 1
    assert answer.chosen.gpus_worth is not None
    text = " ".join(kvoffload(*arguments).stdout.split())
    for sentence in answer.words:
        assert " ".join(sentence.split()) in text
    runs = answer.in_time.without, answer.in_time.with_offload
    p90 = "p90 from " + " to ".join(duration(run.ttft_s.p90) for run in runs)
    assert p90 in text
    assert "The SSDs do not keep up" in text


@pytest.mark.slow
def test_the_command_accepts_a_ttft_target(turns: str, tmp_path: Path) -> None:
    kept = ("--quiet", "--output", str(tmp_path / "rows.csv"))
    arguments = command(turns, tmp_path, by_hand(), "--target-ttft-p90", "3900ms", *kept)
    answer = msgspec.json.decode(kvoffload(*arguments, "--format", "json").stdout, type=PlanAnswer)
    assert (answer.outcome, answer.needed_ttft_p90_s) == ("BUY", 3.9)
    shown = kvoffload(*arguments)
    assert "TTFT p90" in shown.stdout
    text = " ".join(shown.stdout.split())
    for sentence in (*answer.words, *answer.cannot_tell):
        assert " ".join(sentence.split()) in text
    done = kvoffload(*command(turns, tmp_path, by_hand(), "--target-ttft-p90", "100ms", *kept))
    assert done.returncode == 1
    done = kvoffload(*command(turns, tmp_path, by_hand(), "--target-ttft-p90", "soon"))
    assert (done.returncode, done.stdout) == (2, "")
    assert "target-ttft-p90: 'soon' is invalid; allowed: seconds" in done.stderr


@pytest.mark.parametrize(
    ("machine", "why"),
    [
        ("h100", "machine: 'h100' is invalid; allowed: a file from"),
        ("gone.json", "machine: 'gone.json' is invalid; it cannot be read"),
    ],
)
def test_an_invalid_machine_is_a_one_line_error(turns: str, tmp_path: Path, machine: str, why: str) -> None:
    done = kvoffload(*command(turns, tmp_path, by_hand(), "--machine", machine))
    assert (done.returncode, done.stdout) == (2, "")
    assert why in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.slow
def test_a_machine_class_is_multiplied_by_the_gpus_of_an_engine(turns: str, tmp_path: Path) -> None:
    arguments = command(turns, tmp_path, by_hand(), "--machine", "l4:70B", "--quiet", "--format", "json")
    done = kvoffload(*arguments, "--gpus", "4", "--replicas", "2")
    assert done.returncode == 0, done.stderr
    answer = msgspec.json.decode(done.stdout, type=PlanAnswer)
    assert answer.in_time is not None
    assert answer.in_time.machine.name == "2 x l4"
    assert answer.in_time.engines == 2
