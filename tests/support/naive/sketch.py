"""The twin of the frequency sketch."""

from __future__ import annotations

import sys

from kvoffload.structures.sketch import COUNTERS_PER_KEY, MAX_COUNT, ROWS, SAMPLE_PER_KEY

COUNTERS_PER_LINE = 128
COUNTERS_PER_ROW = COUNTERS_PER_LINE // ROWS
_64_BITS = 2**64 - 1


class NaiveSketch:
    """Twin of `structures.sketch.FrequencySketch`: four rows of counters in every line, as Python ints.

    Attributes:
        lines: ``lines[line][row][counter]``.
        additions: references since the last halving.
        to_halve: the lines that are still to be halved, in order.
    """

    def __init__(self, capacity: int) -> None:
        self.num_lines = -(-capacity * COUNTERS_PER_KEY // COUNTERS_PER_LINE)
        self.sample = SAMPLE_PER_KEY * capacity
        self.clear()

    def clear(self) -> None:
        """Forget every count."""
        self.lines = [[[0] * COUNTERS_PER_ROW for _ in range(ROWS)] for _ in range(self.num_lines)]
        self.additions = 0
        self.to_halve: list[int] = []

    def estimate(self, key: bytes) -> int:
        """Return the estimated recent uses of `key`."""
        line, places = self._places(key)
        return min(line[row][place] for row, place in enumerate(places))

    def add(self, key: bytes) -> None:
        """Count a reference to `key`."""
        line, places = self._places(key)
        lowest = self.estimate(key)
        for row, place in enumerate(places):
            if line[row][place] == lowest < MAX_COUNT:
                line[row][place] += 1
        self.additions += 1
        if self.additions >= self.sample:
            self.additions //= 2
            self.to_halve = list(range(self.num_lines))
        if self.to_halve:
            number = self.to_halve.pop(0)
            self.lines[number] = [[count // 2 for count in row] for row in self.lines[number]]

    def _places(self, key: bytes) -> tuple[list[list[int]], list[int]]:
        """Return the key's line, and its counter in each row."""
        h = hash_of(key)
        line = self.lines[(h >> 32) * self.num_lines >> 32]
        return line, [h >> 5 * row & COUNTERS_PER_ROW - 1 for row in range(ROWS)]


def hash_of(key: bytes) -> int:
    """Twin of `structures.index.hash_row`."""
    h = 0x9E3779B97F4A7C15
    for start in range(0, len(key), 8):
        word = int.from_bytes(key[start : start + 8].ljust(8, b"\0"), sys.byteorder)
        h = (h ^ word) * 0xFF51AFD7ED558CCD & _64_BITS
        h ^= h >> 32
    h = h * 0xC4CEB9FE1A85EC53 & _64_BITS
    return h ^ h >> 29
