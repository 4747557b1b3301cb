"""The text of a producer for people: packed into a bounded number of bytes, unpacked, and compared.

Tiers identify a producer by a hash of its whole text. They store the packed text beside the hash, for
``inspect`` to show how two producers differ. It is not trusted, and has no part in serving blocks.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

MAX_BYTES = 3072
"""Bytes of a packed text."""
_COMPRESSED = b"\0"
"""First byte of a packed text that zlib has compressed; no text begins with it."""
_MAX_UNPACKED_BYTES = 1 << 18
_LONG_VALUE = 160
_MORE = "(not stored)"
_IN_SUMMARY = ("model", "weights", "vllm", "model.dtype", "dtype", "salt")
ABSENT = "(absent)"
"""In place of a value that only the other producer has."""


class Difference(NamedTuple):
    """A field in which two producers differ, with the value of each."""

    name: str
    first: Any
    second: Any

    def __str__(self) -> str:
        """``rope_theta: 10000 / 1000000``."""
        return f"{_shown(self.name)}: {_shown(self.first)} / {_shown(self.second)}"


def pack(text: str, max_bytes: int = MAX_BYTES) -> bytes:
    """Return a producer's text in at most `max_bytes`.

    A text that is too long is compressed, with long values replaced by digests. If that is still too long the
    last fields are left out, and counted. A text without fields is cut.
    """
    plain = text.encode()
    if len(plain) <= max_bytes:
        return plain
    found, rest = _parsed(text)
    if not found:
        return plain[:max_bytes].decode(errors="ignore").encode()
    fields = {name: _shortened(value) for name, value in sorted(found.items())}
    kept = len(fields)
    while True:
        some = dict(list(fields.items())[:kept])
        if kept < len(fields):
            some[_MORE] = f"{len(fields) - kept} fields"
        packed = _COMPRESSED + zlib.compress(
            (json.dumps(some, separators=(",", ":")) + rest[:256]).encode(), 9
        )
        if len(packed) <= max_bytes or kept == 0:
            return packed
        kept -= max(1, kept // 16)


def unpack(packed: bytes) -> str:
    """Return the text of `pack`. Damaged bytes give a text with replacement signs, or an empty one."""
    if not packed.startswith(_COMPRESSED):
        return packed.decode(errors="replace")
    try:
        text = zlib.decompressobj().decompress(packed[1:], _MAX_UNPACKED_BYTES)
    except zlib.error:
        return ""
    return text.decode(errors="replace")


def fields(text: str) -> dict[str, Any]:
    """Return the fields of a producer's text, by dotted names; of a text without fields the text itself."""
    found, rest = _parsed(text)
    if not found:
        return {"producer": text}
    return {**dict(_flat("", found)), **({"salt": rest} if rest else {})}


def summary(text: str) -> str:
    """Return the fields that people know a producer by, in one line."""
    found = fields(text)
    if len(found) == 1:
        return _shown(next(iter(found.values())))
    known = [f"{name} {_shown(found[name])}" for name in _IN_SUMMARY if found.get(name)]
    return ", ".join([*known, f"{len(found)} fields"])


def differences(first: str, second: str) -> list[Difference]:
    """Return the fields that differ between two producers' texts, by their shortest distinct names."""
    one, other = fields(first), fields(second)
    names = sorted(name for name in {*one, *other} if one.get(name, ABSENT) != other.get(name, ABSENT))
    shown = _short(names)
    return [Difference(shown[name], one.get(name, ABSENT), other.get(name, ABSENT)) for name in names]


def _parsed(text: str) -> tuple[dict[str, Any], str]:
    """The JSON object at the front of a text, and what follows it: a salt."""
    try:
        found, end = json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError):
        return {}, ""
    return (found, text[end:]) if isinstance(found, dict) else ({}, "")


def _flat(before: str, value: Any) -> Iterable[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for name, inner in value.items():
            yield from _flat(f"{before}.{name}" if before else str(name), inner)
    else:
        yield before, value


def _shortened(value: Any) -> Any:
    text = json.dumps(value, sort_keys=True)
    if len(text) <= _LONG_VALUE:
        return value
    return f"sha256 {hashlib.sha256(text.encode()).hexdigest()[:16]} of {len(text)} characters"


def _short(names: list[str]) -> dict[str, str]:
    """Each name's last part, or the whole name where several end so."""
    last = {name: name.rpartition(".")[2] for name in names}
    ends = list(last.values())
    return {name: end if ends.count(end) == 1 else name for name, end in last.items()}


def _shown(value: Any) -> str:
    """A value for a terminal: short, and without the control characters that a hostile server may send."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        value = int(value)
    text = value if isinstance(value, str) else json.dumps(value)
    text = text if len(text) <= _LONG_VALUE else f"{text[:_LONG_VALUE]}..."
    return "".join(sign if sign.isprintable() else repr(sign)[1:-1] for sign in text)
