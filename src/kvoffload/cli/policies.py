"""``kvoffload policies``: what there is to choose from."""

from __future__ import annotations

import json
from typing import Any

import click
from rich import box
from rich.console import Console
from rich.table import Table

from kvoffload.core.admission import ADMISSIONS, DEFAULT_ADMISSION
from kvoffload.core.policy import DEFAULT_POLICY, FLAGSHIP, POLICIES
from kvoffload.plugins import Registry


@click.command()
@click.option(
    "--format", "form", type=click.Choice(["terminal", "json"]), default="terminal", show_default=True
)
def policies(form: str) -> None:
    """List every eviction policy and admission rule: what it is, what it is good for, who published it.

    Policies of other installed packages are listed too; one that cannot be imported with its error.
    """
    listed = [_described("policy", POLICIES, name) for name in POLICIES.names()]
    listed += [_described("admission", ADMISSIONS, name) for name in ADMISSIONS.names()]
    if form == "json":
        click.echo(json.dumps(listed, indent=2))
        return
    console = Console()
    console.print(_table("policies (which blocks leave)", "policy", listed))
    console.print(_table("admission rules (which blocks may enter)", "admission", listed))


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
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("name", no_wrap=True)
    for heading in ("what it is", "good for", "parameters", "paper"):
        table.add_column(heading)
    for entry in listed:
        if entry["kind"] != kind:
            continue
        marks = [mark for mark in ("default", "flagship") if entry[mark]]
        name = entry["name"] + (f" ({', '.join(marks)})" if marks else "")
        summary = f"cannot be imported: {entry['error']}" if "error" in entry else entry["summary"]
        parameters = "\n".join(f"{one['name']}={one['default']}" for one in entry["parameters"])
        table.add_row(name, summary, entry["good_for"], parameters, entry["paper"])
    return table
