"""Reports of sizes at which a configuration has fewer hits than with less RAM."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest

from kvoffload.plan.prices import Ram
from kvoffload.sweep.monotone import Measured, less_with_more
from support.plan_rows import MIB, PLAIN, fleet, planned, prices, written
from support.run_cli import kvoffload

_BELADY = (1, 2, 3, 4, 1, 2, 5, 1, 2, 3, 4, 5)
"""FIFO has 3 hits with 3 blocks, and 2 hits with 4 blocks (Belady, Nelson, Shedler, CACM 12(6), 1969)."""
_ADVICE = "Prefer a row whose neighbours agree."


def curve(name: str, *shares: float) -> list[Measured]:
    return [Measured(name, name, number, f"{number} GiB", share) for number, share in enumerate(shares, 1)]


@pytest.mark.parametrize(
    "shares", [(), (0.5,), (0.1, 0.2, 0.2, 0.3), (0.2, 0.196), (0.2, 0.197, 0.194, 0.190)]
)
def test_growing_and_nearly_equal_shares_are_not_reported(shares: tuple[float, ...]) -> None:
    assert less_with_more(curve("a", *shares)) == []


def test_sizes_are_compared_in_order_and_only_within_a_configuration() -> None:
    assert less_with_more([*curve("a", 0.1, 0.2), *curve("b", 0.05, 0.1)]) == []
    unordered = curve("hazard", 0.1, 0.3, 0.2)[::-1]
    assert less_with_more(unordered) == [
        f"Less with more RAM: hazard from 30.0% at 2 GiB to 20.0% at 3 GiB. {_ADVICE}"
    ]
    same_size = [Measured("a", "a", 1, "1 GiB", share) for share in (0.3, 0.2)]
    assert less_with_more(same_size) == [], "two prices of the same size"


def test_the_largest_losses_are_named_and_others_counted() -> None:
    (sentence,) = less_with_more([*curve("a", 0.3, 0.29), *curve("b", 0.3, 0.1, 0.2, 0.1), *curve("c", 1, 0)])
    assert sentence == (
        "Less with more RAM: c from 100.0% at 1 GiB to 0.0% at 2 GiB; "
        f"b from 30.0% at 1 GiB to 10.0% at 2 GiB; 2 more. {_ADVICE}"
    )


def test_a_sweep_and_its_page_name_the_sizes(tmp_path: Path) -> None:
    trace = written(tmp_path / "belady.jsonl", [(block,) for block in _BELADY])
    options = ("--policies", "fifo,lru", "--admissions", "all", "--jobs", "1", "--quiet")
    page = tmp_path / "page.html"
    if importlib.util.find_spec("plotly") is not None:
        options += ("--report", str(page))
    done = kvoffload("sweep", trace, "--capacities", "2,3,4,5", *options)
    assert done.returncode == 0, done.stderr
    sentence = f"Less with more RAM: fifo from 25.0% at 3 to 16.7% at 4. {_ADVICE}"
    assert sentence in " ".join(done.stdout.split())
    assert not page.exists() or sentence in page.read_text().replace("\u00a0", " ")
    assert "Less with" not in kvoffload("sweep", trace, "--capacities", "4,5", *options[:6]).stdout


def test_a_plan_names_the_sizes(tmp_path: Path) -> None:
    chains = [(10 * lap + block,) for lap in range(40) for block in _BELADY]
    trace = written(tmp_path / "belady.jsonl", chains)
    of = fleet(prices(Ram(module="1MiB", price=1, slots=4)), kv_bytes=MIB)
    answer = planned(trace, of, replace(PLAIN, policies=("fifo",)))
    assert {row.ram_modules for row in answer.rows} >= {3, 4}
    assert f"Less with more RAM: fifo, on-compute from 25.0% at 3 MiB to 16.7% at 4 MiB. {_ADVICE}" in (
        answer.words
    )
