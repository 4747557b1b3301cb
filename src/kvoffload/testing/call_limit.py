"""A limit to one call of a policy: an endless loop in it ends a test and names the place; nothing hangs."""

from __future__ import annotations

import signal
import threading
from types import FrameType

from kvoffload.core.policy import EvictionPolicy


class EndlessLoopError(BaseException):
    """A policy has not returned. Not an `Exception`: Hypothesis would try again and again, to shrink it."""


class CallLimit:
    """Between `begin` and `end` no call of a policy may take more than twice `cpu_s` of CPU time.

    Looks now and then whether the policy is still in the call in which it was at the last look. A loop in a
    compiled policy is not seen: Python's signals wait for its end. Thread: the main one; elsewhere it does
    nothing.
    """

    def __init__(self, cpu_s: float) -> None:
        self._cpu_s = cpu_s
        self._last: FrameType | None = None

    def begin(self) -> None:
        """Begin to look."""
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGVTALRM, self._look)
            signal.setitimer(signal.ITIMER_VIRTUAL, self._cpu_s, self._cpu_s)

    def end(self) -> None:
        """Look no more."""
        if threading.current_thread() is threading.main_thread():
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            signal.signal(signal.SIGVTALRM, self._before)
        self._last = None

    def _look(self, number: int, frame: FrameType | None) -> None:
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
