"""Verdicts of a sweep: the best policy is named, and no lead within chance is claimed."""

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
"""Block references per window."""
STEADY = [200] * 32
NOISE = [40, -40, -40, 40] * 8
"""Noise of single windows; its sum is 0, and neighbours are not correlated."""


def plus(hits: list[int], gain: int, noise: int = 0) -> list[int]:
    """Add `gain` hits to each window, and `noise` times the noise."""
    return [num_hits + gain + noise * chance for num_hits, chance in zip(hits, NOISE, strict=False)]


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
    """Make a sweep with given hits by window, in the order of its rows."""
    points, left_out = axes.points(0, 1000)
    assert len(points) == len(hits)
    assert not left_out
    written = written or (1000,) * len(points)
    measurements = [
        Measurement(report(point, window_hits, optimum, blocks), window_hits)
        for point, window_hits, blocks in zip(points, hits, written, strict=True)
    ]
    windows = len(hits[0])
    trace = SweptTrace(
        TraceSource("planted", 512, False), "planted", windows, REFS * windows, 1000, np.full(windows, REFS)
    )
    runs = Runs([trace], points, measurements, seed=0, resamples=1000)
    return points, rows_of(runs), runs


def verdicts(
    axes: Grid, *hits: list[int], optimum: float = 0.5, written: tuple[int, ...] = ()
) -> list[Verdict]:
    points, rows, runs = planted(axes, *hits, optimum=optimum, written=written)
    return verdicts_of(points, rows, runs.difference)


def only(axes: Grid, *hits: list[int], optimum: float = 0.5, written: tuple[int, ...] = ()) -> Verdict:
    (verdict,) = verdicts(axes, *hits, optimum=optimum, written=written)
    return verdict


TWO, THREE = Grid(("lru", "hazard")), Grid(("lru", "hazard", "slru"))


# ---- the difference to LRU


def test_a_lead_beyond_chance_is_sure() -> None:
    verdict = only(TWO, STEADY, plus(STEADY, 43, 1), written=(1000, 437))
    # 0.043 of the gap of 0.3 to the optimum.
    assert verdict.line == "at 5%: hazard, +4.3 points over lru (sure), 44% of its writes, 14% of the gap"
    assert verdict.certainty is Certainty.SURE


def test_a_lead_within_chance_is_not_sure_and_has_an_interval() -> None:
    hits = plus(STEADY, 2, 1)
    verdict = only(TWO, STEADY, hits)
    draws = Resamples(np.full(32, REFS))
    interval = draws.difference(np.array(hits), np.array(STEADY))
    assert interval is not None
    assert interval.low < 0 < interval.high
    low, high = (f"{100 * bound:+.1f}" for bound in interval[:2])
    assert f"+0.2 points over lru (not sure: {low} to {high})" in verdict.words
    assert verdict.certainty is Certainty.NOT_SURE


def test_a_lead_of_slow_traffic_is_likely_at_most() -> None:
    # Better in only one half of the trace: two independent stretches, despite 32 windows.
    verdict = only(TWO, STEADY, plus(STEADY, 40)[:16] + STEADY[16:])
    assert verdict.certainty is Certainty.LIKELY
    assert "+2.0 points over lru (likely: the traffic changes slowly)" in verdict.words


