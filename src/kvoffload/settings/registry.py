"""How a class is found by what the user typed, with its parameters."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import pkgutil
import sys
import typing
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, Generic, NamedTuple, TypeGuard, TypeVar

from kvoffload.errors import ConfigError
from kvoffload.settings.read import convert, nearest, possible_values

T = TypeVar("T")


class Parameter(NamedTuple):
    """One parameter of a class, as lists show it.

    Attributes:
        default: its value where the user says nothing.
        kind: its type, with bounds.
        allowed: the same in words.
    """

    name: str
    default: object
    kind: Any
    allowed: str


class Registry(Generic[T]):
    """The classes that implement one contract, by name, and how they are created from text.

    A class is known by its name if its module stands in `package`, in a file of that name (with a leading
    underscore where the name begins with a digit), or if an installed package has an entry point of that name
    in the group that is called like `package`. Any other is ``module:Class`` or ``path/to/file.py:Class``.

    Parameters follow behind commas: ``s3fifo,small_share=0.2``. A parameter is a public attribute of the
    class with an annotation and a default, which is not a ``ClassVar``. The value of the first one may follow
    a name behind a colon: ``reuse:2``.

    A class is imported when it is asked for. A file need not be on the path of Python's imports: its module
    gets a name that follows from where the file is, so that the class can be pickled, and unpickled wherever
    the same text was looked up before. Send the text to other processes.

    Args:
        field: what errors call it: ``policy``.
        base: the class of the contract. Parameters are what is declared below it.
        package: where those that come with us stand.
    """

    def __init__(self, field: str, base: type[Any], package: str) -> None:
        self.field, self._base, self._package = field, base, package

    @property
    def allowed(self) -> str:
        """What can be named, in words."""
        return f"{', '.join(self.names())}, module:Class, or path/to/file.py:Class"

    def parse(self, field: str, value: object) -> str:
        """A name that the user gave for `field`, checked. Raises `ConfigError`."""
        if not isinstance(value, str):
            raise ConfigError(field, value, f"allowed: {self.allowed}")
        try:
            self.find(value)
        except ConfigError as problem:
            raise ConfigError(field, value, problem.allowed) from None
        return value

    def names(self) -> list[str]:
        """Names that `find` knows, sorted."""
        return sorted({*self._built_in(), *(point.name for point in self._entry_points())})

    def find(self, spec: str | type[T]) -> type[T]:
        """The class that `spec` names; with parameters, a class derived from it that has them as defaults.

        Raises: `ConfigError`, with what is allowed, and what is near.
        """
        if not isinstance(spec, str):
            return self._check(spec, spec)
        name, *settings = spec.split(",")
        found, value = self._named(name)
        if value is None and not settings:
            return found
        known = self.parameters(found)
        given = [setting.partition("=") for setting in settings]
        if value is not None and known:
            given.insert(0, (known[0].name, "=", value))
        elif value is not None:
            raise ConfigError(self.field, spec, f"{name.partition(':')[0]} has no parameters")
        values: dict[str, Any] = {}
        for parameter, equals, text in given:
            match = next((one for one in known if one.name == parameter), None)
            if match is None or not equals or parameter in values:
                names = ", ".join(f"{one.name}={one.default}" for one in known) or "none"
                raise ConfigError(
                    self.field, spec, f"{parameter!r} is no parameter, or twice; allowed: {names}"
                )
            try:
                values[parameter] = convert(parameter, text, match.kind)
            except ConfigError as problem:
                raise ConfigError(self.field, spec, f"{parameter}: {problem.allowed}") from None
        values |= {"__module__": found.__module__, "__doc__": found.__doc__}
        return type(found.__name__, (found,), values)

    def parameters(self, found: type[T]) -> list[Parameter]:
        """What can be set of a class, in the order of declaration. Cost: evaluates annotations."""
        listed: dict[str, Parameter] = {}
        for owner in reversed(found.__mro__):
            if not issubclass(owner, self._base) or owner.__module__ == self._base.__module__:
                continue
            hints = typing.get_type_hints(owner, include_extras=True)
            for name in vars(owner).get("__annotations__", {}):
                kind = hints[name]
                if name[0] == "_" or typing.get_origin(kind) is ClassVar or not hasattr(found, name):
                    continue
                listed[name] = Parameter(name, getattr(found, name), kind, possible_values(kind))
        return list(listed.values())

    def _named(self, name: str) -> tuple[type[T], str | None]:
        """The class without parameters, and the text behind the colon of a known name."""
        known, colon, text = name.partition(":")
        value = text if colon else None
        for point in self._entry_points():
            if point.name == known and known not in self._built_in():
                return self._check(known, point.load()), value
        if known in self._built_in():
            module = self._import(known, self._built_in()[known])
            return next(found for found in self._own(module) if found.name == known), value  # type: ignore[attr-defined]
        home, _, attribute = name.rpartition(":")
        if not (home and attribute):
            raise ConfigError(self.field, name, f"allowed: {self.allowed}{nearest(name, self.names())}")
        module = self._import(name, home)
        if not hasattr(module, attribute):
            own = ", ".join(found.__name__ for found in self._own(module))
            raise ConfigError(self.field, name, f"{home} has no {attribute}{own and f'; it has {own}'}")
        return self._check(name, getattr(module, attribute)), None

    def _built_in(self) -> dict[str, str]:
        folder = importlib.import_module(self._package).__path__
        return {one.name.lstrip("_"): f"{self._package}.{one.name}" for one in pkgutil.iter_modules(folder)}

    def _entry_points(self) -> list[EntryPoint]:
        return list(entry_points(group=self._package))

    def _import(self, name: str, home: str) -> ModuleType:
        if home.endswith(".py") and not Path(home).is_file():
            raise ConfigError(self.field, name, f"there is no file {home}")
        try:
            return _load_file(Path(home)) if home.endswith(".py") else importlib.import_module(home)
        except (ImportError, SyntaxError) as error:
            raise ConfigError(self.field, name, f"it cannot be imported: {error}") from error
        except Exception as error:
            kind = type(error).__name__
            raise ConfigError(self.field, name, f"it cannot be imported: {kind}: {error}") from error

    def _own(self, module: ModuleType) -> list[type[T]]:
        """The classes of the contract that stand in a module, or in a part of its package."""
        return [
            found
            for found in vars(module).values()
            if _is_class(found)
            and issubclass(found, self._base)
            and f"{found.__module__}.".startswith(f"{module.__name__}.")
        ]

    def _check(self, name: object, found: object) -> type[T]:
        if not (_is_class(found) and issubclass(found, self._base)):
            raise ConfigError(self.field, name, f"it must be a subclass of {self._base.__name__}")
        return found


def _is_class(found: object) -> TypeGuard[type[Any]]:
    """Whether it is a class. To `isinstance` on Python 3.10, ``list[int]`` is one as well."""
    return issubclass(type(found), type)


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
