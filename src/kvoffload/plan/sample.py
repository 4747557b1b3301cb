"""How much of a recording a search looks at: all of a short one, whole sessions of a long one.

What costs is requests. On a sample of sessions caches are taken as much smaller as the sample is
(`Fleet.scale`), so that a search costs a part; what is answered is measured on all.
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
"""What a search looks at, about, of a longer recording."""
ENOUGH_SESSIONS = 500
"""Fewer sessions than these are not typical of the others."""
ENOUGH_ON_DEVICE = 2
"""Mean requests that the sample's part of an engine's GPUs holds: requests do not get smaller."""
_MOST = 10_000


def check_sample(one_in: int | None) -> int | None:
    """`one_in` as it is. Raises `ConfigError` for what is no number of sessions."""
    return None if one_in is None else check_integer("sample", one_in, _MOST)


def sessions_in(source: TraceSource, evidence: Evidence, fleet: Fleet) -> int:
    """Of how many sessions one is enough for a search; 1 for a recording that is not long."""
    mean_blocks = evidence.block_refs / evidence.requests
    most = min(
        evidence.requests // ENOUGH_REQUESTS, int(fleet.device_blocks / (ENOUGH_ON_DEVICE * mean_blocks))
    )
    if most <= 1:
        return 1
    num_sessions = len(np.unique(turns(load(source)).session_of))
    return max(1, min(most, num_sessions // ENOUGH_SESSIONS))


def scaled(fleet: Fleet, evidence: Evidence, sample: Evidence) -> Fleet:
    """The fleet for a sample of what it is asked: a part of the references gets that part of the caches."""
    return replace(fleet, scale=fleet.scale * evidence.block_refs / sample.block_refs)
