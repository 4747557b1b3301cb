"""Shadows in a running engine: their thread, their periods of counting, their reports, advice and failures.

The scheduler's thread records the sampled blocks of each request. Another thread replays them in the shadows,
mostly without the GIL. An error in a shadow is logged once and never reaches the engine.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence

from kvoffload.core.request import RequestContext
from kvoffload.whatif.background import Background
from kvoffload.whatif.estimate import Estimate, with_error
from kvoffload.whatif.sample import Sample
from kvoffload.whatif.shadows import Shadows

PERIOD_S = 3600.0
"""Length of a period in seconds. Estimates cover the current and the previous period. Advice is logged at
most once a period.
"""
REPORT_S = 10.0
TOKENS_PER_SAMPLED_BLOCK = 3072
LEAST_ONE_IN = 8


def usual_one_in(tokens_per_block: int) -> int:
    """Return an engine's default for `one_in` (one block in `one_in` is sampled).

    It is the number of blocks that hold 3,072 tokens, but at least 8.
    """
    return max(LEAST_ONE_IN, TOKENS_PER_SAMPLED_BLOCK // max(1, tokens_per_block))


class LiveShadows:
    """Runs shadows beside the serving manager of an engine.

    Args:
        shadows: the shadows. This object replaces their `on_failure`.
        now_s: returns monotonic seconds.
        log: logger that receives advice and failures.
        background: thread that runs the shadows; by default this object creates one.

    Thread: the scheduler's. Cost: independent of the number of shadows. `finished` takes longer for longer
    requests. `due` takes 0.3 ms every ten seconds.
    """

    def __init__(
        self, shadows: Shadows, now_s: float, log: logging.Logger, background: Background | None = None
    ) -> None:
        self._shadows: Shadows | None = shadows
        self._log = log
        self._background = background or Background("kvoffload-what-if")
        self._period_from_s, self._reported_s = now_s, now_s
        self._is_clearing = self._has_forgotten = False
        self._is_quiet = False  # if True, no result waits, and only a due sample starts a task
        self._make: Callable[[], Shadows] | None = None
        self._made = list[Shadows]()
        shadows.on_failure = self.fail

    @property
    def shadows(self) -> Shadows | None:
        """The shadows; None after `close`, or after an internal error, which removes all shadows."""
        return self._shadows

    def fail(self, label: str, error: Exception) -> None:
        """Log an error in the shadow whose setting has this label. `Shadows` has already removed the shadow.

        Thread: any.
        """
        self._log.error("kvoffload: what_if %s has failed and is left out: %r", label, error)

    def finished(self, ctx: RequestContext, num_skipped: int = -1, asked_end: int = -1) -> None:
        """Record a finished request for the shadows (see `Shadows.finished`)."""
        if self._shadows is not None:
            try:  # not `_contained`, because the context manager takes as long as the report
                self._shadows.finished(ctx, num_skipped, asked_end)
            except Exception as error:
                self._stop(error)

    def restart(self, make: Callable[[], Shadows], now_s: float) -> None:
        """Replace the shadows, for instance after a change of the serving manager's policy.

        The thread creates the new shadows with `make`. All counts start at 0, and a new period begins. If an
        internal error has removed all shadows, they are not replaced.
        """
        self._make, self._is_quiet = make, False
        self._period_from_s, self._reported_s = now_s, now_s

    def work(self) -> None:
        """Start the thread's next task, if a task is due and the last task has ended.

        Call this once in each step of the engine. Recorded requests are served when there are enough of them,
        or when the next report is due.
        """
        shadows = self._shadows
        if shadows is None or (self._is_quiet and not shadows.is_due) or self._background.is_busy:
            return
        with self._contained():
            self._collect()
            self._start()

    def _collect(self) -> None:
        """Take the results of the thread's last task."""
        self._background.check()
        if self._made:
            self._shadows = self._made.pop()
            self._is_clearing = self._has_forgotten = False

    def _start(self) -> None:
        shadows, make = self._shadows, self._make
        assert shadows is not None
        if make is not None:
            self._make = None
            self._background.run(lambda: self._make_shadows(make))
        elif self._has_forgotten or self._is_clearing or shadows.is_due:
            is_reset, sample = self._has_forgotten, shadows.take()
            self._is_clearing = self._has_forgotten = False
            self._background.run(lambda: _serve(shadows, sample, is_reset))
        else:
            self._is_quiet = True
            return
        self._is_quiet = False

    def _make_shadows(self, make: Callable[[], Shadows]) -> None:
        shadows = make()
        shadows.on_failure = self.fail
        self._made.append(shadows)

    def reset(self) -> None:
        """Forget all blocks. Call this when the serving manager has forgotten its blocks.

        The thread clears the shadows later.
        """
        if self._shadows is not None:
            with self._contained():
                self._shadows.forget()
                self._has_forgotten, self._is_quiet = True, False

    def settle(self) -> None:
        """Serve all recorded requests and wait for the thread. For tests and tools."""
        self._background.wait()
        while self._shadows is not None and (self._make or self._shadows.is_waiting or self._has_forgotten):
            self._is_clearing, self._is_quiet = True, False
            self.work()
            self._background.wait()
        self.work()

    def close(self) -> None:
        """Remove the shadows and end the thread; later calls do nothing."""
        self._shadows = None
        self._background.close()

    def due(self, now_s: float) -> list[Estimate]:
        """Return new estimates, at most every ten seconds and only while the thread is idle.

        At other times, and before the first lookup, returns an empty list. The estimates include the requests
        that the thread has served so far.

        At the end of a period, also logs advice if the gain of a setting exceeds the error of this gain.
        """
        if self._shadows is None or now_s - self._reported_s < REPORT_S or self._background.is_busy:
            return []
        estimates = list[Estimate]()
        with self._contained():
            self._collect()
            if self._make is not None:
                return []
            self._reported_s, self._is_clearing = now_s, self._shadows.is_waiting
            self._is_quiet = False
            estimates = self._shadows.estimates()
            if now_s - self._period_from_s >= PERIOD_S:
                self._period_from_s = now_s
                if text := advice(estimates):
                    self._log.info("kvoffload: %s", text)
                self._shadows.rotate()
        return estimates

    @contextlib.contextmanager
    def _contained(self) -> Iterator[None]:
        """Return a context that, instead of raising an error, logs it and removes all shadows."""
        try:
            yield
        except Exception as error:
            self._stop(error)

    def _stop(self, error: Exception) -> None:
        self._shadows = None
        self._log.error("kvoffload: what_if has stopped after an internal error: %r", error)


def _serve(shadows: Shadows, sample: Sample, is_reset: bool) -> None:
    if is_reset:
        shadows.reset_blocks()
    shadows.serve(sample)


def advice(estimates: Sequence[Estimate]) -> str:
    """Describe the setting whose gain exceeds the error of this gain the most; empty if no gain does."""
    better = [estimate for estimate in estimates if estimate.is_better]
    if not better:
        return ""
    best = max(better, key=lambda estimate: estimate.gain - estimate.gain_error)
    return (
        f"what_if: with {best.setting} RAM would serve {with_error(best.hit_ratio, best.error)} of the "
        f"looked-up blocks instead of {with_error(estimates[0].hit_ratio, estimates[0].error)}: "
        f"{with_error(best.gain, best.gain_error, '+')} (95 % interval)"
    )
