"""Registry of policy and admission classes. Users select a class by a name with parameters: ``reuse:2``."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import pkgutil
import sys
import typing
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, Generic, NamedTuple, TypeGuard, TypeVar

from kvoffload.errors import ConfigError
from kvoffload.settings.paths import expanded
from kvoffload.settings.read import convert, nearest, possible_values

T = TypeVar("T")
_Loaded = TypeVar("_Loaded")


class Parameter(NamedTuple):
    """Parameter of a registered class, such as `small_share` of ``s3fifo``.

    Attributes:
        kind: type of the parameter's values; may be ``Annotated`` with bounds.
        allowed: description of the allowed values for error messages.
    """

    name: str
    default: object
    kind: Any
    allowed: str


class Registry(Generic[T]):
    """Finds subclasses of `base` by name. A registry is also a `Parser` of these names.

    A built-in class has the name of its file in `package` (``2q`` for ``_2q.py``). Other packages add classes
    as entry points in the group `package`. Any other class is named ``module:Class`` or
    ``path/to/file.py:Class``.

    Parameters follow the name after commas: ``s3fifo,small_share=0.2``. A value after a colon sets the first
    parameter: ``reuse:2``. A class's parameters are its public class attributes that have an annotation and a
    default, except ``ClassVar``.

    To select a class in another process, send it the text: the process could not unpickle a class of a user's
    file.

    Args:
        field: name of the option in error messages, such as ``policy``.
        base: the abstract class that all registered classes implement.
        package: name of the package with the built-in classes.
    """

    all: ClassVar[list[Registry[Any]]] = []
    """All registries of this process."""

    def __init__(self, field: str, base: type[Any], package: str) -> None:
        self.field, self._base, self._package = field, base, package
        Registry.all.append(self)

    def accepts(self, cls: type[Any]) -> bool:
        """Return True if `cls` is a subclass of this registry's abstract class."""
        return issubclass(cls, self._base)

    @property
    def allowed(self) -> str:
        return f"{', '.join(self.names())}, module:Class, or path/to/file.py:Class"

    def parse(self, field: str, value: object) -> str:
        """Return `value` if it selects a class with allowed parameters, otherwise raise `ConfigError`."""
        if not isinstance(value, str):
            raise ConfigError(field, value, f"allowed: {self.allowed}")
        try:
            self.find(value)
        except ConfigError as problem:
            raise ConfigError(field, value, problem.allowed) from None
        return value

    def names(self) -> list[str]:
        """Return the names of built-in classes and of entry points, sorted."""
        return sorted({*self._built_in, *(point.name for point in self._entry_points())})

    def find(self, spec: str | type[T]) -> type[T]:
        """Return the class that `spec` selects or, if `spec` has parameters, a subclass with these defaults.

        If `spec` is already a class, it is checked and returned.

        Raises: `ConfigError` if `spec` selects no class, or if a parameter or the class is not allowed. The
        message states the allowed values; for an unknown name, also the most similar name.
        """
        if not isinstance(spec, str):
            return self._check(spec, spec)
        name, *settings = spec.split(",")
        base, value = self._named(name)
        if value is None and not settings:
            return base
        known = self.parameters(base)
        given = [setting.partition("=") for setting in settings]
        if value is not None and known:
            given.insert(0, (known[0].name, "=", value))
        elif value is not None:
            raise ConfigError(self.field, spec, f"{name.partition(':')[0]} has no parameters")
        values: dict[str, Any] = {}
        for parameter, equals, text in given:
            match = next((candidate for candidate in known if candidate.name == parameter), None)
            if match is None or not equals or parameter in values:
                names = ", ".join(f"{candidate.name}={candidate.default}" for candidate in known) or "none"
                raise ConfigError(
                    self.field, spec, f"{parameter!r} is unknown or given twice; allowed: {names}"
                )
            try:
                values[parameter] = convert(parameter, text, match.kind)
            except ConfigError as problem:
                raise ConfigError(self.field, spec, f"{parameter}: {problem.allowed}") from None
        values |= {"__module__": base.__module__, "__doc__": base.__doc__}
        return type(base.__name__, (base,), values)

    def parameters(self, cls: type[T]) -> list[Parameter]:
        """Return the parameters of a class, in order of declaration. Evaluates the class's annotations."""
        listed: dict[str, Parameter] = {}
        for owner in reversed(cls.__mro__):
            if not issubclass(owner, self._base) or owner.__module__ == self._base.__module__:
                continue
            hints = typing.get_type_hints(owner, include_extras=True)
            for name in vars(owner).get("__annotations__", {}):
                kind = hints[name]
                if name[0] == "_" or typing.get_origin(kind) is ClassVar or not hasattr(cls, name):
                    continue
                listed[name] = Parameter(name, getattr(cls, name), kind, possible_values(kind))
        return list(listed.values())

    def _named(self, name: str) -> tuple[type[T], str | None]:
        """Return the class that `name` selects, and the text that sets its first parameter.

        This is the text after the colon, such as ``2`` in ``reuse:2``. None: the name sets no parameter.
        """
        known, colon, text = name.partition(":")
        value = text if colon else None
        # Built-in classes first, because a search of entry points reads files of every installed package.
        if home := self._built_in.get(known):
            module = self._import(known, home)
            return next(cls for cls in self._own(module) if cls.name == known), value  # type: ignore[attr-defined]
        for point in self._entry_points():
            if point.name == known:
                return self._check(known, self._loaded(known, point.load)), value
        home, _, attribute = name.rpartition(":")
        if not (home and attribute):
            raise ConfigError(self.field, name, f"allowed: {self.allowed}{nearest(name, self.names())}")
        module = self._import(name, home)
        if not hasattr(module, attribute):
            own = ", ".join(cls.__name__ for cls in self._own(module))
            raise ConfigError(self.field, name, f"{home} has no {attribute}{own and f'; it has {own}'}")
        return self._check(name, getattr(module, attribute)), None

    @property
    def _built_in(self) -> dict[str, str]:
        """Dict of the built-in classes: name of the class -> name of its module."""
        files = pkgutil.iter_modules(importlib.import_module(self._package).__path__)
        return {file.name.lstrip("_"): f"{self._package}.{file.name}" for file in files}

    def _entry_points(self) -> list[EntryPoint]:
        return list(entry_points(group=self._package))

    def _import(self, name: str, home: str) -> ModuleType:
        if home.endswith(".py"):
            home = expanded(self.field, home)
            if not Path(home).is_file():
                raise ConfigError(self.field, name, f"there is no file {home}")
            return self._loaded(name, lambda: _load_file(Path(home)))
        return self._loaded(name, lambda: importlib.import_module(home))

    def _loaded(self, name: str, load: Callable[[], _Loaded]) -> _Loaded:
        """Return the result of `load`, which imports foreign code. Exceptions become a `ConfigError`."""
        try:
            return load()
        except (Exception, SystemExit) as error:
            kind = "" if isinstance(error, (ImportError, SyntaxError)) else f"{type(error).__name__}: "
            raise ConfigError(self.field, name, f"it cannot be imported: {kind}{error}") from error

    def _own(self, module: ModuleType) -> list[type[T]]:
        """Return the subclasses of `base` that are in a module and were defined there or in a submodule."""
        return [
            cls
            for cls in vars(module).values()
            if _is_class(cls)
            and issubclass(cls, self._base)
            and f"{cls.__module__}.".startswith(f"{module.__name__}.")
        ]

    def _check(self, name: object, cls: object) -> type[T]:
        if not (_is_class(cls) and issubclass(cls, self._base)):
            raise ConfigError(self.field, name, f"it must be a subclass of {self._base.__name__}")
        if missing := sorted(getattr(cls, "__abstractmethods__", ())):
            raise ConfigError(self.field, name, f"{cls.__name__} does not implement {', '.join(missing)}")
        needs_name = "name" in getattr(self._base, "__annotations__", ())
        own_name = getattr(cls, "name", None)
        if needs_name and not (isinstance(own_name, str) and own_name):
            why = f'{cls.__name__} needs a class attribute name, such as name = "mine"'
            raise ConfigError(self.field, name, why)
        return cls


def _is_class(value: object) -> TypeGuard[type[Any]]:
    """Return True if `value` is a class.

    `isinstance` alone is not enough: on Python 3.10 it also accepts ``list[int]``.
    """
    return issubclass(type(value), type)


def _load_file(path: Path) -> ModuleType:
    """Import a Python file, unless it is already imported. The module's name is computed from the path."""
    path = path.resolve()
    name = f"{path.stem}_{hashlib.sha256(bytes(path)).hexdigest()[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Registered before the module runs, because dataclasses and pickle look it up by name.
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
