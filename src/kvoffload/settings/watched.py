"""Settings in a JSON file that the user may change while the process runs."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Generic, TypeVar

import msgspec

from kvoffload.errors import ConfigError
from kvoffload.settings.read import read_options

T = TypeVar("T")
INTERVAL_S = 1.0
"""Shortest time between two checks of the file, in seconds."""


class WatchedFile(Generic[T]):
    """Settings in a JSON file, which is read again whenever it changes.

    A missing file is no error: it means that the user has not given settings yet. To change the settings,
    write a new file and rename it to `path`, because otherwise an incomplete file could be read.

    Args:
        path: the file.
        options: the dataclass that describes the settings (`settings.read`).
        clock: returns monotonic seconds.

    Thread: use an object in one thread only. Cost: at most one `stat` of the file every `INTERVAL_S` seconds.
    """

    def __init__(self, path: str, options: type[T], clock: Callable[[], float] = time.monotonic) -> None:
        self.path, self._options, self._clock = path, options, clock
        self._next_look = -1.0
        self._seen: tuple[int, ...] | str = ""

    def poll(self) -> T | None:
        """Return the settings if the file is new or has changed since the last call, otherwise None.

        Raises:
            ConfigError: the file cannot be read or has a mistake. The error names the file or the option. It
                is raised only once for each version of the file.
        """
        now = self._clock()
        if now < self._next_look:
            return None
        self._next_look = now + INTERVAL_S
        try:
            stat = os.stat(self.path)
            version = stat.st_mtime_ns, stat.st_ctime_ns, stat.st_size, stat.st_ino
            if version == self._seen:
                return None
            with open(self.path, "rb") as file:
                text = file.read()
        except FileNotFoundError:
            self._seen = ""
            return None
        except OSError as error:
            if str(error) == self._seen:
                return None
            self._seen = str(error)
            raise ConfigError("live settings", self.path, f"the file cannot be read: {error}") from None
        self._seen = version
        try:
            given = msgspec.json.decode(text, type=dict[str, object])
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise ConfigError("live settings", self.path, f"allowed: a JSON object: {error}") from None
        return read_options(self._options, given, self.path)
