"""Plans with SSDs that would wear out: the write budget at their rating, its cost, and the vLLM option."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from kvoffload.integrations.vllm.shared.options import parse_options
from kvoffload.plan.fleet import Fleet, Purchase
from kvoffload.plan.plan import PlanAnswer
from kvoffload.plan.prices import Ram, Ssd
from kvoffload.plan.setups import Setups
from kvoffload.replay.config import ReplayConfig
from kvoffload.replay.replay import Replay
from kvoffload.settings.read import parse_size
from kvoffload.tiers.kinds.disk import DiskOptions
from kvoffload.tiers.kinds.simulated import SimulatedOptions
from kvoffload.traces.sources import load_trace
from support.plan_rows import MIB, drives, fleet, planned, prices, words, written
from support.run_cli import kvoffload

DURATION_S = 4990
RATED = 5.0
"""Drive writes per day: with a drive of 400 blocks, 115 of the 550 block writes of the recording."""


@pytest.fixture(scope="module")
def loop(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Write a recording: 25 conversations of two blocks in turns; after each use, two blocks used once."""
    hot = [(number, 1000 + number) for number in range(25)]
    cold = [(10_000 + number, 50_000 + number) for number in range(250)]
    pairs = [(hot[number % 25], cold[number]) for number in range(250)]
    chains = [chain for pair in pairs for chain in pair]
    return written(tmp_path_factory.mktemp("endurance") / "loop.jsonl", chains)


def worn(rated: float = RATED, **others: Any) -> Fleet:
    ssd = Ssd(drive="400MiB", price=10, slots=1, writes_per_day=rated)
    return fleet(prices(Ram(module="5MiB", price=100, slots=4), ssd), **others)


@pytest.fixture(scope="module")
def answer(loop: str) -> PlanAnswer:
    return planned(loop, worn())


def test_a_write_budget_makes_the_purchase_feasible(answer: PlanAnswer) -> None:
    row = answer.chosen
    assert row.purchase == Purchase(1, 1)
    assert (row.ssd_write_budget, row.feasible) == (RATED, True)
    assert row.drive_writes_a_day is not None
    assert row.drive_writes_a_day <= RATED
    assert row.ssd_life_years is not None
    assert row.ssd_life_years >= 5
    # reuse:2 writes the 50 blocks of the conversations within the budget: 0.0231 blocks a second.
    assert 0.2 < row.saved < 0.40


def test_the_row_is_a_replay_with_the_budget(answer: PlanAnswer, loop: str) -> None:
    blocks_a_day, saved = RATED * 400, 0.0
    for row in answer.rows:
        if row.ssd_write_budget:
            tier = SimulatedOptions(
                capacity="400",
                policy=row.ssd_policy,
                admission=row.ssd_admission,
                max_write_blocks_per_day=blocks_a_day,
            )
            config = ReplayConfig(row.ram_blocks, row.policy, device_blocks=5, store=row.store, tiers=(tier,))
            report = Replay(load_trace(loop), config).run()
            assert row.saved == report.prefix_hit_ratio
            saved = max(saved, row.saved)
            assert report.tiers[1].blocks_written <= blocks_a_day * DURATION_S / 86_400
    assert saved == answer.chosen.saved


def test_the_cost_of_endurance_is_the_loss_against_an_unlimited_drive(answer: PlanAnswer, loop: str) -> None:
    endurance = answer.endurance
    assert endurance is not None
    assert endurance.row == answer.chosen
    config = ReplayConfig(5, device_blocks=5, tiers=(SimulatedOptions(capacity="400"),))
    unlimited = Replay(load_trace(loop), config).run()
    assert endurance.unlimited == unlimited.prefix_hit_ratio == pytest.approx(0.45)
    assert endurance.cost == pytest.approx(0.45 - answer.chosen.saved)
    assert endurance.unlimited_writes_a_day == pytest.approx(550 / DURATION_S * 86_400 / 400)
    assert endurance.bound == pytest.approx(0.45), "115 writes are enough for the 50 blocks"
    assert endurance.of_bound == pytest.approx(answer.chosen.saved / 0.45)
    assert endurance.budget_bytes_a_day == RATED * 400 * MIB
    text = words(answer)
    assert "only with max_write_bytes_per_day, 2.097 GB on each engine" in text
    points = 100 * endurance.cost
    assert f"costs {points:.1f} points: without the limit the purchase would save 45.0%, with 23.8" in text
    assert endurance.ram_alone == 0.0
    assert endurance.oracle == pytest.approx(0.45)
    share = 100 * endurance.of_oracle
    assert f"choice of blocks would save 45.0%; {share:.0f}% of its gain over the same RAM" in text


