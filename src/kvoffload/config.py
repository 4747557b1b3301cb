"""Values that users type: sizes and capacities. The same grammar everywhere."""

from __future__ import annotations

import math
import re
import types
import typing
from typing import Any

import msgspec

from kvoffload.errors import ConfigError

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
}
_NUMBER = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z%]*)")


def parse_size(field: str, text: str) -> int:
    """Bytes that ``64KiB``, ``1.5GiB``, ``500MB`` or ``4096`` mean. Raises `ConfigError`."""
    match = _NUMBER.fullmatch(text.strip())
    if match is None or match[2].upper() not in _UNITS:
        raise ConfigError(field, text, "allowed: a number of bytes, or one with KiB, MiB, GiB, TiB, KB, ...")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def split_tier(text: str) -> dict[str, str]:
    """What ``disk:PATH:CAPACITY,policy=NAME,admission=RULE`` says: ``type``, ``path``, ``capacity``, options.

    ``path`` is empty in ``KIND:CAPACITY``. Raises `ConfigError`; who uses the values checks what they mean.
    """
    place, *options = text.split(",")
    kind, _, rest = place.partition(":")
    path, _, capacity = rest.rpartition(":")
    if not kind or not capacity:
        raise ConfigError("tier", text, "allowed: disk:PATH:CAPACITY")
    found = {"type": kind, "path": path, "capacity": capacity}
    for option in options:
        name, _, value = option.partition("=")
        if name not in ("policy", "admission") or not value:
            raise ConfigError("tier", text, f"{option!r} is no option of it; allowed: policy=, admission=")
        found[name] = value
    return found


def parse_capacity(field: str, text: str, block_bytes: int, unique_blocks: int) -> int:
    """Blocks that ``5000``, ``5%`` (of the trace's unique blocks, rounded down) or ``4GiB`` mean.

    Raises `ConfigError` for what cannot be understood, and for less than one block.
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
        # In exact arithmetic: 0.29 * 100 is 28.999999999999996 in floating point.
        whole, _, fraction = match[1].partition(".")
        blocks = int(whole + fraction) * unique_blocks // (100 * 10 ** len(fraction))
        what = f"it is less than one of the trace's {unique_blocks:,} unique blocks"
    elif match[2].upper() in _UNITS:
        blocks, what = (
            parse_size(field, text) // block_bytes,
            f"it is less than one block ({block_bytes:,} B)",
        )
    else:
        raise ConfigError(field, text, allowed)
    if blocks < 1:
        raise ConfigError(field, text, f"{what}; {allowed}")
    return blocks


def convert(field: str, value: object, kind: Any) -> Any:
    """`value`, which may be text, as a `kind`: a type, with bounds where it is ``Annotated`` with
    `msgspec.Meta`. Raises `ConfigError` that says what is allowed."""
    try:
        found = msgspec.convert(value, kind, strict=False)
    except msgspec.ValidationError:
        found = math.nan
    if isinstance(found, float) and not math.isfinite(found):
        raise ConfigError(field, value, f"allowed: {possible_values(kind)}")
    return found


def possible_values(kind: Any) -> str:
    """What `convert` takes, in words: ``a whole number, 1 or more``."""
    if typing.get_origin(kind) is typing.Annotated:
        plain, *metas = typing.get_args(kind)
        return possible_values(plain) + "".join(_bounds(meta) for meta in metas)
    if typing.get_origin(kind) is typing.Literal:
        return ", ".join(map(str, typing.get_args(kind)))
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return " or ".join(possible_values(one) for one in typing.get_args(kind) if one is not type(None))
    words = {int: "a whole number", float: "a number", bool: "true, false", str: "a text"}
    return words.get(kind, str(kind))


def _bounds(meta: msgspec.Meta) -> str:
    if meta.ge is not None:
        return f" from {meta.ge} to {meta.le}" if meta.le is not None else f", {meta.ge} or more"
    words = (("above", meta.gt), ("below", meta.lt), ("up to", meta.le))
    return " and".join(f" {word} {bound}" for word, bound in words if bound is not None)
