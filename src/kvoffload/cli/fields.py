"""Options of commands. A dataclass field holds an option's name, type, default, help and shared setting.

``@options_of(Kind)`` turns the fields of a dataclass into the arguments and options of a command. The command
is called with an instance of `Kind`. `settings.read.convert` reads the values, and all mistakes are reported
at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import typing
from collections.abc import Callable
from dataclasses import field
from pathlib import Path
from typing import Annotated, Any, TypeVar

import click

from kvoffload.errors import Problems
from kvoffload.settings.layers import SHARED, gathered
from kvoffload.settings.paths import expanded
from kvoffload.settings.read import Duration, OneOf, Size, convert, parser_of, without_none
from kvoffload.tiers.spec import NO_TIERS, parse_tiers

T = TypeVar("T")
Command = Callable[..., None]

CONFIG = "kvoffload.settings.read"
"""Key of the ``--config`` file in a command's click context."""

_METAVARS = {int: "N", float: "X", Size: "SIZE", Duration: "TIME"}


class PathType(click.Path):
    """A path on the command line. Expands a leading ``~``, because a shell does not expand the ``~`` of
    ``--output=~/x``.
    """

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        field = "" if param is None or param.name is None else param.name.replace("_", "-")
        return super().convert(expanded(field, str(value)), param, ctx)


def option(default: Any = dataclasses.MISSING, help: str | None = None, *flags: str, **details: Any) -> Any:
    """Declare a dataclass field as an option. An option without `default` is required.

    Args:
        flags: spellings of the option. Default: ``--field-name``.
        details: `setting` (name in the environment and in ``--config``), `metavar`, and other arguments of
            `click.option`.
    """
    return field(default=default, metadata={"help": help, "flags": flags, **details})


def argument(default: Any = dataclasses.MISSING, **details: Any) -> Any:
    """Declare a dataclass field as a positional argument; `details` are passed to `click.argument`."""
    return field(default=default, metadata={"is_argument": True, **details})


def options_of(kind: type[T]) -> Callable[[Callable[[T], None]], Command]:
    """Return a decorator that adds the options of the dataclass `kind` to a command.

    The command receives an instance of `kind`. A method ``check`` of `kind` can check options that depend on
    each other. During ``check`` each invalid option has its default value.
    """
    described: Any = kind
    hints = typing.get_type_hints(kind, include_extras=True)
    # In the help a command's own options come before the options that it inherits.
    ordered = sorted(dataclasses.fields(described), key=lambda declared: _owner(kind, declared.name))

    def decorate(command: Callable[[T], None]) -> Command:
        @functools.wraps(command)
        def run(**values: Any) -> None:
            command(_read(kind, values, hints))

        decorated: Command = run
        for declared in reversed(ordered):
            decorated = _parameter(declared, hints[declared.name])(decorated)
        settings = {
            declared.metadata["setting"]: declared.name
            for declared in ordered
            if "setting" in declared.metadata
        }
        return _config_option(settings)(decorated) if settings else decorated

    return decorate


def _owner(kind: type[Any], name: str) -> int:
    """Return the index in the MRO of `kind` of the class that declares the field `name`."""
    declares = (name in inspect.get_annotations(base) for base in kind.__mro__)
    return next(position for position, declared in enumerate(declares) if declared)


def _read(kind: type[T], values: dict[str, Any], hints: dict[str, Any]) -> T:
    problems = Problems(click.get_current_context().info_name or "")
    accepted = dict[str, Any]()
    described: Any = kind
    for declared in dataclasses.fields(described):
        value = values[declared.name]
        if value is None or not _is_text(hints[declared.name]):
            accepted[declared.name] = value
            continue
        with problems:
            accepted[declared.name] = convert(_name(declared), _number(value), hints[declared.name])
    if problems.found and _required(described) - set(accepted):
        problems.check()
    options = kind(**accepted)
    if hasattr(options, "check"):
        with problems:
            options.check()
    problems.check()
    return options


def _number(value: Any) -> Any:
    """Convert text to a number if possible, because messages show numbers without quotes."""
    for number in (int, float):
        with contextlib.suppress(ValueError):
            return number(value)
    return value


def _required(kind: Any) -> set[str]:
    fields = dataclasses.fields(kind)
    return {declared.name for declared in fields if declared.default is dataclasses.MISSING}


def _name(declared: dataclasses.Field[Any]) -> str:
    """Return the name of an option in messages: its first flag, without dashes in front."""
    flags = declared.metadata.get("flags") or (declared.name.strip("_").replace("_", "-"),)
    return str(flags[0].removeprefix("--"))


def _is_text(hint: Any) -> bool:
    """Return True if click passes the value of the option as text, so that `convert` must read it."""
    hint = without_none(hint)
    return hint not in (bool, str, Path) and typing.get_origin(hint) is not tuple


def _parameter(declared: dataclasses.Field[Any], hint: Any) -> Callable[[Command], Command]:
    details = {name: value for name, value in declared.metadata.items() if name not in ("flags", "setting")}
    plain, default = without_none(hint), declared.default
    if plain is Path:
        details["type"] = PathType()
    if default is dataclasses.MISSING:
        details.setdefault("required", True)
    else:
        details["default"] = default
    if details.pop("is_argument", False):
        return click.argument(declared.name, **details)
    parser = parser_of(plain)
    if plain is bool:
        details["is_flag"] = True
    elif typing.get_origin(plain) is tuple:
        details["multiple"] = True
    elif isinstance(parser, OneOf):
        details.setdefault("metavar", f"[{'|'.join(parser.words)}]")
    elif _is_text(plain):
        base = typing.get_args(plain)[0] if typing.get_origin(plain) is Annotated else plain
        details.setdefault("metavar", _METAVARS.get(plain, _METAVARS.get(base)))
    if _is_text(plain):
        details["type"] = str
    details.setdefault("show_default", default not in (None, "", (), False, 0.0, dataclasses.MISSING))
    flags = declared.metadata["flags"] or (f"--{_name(declared)}",)
    return click.option(*flags, declared.name, **details)


def _config_option(settings: dict[str, str]) -> Callable[[Command], Command]:
    """Return a decorator that adds ``--config FILE``.

    Defaults of options come from this file and from variables ``KVOFFLOAD_*``.

    Args:
        settings: mapping: shared setting -> name of the field.
    """

    def set_defaults(ctx: click.Context, param: click.Parameter, value: Path | None) -> None:
        ctx.meta[CONFIG] = value
        shared = gathered({"config": value}, SHARED)
        defaults: dict[str, Any] = {settings[name]: shared[name] for name in settings if name in shared}
        if tiers_field := settings.get("tiers") if "tiers" in shared else None:
            tiers = [str(tier) for tier in parse_tiers("tiers", shared["tiers"])]
            repeated = any(
                isinstance(param, click.Option) and param.name == tiers_field and param.multiple
                for param in ctx.command.params
            )
            defaults[tiers_field] = tiers if repeated else "+".join(tiers) or NO_TIERS
        ctx.default_map = {**defaults, **(ctx.default_map or {})}

    return click.option(
        "--config",
        type=PathType(),
        is_eager=True,
        expose_value=False,
        callback=set_defaults,
        help="TOML file with policy, admission, store, ram, tiers. [env: KVOFFLOAD_CONFIG]",
    )
