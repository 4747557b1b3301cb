"""Translates the fields of a vLLM request into hints. Does not know how policies use hints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, TypeAlias

import msgspec

from kvoffload.core.hints import NO_HINTS, Hints

PARAMETER = "kvoffload"
"""Key of the user's hints in a request's ``kv_transfer_params``."""

RETAIN, DEMOTE, PREFETCH, END_SESSION = "retain", "demote", "prefetch", "end_session"
UNKNOWN, INVALID = "unknown", "invalid"
_SPELLINGS = {
    **{name: name for name in (RETAIN, DEMOTE, PREFETCH, END_SESSION)},
    "pin": RETAIN,
    "fetch": PREFETCH,
    "session_end": END_SESSION,
}
_LOWEST_PRIORITY = -1
_RETAIN_PRIORITY = 1


_Priority: TypeAlias = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]


class _Retain(msgspec.Struct):
    """Data of an action of the type ``retain``. vLLM has not defined its fields: the names are proposals."""

    priority: _Priority | None = None
    ttl_s: Annotated[float, msgspec.Meta(ge=0)] | None = None
    duration_s: Annotated[float, msgspec.Meta(ge=0)] | None = None
    retention_seconds: Annotated[float, msgspec.Meta(ge=0)] | None = None
    ttl_ms: Annotated[float, msgspec.Meta(ge=0)] | None = None
    duration_ms: Annotated[float, msgspec.Meta(ge=0)] | None = None

    @property
    def seconds(self) -> float | None:
        given = [self.ttl_s, self.duration_s, self.retention_seconds]
        given += [None if value is None else value / 1000 for value in (self.ttl_ms, self.duration_ms)]
        return next((value for value in given if value is not None), None)


class _UserHints(msgspec.Struct, forbid_unknown_fields=True):
    session_over: bool = False
    priority: _Priority | None = None
    time_to_live_s: Annotated[float, msgspec.Meta(ge=0)] | None = None
    tenant: str | None = None


def user_hints(kv_transfer_params: Any) -> Hints:
    """Parse a user's hints. All fields are optional::

        {"kvoffload": {"session_over": true, "priority": 1, "time_to_live_s": 600, "tenant": "a"}}

    Raises: `ValueError` that names the wrong field and the allowed fields.
    """
    given = kv_transfer_params.get(PARAMETER) if isinstance(kv_transfer_params, dict) else None
    if given is None:
        return NO_HINTS
    try:
        hints = msgspec.convert(given, _UserHints)
    except (msgspec.ValidationError, UnicodeEncodeError) as error:
        allowed = ", ".join(_UserHints.__struct_fields__)
        raise ValueError(f"kv_transfer_params: {PARAMETER}: {error}; allowed: {allowed}") from error
    return Hints("", hints.session_over, hints.priority or 0, hints.time_to_live_s, hints.tenant or "")


def envelope_hints(envelope: Any) -> tuple[Hints, list[str]]:
    """Translate the actions of a request's ``kv_hints`` (vLLM 0.31 and later) into hints. Raises nothing.

    An action is not executed as a command. It becomes a hint, and the policy learns how useful such hints
    are. Only the last part of an action's type matters: ``kv.retain`` means ``retain``. Later actions
    override earlier actions.

    Returns:
        The hints, and for each action its name from `metrics.families.KV_HINTS`.
    """
    hints, names = NO_HINTS, list[str]()
    for action in getattr(envelope, "actions", None) or ():
        kind = str(action.action_type).lower().replace("-", "_").rpartition(".")[2]
        name = _SPELLINGS.get(kind, UNKNOWN)
        try:
            hints = hints.updated(_action_hints(name, action.payload))
        except (msgspec.ValidationError, UnicodeEncodeError):  # a lone surrogate has no UTF-8
            name = INVALID
        names.append(name)
    return hints, names


def _action_hints(name: str, payload: Mapping[str, Any]) -> Hints:
    if name == RETAIN:
        retain = msgspec.convert(payload, _Retain)
        priority = _RETAIN_PRIORITY if retain.priority is None else retain.priority
        return Hints(priority=priority, time_to_live_s=retain.seconds)
    if name == DEMOTE:
        return Hints(priority=_LOWEST_PRIORITY)
    return Hints(session_over=True) if name == END_SESSION else NO_HINTS


def arrival_hints(request: Any) -> Hints:
    """Return the hints of a new vLLM request: its priority, and its cache salt as the tenant."""
    priority, salt = request.priority, request.cache_salt
    return Hints(priority=priority, tenant=salt or "") if priority or salt else NO_HINTS


def finish_hints(request: Any) -> Hints:
    """Return the finish reason of a vLLM request: ``stop``, ``length``, ``abort``, ...

    If a stop string or an unusual stop token ended the request, the reason is ``stop``, a space, and this
    string or token. From it a policy can recognize tool calls, which some models end with a special token.
    """
    reason = request.get_finished_reason()
    if reason is None:
        return NO_HINTS
    stopped_by = request.stop_reason
    return Hints(finish_reason=str(reason) if stopped_by is None else f"{reason} {stopped_by}")
