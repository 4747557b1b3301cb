"""``kvoffload policies``: what there is to choose from."""

from __future__ import annotations

import json
from typing import Any

import click
from rich import box
from rich.console import Console
from rich.table import Table

from kvoffload import admission
from kvoffload.core.policy import DEFAULT, FLAGSHIP, POLICIES


@click.command()
@click.option(
    "--format", "form", type=click.Choice(["terminal", "json"]), default="terminal", show_default=True
)
def policies(form: str) -> None:
    """List every eviction policy and admission rule: what it is, what it is good for, who published it.

    Policies of other installed packages are listed too; one that cannot be imported with its error.
    """
    listed = [_policy(name) for name in POLICIES.names()] + [_rule(rule) for rule in admission.RULES]
    if form == "json":
        click.echo(json.dumps(listed, indent=2))
        return
    console = Console()
    console.print(_table("policies (who leaves)", "policy", listed))
    console.print(_table("admission rules (who may enter)", "admission", listed))


def _policy(name: str) -> dict[str, Any]:
    marks = {"default": name == DEFAULT, "flagship": name == FLAGSHIP, "kind": "policy"}
    try:
        found = POLICIES.find(name)
    except Exception as error:
        # Somebody else's module may fail in any way when it is imported.
        reason = " ".join(str(error).split())
        return {"name": name, "summary": "", "good_for": "", "paper": "", **marks,
                "error": f"{type(error).__name__}: {reason}"}  # fmt: skip
    summary = (found.__doc__ or "").strip().partition("\n")[0]
    return {"name": name, "summary": summary, "good_for": found.good_for, "paper": found.paper, **marks}


def _rule(rule: admission.Description) -> dict[str, Any]:
    marks = {"default": rule.form == admission.DEFAULT, "flagship": False, "kind": "admission"}
    return {
        "name": rule.form,
        "summary": rule.summary,
        "good_for": rule.good_for,
        "paper": rule.paper,
    } | marks


def _table(title: str, kind: str, listed: list[dict[str, Any]]) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("name", no_wrap=True)
    for heading in ("what it is", "good for", "paper"):
        table.add_column(heading)
    for entry in listed:
        if entry["kind"] != kind:
            continue
        marks = [mark for mark in ("default", "flagship") if entry[mark]]
        name = entry["name"] + (f" ({', '.join(marks)})" if marks else "")
        summary = f"cannot be imported: {entry['error']}" if "error" in entry else entry["summary"]
        table.add_row(name, summary, entry["good_for"], entry["paper"])
    return table
