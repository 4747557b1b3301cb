"""The threads that move the blocks of a slab, and the queues of reads and writes.

Does not know policies. The committer decides when a write is durable, and when a slot may be written again.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

import numpy as np

from kvoffload.tiers.disk.chunk import Chunk
from kvoffload.tiers.disk.committer import Committer, fail
from kvoffload.tiers.disk.slab import SOUND, UNREADABLE, Scratch, Slab
from kvoffload.tiers.rate_limited_log import RateLimitedLog


class Pipeline:
    """Reads and writes chunks, and passes each chunk that has ended to `deliver`.

    Reads have priority over writes. With two or more threads, one thread only reads, so that a load does not
    wait for stores. If the committer is broken, writes fail at once, and reads still work.

    Thread: `submit`, `drain` and `close` on one thread; `drain` and `close` wait. `deliver` is called on any
    thread. Raises: `RuntimeError` if a thread cannot be started; no thread is left running.

    Attributes:
        num_threads: number of threads that move blocks.
        num_writing: number of write chunks that threads are moving now.
    """

    def __init__(
        self,
        slab: Slab,
        committer: Committer,
        num_threads: int,
        deliver: Callable[[Chunk], None],
        log: RateLimitedLog,
    ) -> None:
        self._slab, self._committer, self._deliver, self._log = slab, committer, deliver, log
        self._lock, self._settled = committer.lock, committer.settled
        self._work, self._reading = threading.Condition(self._lock), threading.Condition(self._lock)
        self._reads, self._writes = deque[Chunk](), deque[Chunk]()
        self.num_threads, self.num_writing, self._num_in_flight = num_threads, 0, 0
        self._stopping = False
        self._threads = [
            threading.Thread(target=self._move_blocks, args=(n == 0 and num_threads > 1,), daemon=True,
                             name=f"kvoffload-disk-{n}")
            for n in range(num_threads)
        ]  # fmt: skip
        try:
            committer.start(self)
            for thread in self._threads:
                thread.start()
        except RuntimeError:
            self.close(None)
            raise

    # ---- the scheduler's side

    def submit(self, chunks: list[Chunk]) -> None:
        """Queue chunks. One call must not mix reads and writes."""
        writes = chunks[0].writes
        with self._lock:
            self._num_in_flight += len(chunks)
            refused = writes and self._committer.broken
            if not writes:
                self._reads.extend(chunks)
                self._reading.notify()
            elif not refused:
                self._writes.extend(chunk for chunk in chunks if not self._committer.hold(chunk))
            self._work.notify(len(chunks))
        if refused:
            fail(chunks)
            self.end(chunks)

    def drain(self, timeout_s: float | None) -> bool:
        """Wait until all chunks have ended and all changes are durable; returns False on time-out.

        If `timeout_s` is None, the wait has no limit.
        """
        with self._lock:
            self._committer.flush(True)
            try:
                return self._settled.wait_for(
                    lambda: self._num_in_flight == 0 and self._committer.is_settled, timeout_s
                )
            finally:
                self._committer.flush(False)

    def close(self, timeout_s: float | None) -> bool:
        """Drain, and end the threads. Returns False if a thread still runs, for example in a hanging call.

        If `timeout_s` is None, the wait has no limit.
        """
        deadline = time.monotonic() + (threading.TIMEOUT_MAX if timeout_s is None else timeout_s)
        if not self._stopping:
            self.drain(timeout_s)
        with self._lock:
            self._stopping = True
            self._reading.notify_all()
            self._work.notify_all()
            self._committer.stop()
        started = [thread for thread in (*self._threads, self._committer.thread) if thread.ident is not None]
        for thread in started:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in started)

    # ---- the committer's side, see `Movers`

    def num_queued(self) -> int:
        return len(self._writes)

    def release(self, chunk: Chunk) -> None:
        self._writes.append(chunk)
        # While stopping, all threads wait until the last held write is released.
        self._work.notify(self.num_threads if self._stopping else 1)

    def cancel_queued(self) -> list[Chunk]:
        queued = list(self._writes)
        self._writes.clear()
        self._work.notify_all()
        return queued

    def end(self, chunks: list[Chunk]) -> None:
        for chunk in chunks:
            self._deliver(chunk)
        with self._lock:
            self._num_in_flight -= len(chunks)
            self._settled.notify_all()

    # ---- its threads

    def _move_blocks(self, reads_only: bool) -> None:
        scratch, work = Scratch(self._slab), self._reading if reads_only else self._work
        while True:
            with self._lock:
                while not (self._reads or (self._writes and not reads_only)):
                    if self._stopping and (reads_only or not self._committer.will_release):
                        return
                    work.wait()
                chunk = (self._reads or self._writes).popleft()
                if chunk.writes:
                    self.num_writing += 1
                    self._committer.note_started()
            try:
                self._move(chunk, scratch)
            except Exception as error:
                # A closed pool, lack of memory, or a bug. A failure of the medium is an outcome instead.
                fail([chunk])
                self._log.warn("chunk", "disk tier: blocks could not be moved: %r", error)
            has_ended = not chunk.writes
            if chunk.writes:
                with self._lock:
                    self.num_writing -= 1
                    has_ended = not self._committer.note_written(chunk)
            if has_ended:
                self.end([chunk])

    def _move(self, chunk: Chunk, scratch: Scratch) -> None:
        blocks = chunk.keys, chunk.slots, chunk.generations
        if chunk.writes:
            chunk.written_at_s = self._slab.now_s()
            written, chunk.checksums = self._slab.write_blocks(*blocks, chunk.pool, chunk.rows, scratch)
            chunk.outcomes = np.where(written, np.uint8(SOUND), np.uint8(UNREADABLE))
        else:
            chunk.outcomes = self._slab.read_blocks(*blocks, chunk.checksums, chunk.pool, chunk.rows, scratch)
