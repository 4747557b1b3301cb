"""Mooncake's JSONL, and our own: to hide its ids, or to give it a header."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

from kvoffload.traces.block_size import header_in
from kvoffload.traces.conversion.source import Given, Request, Source
from kvoffload.traces.formats.mooncake import decode_line
from kvoffload.traces.lines import BadLineError, numbered_lines


class Mooncake(Source):
    """Lines with `timestamp`, `input_length`, `output_length`, `hash_ids`, as docs/formats.md has them."""

    name = "mooncake"
    has_ids: ClassVar[bool] = True

    def __init__(self, given: Given) -> None:
        super().__init__(given)
        self._per_second = 0

    @classmethod
    def recognises(cls, names: frozenset[str]) -> bool:
        """By `hash_ids`, or our header."""
        return "kvoffload_trace" in names or ("hash_ids" in names and "chat_id" not in names)

    def records(
        self, place: str, progress: Callable[[float], None] | None = None
    ) -> Iterator[tuple[int, bytes]]:
        """The lines. Headers come through `Given`, and are left out."""
        for number, text in numbered_lines(Path(place), progress):
            if header_in(text) is None:
                yield number, text

    def read(self, record: bytes) -> Iterable[Request]:
        """One line is one request."""
        line = decode_line(record)
        unit = 1 if isinstance(line.timestamp, float) else 1000
        if unit != (self._per_second or unit):
            # A reader of a whole file knows better; here the lines before have been written.
            raise BadLineError(f"field timestamp: {line.timestamp}: some times are seconds, some are ms")
        blocks = self.given.block_size.full_blocks(line.input_length, len(line.hash_ids))
        self._per_second = unit
        hints = line.hints
        if hints.tenant:
            hints = replace(hints, tenant=self.given.keys.name(hints.tenant))
        ids = self.given.keys.of(line.hash_ids[:blocks])
        return [Request(line.timestamp / unit, line.input_length, line.output_length, ids, hints)]
