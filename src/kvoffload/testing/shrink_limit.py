"""A CPU time limit for Hypothesis' shrinking, so that a failure is reported within seconds."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import wraps
from typing import Any

from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from hypothesis.database import InMemoryExampleDatabase
from hypothesis.errors import HypothesisException
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

SHRINK_CPU_S = 5.0


class _TimeIsUp(BaseException):
    """Raised when the time for shrinking is over.

    Derived from `BaseException`, because Hypothesis would treat an `Exception` as a failure and go on.
    """


def check_examples(
    check: Callable[..., None], *strategies: st.SearchStrategy[Any], max_examples: int
) -> None:
    """Run a check on random arguments.

    If it fails, shrink for at most `SHRINK_CPU_S`, and raise the smallest failure.
    """
    limit = _Limit()

    @wraps(check)
    def limited(*args: Any, **kwargs: Any) -> None:
        try:
            check(*args, **kwargs)
        finally:
            limit.after_example()

    def run(with_settings: settings) -> None:
        with_settings(given(*strategies)(limited))()

    _run(run, limit, settings(max_examples=max_examples, deadline=None))


def run_machine(machine: type[RuleBasedStateMachine]) -> None:
    """Run a state machine. If it fails, shrink for at most `SHRINK_CPU_S`, and raise the smallest failure."""
    limit = _Limit()

    def teardown(self: RuleBasedStateMachine) -> None:
        machine.teardown(self)
        limit.after_example()

    limited = type(machine.__name__, (machine,), {"teardown": teardown})

    def run(with_settings: settings) -> None:
        run_state_machine_as_test(limited, settings=with_settings)

    _run(run, limit, machine.TestCase.settings)


class _Limit:
    """Raises `_TimeIsUp` if more than `SHRINK_CPU_S` of CPU time have passed since the first failure.

    Raises only at the end of an example, because Hypothesis repeats examples and expects each repetition to
    make the same draws.
    """

    def __init__(self) -> None:
        self.is_on = True
        self._failed_at_s: float | None = None

    def after_example(self) -> None:
        """Record the time of the first failure. Raise `_TimeIsUp` if that was too long ago.

        Call this method in a ``finally`` block: it reads the example's error from `sys.exc_info`.
        """
        error, now_s = sys.exc_info()[1], time.process_time()
        is_failure = isinstance(error, Exception) and not isinstance(error, HypothesisException)
        if self._failed_at_s is None:
            self._failed_at_s = now_s if is_failure else None
        elif self.is_on and now_s - self._failed_at_s > SHRINK_CPU_S:
            raise _TimeIsUp


def _run(run: Callable[[settings], None], limit: _Limit, base: settings) -> None:
    # Without Hypothesis' explanations, which run a failure again under a slow tracer.
    phases = [phase for phase in base.phases if phase is not Phase.explain]
    # The second run reads the smallest failure so far from the database. With --hypothesis-seed nothing is
    # read or written: then the second run generates the first failure again.
    database = base.database or InMemoryExampleDatabase()
    base = settings(base, phases=phases, database=database, report_multiple_bugs=False)
    try:
        run(base)
    except _TimeIsUp:
        limit.is_on = False
        run(settings(base, phases=[Phase.reuse, Phase.generate]))
        raise AssertionError(
            "a check failed once and then passed: the policy does not repeat itself"
        ) from None
