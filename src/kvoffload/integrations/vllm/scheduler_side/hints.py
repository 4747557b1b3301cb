"""What vLLM knows of a request, in our words.

Owns the translation. Does not know what a hint is worth: policies learn that.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from kvoffload.core.hints import NO_HINTS, Hints

PARAMETER = "kvoffload"
"""Where in a request's ``kv_transfer_params`` a user may say more."""


class _Told(msgspec.Struct, forbid_unknown_fields=True):
    session_over: bool = False
    priority: int | None = None
    time_to_live_s: Annotated[float, msgspec.Meta(ge=0)] | None = None
    tenant: str | None = None


def told_by_user(kv_transfer_params: Any) -> Hints:
    """What a user says: ``{"kvoffload": {"session_over": true, "priority": 1, "time_to_live_s": 600,
    "tenant": "a"}}``, each part optional.

    Raises `ValueError` that names the field that is wrong, and what is allowed.
    """
    given = kv_transfer_params.get(PARAMETER) if isinstance(kv_transfer_params, dict) else None
    if given is None:
        return NO_HINTS
    try:
        told = msgspec.convert(given, _Told)
    except msgspec.ValidationError as error:
        allowed = ", ".join(_Told.__struct_fields__)
        raise ValueError(f"kv_transfer_params: {PARAMETER}: {error}; allowed: {allowed}") from error
    return Hints("", told.session_over, told.priority or 0, told.time_to_live_s, told.tenant or "")


def known_at_arrival(request: Any) -> Hints:
    """What vLLM knows of a request that has arrived: its priority; its cache salt says whose it is."""
    priority, salt = request.priority, request.cache_salt
    return Hints(priority=priority, tenant=salt or "") if priority or salt else NO_HINTS


def known_at_end(request: Any) -> Hints:
    """How a request of vLLM has ended: ``stop``, ``length``, ``abort``, ...; after ``stop`` also at which
    token or string, if it was not the usual end of a text. So some models end a turn that calls tools."""
    reason = request.get_finished_reason()
    if reason is None:
        return NO_HINTS
    where = request.stop_reason
    return Hints(finish_reason=str(reason) if where is None else f"{reason} {where}")
