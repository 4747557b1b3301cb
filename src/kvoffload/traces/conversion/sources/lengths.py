"""Source: tables of prompt and answer lengths, such as the CSV files of Azure and BurstGPT. They do not show
which prefixes requests share, so this must be assumed.
"""

from __future__ import annotations

import csv
from bisect import bisect_right, insort
from collections import OrderedDict
from collections.abc import Iterable
from typing import ClassVar, Literal

from kvoffload.errors import ConfigError
from kvoffload.settings.read import Positive
from kvoffload.traces.conversion.source import Given, Missing, Request, Source
from kvoffload.traces.conversion.times import seconds_of
from kvoffload.traces.lines import BadLineError

_TIME = ("timestamp", "arrival_timestamp", "arrived_at", "time")
_INPUT = ("contexttokens", "request tokens", "input_length", "prompt_tokens", "input_tokens")
_OUTPUT = ("generatedtokens", "response tokens", "output_length", "completion_tokens", "output_tokens")
_SESSION = ("session id", "session_id", "sessionid", "conversation_id")
_MOST_TOKENS = 2**31


class Lengths(Source):
    """A table with columns for time, prompt tokens and generated tokens.

    The parameter `reuse` determines which prefixes requests are assumed to share:

    - `none`: prompts share nothing. This gives the lower bound of reuse.
    - `continued`: each prompt continues a *context*, which is the prompt and the answer of an earlier
      request. The prompt continues the longest context that is not longer than the prompt, was used in the
      last `within_s` seconds, and was not continued by another request. This gives nearly the upper bound.
    - `sessions`: requests with the same session id form one conversation, if the gaps between them are below
      `within_s` seconds. If a prompt is shorter than the conversation's context, it starts a new context.
      Requests without a session id share nothing.
    """

    name = "lengths"
    block_tokens: ClassVar[int | None] = 16
    reuse: Literal["", "none", "continued", "sessions"] = ""
    within_s: Positive = 600.0

    def __init__(self, given: Given) -> None:
        super().__init__(given)
        self._columns: dict[str, int] = {}
        self._num_contexts = 0
        # Contexts that a request may continue, by name. For `continued` they are also sorted by length.
        self._open: OrderedDict[object, tuple[float, int, int]] = OrderedDict()
        self._by_tokens: list[tuple[int, int]] = []
        self._ids: dict[int, list[int | str]] = {}

    @classmethod
    def recognises(cls, names: frozenset[str]) -> bool:
        return bool(names & set(_INPUT)) and bool(names & set(_OUTPUT)) and "hash_ids" not in names

    @property
    def assumed(self) -> str:
        return {
            "none": "none-shared",
            "continued": f"continued-within-{self.within_s:g}s",
            "sessions": f"sessions-within-{self.within_s:g}s",
        }[self.reuse]

    def missing(self, record: bytes) -> list[Missing]:
        if self.reuse:
            return []
        names = {name.strip().strip('"').lower() for name in record.decode(errors="replace").split(",")}
        example = "reuse=sessions" if names & set(_SESSION) else "reuse=none"
        return [Missing(self._no_reuse(), "--from", example)]

    def _no_reuse(self) -> ConfigError:
        return ConfigError(
            "from",
            self.name,
            "lengths do not show shared prefixes: choose an assumption; allowed: lengths:none (nothing "
            "is shared), lengths:continued (a prompt continues the longest context that fits), "
            "lengths:sessions (by the column of session ids)",
        )

    def read(self, record: bytes) -> Iterable[Request]:
        try:
            row = next(csv.reader([record.decode()]))
        except (UnicodeDecodeError, csv.Error) as error:
            raise BadLineError(f"line: not a row of a table ({error})") from None
        if not self._columns:
            self._begin([name.strip().lower() for name in row])
            return []
        time_s = seconds_of("timestamp", self._text(row, "time"))
        input_tokens, output_tokens = self._count(row, "input"), self._count(row, "output")
        session = self._text(row, "session") if "session" in self._columns else ""
        context = self._context(time_s, input_tokens, session)
        ids = self._blocks(context, input_tokens)
        self._keep(context, time_s, input_tokens + output_tokens, session)
        return [Request(time_s, input_tokens, output_tokens, ids, session=self.given.keys.name(session))]

    def _begin(self, head: list[str]) -> None:
        columns: dict[str, int] = {}
        for column, names in (("time", _TIME), ("input", _INPUT), ("output", _OUTPUT), ("session", _SESSION)):
            place = next((head.index(name) for name in names if name in head), None)
            if place is not None:
                columns[column] = place
            elif column != "session":
                raise BadLineError(f"column {column}: missing; allowed: {', '.join(names)}")
        if not self.reuse:
            raise self._no_reuse()
        if self.reuse == "sessions" and "session" not in columns:
            raise ConfigError("from", f"{self.name}:{self.reuse}", "the table has no column of session ids")
        self._columns = columns

    def _text(self, row: list[str], column: str) -> str:
        place = self._columns[column]
        if place >= len(row):
            raise BadLineError(f"column {column}: missing")
        return row[place].strip()

    def _count(self, row: list[str], column: str) -> int:
        text = self._text(row, column)
        try:
            count = int(float(text))
        except (ValueError, OverflowError):
            count = -1
        if not 0 <= count <= _MOST_TOKENS:
            raise BadLineError(f"column {column}: {text!r} is not a number of tokens")
        return count

    def _context(self, time_s: float, input_tokens: int, session: str) -> int:
        """Return the number of the context that this request continues; if there is none, begin a new one."""
        self._close_before(time_s - self.within_s)
        name: object = None
        if self.reuse == "sessions":
            name = session or None  # A request without an id is no turn of a session.
        elif self.reuse == "continued":
            place = bisect_right(self._by_tokens, (input_tokens, 2**62))
            name = self._by_tokens[place - 1][1] if place else None
        _, tokens, context = self._open.get(name, (0.0, 0, -1))
        if name is not None and context >= 0:
            self._forget(name)
            if tokens <= input_tokens:
                return context
            self._ids.pop(context, None)
        self._num_contexts += 1
        return self._num_contexts

    def _keep(self, context: int, time_s: float, tokens: int, session: str) -> None:
        name: object = session if self.reuse == "sessions" else context
        if self.reuse == "none" or name == "":
            self._ids.pop(context, None)
            return
        self._open[name] = (time_s, tokens, context)
        if self.reuse == "continued":
            insort(self._by_tokens, (tokens, context))

    def _close_before(self, time_s: float) -> None:
        while self._open and (name := next(iter(self._open))) is not None:
            last_s, _, context = self._open[name]
            if last_s >= time_s:
                return
            self._forget(name)
            self._ids.pop(context, None)

    def _forget(self, name: object) -> None:
        _, tokens, context = self._open.pop(name)
        if self.reuse == "continued":
            del self._by_tokens[bisect_right(self._by_tokens, (tokens, context)) - 1]

    def _blocks(self, context: int, input_tokens: int) -> list[int | str]:
        blocks = input_tokens // self.given.block_size.tokens
        ids = self._ids.get(context, [])
        if len(ids) < blocks:
            contents = (f"{context}:{number}".encode() for number in range(len(ids), blocks))
            ids = self.given.keys.after(ids, contents)
        if self.reuse != "none":
            self._ids[context] = ids
        return ids[:blocks]
