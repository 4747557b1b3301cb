"""A CPU time limit for calls of a policy, so that an endless loop fails the test."""

from __future__ import annotations

import signal
import threading
from types import FrameType

from kvoffload.core.policy import EvictionPolicy


class EndlessLoopError(BaseException):
    """Raised inside a policy's method that does not return.

    Derived from `BaseException`, because Hypothesis shrinks every failure that is an `Exception`: Hypothesis
    would run the endless loop again and again.
    """


class CallLimit:
    """A CPU time limit for each call of a policy.

    An endless call is stopped after at least `cpu_s` and at most twice `cpu_s` seconds.

    From `begin` to `end`, a timer signal arrives after every `cpu_s` seconds of CPU time. Its handler raises
    `EndlessLoopError` if the policy is still in the same call as at the previous signal. Loops in compiled
    code are not detected, because Python handles a signal only after this code has returned. Thread: main; in
    other threads the class does nothing.
    """

    def __init__(self, cpu_s: float) -> None:
        self._cpu_s = cpu_s
        self._last: FrameType | None = None

    def begin(self) -> None:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGVTALRM, self._check)
            signal.setitimer(signal.ITIMER_VIRTUAL, self._cpu_s, self._cpu_s)

    def end(self) -> None:
        if threading.current_thread() is threading.main_thread():
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            signal.signal(signal.SIGVTALRM, self._before)
        self._last = None

    def _check(self, number: int, frame: FrameType | None) -> None:
        call, name, inner = None, "", frame
        while frame is not None:
            if isinstance(frame.f_locals.get("self"), EvictionPolicy):
                call, name = frame, name or frame.f_code.co_name
            frame = frame.f_back
        if call is not None and call is self._last and inner is not None:
            policy = call.f_locals["self"]
            raise EndlessLoopError(
                f"policy {policy.name!r} does not return from {name}(): after {self._cpu_s:g} s of CPU time "
                f"it is in line {inner.f_lineno} of {inner.f_code.co_filename}"
            )
        self._last = call
