"""Reader and writer of Mooncake JSONL.

A line is one request: ``{"timestamp": ms, "input_length": tokens, "output_length": tokens, "hash_ids": [id,
...]}``, with optional hints: `finish_reason`, `session_over`, `priority`, `time_to_live_s`, `tenant`, and an
optional `session` (or `session_id`, `conversation_id`, `chat_id` with or without `parent_chat_id`). Other
fields and null are ignored. Only full blocks count, which have the first ``input_length // block_tokens``
ids. One more id, of a partial block, may follow. Because an id identifies a whole prefix, an id has the same
predecessor wherever it occurs. A line that breaks these rules is a bad line.

The first line may be a `Header`. Headers may also occur later, in concatenated files.

Requests are sorted by time if the lines are not in order. The logger ``kvoffload.traces`` then warns with the
number of late requests, unless a header has ``"in_order": false``.

Files of other writers are accepted, too. Ids that are strings or do not fit in 64 bits are renumbered. All
times are read as seconds if any time has a fraction, or if `load_trace` gets the `time_unit` ``s``.
"""

from __future__ import annotations

import json
import logging
import os
from array import array
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt

from kvoffload.core.hints import Hints
from kvoffload.errors import TraceError
from kvoffload.traces.block_size import DEFAULT_BLOCK_TOKENS, BlockSize, Header, header_in
from kvoffload.traces.compressed import STDIN, compressing
from kvoffload.traces.format import TraceFormat
from kvoffload.traces.lines import BadLineError, decoded, numbered_lines
from kvoffload.traces.named_sessions import NamedSessions, SessionNames
from kvoffload.traces.trace import MILLISECONDS, SECONDS, Trace, TraceHints, codes_by_appearance, offsets_of

_Int64s = npt.NDArray[np.int64]
_Int64 = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
_Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
_Time = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
_Seconds = Annotated[float, msgspec.Meta(ge=0, lt=2**53)]

_NO_PARENT = _NO_SESSION = -1
_OF_A_REQUEST = ("lengths", "line_numbers", "timestamps", "output_tokens", "input_tokens", "hints",
                 "sessions", "served")  # fmt: skip
"""Names of those attributes of `_Requests` that are lists with one entry per request."""
_LOGGER = logging.getLogger("kvoffload.traces")


class Line(SessionNames, omit_defaults=True):
    """A line of the file, which is one request."""

    timestamp: _Time | _Seconds
    input_length: _Count
    output_length: _Count
    hash_ids: list[int | str]
    finish_reason: str | None = None
    session_over: bool | None = None
    priority: _Int64 | None = None
    time_to_live_s: Annotated[float, msgspec.Meta(ge=0)] | None = None
    tenant: str | None = None
    served_tokens: dict[str, _Count] | None = None

    @classmethod
    def of(
        cls,
        time_ms: int,
        input_tokens: int,
        output_tokens: int,
        ids: list[int | str],
        hints: Hints,
        session: int | str | None = None,
        served_tokens: dict[str, int] | None = None,
    ) -> Line:
        """Create the line of a request; hints that are not set are left out."""
        return cls(
            timestamp=time_ms,
            input_length=input_tokens,
            output_length=output_tokens,
            hash_ids=ids,
            finish_reason=hints.finish_reason or None,
            session_over=hints.session_over or None,
            priority=hints.priority or None,
            time_to_live_s=hints.time_to_live_s,
            tenant=hints.tenant or None,
            session=session,
            served_tokens=served_tokens,
        )

    @property
    def hints(self) -> Hints:
        return Hints(
            self.finish_reason or "",
            self.session_over or False,
            self.priority or 0,
            self.time_to_live_s,
            self.tenant or "",
        )


_decode = msgspec.json.Decoder(Line).decode
encode_line = msgspec.json.Encoder().encode


