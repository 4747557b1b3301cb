"""Recorded managers for tests: small rings, and the replay of their recordings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvoffload.calls.cut import write_beginning
from kvoffload.calls.file_format import FrameReader
from kvoffload.calls.parts import StartCut
from kvoffload.calls.recorded import RecordedManager
from kvoffload.calls.recorder import CallRecorder
from kvoffload.calls.replay import CallReplay, Outcome
from kvoffload.core.manager import OffloadingManager

KEYS = [bytes([number]) * 32 for number in range(1, 40)]


def recorded(
    path: Path, capacity_blocks: int = 5, max_bytes: int = 1 << 30, **options: Any
) -> RecordedManager:
    """Create a manager that records its calls to `path`."""
    return RecordedManager(capacity_blocks, recorder=CallRecorder(path, max_bytes), **options)


class CutHere:
    """A cut in this process, which ends before the constructor returns."""

    def __init__(self, recording: Path, beginning: Path) -> None:
        self.problem = write_beginning(recording, beginning)

    def poll(self) -> str | None:
        return self.problem

    def stop(self) -> None:
        pass


def rotating(
    path: Path,
    capacity_blocks: int = 5,
    max_bytes: int = 1 << 30,
    start_cut: StartCut = CutHere,
    **options: Any,
) -> RecordedManager:
    """Create a recorded manager whose recording rotates in `take`. First set ``recorder.POLL_S`` high."""
    recorder = CallRecorder(path, max_bytes, start_cut=start_cut)
    return RecordedManager(capacity_blocks, recorder=recorder, **options)


def take(manager: RecordedManager) -> None:
    """Write all calls, and rotate the recording if due, in place of the recorder's paused thread."""
    manager.recorder._take(manager._log, True)
    manager.recorder._parts.rotate_if_due()


def complete(manager: RecordedManager) -> None:
    """Write the state at the beginning of the current part, if the state is missing."""
    if manager.recorder._parts._cut is not None:
        take(manager)


def replayed(path: Path, manager: OffloadingManager | None = None) -> Outcome:
    """Replay a recording."""
    with FrameReader(path) as reader:
        return CallReplay(reader, manager).run()


def live(manager: OffloadingManager, first: int, count: int = 4) -> None:
    """Serve a request: load the leading blocks that are ready, store the others."""
    keys = KEYS[first : first + count]
    ctx = manager.begin_request("r", keys)
    if ready := manager.lookup(keys, ctx).num_ready:
        manager.complete_load(manager.prepare_load(keys[:ready], ctx))
    plan = manager.prepare_store(keys, ctx)
    assert plan is not None
    manager.complete_store(plan)
    manager.finish_request(ctx)
