"""Finds requests whose streaming input continues.

vLLM schedules such a request as new again. Its own connector then appends all blocks of the request to the
blocks of the earlier inputs, and would store blocks under wrong keys (docs/upstream.md).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence


class Sessions:
    """The requests that vLLM has scheduled as new.

    Args:
        resumed_are_new: True if vLLM also schedules preempted requests as new when they resume, as model
            runner V2 does.

    Thread: the scheduler's.
    """

    def __init__(self, *, resumed_are_new: bool) -> None:
        self._resumed_are_new = resumed_are_new
        self._begun: set[str] = set()

    def continued(self, new: Sequence[str], preempted: Collection[str]) -> list[str]:
        """Return the requests whose next input begins in this step. Call it in every step.

        Args:
            new: requests that vLLM schedules as new in this step.
            preempted: requests that vLLM has preempted in this step.
        """
        if self._resumed_are_new:
            self._begun.difference_update(preempted)
        continued = [request_id for request_id in new if request_id in self._begun]
        self._begun.update(new)
        return continued

    def forget(self, request_id: str) -> None:
        """Forget a finished request."""
        self._begun.discard(request_id)
