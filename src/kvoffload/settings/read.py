"""Reads and checks values that users type: sizes, capacities, durations, options.

A group of options is described by a dataclass with one field for each option. The field's type, an
``Annotated`` with bounds (`msgspec.Meta`) or with a `Parser`, states the allowed values. `convert` reads one
value, and `read_options` builds a whole dataclass.
"""

from __future__ import annotations

import difflib
import functools
import math
import re
import types
import typing
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, fields
from typing import Annotated, Any, Protocol, TypeAlias, TypeVar

import msgspec

from kvoffload.errors import CombinedConfigError, ConfigError, Problems

T = TypeVar("T")

_UNITS = {"": 1, "B": 1, "PIB": 1024**5}
for _power, _letter in enumerate("KMGT", 1):
    _UNITS |= {f"{_letter}B": 1000**_power}
    _UNITS |= dict.fromkeys((_letter, f"{_letter}I", f"{_letter}IB"), 1024**_power)

MOST_BLOCKS = 2**30
ANY_TRACE = MOST_BLOCKS
"""Number of unique blocks that is assumed if capacities are checked before the trace is read."""
_NUMBER = re.compile(r"(\d{1,30}(?:\.\d{1,30})?)\s*([A-Za-z%]*)")
"""A number with a unit.

The number of digits is limited, because for very long numbers `int` raises an error and `float` returns
infinity.
"""
_CAPACITIES = "allowed: a number of blocks (5000), a share of the unique blocks (5%), or a size (4GiB)"


# ---- sizes and capacities


def parse_size(field: str, text: str) -> int:
    """Parse a size in bytes: ``64KiB``, ``1.5GiB``, ``64G`` (the same as GiB), ``500MB``, ``4096``.

    Raises `ConfigError`, with the option name `field`, for other texts.
    """
    match = _NUMBER.fullmatch(text.strip())
    if match is None or match[2].upper() not in _UNITS:
        units = "KiB, MiB, GiB, TiB, PiB (or K, M, G, T), KB, MB, GB, TB"
        raise ConfigError(field, text, f"allowed: bytes, or a number with {units}")
    if "." not in match[1]:
        return int(match[1]) * _UNITS[match[2].upper()]
    return int(float(match[1]) * _UNITS[match[2].upper()])


def parse_capacity(field: str, text: str, block_bytes: int | None, unique_blocks: int) -> int:
    """Parse a capacity: ``5000`` blocks, ``5%`` of `unique_blocks`, or a size such as ``4GiB``.

    Returns a number of blocks, rounded down.

    Args:
        block_bytes: bytes of one block, needed for sizes; None if unknown, so that sizes are refused.

    Raises: `ConfigError` if the text cannot be parsed, or if the capacity is below one block or above
    `MOST_BLOCKS`.
    """
    match = _NUMBER.fullmatch(text.strip())
    if match is None or (match[2] == "" and "." in match[1]):
        raise ConfigError(field, text, _CAPACITIES)
    if match[2] == "":
        blocks, too_few = int(match[1]), "it is less than one block"
    elif match[2] == "%":
        if float(match[1]) > 100:
            raise ConfigError(field, text, "allowed: up to 100%")
        # Exact arithmetic, because 0.29 * 100 is 28.999999999999996 in floating point.
        whole, _, fraction = match[1].partition(".")
        blocks = int(whole + fraction) * unique_blocks // (100 * 10 ** len(fraction))
        too_few = f"it is less than one of the trace's {unique_blocks:,} unique blocks"
    elif match[2].upper() not in _UNITS:
        raise ConfigError(field, text, _CAPACITIES)
    elif block_bytes is None:
        needs = "give --model config.json, or --bytes-per-token 128KiB (Llama 3.1 8B)"
        raise ConfigError(field, text, f"a size needs the bytes of a token: {needs}; {_CAPACITIES}")
    else:
        blocks = parse_size(field, text) // block_bytes
        too_few = f"it is less than one block ({block_bytes:,} B)"
    if blocks < 1:
        raise ConfigError(field, text, f"{too_few}; {_CAPACITIES}")
    if blocks > MOST_BLOCKS:
        raise ConfigError(field, text, f"it is {blocks:,} blocks; allowed: up to {MOST_BLOCKS:,}")
    return blocks


# ---- values by their type


class Parser(Protocol):
    """Protocol of the parsers that mark a type: ``Annotated[int, parser]``.

    Attributes:
        allowed: description of the values that `parse` accepts, for error messages.
    """

    @property
    def allowed(self) -> str: ...

    def parse(self, field: str, value: object) -> Any:
        """Return the parsed value. Raises `ConfigError`, which names `field`, if it is not allowed."""


