"""Containment of internal errors: the engine continues without offloading.

Each adapter defines the results that calls return after an error, and its reaction (`stop_after_error`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

T = TypeVar("T")
Method = Callable[..., T]


class Breakable(Protocol):
    """An adapter that can stop working: `broken` is True from then on."""

    broken: bool

    def stop_after_error(self, method: str) -> None:
        """Handle the exception that `method` has raised; sets `broken`."""


def contained(
    answer: Any,
    *,
    before: Callable[[Any], None] | None = None,
    when_broken: Callable[[Any], bool] = lambda adapter: False,
) -> Callable[[Method[T]], Method[T]]:
    """Decorator for methods of a `Breakable`: the method then never raises an `Exception`.

    Args:
        answer: result of a call that raises, and of every call to a broken adapter. May be a function, which
            computes the result from the arguments of the call.
        before: called first with the adapter, even if the adapter is broken.
        when_broken: called with a broken adapter; returns True if the method should run nevertheless.
    """

    def wrap(method: Method[T]) -> Method[T]:
        @functools.wraps(method)
        def call(self: Breakable, *args: Any, **kwargs: Any) -> T:
            if before is not None:
                before(self)
            if not self.broken or when_broken(self):
                try:
                    return method(self, *args, **kwargs)
                except Exception:
                    self.stop_after_error(method.__name__)
            result: T = answer(*args, **kwargs) if callable(answer) else answer
            return result

        return call

    return wrap
