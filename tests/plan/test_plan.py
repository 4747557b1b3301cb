"""Plans: known best purchases, rows equal to replays, limits of the answer, interruption, and the command."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import itertools
import json
import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click
import msgspec
import numpy as np
import pytest

from kvoffload.cli.options import warn_of_copies
from kvoffload.errors import ConfigError, SweepError
from kvoffload.integrations.vllm.shared.options import parse_options
from kvoffload.model.kv_bytes import kv_heads
from kvoffload.plan import sample
from kvoffload.plan.evidence import gather, together
from kvoffload.plan.fleet import NOTHING, Fleet, Purchase
from kvoffload.plan.plan import Plan, PlanAnswer
from kvoffload.plan.prices import MEANING, Prices, Ram, Ssd, as_toml, flattened, read_prices
from kvoffload.plan.rows import Cell, Measured, PlanRow, limits, nothing
from kvoffload.plan.search import Space, TierAxis, confirm
from kvoffload.plan.setups import Setups
from kvoffload.plan.targets import Choice, Target, choose
from kvoffload.plan.words import _days
from kvoffload.replay.config import ReplayConfig, slots_needed
from kvoffload.replay.data import DataPlane
from kvoffload.replay.device_cache import run_device
from kvoffload.replay.optimum import infinite
from kvoffload.replay.replay import Replay
from kvoffload.replay.routing import route
from kvoffload.sweep import task as tasks
from kvoffload.sweep import workers
from kvoffload.sweep.grid import content_digest
from kvoffload.sweep.measuring import Work
from kvoffload.sweep.task import Measurement, Task, TraceSource
from kvoffload.tiers.spec import parse_tiers
from kvoffload.traces.load import at_load, one_session_in
from kvoffload.traces.sources import load_trace
from kvoffload.traces.statistics import turns
from support.plan_rows import (
    MANY_WRITES,
    MIB,
    PLAIN,
    drives,
    fleet,
    kept,
    line,
    planned,
    prices,
    words,
    written,
)
from support.run_cli import kvoffload


@pytest.fixture(scope="module")
def loop(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Write a recording: 25 conversations of two blocks in turns; after each use, two blocks used once.

    Between two uses of a block, 98 other blocks are used: LRU with 100 blocks has all hits, with fewer none.
    """
    hot = [(number, 1000 + number) for number in range(25)]
    cold = [(10_000 + number, 50_000 + number) for number in range(250)]
    pairs = [(hot[number % 25], cold[number]) for number in range(250)]
    chains = [chain for pair in pairs for chain in pair]
    return written(tmp_path_factory.mktemp("plan") / "loop.jsonl", chains)


# ---- the right purchase


@pytest.mark.slow
def test_the_smallest_purchase_that_reaches_a_target_is_found_between_coarse_steps(loop: str) -> None:
    trace = load_trace(loop)
    reaching = [
        modules for modules in range(1, 41)
        if Replay(trace, ReplayConfig(5 * modules, device_blocks=5)).run().prefix_hit_ratio >= 0.4
    ]  # fmt: skip
    assert reaching == list(range(20, 41)), "computed by hand"
    answer = planned(loop, saved=0.4)
    assert answer.outcome == "BUY"
    assert (answer.chosen.ram_modules, answer.chosen.price, answer.chosen.ssd_drives) == (20, 2000, 0)
    assert answer.chosen.saved == pytest.approx(0.45)
    assert answer.ceiling == answer.chosen.saved
    assert answer.words[0].startswith("Buy 100 MiB of RAM for 2,000 USD: it saves 45.0% of the prefill")
    assert answer.smaller is not None
    assert answer.smaller.saved == 0
    assert len(answer.rows) < 20, "not every number of modules is replayed"


def test_without_a_target_useless_modules_are_not_bought(loop: str) -> None:
    answer = planned(loop)
    assert answer.chosen.ram_modules == 20
    assert "No other feasible purchase saves more." in answer.words


@pytest.mark.parametrize(
    ("gpu_hour", "sentence"),
    [
        (0.0, None),
        (0.1, "At 0.1 USD a GPU-hour that is 40 USD a year: less than the price within 5 years, so"),
        (2.5, "At 2.5 USD a GPU-hour that is 1,011 USD a year: the purchase pays back in 24 months."),
        (100.0, "At 100 USD a GPU-hour that is 40,447 USD a year: the purchase pays back in 19 days."),
    ],
)
def test_the_price_is_weighed_against_gpu_hours(loop: str, gpu_hour: float, sentence: str | None) -> None:
    """225 of 500 requests hit 1,024 tokens in 4,990 s; a GPU computes 1,000 tokens/s: 0.0462 GPUs."""
    at_price = dataclasses.replace(
        fleet(prefill_tokens_per_s=1000.0), prices=msgspec.structs.replace(prices(), gpu_hour=gpu_hour)
    )
    answer = planned(loop, at_price, of_ceiling=1.0)
    assert answer.chosen.price == 2000
    if sentence is None:
        assert answer.payback is None
        assert not any("GPU-hour" in line for line in answer.words)
        return
    assert answer.words[1].startswith(sentence)
    assert answer.payback is not None
    assert answer.payback.gpus == pytest.approx(225 * 1024 / 4990 / 1000)
    assert answer.payback.days == pytest.approx(2000 / (24 * answer.payback.gpus * gpu_hour))


def test_a_purchase_that_replaces_no_gpu_is_reported(loop: str) -> None:
    answer = planned(loop, fleet(prefill_tokens_per_s=100_000.0), of_ceiling=1.0)
    assert answer.words[1] == "It replaces no GPU: it is worth its price only for shorter waits."
    assert answer.payback is not None
    assert answer.payback.days is None


def test_lru_in_the_same_memory_is_named(loop: str) -> None:
    """LRU has no hits in a loop longer than its memory; LIRS has."""
    answer = planned(loop, setups=Setups(("on-compute",), ("lru", "lirs"), ("all",)), saved=0.1)
    assert answer.chosen.policy == "lirs"
    (sentence,) = (line for line in answer.words if line.startswith("With lru"))
    assert sentence.startswith(
        "With lru in the same memory, blocks that it stores as they are computed save 0.0%, "
    )
    points = 100 * answer.chosen.saved
    assert sentence.endswith(f"{points:.1f} points less.")
    assert "With lru" not in words(planned(loop)), "lru is the choice"


def test_a_victim_tier_needs_less_ram(loop: str) -> None:
    both = planned(loop, setups=Setups(("on-compute", "on-device-eviction"), ("lru",), ("all",)), saved=0.4)
    assert both.chosen.store == "on-device-eviction"
    assert both.chosen.ram_modules == 19, "the GPU holds the other five blocks"


