"""Reader of the Prometheus text format, for the metrics of a running server.

Reads samples only: types, help texts, timestamps and exemplars are skipped.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

_NUMBER = r"[-+]?(?:\d+(?:\.\d*)?(?:e[-+]?\d+)?|inf|nan)"
_VALUE = r'"((?:[^"\\]|\\.)*)"'
_PAIRS = r'(?:\w+="(?:[^"\\]|\\.)*"[ ,]*)*'
_SAMPLE = re.compile(rf"([a-z_:][\w:]*)(?:\{{({_PAIRS})\}})?[ \t]+({_NUMBER})(?:[ \t].*)?", re.IGNORECASE)
_LABEL = re.compile(rf"(\w+)={_VALUE}")
_ESCAPED = re.compile(r"\\(.)")


class Sample(NamedTuple):
    """The value of a metric with its labels."""

    name: str
    labels: Mapping[str, str]
    value: float


def samples(text: str) -> list[Sample]:
    """Return the samples of a scrape, in order. Lines that are no samples are skipped."""
    # Not `splitlines`: values of labels may contain other line separators, such as U+2028.
    matches = map(_SAMPLE.fullmatch, map(str.strip, text.split("\n")))
    return [Sample(match[1], _labels(match[2] or ""), float(match[3])) for match in matches if match]


def _labels(text: str) -> dict[str, str]:
    return {name: _ESCAPED.sub(_unescape, value) for name, value in _LABEL.findall(text)}


def _unescape(match: re.Match[str]) -> str:
    return "\n" if match[1] == "n" else match[1]


def sums(read: list[Sample]) -> dict[str, float]:
    """Return, for each metric name, the sum of the values with all labels."""
    totals: dict[str, float] = {}
    for sample in read:
        totals[sample.name] = totals.get(sample.name, 0.0) + sample.value
    return totals