class Mooncake(TraceFormat):
    """Mooncake's JSON lines with chained block ids."""

    name = "mooncake"
    suffixes = (".jsonl",)

    def read(
        self,
        path: Path,
        *,
        block_tokens: int | None,
        skip_bad_lines: bool,
        progress: Callable[[float], None] | None,
    ) -> Trace:
        requests = _Requests(block_tokens)
        for number, text in numbered_lines(path, progress):
            try:
                requests.add(number, text)
            except BadLineError as bad:
                if not skip_bad_lines:
                    raise TraceError(f"{path}:{number}: {bad}") from None
                requests.skipped_lines += 1
        if requests.has_unclear_ids:
            raise TraceError(
                f"{path}: field hash_ids: negative ids mixed with ids that are not 64-bit numbers"
            )
        requests = requests.in_order(path)
        try:
            block_ids, refs = requests.chained()
        except BadLineError as bad:
            if not skip_bad_lines:
                raise TraceError(f"{path}:{bad}") from None
            requests = requests.without_broken_chains()
            block_ids, refs = requests.chained()
        skipped = requests.skipped_lines
        if not requests.lengths:
            raise TraceError(f"{path}: no requests in it" + (f" ({skipped} bad lines)" if skipped else ""))
        return Trace(
            name=requests.named("stdin" if path == STDIN else path.name.split(".")[0]),
            block_tokens=requests.block_size.tokens,
            block_ids=block_ids,
            refs=refs,
            offsets=requests.offsets(),
            timestamps_ms=requests.in_ms(),
            output_tokens=_int64s(requests.output_tokens),
            skipped_lines=skipped,
            time_unit=requests.time_unit(),
            hints=TraceHints.of(requests.hints),
            prompt_tokens=requests.prompt_tokens(),
            sessions=requests.named_sessions(),
            served_tokens=requests.served_tokens(),
            assumed=requests.assumed,
        )


def decode_line(text: bytes) -> Line:
    """Decode a request; raises `BadLineError`."""
    return decoded(_decode, text)


def write_trace(trace: Trace, path: str | Path) -> None:
    """Write a trace as Mooncake JSONL. An existing file is replaced when the new file is complete.

    The file begins with a `Header`, unless blocks have 512 tokens. Equal traces give equal bytes. If
    `Trace.prompt_tokens` is None, `input_length` counts only full blocks. Raises `OSError`.
    """
    path = Path(path)
    if path.exists() and not path.is_file():  # a device or pipe, which must not be replaced
        _write_trace(trace, path, path.suffix)
        return
    path = path.resolve()  # only now, because the target of /dev/stdout may be a pipe, which has no path
    partial = path.with_name(path.name + ".part")
    try:
        _write_trace(trace, partial, path.suffix)
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def _write_trace(trace: Trace, path: Path, suffix: str) -> None:
    sessions, served = trace.sessions, trace.served_tokens
    with ExitStack() as stack:
        file = stack.enter_context(compressing(stack.enter_context(path.open("wb")), suffix))
        if trace.block_tokens != DEFAULT_BLOCK_TOKENS:
            file.write(Header(1, trace.block_tokens).line())
        for request in range(trace.requests):
            codes = trace.refs[trace.offsets[request] : trace.offsets[request + 1]]
            prompt = len(codes) * trace.block_tokens
            if trace.prompt_tokens is not None:
                prompt = int(trace.prompt_tokens[request])
            line = Line.of(
                int(trace.timestamps_ms[request]),
                prompt,
                int(trace.output_tokens[request]),
                trace.block_ids[codes].tolist(),
                trace.hints_of(request),
                None if sessions is None or sessions[request] < 0 else int(sessions[request]),
                None if served is None else {source: int(at[request]) for source, at in served.items()},
            )
            file.write(encode_line(line) + b"\n")


