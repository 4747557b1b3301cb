"""Recorded managers for tests: small rings, and the replay of their recordings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvoffload.calls.format import FrameReader
from kvoffload.calls.recorded import RecordedManager
from kvoffload.calls.recorder import CallRecorder
from kvoffload.calls.replay import CallReplay, Outcome
from kvoffload.core.manager import OffloadingManager


def recorded(
    path: Path, capacity_blocks: int = 5, max_bytes: int = 1 << 30, **options: Any
) -> RecordedManager:
    """Create a manager that records its calls to `path`."""
    return RecordedManager(capacity_blocks, recorder=CallRecorder(path, max_bytes), **options)


def replayed(path: Path, manager: OffloadingManager | None = None) -> Outcome:
    """Replay a recording."""
    with FrameReader(path) as reader:
        return CallReplay(reader, manager).run()
