"""Reads a recording with token ids or text, so that its prompts can be compared token by token.

Returns the trace and the tokens of its blocks.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from kvoffload.errors import ConfigError, TraceError
from kvoffload.explain.prompts import BlockTokens
from kvoffload.traces.compressed import is_stream
from kvoffload.traces.conversion.block_ids import BlockId, Keys
from kvoffload.traces.conversion.convert import convert
from kvoffload.traces.conversion.source import kind_of
from kvoffload.traces.format import read_trace
from kvoffload.traces.trace import Trace
from kvoffload.traces.workloads import BUILTIN

_WITH_TOKENS = ("token_ids", "text")


class _TokenKeys(Keys):
    """Computes ids of blocks.

    Also records for each block its tokens and the id that it would have without `cache_salt`.
    """

    def __init__(self) -> None:
        super().__init__(b"")
        self._content_of: dict[BlockId, bytes] = {}
        self._unsalted: dict[BlockId, BlockId] = {}

    def after(self, ids: Sequence[BlockId], contents: Iterable[bytes]) -> list[BlockId]:
        contents = list(contents)
        chain = super().after(ids, contents)
        added = chain[len(ids) :]
        self._content_of.update(zip(added, contents, strict=True))
        parent = self._unsalted.get(ids[-1]) if ids else None
        unsalted = added
        if ids and parent != ids[-1]:
            # `ids` contain a salt, so the unsalted chain has other ids.
            before = () if parent is None else (parent,)
            unsalted = super().after(before, contents)[len(before) :]
        self._unsalted.update(zip(added, unsalted, strict=True))
        return chain

    def tokens_of(self, trace: Trace) -> BlockTokens:
        """Return the tokens of each block of a trace."""
        ids = trace.block_ids.tolist()
        content = b"".join(self._content_of[block] for block in ids)
        matrix = np.frombuffer(content, "<i8").reshape(trace.unique_blocks, trace.block_tokens)
        prefixes = np.array([self._unsalted[block] for block in ids], np.int64)
        return BlockTokens(matrix, prefixes)


def has_tokens(place: str, source: str | None = None) -> bool:
    """Return True if `read_with_tokens` can read the recording, because it has token ids or text.

    Args:
        source: the format that the user has named; None to detect the format.
    """
    if source is not None:
        return re.split("[,:]", source)[0] in _WITH_TOKENS
    if place in BUILTIN or is_stream(Path(place)) or not Path(place).exists():
        return False
    try:
        return kind_of(Path(place)).name in _WITH_TOKENS
    except (ConfigError, TraceError):
        return False


def read_with_tokens(
    place: str,
    *,
    source: str | None = None,
    block_tokens: int | None = None,
    tokenizer: Path | None = None,
    skip_bad_lines: bool = False,
    progress: Callable[[float], None] | None = None,
) -> tuple[Trace, BlockTokens]:
    """Read a recording with token ids or text; return the trace, and the tokens of its blocks.

    The arguments and errors are the same as for `convert`. The tokens of unique blocks need memory: with
    blocks of 16 tokens, 37 bytes per token at the peak, 10 bytes afterwards, and 5 more bytes during
    `beginnings`. With blocks of 64 tokens: 21, 8 and 1 bytes.
    """
    keys = _TokenKeys()
    with tempfile.TemporaryDirectory(prefix="kvoffload-explain-") as directory:
        path = Path(directory) / "trace.jsonl"
        convert(
            place, path, source=source, block_tokens=block_tokens, tokenizer=tokenizer, keys=keys,
            skip_bad_lines=skip_bad_lines, progress=progress,
        )  # fmt: skip
        trace = read_trace(path)
    name = trace.name.replace("trace", Path(place).name.split(".")[0], 1)
    return replace(trace, name=name), keys.tokens_of(trace)
