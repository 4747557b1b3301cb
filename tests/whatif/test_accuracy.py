"""Estimates against full replays of three recordings, for several samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from kvoffload.core.manager import OffloadingManager
from kvoffload.replay.config import ReplayConfig
from kvoffload.replay.replay import Replay
from kvoffload.replay.trace_keys import KEY_BYTES, TraceKeys
from kvoffload.traces.format import read_trace
from kvoffload.traces.trace import Trace
from kvoffload.whatif import Shadows, WhatIf
from kvoffload.whatif.estimate import Estimate

SETTINGS = (
    WhatIf(policy="hazard"),
    WhatIf(policy="s3fifo"),
    WhatIf(capacity=0.5),
    WhatIf(capacity=2.0),
    WhatIf(admission="reuse:2"),
)
CAPACITY = 0.05
"""Capacity as a share of the unique blocks."""
MOST_MEAN_ERROR = 0.02


@dataclass(frozen=True)
class Comparison:
    """Estimates and true hit ratios.

    Attributes:
        estimates: estimates of each sample, the current setting's first.
        true: hit ratios of full replays, in the same order.
    """

    estimates: Sequence[Sequence[Estimate]]
    true: Sequence[float]

    @property
    def errors(self) -> np.ndarray:
        """Errors of the hit ratios, shape ``(samples, settings)``."""
        return np.array([[e.hit_ratio for e in sample] for sample in self.estimates]) - self.true

    @property
    def share_inside(self) -> float:
        """Share of the hit ratios inside their intervals."""
        return float(np.mean(np.abs(self.errors) <= [[e.error for e in sample] for sample in self.estimates]))

    @property
    def share_of_gains_inside(self) -> float:
        """Share of the gains inside their intervals."""
        gains = np.array([[e.gain for e in sample[1:]] for sample in self.estimates])
        widths = [[e.gain_error for e in sample[1:]] for sample in self.estimates]
        return float(np.mean(np.abs(gains - (np.array(self.true[1:]) - self.true[0])) <= widths))


def compare(trace: Trace, seeds: Sequence[int], settings: Sequence[WhatIf] = SETTINGS) -> Comparison:
    """Estimate each setting with one sample per seed, in one pass, and replay each setting in full."""
    capacity = max(1, round(CAPACITY * trace.unique_blocks))
    true = [
        Replay(
            trace,
            ReplayConfig(
                round(capacity * setting.capacity), setting.policy or "lru", setting.admission or "all"
            ),
        )
        .run()
        .prefix_hit_ratio
        for setting in (WhatIf(), *settings)
    ]
    manager, keys = OffloadingManager(capacity, key_bytes=KEY_BYTES), TraceKeys(trace)
    samples = [Shadows(settings, capacity, seed=seed) for seed in seeds]
    for request in range(trace.requests):
        begin, end = trace.offsets[request : request + 2]
        path = keys.of_blocks(trace.refs[begin:end])
        ctx = manager.begin_request("", path)
        manager.lookup(path, ctx)
        plan = manager.prepare_store(path, ctx)
        if plan is not None:
            manager.complete_store(plan)
        manager.finish_request(ctx)
        for shadows in samples:
            shadows.finished(ctx)
            if shadows.is_due:
                shadows.work()
    for shadows in samples:
        shadows.work()
    return Comparison([shadows.estimates() for shadows in samples], true)


@pytest.mark.trace
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "num_samples"),
    [
        ("conversation_first60", 12),
        pytest.param("agentic_3h", 3, marks=pytest.mark.long),
        pytest.param("agentic_12h", 3, marks=pytest.mark.long),
    ],
)
def test_shadows_agree_with_replays(
    recorded_trace_path: Callable[[str], Path], name: str, num_samples: int
) -> None:
    comparison = compare(
        read_trace(recorded_trace_path(name)), [101 * seed + 1 for seed in range(num_samples)]
    )
    mean_error = float(np.mean(np.abs(comparison.errors)))
    print(
        f"{name}: mean absolute error {mean_error:.4f}, largest {np.abs(comparison.errors).max():.4f}; "
        f"inside the intervals {comparison.share_inside:.0%}, gains {comparison.share_of_gains_inside:.0%}"
    )
    assert mean_error <= MOST_MEAN_ERROR
    assert comparison.share_inside >= 0.9
    assert comparison.share_of_gains_inside >= 0.9


@pytest.mark.trace
def test_a_sample_agrees_with_replays(recorded_trace_path: Callable[[str], Path]) -> None:
    """Compare one sample of the shortest recording; not marked slow."""
    settings = (WhatIf(policy="hazard"), WhatIf(capacity=2.0))
    comparison = compare(read_trace(recorded_trace_path("conversation_first60")), [1], settings)
    assert np.abs(comparison.errors).mean() <= MOST_MEAN_ERROR
    assert comparison.share_inside == comparison.share_of_gains_inside == 1.0
