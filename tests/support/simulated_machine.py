"""Machines and traces of a few blocks, for timed replays whose results can be computed by hand."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvoffload.replay.config import ReplayConfig
from kvoffload.simulate.config import Timing
from kvoffload.simulate.machine import Machine, Quantity
from kvoffload.traces.trace import Trace

BLOCK_TOKENS, BLOCK_BYTES = 10, 1000
INSTANT = 1e30
"""Bytes a second."""

SPEEDS = {
    "prefill_s_per_token": 0.1,
    "prefill_s_per_token_squared": 0.0,
    "step_s": 0.0,
    "decode_tokens_per_s": 1.0,
    "load_bytes_per_s": 1000.0,
    "store_bytes_per_s": 1000.0,
    "copy_latency_s": 0.0,
    "disk_read_bytes_per_s": 1000.0,
    "disk_write_bytes_per_s": 1000.0,
    "disk_read_latency_s": 0.0,
    "disk_write_latency_s": 0.0,
}
"""Speeds with which a block takes one second to compute, copy, read or write; so does a generated token."""


def machine(**changes: float) -> Machine:
    """Return a machine with `SPEEDS`, except for these changes."""
    return Machine(
        name="by hand",
        **{name: Quantity.assumed(value, "by hand") for name, value in (SPEEDS | changes).items()},
    )


def timing(on: Machine | None = None, **options: Any) -> Timing:
    """Return the timing of blocks of 1,000 bytes on a machine, with steps of ten blocks."""
    return Timing(on or machine(), BLOCK_BYTES, **{"step_tokens": 10 * BLOCK_TOKENS, **options})


def config(ram: int, device: int, **options: Any) -> ReplayConfig:
    """Return a configuration with these capacities in blocks."""
    return ReplayConfig(ram, device_blocks=device, **options)


def trace_of(*requests: tuple[float, str] | tuple[float, str, int]) -> Trace:
    """Make a trace of requests: (second, blocks as letters, generated tokens; 1 by default)."""
    letters = list(dict.fromkeys("".join(request[1] for request in requests)))
    refs = [[letters.index(letter) for letter in request[1]] for request in requests]
    return Trace(
        name="by hand",
        block_tokens=BLOCK_TOKENS,
        block_ids=np.arange(len(letters), dtype=np.int64),
        refs=np.array([code for codes in refs for code in codes], np.int32),
        offsets=np.cumsum([0, *map(len, refs)]).astype(np.int64),
        timestamps_ms=np.array([int(1000 * request[0]) for request in requests], np.int64),
        output_tokens=np.array([request[2] if len(request) == 3 else 1 for request in requests], np.int64),
    )


def alone(paths: list[str]) -> Trace:
    """Make a trace of requests for the blocks along these paths of a tree, without answers.

    The last block of each request is unique, and is computed once.
    """
    nodes = sorted({path[: end + 1] for path in paths for end in range(len(path))})
    letters = [
        "".join(chr(0x4E00 + nodes.index(path[: end + 1])) for end in range(len(path))) for path in paths
    ]
    return trace_of(*((9, f"{text}{chr(0x3400 + row)}", 0) for row, text in enumerate(letters)))


QUICK = machine(
    prefill_s_per_token=1e-4,
    decode_tokens_per_s=50.0,
    load_bytes_per_s=1e6,
    store_bytes_per_s=1e6,
    disk_read_bytes_per_s=2e5,
    disk_write_bytes_per_s=1e5,
)
