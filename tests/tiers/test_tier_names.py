"""Names of tiers in metrics depend on the kind and label of a tier, not on its place in the list."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvoffload.metrics.counts import tier_counts
from kvoffload.tiers.contract import TierStats
from kvoffload.tiers.spec import TierOwner, names_of, open_tiers, parse_tier, parse_tiers
from support.refusals import refusal

A, B, SERVER = "disk:/a/kv:1GiB", "disk:/b/kv:2GiB,policy=arc", "valkey://cache:6379/team"


@pytest.mark.parametrize(
    ("tiers", "names"),
    [
        ([A], ["disk"]),
        ([A, SERVER], ["disk", "valkey"]),
        ([A, B, SERVER], ["disk:/a/kv", "disk:/b/kv", "valkey"]),
        (["disk:/a/kv|/b/kv:1GiB"], ["disk"]),
        ([f"{A},label=nvme", B], ["nvme", "disk"]),
        ([SERVER, "valkey://other:6379/team?ttl=7d"], [SERVER, "valkey://other:6379/team"]),
        ([SERVER + "?label=near", A], ["near", "disk"]),
    ],
)
def test_names_do_not_depend_on_the_order(tiers: list[str], names: list[str]) -> None:
    for order in itertools.permutations(range(len(tiers))):
        parsed = parse_tiers("tiers", [tiers[number] for number in order])
        assert names_of(parsed) == [names[number] for number in order]
        assert [parse_tier("tier", str(tier)) for tier in parsed] == list(parsed)


def test_tiers_of_one_place_are_numbered() -> None:
    parsed = parse_tiers("tiers", ["simulated:100", A, "simulated:200", "simulated:300,label=last"])
    assert names_of(parsed) == ["simulated 1", "disk", "simulated 2", "last"]


@pytest.mark.parametrize("label", ["a b", "1st", "x" * 65, 'a"b', "a{b}"])
def test_impossible_labels_are_refused(label: str) -> None:
    with refusal(r"label.*allowed: 1 to 64 letters"):
        parse_tier("tier", {"type": "disk", "path": "/a", "capacity": "1GiB", "label": label})


def test_a_duplicate_label_is_refused() -> None:
    for tiers in ([f"{A},label=x", f"{B},label=x"], [f"{A},label=valkey", SERVER]):
        with refusal(r"tiers\[\d\]\.label.*another tier has this name"):
            parse_tiers("tiers", tiers)


def test_series_have_the_names_of_their_tiers_in_any_order(tmp_path: Path) -> None:
    owner = TierOwner(4096, 32, "model")
    options = parse_tiers("tiers", [f"disk:{tmp_path / name}:1MiB" for name in ("fast", "slow")])
    for order in (options, options[::-1]):
        opened = open_tiers(order, owner)
        assert sorted(tier.name for tier in opened) == [f"disk:{tmp_path / n}" for n in ("fast", "slow")]
        manager = SimpleNamespace(
            tier_names=[tier.name for tier in opened],
            hit_blocks=[0, *range(len(opened))],
            tier_stats=lambda: [TierStats() for _ in range(2)],
        )
        assert sorted(tier_counts(manager)) == sorted(tier.name for tier in opened)  # type: ignore[arg-type]
        for tier in opened:
            tier.close()
    (labelled,) = open_tiers([replace(options[0], label="nvme")], owner)
    assert labelled.name == "nvme"
    labelled.close()