@pytest.mark.parametrize(("budget", "modules"), [(2000, 20), (1999.99, 0), (4000, 20), (0, 0)])
def test_a_budget_is_kept_to_the_cent(loop: str, budget: float, modules: int) -> None:
    answer = planned(loop, budget=budget)
    assert answer.chosen.ram_modules == modules
    assert answer.outcome == ("BUY" if modules else "BUY_NOTHING")
    assert answer.chosen.price <= budget
    for row in answer.rows:
        assert row.feasible == (row.price <= budget)
        assert row.feasible or "above the budget" in row.why_not


def test_a_target_beyond_the_budget_is_not_reached(loop: str) -> None:
    answer = planned(loop, budget=1000, saved=0.4)
    assert answer.outcome == "NOT_REACHED"
    assert answer.words[0].startswith("No feasible purchase for 1,000 USD saves 40.0% of the prefill.")
    assert all(row.price <= 1000 for row in (answer.chosen, answer.most))


def test_a_target_above_the_ceiling_is_refused_with_the_ceiling(loop: str) -> None:
    with pytest.raises(ConfigError, match=r"target-saved: 0\.46 is invalid; the ceiling is 0\.4500"):
        planned(loop, saved=0.46)
    trace = load_trace(loop)
    exactly = infinite(trace).prefix_hit_blocks / trace.block_refs
    assert planned(loop, saved=exactly).outcome == "BUY"


def test_equivalent_targets_give_the_same_purchase(loop: str) -> None:
    fast = fleet(prefill_tokens_per_s=1000.0)
    share = planned(loop, fast, of_ceiling=1.0)
    assert share.needed == share.ceiling
    assert share.chosen.gpu_hours_a_day is not None
    hours = planned(loop, fast, gpu_hours_a_day=share.chosen.gpu_hours_a_day)
    assert hours.needed == pytest.approx(share.ceiling)
    assert hours.chosen.purchase == share.chosen.purchase
    # 225 of 500 requests hit 1,024 tokens in 4,990 s; a GPU computes 1,000 tokens/s.
    assert share.chosen.gpus_worth == pytest.approx(225 * 1024 / 4_990 / 1000)
    with pytest.raises(ConfigError, match=r"target-gpu-hours: 5 is invalid; it needs --prefill-tokens"):
        planned(loop, gpu_hours_a_day=5)
    with pytest.raises(ConfigError, match=r"target-gpu-hours: 500 is invalid; the ceiling is 1\.11"):
        planned(loop, fast, gpu_hours_a_day=500)


def test_invalid_targets_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"(?s)budget: -1.*target-saved: 1\.5.*0 to 1"):
        Target(budget=-1, saved=1.5)
    with pytest.raises(ConfigError, match="one target besides a budget"):
        Target(saved=0.1, of_ceiling=0.5)


def test_nothing_is_bought_if_the_gpus_hold_all_blocks(loop: str) -> None:
    answer = planned(loop, fleet(kv_bytes=300 * MIB), saved=0.4)
    assert (answer.outcome, answer.chosen.purchase) == ("BUY_NOTHING", NOTHING)
    assert answer.words[0].startswith("Buy nothing: the GPUs' own memory saves 45.0%")
    assert answer.by_gpus == answer.ceiling


def test_the_next_smaller_purchase_is_compared(chat: str) -> None:
    answer = planned(chat, fleet(prices(Ram(module="50MiB", price=100, slots=40)), 50 * MIB), of_ceiling=0.7)
    assert answer.smaller is not None
    assert answer.smaller.price < answer.chosen.price
    assert answer.smaller.saved < answer.needed <= answer.chosen.saved
    (sentence,) = [sentence for sentence in answer.words if "points less" in sentence]
    assert sentence.endswith(("is above 0).", "(sure).", "points).", "slowly)."))


# ---- infeasible purchases


def test_durable_ssds_are_bought(loop: str) -> None:
    answer = planned(loop, fleet(prices(ssd=drives())), saved=0.4)
    assert answer.chosen.purchase == Purchase(1, 1)
    assert answer.chosen.by_ssds > 0.4
    assert words(answer).count("drive writes a day") == 1


@pytest.mark.parametrize(
    ("ssd", "why"),
    [
        (Ssd(drive="400MiB", price=10, slots=1, writes_per_day=5), "drive writes a day, rated for 5: SSDs"),
        (drives(write_per_s="20KB"), "written in the busiest minute exceed the SSDs'"),
        (drives(read_per_s="20KB"), "read in the busiest minute exceed the SSDs'"),
    ],
)  # fmt: skip
def test_infeasible_ssds_are_listed_but_not_recommended(loop: str, ssd: Ssd, why: str) -> None:
    answer = planned(loop, fleet(prices(ssd=ssd)), saved=0.4)
    assert answer.chosen.purchase == Purchase(20, 0)
    with_ssds = [row for row in answer.rows if row.ssd_drives and not row.ssd_write_budget]
    assert with_ssds
    assert any(why in row.why_not for row in with_ssds)
    assert not any(row.feasible for row in with_ssds if row.by_ssds > 0.1)
    assert not any(row in answer.frontier for row in with_ssds)


def test_a_better_but_infeasible_row_is_named(loop: str) -> None:
    ssd = Ssd(drive="400MiB", price=10, slots=1, writes_per_day=0.001)
    few = prices(Ram(module="5MiB", price=100, slots=4), ssd)
    answer = planned(loop, fleet(few))
    assert answer.outcome == "BUY_NOTHING"
    assert "would save 45.0%" in words(answer)
    assert "but is infeasible: " in words(answer)


def test_a_slow_link_makes_rows_infeasible(loop: str) -> None:
    answer = planned(loop, fleet(prices(link_per_s="10KB")), saved=0.4)
    assert answer.outcome == "NOT_REACHED"
    assert all("exceed the GPUs' links of" in row.why_not for row in answer.rows if row.ram_modules >= 20)


def test_blocks_that_ram_reads_from_ssds_do_not_use_the_links(loop: str) -> None:
    row = planned(loop, fleet(prices(ssd=drives())), saved=0.4).chosen
    assert row.ssd_drives, "RAM alone has no hits"
    assert row.load_bytes_per_s is not None
    # 275 of 500 requests are stored once, and 225 are read from the SSDs, written to RAM and loaded.
    assert row.load_bytes_per_s == row.ssd_read_bytes_per_s == pytest.approx(450 * MIB / 4_990)
    assert row.ram_write_bytes_per_s == pytest.approx(1000 * MIB / 4_990)
    enough, too_slow = (
        limits(row, fleet(prices(ssd=drives(), link_per_s=f"{row.busy * blocks * MIB / 4_990:.0f}")))
        for blocks in (560, 540)
    )
    assert enough == []
    assert [limit.text.partition(" of ")[0] for limit in too_slow] == ["stores"]


