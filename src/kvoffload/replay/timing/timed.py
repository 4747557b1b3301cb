"""The timed replay: the same trace through the same manager, with a clock.

`replay_in_time` is the library's entry: two runs, with offloading and without, and the report.
"""

from __future__ import annotations

from collections.abc import Callable

from kvoffload.replay.replay import ReplayConfig
from kvoffload.replay.timing.config import Timing
from kvoffload.replay.timing.report import TimedOutcome, TimedReport
from kvoffload.traces.trace import Trace

Progress = Callable[[int], None]
"""Is told how many requests have ended, about 200 times a run."""


def run_in_time(
    trace: Trace, config: ReplayConfig | None, timing: Timing, device_blocks: int, progress: Progress
) -> TimedOutcome:
    """One run. `config` None: without offloading, the engine's own cache alone.

    For a planner: the run without offloading is the same for all that is tried with one `timing` and
    `device_blocks`; make it once.
    """
    raise RuntimeError("being written")


def replay_in_time(
    trace: Trace,
    config: ReplayConfig,
    timing: Timing,
    progress: Progress = lambda requests: None,
    without: TimedOutcome | None = None,
) -> TimedReport:
    """Both runs, compared. `without`: the run without offloading, if it is known already.

    Deterministic: no clock of this machine is read. Cost: O(log n) a request besides what the manager
    decides. Raises: `ConfigError` if the machine lacks a number that is needed, or the longest request does
    not fit the device.
    """
    raise RuntimeError("being written")
