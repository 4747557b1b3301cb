"""What the twins of policies share."""

from __future__ import annotations

from collections.abc import Iterable

from kvoffload.core.protection import Protected


def first_unprotected(slots: Iterable[int], protected: Protected) -> int | None:
    """The first of `slots` that may leave, or None."""
    return next((slot for slot in slots if slot not in protected), None)
