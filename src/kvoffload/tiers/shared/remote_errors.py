"""Errors of exchanges with a server."""

from __future__ import annotations

import re

from kvoffload.errors import KVOffloadError
from kvoffload.tiers.shared.printable import printable

_CODE = re.compile(r"[A-Z][A-Z0-9_]{0,31}")
_ELSEWHERE = {"MOVED", "ASK", "TRYAGAIN"}
_OF_CLUSTER = {"MOVED", "CLUSTERDOWN", "CROSSSLOT"}

BUSY = "max number of clients reached"
FULL = "OOM"
"""Error code of a server that is full and evicts nothing."""
REPLICA = "READONLY"
"""Error code of a replica that refuses writes."""


class ProtocolError(KVOffloadError):
    """A reply that the protocol does not allow. Further replies on the connection cannot be trusted.

    The message contains no text of the server.
    """


class ServerError(KVOffloadError):
    """An error reply, such as ``OOM command not allowed``. The connection stays usable.

    Args:
        text: text as sent by the server. The error's message is the `printable` text.
        secrets: passwords to mask in the message.

    Attributes:
        code: first word of the text; empty unless it consists of capitals, digits and underscores.
    """

    def __init__(self, text: str, *secrets: str) -> None:
        super().__init__(printable(text, *secrets))
        word = text.partition(" ")[0]
        self.code = word if _CODE.fullmatch(word) else ""

    @property
    def is_busy(self) -> bool:
        """True if the server refuses the connection because it has too many clients now.

        Checks the text of the error, because its code, ``ERR``, is also the code of many other errors.
        """
        return BUSY in str(self)

    @property
    def is_elsewhere(self) -> bool:
        """True if the error means that another node of the cluster has the block."""
        return self.code in _ELSEWHERE

    @property
    def is_of_cluster(self) -> bool:
        """True if only nodes of a cluster reply with this error."""
        return self.code in _OF_CLUSTER


class NotSentError(ConnectionError):
    """Raised for an exchange that was dropped from the queue because a circuit breaker opened."""


class QueuedTooLongError(TimeoutError):
    """Raised for an exchange whose deadline was exceeded while it was queued."""


class CacheResetError(Exception):
    """Raised if the server has another epoch than expected, or none. No result of the exchange counts."""

    def __init__(self) -> None:
        super().__init__("the cache was reset")
