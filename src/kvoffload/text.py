"""Formats of bytes, shares, durations and reports, the same in all tables, pages and messages."""

from __future__ import annotations

import re

import msgspec

NO_BREAK = "\u00a0"
_NO_UNITS = "and|at|but|by|for|from|in|less|more|of|on|or|to|while|with|would"
_UNBROKEN = re.compile(
    rf"(?<=\d) (?!(?:{_NO_UNITS})\b)(?=[A-Za-z%])|(?<=[\d%]) (?=to \d)|(?<=[\d%] to) (?=\d)"
)

_DURATIONS = ((0.9995e-3, 1e-6, "us"), (0.9995, 1e-3, "ms"), (120.0, 1.0, "s"), (7_200.0, 60.0, "min"),
              (172_800.0, 3_600.0, "h"), (730 * 86_400.0, 86_400.0, "days"))  # fmt: skip
"""Rows: upper limit in seconds, seconds of the unit, name of the unit."""
_YEAR_S = 365.25 * 86_400


def size(num_bytes: float, base: int = 1024) -> str:
    """Format a number of bytes: ``1.5 GiB``. A `base` of 1000, as for SSDs, gives ``3.84 TB``."""
    value, units = float(num_bytes), ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]
    while float(f"{value:.4g}") >= base and len(units) > 1:
        value, units = value / base, units[1:]
    return f"{value:.4g} {units[0] if base == 1024 else units[0].replace('i', '')}"


def round_size(num_bytes: int) -> str:
    """Format a number of bytes in the units that give a round number: ``64 GB`` or ``160 MiB``.

    A multiple of 1 MB gets decimal units. Any other size gets binary units.
    """
    return size(num_bytes, 1000 if num_bytes >= 10**6 and num_bytes % 10**6 == 0 else 1024)


def percent(share: float, digits: int = 1) -> str:
    """Format a fraction as a percentage: 0.314 as ``31.4%``."""
    return f"{100 * share:.{digits}f}%"


def counted(count: int, noun: str) -> str:
    """Format a number of things: ``1 block``, ``1,024 blocks``."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def outside_blocks(share: float | None, ratios: str = "percentages of the prefill") -> list[str]:
    """Return a list with one sentence about the prompt tokens that are in no whole block.

    Args:
        share: share of these tokens, 0 to 1. If it is None, the list is empty.
        ratios: words in the sentence for the numbers that do not count these tokens.
    """
    if share is None:
        return []
    return [
        f"{percent(share)} of prompt tokens are in no whole block: they are always computed, and {ratios} "
        "leave them out."
    ]


def interval(low: float | None, high: float | None) -> str:
    """Format two shares as an interval: ``27.3% to 35.2%``; an empty string if one of them is None."""
    return "" if low is None or high is None else f"{percent(low)} to {percent(high)}"


def duration(seconds: float) -> str:
    """Format a duration with up to three digits: ``320 ms``, ``2.4 s``, ``12 min``, ``5.2 years``."""
    for below, unit_s, name in _DURATIONS:
        if seconds < below:
            return f"{_three_digits(seconds / unit_s)} {name}" if seconds else "0 s"
    return f"{_three_digits(seconds / _YEAR_S)} years"


def _three_digits(value: float) -> str:
    text = f"{value:,.{2 if value < 10 else 1 if value < 100 else 0}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def unbroken(text: str) -> str:
    """Use no-break spaces before units and inside ranges: ``64 GiB``, ``27.3% to 35.2%``."""
    return _UNBROKEN.sub(NO_BREAK, text)


def as_json(value: object) -> bytes:
    """Encode as indented JSON with a line end."""
    return msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n"


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Base class of reports. The fields are the keys of the JSON object."""

    def to_json(self) -> bytes:
        """Encode as one indented JSON object."""
        return as_json(self)