def test_endurance_by_hand(loop: str) -> None:
    answer = planned(loop, fleet(prices(ssd=drives())), saved=0.4)
    row = answer.chosen
    # 25 conversations and 250 single prompts, two blocks each, are stored once: 550 MiB in 4,990 s.
    assert row.ssd_write_bytes_per_s == pytest.approx(550 * MIB / 4_990)
    assert row.drive_writes_a_day == pytest.approx(550 / 4_990 * 86_400 / 400)
    assert row.ssd_life_years == pytest.approx(MANY_WRITES * 5 / row.drive_writes_a_day)
    of = fleet(prices(ssd=Ssd(drive="400MiB", slots=1, writes_per_day=row.drive_writes_a_day)))
    assert limits(row, of) == [], "a rating equal to the writes is enough"


def test_hosts_and_slots() -> None:
    of = Fleet(
        12,
        MIB * 100,
        MIB,
        prices(Ram(module="10MiB", price=7, slots=3), drives(price=2, slots=2)),
        replicas=4,
    )
    assert (of.hosts, of.device_blocks) == (2, 300)
    assert of.ram_bytes(Purchase(3, 0)) == 60 * MIB
    assert of.price(Purchase(3, 1)) == 2 * (21 + 2)
    assert of.blocks(of.ram_bytes(Purchase(3, 0))) == 15
    assert of.steps(1000) == ([1, 2, 3], [0, 1, 2])
    assert of.steps(6) == ([1, 2], [0, 1, 2]), "more RAM than the recording's blocks is not searched"


def test_ram_that_holds_no_block_is_not_recommended(tmp_path: Path) -> None:
    # The GPU holds one of two blocks that are used in turns. RAM for a block, two modules, holds the other.
    recording = written(tmp_path / "two.jsonl", [(1,), (2,)] * 30)
    of = fleet(prices(Ram(module="512KiB", price=100, slots=8)), kv_bytes=MIB)
    answer = planned(recording, of, dataclasses.replace(PLAIN, stores=("on-device-eviction",)))
    assert (answer.chosen.purchase, answer.chosen.ram_blocks) == (Purchase(2, 0), 1)
    assert all(row.ram_blocks for row in answer.rows if row.ram_modules)
    assert [of.holds_blocks(Purchase(modules, 0)) for modules in range(3)] == [True, False, True]
    of_few = dataclasses.replace(of, scale=0.4)
    assert [of_few.holds_blocks(Purchase(modules, 0)) for modules in range(3)] == [True, False, True]
    assert of_few.steps(100)[0][0] == 2, "a timed replay has RAM of the real size"
    small = fleet(prices(ssd=Ssd(drive="400KiB", slots=4)))
    assert [small.holds_blocks(Purchase(1, drives)) for drives in range(4)] == [True, False, False, True]


