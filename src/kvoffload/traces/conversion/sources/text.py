"""Source: prompts and conversations in text, as in ShareGPT, OpenAI's `messages`, and request logs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from kvoffload.core.hints import Hints
from kvoffload.traces.conversion.json_elements import records
from kvoffload.traces.conversion.pace import PacedSource
from kvoffload.traces.conversion.source import Given, Missing, Request
from kvoffload.traces.conversion.times import seconds_of
from kvoffload.traces.conversion.tokens import blocks_of
from kvoffload.traces.lines import BadLineError, decoded
from kvoffload.traces.named_sessions import SESSION_FIELDS, first_name

_CONVERSATION = ("conversations", "conversation", "messages")
_TIMES = ("timestamp", "time", "created", "created_at", "@timestamp")
_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
}
"""OpenAI's name of a role, by ShareGPT's name."""
_ANSWERS = ("completion", "response", "answer", "output")

_decode = msgspec.json.Decoder(dict[str, Any]).decode


class Text(PacedSource):
    """A JSON array or JSON lines. A record with a time or a `body` is one request.

    Every other record with messages is a conversation, which becomes one session with a request for each
    answer. A record that is one request may name its session (`SESSION_FIELDS`, in the record or in `body`).

    Each message is tokenized separately in the frame ``<|im_start|>role\\n...<|im_end|>\\n``, so that a turn
    begins with all tokens of the previous turn. The model's own chat template may differ by a few tokens per
    message. If a record has a `prompt` instead of messages, the prompt has no frame.
    """

    name = "text"
    block_tokens: ClassVar[int | None] = 16

    def __init__(self, given: Given) -> None:
        super().__init__(given)
        self._num_conversations = 0

    @classmethod
    def recognises(cls, names: frozenset[str]) -> bool:
        return bool(names & {*_CONVERSATION, "prompt", "body"}) and "hash_ids" not in names

    def records(
        self, place: str, progress: Callable[[float], None] | None = None
    ) -> Iterator[tuple[int, bytes]]:
        return records(Path(place), progress)

    def has_time(self, record: bytes) -> bool:
        fields = decoded(_decode, record)
        return any(fields.get(name) is not None for name in _TIMES)

    def missing(self, record: bytes) -> list[Missing]:
        tokens = self.given.tokens
        no_tokenizer = [] if tokens.is_given else [Missing(tokens.missing(), "--tokenizer", "tokenizer.json")]
        return no_tokenizer + super().missing(record)

    def read(self, record: bytes) -> Iterable[Request]:
        fields = decoded(_decode, record)
        body = fields.get("body")
        if isinstance(body, str):
            body = decoded(_decode, body.encode())
        is_request = isinstance(body, dict)
        text: Mapping[str, Any] = body if isinstance(body, dict) else fields
        named = next((name for name in _TIMES if fields.get(name) is not None), None)
        time_s = None if named is None else seconds_of(named, fields[named])
        session = first_name(*(place.get(field) for field in SESSION_FIELDS for place in (fields, text)))
        if isinstance(text.get("prompt"), str):
            turns = [self._request(self.given.tokens.of(text["prompt"]), fields)]
        elif is_request or time_s is not None:
            turns = [self._last(_messages(text), fields)]
        else:
            turns = list(self._turns(_messages(text)))
            # The name includes the record, because a number alone would occur in several files.
            session = session or f"{self._num_conversations} {record.decode()}"
            self._num_conversations += 1
        session = self.given.keys.name(session)
        return self.arriving(time_s, [replace(turn, time_s=time_s or 0.0, session=session) for turn in turns])

    def _request(self, tokens: list[int], fields: Mapping[str, Any], answer: int | None = None) -> Request:
        """Create the request of a prompt. `answer` is the number of output tokens, or None if unknown."""
        if answer is None:
            answer = self._answer_tokens(fields)
        ids = self.given.keys.after((), blocks_of(tokens, self.given.block_size.tokens))
        reason = fields.get("finish_reason")
        return Request(0.0, len(tokens), answer, ids, Hints(reason if isinstance(reason, str) else ""))

    def _last(self, messages: list[tuple[str, str]], fields: Mapping[str, Any]) -> Request:
        """Create one request from all messages. If the last message is the assistant's, it is the answer."""
        answer = None
        if messages[-1][0] == "assistant":
            answer = len(self._closed(messages.pop()[1]))
        tokens: list[int] = []
        for role, text in messages:
            tokens += [*self._opening(role), *self._closed(text)]
        return self._request(tokens + self._opening("assistant"), fields, answer)

    def _turns(self, messages: list[tuple[str, str]]) -> Iterator[Request]:
        """Yield a request for each answer, and a last request if messages follow the last answer."""
        size, tokens = self.given.block_size.tokens, list[int]()
        ids: list[int | str] = []
        for number, (role, text) in enumerate(messages):
            tokens += self._opening(role)
            if role == "assistant":
                ids = self.given.keys.after(ids, blocks_of(tokens, size, len(ids)))
                answer = self._closed(text)
                yield Request(0.0, len(tokens), len(answer), ids)
                tokens += answer
                continue
            tokens += self._closed(text)
            if number == len(messages) - 1:
                tokens += self._opening("assistant")
                yield Request(
                    0.0, len(tokens), 0, self.given.keys.after(ids, blocks_of(tokens, size, len(ids)))
                )

    def _opening(self, role: str) -> list[int]:
        return self.given.tokens.of(f"<|im_start|>{role}\n")

    def _closed(self, text: str) -> list[int]:
        return self.given.tokens.of(text) + self.given.tokens.of("<|im_end|>\n")

    def _answer_tokens(self, fields: Mapping[str, Any]) -> int:
        response = fields.get("response")
        places = (fields, response) if isinstance(response, dict) else (fields,)
        for place in places:
            usage = place.get("usage")
            for counts, name in ((place, "output_length"), (usage, "completion_tokens")):
                if isinstance(counts, dict) and isinstance(count := counts.get(name), int) and count >= 0:
                    return count
        text = next((fields[name] for name in _ANSWERS if isinstance(fields.get(name), str)), "")
        return len(self.given.tokens.of(text)) if text else 0


def _messages(text: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return (role, text) of each message. Raises `BadLineError`."""
    name = next((name for name in _CONVERSATION if name in text), _CONVERSATION[-1])
    listed = text.get(name)
    if not isinstance(listed, list) or not listed:
        raise BadLineError(f"field {name}: {'missing' if name not in text else 'not a list of messages'}")
    messages = []
    if isinstance(text.get("tools"), list):
        messages.append(("system", json.dumps(text["tools"], ensure_ascii=False)))
    for number, message in enumerate(listed):
        where = f"{name}[{number}]"
        if not isinstance(message, dict):
            raise BadLineError(f"field {where}: not an object")
        role = message.get("role", message.get("from"))
        if not isinstance(role, str):
            raise BadLineError(f"field {where}.role: missing")
        content = _content(where, message.get("content", message.get("value")))
        if message.get("tool_calls"):
            content += json.dumps(message["tool_calls"], ensure_ascii=False)
        messages.append((_ROLES.get(role, role), content))
    return messages


def _content(where: str, content: object) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    texts = []
    for item in content if isinstance(content, list) else [content]:
        if not isinstance(item, dict) or not isinstance(item.get("text"), str):
            kind = item.get("type") if isinstance(item, dict) else type(item).__name__
            raise BadLineError(f"field {where}.content: items of type {kind} cannot be tokenized")
        texts.append(item["text"])
    return "".join(texts)
