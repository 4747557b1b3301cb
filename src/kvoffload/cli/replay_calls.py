"""``kvoffload replay --as-recorded``: feed recorded calls to a new manager, and compare every decision."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource
from rich.console import Group, RenderableType

from kvoffload.calls.explain import Difference
from kvoffload.calls.file_format import CLOSED, CONTINUED
from kvoffload.calls.parts import parts_of
from kvoffload.calls.replay import Outcome
from kvoffload.calls.series import replay_series
from kvoffload.cli.output import Lines, progress_bar, properties, show, terminal_table
from kvoffload.core.log import Call
from kvoffload.errors import CombinedConfigError, ConfigError
from kvoffload.pages.page import Table
from kvoffload.text import as_json

_MEANINGFUL = ("trace", "as_recorded", "form", "output", "force", "quiet")
_SHOWN_BLOCKS, _SHOWN_NUMBERS = 20, 32


def check_alone() -> None:
    """Check that the user gave no option that the recording determines. Raises `ConfigError`."""
    context = click.get_current_context()
    given = [
        name
        for name in context.params
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE and name not in _MEANINGFUL
    ]
    why = "--as-recorded replays the recorded configuration: leave it out"
    problems = [ConfigError(name.replace("_", "-"), context.params[name], why) for name in given]
    if problems:
        raise problems[0] if len(problems) == 1 else CombinedConfigError("replay", problems)


def replay_calls(path: Path, *, is_json: bool, output: Path | None, quiet: bool) -> bool:
    """Replay a recording and show the outcome; returns True if all decisions are equal.

    `path`: one part of the recording. If it is the first part, all parts that exist are replayed.
    """
    parts = parts_of(path) or [path]
    try:
        num_bytes = sum(part.stat().st_size for part in parts)
        with progress_bar("replay", num_bytes, quiet) as progress:
            outcome = replay_series(parts, progress)
    except OSError as error:
        raise ConfigError("trace", str(path), f"it cannot be read ({error.strerror})") from None
    show(report_of(outcome, path), table(outcome, path), is_json=is_json, output=output)
    return outcome.difference is None


def report_of(outcome: Outcome, path: Path) -> bytes:
    """Encode an outcome as JSON."""
    return as_json(
        {
            "recording": path.name,
            "configuration": outcome.header,
            "calls": dict(outcome.calls),
            "num_calls": outcome.num_calls,
            "equal": outcome.difference is None,
            "difference": outcome.difference,
            "end": outcome.end or None,
            "first_part": outcome.header.part,
            "num_parts": outcome.num_parts,
            "cut_bytes": outcome.num_cut,
            "warnings": outcome.warnings,
        }
    )


def table(outcome: Outcome, path: Path) -> RenderableType:
    header = outcome.header
    title = (
        f"{path.name}: {header.policy}, {header.admission}, {header.store}, {header.capacity_blocks:,} "
        f"blocks, recorded by kvoffload {header.kvoffload}"
    )
    rows = [(name, f"{count:,}") for name, count in sorted(outcome.calls.items())]
    parts: list[RenderableType] = [terminal_table(Table(title, ("Call", "number#"), rows))]
    if outcome.difference is None:
        parts.append(Lines([f"All decisions of {outcome.num_calls:,} calls are equal."], "bold green"))
    else:
        parts += _first_difference(outcome.difference)
    return Group(*parts, Lines([*_remarks(outcome)]))


def _remarks(outcome: Outcome) -> list[str]:
    remarks = list(outcome.warnings)
    first, last = outcome.header.part, outcome.header.part + outcome.num_parts - 1
    if last > first:
        remarks.append(f"Parts {first} to {last} of the recording were replayed.")
    if outcome.num_cut:
        remarks.append(f"{outcome.num_cut:,} bytes behind the last whole frame were ignored.")
    if outcome.difference is None and outcome.end not in (CLOSED, CONTINUED):
        remarks.append(f"The recording was not closed by its engine: {outcome.end or 'it has no end mark'}.")
    return remarks


def _first_difference(difference: Difference) -> list[RenderableType]:
    """Show the call, both results, the blocks of the call, and the latest calls of the request."""
    written = datetime.datetime.fromtimestamp(difference.time_ns / 1e9, datetime.timezone.utc)
    subject = "plan" if difference.kind in _OF_PLANS else "request"
    title = (
        f"First difference: call {difference.call:,} of {difference.recording}, "
        f"{difference.kind} of {subject} {difference.request:,}, written {written:%Y-%m-%d %H:%M:%S} UTC"
    )
    names = [*dict.fromkeys([*difference.expected, *difference.found])]
    results = [
        (name, _short(difference.expected.get(name, "")), _short(difference.found.get(name, "")))
        for name in names
    ]
    blocks = [
        (block["key"], block["state"], str(block.get("slot", "")), str(block.get("pins", "")))
        for block in difference.blocks[:_SHOWN_BLOCKS]
    ]
    parts: list[RenderableType] = [
        Lines([title], "bold red"),
        terminal_table(Table("", ("", "recorded", "replayed"), results)),
    ]
    if blocks:
        about = (
            f"Blocks of the call, in the replay after it ({len(blocks)} of {len(difference.blocks)} shown)"
        )
        parts.append(terminal_table(Table(about, ("Key", "State", "slot#", "pins#"), blocks)))
    if difference.calls:
        calls = [call.split(" ", 1) for call in difference.calls]
        parts.append(
            terminal_table(properties("Earlier calls of the request", [(call[0], call[1]) for call in calls]))
        )
    return parts


_OF_PLANS = {call.name.lower() for call in (Call.COMPLETE_LOAD, Call.UNPIN, Call.COMPLETE_STORE)}


def _short(value: Any) -> str:
    """Format a result. A long list is cut off and ends with its length."""
    if isinstance(value, list) and len(value) > _SHOWN_NUMBERS:
        return f"{', '.join(map(str, value[:_SHOWN_NUMBERS]))}, ... ({len(value):,})"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