@pytest.mark.parametrize(
    ("of", "why"),
    [
        ({"gpus": 0}, "gpus: 0"),
        ({"gpus": 4, "replicas": 3}, "replicas: 3 is invalid; allowed: a divisor of 4, the number"),
        ({"kv_bytes": MIB - 1}, "kv-per-gpu: 1048575 is invalid; .* a replica has 0 blocks; allowed: 1 to "),
        ({"kv_bytes": MIB << 31}, "a replica has 2,147,483,648 blocks; allowed: 1 to 1,073,741,824"),
        ({"gpu_blocks": 5, "scale": 10}, "gpu-tokens: '5 blocks' is invalid; a replica has 0 blocks"),
        ({"scale": 0}, "scale"),
        ({"load": -1}, "load"),
        ({"routing": "best"}, "routing"),
        ({"prefill_tokens_per_s": -1}, "prefill-tokens-per-s"),
    ],
)
def test_invalid_fleets_are_refused(of: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        fleet(**of)


def test_modules_smaller_than_a_block_are_refused(loop: str) -> None:
    with pytest.raises(ConfigError, match=r"ram\.module: '1KiB' is invalid; 4 modules hold no block"):
        planned(loop, fleet(prices(Ram(module="1KiB", slots=4))))


# ---- numbers


EVERY = Setups(admissions=("all",))


@pytest.mark.parametrize("options", [{}, {"replicas": 2}, {"replicas": 2, "routing": "random", "scale": 2.0}])
def test_rows_are_replays(chat: str, options: dict[str, Any]) -> None:
    of = fleet(prices(Ram(module="100MiB", price=100, slots=2), drives()), 100 * MIB, gpus=2, **options)
    answer = planned(chat, of, EVERY)
    trace = load_trace(chat)
    chosen = route(trace, of.replicas, of.routing)
    engine_traces = [trace.of_requests(np.flatnonzero(chosen == number)) for number in range(of.replicas)]
    assert {bool(row.ssd_drives) for row in answer.rows} == {False, True}
    for row in answer.rows[1::5]:
        hits = written_blocks = 0
        for engine_trace in engine_traces:
            size = min(row.ssd_blocks, engine_trace.unique_blocks)
            tiers = parse_tiers("tiers", f"{size},policy={row.ssd_policy},admission={row.ssd_admission}"
                                ) if size else ()  # fmt: skip
            config = ReplayConfig(
                row.ram_blocks, row.policy, row.admission, row.device_blocks, row.store, tiers
            )
            report = Replay(engine_trace, config).run()
            hits += report.prefix_hit_blocks
            written_blocks += sum(tier.blocks_written for tier in report.tiers[1:])
        assert row.saved == hits / trace.block_refs
        assert row.by_gpus == pytest.approx(answer.by_gpus), "the GPUs serve as much as without RAM"
        assert row.by_gpus + row.by_ram + row.by_ssds == pytest.approx(row.saved)
        if row.ssd_drives:
            seconds = (trace.timestamps_ms.max() - trace.timestamps_ms.min()) / 1000
            bytes_written = written_blocks * MIB * of.scale
            assert row.ssd_write_bytes_per_s == pytest.approx(bytes_written / seconds)
    for row in answer.rows:
        assert row.saved <= row.optimum + 1e-12
        assert row.optimum <= answer.ceiling + 1e-12


def test_rows_are_replays_of_real_bytes(loop: str) -> None:
    row, trace = planned(loop, saved=0.4).chosen, load_trace(loop)
    assert row.by_ram > 0
    data = DataPlane(slots_needed(trace, row.ram_blocks), block_bytes=64)
    config = ReplayConfig(row.ram_blocks, row.policy, row.admission, row.device_blocks, row.store)
    report = Replay(trace, config, data).run()
    data.close()
    assert report.blocks_verified > 0
    assert report.mismatches_served == 0
    assert report.prefix_hit_ratio == row.saved


def test_more_ram_never_saves_less_under_lru(chat: str) -> None:
    answer = planned(chat, fleet(prices(Ram(module="20MiB", price=100, slots=40))))
    by_size = sorted(answer.rows, key=lambda row: row.ram_modules)
    assert [row.saved for row in by_size] == sorted(row.saved for row in by_size)


def test_twice_the_traffic_is_half_the_cache(loop: str) -> None:
    double = planned(loop, fleet(kv_bytes=10 * MIB, scale=2.0), saved=0.4)
    assert double.chosen.ram_modules == 40
    single = planned(loop, saved=0.4)
    assert double.chosen.saved == single.chosen.saved
    assert double.chosen.load_bytes_per_s == pytest.approx(2 * single.chosen.load_bytes_per_s)
    assert "2 times the recording's" in " ".join(double.cannot_tell)


def test_the_load_changes_the_replay(tmp_path: Path) -> None:
    """Two turns ten seconds apart, a new conversation every 100 s: at load 100, ten conversations overlap."""
    turns = sorted((100_000 * n + 10_000 * turn, n, turn) for n in range(30) for turn in (0, 1))
    path = tmp_path / "turns.jsonl"
    path.write_text("".join(line(time, [3 * n, 3 * n + 1, 3 * n + 2][: 2 + turn]) for time, n, turn in turns))
    for_sale = prices(Ram(module="3MiB", price=100, slots=20))
    alone, packed = (planned(str(path), fleet(for_sale, MIB, load=load), of_ceiling=0.9) for load in (1, 100))
    assert (alone.ceiling, alone.requests) == (packed.ceiling, packed.requests)
    assert (alone.duration_s, packed.duration_s) == (2910, 39)
    assert alone.chosen.ram_modules == 1
    together = at_load(load_trace(str(path)), 100)
    reaching = [
        modules for modules in range(1, 21)
        if Replay(together, ReplayConfig(3 * modules, device_blocks=1)).run().prefix_hit_ratio
        >= 0.9 * packed.ceiling
    ]  # fmt: skip
    assert packed.chosen.ram_modules == reaching[0] > 10, "ten conversations of three blocks"


def test_windows_of_replicas_add_up(chat: str) -> None:
    evidence = gather(TraceSource(chat, None, False), fleet(gpus=2, replicas=2))
    assert evidence.block_refs == load_trace(chat).block_refs
    assert together([np.array([1, 2, 3]), np.array([10])]).tolist() == [11, 2, 3]


def test_the_search_begins_with_a_coarse_sample() -> None:
    tiers = [TierAxis("drives", [1, 2, 4], PLAIN.with_ssds), TierAxis("servers", [1, 3], PLAIN.with_servers)]
    space = Space([1, 2, 4, 8, 16], PLAIN.of_ram, tiers, lambda purchase: purchase.modules < 16)
    ram, ssds, servers = [(1, 0, 0), (4, 0, 0)], [(1, 2, 0), (1, 4, 0), (4, 1, 0)], [(1, 0, 3), (4, 0, 1)]
    assert space.sample == [*ram, (16, 0, 0), *ssds, *servers]
    cells = space.cells(space.sample, [*PLAIN.of_ram, *PLAIN.with_ssds, *PLAIN.with_servers])
    assert [cell.purchase for cell in cells] == [*ram, *ssds, *servers]
    assert all(bool(cell.purchase.servers) == bool(cell.setup.server_admission) for cell in cells)
    assert len(space.purchases) == 4 * 6, "RAM alone, with three numbers of drives, and with two of servers"
    assert not any(purchase.drives and purchase.servers for purchase in space.purchases)
    assert Space([3], PLAIN.of_ram).sample == [(3, 0, 0)]


# ---- long recordings


def test_a_sample_has_whole_sessions(chat: str) -> None:
    trace = load_trace(chat)
    assert one_session_in(trace, 1) is trace
    sessions = turns(trace).session_of
    begun = list(dict.fromkeys(sessions.tolist()))
    for number in (2, 7, len(begun)):
        there = trace.of_requests(np.flatnonzero(np.isin(sessions, begun[::number])))
        sampled = one_session_in(trace, number)
        assert content_digest(sampled) == content_digest(there)
    assert one_session_in(trace, 10_000).requests == np.count_nonzero(sessions == begun[0])


@pytest.mark.parametrize("one_in", [2, 3])
def test_a_search_on_a_sample_is_confirmed_on_everything(loop: str, one_in: int) -> None:
    source = TraceSource(loop, None, False)
    of, target = fleet(kv_bytes=6 * MIB), Target(saved=0.4)
    answer = Plan(source, of, target, PLAIN, work=Work(jobs=1), one_in=one_in).run()
    everything = planned(loop, of, saved=0.4)
    assert (answer.outcome, answer.chosen) == (everything.outcome, everything.chosen)
    assert answer.chosen.ram_modules == 20
    assert (answer.one_in, {row.one_in for row in answer.rows}) == (one_in, {1})
    assert {row.one_in for row in answer.sampled} == {one_in}
    assert len(answer.rows) < len(everything.rows)
    for row in answer.rows[1:]:
        config = ReplayConfig(row.ram_blocks, device_blocks=row.device_blocks)
        assert row.saved == Replay(load_trace(loop), config).run().prefix_hit_ratio
    expected = (
        f"Searched on one of {one_in} sessions; the {len(answer.rows) - 1} rows of this answer were replayed"
    )
    assert f"{expected} with all sessions." in answer.words
    assert [assumption.value for assumption in answer.assumptions if assumption.name == "searched on"] == [
        f"one of {one_in} sessions"
    ]
    assert everything.one_in == 1
    assert not everything.sampled


@pytest.mark.parametrize("off_by", [-0.2, -0.03, 0.0, 0.1])
def test_a_biased_sample_costs_few_rows(loop: str, off_by: float) -> None:
    """The first rows with all sessions correct the bias."""
    none = nothing(fleet(), gather(TraceSource(loop, None, False), fleet()))
    ways = Setups(("on-compute", "on-device-eviction"), ("lru",), ("all",)).of_ram
    space, steps = Space([*range(2, 64, 2)], ways), list[list[Cell]]()

    def row(cell: Cell, is_sampled: bool = False) -> Measured:
        """Savings with diminishing returns; the second setup is better, but worse on a sample."""
        modules, better = cell.purchase.modules, -0.02 if is_sampled else 0.02
        saved = 0.9 * (1 - 0.93**modules) + off_by * is_sampled + better * (cell.setup == ways[1])
        had = {"ram_modules": modules, "price": modules, "saved": saved, "store": cell.setup.store}
        plan_row = msgspec.structs.replace(none.row, policy="lru", admission="all", **had)
        return Measured(plan_row, np.zeros(1, np.int64))

    def measure(cells: Sequence[Cell], later: int) -> list[Measured]:
        steps.append(list(cells))
        return [row(cell) for cell in cells]

    def chosen(rows: Sequence[Measured]) -> Choice:
        return choose(rows, 0.6, lambda item, second: None)

    sampled = [row(cell, is_sampled=True) for cell in space.cells(space.purchases, ways)]
    rows, choice = confirm(space, measure, chosen, none, chosen([none, *sampled]), sampled, chosen)
    least = next(n for n in itertools.count() if row(Cell(Purchase(n, 0), ways[1])).row.saved >= 0.6)
    assert choice.chosen.row.purchase == (least, 0, 0)
    assert {item.row.setup for item in (choice.chosen, choice.smaller, choice.larger) if item} == {ways[1]}
    assert choice.smaller is not None
    assert choice.smaller.row.ram_modules == least - 1
    assert len(rows) - 1 <= 8
    assert len(steps) <= 4, "steps are sequential"


def test_the_busiest_minute_is_measured_on_all_sessions(loop: str) -> None:
    """The busiest minute of a sample is relatively busier, and must not limit the links."""
    of, sessions = fleet(kv_bytes=6 * MIB), TraceSource(loop, None, False)
    row = planned(loop, of, saved=0.4).chosen
    assert row.load_bytes_per_s is not None
    assert row.ram_write_bytes_per_s is not None
    link = 1.3 * row.busy * max(row.load_bytes_per_s, row.ram_write_bytes_per_s)
    few = gather(sessions, of, one_in=5)
    assert few.busy > 1.3 * row.busy, "the sample alone would exceed the link"
    of = fleet(prices(link_per_s=f"{link:.0f}"), kv_bytes=6 * MIB)
    answer = Plan(sessions, of, Target(saved=0.4), PLAIN, work=Work(jobs=1), one_in=5).run()
    assert (answer.outcome, answer.chosen.purchase) == ("BUY", row.purchase)
    assert {row.busy for row in (*answer.rows, *answer.sampled)} == {row.busy}


def test_a_sample_of_fewer_requests_than_windows(loop: str, tmp_path: Path) -> None:
    short = tmp_path / "short.jsonl"
    with open(loop, encoding="utf-8") as lines:
        short.write_text("".join(itertools.islice(lines, 100)))
    source = TraceSource(str(short), None, False)
    answer = Plan(source, fleet(), Target(), PLAIN, work=Work(jobs=1), one_in=5).run()
    assert answer.sampled[0].purchase == NOTHING
    assert answer.chosen in answer.rows


def test_savings_of_a_sample_are_not_compared_with_windows_of_all_sessions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All sessions together have several times as many hits on the GPUs as the sample has with any RAM."""
    # Each of 40 conversations repeats a prompt of two blocks at once, and again after the others.
    prompts = [(number, 1000 + number) for number in range(40)]
    recording = written(tmp_path / "twice.jsonl", [prompt for prompt in prompts for _ in "ab"] * 3)
    guesses = list[Choice]()

    def noted(*arguments: Any) -> tuple[list[Measured], Choice]:
        *before, guess = arguments

        def chooses(rows: Sequence[Measured]) -> Choice:
            guesses.append(guess(rows))
            return guesses[-1]

        return confirm(*before, chooses)

    monkeypatch.setattr("kvoffload.plan.plan.confirm", noted)
    source, of = TraceSource(recording, None, False), fleet(kv_bytes=10 * MIB)
    answer = Plan(source, of, Target(), PLAIN, work=Work(jobs=1), one_in=5).run()
    assert answer.outcome == "BUY"
    assert [guess.outcome.name for guess in guesses] == ["BUY"]


def test_a_sample_without_a_whole_block_is_refused(tmp_path: Path) -> None:
    recording = tmp_path / "first.jsonl"
    recording.write_text(line(0, []) + line(1, [1]) + line(2, [1]))
    source = TraceSource(str(recording), None, False)
    with pytest.raises(ConfigError, match="sample: 2 is invalid; the sample has no whole block"):
        Plan(source, fleet(), Target(), PLAIN, work=Work(jobs=1), one_in=2).run()


def test_the_gpus_are_scaled_with_the_sample(loop: str) -> None:
    """Otherwise the GPUs serve too much of the sample, and no purchase seems useful."""
    source, of = TraceSource(loop, None, False), fleet(kv_bytes=50 * MIB)
    answer = Plan(source, of, Target(saved=0.4), PLAIN, work=Work(jobs=1), one_in=5).run()
    alone, few = answer.sampled[0], one_session_in(load_trace(loop), 5)
    assert alone.purchase == NOTHING
    assert 5 < alone.device_blocks < 20
    assert alone.saved == int(run_device(few, alone.device_blocks).served.sum()) / few.block_refs == 0
    assert int(run_device(few, 50).served.sum()) > 0.4 * few.block_refs, (
        "GPUs of the full size serve the sample"
    )
    assert (answer.outcome, answer.chosen) == ("BUY", planned(loop, of, saved=0.4).chosen)


def test_only_long_recordings_are_sampled(chat: str, monkeypatch: pytest.MonkeyPatch) -> None:
    source, of = TraceSource(chat, None, False), fleet(kv_bytes=1000 * MIB)
    evidence, num_sessions = gather(source, of), len(set(turns(load_trace(chat)).session_of.tolist()))
    assert sample.sessions_in(source, evidence, of) == 1
    monkeypatch.setattr(sample, "ENOUGH_REQUESTS", evidence.requests // 5)
    assert sample.sessions_in(source, evidence, of) == 1, "few sessions are not sampled"
    monkeypatch.setattr(sample, "ENOUGH_SESSIONS", num_sessions // 10)
    assert sample.sessions_in(source, evidence, of) == 5
    monkeypatch.setattr(sample, "ENOUGH_SESSIONS", num_sessions // 3)
    assert sample.sessions_in(source, evidence, of) == 3
    monkeypatch.setattr(sample, "LONG_SESSION", evidence.requests / num_sessions)
    monkeypatch.setattr(sample, "ENOUGH_LONG_SESSIONS", num_sessions // 4)
    assert sample.sessions_in(source, evidence, of) == 4, "fewer long sessions are enough"
    monkeypatch.setattr(sample, "LONG_SESSION", evidence.requests / num_sessions + 0.01)
    assert sample.sessions_in(source, evidence, of) == 3
    monkeypatch.setattr(sample, "ENOUGH_SESSIONS", num_sessions // 10)
    two_requests = round(2 * evidence.block_refs / evidence.requests) + 1
    small = fleet(kv_bytes=2 * two_requests * MIB)
    assert sample.sessions_in(source, evidence, small) == 2, "the scaled GPUs must hold two requests"
    few = gather(source, of, one_in=3)
    assert sample.scaled(of, evidence, few).scale == evidence.block_refs / few.block_refs
    with pytest.raises(ConfigError, match="sample: 0 is invalid; allowed: 1 to"):
        Plan(source, of, Target(), one_in=0)


# ---- odd traces


ODD: dict[str, tuple[list[str], str]] = {
    "no reuse": (
        [line(10_000 * n, [2 * n, 2 * n + 1]) for n in range(40)],
        "No request begins with blocks of an earlier request: nothing can be saved.",
    ),
    "one request": ([line(0, [1, 2, 3])], "It has 1 requests: too few for any interval."),
    "equal timestamps": (
        [line(5, [n % 20, 100 + n % 20]) for n in range(60)], "All requests arrive at one time"),
    "unsorted": ([line(10_000 * (n * 7 % 60), [n % 20, 100 + n % 20]) for n in range(60)], "0.2 hours"),
    "ids of 128 bits": (
        [line(10_000 * n, [2**127 + n % 20, f"{2**100 + n % 20:x}"]) for n in range(60)], "0.2 hours"),
    "gaps of a week": (
        [line(10_000 * n + n // 20 * 604_800_000, [n % 20, 100 + n % 20]) for n in range(60)],
        "It has long gaps",
    ),
    "shorter than a block": (
        [line(0, [1]), '{"timestamp":1,"input_length":3,"output_length":1,"hash_ids":[]}\n'],
        "It has 2 requests",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ODD)
def test_odd_traces_have_sensible_answers(name: str, tmp_path: Path) -> None:
    lines, expected = ODD[name]
    (tmp_path / "odd.jsonl").write_text("".join(lines))
    answer = planned(str(tmp_path / "odd.jsonl"), fleet(prices(ssd=drives()), prefill_tokens_per_s=1000.0))
    assert expected in " ".join(answer.cannot_tell)
    assert 0 <= answer.chosen.saved <= answer.ceiling <= 1
    json.loads(answer.to_json())
    reused = name not in ("no reuse", "one request", "shorter than a block")
    assert answer.outcome == ("BUY" if reused else "BUY_NOTHING")
    if name == "equal timestamps":
        assert not answer.chosen.ssd_drives
        assert all("has no times" in row.why_not for row in answer.rows if row.ssd_drives)
        assert answer.chosen.gpus_worth is None


def test_a_trace_without_a_block_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text(
        '{"timestamp":1,"input_length":3,"output_length":1,"hash_ids":[]}\n'
    )
    with pytest.raises(ConfigError, match="it must have a request of at least one block"):
        planned(str(tmp_path / "empty.jsonl"), fleet(gpus=2, replicas=2))


def test_idle_replicas_are_reported(tmp_path: Path) -> None:
    path = written(tmp_path / "few.jsonl", [[1, 2], [1, 2, 3]])
    answer = planned(path, fleet(gpus=4, replicas=4))
    assert "3 of 4 replicas get no request." in answer.cannot_tell


def test_a_purchase_that_is_never_full_is_reported(loop: str) -> None:
    full = "The purchase holds all blocks of the recording"
    assert full not in " ".join(planned(loop, saved=0.4).cannot_tell)
    large = prices(Ram(module="2GiB", price=1, slots=1))
    assert full in " ".join(planned(loop, fleet(large), saved=0.4).cannot_tell)


def test_a_limit_by_slots_is_reported(loop: str) -> None:
    expected = "A host takes 4 modules of RAM: savings of more modules were not measured."
    assert expected in planned(loop, fleet(prices(Ram(module="5MiB", price=100, slots=4)))).cannot_tell
    assert expected not in planned(loop, fleet(prices(Ram(module="200MiB", price=100, slots=4)))).cannot_tell


# ---- the journal


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Task]]:
    """Record the tasks of this process; the eighth task fails once."""
    done: list[Task] = []

    def counted(task: Task) -> Measurement | tasks.Failure:
        done.append(task)
        return tasks.Failure("pulled the plug") if len(done) == 8 else tasks.attempt(task)

    monkeypatch.setattr(workers, "attempt", counted)
    return done


def test_an_interrupted_search_continues(loop: str, tmp_path: Path, replays: list[Task]) -> None:
    output = tmp_path / "rows.csv"

    def run(**target: Any) -> PlanAnswer:
        source = TraceSource(loop, None, False)
        return Plan(source, fleet(), Target(**target), PLAIN, work=Work(jobs=1, output=output)).run()

    with pytest.raises(SweepError, match="pulled the plug"):
        run(saved=0.4)
    assert not output.exists()
    answer = run(saved=0.4)
    assert len(replays) == len(answer.rows), (
        "each task once, the failed task twice, the row without a purchase never"
    )
    assert len(output.read_text().splitlines()) == 1 + len(answer.rows)
    before = len(replays)
    assert run(saved=0.4) == answer
    assert run(budget=2000).chosen == answer.chosen
    assert len(replays) <= before + 3, "another target uses the kept rows"


@pytest.mark.slow
def test_a_cluster_finds_the_same_plan(loop: str, tmp_path: Path, scheduler: str) -> None:
    """Covers replicas, samples and SSDs. A search interrupted on the cluster continues in this process."""
    of = fleet(prices(ssd=drives()), gpus=2, replicas=2, kv_bytes=6 * MIB)

    def run(output: str, **where: Any) -> PlanAnswer:
        source, target = TraceSource(loop, None, False), Target(saved=0.4)
        return Plan(source, of, target, PLAIN, one_in=2, work=Work(tmp_path / output, **where)).run()

    there, here = run("there.csv", scheduler=scheduler), run("here.csv", jobs=1)
    assert there == here
    assert (tmp_path / "there.csv").read_bytes() == (tmp_path / "here.csv").read_bytes()
    journal = tmp_path / "there.csv.journal"
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join(lines[: len(lines) // 2]))
    (tmp_path / "there.csv").unlink()
    assert run("there.csv", jobs=1) == here


@pytest.mark.parametrize("one_in", [1, 2])
def test_progress_never_goes_back(loop: str, one_in: int) -> None:
    updates: list[tuple[int, int, int, int]] = []
    source = TraceSource(loop, None, False)
    answer = Plan(
        source, fleet(kv_bytes=6 * MIB), Target(saved=0.4), PLAIN, work=Work(jobs=1), one_in=one_in
    ).run(lambda now: updates.append((now.rows_done, now.rows, now.refs_done, now.refs)))
    for before, after in itertools.pairwise(updates):
        assert before[0] <= after[0]
        assert before[2] <= after[2]
    assert all(done <= rows and refs_done <= refs for done, rows, refs_done, refs in updates)
    replayed = len(answer.rows) - 1 + max(0, len(answer.sampled) - 1)
    assert updates[-1][0] == replayed, "the row without a purchase is no replay"


def test_a_foreign_output_file_is_not_replaced(loop: str, tmp_path: Path) -> None:
    output = tmp_path / "rows.csv"
    output.write_text("precious")
    with pytest.raises(ConfigError, match="--force replaces it"):
        Plan(TraceSource(loop, None, False), fleet(), Target(), work=Work(output=output))


# ---- prices


def test_printed_prices_can_be_read(tmp_path: Path) -> None:
    done = kvoffload("plan", "--show-prices")
    assert done.returncode == 0
    (tmp_path / "prices.toml").write_text(done.stdout)
    assert read_prices(tmp_path / "prices.toml") == Prices() == read_prices(None)
    (tmp_path / "prices.json").write_bytes(msgspec.json.encode(Prices()))
    assert read_prices(tmp_path / "prices.json") == Prices()
    assert set(flattened(Prices())) == set(MEANING)
    changed = Prices(currency="EUR", ram=Ram(price=1.5))
    (tmp_path / "prices.toml").write_text(as_toml(changed))
    assert read_prices(tmp_path / "prices.toml") == changed


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[ram]\nprize = 3\n", "unknown field `prize`.*--show-prices"),
        ("[ram]\nprice = -3\n", r"\$\.ram\.price"),
        ("[ram]\nprice = inf\n", r"\$\.ram\.price"),
        ("gpu_hour = inf\n", r"\$\.gpu_hour"),
        ("[ssd]\nwrites_per_day = inf\n", r"\$\.ssd\.writes_per_day"),
        ("[ssd]\nlife_years = nan\n", r"\$\.ssd\.life_years"),
        ('[ssd]\ndrive = "4 parsecs"\n', "drive: '4 parsecs'"),
        ('[ram]\nmodule = "0GiB"\n', "ram.module: '0GiB' is invalid; allowed: at least one byte"),
        ('[server]\nmemory = "0GiB"\n', "server.memory: '0GiB' is invalid; allowed: at least one byte"),
        ('[server]\nmemory = "much"\n', "memory: 'much'"),
        ("[server]\nslots = -1\n", r"\$\.server\.slots"),
        ("[server]\nprice = -1\n", r"\$\.server\.price"),
        ('[server]\nlink_per_s = "0B"\n', "server.link_per_s: '0B' is invalid; allowed: at least one byte"),
        (
            '[server]\nhost_link_per_s = "0B"\n',
            "host_link_per_s: '0B' is invalid; allowed: at least one",
        ),
        ("[server]\ndrives = 1\n", "unknown field `drives`.*--show-prices"),
        ("ram", "prices"),
    ],
)
def test_wrong_prices_are_one_clear_error(text: str, why: str, tmp_path: Path) -> None:
    (tmp_path / "prices.toml").write_text(text)
    with pytest.raises(ConfigError, match=why):
        read_prices(tmp_path / "prices.toml")
    with pytest.raises(ConfigError, match="it cannot be read"):
        read_prices(tmp_path / "nothing.toml")


# ---- the command


def command(trace: str, tmp_path: Path, *extra: str) -> tuple[str, ...]:
    path = tmp_path / "prices.toml"
    path.write_text(as_toml(prices()))
    if "--output" not in extra:
        extra = (*extra, "--output", str(kept(trace)), "--force")
    return ("plan", trace, "--bytes-per-token", "2KiB", "--gpus", "1", "--kv-per-gpu", "5MiB",
            "--prices", str(path), "--policies", "lru", "--admissions", "all", "--jobs", "1", "--quiet",
            *extra)  # fmt: skip


def test_text_and_json_of_the_command_agree(loop: str, tmp_path: Path) -> None:
    output = str(tmp_path / "rows.csv")
    arguments = command(loop, tmp_path, "--target-saved", "0.4", "--output", output)
    done = kvoffload(*arguments, "--format", "json")
    assert (done.returncode, done.stderr) == (0, "")
    answer = msgspec.json.decode(done.stdout, type=PlanAnswer)
    assert answer.chosen.ram_modules == 19
    shown = kvoffload(*arguments)
    assert shown.returncode == 0
    text = " ".join(shown.stdout.split())
    for sentence in (*answer.words, *answer.cannot_tell, answer.vllm):
        assert " ".join(sentence.split()) in text
    for row in answer.frontier:
        assert f"{100 * row.saved:.1f}%" in text
    flag, value = shlex.split(answer.vllm)
    assert flag == "--kv-transfer-config"
    options = parse_options(json.loads(value)["kv_connector_extra_config"])
    assert (options.ram_bytes, options.policy, options.store) == (95 * MIB, "lru", "on-device-eviction")


def test_the_vllm_option_contains_the_disk(loop: str, tmp_path: Path) -> None:
    arguments = command(loop, tmp_path, "--target-saved", "0.4", "--format", "json", "--stores", "on-compute")
    (tmp_path / "prices.toml").write_text(as_toml(prices(ssd=drives())))
    answer = json.loads(kvoffload(*arguments).stdout)
    assert answer["chosen"]["ssd_drives"] == 1
    extra = json.loads(shlex.split(answer["vllm"])[1])["kv_connector_extra_config"]
    (tier,) = parse_options(extra).tiers
    assert str(tier).startswith(f"disk:/data/kv:{400 * MIB}")


def test_an_unreached_target_exits_with_1(loop: str, tmp_path: Path) -> None:
    done = kvoffload(*command(loop, tmp_path, "--target-saved", "0.4", "--budget", "500"))
    assert done.returncode == 1
    assert "No feasible purchase for 500 USD saves 40.0%" in done.stdout


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (("--target-saved", "0.9"), "target-saved: 0.9 is invalid; the ceiling is 0.4500"),
        (("--load", "fast"), "load: 'fast' is invalid; allowed: a number more than 0"),
        (("--policies", "lru,best"), "best"),
        (("--jobs", "0"), "jobs"),
        (("--jobs", "1", "--scheduler", "tcp://127.0.0.1:1"), "the scheduler's cluster sets the number"),
        (("--model", "gpt-x"), "bytes-per-token"),
    ],
)
def test_invalid_options_are_a_one_line_error(
    loop: str, tmp_path: Path, options: tuple[str, ...], why: str
) -> None:
    done = kvoffload(*command(loop, tmp_path, *options))
    assert done.returncode == 2
    assert why in done.stderr
    assert done.stdout == ""


def test_sizes_need_the_bytes_of_a_token(loop: str) -> None:
    done = kvoffload("plan", loop, "--gpus", "1", "--kv-per-gpu", "64GB")
    assert done.returncode == 2
    assert "sizes need the bytes of a token: give --model" in done.stderr


def test_the_gpu_cache_in_tokens(loop: str, tmp_path: Path) -> None:
    """5 MiB at 2 KiB per token are 2,560 tokens."""
    in_bytes = command(loop, tmp_path, "--format", "json")
    at = in_bytes.index("--kv-per-gpu")
    in_tokens = (*in_bytes[:at], "--gpu-tokens", "2560", *in_bytes[at + 2 :])
    answers = [json.loads(kvoffload(*arguments).stdout) for arguments in (in_bytes, in_tokens)]
    assert answers[0]["rows"] == answers[1]["rows"]
    assert "1, 5 blocks in each engine" in str(answers[1]["assumptions"])
    both = kvoffload(*in_bytes, "--gpu-tokens", "2560")
    neither = kvoffload(*in_bytes[:at], *in_bytes[at + 2 :])
    for done in (both, neither):
        assert done.returncode == 2
        assert "give one of --kv-per-gpu 64GB and --gpu-tokens 1234567" in done.stderr
    few = kvoffload(*in_tokens[:at], "--gpu-tokens", "15", *in_tokens[at + 2 :])
    assert "gpu-tokens: 15 is invalid; it is less than a block of 512 tokens" in few.stderr


def test_sliding_windows_are_warned_of(loop: str, tmp_path: Path) -> None:
    config = {"num_hidden_layers": 4, "num_attention_heads": 2, "hidden_size": 256, "torch_dtype": "bfloat16",
              "layer_types": ["sliding_attention", "full_attention"] * 2}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    given = command(loop, tmp_path)
    at = given.index("--bytes-per-token")
    arguments = (*given[:at], "--model", str(tmp_path / "config.json"), *given[at + 2 :])
    done = kvoffload(*arguments)
    assert done.returncode == 0
    assert done.stderr.count("2 of 4 layers have a sliding window") == 1
    at = arguments.index("--kv-per-gpu")
    done = kvoffload(*arguments[:at], "--gpu-tokens", "2560", *arguments[at + 2 :])
    assert (done.returncode, done.stderr) == (0, "")


MLA = {"num_hidden_layers": 4, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "num_attention_heads": 16}
GQA = {"num_hidden_layers": 4, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 64}


@pytest.mark.parametrize(
    ("config", "gpus", "given", "warning"),
    [
        (MLA, 8, False, "all 8 GPUs of an engine store each block (MLA)"),
        (MLA, 8, True, ""),
        (MLA, 1, False, ""),
        (GQA, 8, True, "8 GPUs of an engine store 4 copies of each of the 2 KV heads"),
        (GQA, 2, False, ""),
        ({**GQA, "num_key_value_heads": None}, 16, False, ""),
    ],
)
def test_copies_of_tensor_parallelism_are_warned_of(
    tmp_path: Path, config: dict[str, object], gpus: int, given: bool, warning: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with click.Context(click.Command("plan")), contextlib.redirect_stderr(io.StringIO()) as stderr:
        for _ in range(2):
            warn_of_copies(str(tmp_path), gpus, has_gpu_tokens=given)
    assert (warning in stderr.getvalue(), stderr.getvalue().count("\n")) == (True, int(bool(warning)))
    assert kv_heads("meta-llama/Llama-3.1-8B-Instruct") == 8


def test_a_year_to_pay_back_has_twelve_months() -> None:
    days = {
        59.5: "60 days",
        60: "2 months",
        61: "3 months",
        365: "12 months",
        729: "24 months",
        730: "2.0 years",
    }
    assert {number: _days(number) for number in days} == days


def test_the_answer_has_every_column(loop: str) -> None:
    answer = planned(loop, budget=100)
    assert json.loads(answer.to_json())["rows"][0].keys() == set(PlanRow.__struct_fields__)


@pytest.mark.parametrize("columns", [40, 80, 97, 120])
def test_no_line_ends_between_a_number_and_its_unit(loop: str, tmp_path: Path, columns: int) -> None:
    done = kvoffload(*command(loop, tmp_path), columns=columns)
    answer = done.stdout.split("\n\n")[0].splitlines()
    assert all(len(line) <= columns for line in answer)
    assert not [
        line for line in answer if re.search(r"\d$", line) or re.match(r"(%|GiB|MiB|USD|points)", line)
    ]
    assert "\u00a0" not in done.stdout, "spaces can be searched and pasted"
    if columns < 110:
        # Regression: a table of three columns broke the sources within words.
        assumptions = done.stdout.split("\nAssumptions\n")[1].split("\nEach engine")[0]
        assert (
            " block: 2 MiB; bytes of a token" in assumptions
            or " block: 1 MiB; bytes of a token" in assumptions
        )
        assert all(len(assumption) <= columns for assumption in assumptions.splitlines())


def test_the_answer_explains_its_terms_once(chat: str, loop: str) -> None:
    answer = planned(loop, saved=0.4)
    (use,) = [sentence for sentence in answer.words if sentence.startswith("Use ")]
    meanings = {"on-compute": "RAM takes each block when it is computed",
                "on-device-eviction": "RAM takes the blocks that the GPUs drop"}  # fmt: skip
    assert f"{answer.chosen.store}: {meanings[answer.chosen.store]}. That is" in use
    text = " ".join(planned(chat).words)
    assert text.count("(the ceiling)") == 1
    for term in ("sure", "likely"):
        explained, mentioned = text.count(f"({term}: the 95% interval"), text.count(f"({term}")
        assert explained == (mentioned > 0)


def test_the_sections_of_an_answer_are_its_words(loop: str) -> None:
    answer = planned(loop, saved=0.4)
    assert [sentence for section in answer.sections for sentence in section.sentences] == answer.words
    assert [section.title for section in answer.sections] == ["", "Other purchases", "Limits"]


# ---- on a cluster


@pytest.mark.slow
def test_a_plan_on_dask_is_equal(chat: str, scheduler: str) -> None:
    of = fleet(prices(Ram(module="100MiB", price=100, slots=4), drives()), kv_bytes=100 * MIB)
    source, target = TraceSource(chat, None, False), Target(of_ceiling=0.8)
    here = Plan(source, of, target, work=Work(jobs=1)).run()
    assert here.chosen.ram_modules
    there = Plan(source, of, target, work=Work(scheduler=scheduler)).run()
    assert there == here