class _Requests:
    """The requests read so far.

    `ids` has the block ids of all requests, one request after the other. The other lists have one entry per
    request.
    """

    def __init__(self, block_tokens: int | None) -> None:
        self.ids, self.lengths, self.line_numbers = array("q"), array("q"), array("q")
        self.timestamps, self.output_tokens, self.input_tokens = array("d"), array("q"), array("q")
        self.hints: list[Hints] = []
        self.sessions = array("q")
        self.served: list[dict[str, int] | None] = []
        self.block_size = BlockSize(block_tokens or DEFAULT_BLOCK_TOKENS)
        self.skipped_lines = 0
        self._are_seconds = False
        self._given_block_tokens, self._assumed = block_tokens, list[str]()
        self._is_in_order, self._has_unit = True, False
        self._number_of: dict[int | str, int] = {}
        self._num_numbered = 0
        self._names, self._number_of_session = NamedSessions(), dict[str, int]()

    def add(self, number: int, text: bytes) -> None:
        """Append the request of a line, or apply a header. For a bad line, only raises `BadLineError`."""
        if (header := header_in(text)) is not None:
            self._apply(header)
            return
        line = decode_line(text)
        blocks = self.block_size.full_blocks(line.input_length, len(line.hash_ids))
        ids: list[Any] = line.hash_ids[:blocks]
        try:
            self.ids.fromlist(ids)
        except (OverflowError, TypeError):
            self.ids.fromlist([self._numbered(block_id) for block_id in ids])
        self.lengths.append(blocks)
        self.line_numbers.append(number)
        self._are_seconds |= isinstance(line.timestamp, float)
        self.timestamps.append(line.timestamp)
        self.output_tokens.append(line.output_length)
        self.input_tokens.append(line.input_length)
        self.hints.append(line.hints)
        self.served.append(line.served_tokens)
        name, numbers = self._names.of(line), self._number_of_session
        self.sessions.append(numbers.setdefault(name, len(numbers)) if name else _NO_SESSION)

    def _apply(self, header: Header) -> None:
        self._has_unit |= not header.assumed_ms
        given, tokens = self._given_block_tokens, self.block_size.tokens
        if given is not None and header.block_tokens != given:
            raise BadLineError(f"field block_tokens: {header.block_tokens}, but --block-tokens is {given}")
        if self.lengths and header.block_tokens != tokens:
            raise BadLineError(f"field block_tokens: {header.block_tokens}, but {tokens} in earlier lines")
        if header.block_tokens != tokens:
            self.block_size = BlockSize(header.block_tokens)
        self._is_in_order &= header.in_order
        if header.assumed and header.assumed not in self._assumed:
            self._assumed.append(header.assumed)

    def in_order(self, path: Path) -> _Requests:
        """Return the requests in order of arrival."""
        times = np.array(self.timestamps, np.float64)
        num_late = int(np.count_nonzero(times < np.maximum.accumulate(times)))
        if not num_late:
            return self
        if self._is_in_order:
            text = "%s: %s of %s requests are earlier than a request before them; sorted by time"
            _LOGGER.warning(text, path, f"{num_late:,}", f"{len(times):,}")
        return self._select(np.argsort(times, kind="stable").tolist())

    def _select(self, requests: Iterable[int]) -> _Requests:
        kept, starts = _Requests(self.block_size.tokens), self.offsets().tolist()
        kept.skipped_lines, kept._are_seconds = self.skipped_lines, self._are_seconds
        kept._assumed, kept._has_unit = self._assumed, self._has_unit
        kept._number_of = self._number_of
        for request in requests:
            kept.ids.extend(self.ids[starts[request] : starts[request + 1]])
            for name in _OF_A_REQUEST:
                getattr(kept, name).append(getattr(self, name)[request])
        return kept

    def named(self, name: str) -> str:
        """Return the trace's name for reports: `name`, and the assumptions that the headers state."""
        return f"{name} (assumed: {self.assumed})" if self._assumed else name

    @property
    def assumed(self) -> str:
        return ", ".join(self._assumed)

    def _numbered(self, block_id: int | str) -> int:
        """Return an id of at most 64 bits unchanged. Other ids become -1, -2, ... in order of appearance."""
        if isinstance(block_id, int) and -(2**63) <= block_id < 2**63:
            return block_id
        self._num_numbered += 1
        return self._number_of.setdefault(block_id, -1 - len(self._number_of))

    def _as_in_file(self, block_id: int) -> str:
        """Return the id as it is in the file, as JSON text for messages. Reverses `_numbered`."""
        if not self._number_of or block_id >= 0:
            return str(block_id)
        return json.dumps(list(self._number_of)[-1 - block_id], ensure_ascii=False)

    @property
    def has_unclear_ids(self) -> bool:
        """True if renumbered ids may collide with negative ids of the file."""
        return bool(self._number_of) and int(np.count_nonzero(_int64s(self.ids) < 0)) != self._num_numbered

    def prompt_tokens(self) -> _Int64s | None:
        """Return the number of tokens of each prompt; None if all prompts end with a whole block."""
        tokens = _int64s(self.input_tokens)
        return tokens if (tokens != _int64s(self.lengths) * self.block_size.tokens).any() else None

    def named_sessions(self) -> npt.NDArray[np.int32] | None:
        """Return `Trace.sessions`; None if no name occurs twice, because names then identify requests."""
        numbers = _int64s(self.sessions)
        named = numbers[numbers != _NO_SESSION]
        different, codes, _ = codes_by_appearance(named)
        if len(different) == len(named):
            return None
        sessions = np.full(len(numbers), _NO_SESSION, np.int32)
        sessions[numbers != _NO_SESSION] = codes
        return sessions

    def served_tokens(self) -> dict[str, _Int64s] | None:
        """Return `Trace.served_tokens`; None if any request lacks the numbers of cached tokens."""
        served = [tokens for tokens in self.served if tokens is not None]
        if not served or len(served) < len(self.served):
            return None
        sources = dict.fromkeys(source for tokens in served for source in tokens)
        return {
            source: np.array([tokens.get(source, 0) for tokens in served], np.int64) for source in sources
        }

    def time_unit(self) -> str:
        """Return the unit of the times, ``s`` or ``ms``; empty if it is unknown.

        The unit is unknown if all times are whole numbers and no header states it.
        """
        return SECONDS if self._are_seconds else MILLISECONDS if self._has_unit else ""

    def in_ms(self) -> _Int64s:
        """Return all times in ms. The file's times are in seconds if any time has a fraction, else in ms."""
        times = np.array(self.timestamps, np.float64)
        return np.round(1000.0 * times if self._are_seconds else times).astype(np.int64)

    def offsets(self) -> _Int64s:
        """Return the index in `ids` of each request's first id, and as last element the length of `ids`."""
        return offsets_of(_int64s(self.lengths))

    def chained(self) -> tuple[_Int64s, npt.NDArray[np.int32]]:
        """Compute `Trace.block_ids` and `Trace.refs`; raises `BadLineError` if a chain is broken."""
        offsets = self.offsets()
        block_ids, refs, first_seen = codes_by_appearance(_int64s(self.ids))
        parents = np.empty(len(refs), np.int32)
        parents[1:] = refs[:-1]
        parents[offsets[:-1][offsets[:-1] < len(refs)]] = _NO_PARENT
        # Also finds an id that occurs twice in one request.
        broken = parents != parents[first_seen][refs]
        if broken.any():
            position = int(broken.argmax())
            self._refuse(position, int(first_seen[refs[position]]))
        return block_ids, refs

    def _refuse(self, position: int, first: int) -> None:
        """Raise `BadLineError`, because the id at `position` and at `first` has different predecessors."""
        ids, offsets, numbers = self.ids, self.offsets(), self.line_numbers
        here, there = (int(np.searchsorted(offsets, at, "right")) - 1 for at in (position, first))
        block_id = self._as_in_file(ids[position])
        field = f"{numbers[here]}: field hash_ids[{position - offsets[here]}]: id {block_id}"
        if here == there:
            raise BadLineError(f"{field} occurs twice in this request")
        now, before = (
            f"follows id {self._as_in_file(ids[at - 1])}" if at > offsets[request] else "comes first"
            for at, request in ((position, here), (first, there))
        )
        raise BadLineError(f"{field} {now} here, but {before} in line {numbers[there]}")

    def without_broken_chains(self) -> _Requests:
        """Return the requests that neither repeat an id nor contradict an earlier request.

        Two requests contradict each other if an id has different predecessors in them.
        """
        kept, parents, num_broken = list[int](), dict[int, int | None](), 0
        for request, (start, end) in enumerate(pairwise(self.offsets().tolist())):
            ids = self.ids[start:end]
            chain = dict(zip(ids, (None, *ids[:-1]), strict=True)) if ids else {}
            if len(chain) < len(ids) or any(parents.get(i, parent) != parent for i, parent in chain.items()):
                num_broken += 1
                continue
            parents.update(chain)
            kept.append(request)
        selected = self._select(kept)
        selected.skipped_lines += num_broken
        return selected


def _int64s(values: array[int]) -> _Int64s:
    return np.frombuffer(values, np.int64) if values else np.zeros(0, np.int64)
