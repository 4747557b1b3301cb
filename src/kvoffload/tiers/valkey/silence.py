"""A connection that fails if the server is silent. For replays, which have long deadlines."""

from __future__ import annotations

import time
from collections.abc import Sequence

from kvoffload.tiers.shared.addresses import Addresses
from kvoffload.tiers.shared.remote_errors import SilentError
from kvoffload.tiers.valkey.resp import Buffer, Connection, Login

_PIECE_BYTES = 64 << 10


class ImpatientConnection(Connection):
    """A `Connection` whose calls raise `SilentError` after `silence_s` seconds without progress.

    Progress is every received byte, and every piece of 64 KiB that the server accepts.
    """

    def __init__(
        self,
        host: str,
        port: int,
        login: Login,
        deadline: float,
        addresses: Addresses | None = None,
        *,
        silence_s: float,
    ) -> None:
        self._silence_s = silence_s
        super().__init__(host, port, login, deadline, addresses)

    def send(self, buffers: Sequence[Buffer], deadline: float) -> None:
        for buffer in buffers:
            view = memoryview(buffer)
            for start in range(0, len(view), _PIECE_BYTES):
                until = self._until(deadline)
                try:
                    super().send([view[start : start + _PIECE_BYTES]], until)
                except TimeoutError:
                    self._raise_timeout(deadline)

    def receive(self, into: Sequence[memoryview], deadline: float, flags: int = 0) -> int:
        until = self._until(deadline)
        try:
            return super().receive(into, until, flags)
        except TimeoutError:
            self._raise_timeout(deadline)
            raise

    def _until(self, deadline: float) -> float:
        return min(deadline, time.monotonic() + self._silence_s)

    def _raise_timeout(self, deadline: float) -> None:
        if time.monotonic() < deadline:
            raise SilentError(f"nothing received for {self._silence_s:g} s") from None
        raise TimeoutError("deadline exceeded") from None
