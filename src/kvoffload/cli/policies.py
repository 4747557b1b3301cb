"""``kvoffload policies``: list eviction policies and admission rules."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import click

from kvoffload.cli.fields import argument, options_of
from kvoffload.cli.options import FormatOptions
from kvoffload.cli.output import Terminal, properties, terminal_table
from kvoffload.core.admission import ADMISSIONS, DEFAULT_ADMISSION
from kvoffload.core.policy import DEFAULT_POLICY, FLAGSHIP, POLICIES
from kvoffload.errors import ConfigError
from kvoffload.pages.page import Table
from kvoffload.settings.read import nearest
from kvoffload.settings.registry import Registry


@dataclass(frozen=True, kw_only=True)
class PoliciesOptions(FormatOptions):
    name: str | None = argument(None, required=False)


@click.command()
@options_of(PoliciesOptions)
def policies(options: PoliciesOptions) -> None:
    """List every eviction policy and admission rule, or describe NAME: uses, parameters, publication.

    Also lists policies of other installed packages. If the import of a package fails, its error is shown.
    """
    name = options.name
    listed = [_described("policy", POLICIES, name) for name in POLICIES.names()]
    listed += [_described("admission", ADMISSIONS, name) for name in ADMISSIONS.names()]
    if name is not None:
        known = [entry["name"] for entry in listed]
        listed = [entry for entry in listed if entry["name"] == name]
        if not listed:
            raise ConfigError("name", name, f"allowed: {', '.join(known)}{nearest(name, known)}")
    if options.is_json:
        click.echo(json.dumps(listed, indent=2))
        return
    console = Terminal()
    if name is not None:
        console.print(terminal_table(_details(listed[0])))
        return
    console.print(terminal_table(_table("eviction policies", "policy", listed), pad_edge=False))
    console.print(terminal_table(_table("admission rules", "admission", listed), pad_edge=False))
    console.print("[dim]kvoffload policies NAME describes a policy and its parameters.[/dim]")


def _described(kind: str, registry: Registry[Any], name: str) -> dict[str, Any]:
    default = name == (DEFAULT_POLICY if kind == "policy" else DEFAULT_ADMISSION)
    marks = {"kind": kind, "default": default, "flagship": kind == "policy" and name == FLAGSHIP}
    try:
        cls = registry.find(name)
        parameters = [
            {"name": parameter.name, "default": parameter.default, "allowed": parameter.allowed}
            for parameter in registry.parameters(cls)
        ]
    except Exception as error:
        # The import of another package's module may raise any exception.
        cause = error.__cause__ or error
        reason = " ".join(str(cause).split())
        return {"name": name, "summary": "", "good_for": "", "paper": "", "parameters": [], **marks,
                "error": f"{type(cause).__name__}: {reason}"}  # fmt: skip
    summary = (cls.__doc__ or "").strip().partition("\n")[0]
    return {"name": name, "summary": summary, "good_for": cls.good_for, "paper": cls.paper,
            "parameters": parameters, **marks}  # fmt: skip


def _table(title: str, kind: str, listed: list[dict[str, Any]]) -> Table:
    rows = []
    for entry in listed:
        if entry["kind"] == kind:
            marks = [f"({mark})" for mark in ("default", "flagship") if entry[mark]]
            rows.append((entry["name"], " ".join((_summary(entry), *marks))))
    return properties(title, rows)


def _details(entry: dict[str, Any]) -> Table:
    parameters = [
        f"{parameter['name']}={parameter['default']} ({parameter['allowed']})"
        for parameter in entry["parameters"]
    ]
    rows = (("what it does", _summary(entry)), ("good for", entry["good_for"]),
            ("parameters", "\n".join(parameters)), ("published", entry["paper"]))  # fmt: skip
    return properties(entry["name"], rows)


def _summary(entry: dict[str, Any]) -> str:
    return f"cannot be imported: {entry['error']}" if "error" in entry else str(entry["summary"])
