"""Keeps errors of ours away from the engine, which then runs without offloading.

Owns the rule. Does not know what an adapter answers instead, nor how it stops.
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

    def _before_call(self) -> None:
        """Called first in every contained method, broken or not."""

    def _break(self, where: str) -> None:
        """The method `where` raised the exception that is being handled."""


def contained(otherwise: Callable[..., T]) -> Callable[[Method[T]], Method[T]]:
    """Make a method of a `Breakable` that never raises an `Exception`.

    When the method raises, and in every call once the adapter is broken, the result is that of `otherwise`
    with the same arguments.
    """

    def wrap(method: Method[T]) -> Method[T]:
        @functools.wraps(method)
        def call(self: Breakable, *args: Any, **kwargs: Any) -> T:
            self._before_call()
            if not self.broken:
                try:
                    return method(self, *args, **kwargs)
                except Exception:
                    self._break(method.__name__)
            return otherwise(*args, **kwargs)

        return call

    return wrap
