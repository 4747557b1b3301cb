"""Source: Qwen-Bailian's anonymised recordings.

Their blocks have 16 tokens, and their times are in seconds.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, ClassVar

import msgspec

from kvoffload.traces.conversion.source import Given, Request, Source
from kvoffload.traces.lines import decoded
from kvoffload.traces.named_sessions import NamedSessions, SessionNames

_Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class _Line(SessionNames, kw_only=True):
    timestamp: Annotated[float, msgspec.Meta(ge=0, lt=2**53)]
    input_length: _Count
    output_length: _Count
    hash_ids: list[int | str]


_decode = msgspec.json.Decoder(_Line).decode


class Bailian(Source):
    """Lines with `chat_id`, `parent_chat_id`, `timestamp`, `input_length`, `output_length`, `type`, `turn`,
    `hash_ids`. A session consists of a chat without a parent and of all chats that descend from it."""

    name = "bailian"
    block_tokens: ClassVar[int | None] = 16
    has_ids: ClassVar[bool] = True

    def __init__(self, given: Given) -> None:
        super().__init__(given)
        self._sessions = NamedSessions()

    @classmethod
    def recognises(cls, names: frozenset[str]) -> bool:
        return {"chat_id", "hash_ids"} <= names

    def read(self, record: bytes) -> Iterable[Request]:
        line = decoded(_decode, record)
        blocks = self.given.block_size.full_blocks(line.input_length, len(line.hash_ids))
        ids = self.given.keys.of(line.hash_ids[:blocks])
        session = self.given.keys.name(self._sessions.of(line))
        return [
            Request(line.timestamp, line.input_length, line.output_length, ids, session=session),
        ]
