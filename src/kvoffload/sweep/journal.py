"""Journal of finished replays, so that an interrupted sweep or plan can continue.

Each finished measurement or timed replay is appended as one line of JSON. This module knows no grids or rows.
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
    return output.with_name(output.name + ".journal")


class SweepJournal:
    """The file ``OUTPUT.journal``, which has the results of measurements and timed replays by key.

    Only one process at a time may open the file. Lines that cannot be decoded are ignored, such as an
    incomplete last line after a ``kill -9``, or a line that another version has written. Appended lines
    survive a ``kill -9`` at any time, but may be lost in a crash of the machine.

    Attributes:
        measurements, timed: results by key, as they were in the file when it was opened.

    Raises: `ConfigError` if the file cannot be written, or if another process has it open.
    """

    def __init__(self, output: Path) -> None:
        self._output, self.path = output, journal_path(output)
        self.measurements: dict[str, Measurement] = {}
        self.timed: dict[str, TimedOutcome] = {}
        try:
            self._file = self.path.open("a+b", buffering=0)
        except OSError as error:
            raise self._refused(error) from None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._file.close()
            raise ConfigError("output", str(output), "another sweep or plan is writing it now") from None
        self._read()

    def add(self, key: str, measurement: Measurement) -> None:
        self._append(_Line(key, measurement))

    def add_timed(self, key: str, outcome: TimedOutcome) -> None:
        self._append(_Line(key, timed=outcome))

    def _append(self, line: _Line) -> None:
        encoded = msgspec.json.encode(line) + b"\n"
        try:
            written = self._file.write(encoded)
            if written != len(encoded):  # The disk is full; the second write raises the error.
                self._file.write(encoded[written:])
        except OSError as error:
            raise self._refused(error) from None

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)

    def close(self) -> None:
        """Close the file, and delete it if it is empty."""
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
                    self.measurements[line.key] = line.measurement
                if line.timed is not None:
                    self.timed[line.key] = line.timed
        # An incomplete last line is removed, because the next line would be appended to it.
        self._file.truncate(end)

    def _refused(self, error: OSError) -> ConfigError:
        return ConfigError("output", str(self._output), f"its journal cannot be written ({error.strerror})")
