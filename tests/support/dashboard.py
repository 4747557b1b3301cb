"""The shipped dashboard, for tests: its panels and queries."""

from __future__ import annotations

import json
from importlib import resources
from math import isnan
from typing import Any

from kvoffload.canary.run import CanaryReport
from kvoffload.canary.text_metrics import text_metrics
from kvoffload.canary.verdict import Verdict
from support.prometheus_server import Prometheus


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


def without_data(prometheus: Prometheus, prefix: str, interval: str = "60s") -> set[str]:
    """Return the queries without a number as their answer, with Grafana's variables."""
    return {
        query
        for query in queries()
        if all(isnan(float(row["value"][1])) for row in prometheus.query(filled_in(query, prefix, interval)))
    }


def canary_metrics(verdict: Verdict, now_s: float) -> str:
    """Return the metrics of a canary whose only run had this verdict."""
    report = CanaryReport(
        url="http://localhost:8000", model="m", seed=1, verdict=verdict.value, reasons=["made up"],
        prompts=24, noise=0.01, threshold=0.1, confidence=1.0, phases=[], differences=[], tokens_sent=0,
        seconds=1.0,
    )  # fmt: skip
    return text_metrics(report, {verdict.value: 1}, now_s)
