"""Containment of internal errors: the engine continues without offloading.

Owns the rule. Does not know the answers of an adapter, nor how an adapter stops.
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
    answer: Any, *, before: Callable[[Any], None] | None = None
) -> Callable[[Method[T]], Method[T]]:
    """Make a method of a `Breakable` that never raises an `Exception`.

    Args:
        answer: the result if the method raises, and of every call once the adapter is broken; or a function
            that returns the result for the arguments of the call.
        before: called first with the adapter, also if the adapter is broken.
    """

    def wrap(method: Method[T]) -> Method[T]:
        @functools.wraps(method)
        def call(self: Breakable, *args: Any, **kwargs: Any) -> T:
            if before is not None:
                before(self)
            if not self.broken:
                try:
                    return method(self, *args, **kwargs)
                except Exception:
                    self.stop_after_error(method.__name__)
            result: T = answer(*args, **kwargs) if callable(answer) else answer
            return result

        return call

    return wrap
