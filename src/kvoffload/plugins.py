"""How a policy or an admission rule is found by what the user typed."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import Any, Generic, TypeVar

from kvoffload.errors import ConfigError

T = TypeVar("T")


class Registry(Generic[T]):
    """Classes by name: built in, from an installed package's entry points, or as ``module:Class``.

    A class is imported when it is asked for.
    """

    def __init__(self, field: str, base: type[Any], group: str, builtin: Mapping[str, str]) -> None:
        self._field, self._base, self._group, self._builtin = field, base, group, dict(builtin)

    def names(self) -> list[str]:
        """Names that `find` knows, sorted."""
        return sorted({*self._builtin, *(point.name for point in entry_points(group=self._group))})

    def find(self, name: str | type[T]) -> type[T]:
        """The class called `name`, or itself. Raises `ConfigError`: what is allowed, and what is near."""
        if not isinstance(name, str):
            return self._check(name, name)
        for point in entry_points(group=self._group):
            if point.name == name and name not in self._builtin:
                return self._check(name, point.load())
        module, _, attribute = self._builtin.get(name, name).partition(":")
        if not attribute:
            near = difflib.get_close_matches(name, self.names(), 1)
            hint = f" (did you mean {near[0]}?)" if near else ""
            raise ConfigError(self._field, name, f"allowed: {', '.join(self.names())}, or module:Class{hint}")
        try:
            found = getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError) as error:
            raise ConfigError(self._field, name, f"it cannot be imported: {error}") from error
        return self._check(name, found)

    def _check(self, name: object, found: object) -> type[T]:
        if not (isinstance(found, type) and issubclass(found, self._base)):
            raise ConfigError(self._field, name, f"it must be a subclass of {self._base.__name__}")
        return found
