"""The dashboard: the file in the wheel, its queries and its explanations."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from kvoffload.metrics.families import FAMILIES, VLLM_PREFIX
from support.dashboard import panels, queries
from support.run_cli import kvoffload

ROOT = Path(__file__).resolve().parents[2]
SERIES = {family.series_name(""): family for family in FAMILIES}


def test_the_file_equals_the_output_of_the_tool() -> None:
    pytest.importorskip("grafana_foundation_sdk", reason="no grafana-foundation-sdk: it needs Python 3.11")
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        import dashboard
    finally:
        sys.path.remove(str(ROOT / "tools"))
    assert dashboard.build() == dashboard.FILE.read_text(), "run tools/dashboard.py"


def test_the_command_prints_the_file() -> None:
    done = kvoffload("metrics", "--dashboard")
    assert done.returncode == 0, done.stderr
    made = json.loads(done.stdout)
    assert made["uid"] == "kvoffload"
    assert [row["name"] for row in made["templating"]["list"]] == [
        "datasource",
        "prefix",
        "instance",
        "model",
    ]


def test_every_panel_has_an_explanation_and_a_unique_number() -> None:
    shown = panels()
    assert all(panel["description"].endswith(".") for panel in shown)
    titles = [panel["title"] for panel in shown]
    assert len({panel["id"] for panel in shown}) == len(shown) == 37
    assert len(set(titles)) >= len(titles) - 1, "only the hit ratio has two panels"


def test_panels_lie_side_by_side() -> None:
    cells: set[tuple[int, int]] = set()
    for panel in panels():
        at = panel["gridPos"]
        own = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert not own & cells, panel["title"]
        assert at["x"] + at["w"] <= 24
        cells |= own


def test_queries_use_existing_metrics_and_labels() -> None:
    for query in queries():
        for name in re.findall(r"\$\{prefix\}(\w+)", query):
            family = SERIES[name]
            assert bool(re.search(rf"(rate|increase)\(\$\{{prefix\}}{name}\{{", query)) == family.is_counter
            if query.count("${prefix}") == 1:
                grouped = {
                    label for labels in re.findall(r"by \(([\w, ]+)\)", query) for label in labels.split(", ")
                }
                assert grouped <= {*family.labels, "instance"}, query


def test_every_family_is_on_the_dashboard_or_has_a_reason() -> None:
    shown = {name for query in queries() for name in re.findall(r"\$\{prefix\}(\w+)", query)}
    left_out = {
        "kv_hint_actions_total": "says what clients ask for, not how the cache does",
        "unrecorded_requests_total": "has an alarm",
        "miss_record_reach_s": "only explains the reason unknown",
        "paused": "has an alarm",
        "what_if_hit_ratio_error": "the error of the gain is shown",
        "audited_requests_total": "audited blocks say more",
        "audit_difference": "audited blocks say more",
        "tier_written_total": "in bytes",
        "tier_read_total": "in bytes",
        "tier_free": "capacity and ready blocks say it",
        "tier_outages_total": "open circuit breakers say it",
        "tier_outage_s_total": "open circuit breakers say it",
        "tier_puts_total": "their cost is shown",
        "tier_gets_total": "their cost is shown",
    }
    assert set(SERIES) - shown == set(left_out)


def test_the_list_of_metrics_is_complete() -> None:
    done = kvoffload("metrics", "--format", "json")
    rows: list[dict[str, Any]] = json.loads(done.stdout)
    assert [row["name"] for row in rows] == [family.series_name(VLLM_PREFIX) for family in FAMILIES]
    table = kvoffload("metrics", columns=80).stdout
    assert all(len(line) <= 80 for line in table.splitlines())
    library = json.loads(kvoffload("metrics", "--source", "library", "--format", "json").stdout)
    assert {row["name"] for row in library} == {
        family.series_name("kvoffload_") for family in FAMILIES if not family.is_of_vllm
    }


def test_the_command_writes_a_file_and_refuses_two_outputs(tmp_path: Path) -> None:
    done = kvoffload("metrics", "--rules", "--source", "library", "--output", tmp_path / "rules.yml")
    assert (done.returncode, done.stdout) == (0, "")
    assert "increase(kvoffload_internal_errors_total[1h])" in (tmp_path / "rules.yml").read_text()
    assert "vllm:" not in (tmp_path / "rules.yml").read_text()
    done = kvoffload("metrics", "--rules", "--dashboard")
    assert done.returncode == 2
    assert "allowed: one of them" in done.stderr
    done = kvoffload("metrics", "--rules", "--format", "json")
    assert (done.returncode, done.stdout) == (2, "")
    assert "allowed: --rules without --format" in done.stderr
    done = kvoffload("metrics", "--rules", "--output", tmp_path)
    assert done.returncode == 2
    assert "allowed: a regular file, or a new one" in done.stderr


def test_the_list_is_written_in_the_requested_format(tmp_path: Path) -> None:
    file = tmp_path / "list"
    assert kvoffload("metrics", "--output", file).returncode == 0
    assert "vllm:kvoffload_hit_blocks_total" in file.read_text()
    assert not file.read_text().startswith("[")
    assert kvoffload("metrics", "--output", file, "--force", "--format", "json").returncode == 0
    assert len(json.loads(file.read_text())) == len(FAMILIES)
