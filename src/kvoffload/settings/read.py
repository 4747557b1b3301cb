"""Values that users type, and how they are read: sizes, capacities, options. The same everywhere."""

from __future__ import annotations

import difflib
import math
import re
import types
import typing
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import MISSING, fields
from typing import Annotated, Any, TypeAlias, TypeVar

import msgspec

from kvoffload.errors import CombinedConfigError, ConfigError

T = TypeVar("T")

_UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
    "PIB": 2**50,
    **dict.fromkeys(("K", "KI"), 2**10),
    **dict.fromkeys(("M", "MI"), 2**20),
    **dict.fromkeys(("G", "GI"), 2**30),
    **dict.fromkeys(("T", "TI"), 2**40),
}
MOST_BLOCKS = 2**30
_NUMBER = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z%]*)")


# ---- sizes and capacities


def parse_size(field: str, text: str) -> int:
    """Bytes that ``64KiB``, ``1.5GiB``, ``64G`` (the same as GiB), ``500MB`` or ``4096`` mean.

    Raises `ConfigError`.
    """
    match = _NUMBER.fullmatch(text.strip())
    if match is None or match[2].upper() not in _UNITS:
        raise ConfigError(
            field,
            text,
            "allowed: a number of bytes, or one with KiB, MiB, GiB, TiB, PiB (or K, M, G, T), KB, MB, GB, TB",
        )
    if "." not in match[1]:
        return int(match[1]) * _UNITS[match[2].upper()]
    return int(float(match[1]) * _UNITS[match[2].upper()])


def parse_capacity(field: str, text: str, block_bytes: int | None, unique_blocks: int) -> int:
    """Blocks that ``5000``, ``5%`` (of the trace's unique blocks, rounded down) or ``4GiB`` mean.

    `block_bytes` is what a size is divided by; None if nobody has said what a token takes.
    Raises `ConfigError` for what cannot be understood, for less than one block and for too many.
    """
    allowed = "allowed: a number of blocks (5000), a share of the unique blocks (5%), or a size (4GiB)"
    match = _NUMBER.fullmatch(text.strip())
    if match is None:
        raise ConfigError(field, text, allowed)
    if match[2] == "":
        if "." in match[1]:
            raise ConfigError(field, text, allowed)
        blocks, what = int(match[1]), "it is no block"
    elif match[2] == "%":
        if float(match[1]) > 100:
            raise ConfigError(field, text, "allowed: up to 100%")
        # In exact arithmetic: 0.29 * 100 is 28.999999999999996 in floating point.
        whole, _, fraction = match[1].partition(".")
        blocks = int(whole + fraction) * unique_blocks // (100 * 10 ** len(fraction))
        what = f"it is less than one of the trace's {unique_blocks:,} unique blocks"
    elif match[2].upper() in _UNITS:
        if block_bytes is None:
            raise ConfigError(
                field,
                text,
                "a size needs the bytes of a token: give --model config.json, or --bytes-per-token 128KiB "
                "(Llama 3.1 8B); " + allowed,
            )
        blocks, what = (
            parse_size(field, text) // block_bytes,
            f"it is less than one block ({block_bytes:,} B)",
        )
    else:
        raise ConfigError(field, text, allowed)
    if blocks < 1:
        raise ConfigError(field, text, f"{what}; {allowed}")
    if blocks > MOST_BLOCKS:
        raise ConfigError(field, text, f"it is {blocks:,} blocks; allowed: up to {MOST_BLOCKS:,}")
    return blocks


# ---- values by their type


class _SizeParser:
    """What an ``Annotated`` type has where msgspec does not know how to read it.

    Attributes:
        allowed: what `parse` takes, in words.
    """

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


class _DurationParser:
    """Seconds, from a number of them or a text with a unit."""

    allowed = "seconds, more than 0, or a time such as 50ms, 2s, 5min, 12h, 7d"
    _UNITS: typing.ClassVar = {"": 1.0, "ms": 0.001, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}

    def parse(self, field: str, value: object) -> float:
        text = str(value).strip() if isinstance(value, (int, float, str)) and value is not True else ""
        match = _NUMBER.fullmatch(text)
        if match is None or match[2] not in self._UNITS or float(match[1]) == 0.0:
            raise ConfigError(field, value, f"allowed: {self.allowed}")
        return float(match[1]) * self._UNITS[match[2]]


Duration: TypeAlias = Annotated[float, _DurationParser()]
Size: TypeAlias = Annotated[int, _SizeParser(1)]
SizeOrNothing: TypeAlias = Annotated[int, _SizeParser(0)]
Count: TypeAlias = Annotated[int, msgspec.Meta(ge=1)]
Positive: TypeAlias = Annotated[float, msgspec.Meta(gt=0)]


