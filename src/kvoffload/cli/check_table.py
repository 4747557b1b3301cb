"""Output of ``--check``: a report that ends with a comparison of server and prediction. Also sets the exit
code.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
from rich.console import Group, RenderableType
from rich.text import Text

from kvoffload.check.check import Check, Verdict
from kvoffload.cli.output import Lines, show, terminal_table
from kvoffload.pages.check import check_sentences, check_table
from kvoffload.replay.report import ReplayReport
from kvoffload.simulate.report import TimedReport
from kvoffload.text import as_json

_EXIT_CODES = {Verdict.CLOSE: 0, Verdict.DIFFERENT: 1, Verdict.NOT_COMPARABLE: 3}


def show_checked(
    report: ReplayReport | TimedReport,
    table: RenderableType,
    checked: Check | None,
    *,
    is_json: bool,
    output: Path | None,
) -> None:
    """Print a report and the comparison of ``--check``, if there is one. In JSON the comparison is in the
    field ``check``.
    """
    json = report.to_json()
    if checked is not None:
        table = Group(table, checked_table(checked))
        json = as_json({**msgspec.to_builtins(report), "check": checked})
    show(json, table, is_json=is_json, output=output)


def exit_with(checked: Check | None) -> None:
    """Exit with the code of the comparison, unless there is none, or server and prediction are close."""
    if checked is not None and (code := _EXIT_CODES[Verdict(checked.verdict)]):
        raise SystemExit(code)


def checked_table(checked: Check) -> RenderableType:
    """Render the comparison for the terminal."""
    return Group(terminal_table(check_table(checked)), Lines(check_sentences(checked)), Text())
