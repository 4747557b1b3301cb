"""Tables of an explanation, for the terminal and for its HTML page."""

from __future__ import annotations

from collections.abc import Iterator

from kvoffload.explain.explanation import Explanation
from kvoffload.explain.misses import AFTER_SHARED_PROMPT
from kvoffload.explain.words import (
    ADVICE,
    capacity_rows,
    difference_in_words,
    facts,
    place_in_words,
    sentence,
)
from kvoffload.pages.page import Chart, Part, Table, Text, page
from kvoffload.text import counted, percent


def explanation_page(explained: Explanation, command: str) -> str:
    """Build the page; `command` is the command line that made the page."""
    answer = Text("", [summary(explained), *facts(explained)])
    names = list(explained.reasons)
    bars = [
        {
            "type": "bar",
            "x": [explained.reasons[name] for name in names],
            "y": [name.replace("_", " ") for name in names],
            "orientation": "h",
            "hovertemplate": "%{x:,} blocks<extra></extra>",
        }
    ]
    layout = {"xaxis": {"title": {"text": "missing blocks"}}, "yaxis": {"autorange": "reversed"}}
    chart = Chart("reasons", "Why blocks were missed", bars, layout, "Each missing block has one reason.")
    parts: list[Part] = [chart, *tables(explained)]
    return page(f"Misses of {explained.trace}", [answer], parts, explained.to_json(), command)


def summary(explained: Explanation) -> str:
    """Describe the replay and its misses in a sentence."""
    share = percent(explained.misses / max(1, explained.block_refs))
    behind = f", {' and '.join(explained.tiers)} behind" if explained.tiers else ""
    return (
        f"{explained.trace}: {explained.misses:,} of {counted(explained.block_refs, 'block reference')} "
        f"{'is a miss' if explained.misses == 1 else 'are misses'} ({share}), in "
        f"{counted(explained.requests, 'request')}, with {counted(explained.capacity_blocks, 'block')} of RAM"
        f"{behind} ({explained.policy}, {explained.admission}, {explained.store})."
    )


def tables(explained: Explanation) -> Iterator[Table]:
    """Build the tables: reasons of misses, larger capacities, first differences of prompts, missing runs."""
    yield _reasons(explained)
    capacities = capacity_rows(explained)
    if capacities:
        yield Table(
            "Hits with a larger capacity of RAM and tiers",
            ("Capacity#", "evicted blocks hit#", "share#", "all hits#", "hit ratio#"),
            capacities,
        )
    if explained.differing:
        yield _differing(explained)
    if explained.runs:
        yield _runs(explained)


def _reasons(explained: Explanation) -> Table:
    rows = [
        (
            name,
            f"{blocks:,}",
            percent(blocks / explained.misses),
            f"{blocks * explained.block_tokens:,}",
            ADVICE[name],
        )
        for name, blocks in explained.reasons.items()
    ]
    rows.append(
        ("all misses", f"{explained.misses:,}", "", f"{explained.misses * explained.block_tokens:,}", "")
    )
    notes = [f"{name}: {meaning}." for name, meaning in explained.meanings.items()]
    return Table("", ("Reason", "blocks#", "share#", "tokens#", "what helps"), rows, notes=notes)


def _differing(explained: Explanation) -> Table:
    rows = []
    for place in explained.differing:
        text = f"request {place.request:,} differs from {place.nearest_request:,}"
        if place.reason == AFTER_SHARED_PROMPT:
            text = "a shared prompt, continued differently"
        if place.difference is not None:
            text = f"{place.request:,}: {difference_in_words(place.difference, place.nearest_request)}"
        if place.in_session:
            differ = "differs from its" if place.in_session == 1 else "differ from their"
            text += f"; {place.in_session:,} {differ} own session"
        where = place_in_words(place, explained.block_tokens)
        rows.append((where, f"{place.requests:,}", f"{place.blocks:,}", text))
    title = (
        f"Places where prompts differ from an earlier prompt ({len(rows):,} of {explained.num_differing:,})"
    )
    return Table(title, ("First difference", "requests#", "blocks#", "example"), rows)


def _runs(explained: Explanation) -> Table:
    rows = [
        (
            f"{run.request:,}",
            f"{run.first_block:,}",
            f"{run.blocks:,}",
            run.reason,
            sentence(run, explained),
        )
        for run in explained.runs
    ]
    title = f"Runs of missing blocks ({len(rows):,} of {explained.num_runs:,})"
    return Table(title, ("Request#", "from block#", "blocks#", "reason", "why"), rows)
