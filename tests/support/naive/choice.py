"""A helper of several twins."""

from __future__ import annotations

from collections.abc import Iterable

from kvoffload.core.protection import Protected


def first_unprotected(slots: Iterable[int], protected: Protected) -> int | None:
    """Return the first unprotected slot, or None."""
    return next((slot for slot in slots if slot not in protected), None)
