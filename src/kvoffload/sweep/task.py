"""Tasks of a sweep. A task is one replay; any kind of worker can run it.

Tasks and results are plain values, because a worker may be another process or machine. A replay that fails
returns a `Failure` instead of raising.
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
from kvoffload.core.admission import ADMISSIONS
from kvoffload.errors import TraceError
from kvoffload.replay.config import ReplayConfig
from kvoffload.replay.instances import replay_of
from kvoffload.replay.report import ReplayReport
from kvoffload.replay.routing import SESSION, route
from kvoffload.settings.plugin_failure import plugin_failure
from kvoffload.sweep.bootstrap import window_sums
from kvoffload.sweep.grid import content_digest, policy_class
from kvoffload.tiers.spec import SizedTierOptions
from kvoffload.traces.load import at_load, one_session_in
from kvoffload.traces.sources import load_trace
from kvoffload.traces.trace import Trace

_PACKAGE = Path(__file__).resolve().parent.parent
_WITHOUT_INFLUENCE = {"cli", "plan", "pages", "testing"}
"""Packages of kvoffload whose code does not affect the result of a replay."""


class Measurement(msgspec.Struct, frozen=True):
    """Result of a replay.

    Attributes:
        window_hits: number of prefix hits in each window (`bootstrap.window_sums`).
        instance_window_hits: if the replay has several instances, one list like `window_hits` for each
            instance, computed from its requests alone. Instances without block references are left out.
    """

    report: ReplayReport
    window_hits: list[int]
    instance_window_hits: list[list[int]] = []


@dataclass(frozen=True)
class Failure:
    """Result of a replay that raised an exception."""

    reason: str


@dataclass(frozen=True)
class Share:
    """Part of a trace that one replica serves; the defaults mean the whole trace.

    Attributes:
        load: factor by which the arrival rate of sessions is multiplied (`traces.load.at_load`).
        routing: rule that assigns requests to replicas (`replay.routing`).
        replicas: number of replicas.
        replica: number of this replica, 0 to `replicas` - 1.
        one_in: keep one of every `one_in` sessions (`traces.load.one_session_in`).
    """

    load: float = 1.0
    routing: str = SESSION
    replicas: int = 1
    replica: int = 0
    one_in: int = 1


ALL = Share()


@dataclass(frozen=True)
class TraceSource:
    """Location and identity of a trace, for workers.

    Attributes:
        name_or_path, block_tokens, skip_bad_lines, time_unit: arguments of `load_trace`.
        share: part of the trace.
        digest: `content_digest` of that part; empty before the trace is read.
    """

    name_or_path: str
    block_tokens: int | None
    skip_bad_lines: bool
    share: Share = ALL
    digest: str = ""
    time_unit: str | None = None


@dataclass(frozen=True)
class Task:
    """A replay to run.

    Attributes:
        number: index of the point to which the result belongs.
        block_refs: number of block references of the trace. The progress display uses it as a measure of
            work.
    """

    number: int
    source: TraceSource
    config: ReplayConfig
    block_refs: int


def load(source: TraceSource) -> Trace:
    """Read a trace. A process caches the last two traces, because consecutive tasks often use the same trace.

    Raises: errors of `load_trace`, and `TraceError` if the content does not match `source.digest`.
    """
    trace, digest = _read(source)
    if source.digest not in ("", digest):
        raise TraceError(
            f"{source.name_or_path}: the trace has changed since the sweep began; start it again"
        )
    return trace


def identified(source: TraceSource) -> TraceSource:
    """Return `source` with the digest of the trace's current content."""
    return replace(source, digest=_read(source)[1])


def _read(source: TraceSource) -> tuple[Trace, str]:
    read = whole_trace if source.share == ALL else _shares
    shares = read(replace(source, share=replace(source.share, replica=0), digest=""))
    return shares[source.share.replica]


@functools.lru_cache(maxsize=2)
def whole_trace(source: TraceSource) -> tuple[tuple[Trace, str]]:
    trace = load_trace(
        source.name_or_path,
        block_tokens=source.block_tokens,
        skip_bad_lines=source.skip_bad_lines,
        time_unit=source.time_unit,
    )
    return ((trace, content_digest(trace)),)


@functools.lru_cache(maxsize=2)
def _shares(source: TraceSource) -> tuple[tuple[Trace, str], ...]:
    """Divide a trace among replicas. Returns each replica's part with its `content_digest`.

    The last two results are cached, because a plan with shared servers needs the divided trace and the
    undivided trace by turns.
    """
    share = source.share
    ((trace, _),) = whole_trace(replace(source, share=ALL))
    trace = at_load(one_session_in(trace, share.one_in), share.load)
    replica_of = route(trace, share.replicas, share.routing)
    shares = [trace.of_requests(np.flatnonzero(replica_of == number)) for number in range(share.replicas)]
    return tuple((own, content_digest(own)) for own in shares)


def attempt(task: Task) -> Measurement | Failure:
    return attempt_with(None, task)


def attempt_with(trace: Trace | None, task: Task) -> Measurement | Failure:
    """Run a task on `trace`. If `trace` is None, read the trace from the task's source.

    Returns a `Failure` instead of raising, because a third-party policy may raise an exception that cannot be
    pickled.
    """
    try:
        run = replay_of(trace or load(task.source), task.config)
        report = run.run()
    except Exception as error:
        failure = plugin_failure(error)
        return Failure(f"{type(error).__name__}: {error}" if failure is None else failure.summary)
    # Left out, because no row has a column for the policy's statistics.
    report = msgspec.structs.replace(report, policy_state={})
    return Measurement(
        report,
        window_sums(run.hits_per_request).tolist(),
        [window_sums(hits).tolist() for hits in run.hits_of_instances],
    )


@functools.cache
def code_digest(policy: str = "", admission: str = "") -> str:
    """Compute one SHA-256 of all code that affects a result.

    The code is this package, and the source files of the policy and of the admission rule. A version number
    would not suffice, because a policy under development changes without a new version.
    """
    digest = hashlib.sha256(__version__.encode())
    files = [
        path
        for path in sorted(_PACKAGE.rglob("*.py"))
        if path.relative_to(_PACKAGE).parts[0] not in _WITHOUT_INFLUENCE
    ]
    classes: list[type[object]] = [policy_class(policy)] if policy else []
    classes += [ADMISSIONS.find(admission)] if admission else []
    for cls in classes:
        # A class typed into an interpreter has no file.
        source = inspect.getsourcefile(cls)
        files += [Path(source)] if source else []
    for path in files:
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def code_digests(config: ReplayConfig | None) -> list[str]:
    """Return the `code_digest` of RAM's policy and admission rule, then the digest for each tier.

    `config` is None for a replay of a device cache alone; then the list has only the digest of this package.
    """
    if config is None:
        return [code_digest()]
    caches: list[tuple[object, str]] = [(config.policy, config.admission)]
    caches += [(tier.policy, tier.admission) for tier in config.tiers if isinstance(tier, SizedTierOptions)]
    return [code_digest(str(policy), admission) for policy, admission in caches]
