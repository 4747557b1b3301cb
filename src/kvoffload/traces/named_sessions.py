"""Sessions that a recording names in its requests. If it names none, `traces.statistics` infers sessions."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import msgspec

_NO_PARENT = ("", "-1")
_MOST_CHATS = 1 << 17
"""Number of chats that are remembered as possible parents. They need about 25 MB of memory."""


class SessionNames(msgspec.Struct, omit_defaults=True, kw_only=True):
    """The fields of a request that may name its session.

    A value is a whole number or a text; other values are ignored.
    """

    session: Any = None
    session_id: Any = None
    conversation_id: Any = None
    chat_id: Any = None
    parent_chat_id: Any = None


SESSION_FIELDS = ("session", "session_id", "conversation_id", "chat_id")
"""Names of the fields that may name a session. If several are set, the first of them counts."""


def first_name(*values: object) -> str:
    """Return the first value that can be a name, as text; empty if there is none."""
    for value in values:
        if isinstance(value, (int, str)) and not isinstance(value, bool) and value != "":
            return str(value)
    return ""


class NamedSessions:
    """Names the session of each request by the request's fields.

    If a recording has `parent_chat_id`, as Qwen-Bailian's does, `chat_id` names only a single request. The
    session is then named after the first chat in the chain of parents.

    Memory: the last 131,072 chats. If the parent of a chat is not among them, the session is named after the
    parent.
    """

    def __init__(self) -> None:
        self._first_chat: OrderedDict[str, str] = OrderedDict()

    def of(self, request: SessionNames) -> str:
        """Return the name of the request's session; empty if the recording does not name it."""
        if name := first_name(request.session, request.session_id, request.conversation_id):
            return name
        chat = first_name(request.chat_id)
        if request.parent_chat_id is None or not chat:
            return chat
        parent = first_name(request.parent_chat_id)
        first = chat if parent in _NO_PARENT else self._first_chat.get(parent, parent)
        self._first_chat[chat] = first
        if len(self._first_chat) > _MOST_CHATS:
            self._first_chat.popitem(last=False)
        return first
