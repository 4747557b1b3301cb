"""``kvoffload policies``: what there is to choose from."""

from __future__ import annotations

import json
from typing import Any

import click
from rich import box
from rich.console import Console
from rich.table import Table

from kvoffload.cli.options import in_form
from kvoffload.core.admission import ADMISSIONS, DEFAULT_ADMISSION
from kvoffload.core.policy import DEFAULT_POLICY, FLAGSHIP, POLICIES
from kvoffload.errors import ConfigError
from kvoffload.settings.read import nearest
from kvoffload.settings.registry import Registry


@click.command()
@click.argument("name", required=False)
@in_form
def policies(name: str | None, form: str) -> None:
    """List every eviction policy and admission rule, a line each; or all about NAME: what it is good for, its
    parameters, who published it.

    Policies of other installed packages are listed too; one that cannot be imported with its error.
    """
    listed = [_described("policy", POLICIES, name) for name in POLICIES.names()]
    listed += [_described("admission", ADMISSIONS, name) for name in ADMISSIONS.names()]
    if name is not None:
        known = [entry["name"] for entry in listed]
        listed = [entry for entry in listed if entry["name"] == name]
        if not listed:
            raise ConfigError("name", name, f"allowed: {', '.join(known)}{nearest(name, known)}")
    if form == "json":
        click.echo(json.dumps(listed, indent=2))
        return
    console = Console()
    if name is not None:
        console.print(_details(listed[0]))
        return
    console.print(_table("policies (which blocks leave)", "policy", listed))
    console.print(_table("admission rules (which blocks may enter)", "admission", listed))
    console.print("[dim]kvoffload policies NAME says what it is good for, and its parameters.[/dim]")


def _described(kind: str, registry: Registry[Any], name: str) -> dict[str, Any]:
    default = name == (DEFAULT_POLICY if kind == "policy" else DEFAULT_ADMISSION)
    marks = {"kind": kind, "default": default, "flagship": kind == "policy" and name == FLAGSHIP}
    try:
        found = registry.find(name)
        parameters = [
            {"name": one.name, "default": one.default, "allowed": one.allowed}
            for one in registry.parameters(found)
        ]
    except Exception as error:
        # A third party's module may fail in any way when it is imported.
        reason = " ".join(str(error).split())
        return {"name": name, "summary": "", "good_for": "", "paper": "", "parameters": [], **marks,
                "error": f"{type(error).__name__}: {reason}"}  # fmt: skip
    summary = (found.__doc__ or "").strip().partition("\n")[0]
    return {"name": name, "summary": summary, "good_for": found.good_for, "paper": found.paper,
            "parameters": parameters, **marks}  # fmt: skip


def _table(title: str, kind: str, listed: list[dict[str, Any]]) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column()
    for entry in listed:
        if entry["kind"] == kind:
            marks = [mark for mark in ("default", "flagship") if entry[mark]]
            table.add_row(entry["name"], " ".join((_summary(entry), *(f"({mark})" for mark in marks))))
    return table


def _details(entry: dict[str, Any]) -> Table:
    table = Table(title=entry["name"], title_justify="left", box=box.SIMPLE_HEAD, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column()
    parameters = [f"{one['name']}={one['default']} ({one['allowed']})" for one in entry["parameters"]]
    rows = (("what it does", _summary(entry)), ("good for", entry["good_for"]),
            ("parameters", "\n".join(parameters)), ("published", entry["paper"]))  # fmt: skip
    for heading, content in rows:
        if content:
            table.add_row(heading, content)
    return table


def _summary(entry: dict[str, Any]) -> str:
    return f"cannot be imported: {entry['error']}" if "error" in entry else str(entry["summary"])