def convert(field: str, value: object, kind: Any) -> Any:
    """`value`, which may be text, as a `kind`: a type, or one that is ``Annotated`` with bounds
    (`msgspec.Meta`) or with an object that has `parse` and `allowed`.

    Raises: `ConfigError` that says what is allowed.
    """
    if isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union:
        (kind,) = (one for one in typing.get_args(kind) if one is not type(None))
    for meta in typing.get_args(kind)[1:] if typing.get_origin(kind) is Annotated else ():
        if hasattr(meta, "parse"):
            return meta.parse(field, value)
    try:
        found = msgspec.convert(value, kind, strict=False)
    except msgspec.ValidationError:
        found = math.nan
    if isinstance(found, float) and not math.isfinite(found):
        words = typing.get_args(kind) if typing.get_origin(kind) is typing.Literal else ()
        raise ConfigError(field, value, f"allowed: {possible_values(kind)}{nearest(value, words)}")
    return found


def possible_values(kind: Any) -> str:
    """What `convert` takes, in words: ``a whole number, 1 or more``."""
    if typing.get_origin(kind) is Annotated:
        plain, *metas = typing.get_args(kind)
        parsers = [meta.allowed for meta in metas if hasattr(meta, "parse")]
        return parsers[0] if parsers else possible_values(plain) + "".join(map(_bounds, metas))
    if typing.get_origin(kind) is typing.Literal:
        return ", ".join(map(str, typing.get_args(kind)))
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return " or ".join(possible_values(one) for one in typing.get_args(kind) if one is not type(None))
    words = {int: "a whole number", float: "a number", bool: "true, false", str: "a text"}
    return words.get(kind, str(kind))


def nearest(value: object, known: Iterable[str]) -> str:
    """`` (did you mean lru?)``, or nothing where no name is near."""
    near = difflib.get_close_matches(str(value), known, 1)
    return f" (did you mean {near[0]}?)" if near else ""


def _bounds(meta: msgspec.Meta) -> str:
    if meta.ge is not None:
        return f" from {meta.ge} to {meta.le}" if meta.le is not None else f", {meta.ge} or more"
    words = (("above", meta.gt), ("below", meta.lt), ("up to", meta.le))
    return " and".join(f" {word} {bound}" for word, bound in words if bound is not None)


# ---- options


def option_names(kind: type[Any]) -> dict[str, str]:
    """The options that a dataclass describes: as users type them -> its attribute.

    A field is an option of its own name, or of ``metadata={"option": ...}``.
    """
    return {one.metadata.get("option", one.name): one.name for one in fields(kind)}


def read_options(
    kind: type[T],
    given: Mapping[str, Any],
    where: str,
    *,
    other_names: Mapping[str, str] | None = None,
    also_known: Collection[str] = (),
    problems: Sequence[ConfigError] = (),
) -> T:
    """The `kind`, a dataclass, that `given` describes. None counts as not given.

    Args:
        where: what these options are called as a whole: ``tiers[0]``.
        other_names: further names of options. One thing under two names is refused unless both say the same.
        also_known: names that are read elsewhere.
        problems: found elsewhere.

    Raises: `CombinedConfigError`: every problem with its option, its value and what is allowed; an unknown
        option with the nearest name.
    """
    described: Any = kind
    names, others, found = option_names(described), other_names or {}, list(problems)
    known = sorted({*names, *others, *also_known})
    found += [
        ConfigError(
            str(name),
            value,
            f"there is no such option{nearest(name, known)}; allowed: {', '.join(known)}",
        )
        for name, value in given.items()
        if name not in known
    ]
    hints = typing.get_type_hints(kind, include_extras=True)
    required = {one.name for one in fields(described) if one.default is MISSING}
    values: dict[str, Any] = {}
    for option, attribute in names.items():
        first = ""
        for name in (option, *(other for other, meant in others.items() if meant == option)):
            if given.get(name) is None:
                continue
            try:
                value = convert(name, given[name], hints[attribute])
            except CombinedConfigError as several:
                found += several.problems
            except ConfigError as problem:
                found.append(problem)
            else:
                if first and values[attribute] != value:
                    why = f"{first} is {given[first]!r}, which is another name for it; give one"
                    found.append(ConfigError(name, given[name], why))
                first, values[attribute] = first or name, values.get(attribute, value)
            required.discard(attribute)
        if attribute in required:
            found.append(ConfigError(option, None, f"it must be given: {possible_values(hints[attribute])}"))
    if found:
        raise CombinedConfigError(where, found)
    return kind(**values)
