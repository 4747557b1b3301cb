"""Containment of internal errors: after an error in kvoffload, the engine continues without offloading.

Each engine adapter defines what its calls return after an error, and what else it does then
(`stop_after_error`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

T = TypeVar("T")
Method = Callable[..., T]


class Breakable(Protocol):
    """An adapter that stops working after an internal error. Then its attribute `broken` is True."""

    broken: bool

    def stop_after_error(self, method: str) -> None:
        """Handle the exception that the method named `method` has raised, and set `broken`."""


def contained(
    answer: Any,
    *,
    before: Callable[[Any], None] | None = None,
    when_broken: Callable[[Any], bool] = lambda adapter: False,
) -> Callable[[Method[T]], Method[T]]:
    """Return a decorator for methods of a `Breakable`. A decorated method never raises an `Exception`.

    Args:
        answer: value that the call returns if the method has raised an exception, or if the adapter is
            broken. A function instead of a value is called with the arguments of the call, to compute the
            value.
        before: called with the adapter before each call, even if the adapter is broken.
        when_broken: called with the adapter if it is broken. If it returns True, the method runs
            nevertheless.
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
