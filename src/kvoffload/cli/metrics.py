"""``kvoffload metrics``: names of metrics, the Grafana dashboard, the alert rules."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib import resources
from typing import Annotated

import click

from kvoffload.cli.fields import option, options_of
from kvoffload.cli.options import FormatOptions, OutputOptions
from kvoffload.cli.output import show, terminal_table, write_output
from kvoffload.errors import Problems
from kvoffload.metrics.alarms import rule_file
from kvoffload.metrics.families import FAMILIES, LIBRARY_PREFIX, VLLM_PREFIX, Family
from kvoffload.pages.page import Table
from kvoffload.settings.read import OneOf

_PREFIXES = {"vllm": VLLM_PREFIX, "library": LIBRARY_PREFIX}


@dataclass(frozen=True, kw_only=True)
class MetricsOptions(FormatOptions, OutputOptions):
    """Options of ``kvoffload metrics``."""

    dashboard: bool = option(False, "Print a dashboard for Grafana 10.1 or later, as JSON.")
    rules: bool = option(False, "Print alert rules for Prometheus, as YAML.")
    source: Annotated[str, OneOf(_PREFIXES)] = option(
        "vllm", "Origin of the metrics: vLLM's plug-in, or the library's collector. The dashboard has both."
    )

    def check(self) -> None:
        """Check options that exclude each other, and the output file. Raises `ConfigError`."""
        problems = Problems("metrics")
        if self.dashboard and self.rules:
            problems.add("rules", "--dashboard --rules", "allowed: one of them")
        if self.rules and self.is_json:
            problems.add("format", "json", "the rules are YAML; allowed: --rules without --format")
        self.check_outputs(problems)
        problems.check()


@click.command()
@options_of(MetricsOptions)
def metrics(options: MetricsOptions) -> None:
    """List all metrics, or print the dashboard or the alert rules for them.

    Import the dashboard in Grafana under Dashboards, New, Import. List the file of rules in `rule_files` of
    prometheus.yml. docs/operations.md describes the cause and remedy of each alarm.
    """
    prefix = _PREFIXES[options.source]
    if options.dashboard:
        text = resources.files("kvoffload.metrics").joinpath("dashboard.json").read_text(encoding="utf-8")
    elif options.rules:
        text = rule_file(prefix)
    else:
        families = [family for family in FAMILIES if options.source == "vllm" or not family.is_of_vllm]
        listed = json.dumps([_row(family, prefix) for family in families], indent=2) + "\n"
        table = terminal_table(_table(families, prefix))
        show(listed.encode(), table, is_json=options.is_json, output=options.output)
        return
    if options.output is None:
        click.echo(text, nl=False)
    else:
        write_output("output", options.output, text.encode())


def _table(families: list[Family], prefix: str) -> Table:
    rows = [
        (family.series_name(prefix), ", ".join(family.labels), family.documentation) for family in families
    ]
    return Table("", ("metric", "labels", "meaning"), rows)


def _row(family: Family, prefix: str) -> dict[str, object]:
    return {
        "name": family.series_name(prefix),
        "type": "counter" if family.is_counter else "gauge",
        "labels": family.labels,
        "meaning": family.documentation,
    }
