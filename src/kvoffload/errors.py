"""Our exceptions. A failure of the *world* (disk, device, network) is a result, not an exception."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index
from typing import SupportsIndex


class KVOffloadError(Exception):
    """Base of every error that kvoffload raises on purpose."""


class ConfigError(KVOffloadError, ValueError):
    """An option or argument is impossible; the message names field, value and what is allowed."""

    def __init__(self, field: str, value: object, allowed: str) -> None:
        self.field, self.value, self.allowed = field, value, allowed
        super().__init__(f"{field}: {value!r} is not possible; {allowed}")


class UnavailableError(ConfigError):
    """An option is possible, and what it names cannot be used now: a disk that is full or does not answer, a
    directory that another process has open. What it names is as it was. An engine goes on without it."""

    def __init__(self, field: str, value: object, why: str) -> None:
        super().__init__(field, value, why)
        self.args = (f"{field}: {value!r} cannot be used now: {why}",)


def check_integer(field: str, value: object, largest: int) -> int:
    """`value`, from 1 to `largest`, as an int; numpy's integers are integers too."""
    if isinstance(value, SupportsIndex) and 1 <= (number := index(value)) <= largest:
        return number
    raise ConfigError(field, value, f"allowed: 1 to {largest}")


class CombinedConfigError(ConfigError):
    """Several impossible options in one message, a line for each; `problems` has them one by one."""

    def __init__(self, where: str, problems: Sequence[ConfigError]) -> None:
        first = problems[0]
        super().__init__(first.field, first.value, first.allowed)
        self.problems = tuple(problems)
        self.args = ("\n  ".join([f"{where}:", *(str(problem) for problem in problems)]),)


class Problems:
    """Collects impossible options, so that a user hears of all of them at once::

    problems = Problems("replay")
    with problems:
        size = parse_size("ram", ram)
    with problems:
        ...
    problems.check()
    """

    def __init__(self, where: str) -> None:
        self._where, self._found = where, list[ConfigError]()

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: object, traceback: object) -> bool:
        if isinstance(error, CombinedConfigError):
            self._found += error.problems
        elif isinstance(error, ConfigError):
            self._found.append(error)
        return isinstance(error, ConfigError)

    def check(self) -> None:
        """Raise what was found: a `ConfigError`, or a `CombinedConfigError` of several."""
        if self._found:
            raise self._found[0] if len(self._found) == 1 else CombinedConfigError(self._where, self._found)


class MisuseError(KVOffloadError, RuntimeError):
    """The caller broke the life-cycle (completed twice, loaded an absent block). Nothing has changed."""


class PolicyError(KVOffloadError, RuntimeError):
    """An eviction policy broke its contract (named a pinned slot, too few victims, a slot twice)."""


class TraceError(KVOffloadError, ValueError):
    """A trace cannot be read; the message names file, line, field and reason."""


class SweepError(KVOffloadError, RuntimeError):
    """A sweep could not be finished; the message names the row or the worker. Finished rows are kept."""


class TierError(KVOffloadError, RuntimeError):
    """A tier behind RAM does not answer, and the caller cannot continue without it."""
