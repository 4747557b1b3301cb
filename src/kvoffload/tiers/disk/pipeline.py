"""The threads of one slab that move blocks.

Owns the queues of reads and writes. Knows neither policies nor which slot a key is in: it gets chunks and
returns them. What makes a write durable, and when a slot may be written again, is the committer's affair.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

import numpy as np

from kvoffload.tiers.disk.chunk import Chunk
from kvoffload.tiers.disk.committer import Committer, fail
from kvoffload.tiers.disk.slab import SOUND, UNREADABLE, Scratch, Slab, now_s
from kvoffload.tiers.rate_limited_log import RateLimitedLog


class Pipeline:
    """Runs chunks; `deliver` gets each back when it has ended, on a thread of the pipeline.

    Reads go before writes, and one thread only reads, so that a load does not wait for stores. Once the
    committer is broken writes fail at once; reads still work.

    Thread: `submit`, `drain` and `close` on one thread; only the last two wait. Raises `RuntimeError` if the
    system has no more threads; then none of its own is left.

    Attributes:
        num_threads: how many move blocks.
        num_writing: writes that a thread is moving.
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
        self.num_threads, self.num_writing, self._num_under_way = num_threads, 0, 0
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
        """Begin chunks: all of them reads, or all of them writes."""
        writes = chunks[0].writes
        with self._lock:
            self._num_under_way += len(chunks)
            refused = writes and self._committer.broken
            if not writes:
                self._reads.extend(chunks)
                self._reading.notify()
            elif not refused:
                self._writes.extend(chunk for chunk in chunks if not self._committer.hold(chunk))
            self._work.notify(len(chunks))
        if refused:
            fail(chunks)
            self.hand_back(chunks)

    def drain(self, timeout_s: float | None) -> bool:
        """Wait until everything submitted has ended and is durable; False on time-out."""
        with self._lock:
            self._committer.flush(True)
            try:
                return self._settled.wait_for(
                    lambda: self._num_under_way == 0 and self._committer.quiet, timeout_s
                )
            finally:
                self._committer.flush(False)

    def close(self, timeout_s: float | None) -> bool:
        """Drain, and end the threads; False if some hang in a system call: those are left running.

        Args:
            timeout_s: how long to wait at most; None to wait until they have ended.
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

    # ---- the committer's side

    def num_queued(self) -> int:
        """Writes that no thread has begun."""
        return len(self._writes)

    def release(self, chunk: Chunk) -> None:
        """The slots of this write may be written now."""
        self._writes.append(chunk)
        # Threads that are to end wait for the last of these.
        self._work.notify(self.num_threads if self._stopping else 1)

    def give_up(self) -> list[Chunk]:
        """The writes that no thread has begun: they are not in the queue any more."""
        left = list(self._writes)
        self._writes.clear()
        self._work.notify_all()
        return left

    def hand_back(self, chunks: list[Chunk]) -> None:
        """These have ended."""
        for chunk in chunks:
            self._deliver(chunk)
        with self._lock:
            self._num_under_way -= len(chunks)
            self._settled.notify_all()

    # ---- its threads

    def _move_blocks(self, reads_only: bool) -> None:
        scratch, work = Scratch(self._slab), self._reading if reads_only else self._work
        while True:
            with self._lock:
                while not (self._reads or (self._writes and not reads_only)):
                    if self._stopping and (reads_only or not self._committer.may_release):
                        return
                    work.wait()
                chunk = (self._reads or self._writes).popleft()
                if chunk.writes:
                    self.num_writing += 1
                    self._committer.begun()
            try:
                self._move(chunk, scratch)
            except Exception as error:
                # Not a failure of the medium, which is an outcome: a closed pool, no memory, our bug.
                fail([chunk])
                self._log.warn("chunk", "disk tier: blocks could not be moved: %r", error)
            has_ended = not chunk.writes
            if chunk.writes:
                with self._lock:
                    self.num_writing -= 1
                    has_ended = not self._committer.written(chunk)
            if has_ended:
                self.hand_back([chunk])

    def _move(self, chunk: Chunk, scratch: Scratch) -> None:
        blocks = chunk.keys, chunk.slots, chunk.generations
        if chunk.writes:
            chunk.written_at_s = now_s()
            written, chunk.checksums = self._slab.write_blocks(*blocks, chunk.pool, chunk.rows, scratch)
            chunk.outcomes = np.where(written, np.uint8(SOUND), np.uint8(UNREADABLE))
        else:
            chunk.outcomes = self._slab.read_blocks(*blocks, chunk.checksums, chunk.pool, chunk.rows, scratch)
