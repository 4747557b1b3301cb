"""One row of a sweep, replayed: what every kind of worker runs, and what it brings back.

Runs in the process of the sweep, in one beside it, or on another machine, so it takes and gives plain
values, failures included. Does not know which.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np

from kvoffload._version import __version__
from kvoffload.core.policy import POLICIES
from kvoffload.errors import TraceError
from kvoffload.replay.instances import SharedReplay, replay_of
from kvoffload.replay.replay import ReplayConfig
from kvoffload.replay.report import ReplayReport
from kvoffload.replay.routing import SESSION, route
from kvoffload.sweep.bootstrap import window_sums
from kvoffload.sweep.grid import content_digest
from kvoffload.traces.load import at_load, one_session_in
from kvoffload.traces.sources import load_trace
from kvoffload.traces.trace import Trace

_PACKAGE = Path(__file__).resolve().parent.parent
_NO_PART_OF_A_RESULT = {"cli", "plan", "report", "testing"}


class Measurement(msgspec.Struct, frozen=True):
    """What a replay found.

    Attributes:
        report: its report.
        window_hits: prefix hits in each window (`bootstrap.window_sums`).
        instance_window_hits: of several instances, for each that is asked for a block the prefix hits in each
            window of its own requests, as if it were replayed alone.
    """

    report: ReplayReport
    window_hits: list[int]
    instance_window_hits: list[list[int]] = []


@dataclass(frozen=True)
class Failure:
    """Why there is no measurement."""

    reason: str


@dataclass(frozen=True)
class Share:
    """What one of several replicas gets of a trace; the defaults are all of it.

    Attributes:
        one_in: of so many sessions only each first (`traces.load.one_session_in`).
        load: sessions at a time, over those of the recording (`traces.load`).
        routing, replicas: how requests are divided, and among how many (`replay.routing`).
        replica: which of them this is, 0 to `replicas` - 1.
    """

    load: float = 1.0
    routing: str = SESSION
    replicas: int = 1
    replica: int = 0
    one_in: int = 1


ALL = Share()


@dataclass(frozen=True)
class TraceSource:
    """Where a worker finds a trace, and how it knows that it is the right one.

    Attributes:
        name_or_path, block_tokens, skip_bad_lines: as `load_trace` takes them.
        share: the part of it that is meant.
        digest: the `content_digest` of that part; empty before it is read.
    """

    name_or_path: str
    block_tokens: int | None
    skip_bad_lines: bool
    share: Share = ALL
    digest: str = ""


@dataclass(frozen=True)
class Task:
    """A replay to be done.

    Attributes:
        number: what the result is filed under.
        block_refs: how much work it is.
    """

    number: int
    source: TraceSource
    config: ReplayConfig
    block_refs: int


def load(source: TraceSource) -> Trace:
    """The trace; the last two are kept, because the next task is mostly of the same one.

    Raises as `load_trace` does, and `TraceError` if it is not the one that was expected.
    """
    trace, digest = _read(source)
    if source.digest not in ("", digest):
        raise TraceError(f"{source.name_or_path}: it has changed since the sweep began")
    return trace


def identified(source: TraceSource) -> TraceSource:
    """`source` with the digest of the trace that is there now."""
    return replace(source, digest=_read(source)[1])


def _read(source: TraceSource) -> tuple[Trace, str]:
    read = _whole if source.share == ALL else _shares
    found = read(replace(source, share=replace(source.share, replica=0), digest=""))
    return found[source.share.replica]


@functools.lru_cache(maxsize=2)
def _whole(source: TraceSource) -> tuple[tuple[Trace, str]]:
    trace = load_trace(
        source.name_or_path, block_tokens=source.block_tokens, skip_bad_lines=source.skip_bad_lines
    )
    return ((trace, content_digest(trace)),)


@functools.lru_cache(maxsize=2)
def _shares(source: TraceSource) -> tuple[tuple[Trace, str], ...]:
    """What each replica gets. Kept together: they are as large as the trace, and were read with it.

    Two: a plan replays replicas by themselves, and all of them in front of what they share.
    """
    share = source.share
    ((trace, _),) = _whole(replace(source, share=ALL))
    trace = at_load(one_session_in(trace, share.one_in), share.load)
    replica_of = route(trace, share.replicas, share.routing)
    parts = [trace.of_requests(np.flatnonzero(replica_of == one)) for one in range(share.replicas)]
    return tuple((part, content_digest(part)) for part in parts)


def attempt(task: Task) -> Measurement | Failure:
    """Do a task with a trace that is read here."""
    return attempt_with(None, task)


def attempt_with(trace: Trace | None, task: Task) -> Measurement | Failure:
    """Do a task with a trace that was sent, if it was.

    Raises nothing: exceptions of other people's policies need not survive the way back, and must not end
    a worker.
    """
    try:
        run = replay_of(trace or load(task.source), task.config)
        report = run.run()
    except Exception as error:
        return Failure(f"{type(error).__name__}: {error}")
    # What a policy says of itself is in no row.
    report = msgspec.structs.replace(report, policy_state={})
    of_instances = run.hits_of_instances if isinstance(run, SharedReplay) else []
    return Measurement(
        report,
        window_sums(run.hits_per_request).tolist(),
        [window_sums(hits).tolist() for hits in of_instances],
    )


@functools.cache
def code_digest(policy: str = "") -> str:
    """SHA-256 of the code that a result depends on: this package, and the file of a policy not in it.

    While a policy is being written the version stays and the results change.
    """
    digest = hashlib.sha256(__version__.encode())
    files = [
        path
        for path in sorted(_PACKAGE.rglob("*.py"))
        if path.relative_to(_PACKAGE).parts[0] not in _NO_PART_OF_A_RESULT
    ]
    if policy:
        # A class typed into an interpreter has no file.
        source = inspect.getsourcefile(POLICIES.find(policy))
        files += [Path(source)] if source else []
    for path in files:
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()
