"""Mooncake's JSONL, and our own: to hide its ids, or to give it a header."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import ClassVar

from kvoffload.traces.block_size import Header, header_in
from kvoffload.traces.conversion.source import Given, Request, Source
from kvoffload.traces.formats.mooncake import decode_line
from kvoffload.traces.lines import BadLineError


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

    @property
    def assumed(self) -> str:
        """What had been assumed of it before."""
        return self.given.header.assumed

    def read(self, record: bytes) -> Iterable[Request]:
        """One line is one request."""
        if (header := header_in(record)) is not None:
            self._compare(header)
            return []
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

    def _compare(self, header: Header) -> None:
        """A header says what is known, and what the header of the trace will say: it is written first."""
        for name in ("block_tokens", "assumed", "in_order"):
            said, known = getattr(header, name), getattr(self.given.header, name)
            if said != known:
                why = "; --block-tokens must say it" if name == "block_tokens" else ""
                raise BadLineError(f"field {name}: {said!r}, but so far {known!r}{why}")
