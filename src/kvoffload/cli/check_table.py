"""Output of ``--check``: a report with the comparison of a server, and the exit code."""

from __future__ import annotations

from pathlib import Path

import msgspec
from rich.console import Group, RenderableType
from rich.text import Text

from kvoffload.check.check import Check, Row, Verdict, value_text
from kvoffload.cli.output import Lines, show, terminal_table
from kvoffload.pages.page import Table
from kvoffload.replay.report import ReplayReport
from kvoffload.simulate.report import TimedReport
from kvoffload.text import percent

_EXIT_CODES = {Verdict.CLOSE: 0, Verdict.DIFFERENT: 1, Verdict.NOT_COMPARABLE: 3}
_SENTENCES = {
    Verdict.CLOSE: "The server does what the replay predicts.",
    Verdict.DIFFERENT: "The server does not do what the replay predicts.",
    Verdict.NOT_COMPARABLE: "The server has served other requests than the recording has. Save its metrics "
    "when a recording begins, and give them as --since.",
}


def show_checked(
    report: ReplayReport | TimedReport,
    table: RenderableType,
    checked: Check | None,
    *,
    is_json: bool,
    output: Path | None,
) -> None:
    """Print a report and the check, if there is one. In JSON the check is the field ``check``."""
    json = report.to_json()
    if checked is not None:
        table = Group(table, _table(checked))
        merged = {**msgspec.to_builtins(report), "check": checked}
        json = msgspec.json.format(msgspec.json.encode(merged), indent=2) + b"\n"
    show(json, table, is_json=is_json, output=output)


def exit_with(checked: Check | None) -> None:
    """Exit with the code of a check. Returns if everything is close, or if there is no check."""
    if checked is not None and (code := _EXIT_CODES[Verdict(checked.verdict)]):
        raise SystemExit(code)


def _table(checked: Check) -> RenderableType:
    rows = [
        (row.name, value_text(row, row.server), value_text(row, row.predicted), _difference(row), _limit(row))
        for row in checked.rows
    ]
    styles = ["" if row.is_close else "bad" for row in checked.rows]
    headings = ("Server and replay", "server#", "predicted#", "difference#", "limit#")
    lines = [_SENTENCES[Verdict(checked.verdict)]]
    if checked.settings:
        lines += ["The replay has another set-up than the server:", *checked.settings]
    return Group(terminal_table(Table("", headings, rows, styles)), Lines(lines), Text())


def _difference(row: Row) -> str:
    if row.unit == "share":
        return f"{100 * row.difference:+.1f} points"
    return f"{100 * row.difference:+.1f}%"


def _limit(row: Row) -> str:
    return f"{100 * row.limit:g} points" if row.unit == "share" else percent(row.limit, 0)
