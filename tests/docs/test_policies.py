"""docs/policies.md has a section and picture for every policy and rule, and tables made from the sweep."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from kvoffload.core.admission import ADMISSIONS
from kvoffload.core.plans import STORES
from kvoffload.core.policy import POLICIES

ROOT = Path(__file__).resolve().parents[2]
SWEEP = ROOT / "docs" / "data" / "sweep.csv"
DOCUMENT = (ROOT / "docs" / "policies.md").read_text(encoding="utf-8")
BUILTIN = [
    name for name in POLICIES.names() if POLICIES.find(name).__module__.startswith("kvoffload.policies.")
]
HEADER = (
    "trace,device,store,capacity,policy,admission,"
    "prefix_hit_ratio,offload_hit_ratio,writes_per_ref,optimum_hit_ratio\n"
)


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    """The module bench/tables.py, which is not in the package."""
    sys.path.insert(0, str(ROOT / "bench"))
    try:
        spec = importlib.util.spec_from_file_location("tables", ROOT / "bench" / "tables.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules["tables"] = module
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(ROOT / "bench"))
    return module


@pytest.mark.parametrize("policy", BUILTIN)
def test_every_policy_has_a_section_and_its_picture(policy: str) -> None:
    _, heading, section = DOCUMENT.partition(f"\n### `{policy}`\n")
    assert heading, f"no section for {policy}"
    section = re.split(r"\n##+ ", section)[0]
    picture = f"images/policy-{policy}.svg"
    assert picture in section


@pytest.mark.parametrize("policy", BUILTIN)
def test_every_policy_has_a_row_with_its_paper_and_costs(policy: str) -> None:
    (row,) = (line for line in DOCUMENT.splitlines() if line.startswith(f"| [`{policy}`](#{policy}) |"))
    _, _, _, paper, num_bytes, _ = (cell.strip() for cell in row.strip("|").split("|"))
    assert paper
    assert num_bytes.isdigit()


@pytest.mark.parametrize("name", [*ADMISSIONS.names(), *STORES])
def test_every_rule_and_store_mode_has_a_section(name: str) -> None:
    assert f"\n### `{name}`\n" in DOCUMENT


def test_every_picture_exists_is_small_and_has_no_fonts() -> None:
    pictures = re.findall(r"\]\((images/[^)]+)\)", DOCUMENT)
    assert len(pictures) == len(set(pictures)) == len(BUILTIN) + 2  # the optimum; hits and writes
    for picture in pictures:
        path = ROOT / "docs" / picture
        assert path.exists(), picture
        assert path.stat().st_size < 40_000, picture
        assert b"font-face" not in path.read_bytes(), picture


def test_the_tables_equal_the_committed_sweep(bench: ModuleType) -> None:
    if not SWEEP.exists():
        pytest.skip("docs/data/sweep.csv is not committed: no sweep to compare docs/policies.md with")
    expected = bench.put_all(DOCUMENT, bench.read_rows(SWEEP))
    assert expected == DOCUMENT, "run: python bench/tables.py --write"


def rows_of(bench: ModuleType, path: Path, *lines: str) -> object:
    path.write_text(HEADER + "".join(line + "\n" for line in lines))
    return bench.read_rows(path)


def test_a_cell_shows_hits_writes_and_the_share_of_the_gap(bench: ModuleType, tmp_path: Path) -> None:
    rows = rows_of(
        bench,
        tmp_path / "sweep.csv",
        "t,0,on-compute,1%,lru,all,0.1,0.1,0.9,0.3",
        "t,0,on-compute,1%,hazard,all,0.15,0.15,0.25,0.3",
        "t,0,on-compute,1%,arc,reuse:2,0.2,0.2,0.5,0.3",
        "t,0,on-compute,5%,lru,all,0.2,0.2,0.9,0.2",
    )
    assert bench.table_of_hits(rows, "t", "0", "on-compute").splitlines() == [
        "| on-compute | 1% | 5% |",
        "| --- | --- | --- |",
        "| `lru` | 0.100, 0.90 | 0.200, 0.90 |",
        "| `hazard` | 0.150, 0.25, +25% |  |",
        "| *optimum* | *0.300* | *0.200* |",
    ]


def test_a_missed_target_is_named_with_its_worst_place(bench: ModuleType, tmp_path: Path) -> None:
    rows = rows_of(
        bench,
        tmp_path / "sweep.csv",
        "t,0,on-compute,1%,lru,all,0.1,0.1,0.9,0.3",
        "t,0,on-compute,1%,hazard,all,0.15,0.15,0.3,0.3",
        "t,0,on-compute,20%,lru,all,0.3,0.3,0.1,0.3",
        "t,0,on-compute,20%,hazard,all,0.293,0.293,0.1,0.3",
        "t,1x,on-compute,20%,lru,all,0.3,0.1,0.1,0.5",
        "t,1x,on-compute,20%,hazard,all,0.297,0.097,0.1,0.5",
        "t,1x,on-device-eviction,20%,lru,all,0.35,0.15,0.1,0.4",
        "t,1x,on-device-eviction,20%,hazard,all,0.35,0.15,0.1,0.4",
    )
    lines = bench.table_of_targets(rows, ("1%", "20%"), ("0", "1x")).splitlines()[2:]
    table = dict(line.strip("| ").split(" | ", 1) for line in lines)
    assert table["never more than 0.5 points below LRU"] == "**2 of 3**; -0.20 at 20%"
    assert table["1-2 %, alone: 30 % of the gap to the optimum"] == "**0 of 1**; -5.00 at 1%"
    assert table["1-5 %, optimum 5 points above LRU: a third of LRU's writes"] == "1 of 1"
    assert (
        table["device as large as the tier: 40 % of what the optimum adds"]
        == "**0 of 1**; -7.67 at 20% behind 1x"
    )
    assert table["victim tier: never more than 0.5 points below the better plain mode"] == "1 of 1"
    assert bench.largest_shortfalls(rows, ("1%", "20%")).splitlines() == [
        "- t: -0.70 at 20%, on-compute; -0.30 at 20% behind 1x, on-compute (2 of 4 places below)"
    ]


def test_writing_twice_changes_nothing(bench: ModuleType) -> None:
    text = "a\n<!-- tables:begin -->\nold\n<!-- tables:end -->\nb\n"
    once = bench.put(text, "tables", "new")
    assert once == "a\n<!-- tables:begin -->\n\nnew\n\n<!-- tables:end -->\nb\n"
    assert bench.put(once, "tables", "new") == once
    with pytest.raises(ValueError, match="no markers"):
        bench.put(text, "advice", "new")
