"""Loads a trace by its name, which is a built-in workload or a file. Knows no format."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from kvoffload.errors import ConfigError
from kvoffload.settings.read import nearest
from kvoffload.traces.block_size import DEFAULT_BLOCK_TOKENS, stated_header
from kvoffload.traces.compressed import STDIN
from kvoffload.traces.format import read_trace
from kvoffload.traces.sessions import generate
from kvoffload.traces.time_unit import in_unit
from kvoffload.traces.trace import Trace
from kvoffload.traces.workloads import BUILTIN, builtin


def load_trace(
    name_or_path: str | Path,
    *,
    block_tokens: int | None = None,
    skip_bad_lines: bool = False,
    time_unit: str | None = None,
    progress: Callable[[float], None] | None = None,
) -> Trace:
    """Generate a built-in workload or read a file.

    Args:
        time_unit: ``s`` or ``ms``, for a file that does not state the unit of its times. If it is None, ms is
            assumed, and an error is raised if requests or answers would then be implausibly fast.

    If a workload and a file have the same name, the workload is generated; ``./chat`` is always a file. ``-``
    is standard input. `read_trace` describes the other arguments. The blocks of a workload have
    `block_tokens` tokens, by default 512.

    Raises:
        ConfigError: there is no such workload or file.
        TraceError: for the reasons of `read_trace`, or because the times of the file are implausible.
    """
    if str(name_or_path) in BUILTIN:
        tokens = DEFAULT_BLOCK_TOKENS if block_tokens is None else block_tokens
        return generate(builtin(str(name_or_path), block_tokens=tokens))
    check_trace(name_or_path)
    trace = read_trace(
        name_or_path, block_tokens=block_tokens, skip_bad_lines=skip_bad_lines, progress=progress
    )
    return in_unit(trace, time_unit, name_or_path)


def block_tokens_of(name_or_path: str | Path, block_tokens: int | None = None) -> int:
    """Return the block size of the trace that `load_trace` would load. Reads only the first line of a file.

    Does not read standard input and pipes; for these, returns 512 if `block_tokens` is None. Raises the
    errors of `load_trace`.
    """
    check_trace(name_or_path)
    if block_tokens is not None:
        return block_tokens
    stated = None if str(name_or_path) in BUILTIN else stated_header(Path(name_or_path))
    return DEFAULT_BLOCK_TOKENS if stated is None else stated.block_tokens


def check_trace(name_or_path: str | Path) -> None:
    """Raise `ConfigError` if there is no such built-in workload or file."""
    name = str(name_or_path)
    if name not in BUILTIN and Path(name) != STDIN and not Path(name).exists():
        allowed = "there is no such file; allowed: a file, - (standard input), or one of: "
        raise ConfigError("trace", name, allowed + ", ".join(BUILTIN) + nearest(name, BUILTIN))
