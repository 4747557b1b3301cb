"""How a policy or an admission rule is found by what the user typed."""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Mapping
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, TypeVar

from kvoffload.errors import ConfigError

T = TypeVar("T")


class Registry(Generic[T]):
    """Classes by name: built in, from an installed package's entry points, ``module:Class``, or
    ``path/to/file.py:Class``.

    A class is imported when it is asked for, once in a process. A file need not be on the path of Python's
    imports. Its module gets a name that follows from where the file is, so that the class can be pickled,
    and unpickled wherever the same text was looked up before: send the text to other processes.
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
        home, _, attribute = self._builtin.get(name, name).rpartition(":")
        if not (home and attribute):
            near = difflib.get_close_matches(name, self.names(), 1)
            hint = f" (did you mean {near[0]}?)" if near else ""
            others = "module:Class, or path/to/file.py:Class"
            raise ConfigError(self._field, name, f"allowed: {', '.join(self.names())}, {others}{hint}")
        if home.endswith(".py") and not Path(home).is_file():
            raise ConfigError(self._field, name, f"there is no file {home}")
        try:
            module = _load_file(Path(home)) if home.endswith(".py") else importlib.import_module(home)
        except (ImportError, SyntaxError) as error:
            raise ConfigError(self._field, name, f"it cannot be imported: {error}") from error
        except Exception as error:
            kind = type(error).__name__
            raise ConfigError(self._field, name, f"it cannot be imported: {kind}: {error}") from error
        if not hasattr(module, attribute):
            raise ConfigError(self._field, name, f"{home} has no {attribute}{self._hint(module)}")
        return self._check(name, getattr(module, attribute))

    def _hint(self, module: ModuleType) -> str:
        """What a module does have, of its own."""
        own = [
            key
            for key, value in vars(module).items()
            if isinstance(value, type)
            and issubclass(value, self._base)
            and value.__module__ == module.__name__
        ]
        return f"; it has {', '.join(own)}" if own else ""

    def _check(self, name: object, found: object) -> type[T]:
        if not (isinstance(found, type) and issubclass(found, self._base)):
            raise ConfigError(self._field, name, f"it must be a subclass of {self._base.__name__}")
        return found


def _load_file(path: Path) -> ModuleType:
    """Import the module in this file, once: under a name that follows from its place."""
    path = path.resolve()
    name = f"{path.stem}_{hashlib.sha256(bytes(path)).hexdigest()[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Known by its name while it runs: dataclasses and pickle look for it there.
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
