"""Table of a check: a server's values beside the predicted values, with the verdict in words."""

from __future__ import annotations

from kvoffload.check.check import Check, Row, Verdict, value_text
from kvoffload.pages.page import Table
from kvoffload.text import percent

_SENTENCES = {
    Verdict.CLOSE: "The server does what the replay predicts.",
    Verdict.DIFFERENT: "The server does not do what the replay predicts.",
    Verdict.NOT_COMPARABLE: "The server has served other requests than the recording has. Save its metrics "
    "when a recording begins, and give them as --since.",
}


def check_table(checked: Check) -> Table:
    """Build the table for a page or the terminal.

    The notes below the table are the sentences of `check_sentences`.
    """
    rows = [
        (row.name, value_text(row, row.server), value_text(row, row.predicted), _difference(row), _limit(row))
        for row in checked.rows
    ]
    marks = ["" if row.is_close else "bad" for row in checked.rows]
    headings = ("Server and replay", "server#", "predicted#", "difference#", "limit#")
    return Table("", headings, rows, marks, check_sentences(checked))


def check_sentences(checked: Check) -> list[str]:
    """Return the verdict as a sentence, then a sentence for each setting that differs."""
    lines = [_SENTENCES[Verdict(checked.verdict)]]
    if checked.settings:
        lines += ["The replay has another set-up than the server:", *checked.settings]
    return lines


def _difference(row: Row) -> str:
    if row.unit == "share":
        return f"{100 * row.difference:+.1f} points"
    return f"{100 * row.difference:+.1f}%"


def _limit(row: Row) -> str:
    return f"{100 * row.limit:g} points" if row.unit == "share" else percent(row.limit, 0)
