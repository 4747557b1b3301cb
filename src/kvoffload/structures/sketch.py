"""A count-min sketch with aging, which estimates how often keys were used recently. Knows hashes, not keys.

Source: Cormode and Muthukrishnan, "An Improved Data Stream Summary: The Count-Min Sketch and its
Applications", J. Algorithms 55(1), 2005; with the aging of Einziger, Friedman and Manes, "TinyLFU: A Highly
Efficient Cache Admission Policy", ACM Transactions on Storage 13(4), 2017.
"""

from __future__ import annotations

import numpy as np

from kvoffload.structures.jit import U64Array, inline, prefetch
from kvoffload.structures.structs import Struct

MAX_COUNT = 15
LINE_WORDS = 8
ROWS = 4
COUNTERS_PER_KEY = 16
SAMPLE_PER_KEY = 10


class FrequencySketch(Struct):
    """Estimates how often each key was referenced recently, up to 15 times.

    An estimate covers about the last `sample` references, because old counts fade: all counts are halved
    after `sample` references, and then again after every ``sample / 2`` references. So that no call pays for
    the whole table, each of the following references halves the counts in one cache line. Different keys may
    share counters, so an estimate may be too high. Until the first halving, no estimate is too low, except
    that counts stop at 15.

    All four counters of a key are in one cache line, so a key costs one cache miss. A reference increments a
    counter only if the counter equals the estimate (conservative update), which reduces overestimates.
    TinyLFU's doorkeeper (a Bloom filter for first uses) is left out, because it would need more memory than
    the counters, and collisions cost little: with four times as many counters, the hit ratio of W-TinyLFU
    would be only 0.4 to 0.6 percentage points higher (on a recorded chat, with caches of 5,000 and 10,000
    blocks).

    Memory: 64 bits for each key of `capacity`.

    Attributes:
        table: uint64 words. A word holds sixteen 4-bit counters. Eight words are one cache line.
        additions: number of references counted so far. It is halved whenever a halving of all counts begins.
        sample: value of `additions` at which all counts are halved.
        sweep: number of the cache line whose counts are halved next.
    """

    table: U64Array
    additions: int
    sweep: int
    sample: int

    def __init__(self, capacity: int) -> None:
        num_lines = -(-capacity * COUNTERS_PER_KEY // (16 * LINE_WORDS))
        raw = np.zeros((num_lines + 1) * LINE_WORDS, np.uint64)
        start = -raw.ctypes.data % 64 // 8
        super().__init__(table=raw[start : start + num_lines * LINE_WORDS], sample=SAMPLE_PER_KEY * capacity)
        self.clear()

    def clear(self) -> None:
        """Forget every count. Cost: O(capacity)."""
        self.table.fill(0)
        self.additions = 0
        self.sweep = len(self.table) // LINE_WORDS


@inline
def line_of(table: U64Array, h: np.uint64) -> int:
    """Return the index in `table` at which the cache line of the key with hash `h` begins."""
    lines = np.uint64(table.shape[0] // LINE_WORDS)
    return np.int64(((h >> np.uint64(32)) * lines) >> np.uint64(32)) * LINE_WORDS


@inline
def prefetch_count(sketch: FrequencySketch, h: np.uint64) -> None:
    """Prefetch the cache line with the counters of the key with hash `h`."""
    prefetch(sketch.table, line_of(sketch.table, h))


@inline
def _word(line: int, h: np.uint64, row: int) -> int:
    """Return the index in `table` of the word with the key's counter number `row`.

    `h` is the hash of the key, and `line` is the result of `line_of`.
    """
    return line + 2 * row + np.int64((h >> np.uint64(5 * row + 4)) & np.uint64(1))


@inline
def _shift(h: np.uint64, row: int) -> np.uint64:
    """Return the first bit of a key's counter within the 64-bit word that contains the counter (`_word`): a
    multiple of 4 from 0 to 60."""
    return ((h >> np.uint64(5 * row)) & np.uint64(15)) << np.uint64(2)


@inline
def estimate(sketch: FrequencySketch, h: np.uint64) -> int:
    """Estimate the recent references to the key with hash `h`: 0 to 15. Collisions may raise the result."""
    table = sketch.table
    line = line_of(table, h)
    lowest = MAX_COUNT
    for row in range(ROWS):
        count = np.int64((table[_word(line, h, row)] >> _shift(h, row)) & np.uint64(MAX_COUNT))
        lowest = min(lowest, count)
    return lowest


@inline
def add(sketch: FrequencySketch, h: np.uint64) -> None:
    """Count a reference to the key with hash `h`."""
    table = sketch.table
    line = line_of(table, h)
    lowest = estimate(sketch, h)
    if lowest < MAX_COUNT:
        for row in range(ROWS):
            word, shift = _word(line, h, row), _shift(h, row)
            if np.int64((table[word] >> shift) & np.uint64(MAX_COUNT)) == lowest:
                table[word] += np.uint64(1) << shift
    sketch.additions += 1
    if sketch.additions >= sketch.sample:
        sketch.additions //= 2
        sketch.sweep = 0
    first = sketch.sweep * LINE_WORDS
    if first < table.shape[0]:
        # The shift moves a bit of each counter into its neighbour. The mask clears this bit.
        for word in range(first, first + LINE_WORDS):
            table[word] = (table[word] >> np.uint64(1)) & np.uint64(0x7777777777777777)
        sketch.sweep += 1
