"""Exceptions of the package.

The failure of a disk, device or network raises no exception: the calls return it as a result.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from math import isfinite, nan
from numbers import Real
from operator import index
from typing import Any, SupportsIndex, TypeVar, cast

E = TypeVar("E", bound=Exception)


class KVOffloadError(Exception):
    """Base class of all kvoffload errors. An error can be pickled if its attributes can be pickled."""

    def __reduce__(self) -> Any:
        # The default would call `__init__` with the message alone.
        return _restored, (type(self), self.args), vars(self)


def _restored(cls: type[E], args: tuple[object, ...]) -> E:
    return cls.__new__(cls, *args)


class ConfigError(KVOffloadError, ValueError):
    """An invalid option or argument. The message names the option, its value and the allowed values."""

    def __init__(self, field: str, value: object, allowed: str) -> None:
        self.field, self.value, self.allowed = field, value, allowed
        super().__init__(f"{field}: {'missing' if value is None else f'{value!r} is invalid'}; {allowed}")


class UnavailableError(ConfigError):
    """A valid option whose resource cannot be used now, for example a full disk or a directory that another
    process uses. The library has not changed the resource. The engine adapters log this error and run without
    the resource.
    """

    def __init__(self, field: str, value: object, why: str) -> None:
        super().__init__(field, value, why)
        self.args = (f"{field}: {value!r} cannot be used now: {why}",)


def check_integer(field: str, value: object, largest: int, smallest: int = 1, meaning: str = "") -> int:
    """Return `value` as an int, if it is an integer of Python or numpy from `smallest` to `largest`.

    `meaning` describes the allowed numbers in the error's message, for example ``a row of the axis batch``.

    Raises: `ConfigError` if `value` is not allowed.
    """
    if not isinstance(value, bool):
        with suppress(TypeError):  # no integer, or an array of several
            if smallest <= (number := index(cast(SupportsIndex, value))) <= largest:
                return number
    raise ConfigError(field, value, f"allowed: {smallest} to {largest}{meaning and f', {meaning}'}")


def finite(value: object) -> float:
    """Convert `value`, a number of Python or numpy, to a float.

    Returns NaN if `value` is infinite or not a number, so that every range check of the caller fails.
    """
    if isinstance(value, Real) and not isinstance(value, bool):
        with suppress(OverflowError):
            if isfinite(number := float(value)):
                return number
    return nan


class CombinedConfigError(ConfigError):
    """Several invalid options in one message, one line each. `problems` holds one error for each option."""

    def __init__(self, where: str, problems: Sequence[ConfigError]) -> None:
        first = problems[0]
        super().__init__(first.field, first.value, first.allowed)
        self.problems = tuple(problems)
        self.args = ("\n  ".join([f"{where}:", *(str(problem) for problem in problems)]),)


class Problems:
    """Collects configuration errors, so that one message reports all of them::

        problems = Problems("replay")
        with problems:
            size = parse_size("ram", ram)
        with problems:
            ...
        problems.check()

    Attributes:
        found: the errors so far.
    """

    def __init__(self, where: str) -> None:
        self._where, self.found = where, list[ConfigError]()

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: object, traceback: object) -> bool:
        if isinstance(error, CombinedConfigError):
            self.found += error.problems
        elif isinstance(error, ConfigError):
            self.found.append(error)
        return isinstance(error, ConfigError)

    def add(self, field: str, value: object, allowed: str) -> None:
        """Collect a `ConfigError` with these arguments."""
        self.found.append(ConfigError(field, value, allowed))

    def check(self) -> None:
        """Raise the collected errors: one `ConfigError`, or several in one `CombinedConfigError`."""
        if self.found:
            raise (self.found[0] if len(self.found) == 1 else CombinedConfigError(self._where, self.found))


class MisuseError(KVOffloadError, RuntimeError):
    """A call that breaks the life cycle of a block, such as a plan completed twice. Changes nothing."""


class GoneError(MisuseError):
    """The block was evicted by another process after this process had looked it up. Look the block up again.

    Raised only by managers that several processes share.
    """


class PolicyError(KVOffloadError, RuntimeError):
    """An eviction policy that broke its contract, for example by naming a pinned slot as a victim."""


class TraceError(KVOffloadError, ValueError):
    """An unreadable trace. The message names file, line, field and reason."""


class SweepError(KVOffloadError, RuntimeError):
    """A sweep that could not finish. The message names the failed row or worker. Finished rows are kept."""


class TierError(KVOffloadError, RuntimeError):
    """A tier behind RAM is unreachable, and the caller cannot continue without it."""


class CanaryError(KVOffloadError, RuntimeError):
    """A server cannot be checked, because it is unreachable or lacks a feature that the check needs.

    Attributes:
        status: HTTP status of an error reply; None for any other problem.
    """

    def __init__(self, message: str, status: int | None = None) -> None:
        self.status = status
        super().__init__(message)
