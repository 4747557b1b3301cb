"""Encodes and decodes the hints and quotas of a recording. Hashes replace the users' texts.

In the records of calls, a number stands for the hints. Equal hints share a number. A recording contains the
text of the hints before the first use of each number.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping
from dataclasses import replace

import msgspec

from kvoffload.core.hints import Hints
from kvoffload.core.tenants import OTHER, Quota

_REASONS = frozenset(("", "stop", "length", "abort", "tool_calls", "error", "repetition", "content_filter"))
MOST_HINTS = 4096
"""Largest number of hints that have a number at the same time. If new hints would exceed this limit, all
earlier hints lose their numbers, and get new numbers when they occur again."""


class HintNumbers:
    """Assigns numbers to hints, from 1. Tenants and unusual finish reasons become salted hashes.

    A replay of the hashes makes the same decisions, because the manager only compares these texts for
    equality. The salt is not stored.
    """

    def __init__(self) -> None:
        self._salt = secrets.token_bytes(32)
        self._known: dict[Hints, int] = {}
        self._num_assigned = 0

    def number(self, hints: Hints) -> tuple[int, bytes]:
        """Return the number that stands for these hints, and the text to record.

        The text is b"" if it has been recorded already.
        """
        number = self._known.get(hints)
        if number is not None:
            return number, b""
        if len(self._known) >= MOST_HINTS:
            self._known.clear()
        self._num_assigned += 1
        self._known[hints] = self._num_assigned
        return self._num_assigned, msgspec.json.encode(self._renamed(hints))

    def quotas(self, quotas: Mapping[str, Quota]) -> bytes:
        """Return the text to record for quotas, with hashes in place of the tenants' names."""
        return msgspec.json.encode({self._tenant(name): quota for name, quota in quotas.items()})

    def _renamed(self, hints: Hints) -> Hints:
        reason = hints.finish_reason
        return replace(
            hints,
            tenant=self._tenant(hints.tenant),
            finish_reason=reason if reason in _REASONS else self._name(reason),
        )

    def _tenant(self, name: str) -> str:
        return name if name in ("", OTHER) else self._name(name)

    def _name(self, text: str) -> str:
        return hashlib.blake2b(text.encode(), digest_size=8, key=self._salt).hexdigest()


def quotas_of(text: bytes) -> dict[str, Quota]:
    """Read quotas from the text of a recording. Raises `msgspec.MsgspecError` for an invalid text."""
    return msgspec.json.decode(text.rstrip(b"\0"), type=dict[str, Quota])


def hints_of(text: bytes) -> Hints:
    """Read hints from the text of a recording. Raises `msgspec.MsgspecError` for an invalid text."""
    return msgspec.json.decode(text.rstrip(b"\0"), type=Hints)
