"""Numbers, and differences between producers, as commands print them."""

from __future__ import annotations

from kvoffload.tiers.producer_text import differences

_MOST_LINES = 20


def difference_lines(first: str, second: str) -> list[str]:
    """The fields in which the texts of two producers differ, a line for each; none if one is not known."""
    found = differences(first, second) if first and second else []
    lines = [str(one) for one in found[:_MOST_LINES]]
    if len(found) > _MOST_LINES:
        lines.append(f"and {len(found) - _MOST_LINES} more fields")
    return lines
