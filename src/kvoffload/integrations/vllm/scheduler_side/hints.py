"""Translates the fields of a vLLM request into hints. Does not know how policies use hints."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from kvoffload.core.hints import NO_HINTS, Hints

PARAMETER = "kvoffload"
"""Key of the user's hints in a request's ``kv_transfer_params``."""


class _UserHints(msgspec.Struct, forbid_unknown_fields=True):
    session_over: bool = False
    priority: int | None = None
    time_to_live_s: Annotated[float, msgspec.Meta(ge=0)] | None = None
    tenant: str | None = None


def user_hints(kv_transfer_params: Any) -> Hints:
    """Parse a user's hints: ``{"kvoffload": {"session_over": true, "priority": 1, "time_to_live_s": 600,
    "tenant": "a"}}``, all fields optional.

    Raises `ValueError` that names the wrong field and the allowed ones.
    """
    given = kv_transfer_params.get(PARAMETER) if isinstance(kv_transfer_params, dict) else None
    if given is None:
        return NO_HINTS
    try:
        hints = msgspec.convert(given, _UserHints)
    except msgspec.ValidationError as error:
        allowed = ", ".join(_UserHints.__struct_fields__)
        raise ValueError(f"kv_transfer_params: {PARAMETER}: {error}; allowed: {allowed}") from error
    return Hints("", hints.session_over, hints.priority or 0, hints.time_to_live_s, hints.tenant or "")


def arrival_hints(request: Any) -> Hints:
    """Return the priority of a new request of vLLM; its cache salt is the tenant."""
    priority, salt = request.priority, request.cache_salt
    return Hints(priority=priority, tenant=salt or "") if priority or salt else NO_HINTS


def finish_hints(request: Any) -> Hints:
    """Return the finish reason of a vLLM request: ``stop``, ``length``, ``abort``, ...

    After ``stop`` follows the stop token or string, except the usual end-of-text token: some models end a
    tool call with a special token.
    """
    reason = request.get_finished_reason()
    if reason is None:
        return NO_HINTS
    stopped_by = request.stop_reason
    return Hints(finish_reason=str(reason) if stopped_by is None else f"{reason} {stopped_by}")
