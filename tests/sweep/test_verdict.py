"""What a sweep says in words: the best is the best, and no lead is claimed that may be chance."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvoffload.replay.report import ReplayReport, TierReport
from kvoffload.sweep.bootstrap import Resamples
from kvoffload.sweep.grid import Grid, Point
from kvoffload.sweep.table import Row, Runs, SweptTrace, rows_of
from kvoffload.sweep.task import Measurement, TraceSource
from kvoffload.sweep.verdict import Certainty, Verdict, verdicts_of

REFS = 1000
"""In each window."""
STEADY = [200] * 32
NOISE = [40, -40, -40, 40] * 8
"""What chance does to single windows and not to their sum, without neighbours that are alike."""


def plus(hits: list[int], more: int, noise: int = 0) -> list[int]:
    """`more` hits in each window, and `noise` times what chance does."""
    return [one + more + noise * chance for one, chance in zip(hits, NOISE, strict=False)]


def report(point: Point, hits: list[int], optimum: float, written: int) -> ReplayReport:
    refs = REFS * len(hits)
    ram = TierReport(name="ram", hit_blocks=sum(hits), blocks_written=written, blocks_evicted=0,
                     bytes_written=0, bytes_read=0, mismatches_caught=0)  # fmt: skip
    return ReplayReport(
        trace="planted", policy=str(point.config.policy), **point.config.columns(), requests=len(hits),
        block_refs=refs, unique_blocks=1000, skipped_lines=0, prefix_hit_blocks=sum(hits),
        prefix_hit_ratio=sum(hits) / refs, device_hit_blocks=0, offload_hit_blocks=sum(hits),
        block_hit_ratio=sum(hits) / refs, infinite_hit_ratio=1.0, optimum_hit_ratio=optimum, tokens=refs,
        tokens_saved=0, blocks_written=written, blocks_evicted=0, blocks_refused=0, blocks_dropped=0,
        writes_per_ref=written / refs, block_bytes=0, bytes_stored=0, bytes_loaded=0, blocks_verified=0,
        mismatches_caught=0, mismatches_served=0, damage_injected=0, control_plane_s=0.0, data_plane_s=0.0,
        decisions_sha256="", version="", policy_state={}, tiers=[ram],
    )  # fmt: skip


def planted(
    axes: Grid, *hits: list[int], optimum: float = 0.5, written: tuple[int, ...] = ()
) -> tuple[list[Point], list[Row], Runs]:
    """A sweep whose replays have found just these hits in their windows, in the order of its rows."""
    points, left_out = axes.points(0, 1000)
    assert len(points) == len(hits)
    assert not left_out
    written = written or (1000,) * len(points)
    found = [
        Measurement(report(point, one, optimum, blocks), one)
        for point, one, blocks in zip(points, hits, written, strict=True)
    ]
    windows = len(hits[0])
    trace = SweptTrace(
        TraceSource("planted", 512, False), "planted", windows, REFS * windows, 1000, np.full(windows, REFS)
    )
    runs = Runs([trace], points, found, seed=0, resamples=1000)
    return points, rows_of(runs), runs


def verdicts(
    axes: Grid, *hits: list[int], optimum: float = 0.5, written: tuple[int, ...] = ()
) -> list[Verdict]:
    points, rows, runs = planted(axes, *hits, optimum=optimum, written=written)
    return verdicts_of(points, rows, runs.difference)


def only(axes: Grid, *hits: list[int], optimum: float = 0.5, written: tuple[int, ...] = ()) -> Verdict:
    (found,) = verdicts(axes, *hits, optimum=optimum, written=written)
    return found


TWO, THREE = Grid(("lru", "hazard")), Grid(("lru", "hazard", "slru"))


# ---- the difference to LRU


def test_a_lead_beyond_chance_is_sure() -> None:
    found = only(TWO, STEADY, plus(STEADY, 43, 1), written=(1000, 437))
    # 0.043 of the 0.3 that the optimum is better.
    assert found.line == "at 5%: hazard, +4.3 points over lru (sure), 44% of its writes, 14% of the gap"
    assert found.certainty is Certainty.SURE


def test_a_lead_within_chance_is_not_sure_and_says_from_where_to_where() -> None:
    hits = plus(STEADY, 2, 1)
    found = only(TWO, STEADY, hits)
    draws = Resamples(np.full(32, REFS))
    interval = draws.difference(np.array(hits), np.array(STEADY))
    assert interval is not None
    assert interval.low < 0 < interval.high
    low, high = (f"{100 * bound:+.1f}" for bound in interval[:2])
    assert f"+0.2 points over lru (not sure: {low} to {high})" in found.words
    assert found.certainty is Certainty.NOT_SURE


def test_a_lead_of_slow_traffic_is_likely_at_most() -> None:
    # Better in one half of the trace alone: two independent stretches, whatever the 32 windows say.
    found = only(TWO, STEADY, plus(STEADY, 40)[:16] + STEADY[16:])
    assert found.certainty is Certainty.LIKELY
    assert "+2.0 points over lru (likely: the traffic changes slowly)" in found.words


@pytest.mark.parametrize(
    ("per_trace", "said"), [(32 * 10, "+1.0"), (32, "+0.1"), (16, "+0.05"), (2, "+0.006")]
)
def test_a_lead_is_never_rounded_to_nothing(per_trace: int, said: str) -> None:
    hits = [one + per_trace // 32 + (number < per_trace % 32) for number, one in enumerate(STEADY)]
    assert f"hazard, {said} points over lru" in only(TWO, STEADY, hits).words


def test_nothing_beats_lru() -> None:
    assert only(TWO, plus(STEADY, 30, 1), STEADY).line == "at 5%: lru; nothing beats it"


def test_a_winner_that_is_no_better_than_lru_is_none() -> None:
    for axes in (TWO, Grid(("hazard", "lru"))):
        found = only(axes, STEADY, STEADY)
        assert found.words == "lru; nothing beats it; hazard cannot be told apart from it"


def test_without_an_optimum_worth_a_name_there_is_no_share_of_the_gap() -> None:
    found = only(TWO, STEADY, plus(STEADY, 10), optimum=0.2005)
    assert found.best.gap_closed is None
    assert found.words == "hazard, +1.0 points over lru (sure), 100% of its writes"


def test_writes_that_are_hardly_any_are_not_none() -> None:
    assert "less than 1% of its writes" in only(TWO, STEADY, plus(STEADY, 9), written=(1000, 4)).words
    assert ", 0% of its writes" in only(TWO, STEADY, plus(STEADY, 9), written=(1000, 0)).words
    assert "its writes" not in only(TWO, STEADY, plus(STEADY, 9), written=(0, 4)).words


def test_without_lru_there_is_nothing_to_be_better_than() -> None:
    found = only(Grid(("arc", "hazard")), STEADY, plus(STEADY, 30))
    assert found.words == "hazard, prefix-hit ratio 0.2300; no lru to compare with"
    assert found.certainty is Certainty.UNKNOWN


@pytest.mark.parametrize("policy", ["lru", "hazard"])
def test_alone_it_is_not_called_the_best(policy: str) -> None:
    assert only(Grid((policy,)), STEADY).words == f"{policy}; nothing else was measured"


def test_a_gate_before_the_yardstick_is_named() -> None:
    found = only(Grid(("lru",), ("reuse:3", "reuse:2")), STEADY, plus(STEADY, 30))
    assert found.words.startswith("lru with reuse:2, +3.0 points over lru with reuse:3 (sure)")


# ---- the runner-up


def test_a_runner_up_within_chance_is_named() -> None:
    found = only(THREE, STEADY, plus(STEADY, 43), plus(STEADY, 42, 1))
    assert found.certainty is Certainty.SURE
    assert found.words.endswith("; slru cannot be told apart from it")


def test_a_runner_up_that_is_surely_behind_is_not() -> None:
    found = only(THREE, STEADY, plus(STEADY, 43), plus(STEADY, 38))
    assert found.alike == ()
    assert "told apart" not in found.words


def test_what_chance_pairs_is_paired() -> None:
    """Both swing far and together: apart by 1 in every window, and so told apart."""
    wild = plus(STEADY, 50, 3)
    assert only(THREE, STEADY, plus(wild, -1), wild).alike == ()


def test_lru_is_no_runner_up_beside_its_own_interval() -> None:
    found = only(THREE, STEADY, plus(STEADY, 2, 1), plus(STEADY, -80))
    assert found.certainty is Certainty.NOT_SURE
    assert "told apart" not in found.words, "(not sure: ...) has said it"


def test_runners_up_stand_by_their_hits_and_a_crowd_is_counted() -> None:
    policies = ("lru", "arc", "hazard", "slru", "sieve", "lirs", "fifo")
    leads = (0, 50, 55, 53, 54, 51, 52)
    hits = [plus(STEADY, lead, 2 * (lead % 2)) for lead in leads]
    hits[2] = plus(STEADY, 55, 4)
    found = only(Grid(policies), *hits)
    assert [row.policy for row in found.alike] == ["sieve", "slru", "fifo", "lirs", "arc"]
    assert found.words.endswith("; sieve, slru, fifo and 2 others cannot be told apart from it")
    four = only(Grid(policies[:6]), *hits[:6])
    assert four.words.endswith("; sieve, slru, lirs and arc cannot be told apart from it")


def test_too_few_requests_for_any_certainty() -> None:
    found = only(THREE, [100] * 9, [150] * 9, [150] * 9)
    assert found.certainty is Certainty.UNKNOWN
    assert found.words == (
        "hazard, +5.0 points over lru, 100% of its writes, 12% of the gap; "
        "slru cannot be told apart from it; too few requests to be sure"
    )
    assert only(TWO, [150] * 9, [100] * 9).words == "lru; nothing beats it; too few requests to be sure"


Hits = st.lists(st.integers(0, 60), min_size=32, max_size=32)


@given(st.lists(Hits, min_size=1, max_size=4), st.booleans())
def test_every_row_is_behind_beyond_chance_or_named(hits: list[list[int]], with_lru: bool) -> None:
    policies = ("lru" if with_lru else "fifo", "hazard", "slru", "arc")[: len(hits)]
    points, rows, runs = planted(Grid(policies), *hits)
    (found,) = verdicts_of(points, rows, runs.difference)
    assert found.best.prefix_hit_ratio == max(row.prefix_hit_ratio for row in rows)
    assert found.best is rows[found.number]
    draws = Resamples(np.full(32, REFS))
    for row, its_hits in zip(rows, hits, strict=True):
        if row is found.best:
            continue
        lead = draws.difference(np.array(hits[found.number]), np.array(its_hits))
        assert lead is not None
        is_open = lead.low <= 0
        if row is found.baseline:
            assert (found.certainty is Certainty.NOT_SURE) == is_open == ("(not sure: " in found.words)
        else:
            assert (row in found.alike) == is_open
            assert (row.policy in found.words.partition(";")[2]) == is_open


# ---- the place


def test_each_place_has_a_verdict_of_its_own() -> None:
    axes = Grid(("lru", "hazard"), capacities=("5%", "700"), devices=("0", "9"))
    ahead = plus(STEADY, 30)
    found = verdicts(axes, STEADY, ahead, ahead, STEADY, ahead, STEADY, STEADY, ahead)
    assert [(one.best.device, one.where, one.best.policy, one.number) for one in found] == [
        ("0", "at 5%", "hazard", 1),
        ("0", "at 700 blocks", "lru", 2),
        ("9", "at 5%", "lru", 4),
        ("9", "at 700 blocks", "hazard", 7),
    ]


def test_a_store_mode_and_tiers_are_compared_with_their_own_lru() -> None:
    axes = Grid(
        ("lru", "hazard"), devices=("9",), stores=("on-compute", "on-device-eviction"), tiers=("none", "10%")
    )
    ahead, far_ahead = plus(STEADY, 30), plus(STEADY, 99)
    found = verdicts(axes, STEADY, ahead, far_ahead, ahead, STEADY, STEADY, ahead, far_ahead)
    assert [one.line.partition(" (")[0] for one in found] == [
        "at 5%, none behind, on-compute: hazard, +3.0 points over lru",
        "at 5%, none behind, on-device-eviction: lru; nothing beats it",
        "at 5%, 10% behind, on-compute: lru; nothing beats it; hazard cannot be told apart from it",
        "at 5%, 10% behind, on-device-eviction: hazard, +6.9 points over lru",
    ]