def test_a_better_purchase_with_a_budget_is_named(loop: str) -> None:
    """RAM with LIRS reaches the target; an SSD saves more for more money."""
    ssd = Ssd(drive="400MiB", price=1000, slots=1, writes_per_day=RATED)
    of = fleet(prices(Ram(module="5MiB", price=100, slots=4), ssd))
    answer = planned(loop, of, Setups(("on-compute",), ("lirs",), ("all",)), saved=0.05)
    assert answer.chosen.ssd_drives == 0
    assert answer.endurance is not None
    assert answer.endurance.row.saved > answer.chosen.saved
    assert "within 5 drive writes a day: a write budget of 2.097 GB a day. Endurance costs" in words(answer)


def test_a_budget_that_saves_less_than_the_choice_is_not_named(loop: str) -> None:
    ssd = Ssd(drive="400MiB", price=1000, slots=1, writes_per_day=0.05)
    answer = planned(loop, fleet(prices(Ram(module="100MiB", price=10, slots=4), ssd)))
    assert answer.chosen.purchase == Purchase(1, 0)
    assert answer.endurance is not None
    assert "Endurance" not in words(answer)


def test_without_wear_no_budget_is_tried(loop: str) -> None:
    answer = planned(loop, fleet(prices(ssd=drives())), saved=0.4)
    assert answer.endurance is None
    assert not any(row.ssd_write_budget for row in answer.rows)


def test_replicas_and_scale_divide_the_budget(loop: str) -> None:
    answer = planned(loop, worn(RATED / 2, gpus=2, replicas=2, scale=2.0))
    budgeted = [row for row in answer.rows if row.ssd_write_budget]
    assert budgeted
    for row in budgeted:
        assert row.drive_writes_a_day is not None
        assert row.drive_writes_a_day <= RATED / 2
        assert row.feasible


def test_a_replica_with_a_single_request_has_no_budget_to_spend(tmp_path: Path) -> None:
    # Replica 0 gets a conversation of 40 turns, replica 1 a single prompt.
    turns = [tuple(range(length)) for length in range(1, 41)]
    recording = written(tmp_path / "turns.jsonl", [turns[0], (100, 101), *turns[1:]])
    answer = planned(recording, worn(1.0, gpus=2, replicas=2), saved=0.5)
    limited = [row for row in answer.rows if row.ssd_write_budget]
    assert limited, "without a limit, the drive would wear out"
    assert max(row.drive_writes_a_day or 0 for row in limited) <= 1


def test_the_flag_sets_the_budget_of_an_engine(loop: str, tmp_path: Path) -> None:
    (tmp_path / "prices.toml").write_text(
        "[ram]\nmodule = '10MiB'\nprice = 100\nslots = 4\n"
        f"[ssd]\ndrive = '400MiB'\nprice = 10\nslots = 2\nwrites_per_day = {RATED}\n[server]\nslots = 0\n"
    )
    done = kvoffload(
        "plan", loop, "--bytes-per-token=2KiB", "--gpus=2", "--kv-per-gpu=5MiB", "--replicas=2", "--quiet",
        f"--prices={tmp_path}/prices.toml", "--stores=on-compute", "--policies=lru", "--jobs=1",
        "--ssd-admissions=all", "--admissions=all",
    )  # fmt: skip
    assert done.returncode == 0
    flag = done.stdout[done.stdout.index("--kv-transfer-config") :]
    options = parse_options(json.loads(shlex.split(flag)[1])["kv_connector_extra_config"])
    (tier,) = options.tiers
    assert isinstance(tier, DiskOptions)
    assert tier.max_write_bytes_per_day == RATED * parse_size("capacity", tier.capacity)
