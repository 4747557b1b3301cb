"""Hints in a recording: each different one is written once, without a user's text."""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import replace

import msgspec

from kvoffload.core.hints import Hints

_REASONS = frozenset(("", "stop", "length", "abort", "tool_calls", "error", "repetition", "content_filter"))
_MOST = 4096


class HintNumbers:
    """Numbers of hints, from 1. Tenants and unusual finish reasons become salted hashes.

    Decisions depend on which hints are equal, not on their text. The salt is not stored.
    """

    def __init__(self) -> None:
        self._salt = secrets.token_bytes(32)
        self._known: dict[Hints, int] = {}
        self._num_assigned = 0

    def number(self, hints: Hints) -> tuple[int, bytes]:
        """Return the number of these hints, and their text if the number is new."""
        number = self._known.get(hints)
        if number is not None:
            return number, b""
        if len(self._known) >= _MOST:
            self._known.clear()
        self._num_assigned += 1
        self._known[hints] = self._num_assigned
        return self._num_assigned, msgspec.json.encode(self._renamed(hints))

    def _renamed(self, hints: Hints) -> Hints:
        reason = hints.finish_reason
        return replace(
            hints,
            tenant=self._name(hints.tenant) if hints.tenant else "",
            finish_reason=reason if reason in _REASONS else self._name(reason),
        )

    def _name(self, text: str) -> str:
        return hashlib.blake2b(text.encode(), digest_size=8, key=self._salt).hexdigest()


def hints_of(text: bytes) -> Hints:
    """Read hints from the text of a recording. Raises `msgspec.MsgspecError`."""
    return msgspec.json.decode(text.rstrip(b"\0"), type=Hints)
