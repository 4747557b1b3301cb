"""Functions that pack the text of a producer into a bounded number of bytes, and compare two texts.

Tiers identify a producer by a hash of the whole text. They store the packed text beside the hash, so that
``inspect`` can show how two producers differ. The stored text is untrusted: only the hash decides which
blocks are served.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import zlib
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from kvoffload.errors import ConfigError

MAX_BYTES = 3072
"""Limit of a packed text."""
_COMPRESSED = b"\0"
"""First byte of a compressed text. No plain text begins with this byte."""
_BEFORE_SALT = "\n"
"""Separates the salt from the text. Without a separator, "m1" would be equal to "m" with the salt "1"."""
_MAX_UNPACKED_BYTES = 1 << 18
_MOST_NESTED = 64
"""Deepest nesting of objects and lists in a text. Recursive functions would fail on deeper texts."""
_LONG_VALUE = 160
_MORE = "(not stored)"
_IN_SUMMARY = ("model", "weights", "vllm", "model.dtype", "dtype", "salt")
ABSENT = "(absent)"
"""Placeholder for a field that only the other producer has."""


class Difference(NamedTuple):
    """A field that differs between two producers, with both values."""

    name: str
    first: Any
    second: Any

    def __str__(self) -> str:
        """Format the difference as ``rope_theta: 10000 / 1000000``."""
        return f"{_shown(self.name)}: {_shown(self.first)} / {_shown(self.second)}"


def check_producer_text(field: str, text: object) -> str:
    """Return `text`, which must identify a producer.

    Raises: `ConfigError` if `text` is empty or is not valid Unicode.
    """
    with contextlib.suppress(UnicodeEncodeError):
        if isinstance(text, str) and text.encode():
            return text
    raise ConfigError(field, text, "allowed: a text that names the producer")


def add_salt(text: str, salt: str) -> str:
    """Return the text of a producer with a salt added.

    Different pairs of text and salt give different results.

    Args:
        text: a producer's text, of one line.
        salt: "" for none.

    Raises: `ConfigError` for a text of several lines.
    """
    if _BEFORE_SALT in text:
        raise ConfigError("fingerprint", text, "allowed: a text of one line that names the producer")
    return f"{text}{_BEFORE_SALT}{salt}" if salt else text


def producer_of(text: str) -> bytes:
    """Return the 16 bytes that identify a producer in stored blocks and names."""
    return hashlib.sha256(text.encode()).digest()[:16]


def pack(text: str, max_bytes: int = MAX_BYTES) -> bytes:
    """Encode a producer's text in at most `max_bytes`.

    If the text is longer, its long values are replaced by digests, and the result is compressed. If the
    result is still too long, the last fields are left out, and a field with their number is added.
    """
    plain = text.encode()
    if len(plain) <= max_bytes:
        return plain
    named, salt = _parsed(text)
    fields = {name: _shortened(value) for name, value in sorted(named.items())}
    kept = len(fields)
    while True:
        included = dict(list(fields.items())[:kept])
        if kept < len(fields):
            included[_MORE] = f"{len(fields) - kept} fields"
        short = add_salt(json.dumps(included, separators=(",", ":")), salt[:256])
        packed = _COMPRESSED + zlib.compress(short.encode(), 9)
        if len(packed) <= max_bytes or kept == 0:
            return packed
        kept -= max(1, kept // 16)


def unpack(packed: bytes) -> str:
    """Decode the result of `pack`. Damaged bytes give replacement characters, or an empty text."""
    if not packed.startswith(_COMPRESSED):
        return packed.decode(errors="replace")
    try:
        text = zlib.decompressobj().decompress(packed[1:], _MAX_UNPACKED_BYTES)
    except zlib.error:
        return ""
    return text.decode(errors="replace")


def fields(text: str) -> dict[str, Any]:
    """Return the fields of a producer's text by dotted name. The salt has the name ``salt``."""
    named, salt = _parsed(text)
    return {**dict(_flat("", named)), **({"salt": salt} if salt else {})}


def summary(text: str) -> str:
    """Return the main fields of a producer, in one line."""
    named = fields(text)
    if len(named) == 1:
        return _shown(next(iter(named.values())))
    known = [f"{name} {_shown(named[name])}" for name in _IN_SUMMARY if named.get(name)]
    return ", ".join([*known, f"{len(named)} fields"])


def differences(first: str, second: str) -> list[Difference]:
    """Return the fields that differ between two producers' texts. Dotted names are shortened (`_short`)."""
    a, b = fields(first), fields(second)
    names = sorted(name for name in {*a, *b} if a.get(name, ABSENT) != b.get(name, ABSENT))
    short = _short(names)
    return [Difference(short[name], a.get(name, ABSENT), b.get(name, ABSENT)) for name in names]


def _parsed(text: str) -> tuple[dict[str, Any], str]:
    """Split a text into its fields and its salt. A text that is not a JSON object is one field."""
    text, _, salt = text.partition(_BEFORE_SALT)
    with contextlib.suppress(ValueError, RecursionError):
        parsed = json.loads(text)
        if isinstance(parsed, dict) and _is_shallow(parsed):
            return parsed, salt
    return {"producer": text}, salt


def _is_shallow(value: Any) -> bool:
    """Return True if a JSON value has at most `_MOST_NESTED` levels."""
    level = [value]
    for _ in range(_MOST_NESTED):
        if not level:
            return True
        inner = [
            each.values() if isinstance(each, dict) else each
            for each in level
            if isinstance(each, (dict, list))
        ]
        level = [each for several in inner for each in several]
    return not level


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
    """Return a short name for each dotted name: its last part if that is unique, otherwise the whole name."""
    last = {name: name.rpartition(".")[2] for name in names}
    ends = list(last.values())
    return {name: end if ends.count(end) == 1 else name for name, end in last.items()}


def _shown(value: Any) -> str:
    """Format a value for a terminal: truncated, with control characters escaped. Values are untrusted."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        value = int(value)
    text = value if isinstance(value, str) else json.dumps(value)
    text = text if len(text) <= _LONG_VALUE else f"{text[:_LONG_VALUE]}..."
    return "".join(sign if sign.isprintable() else repr(sign)[1:-1] for sign in text)
