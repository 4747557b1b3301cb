"""A cut is a process that replays one part of a recording, and then writes the header and state with which
the next part begins.

The process runs beside the engine, with the lowest priority. The engine does not write the state itself: to
copy the state, an engine step would have to wait for more than 2 ms. The replay also compares its decisions
with the recorded decisions.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

from msgspec.structs import replace

from kvoffload._version import __version__
from kvoffload.calls.file_format import CONTINUED, FrameReader, FrameWriter
from kvoffload.calls.replay import CallReplay
from kvoffload.calls.state import encode
from kvoffload.errors import KVOffloadError

_MOST_SHOWN = 300


class CutProcess:
    """Runs a cut in a separate process. Raises `OSError` if the process cannot be started."""

    def __init__(self, part: Path, beginning: Path) -> None:
        if not sys.executable:
            raise OSError("this Python has no executable")
        command = "from kvoffload.calls.cut import main; main()"
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", command, str(part.absolute()), str(beginning.absolute())],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))},
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )

    def poll(self) -> str | None:
        """Return None while the process runs, an empty text after success, or the reason of a failure."""
        code = self._process.poll()
        if code is None:
            return None
        if code == 0:
            return ""
        assert self._process.stderr is not None
        lines = self._process.stderr.read().decode(errors="replace").strip().splitlines()
        return lines[-1][:_MOST_SHOWN] if lines else f"the replay of the part ended with code {code}"

    def stop(self) -> None:
        """End the process."""
        with contextlib.suppress(OSError):
            self._process.kill()
        self._process.wait()
        assert self._process.stderr is not None
        self._process.stderr.close()


def write_beginning(part: Path, beginning: Path) -> str:
    """Replay a part and write the header and state of the next part to `beginning`.

    Returns an empty text after success, or the reason of a failure.
    """
    with FrameReader(part) as reader:
        if reader.header.kvoffload != __version__:
            return f"the replay has version {__version__} of kvoffload, the engine {reader.header.kvoffload}"
        replay = CallReplay(reader)
        outcome = replay.run()
        if outcome.difference is not None:
            return f"the replay of {part} differs from the recording at call {outcome.difference.call:,}"
        if outcome.end != CONTINUED or outcome.warnings:
            return f"{part} is damaged"
        frames = FrameWriter()
        header = replace(reader.header, part=reader.header.part + 1, has_state=True)
        beginning.write_bytes(frames.header(header) + frames.state(encode(replay.state())))
    return ""


def main() -> None:
    """Run `write_beginning`; the entry point of the process that `CutProcess` starts."""
    part, beginning = map(Path, sys.argv[1:])
    engine = os.getppid()
    os.nice(19)
    try:
        problem = write_beginning(part, beginning)
    except (OSError, KVOffloadError, MemoryError) as error:
        problem = str(error) or type(error).__name__
    if os.getppid() != engine:  # no process waits for the file
        beginning.unlink(missing_ok=True)
    sys.exit(problem or 0)
