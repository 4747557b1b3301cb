"""The contract of a source, and the detection of a file's kind. A source reads one kind of recordings."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from kvoffload.core.hints import NO_HINTS, Hints
from kvoffload.errors import ConfigError
from kvoffload.settings.registry import Registry
from kvoffload.traces.block_size import BlockSize, Header
from kvoffload.traces.compressed import STDIN, is_stream
from kvoffload.traces.conversion.block_ids import BlockId, Keys
from kvoffload.traces.conversion.json_elements import records
from kvoffload.traces.conversion.tokens import Tokens
from kvoffload.traces.lines import numbered_lines


@dataclass(frozen=True)
class Request:
    """A request of a trace.

    Attributes:
        time_s: arrival time in seconds, since a point in time that is the same for all requests of a source.
        ids: ids of the full blocks of the prompt.
        session: name of the session, from `Keys.name`; empty if the recording does not name it.
        served_tokens: for each cache of the recorded server (such as ``gpu``), how many prompt tokens it
            served; None if unknown.
    """

    time_s: float
    input_tokens: int
    output_tokens: int
    ids: list[BlockId]
    hints: Hints = NO_HINTS
    session: str = ""
    served_tokens: dict[str, int] | None = None


@dataclass(frozen=True)
class Given:
    """Objects and settings that `convert` gives to a source.

    Attributes:
        keys: computes the ids of blocks.
        block_size: block size of the trace.
        tokens: the tokenizer. If the user gave no tokenizer, its use raises `ConfigError`.
        header: header of the recording, or the default header.
    """

    keys: Keys
    block_size: BlockSize
    tokens: Tokens
    header: Header


@dataclass(frozen=True)
class Missing:
    """A required option that was not given.

    Attributes:
        problem: the error for the user.
        flag: the option, such as ``--tokenizer``; empty for the output.
        example: a valid value of the option. For ``--from`` it is a parameter of the source, such as
            ``per_minute=60``.
    """

    problem: ConfigError
    flag: str
    example: str


class Source(ABC):
    """Reader of one recording format. Converts a recording to the requests of a trace, record by record.

    The package `sources` has a subclass for each format. Users set a subclass's public attributes as
    parameters of the format: ``kv_events,gap_s=5`` sets `gap_s`. The memory of a source does not depend on
    the number of records.

    Attributes:
        name: the format's name in ``--from``.
        block_tokens: default number of tokens per block of the trace; None means 512.
        has_ids: True if the records contain block ids. The trace then has the records' block size, and can
            keep their ids.
    """

    name: ClassVar[str]
    block_tokens: ClassVar[int | None] = None
    has_ids: ClassVar[bool] = False

    def __init__(self, given: Given) -> None:
        self.given = given

    @classmethod
    @abstractmethod
    def recognises(cls, names: frozenset[str]) -> bool:
        """Return True if this source can read recordings whose first record has these fields or columns."""

    def records(
        self, place: str, progress: Callable[[float], None] | None = None
    ) -> Iterator[tuple[int, bytes]]:
        """Yield the records (by default the lines), numbered from 1. Raises `TraceError`."""
        return numbered_lines(Path(place), progress)

    def missing(self, record: bytes) -> list[Missing]:
        """Return the required options that are missing, given the first record.

        If the record is unreadable, returns an empty list. Raises nothing.
        """
        return []

    @abstractmethod
    def read(self, record: bytes) -> Iterable[Request]:
        """Return the requests that this record completes, in the order of the recording.

        Raises:
            BadLineError: a field is wrong; the state is unchanged.
            ConfigError: a required parameter is missing.
        """

    def rest(self) -> Iterable[Request]:
        """Return the remaining requests after the last record."""
        return ()

    @property
    def assumed(self) -> str:
        """The assumption that replaces data that the recording lacks; empty if nothing is assumed.

        Valid after the first request.
        """
        return ""

    @property
    def assumes_ms(self) -> bool:
        """True if times are read as ms because their unit is not stated. Valid after the first request."""
        return False

    def remarks(self) -> list[str]:
        """Return notes for the user about the result. Called after the last record."""
        return []


SOURCES: Registry[Source] = Registry("from", Source, "kvoffload.traces.conversion.sources")


_LEVELS = ("debug ", "info ", "warning ", "error ", "(apiserver", "(enginecore")
"""Texts with which a line of vLLM's log begins, in lower case. They are log levels and process names."""


def kind_of(path: Path) -> type[Source]:
    """Detect the kind of a recording by its first record. Raises `ConfigError`, `TraceError`."""
    allowed = f"allowed: {', '.join(SOURCES.names())}"
    if is_stream(path):
        stream = "standard input" if path == STDIN else "a pipe"
        raise ConfigError("from", None, f"the format of {stream} cannot be detected; {allowed}")
    fields = fields_of_first_record(path)
    for name in SOURCES.names():
        kind = SOURCES.find(name)
        if kind.recognises(fields):
            return kind
    if any(field.startswith(_LEVELS) for field in fields):
        why = "it is a server's text log, which lacks the prompts. Record an engine with kvoffload's option"
        why += " `record` (docs/vllm.md), or convert a log of requests with their messages or token ids"
        raise ConfigError("from", None, f"{path.name}: {why}")
    listed = f"the first record has {', '.join(sorted(fields)[:12]) or 'no fields'}"
    raise ConfigError("from", None, f"the format of {path.name} is not recognised: {listed}; {allowed}")


def fields_of_first_record(path: Path) -> frozenset[str]:
    """Return the fields of the first JSON object, or the columns of a table."""
    first = next((text for _, text in records(path)), b"")
    try:
        record = json.loads(first)
    except ValueError:
        return frozenset(
            name.strip().strip('"').lower() for name in first.decode(errors="replace").split(",")
        )
    if isinstance(record, list):
        # An array is a batch of KV events in vLLM's encoding.
        return frozenset({"ts", "events"}) if len(record) > 1 and isinstance(record[1], list) else frozenset()
    return frozenset(record) if isinstance(record, dict) else frozenset()
