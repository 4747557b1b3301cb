"""How many tokens a block has: what a file says of itself, and whether its lines agree.

Does not know what else stands in a line.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from kvoffload.errors import TraceError
from kvoffload.traces.compressed import STDIN
from kvoffload.traces.lines import BadLineError, decoded, numbered_lines

DEFAULT_BLOCK_TOKENS = 512
"""Of files that say nothing: those of Mooncake."""

_MARK = b'"kvoffload_trace"'


class Header(msgspec.Struct, omit_defaults=True):
    """What all lines of a trace file have in common: its first line, which old files do not have.

    Attributes:
        kvoffload_trace: version of the header.
        block_tokens: tokens in one block.
        source: what the file was converted or recorded from.
        assumed: what was assumed where the source does not tell; empty if nothing was.
        in_order: its lines stand in the order of arrival. Those of a recorder, which writes a request when it
            has ended, do not, and are read in the order of their times.
    """

    kvoffload_trace: Literal[1]
    block_tokens: Annotated[int, msgspec.Meta(ge=1, le=2**31)]
    source: str = ""
    assumed: str = ""
    in_order: bool = True

    def line(self) -> bytes:
        """As it stands in a file."""
        return msgspec.json.encode(self) + b"\n"


_decode = msgspec.json.Decoder(Header).decode


def header_in(text: bytes) -> Header | None:
    """The header that a line is; None if it is a request. Raises `BadLineError` for a wrong header."""
    return decoded(_decode, text) if _MARK in text[:64] else None


def stated_header(path: Path) -> Header | None:
    """What a file says of itself; None if it says nothing. Not for standard input, which is read once.

    Raises `TraceError`.
    """
    if path == STDIN:
        return None
    for number, text in numbered_lines(path):
        try:
            header = header_in(text)
        except BadLineError as bad:
            raise TraceError(f"{path}:{number}: {bad}") from None
        return header
    return None


class BlockSize:
    """Compares the ids of each request with its length.

    Args:
        tokens: in one block.

    Attributes:
        tokens: the same.
    """

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        # No block has fewer, nor more tokens than the lines so far allow.
        self._fewest, self._most = 0.0, math.inf

    def full_blocks(self, input_tokens: int, num_ids: int) -> int:
        """How many of the ids are full blocks: all, or all but the last.

        Raises `BadLineError` if a request of that length has another number of ids, with the size of a block
        that fits all lines so far: a power of two, if one does.
        """
        blocks = input_tokens // self.tokens
        if num_ids:
            self._fewest = max(self._fewest, input_tokens / (num_ids + 1))
            self._most = min(self._most, input_tokens / (num_ids - 1) if num_ids > 1 else math.inf)
        if not blocks <= num_ids <= -(-input_tokens // self.tokens):
            powers = [1 << bit for bit in range(20) if self._fewest < 1 << bit < self._most]
            raise BadLineError(
                f"field hash_ids: {num_ids} ids, but input_length {input_tokens} "
                f"has {blocks} blocks of {self.tokens} tokens"
                + (f"; --block-tokens {powers[-1]} would fit" if powers else "")
            )
        return blocks
