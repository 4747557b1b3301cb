"""Samples of sessions. A plan of a long recording searches on a sample of its sessions.

A replay's cost is proportional to its requests. Caches are scaled down with the sample (`Fleet.scale`). The
answer is measured on all sessions.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from kvoffload.errors import check_integer
from kvoffload.plan.evidence import Evidence
from kvoffload.plan.fleet import Fleet
from kvoffload.sweep.task import TraceSource, load
from kvoffload.traces.statistics import turns

ENOUGH_REQUESTS = 10_000
"""Approximate number of requests in a sample."""
ENOUGH_SESSIONS, ENOUGH_LONG_SESSIONS = 500, 200
"""Fewest sessions in a representative sample, for short sessions and for long sessions."""
LONG_SESSION = 20
"""Sessions count as long, as sessions of agents do, if they have this many requests or more on average.

Measured error of a sample: with half of 454 such sessions, hit ratios were up to 1.7 points too low.
"""
ENOUGH_ON_DEVICE = 2
"""Number of requests of mean length that the scaled-down GPUs of an engine must hold. The limit is needed
because a sample scales the caches down, but not the lengths of requests."""
_MOST = 10_000


def check_sample(one_in: int | None) -> int | None:
    return None if one_in is None else check_integer("sample", one_in, _MOST)


def sessions_in(source: TraceSource, evidence: Evidence, fleet: Fleet) -> int:
    """Return N if the search should use one in N sessions; 1 for a short recording."""
    mean_blocks = evidence.block_refs / evidence.requests
    most = min(
        evidence.requests // ENOUGH_REQUESTS, int(fleet.device_blocks / (ENOUGH_ON_DEVICE * mean_blocks))
    )
    if most <= 1:
        return 1
    num_sessions = len(np.unique(turns(load(source)).session_of))
    are_long = evidence.requests >= LONG_SESSION * num_sessions
    return max(1, min(most, num_sessions // (ENOUGH_LONG_SESSIONS if are_long else ENOUGH_SESSIONS)))


def scaled(fleet: Fleet, evidence: Evidence, sample: Evidence) -> Fleet:
    """Scale the fleet's caches down in proportion to the sample's share of all block references."""
    return replace(fleet, scale=fleet.scale * evidence.block_refs / sample.block_refs)
