"""The block size of a trace file. Reads the file's header, and checks each line against the block size."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from kvoffload.errors import TraceError
from kvoffload.traces.compressed import is_stream
from kvoffload.traces.lines import BadLineError, decoded, numbered_lines

DEFAULT_BLOCK_TOKENS = 512
"""Block size of files without a header, such as Mooncake's."""

_MARK = b'"kvoffload_trace"'


class Header(msgspec.Struct, omit_defaults=True):
    """Optional first line of a trace file.

    Attributes:
        kvoffload_trace: version of the header.
        block_tokens: tokens in one block.
        source: origin of the file.
        assumed: assumption that was made where the source lacks data; empty if nothing was assumed.
        in_order: False if the lines may not be in order of arrival, for example because a server wrote each
            line at the end of the request. A reader then sorts the requests without a warning.
        assumed_ms: True if the source did not state the unit of its times, and they were read as ms.
    """

    kvoffload_trace: Literal[1]
    block_tokens: Annotated[int, msgspec.Meta(ge=1, le=2**31)]
    source: str = ""
    assumed: str = ""
    in_order: bool = True
    assumed_ms: bool = False

    def line(self) -> bytes:
        return msgspec.json.encode(self) + b"\n"


_decode = msgspec.json.Decoder(Header).decode


def header_in(text: bytes) -> Header | None:
    """Decode a line as a header; return None if it is a request. Raises `BadLineError` if it is invalid."""
    return decoded(_decode, text) if _MARK in text[:64] else None


def stated_header(path: Path) -> Header | None:
    """Read the header of a file.

    Returns None for a stream, and if the file has no header. Raises `TraceError`.
    """
    if is_stream(path):
        return None
    for number, text in numbered_lines(path):
        try:
            header = header_in(text)
        except BadLineError as bad:
            raise TraceError(f"{path}:{number}: {bad}") from None
        return header
    return None


class BlockSize:
    """The block size of a file. Checks that each request has as many block ids as its length requires.

    Attributes:
        tokens: tokens in one block.
    """

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        # Smallest and largest block size that fits all lines so far.
        self._fewest, self._most = 0.0, math.inf

    def full_blocks(self, input_tokens: int, num_ids: int) -> int:
        """Return the number of full blocks. It is less than `num_ids` by one if the last block is partial.

        Raises: `BadLineError` if `num_ids` does not match the length. The message suggests another block
            size, the largest power of two that fits all lines so far.
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