class _SizeParser:
    """Parser of a size in bytes, given as a number or as text with a unit."""

    def __init__(self, least: int) -> None:
        self._least = least
        self.allowed = "bytes, or a size such as 64GiB" + (", more than nothing" if least else "")

    def parse(self, field: str, value: object) -> int:
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        try:
            size = parse_size(field, str(value)) if isinstance(value, (int, str)) else -1
        except ConfigError:
            size = -1
        if size < self._least:
            raise ConfigError(field, value, f"allowed: {self.allowed}")
        return size


class _UnitParser:
    """Parser of a positive number with an optional unit."""

    def __init__(self, allowed: str, units: Mapping[str, float]) -> None:
        self.allowed, self._units = allowed, units

    def parse(self, field: str, value: object) -> float:
        number = math.nan
        if isinstance(value, str):
            match = _NUMBER.fullmatch(value.strip())
            if match is not None and match[2] in self._units:
                number = float(match[1]) * self._units[match[2]]
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            with suppress(OverflowError):
                number = float(value)
        if not 0.0 < number < math.inf:
            raise ConfigError(field, value, f"allowed: {self.allowed}")
        return number


class OneOf:
    """Parser of a choice among words."""

    def __init__(self, words: Sequence[str]) -> None:
        self.words, self.allowed = words, ", ".join(words)

    def parse(self, field: str, value: object) -> str:
        if value not in self.words:
            raise ConfigError(field, value, f"allowed: {self.allowed}{nearest(value, self.words)}")
        return str(value)


_SECONDS = {"": 1.0, "ms": 0.001, "s": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0, "d": 86400.0}

Duration: TypeAlias = Annotated[
    float, _UnitParser("seconds, more than 0, or a time such as 50ms, 2s, 5min, 12h, 7d", _SECONDS)
]
Factor: TypeAlias = Annotated[
    float, _UnitParser("a number more than 0, such as 2, 0.5 or 2x", {"": 1.0, "x": 1.0})
]
Size: TypeAlias = Annotated[int, _SizeParser(1)]
SizeOrNothing: TypeAlias = Annotated[int, _SizeParser(0)]
Count: TypeAlias = Annotated[int, msgspec.Meta(ge=1)]
CountOrNothing: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]
Positive: TypeAlias = Annotated[float, msgspec.Meta(gt=0)]
NotNegative: TypeAlias = Annotated[float, msgspec.Meta(ge=0)]


def parser_of(kind: Any) -> Parser | None:
    """Return the `Parser` of an ``Annotated`` type; None if the type has none."""
    marks = typing.get_args(kind)[1:] if typing.get_origin(kind) is Annotated else ()
    return next((mark for mark in marks if hasattr(mark, "parse")), None)


def without_none(kind: Any) -> Any:
    """Return `kind` without its ``| None``."""
    if isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union:
        members = [member for member in typing.get_args(kind) if member is not type(None)]
        return members[0] if len(members) == 1 else kind
    return kind


def convert(field: str, value: object, kind: Any) -> Any:
    """Convert `value`, which is often text, to the type `kind`, which may be ``Annotated``.

    Raises: `ConfigError`, with the option name `field` and the allowed values, if that is impossible.
    """
    kind = without_none(kind)
    plain = value
    if hasattr(value, "item"):  # a numpy scalar; an array of several numbers raises here and is refused below
        with suppress(ValueError, RuntimeError):
            plain = value.item()
    if parser := parser_of(kind):
        return parser.parse(field, plain)
    try:
        converted = msgspec.convert(plain, kind, strict=False)
    except (msgspec.ValidationError, UnicodeEncodeError):  # a text may have bytes that are not UTF-8
        converted = math.nan
    if isinstance(converted, float) and not math.isfinite(converted):
        words = typing.get_args(kind) if typing.get_origin(kind) is typing.Literal else ()
        raise ConfigError(field, value, f"allowed: {possible_values(kind)}{nearest(value, words)}")
    return converted


def possible_values(kind: Any) -> str:
    """Describe the values that `convert` accepts for `kind`, such as ``a whole number, 1 or more``."""
    if parser := parser_of(kind):
        return parser.allowed
    if typing.get_origin(kind) is Annotated:
        plain, *metas = typing.get_args(kind)
        return possible_values(plain) + "".join(map(_bounds, metas))
    if typing.get_origin(kind) is typing.Literal:
        return ", ".join(str(word) for word in typing.get_args(kind) if word != "")
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        members = (member for member in typing.get_args(kind) if member is not type(None))
        return " or ".join(map(possible_values, members))
    words = {int: "a whole number", float: "a number", bool: "true, false", str: "a text"}
    return words.get(kind, str(kind))


def nearest(value: object, known: Iterable[str]) -> str:
    """Suggest the known name that is most similar to `value`: `` (did you mean lru?)``; empty if none is."""
    name_of = {name.lower(): name for name in known}
    near = difflib.get_close_matches(str(value).lower(), name_of, 1)
    return f" (did you mean {name_of[near[0]]}?)" if near else ""


