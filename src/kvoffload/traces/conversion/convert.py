"""Conversion of a recording to a trace file, one request at a time."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec

from kvoffload.errors import CombinedConfigError, ConfigError, TraceError
from kvoffload.settings.output_files import check_regular, replaced
from kvoffload.traces.block_size import DEFAULT_BLOCK_TOKENS, BlockSize, Header, header_in, stated_header
from kvoffload.traces.compressed import STDIN, compressing, decompressing, is_stream
from kvoffload.traces.conversion.block_ids import KeptKeys, Keys
from kvoffload.traces.conversion.event_stream import is_address
from kvoffload.traces.conversion.source import SOURCES, Given, Missing, Request, Source, kind_of
from kvoffload.traces.conversion.tokens import FileTokens, Tokens
from kvoffload.traces.formats.mooncake import Line, encode_line
from kvoffload.traces.lines import BadLineError

_LATEST_MS = 2**53
_ANY_TIME = msgspec.json.Decoder(dict[str, Any])


class IncompleteError(CombinedConfigError):
    """Error for required options that are missing or unusable. Its message names all of them.

    Attributes:
        kind: name of the source.
        missing: the options that are missing or unusable.
    """

    def __init__(self, kind: str, missing: Sequence[Missing]) -> None:
        problems = [option.problem for option in missing]
        super().__init__("trace convert", problems)
        self.kind, self.missing = kind, tuple(missing)
        if len(problems) == 1:
            self.args = problems[0].args


@dataclass(frozen=True)
class Converted:
    """Summary of a conversion.

    Attributes:
        source, assumed, block_tokens: as in the trace's header.
        block_refs: number of blocks of all requests; a block counts once for each request that has it.
        unordered_requests: number of requests that arrived earlier than a request on a line before; 0 if the
            source does not promise an order. Readers of the trace sort all requests by arrival time.
        remarks: notes for the user about the result (`Source.remarks`).
    """

    source: str
    assumed: str
    block_tokens: int
    requests: int
    block_refs: int
    unordered_requests: int
    skipped_lines: int
    remarks: tuple[str, ...]


def convert(
    place: str,
    out: Path | None,
    *,
    source: str | None = None,
    block_tokens: int | None = None,
    tokenizer: Path | None = None,
    keys: Keys | None = None,
    skip_bad_lines: bool = False,
    progress: Callable[[float], None] | None = None,
) -> Converted:
    """Convert a recording to a trace. In the trace, the first request arrives at time 0.

    The output is first written to ``OUT.part``, which is renamed when it is complete.

    Args:
        place: a file, ``-``, or the address of a KV event publisher (``tcp://host:port``).
        out: path of the output. If it is None, the output counts as a missing option.
        source: name of the recording's format (`Source.name`), with parameters. If it is None, the format is
            detected from the first record.
        block_tokens: block size of the trace. If it is None, the block size in the file's header is used, or
            else the default of the source.
        tokenizer: a ``tokenizer.json``, for text.
        keys: computes the ids, or keeps the ids and names of the source (`KeptKeys`). If it is None, `Keys`
            with a random salt is used.
        progress: called repeatedly with the share of the file that has been read, 0 to 1.

    Memory: independent of the number of requests. Cost: about 1 s per million block references, plus the
    tokenizer.

    Raises:
        ConfigError: options contradict each other.
        IncompleteError: required options are missing; nothing was written.
        TraceError: the recording is unusable.
    """
    if out is not None:
        check_regular("out", out)
    kind = _kind_of(place, source)
    if isinstance(keys, KeptKeys) and not kind.has_ids:
        raise ConfigError("keep-ids", True, f"{kind.name} has no block ids to keep")
    stated = stated_header(Path(place)) if kind.has_ids else None
    tokens = _block_tokens(place, kind, block_tokens, stated)
    missing, read = list[Missing](), Tokens()
    try:
        read = Tokens() if tokenizer is None else FileTokens(tokenizer)
    except ConfigError as problem:
        missing.append(_wrong_tokenizer(problem, tokenizer))
    made = kind(Given(keys or Keys(), BlockSize(tokens), read, stated or Header(1, tokens)))
    if out is None:
        missing.append(Missing(ConfigError("out", None, "give a file for the trace"), "", example_out(place)))
    if missing or out is None:
        known = {option.flag for option in missing}
        further = [option for option in _missing(made, place) if option.flag not in known]
        raise IncompleteError(made.name, [*further, *missing])
    requests = _Requests(made, place, skip_bad_lines, progress)
    return _write(requests, made, out, tokens)


def _kind_of(place: str, source: str | None) -> type[Source]:
    """Return the class for the name `source`; if it is None, detect it by the address or the first record."""
    path = Path(place)
    if is_address(place):
        return SOURCES.find(source or "kv_events")
    if path != STDIN and not path.exists():
        raise ConfigError("source", place, "there is no such file; allowed: a file, -, or tcp://host:port")
    return SOURCES.find(source) if source is not None else kind_of(path)


def example_out(place: str) -> str:
    """Suggest a name for the output, such as ``sharegpt.jsonl.zst`` for ``sharegpt.json``."""
    stem = "" if Path(place) == STDIN or is_address(place) else Path(place).name.split(".")[0]
    name = f"{stem or 'trace'}.jsonl.zst"
    return f"{stem}.trace.jsonl.zst" if Path(name).exists() else name


def _wrong_tokenizer(problem: ConfigError, tokenizer: Path | None) -> Missing:
    has_file = tokenizer is not None and tokenizer.exists()
    return Missing(problem, "--tokenizer", str(tokenizer) if has_file else "tokenizer.json")


def _missing(source: Source, place: str) -> list[Missing]:
    """Return the required options that are missing.

    Which options are required depends on the first record. This function reads it, unless the recording is a
    stream, which can be read only once.
    """
    if is_address(place) or is_stream(Path(place)):
        return source.missing(b"")
    _, first = next(iter(source.records(place)), (0, b""))
    return source.missing(first)


def _block_tokens(place: str, kind: type[Source], given: int | None, stated: Header | None) -> int:
    if given is not None and stated is not None and stated.block_tokens != given:
        raise ConfigError("block-tokens", given, f"the header of {place} has {stated.block_tokens}")
    return given or (stated.block_tokens if stated else None) or kind.block_tokens or DEFAULT_BLOCK_TOKENS


class _Requests:
    """Iterates over the requests of a source, and counts skipped lines."""

    def __init__(
        self, source: Source, place: str, skip_bad_lines: bool, progress: Callable[[float], None] | None
    ) -> None:
        self.skipped_lines = 0
        self._source, self.place = source, place
        self._skip_bad_lines, self._progress = skip_bad_lines, progress

    def __iter__(self) -> Iterator[Request]:
        is_first = True
        for number, record in self._source.records(self.place, self._progress):
            if is_first and (missing := self._source.missing(record)):
                raise IncompleteError(self._source.name, missing)
            is_first = False
            complete: Iterable[Request] = ()
            try:
                complete = self._source.read(record)
            except BadLineError as bad:
                if not self._skip_bad_lines:
                    raise TraceError(f"{self.place}:{number}: {bad}") from None
                self.skipped_lines += 1
            yield from complete
        yield from self._source.rest()


def _write(requests: _Requests, source: Source, out: Path, block_tokens: int) -> Converted:
    with replaced("out", out) as partial:
        counts = _write_lines(requests, source, out, partial, block_tokens)
    return Converted(
        source.name, source.assumed, block_tokens, *counts, requests.skipped_lines, tuple(source.remarks())
    )


def _write_lines(
    requests: _Requests, source: Source, out: Path, partial: Path, block_tokens: int
) -> tuple[int, int, int]:
    """Write all requests. Returns the numbers of requests, of block references and of unordered requests."""
    num_requests = num_refs = num_unordered = latest_ms = earliest_ms = 0
    iterator = iter(requests)
    first = next(iterator, None)
    if first is None:
        skipped = f" ({requests.skipped_lines} bad lines)" if requests.skipped_lines else ""
        raise TraceError(f"{requests.place}: no requests in it{skipped}")
    in_order = source.given.header.in_order
    # Times of unordered lines are not shifted here, because the first line need not be the earliest.
    first_s = first.time_s if in_order else 0.0
    with partial.open("wb") as raw, compressing(raw, out.suffix) as file:
        header = Header(1, block_tokens, source.name, source.assumed, in_order, source.assumes_ms)
        file.write(header.line())
        for request in chain((first,), iterator):
            time_ms = round(1000 * (request.time_s - first_s))
            if time_ms > _LATEST_MS:
                raise TraceError(
                    f"{requests.place}: request {num_requests + 1}: {request.time_s} s is too late"
                )
            num_unordered += in_order and time_ms < latest_ms
            latest_ms, earliest_ms = max(latest_ms, time_ms), min(earliest_ms, time_ms)
            num_requests += 1
            num_refs += len(request.ids)
            line = Line.of(
                time_ms, request.input_tokens, request.output_tokens, request.ids, request.hints,
                request.session or None, request.served_tokens,
            )  # fmt: skip
            file.write(encode_line(line) + b"\n")
    if num_unordered:
        _announce_disorder(partial, out.suffix, -earliest_ms)
    return num_requests, num_refs, num_unordered


def _announce_disorder(partial: Path, suffix: str, shift_ms: int) -> None:
    """Rewrite a trace whose lines are out of order: add `shift_ms` to all times, set `in_order` to False."""
    shifted = partial.with_name(partial.name + ".shifted")
    try:
        with (
            partial.open("rb") as read, decompressing(read, suffix) as lines,
            shifted.open("wb") as raw, compressing(raw, suffix) as file,
        ):  # fmt: skip
            header = header_in(next(iter(lines)))
            assert header is not None
            file.write(msgspec.structs.replace(header, in_order=False).line())
            for text in lines:
                line = _ANY_TIME.decode(text)
                line["timestamp"] += shift_ms
                file.write(encode_line(line) + b"\n")
        os.replace(shifted, partial)
    finally:
        shifted.unlink(missing_ok=True)