@pytest.mark.parametrize(
    ("per_trace", "expected"), [(32 * 10, "+1.0"), (32, "+0.1"), (16, "+0.05"), (2, "+0.006")]
)
def test_a_lead_is_never_rounded_to_zero(per_trace: int, expected: str) -> None:
    hits = [num_hits + per_trace // 32 + (number < per_trace % 32) for number, num_hits in enumerate(STEADY)]
    assert f"hazard, {expected} points over lru" in only(TWO, STEADY, hits).words


def test_nothing_beats_lru() -> None:
    assert only(TWO, plus(STEADY, 30, 1), STEADY).line == "at 5%: lru; nothing beats it"


def test_a_winner_equal_to_lru_is_not_named() -> None:
    for axes in (TWO, Grid(("hazard", "lru"))):
        verdict = only(axes, STEADY, STEADY)
        assert verdict.words == "lru; nothing beats it; hazard cannot be told apart from it"


def test_without_a_gap_to_the_optimum_no_share_is_printed() -> None:
    verdict = only(TWO, STEADY, plus(STEADY, 10), optimum=0.2005)
    assert verdict.best.gap_closed is None
    assert verdict.words == "hazard, +1.0 points over lru (sure), 100% of its writes"


def test_few_writes_are_not_rounded_to_zero() -> None:
    assert "less than 1% of its writes" in only(TWO, STEADY, plus(STEADY, 9), written=(1000, 4)).words
    assert ", 0% of its writes" in only(TWO, STEADY, plus(STEADY, 9), written=(1000, 0)).words
    assert "its writes" not in only(TWO, STEADY, plus(STEADY, 9), written=(0, 4)).words


def test_without_lru_no_lead_is_claimed() -> None:
    verdict = only(Grid(("arc", "hazard")), STEADY, plus(STEADY, 30))
    assert verdict.words == "hazard, prefix-hit ratio 0.2300; no lru to compare with"
    assert verdict.certainty is Certainty.UNKNOWN


@pytest.mark.parametrize("policy", ["lru", "hazard"])
def test_a_single_policy_is_not_called_the_best(policy: str) -> None:
    assert only(Grid((policy,)), STEADY).words == f"{policy}; nothing else was measured"


def test_the_admission_rule_of_the_baseline_is_named() -> None:
    verdict = only(Grid(("lru",), ("reuse:3", "reuse:2")), STEADY, plus(STEADY, 30))
    assert verdict.words.startswith("lru with reuse:2, +3.0 points over lru with reuse:3 (sure)")


# ---- the runner-up


def test_a_runner_up_within_chance_is_named() -> None:
    verdict = only(THREE, STEADY, plus(STEADY, 43), plus(STEADY, 42, 1))
    assert verdict.certainty is Certainty.SURE
    assert verdict.words.endswith("; slru cannot be told apart from it")


def test_a_runner_up_surely_behind_is_not_named() -> None:
    verdict = only(THREE, STEADY, plus(STEADY, 43), plus(STEADY, 38))
    assert verdict.alike == ()
    assert "told apart" not in verdict.words


def test_leads_are_compared_pairwise() -> None:
    """Both vary widely but together, with a difference of 1 in every window."""
    wild = plus(STEADY, 50, 3)
    assert only(THREE, STEADY, plus(wild, -1), wild).alike == ()


def test_lru_is_not_named_as_runner_up() -> None:
    verdict = only(THREE, STEADY, plus(STEADY, 2, 1), plus(STEADY, -80))
    assert verdict.certainty is Certainty.NOT_SURE
    assert "told apart" not in verdict.words, "implied by (not sure: ...)"


def test_runners_up_are_sorted_by_hits_and_many_are_counted() -> None:
    policies = ("lru", "arc", "hazard", "slru", "sieve", "lirs", "fifo")
    leads = (0, 50, 55, 53, 54, 51, 52)
    hits = [plus(STEADY, lead, 2 * (lead % 2)) for lead in leads]
    hits[2] = plus(STEADY, 55, 4)
    verdict = only(Grid(policies), *hits)
    assert [row.policy for row in verdict.alike] == ["sieve", "slru", "fifo", "lirs", "arc"]
    assert verdict.words.endswith("; sieve, slru, fifo and 2 others cannot be told apart from it")
    four = only(Grid(policies[:6]), *hits[:6])
    assert four.words.endswith("; sieve, slru, lirs and arc cannot be told apart from it")


def test_too_few_requests_for_any_certainty() -> None:
    verdict = only(THREE, [100] * 9, [150] * 9, [150] * 9)
    assert verdict.certainty is Certainty.UNKNOWN
    assert verdict.words == (
        "hazard, +5.0 points over lru, 100% of its writes, 12% of the gap; "
        "slru cannot be told apart from it; too few requests to be sure"
    )
    assert only(TWO, [150] * 9, [100] * 9).words == "lru; nothing beats it; too few requests to be sure"


Hits = st.lists(st.integers(0, 60), min_size=32, max_size=32)


@given(st.lists(Hits, min_size=1, max_size=4), st.booleans())
def test_every_row_is_surely_behind_or_named(hits: list[list[int]], with_lru: bool) -> None:
    policies = ("lru" if with_lru else "fifo", "hazard", "slru", "arc")[: len(hits)]
    points, rows, runs = planted(Grid(policies), *hits)
    (verdict,) = verdicts_of(points, rows, runs.difference)
    assert verdict.best.prefix_hit_ratio == max(row.prefix_hit_ratio for row in rows)
    assert verdict.best is rows[verdict.number]
    draws = Resamples(np.full(32, REFS))
    for row, its_hits in zip(rows, hits, strict=True):
        if row is verdict.best:
            continue
        lead = draws.difference(np.array(hits[verdict.number]), np.array(its_hits))
        assert lead is not None
        is_open = lead.low <= 0
        if row is verdict.baseline:
            assert (verdict.certainty is Certainty.NOT_SURE) == is_open == ("(not sure: " in verdict.words)
        else:
            assert (row in verdict.alike) == is_open
            assert (row.policy in verdict.words.partition(";")[2]) == is_open


# ---- the place


def test_each_place_has_its_own_verdict() -> None:
    axes = Grid(("lru", "hazard"), capacities=("5%", "700"), devices=("0", "9"))
    ahead = plus(STEADY, 30)
    all_verdicts = verdicts(axes, STEADY, ahead, ahead, STEADY, ahead, STEADY, STEADY, ahead)
    assert [
        (verdict.best.device, verdict.where, verdict.best.policy, verdict.number) for verdict in all_verdicts
    ] == [
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
    all_verdicts = verdicts(axes, STEADY, ahead, far_ahead, ahead, STEADY, STEADY, ahead, far_ahead)
    assert [verdict.line.partition(" (")[0] for verdict in all_verdicts] == [
        "at 5%, none behind, on-compute: hazard, +3.0 points over lru",
        "at 5%, none behind, on-device-eviction: lru; nothing beats it",
        "at 5%, 10% behind, on-compute: lru; nothing beats it; hazard cannot be told apart from it",
        "at 5%, 10% behind, on-device-eviction: hazard, +6.9 points over lru",
    ]
