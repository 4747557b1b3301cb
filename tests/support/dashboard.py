"""The shipped dashboard, for tests: its panels and queries."""

from __future__ import annotations

import json
from importlib import resources
from typing import Any

from kvoffload.metrics.families import FAMILIES

NOT_YET = {"miss_blocks_total"} - {family.series_name("") for family in FAMILIES}
"""Metrics on the dashboard that no engine reports yet."""


def panels() -> list[dict[str, Any]]:
    """Return the panels, without the headings of rows."""
    text = resources.files("kvoffload.metrics").joinpath("dashboard.json").read_text(encoding="utf-8")
    return [panel for panel in json.loads(text)["panels"] if panel["type"] != "row"]


def queries() -> list[str]:
    """Return the queries of all panels, with Grafana's variables."""
    return [target["expr"] for panel in panels() for target in panel["targets"]]


def filled_in(query: str, prefix: str, interval: str = "10s") -> str:
    """Return a query as Grafana sends it when all instances and models are chosen."""
    chosen = {"${prefix}": prefix, "$instance": ".*", "$model": ".*", "$__rate_interval": interval}
    for variable, value in chosen.items():
        query = query.replace(variable, value)
    assert "$" not in query, query
    return query
