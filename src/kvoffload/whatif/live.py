"""Shadows in a running engine: their periods, reports and advice, and their failures.

An error in a shadow is logged once and never reaches the engine.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence

from kvoffload.core.request import RequestContext
from kvoffload.whatif.estimate import Estimate
from kvoffload.whatif.shadows import Shadows

PERIOD_S = 3600.0
"""Estimates are of the last one to two periods. Advice is given at most once a period."""
REPORT_S = 10.0
TOKENS_PER_SAMPLED_BLOCK = 2048
LEAST_ONE_IN = 8
MOST_BLOCKS = 1024
"""Sampled blocks in a step, for each shadow: less than a millisecond. A longer request is served whole."""


def usual_one_in(tokens_per_block: int) -> int:
    """Return the sampling rate of an engine: a block in 2,048 tokens, and at most one in eight."""
    return max(LEAST_ONE_IN, TOKENS_PER_SAMPLED_BLOCK // max(1, tokens_per_block))


class LiveShadows:
    """Shadows beside a serving manager.

    Args:
        shadows: the shadows; their `on_failure` is replaced.
        now_s: monotonic time.
        log: receives advice and failures.

    Thread: the scheduler's.
    """

    def __init__(self, shadows: Shadows, now_s: float, log: logging.Logger) -> None:
        self._shadows: Shadows | None = shadows
        self._log = log
        self._period_from_s, self._reported_s = now_s, now_s
        self._is_clearing = False
        shadows.on_failure = self.fail

    @property
    def shadows(self) -> Shadows | None:
        """The shadows; None after an error that stopped all of them."""
        return self._shadows

    def fail(self, label: str, error: Exception) -> None:
        """Log the failure of a setting, whose shadow was removed."""
        self._log.error("kvoffload: what_if %s has failed and is left out: %r", label, error)

    def finished(self, ctx: RequestContext, num_skipped: int = -1, asked_end: int = -1) -> None:
        """Report a finished request, see `Shadows.finished`."""
        if self._shadows is not None:
            with self._contained():
                self._shadows.finished(ctx, num_skipped, asked_end)

    def restart(self, make: Callable[[], Shadows], now_s: float) -> None:
        """Replace the shadows, for instance after a change of the serving manager's policy.

        Counts and the period begin again. Shadows that an error has stopped are not replaced.
        """
        if self._shadows is not None:
            with self._contained():
                self._shadows = make()
                self._shadows.on_failure = self.fail
                self._period_from_s, self._reported_s = now_s, now_s

    def work(self, most_blocks: int = MOST_BLOCKS) -> None:
        """Serve waiting requests, for a bounded time. Call it once a step.

        Requests wait until there are enough, or until the next report: the steps after a report serve all.
        """
        shadows = self._shadows
        if shadows is not None and (self._is_clearing or shadows.is_due):
            with self._contained():
                shadows.work(most_blocks)
                self._is_clearing = self._is_clearing and shadows.is_waiting

    def reset(self) -> None:
        """Forget all blocks, as the serving manager does."""
        if self._shadows is not None:
            with self._contained():
                self._shadows.reset()

    def due(self, now_s: float) -> list[Estimate]:
        """Return new estimates, if they are due; otherwise, and before any lookup, an empty list.

        Estimates include the requests that `work` has served.

        At the end of a period the log gets advice if a setting is better than the current one by more than
        its error.
        """
        if self._shadows is None or now_s - self._reported_s < REPORT_S:
            return []
        self._reported_s, self._is_clearing = now_s, self._shadows.is_waiting
        found = list[Estimate]()
        with self._contained():
            found = self._shadows.estimates()
            if now_s - self._period_from_s >= PERIOD_S:
                self._period_from_s = now_s
                if text := advice(found):
                    self._log.info("kvoffload: %s", text)
                self._shadows.rotate()
        return found

    @contextlib.contextmanager
    def _contained(self) -> Iterator[None]:
        """Remove all shadows after an internal error."""
        try:
            yield
        except Exception as error:
            self._shadows = None
            self._log.error("kvoffload: what_if has stopped after an internal error: %r", error)


def advice(found: Sequence[Estimate]) -> str:
    """Describe the setting with the largest gain that is more than its error; empty if there is none."""
    better = [estimate for estimate in found if estimate.is_better]
    if not better:
        return ""
    best = max(better, key=lambda estimate: estimate.gain - estimate.gain_error)
    return (
        f"what_if: with {best.setting} RAM would serve {_percent(best.hit_ratio, best.error)} of the "
        f"looked-up blocks instead of {_percent(found[0].hit_ratio, found[0].error)}: "
        f"{_percent(best.gain, best.gain_error, '+')} (95 % interval)"
    )


def _percent(share: float, error: float, sign: str = "") -> str:
    return f"{100 * share:{sign}.1f} ±{100 * error:.1f} %"
