"""What a sweep or a plan has finished so far, in a file that survives every way to be interrupted.

One line of JSON for each measurement or timed replay, appended when it is there. Knows nothing of grids and
rows.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

import msgspec

from kvoffload.errors import ConfigError
from kvoffload.simulate.report import TimedOutcome
from kvoffload.sweep.task import Measurement


class _Line(msgspec.Struct, omit_defaults=True):
    key: str
    measurement: Measurement | None = None
    timed: TimedOutcome | None = None


def journal_path(output: Path) -> Path:
    """Where the journal of an output is."""
    return output.with_name(output.name + ".journal")


class SweepJournal:
    """Measurements and timed replays by key, in the file ``OUTPUT.journal``, which one process at a time may
    have open.

    Whatever does not read as a line of ours counts as not there: the half line at the end after a
    ``kill -9``, a line of another version. What was written is in the hands of the operating system:
    it survives the end of the process at any point, not that of the machine.

    Attributes:
        found, timed: measurements and timed replays that were there when it was opened.

    Raises: `ConfigError` that names the output, here and where it is added to, if the file cannot be written
    or another process has it.
    """

    def __init__(self, output: Path) -> None:
        self._output, self.path = output, journal_path(output)
        self.found: dict[str, Measurement] = {}
        self.timed: dict[str, TimedOutcome] = {}
        try:
            self._file = self.path.open("a+b", buffering=0)
        except OSError as error:
            raise self._refused(error) from None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._file.close()
            raise ConfigError("output", str(output), "another sweep is writing it now") from None
        self._read()

    def add(self, key: str, measurement: Measurement) -> None:
        """Append one measurement."""
        self._append(_Line(key, measurement))

    def add_timed(self, key: str, outcome: TimedOutcome) -> None:
        """Append one timed replay."""
        self._append(_Line(key, timed=outcome))

    def _append(self, found: _Line) -> None:
        line = msgspec.json.encode(found) + b"\n"
        try:
            written = self._file.write(line)
            if written != len(line):  # The last bytes of a full disk.
                self._file.write(line[written:])
        except OSError as error:
            raise self._refused(error) from None

    def remove(self) -> None:
        """Delete the file: what it was for is done."""
        self.path.unlink(missing_ok=True)

    def close(self) -> None:
        """Close the file, and delete it if there is nothing in it."""
        with contextlib.suppress(OSError):
            if os.fstat(self._file.fileno()).st_size == 0:
                self.path.unlink(missing_ok=True)
        self._file.close()

    def _read(self) -> None:
        self._file.seek(0)
        content = self._file.read()
        end = content.rfind(b"\n") + 1
        for text in content[:end].splitlines():
            with contextlib.suppress(msgspec.MsgspecError):
                line = msgspec.json.decode(text, type=_Line)
                if line.measurement is not None:
                    self.found[line.key] = line.measurement
                if line.timed is not None:
                    self.timed[line.key] = line.timed
        # The next line must not continue a half one.
        self._file.truncate(end)

    def _refused(self, error: OSError) -> ConfigError:
        return ConfigError(
            "output", str(self._output), f"a file that can be written, with its journal ({error.strerror})"
        )
