"""Reports as one HTML file with text, tables and charts. The file loads nothing from the network.

Does not know plans or sweeps. The file contains plotly.js, which draws the charts and comes from the package
plotly (`pip install 'kvoffload[report]'`).
"""

from __future__ import annotations

import base64
import gzip
import html
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec

from kvoffload._version import __version__
from kvoffload.errors import ConfigError
from kvoffload.settings.output_files import check_new, replaced, written
from kvoffload.text import unbroken

Data = list[dict[str, Any]]
"""The curves and bars of a chart, as plotly.js expects them ("traces")."""

_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
"""Content security policy: the page loads nothing and sends nothing."""


@dataclass(frozen=True)
class Chart:
    """Chart of plotly.js.

    Attributes:
        name: name of the chart, unique in the page. Saved pictures have this name.
        data, layout: arguments of plotly.js. The page adds colours and margins.
        note: text below the chart.
    """

    name: str
    title: str
    data: Data
    layout: dict[str, Any] = field(default_factory=dict)
    note: str = ""


@dataclass(frozen=True)
class Table:
    """Table of text, for a page or a terminal.

    Attributes:
        headings: heading of each column. A ``#`` at the end marks a column of numbers, which is aligned
            right.
        marks: one mark for each row: ``chosen``, ``cannot``, ``good``, ``bad`` or "". The list is empty if no
            row has a mark.
        notes: lines below the table, on a page only.
    """

    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    marks: Sequence[str] = ()
    notes: Sequence[str] = ()


@dataclass(frozen=True)
class Text:
    """Paragraphs under a title. The title may be empty.

    If `is_code` is True, the text is shown as code to copy.
    """

    title: str
    paragraphs: Sequence[str]
    is_code: bool = False


Part = Chart | Table | Text


def check_report(path: Path, *, force: bool) -> None:
    """Raise `ConfigError` if the report cannot be written.

    Call this function before the replays, so that a wrong path does not cost their result.
    """
    if path.suffix not in (".html", ".htm"):
        raise ConfigError("report", str(path), "allowed: a file that ends in .html")
    check_new("report", path, force=force)
    _plotly_js(path)
    with written("report", path), tempfile.TemporaryFile(dir=path.parent):
        pass


def write_report(path: Path, content: str) -> None:
    """Write a page atomically. Raises `ConfigError` if the file cannot be written.

    Call this function after the answer has been printed, so that a full disk does not cost the answer.
    """
    with replaced("report", path) as incomplete:
        incomplete.write_text(content, "utf-8")


def page(title: str, answer: Sequence[Text], parts: Iterable[Part], result: bytes, command: str) -> str:
    """Build the HTML of a page.

    Args:
        answer: sections of the answer, the most important first.
        result: all numbers as JSON, for the element with id ``result``.
        command: command that makes the page.
    """
    parts = list(parts)
    charts = [
        {"id": part.name, "data": part.data, "layout": part.layout}
        for part in parts
        if isinstance(part, Chart)
    ]
    files = resources.files("kvoffload.pages")
    css, js = ((files / name).read_text("utf-8") for name in ("page.css", "page.js"))
    sections = "".join(map(_html, answer))
    body = "\n".join(map(_html, parts))
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
<section class="answer">{sections}</section>
<noscript><p class="quiet">Charts need JavaScript; the text and the tables do not.</p></noscript>
{body}
{_html(Text("Command", [command], is_code=True))}
<p class="quiet">kvoffload {html.escape(__version__)}. The element with the id result has every number
of this page as JSON.</p>
<script type="application/json" id="result">{_in_script(result)}</script>
<script type="application/json" id="charts">{_in_script(msgspec.json.encode(charts))}</script>
<script type="text/plain" id="plotly">{_compressed(_plotly_js())}</script>
<script>{js}</script>
</body>
</html>
"""


def _html(part: Part) -> str:
    title = f"<h2>{html.escape(part.title)}</h2>" if part.title else ""
    if isinstance(part, Chart):
        buttons = "".join(
            f'<button type="button" data-chart="{part.name}" data-format="{kind}">{kind.upper()}</button>'
            for kind in ("png", "svg")
        )
        caption = f"<figcaption>{html.escape(part.note)}{buttons}</figcaption>"
        return f'<figure>{title}<div class="chart" id="{part.name}"></div>{caption}</figure>'
    if isinstance(part, Text):
        if part.is_code:
            return title + "".join(f"<pre>{html.escape(paragraph)}</pre>" for paragraph in part.paragraphs)
        return title + _paragraphs(part.paragraphs)
    marks = [*part.marks, *[""] * (len(part.rows) - len(part.marks))]
    classes = ["number" if heading.endswith("#") else "" for heading in part.headings]
    heads = _cells("th", [heading.removesuffix("#") for heading in part.headings], classes)
    rows = "".join(
        f'<tr class="{mark}">{_cells("td", row, classes)}</tr>'
        for row, mark in zip(part.rows, marks, strict=True)
    )
    table = f"<table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>"
    return f'{title}<div class="wide">{table}</div>{_paragraphs(part.notes, "quiet")}'


def _paragraphs(texts: Iterable[str], name: str = "") -> str:
    return "".join(f'<p class="{name}">{html.escape(unbroken(text))}</p>' for text in texts)


def _cells(tag: str, cells: Sequence[str], classes: Sequence[str]) -> str:
    return "".join(
        f'<{tag} class="{name}">{html.escape(unbroken(cell))}</{tag}>'
        for cell, name in zip(cells, classes, strict=True)
    )


def _in_script(text: bytes) -> str:
    """Escape JSON so that it cannot end a script element."""
    return text.decode().replace("<", "\\u003c")


def _compressed(source: str) -> str:
    """Compress the source of plotly.js to base64 text of two fifths the size, which page.js expands."""
    return base64.b64encode(gzip.compress(source.encode(), mtime=0)).decode()


def _plotly_js(path: Path | None = None) -> str:
    """Return the source of plotly.js. Raises `ConfigError` for the report `path` if plotly is missing."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        why = "it needs plotly: pip install 'kvoffload[report]'"
        raise ConfigError("report", str(path), why) from None
    source: str = get_plotlyjs()
    return source
