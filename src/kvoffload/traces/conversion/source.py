"""What a kind of source is, and which one a file has."""

from __future__ import annotations

import itertools
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
from kvoffload.traces.compressed import STDIN
from kvoffload.traces.conversion.json_elements import elements, is_array
from kvoffload.traces.conversion.keys import BlockId, Keys
from kvoffload.traces.conversion.tokens import Tokens
from kvoffload.traces.lines import numbered_lines


@dataclass(frozen=True)
class Request:
    """One request of a trace.

    Attributes:
        time_s: arrival, from any zero that all requests of a source share.
        ids: of the full blocks of its prompt.
    """

    time_s: float
    input_tokens: int
    output_tokens: int
    ids: list[BlockId]
    hints: Hints = NO_HINTS


@dataclass(frozen=True)
class Given:
    """What a source is given besides its records.

    Attributes:
        keys: make the ids of blocks.
        block_size: of the trace.
        tokens: of text; refuses where there is no tokenizer.
        header: of the recording, if it is a trace of ours.
    """

    keys: Keys
    block_size: BlockSize
    tokens: Tokens
    header: Header


class Source(ABC):
    """Reads one kind of recordings, a record at a time. Its memory does not grow with their number.

    A kind is a file in `sources` with a class derived from this one. Public attributes with a default are its
    parameters: ``kv_events,gap_s=5``. One object reads one recording.

    Attributes:
        name: what users call it.
        block_tokens: of the trace, where nobody says otherwise; None takes 512.
        has_ids: its records have ids of blocks, so that the size of a block is theirs, and ids can be kept.
    """

    name: ClassVar[str]
    block_tokens: ClassVar[int | None] = None
    has_ids: ClassVar[bool] = False

    def __init__(self, given: Given) -> None:
        self.given = given

    @classmethod
    @abstractmethod
    def recognises(cls, names: frozenset[str]) -> bool:
        """Whether a recording is of this kind, by fields of its first record or columns of its table."""

    def records(
        self, place: str, progress: Callable[[float], None] | None = None
    ) -> Iterator[tuple[int, bytes]]:
        """The records, numbered from 1: the lines. Raises `TraceError` for what cannot be read."""
        return numbered_lines(Path(place), progress)

    @abstractmethod
    def read(self, record: bytes) -> Iterable[Request]:
        """Requests that are known now; in the order of arrival, over all calls.

        Raises: `BadLineError` that names the field, and then nothing has changed; `ConfigError` for a
        parameter without which the record means nothing.
        """

    def rest(self) -> Iterable[Request]:
        """The requests that are left when there are no more records."""
        return ()

    @property
    def assumed(self) -> str:
        """What is assumed because the source does not tell, as a part of a file's name; known after the first
        request."""
        return ""

    def remarks(self) -> list[str]:
        """What a person should know of the result, after all records."""
        return []


SOURCES: Registry[Source] = Registry("from", Source, "kvoffload.traces.conversion.sources")


def kind_of(path: Path) -> type[Source]:
    """The kind of a recording, by its first record. Raises `ConfigError` if none is, `TraceError`."""
    allowed = f"allowed: {', '.join(SOURCES.names())}"
    if path == STDIN:
        raise ConfigError("from", None, f"standard input is not looked into; {allowed}")
    names = names_in(path)
    for name in SOURCES.names():
        found = SOURCES.find(name)
        if found.recognises(names):
            return found
    seen = f"its first record has {', '.join(sorted(names)[:12]) or 'no fields'}"
    raise ConfigError("from", None, f"what {path.name} is cannot be told: {seen}; {allowed}")


def names_in(path: Path) -> frozenset[str]:
    """Fields of the first record: an object, alone on its line or in an array, or the head of a table."""
    if is_array(path):
        first = next(itertools.chain((text for _, text in elements(path)), (b"",)))
    else:
        first = next(itertools.chain((text for _, text in numbered_lines(path)), (b"",)))
    try:
        found = json.loads(first)
    except ValueError:
        return frozenset(
            name.strip().strip('"').lower() for name in first.decode(errors="replace").split(",")
        )
    if isinstance(found, list):
        # A batch of KV events, as vLLM encodes it.
        return frozenset({"ts", "events"}) if len(found) > 1 and isinstance(found[1], list) else frozenset()
    return frozenset(found) if isinstance(found, dict) else frozenset()