def _bounds(meta: msgspec.Meta) -> str:
    if meta.ge is not None:
        return f" from {meta.ge} to {meta.le}" if meta.le is not None else f", {meta.ge} or more"
    words = (("above", meta.gt), ("below", meta.lt), ("up to", meta.le))
    return " and".join(f" {word} {bound}" for word, bound in words if bound is not None)


# ---- options


def option_names(kind: type[Any]) -> dict[str, str]:
    """Return the options that a dataclass describes, as a dict: option name -> attribute name.

    The option has the name of the field, unless the field has ``metadata={"option": NAME}``.
    """
    return {field.metadata.get("option", field.name): field.name for field in fields(kind)}


def read_options(
    kind: type[T],
    given: Mapping[str, Any],
    where: str,
    *,
    other_names: Mapping[str, str] | None = None,
    also_known: Collection[str] = (),
    problems: Sequence[ConfigError] = (),
) -> T:
    """Build the dataclass `kind` from the options in `given`. An option whose value is None counts as absent.

    Args:
        where: name of the group of options for error messages, such as ``tiers[0]``.
        other_names: dict of aliases: alias -> option. An option that is given under several names must have
            the same value under each.
        also_known: names that are accepted but ignored here, because other code reads them.
        problems: problems that the caller found before. They are reported together with the new problems.

    Raises: `CombinedConfigError` if there are problems. It lists each with its option, value and allowed
    values.
    """
    names, aliases = option_names(kind), other_names or {}
    known = sorted({*names, *aliases, *also_known})
    refused = [*problems, *unknown_options(given, known)]
    described: Any = kind
    hints = _hints(described)
    required = {field.name for field in fields(described) if field.default is MISSING}
    values: dict[str, Any] = {}
    for option, attribute in names.items():
        spellings = [option, *(alias for alias, meant in aliases.items() if meant == option)]
        spellings = [name for name in spellings if given.get(name) is not None]
        collected = Problems(where)
        with collected:
            if spellings:
                values[attribute] = _value(spellings, given, hints[attribute])
            elif attribute in required:
                raise ConfigError(option, None, f"give {possible_values(hints[attribute])}")
        refused += collected.found
    if refused:
        raise CombinedConfigError(where, refused)
    return kind(**values)


def given_once(field: str, settings: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Convert pairs of option name and value to a dict.

    Raises: `ConfigError`, which names ``field.option``, if an option occurs twice.
    """
    values: dict[str, str] = {}
    for name, value in settings:
        if name in values:
            raise ConfigError(f"{field}.{name}", value, "it is given twice; give it once")
        values[name] = value
    return values


def within(field: str, options: type[T], given: Mapping[str, Any]) -> T:
    """Build the dataclass `options` from `given`, the value of an option that itself consists of options.

    Raises: the errors of `read_options`, with the name ``field.option`` instead of ``option``.
    """
    try:
        return read_options(options, given, field)
    except CombinedConfigError as several:
        problems = [
            ConfigError(f"{field}.{problem.field}", problem.value, problem.allowed)
            for problem in several.problems
        ]
        raise (problems[0] if len(problems) == 1 else CombinedConfigError(field, problems)) from None


@functools.cache
def _hints(kind: type[Any]) -> dict[str, Any]:
    return typing.get_type_hints(kind, include_extras=True)


def check_fields(options: object, where: str) -> None:
    """Check the ``Annotated`` fields of a dataclass that a caller built in Python, not with `read_options`.

    Args:
        where: name of the group of options for error messages.

    Raises: `ConfigError` that lists all problems, if there are any.
    """
    kind: Any = type(options)
    hints, problems = _hints(kind), Problems(where)
    for option, attribute in option_names(kind).items():
        value, hint = getattr(options, attribute), hints[attribute]
        is_unset = value is None and without_none(hint) is not hint
        if typing.get_origin(without_none(hint)) is Annotated and not is_unset:
            with problems:
                convert(option, value, hint)
    problems.check()


def unknown_options(given: Mapping[str, Any], known: Sequence[str], where: str = "") -> list[ConfigError]:
    """Return an error for each option that is not in `known`, with `where` in front of the option's name."""
    why = "there is no such option{}; allowed: " + ", ".join(known)
    return [
        ConfigError(f"{where}{name}", value, why.format(nearest(name, known)))
        for name, value in given.items()
        if name not in known
    ]


def _value(spellings: Sequence[str], given: Mapping[str, Any], kind: Any) -> Any:
    """Convert the value of one option, which is given under all names in `spellings`."""
    first, *aliases = spellings
    value = convert(first, given[first], kind)
    for name in aliases:
        if convert(name, given[name], kind) != value:
            why = f"{first}, another name of this option, is {given[first]!r}; give only one of them"
            raise ConfigError(name, given[name], why)
    return value
