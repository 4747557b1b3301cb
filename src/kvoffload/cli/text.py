"""Differences between the producers of blocks (model, layout, versions), as lines for the terminal."""

from __future__ import annotations

from kvoffload.tiers.producer_text import differences

_MOST_LINES = 20


def difference_lines(first: str, second: str) -> list[str]:
    """Return a line for each field, such as ``rope_theta``, in which two producers differ.

    The list is empty if one of the producers is unknown.
    """
    fields = differences(first, second) if first and second else []
    lines = [str(field) for field in fields[:_MOST_LINES]]
    if len(fields) > _MOST_LINES:
        lines.append(f"and {len(fields) - _MOST_LINES} more fields")
    return lines
