"""Source: prompts as token ids, one JSON object per line."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, ClassVar

import msgspec

from kvoffload.core.hints import NO_HINTS, Hints
from kvoffload.traces.conversion.pace import PacedSource
from kvoffload.traces.conversion.source import Given, Request
from kvoffload.traces.conversion.times import seconds_of
from kvoffload.traces.conversion.tokens import blocks_of
from kvoffload.traces.lines import BadLineError, decoded
from kvoffload.traces.named_sessions import NamedSessions, SessionNames

_Token = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
_PROMPTS = ("prompt_token_ids", "token_ids", "input_ids", "tokens")


class _Line(SessionNames, kw_only=True):
    prompt_token_ids: list[_Token] | None = None
    token_ids: list[_Token] | None = None
    input_ids: list[_Token] | None = None
    tokens: list[_Token] | None = None
    output_token_ids: list[_Token] | None = None
    output_length: Annotated[int, msgspec.Meta(ge=0)] | None = None
    timestamp: Any = None
    cache_salt: str | None = None


_decode = msgspec.json.Decoder(_Line).decode


class TokenIds(PacedSource):
    """Lines with `prompt_token_ids` (or `token_ids`, `input_ids`, `tokens`), each an independent request.

    Optional fields: `timestamp` (seconds or ISO 8601), `output_length` or `output_token_ids`, a session
    (`NamedSessions`), and vLLM's `cache_salt`. Requests with different salts share no blocks.
    """

    name = "token_ids"
    block_tokens: ClassVar[int | None] = 16

    def __init__(self, given: Given) -> None:
        super().__init__(given)
        self._sessions = NamedSessions()

    @classmethod
    def recognises(cls, names: frozenset[str]) -> bool:
        return bool(names & set(_PROMPTS))

    def has_time(self, record: bytes) -> bool:
        return decoded(_decode, record).timestamp is not None

    def read(self, record: bytes) -> Iterable[Request]:
        line = decoded(_decode, record)
        prompt = next((ids for name in _PROMPTS if (ids := getattr(line, name)) is not None), None)
        if prompt is None:
            raise BadLineError(f"field {_PROMPTS[0]}: missing")
        output = line.output_length if line.output_length is not None else len(line.output_token_ids or ())
        contents = blocks_of(prompt, self.given.block_size.tokens)
        time_s = None if line.timestamp is None else seconds_of("timestamp", line.timestamp)
        keys, salt = self.given.keys, line.cache_salt or ""
        root = keys.root(salt)
        request = Request(
            time_s or 0.0, len(prompt), output, keys.after(root, contents)[len(root) :],
            Hints(tenant=keys.name(salt)) if salt else NO_HINTS,
            session=keys.name(self._sessions.of(line)),
        )  # fmt: skip
        return self.arriving(time_s, [request])
