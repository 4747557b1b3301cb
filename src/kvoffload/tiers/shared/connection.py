"""A thread with one connection: it runs batches one after the other. Knows no blocks.

Not the disk's pipeline: there a write waits for a sync of all, here each batch has a deadline of its own.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any, TypeAlias

from kvoffload.tiers.shared.batches import Batch, QueuedTooLongError

CONNECT_S = 0.5

Connect: TypeAlias = Callable[[float], Any]
"""Makes a connection, logged in, by the time (`time.monotonic`) that it is given: what batches speak through,
with `close`, `abort`, `has_received` and `is_in_step` of `resp.Connection`."""


class Line:
    """Runs batches in their order; `deliver` gets each back, on the line's thread, when it has ended. A batch
    that somebody else has claimed is skipped.

    A batch ends by its deadline, however the network fails: it is cut short there, and the connection is
    closed before it is delivered, so that nothing writes to its rows afterwards. The next batch gets a new
    connection.

    Args:
        name: of the thread.

    Thread: `submit`, `stop` on one thread; neither waits.
    """

    def __init__(self, name: str, connect: Connect, deliver: Callable[[Batch], None]) -> None:
        self._connect, self._deliver = connect, deliver
        self._batches: queue.SimpleQueue[Batch | None] = queue.SimpleQueue()
        self._connection: Any = None
        self._stopping = self._is_busy = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread, unless it was started. Raises `RuntimeError` if the process can have no more."""
        if self._thread.ident is None:
            self._thread.start()

    def submit(self, batch: Batch) -> None:
        """Run a batch after those that were submitted before it. The first starts the thread; if that cannot
        be, the batch ends at once with the error."""
        try:
            self.start()
        except RuntimeError as error:
            if batch.claim():
                batch.error, batch.ended = error, time.monotonic()
                self._deliver(batch)
            return
        self._batches.put(batch)

    @property
    def load(self) -> int:
        """Batches that have not ended, about."""
        return self._batches.qsize() + self._is_busy

    def stop(self) -> None:
        """Cut short what is under way, and end the thread."""
        self._stopping = True
        self._batches.put(None)
        connection = self._connection
        if connection is not None:
            connection.abort()

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread's end."""
        if self._thread.ident is None:
            return True
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # ---- its thread

    def _run(self) -> None:
        while True:
            batch = self._batches.get()
            if batch is None:
                self._hang_up()
                return
            if not batch.claim():
                continue  # the tier has given it up
            self._is_busy = True
            try:
                if time.monotonic() >= batch.deadline:
                    raise QueuedTooLongError("deadline exceeded while queued")
                self._say(batch)
            except Exception as error:
                # The network's failure, a refusal, a reset, or our bug: what comes next on this connection is
                # the answer to something that nobody waits for any more.
                batch.error = error
                self._hang_up()
            if batch.hangs_up:
                self._hang_up()
            batch.ended = time.monotonic()
            self._is_busy = False
            self._deliver(batch)
            del batch  # with the last reference to the pool's rows

    def _say(self, batch: Batch) -> None:
        if self._connection is not None and not self._connection.is_in_step:
            self._hang_up()  # the next answer would be the one to something else
        if self._connection is not None:
            self._connection.has_received = False
            try:
                batch.run(self._connection)
                return
            except ConnectionError:
                # Servers, and what stands before them, close connections that were idle; one finds out when
                # one speaks. A server that is gone is found out by the second attempt.
                if self._connection.has_received:
                    raise
                self._hang_up()
        if not self._stopping:
            self._connection = self._connect(min(batch.deadline, time.monotonic() + CONNECT_S))
        if self._stopping or self._connection is None:  # to find an address may have taken long
            raise ConnectionAbortedError("the tier is closed")
        batch.run(self._connection)

    def _hang_up(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
