"""A report as one file: text, tables, charts and the library that draws them. Opens offline, on any screen.

Owns the page; does not know what it is about. The charts are drawn by plotly.js, which the package plotly
brings along (`pip install 'kvoffload[report]'`).
"""

from __future__ import annotations

import html
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec

from kvoffload._version import __version__
from kvoffload.errors import ConfigError

Data = list[dict[str, Any]]
"""Traces of a chart, as plotly.js takes them."""

_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
"""The page loads nothing and sends nothing."""


@dataclass(frozen=True)
class Chart:
    """One chart.

    Attributes:
        name: unique in the page; also of the files that are saved from it.
        title: above it.
        data, layout: as plotly.js takes them; colours and margins are the page's.
        note: below it.
    """

    name: str
    title: str
    data: Data
    layout: dict[str, Any] = field(default_factory=dict)
    note: str = ""


@dataclass(frozen=True)
class Table:
    """A table. A column whose heading ends in ``#`` has numbers. `marks`: class of each row, or none."""

    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    marks: Sequence[str] = ()


@dataclass(frozen=True)
class Text:
    """Paragraphs under a title; `is_code`: to be pasted."""

    title: str
    paragraphs: Sequence[str]
    is_code: bool = False


Part = Chart | Table | Text


def check_report(path: Path, *, force: bool) -> None:
    """Raise `ConfigError` if no report can be written there, before any work is done."""
    if path.suffix not in (".html", ".htm"):
        raise ConfigError("report", str(path), "allowed: a file that ends in .html")
    if path.exists() and not (force and path.is_file()):
        raise ConfigError("report", str(path), "a file that does not exist yet, or --force")
    _plotly_js()


def write_report(path: Path, content: str) -> None:
    """Write a page, whole or not at all. Raises `ConfigError`."""
    unfinished = path.with_name(path.name + ".part")
    try:
        unfinished.write_text(content, "utf-8")
        os.replace(unfinished, path)
    except OSError as error:
        unfinished.unlink(missing_ok=True)
        raise ConfigError("report", str(path), f"a file that can be written ({error.strerror})") from None


def page(title: str, answer: Sequence[str], parts: Iterable[Part], result: bytes, command: str) -> str:
    """The page.

    Args:
        answer: what it says in words, the most important first.
        result: JSON of all numbers; it stands in the page, in the element ``result``.
        command: what makes this page.
    """
    parts = list(parts)
    charts = [
        {"id": one.name, "data": one.data, "layout": one.layout} for one in parts if isinstance(one, Chart)
    ]
    files = resources.files("kvoffload.pages")
    css, js = ((files / name).read_text("utf-8") for name in ("page.css", "page.js"))
    said = "".join(f"<p>{html.escape(one)}</p>" for one in answer)
    body = "\n".join(_html(one) for one in parts)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<title>{html.escape(title)}</title>
<style>{css}</style>
</head>
<body>
<h1>{html.escape(title)}</h1>
<section class="answer">{said}</section>
<noscript><p class="quiet">Charts need JavaScript; the text and the tables do not.</p></noscript>
{body}
{_html(Text("How this was made", [command], is_code=True))}
<p class="quiet">kvoffload {html.escape(__version__)}. Every number of this page stands in it as JSON, in the
element with the id result.</p>
<script type="application/json" id="result">{_in_script(result)}</script>
<script type="application/json" id="charts">{_in_script(msgspec.json.encode(charts))}</script>
<script>{_plotly_js()}</script>
<script>{js}</script>
</body>
</html>
"""


def _html(part: Part) -> str:
    title = f"<h2>{html.escape(part.title)}</h2>"
    if isinstance(part, Chart):
        buttons = "".join(
            f'<button type="button" data-chart="{part.name}" data-format="{one}">{one.upper()}</button>'
            for one in ("png", "svg")
        )
        caption = f"<figcaption>{html.escape(part.note)}{buttons}</figcaption>"
        return f'<figure>{title}<div class="chart" id="{part.name}"></div>{caption}</figure>'
    if isinstance(part, Text):
        tag = "pre" if part.is_code else "p"
        return title + "".join(f"<{tag}>{html.escape(one)}</{tag}>" for one in part.paragraphs)
    marks = [*part.marks, *[""] * (len(part.rows) - len(part.marks))]
    classes = ["number" if one.endswith("#") else "" for one in part.headings]
    heads = _cells("th", [one.removesuffix("#") for one in part.headings], classes)
    rows = "".join(
        f'<tr class="{mark}">{_cells("td", row, classes)}</tr>'
        for row, mark in zip(part.rows, marks, strict=True)
    )
    table = f"<table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>"
    return f'{title}<div class="wide">{table}</div>'


def _cells(tag: str, cells: Sequence[str], classes: Sequence[str]) -> str:
    return "".join(
        f'<{tag} class="{its}">{html.escape(one)}</{tag}>' for one, its in zip(cells, classes, strict=True)
    )


def _in_script(text: bytes) -> str:
    """JSON that no script element ends at."""
    return text.decode().replace("<", "\\u003c")


def _plotly_js() -> str:
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        why = "a report needs plotly: pip install 'kvoffload[report]'"
        raise ConfigError("report", "", why) from None
    source: str = get_plotlyjs()
    return source
