"""Turns what a user typed into a `Trace`: a built-in workload or a file. Knows no format."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from kvoffload.errors import ConfigError
from kvoffload.settings.read import nearest
from kvoffload.traces.block_size import DEFAULT_BLOCK_TOKENS, stated_header
from kvoffload.traces.compressed import STDIN
from kvoffload.traces.format import read_trace
from kvoffload.traces.sessions import generate
from kvoffload.traces.trace import Trace
from kvoffload.traces.workloads import BUILTIN, builtin


def load_trace(
    name_or_path: str | Path,
    *,
    block_tokens: int | None = None,
    skip_bad_lines: bool = False,
    progress: Callable[[float], None] | None = None,
) -> Trace:
    """Generate a built-in workload, or read a file. A built-in name has priority; ``./chat`` is a file, and
    ``-`` is standard input.

    The arguments are those of `read_trace`; a built-in is cut into blocks of `block_tokens`, or 512.

    Raises: `ConfigError` if there is neither, `TraceError` as `read_trace` does.
    """
    if str(name_or_path) in BUILTIN:
        tokens = DEFAULT_BLOCK_TOKENS if block_tokens is None else block_tokens
        return generate(builtin(str(name_or_path), block_tokens=tokens))
    check_trace(name_or_path)
    return read_trace(
        name_or_path, block_tokens=block_tokens, skip_bad_lines=skip_bad_lines, progress=progress
    )


def block_tokens_of(name_or_path: str | Path, block_tokens: int | None = None) -> int:
    """Tokens in a block of what `load_trace` would load; reads no more than the first line.

    Standard input is not looked into: 512, unless given. Raises as `load_trace`.
    """
    check_trace(name_or_path)
    if block_tokens is not None:
        return block_tokens
    stated = None if str(name_or_path) in BUILTIN else stated_header(Path(name_or_path))
    return DEFAULT_BLOCK_TOKENS if stated is None else stated.block_tokens


def check_trace(name_or_path: str | Path) -> None:
    """Raise `ConfigError` if there is neither such a built-in workload nor such a file."""
    name = str(name_or_path)
    if name not in BUILTIN and Path(name) != STDIN and not Path(name).exists():
        what = "there is no such file; allowed: a file, - (standard input), or one of: "
        raise ConfigError("trace", name, what + ", ".join(BUILTIN) + nearest(name, BUILTIN))
