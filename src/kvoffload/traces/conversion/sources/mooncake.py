"""Source: traces of Mooncake or kvoffload, to hash their ids or to add a header."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import ClassVar

from kvoffload.errors import ConfigError
from kvoffload.traces.block_size import Header, header_in
from kvoffload.traces.conversion.source import Given, Request, Source
from kvoffload.traces.formats.mooncake import decode_line
from kvoffload.traces.lines import BadLineError
from kvoffload.traces.named_sessions import NamedSessions
from kvoffload.traces.trace import MILLISECONDS, SECONDS


class Mooncake(Source):
    """Lines with `timestamp`, `input_length`, `output_length`, `hash_ids`; docs/formats.md describes them.

    The parameter `time_unit` is ``s`` if all times are in seconds. By default, times that are whole numbers
    are in milliseconds, and times with fractions are in seconds.
    """

    name = "mooncake"
    time_unit: str = ""
    has_ids: ClassVar[bool] = True

    def __init__(self, given: Given) -> None:
        super().__init__(given)
        if self.time_unit not in ("", SECONDS, MILLISECONDS):
            raise ConfigError("time_unit", self.time_unit, f"allowed: {SECONDS}, {MILLISECONDS}")
        self._per_second, self._has_unit = 0, bool(self.time_unit)
        self._sessions = NamedSessions()

    @classmethod
    def recognises(cls, names: frozenset[str]) -> bool:
        return "kvoffload_trace" in names or ("hash_ids" in names and "chat_id" not in names)

    @property
    def assumed(self) -> str:
        return self.given.header.assumed

    @property
    def assumes_ms(self) -> bool:
        return self._per_second == 1000 and not self._has_unit

    def remarks(self) -> list[str]:
        if not self.assumes_ms:
            return []
        remedy = "if they are in seconds, give --from mooncake,time_unit=s"
        return [f"assumed: times are in ms, because the recording does not state their unit; {remedy}"]

    def read(self, record: bytes) -> Iterable[Request]:
        if (header := header_in(record)) is not None:
            self._compare(header)
            self._has_unit |= not header.assumed_ms
            return []
        line = decode_line(record)
        unit = 1 if isinstance(line.timestamp, float) or self.time_unit == SECONDS else 1000
        if unit != (self._per_second or unit):
            # An error, because earlier lines are already written in the other unit.
            remedy = "if all are seconds, give --from mooncake,time_unit=s"
            raise BadLineError(
                f"field timestamp: {line.timestamp}: some times are seconds, some are ms; {remedy}"
            )
        blocks = self.given.block_size.full_blocks(line.input_length, len(line.hash_ids))
        self._per_second = unit
        hints = line.hints
        if hints.tenant:
            hints = replace(hints, tenant=self.given.keys.name(hints.tenant))
        ids = self.given.keys.of(line.hash_ids[:blocks])
        session = self.given.keys.name(self._sessions.of(line))
        time_s, served = line.timestamp / unit, line.served_tokens
        return [Request(time_s, line.input_length, line.output_length, ids, hints, session, served)]

    def _compare(self, header: Header) -> None:
        """Raise `BadLineError` if a later header differs from the file's first header."""
        for name in ("block_tokens", "assumed", "in_order"):
            value, first = getattr(header, name), getattr(self.given.header, name)
            if value != first:
                remedy = "; give --block-tokens" if name == "block_tokens" else ""
                raise BadLineError(f"field {name}: {value!r}, but {first!r} before{remedy}")
