"""The replay of a whole recording: its parts in order, from the first part that exists."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from kvoffload.calls.file_format import CONTINUED, FrameReader
from kvoffload.calls.replay import CallReplay, Outcome


def replay_series(paths: Sequence[Path], progress: Callable[[float], None] = lambda done: None) -> Outcome:
    """Replay the parts of a recording (`parts.parts_of`), up to the first difference.

    The replay of a part starts from the state at the part's beginning. If a part has no state, because the
    engine ended before the state was written, its replay continues with the state of the previous part.

    Returns:
        The outcome of all parts together. The number of a differing call counts from the beginning of its
        part.

    Raises: `TraceError` for a part that cannot be replayed; `OSError` for a file that cannot be read.
    """
    outcomes: list[Outcome] = []
    before: CallReplay | None = None
    num_done = 0
    for path in paths:
        with FrameReader(path) as reader:
            before = CallReplay(reader, before=before)
            outcomes.append(before.run(lambda num_read: progress(num_done + num_read)))  # noqa: B023
            num_done += reader.num_bytes
        if outcomes[-1].difference is not None:
            break
        if path != paths[-1] and outcomes[-1].end != CONTINUED:
            outcomes[-1].warnings.append(f"{path.name} has no end: its last calls are missing")
    return _together(outcomes)


def _together(outcomes: list[Outcome]) -> Outcome:
    first, last = outcomes[0], outcomes[-1]
    total = Outcome(first.header, difference=last.difference, end=last.end, num_parts=len(outcomes))
    for outcome in outcomes:
        total.calls += outcome.calls
        total.num_cut += outcome.num_cut
        total.warnings += [warning for warning in outcome.warnings if warning not in total.warnings]
    return total
