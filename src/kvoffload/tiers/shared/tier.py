"""A tier that machines share, as the scheduler's thread sees it.

Owns what is believed (hints, epoch, circuit) and the jobs under way. Decides and never waits: lines move
bytes, and all that they find out is taken in on the scheduler's thread, in `finished`.
"""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from kvoffload.core.admission import Admission
from kvoffload.errors import MisuseError, UnavailableError
from kvoffload.structures.keys import Keys
from kvoffload.tiers.contract import (
    NO_JOB,
    JobResult,
    Mask,
    SharedTier,
    TierStats,
    checked_rows,
)
from kvoffload.tiers.producer_text import pack
from kvoffload.tiers.rate_limited_log import RateLimitedLog
from kvoffload.tiers.shared.batches import (
    FULL,
    Batch,
    BlockBatch,
    Greeting,
    NotSentError,
    QueuedTooLongError,
    Read,
    Speech,
    Transfer,
    WasResetError,
    Write,
)
from kvoffload.tiers.shared.circuit import PROBE, READ, WRITE, Breakers
from kvoffload.tiers.shared.connection import CONNECT_S, Connect, Line
from kvoffload.tiers.shared.epochs import EpochHistory
from kvoffload.tiers.shared.identity import Epoch, Naming, producer_of
from kvoffload.tiers.shared.presence import Hints
from kvoffload.tiers.shared.printable import printable
from kvoffload.tiers.shared.write_log import Vouching
from kvoffload.tiers.valkey.persistence import Persistence, PersistenceQuestion
from kvoffload.transfer import Blocks, Rows

IN_FLIGHT_BYTES = 256 << 20
"""Blocks under way each way: more are dropped."""
_WRITE_PATIENCE = 5.0
"""A write may take so many times the deadline of a read, its wait in the queue included: no request waits."""
_EXPIRE_EVERY_S = 0.005
_GREETING_S = 2 * CONNECT_S
CLOSE_S = 2 * CONNECT_S
"""`close` waits so long for all threads together: a connection attempt ends within `CONNECT_S`."""
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0
_RETRY_S = 1.0


@dataclass(frozen=True, kw_only=True)
class RemoteOptions:
    """What a remote tier can be told.

    Attributes:
        namespace: of the blocks' names; an access rule of the server can fence it.
        timeout_s: a read has ended by then, whatever happens.
        probe_timeout_s: the same for a probe, and the longest that a request waits for one.
        ttl_s: after how long the server forgets a block; 0 for when it likes.
        write_timeout_s: a write has ended by then; None for five times `timeout_s`.
        gives_up_at_once: the first deadline that is exceeded opens the circuit, as in a replay, which is
            patient with answers.
    """

    namespace: str
    timeout_s: float = 2.0
    probe_timeout_s: float = 0.05
    ttl_s: int = 0
    write_timeout_s: float | None = None
    gives_up_at_once: bool = False


@dataclass(eq=False)
class RemoteRequest:
    """The keys of a request that the admission rule has counted."""

    counted: set[bytes] = field(default_factory=set)


class RemoteTier(SharedTier):
    """Blocks in a server that several machines share, each verified whenever it is read.

    `SharedTier` has the contract of each method. In addition:

    - A block is served only if name, producer, namespace, epoch, key, length and checksum are those of its
      write; otherwise it is a miss, deleted there, and counted. The key alone decides which bytes are served:
      who else writes, and in which order, makes no difference.
    - A job ends by its deadline, with what has arrived and was verified until then. After its end no byte is
      written to its rows. Three failures in a row open a circuit: then everything is a miss at once, jobs
      that have not begun end, and only greetings are sent, every few seconds, until one is answered.
    - Three failures in a row of probes, reads or writes open a circuit of that type alone, for longer each
      time. After a pause one operation that no request waits for decides.
    - No read that begins after a reset was confirmed returns a block from before it, on any machine. While a
      reset is not confirmed this tier holds nothing.
    - Each exchange about blocks asks for the epoch first. A server that has lost it, because it was started
      anew or has evicted it, is given a new one, and what it has from before is never found again.
    - An epoch that this process has seen end is never entered again. A server that has one has restored a
      snapshot; the cache is reset again, and the log says so.
    - The server decides what leaves. It is never listed, and only blocks that are not sound are deleted.

    Args:
        name: for reports and metrics; place: the server as people call it, for the log.
        connect: makes a connection to it.
        fingerprint: identifies the producer of the blocks, the same on all machines that share them.
        admission: which blocks are written; None for all.
        clock: monotonic seconds, for hints and circuit.
        speech: what is said through a connection; lines: how many there are for reads, writes and probes
            each. A batch goes to the one that has least to do.
        history: the epochs that this process has seen; the nodes of a cluster share one.

    Memory: 16 MiB for hints, as they are used; 150 bytes for each ended epoch. Thread: the scheduler's, and
    three times `lines` of its own: reads, writes and probes do not wait for each other. Raises: `MisuseError`
    in a process that was forked from the one that made it.
    """

    asks_persistence: ClassVar[bool] = True
    """Whether the server is asked if it saves to a disk."""

    def __init__(
        self,
        name: str,
        place: str,
        connect: Connect,
        options: RemoteOptions,
        *,
        block_bytes: int,
        fingerprint: str,
        admission: Admission | None = None,
        clock: Callable[[], float] = time.monotonic,
        speech: Speech = Speech(),  # noqa: B008  (it is immutable)
        lines: int = 1,
        history: EpochHistory | None = None,
    ) -> None:
        self.name, self.place, self.options = name, place, options
        self.block_bytes = self.stored_bytes = block_bytes
        self.probe_timeout_s, self.measured_read = options.probe_timeout_s, None
        self._producer, self._about = producer_of(fingerprint), pack(fingerprint)
        self._epoch_name = speech.epoch_name(options.namespace, self._producer)
        self.identity = int.from_bytes(
            producer_of(f"{name} {place} {options.namespace} {fingerprint}")[:8], "big"
        )
        self._admission, self._clock, self._speech = admission, clock, speech
        self._hints, self._breakers, self._vouching = Hints(clock), Breakers(clock), Vouching()
        self._circuit = self._breakers.server
        # By type of operation: the job that tries again after a pause, and blocks to try with.
        self._trials: dict[str, int] = {}
        self._to_try: dict[str, Keys] = {}
        self._succeeded_at = dict.fromkeys((PROBE, READ, WRITE), 0.0)
        self._expire_at = 0.0
        self._history = history or EpochHistory()
        self._epoch: Naming | None = None
        self._asking_persistence: PersistenceQuestion | None = None
        self._knows_persistence = not self.asks_persistence
        self._greeting: Greeting | None = None
        self._greet_at = 0.0
        # Epochs found by handshakes that a reset of ours overtook.
        self._overtaken: list[int] = []
        self._reset_wanted = False
        self._resume_writes_at, self._pause_s = 0.0, _SHORTEST_PAUSE_S
        self._next_job = 0
        self._under_way: dict[int, BlockBatch] = {}
        self._bytes_of = {"read": 0, "write": 0}
        self._writing: set[bytes] = set()
        self._results: list[JobResult] = []
        # Filled by the lines; `append` and `popleft` of a deque are atomic.
        self._ended: deque[Batch] = deque()
        self._stats = TierStats(ready=0)
        self._log = RateLimitedLog("kvoffload.remote")
        self._pid = os.getpid()
        self._closed = False
        self.last_error: Exception = TimeoutError("it has not answered")
        self._lines = {
            kind: [Line(f"kvoffload-{name}-{kind}", connect, self._ended.append) for _ in range(lines)]
            for kind in ("probe", "read", "write")
        }
        self._greet()

    def wait_until_open(self, timeout_s: float) -> None:
        """Wait for the first answer. Raises `UnavailableError`, with what the server, or the network,
        says.
        """
        until = time.monotonic() + timeout_s
        while self._epoch is None:
            self._take_in_all()
            has_refused = self._greeting is None and not isinstance(self.last_error, TimeoutError)
            if self._epoch is None and (has_refused or time.monotonic() >= until):
                why = f"{type(self.last_error).__name__}: {printable(self.last_error)}"
                raise UnavailableError("tier", self.place, why)
            self._tend()
            time.sleep(0.001)

    def measure(self, timeout_s: float) -> None:
        """Find out how fast reads are (`measured_read`), and wait for that. It may fail: then it is not
        known.
        """
        if self._epoch is None:
            return
        name = self._epoch_name + b":measure:" + secrets.token_hex(8).encode()
        until = time.monotonic() + timeout_s
        batch = self._speech.measurement(name=name, block_bytes=self.block_bytes, deadline=until)
        self._say("read", batch)
        while not batch.ended and time.monotonic() < until + CONNECT_S:
            time.sleep(0.001)
        if batch.ended and batch.error is None:
            self.measured_read = batch.round_trip_s, batch.bytes_per_s

    # ---- requests

    def begin_request(self, request_id: str) -> object:
        return RemoteRequest()

    def finish_request(self, request: object, path: Keys) -> None:
        if self._admission is not None:
            self._count(request, path)
            self._admission.refresh(path)

    # ---- blocks

    def contains(self, keys: Keys, request: object | None = None) -> Mask:
        if not self._is_open(READ):
            return np.zeros(len(keys), np.bool_)
        return self._hints.present(keys.digests)

    def unknown(self, keys: Keys, request: object | None = None) -> Mask:
        if not (self._is_open(PROBE) and self._is_open(READ)):
            return np.zeros(len(keys), np.bool_)
        return ~self._hints.known(keys.digests)

    def submit_probe(self, keys: Keys) -> int:
        if not self._is_open(PROBE):
            return NO_JOB
        self._stats.probes += len(keys)
        return self._submit(self._speech.probe, keys, len(keys), self.options.probe_timeout_s)

    def submit_read(self, keys: Keys, pool: Blocks, rows: Rows) -> int:
        checked = checked_rows(keys, pool, rows, self.block_bytes)
        count = min(len(keys), self._room("read")) if self._is_open(READ) else 0
        if count == 0:
            self._next_job += 1
            self._results.append(JobResult(self._next_job, np.zeros(len(keys), np.bool_), 0.0))
            return self._next_job
        more = {"pool": pool, "rows": checked[:count]}
        return self._submit(self._speech.read, keys[:count], len(keys), self.options.timeout_s, **more)

    def submit_write(
        self, keys: Keys, pool: Blocks, rows: Rows, request: object | None = None
    ) -> tuple[int, Mask]:
        checked = checked_rows(keys, pool, rows, self.block_bytes)
        taken = np.zeros(len(keys), np.bool_)
        if self._admission is not None and request is not None:
            self._count(request, keys)
        is_open = self._is_open(WRITE)
        is_trial = not is_open and self._may_try(WRITE)
        if not (is_open or is_trial) or self._clock() < self._resume_writes_at:
            self._stats.dropped += len(keys)
            return NO_JOB, taken
        new = np.array([key not in self._writing for key in keys], np.bool_)
        wanted = np.flatnonzero(new & ~self._hints.present(keys.digests))
        if self._admission is not None:
            admitted = wanted[self._admission.admit(keys.take(wanted))]
            self._stats.refused += len(wanted) - len(admitted)
            wanted = admitted
        room = self._room("write")
        self._stats.dropped += max(0, len(wanted) - room)
        wanted = self._writable(keys, wanted[:room])
        if len(wanted) == 0:
            return NO_JOB, taken
        taken[wanted] = True
        self._writing.update(keys.take(wanted))
        patience_s = self.options.write_timeout_s or _WRITE_PATIENCE * self.options.timeout_s
        more = {"pool": pool, "rows": checked[wanted], "ttl_s": self.options.ttl_s}
        job = self._submit(self._speech.write, keys.take(wanted), len(wanted), patience_s, **more)
        if is_trial:
            self._trials[WRITE] = job
        return job, taken

    @property
    def queue_room(self) -> int:
        return self._room("write")

    def finished(self) -> list[JobResult]:
        self._take_in_all()
        results, self._results = self._results, []
        return results

    def delete(self, keys: Keys) -> int:
        """Forget that these are there: what is not sound there is deleted when it is read."""
        digests = keys.digests
        count = int(np.count_nonzero(self._hints.present(digests)))
        self._hints.learn(digests, np.zeros(len(keys), np.bool_))
        return count

    def clear(self) -> None:
        self._history.end(self._own_epoch_names(), time.monotonic())
        self._shut()
        self._reset_wanted = True
        if self._admission is not None:
            self._admission.reset()
        self._greeting, self._greet_at = None, 0.0
        self._greet()

    def take_changes(self) -> list[tuple[list[bytes], bool]]:
        return self._vouching.take()

    def drain(self, timeout_s: float) -> bool:
        until = time.monotonic() + timeout_s
        while True:
            self._take_in_all()
            if not self._waited_for() and not self._reset_wanted:
                return True
            if time.monotonic() >= until:
                return False
            self._tend()
            time.sleep(0.001)

    def stats(self) -> TierStats:
        flying = sum(len(batch.keys) for batch in self._waited_for() if isinstance(batch, Transfer))
        return replace(
            self._stats,
            in_flight=flying,
            circuit_open=int(self._breakers.is_out),
            outages=self._breakers.num_outages,
            outage_s=self._breakers.outage_s,
        )

    def stop(self) -> None:
        """End the jobs under way, and wait for nothing. Idempotent."""
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        self._shut()
        for line in self._all_lines():
            line.stop()

    def close(self) -> None:
        if os.getpid() != self._pid:
            return
        self.stop()
        self.join(time.monotonic() + CLOSE_S)

    def join(self, until: float) -> None:
        """Wait for the threads after `stop`, all of them together until this time (of `time.monotonic`)."""
        for line in self._all_lines():
            line.join(max(0.0, until - time.monotonic()))
        self._take_in_all()

    # ---- is it there

    def _is_open(self, kind: str | None = None) -> bool:
        """Whether the server answers, as far as is known, also this type of operation, and the epoch is
        known."""
        if os.getpid() != self._pid:
            raise MisuseError("this process was forked from the one that has the tier, and has no part in it")
        if self._closed:
            return False
        if self._epoch is None or self._breakers.is_any_open:
            # Only while it is closed: what is known of blocks changes in `finished` and nowhere else. A
            # caller that asks `contains` and then `unknown` would be told no twice by an answer that comes
            # between.
            self._take_in_all()
            self._tend()
        if self._epoch is None or self._circuit.is_open:
            return False
        return kind is None or not self._breakers.operations[kind].is_open

    def _tend(self) -> None:
        """Try again what may be tried: a greeting, or an operation of a type that has failed."""
        if self._circuit.is_open:
            if self._circuit.may_try and self._clock() >= self._greet_at:
                self._greet()
        elif self._epoch is None:
            if self._clock() >= self._greet_at:
                self._greet()
        else:
            for kind in (READ, PROBE):
                if self._may_try(kind) and kind in self._to_try:
                    self._try(kind, self._to_try[kind])

    def _may_try(self, kind: str) -> bool:
        """Whether the pause of a type of operation is over, and no attempt is under way."""
        is_reachable = self._epoch is not None and not self._circuit.is_open
        return is_reachable and kind not in self._trials and self._breakers.operations[kind].may_try

    def _try(self, kind: str, keys: Keys) -> None:
        """Send one operation that no request waits for."""
        if kind == READ:
            more = {"pool": np.empty((len(keys), self.block_bytes), np.uint8), "rows": np.arange(len(keys))}
            job = self._submit(self._speech.read, keys, len(keys), self.options.timeout_s, **more)
        else:
            job = self._submit(self._speech.probe, keys, len(keys), self.options.probe_timeout_s)
        self._trials[kind] = job

    def _greet(self) -> None:
        if self._greeting is None and not self._closed:
            self._greeting = self._new_greeting(time.monotonic() + _GREETING_S)
            self._say("probe", self._greeting)

    def _new_greeting(self, deadline: float) -> Greeting:
        return self._speech.greeting(
            name=self._epoch_name, is_reset=self._reset_wanted, about=self._about, deadline=deadline
        )

    def _shut(self) -> None:
        """Believe nothing of what was, and nothing of what is under way."""
        self._epoch = None
        self._hints.clear()
        self._vouching.lost_all()

    # ---- jobs

    def _room(self, kind: str) -> int:
        return max(0, IN_FLIGHT_BYTES - self._bytes_of[kind]) // self.block_bytes

    def _submit(
        self, kind: type[BlockBatch], keys: Keys, num_rows: int, timeout_s: float, **more: object
    ) -> int:
        assert self._epoch is not None
        self._next_job += 1
        batch = kind(
            job=self._next_job,
            num_rows=num_rows,
            keys=keys,
            epoch=self._epoch,
            block_bytes=self.block_bytes,
            deadline=time.monotonic() + timeout_s,
            **more,  # type: ignore[arg-type]
        )
        self._under_way[batch.job] = batch
        if kind.name in self._bytes_of:
            self._bytes_of[kind.name] += len(batch.keys) * self.block_bytes
        self._say(kind.name, batch)
        return batch.job

    def _waited_for(self) -> list[BlockBatch]:
        """The batches under way whose results somebody waits for."""
        trials = {job for kind, job in self._trials.items() if kind != WRITE}
        return [batch for batch in self._under_way.values() if batch.job not in trials]

    def _all_lines(self) -> list[Line]:
        return [line for kind in self._lines.values() for line in kind]

    def _say(self, kind: str, batch: Batch) -> None:
        min(self._lines[kind], key=lambda line: line.load).submit(batch)

    def _writable(self, keys: Keys, wanted: npt.NDArray[np.intp]) -> npt.NDArray[np.intp]:
        """Of these rows of `keys` those that can be written as they are."""
        return wanted

    def _take_in_all(self) -> None:
        if self._under_way and (now := time.monotonic()) >= self._expire_at:
            self._expire_at = now + _EXPIRE_EVERY_S
            late = [batch for batch in self._under_way.values() if now >= batch.deadline]
            self._give_up(late, QueuedTooLongError("deadline exceeded while queued"))
        while self._ended:
            batch = self._ended.popleft()
            if isinstance(batch, PersistenceQuestion):
                self._take_in_persistence(batch)
                continue
            self._note_health(batch)
            if isinstance(batch, Greeting):
                self._take_in_greeting(batch)
            elif isinstance(batch, BlockBatch):
                self._take_in(batch)

    def _give_up(self, batches: list[BlockBatch], why: Exception) -> None:
        """End those of these batches that no line has begun."""
        for batch in batches:
            if batch.claim():
                batch.error, batch.ended = why, time.monotonic()
                self._ended.append(batch)

    def _note_health(self, batch: Batch) -> None:
        """Tell the circuits how a batch has ended; where one opens, end what it would not have sent."""
        error = batch.error
        if isinstance(error, NotSentError):
            return
        before = self._breakers.open_kinds()
        if error is None or isinstance(error, WasResetError):
            if not (self._circuit.is_open and batch is not self._greeting):
                self._circuit.succeeded()
            if isinstance(batch, BlockBatch):
                self._note_success(batch)
        else:
            self.last_error = error
            if not self._closed:
                self._note_failure(batch, error)
        self._breakers.note_outage(max(0.0, batch.ended - batch.submitted))
        if newly_open := set(self._breakers.open_kinds()).difference(before):
            queued = [one for one in self._under_way.values() if one is not batch and one.name in newly_open]
            self._give_up(queued, NotSentError("not sent: the circuit breaker has opened"))

    def _note_success(self, batch: BlockBatch) -> None:
        self._succeeded_at[batch.name] = batch.ended
        circuit = self._breakers.operations[batch.name]
        if circuit.is_open and self._trials.get(batch.name) != batch.job:
            return  # begun before the circuit opened
        if batch.name == READ and not batch.ok.any():
            circuit.answered()  # that no block is there says little of a server that hangs on values
        else:
            circuit.succeeded()

    def _note_failure(self, batch: Batch, error: Exception) -> None:
        if isinstance(batch, BlockBatch):
            has_answered = batch.submitted < self._succeeded_at[batch.name]
            if has_answered and isinstance(error, QueuedTooLongError):
                return  # the server is slow, and answers
            self._to_try[batch.name] = batch.keys.take(np.zeros(1, np.intp))
            self._breakers.operations[batch.name].failed()
        was_open = self._circuit.is_open
        self._circuit.failed()
        if (
            self.options.gives_up_at_once
            and isinstance(batch, BlockBatch)
            and isinstance(error, TimeoutError)
        ):
            if not was_open:
                self._circuit.open()
                text = "tier %s: %s is silent (%.0f s): going on without it until it answers"
                self._log.warn("silent", text, self.name, self.place, batch.ended - batch.submitted)
        elif not (self.options.gives_up_at_once and was_open):  # one line was enough
            text = "tier %s: %s does not answer as it should: %s: %s"
            self._log.warn("health", text, self.name, self.place, type(error).__name__, printable(error))

    def _take_in_greeting(self, greeting: Greeting) -> None:
        if greeting is not self._greeting:
            # Sent before a reset of ours. The server may have answered after it, with the new epoch.
            self._overtaken += () if greeting.is_reset else greeting.found
        else:
            self._greeting, self._greet_at = None, self._clock() + _RETRY_S
            if greeting.error is None:
                self._accept(greeting)
                self._ask_persistence()
        if self._epoch is not None:
            for number in self._overtaken:
                if not self._history.is_present(number):
                    self._history.end_number(number, time.monotonic())
            self._overtaken.clear()

    def _accept(self, greeting: Greeting) -> None:
        """Enter the epoch that a greeting has found, unless it has ended."""
        assert greeting.number is not None
        if self._may_enter(greeting):
            self._reset_wanted = False
            self._history.enter([self._epoch_name], [greeting.number], time.monotonic())
            self._hints.clear()
            epoch = Epoch(self.options.namespace, self._producer, greeting.number)
            if epoch != self._epoch:
                self._vouching.lost_all()
            self._epoch = epoch

    def _may_enter(self, greeting: Greeting) -> bool:
        """Whether none of the epochs that a greeting has found has ended; otherwise greet or reset again."""
        found, since = greeting.found, greeting.submitted
        if any(self._history.has_ended(number, since) for number in found):
            text = (
                "tier %s: %s has blocks from before a reset again: it has restored a snapshot, or a replica "
                "that lacked the reset has taken over; the cache is reset once more"
            )
            self._log.error("returned", text, self.name, self.place)
            self._shut()
            self._reset_wanted = True
            if not greeting.is_reset:
                self._greet()  # at once, before others enter it; a reset that did not help waits a second
            return False
        if any(self._history.is_outdated(number, since) for number in found):
            if self._epoch is None:
                self._greet()
            return False
        return True

    def _own_epoch_names(self) -> list[bytes]:
        """The epoch keys of this tier's blocks."""
        return [self._epoch_name]

    def _ask_persistence(self) -> None:
        """Ask once, on a connection for writes, whether the server saves: no request waits for those."""
        if not self._knows_persistence:
            self._knows_persistence = True
            self._asking_persistence = PersistenceQuestion(deadline=time.monotonic() + _GREETING_S)
            self._say("write", self._asking_persistence)

    def _take_in_persistence(self, question: PersistenceQuestion) -> None:
        self._asking_persistence = None
        if question.persistence is Persistence.ON and not self._history.has_warned:
            self._history.has_warned = True
            text = (
                "tier %s: %s saves to a disk (%s): after a crash it has blocks from before a reset again, "
                'and an engine that did not see the reset serves them; set save to "" and appendonly to no'
            )
            logging.getLogger("kvoffload.remote").warning(
                text, self.name, self.place, ", ".join(question.reasons)
            )

    def _take_in(self, batch: BlockBatch) -> None:
        del self._under_way[batch.job]
        is_trial = batch.name != WRITE and self._trials.get(batch.name) == batch.job
        if self._trials.get(batch.name) == batch.job:
            del self._trials[batch.name]
        if isinstance(batch, Transfer):
            self._bytes_of[batch.name] -= len(batch.keys) * self.block_bytes
        is_current = self._epoch is not None and batch.epoch == self._epoch
        if isinstance(batch.error, WasResetError):
            batch.ok[:] = False
            if is_current:
                self._shut()
                # Only what a second exchange confirms is entered: a reply that was garbled on its way would
                # make the present epoch an ended one, and the cache would be reset for all machines.
                self._greet()
        elif not is_current:
            batch.ok[:] = False  # a reset came between
        stale = None
        if isinstance(batch, Read):
            stale = self._take_in_read(batch)
            if is_current:
                self._vouching.lost(batch.keys.take(batch.absent | batch.damaged))
        elif isinstance(batch, Write):
            self._take_in_write(batch, is_current)
        else:
            self._stats.probe_hits += int(np.count_nonzero(batch.ok))
            if is_current and batch.error is None and batch.refused is None:
                self._vouching.lost(batch.keys.take(batch.current & ~batch.ok))
        if is_current and not isinstance(batch, Write) and not isinstance(batch.error, WasResetError):
            self._hints.learn(batch.keys.digests, batch.ok)
        if batch.refused is not None and batch.refused.code != FULL:
            self._log.warn(
                "refused", "tier %s: %s refuses: %s", self.name, self.place, printable(batch.refused)
            )
        if isinstance(batch.error, TimeoutError):
            self._stats.timeouts += len(batch.keys) - int(np.count_nonzero(batch.ok))
        if is_trial:
            return  # nobody waits for it
        # Blocks for which there was no room are neither there nor stale: nothing is known of them.
        masks = [
            None if mask is None else np.append(mask, np.zeros(batch.num_rows - len(mask), np.bool_))
            for mask in (batch.ok, stale)
        ]
        assert masks[0] is not None
        self._results.append(JobResult(batch.job, masks[0], batch.ended - batch.submitted, masks[1]))

    def _take_in_read(self, batch: Read) -> Mask:
        num_read, num_stale = int(np.count_nonzero(batch.ok)), int(np.count_nonzero(batch.absent))
        num_damaged = int(np.count_nonzero(batch.damaged))
        self._stats.read += num_read
        self._stats.bytes_read += num_read * self.block_bytes
        self._stats.stale += num_stale
        self._stats.mismatches += num_damaged
        self._stats.failed += len(batch.keys) - num_read - num_stale - num_damaged
        if num_damaged:
            text = "tier %s: %d blocks in %s are not what was stored: computed again"
            self._log.error("damage", text, self.name, num_damaged, self.place)
        return batch.absent

    def _take_in_write(self, batch: Write, is_current: bool) -> None:
        self._writing.difference_update(batch.keys)
        num_there, num_ok = int(np.count_nonzero(batch.was_there)), int(np.count_nonzero(batch.ok))
        num_written = max(0, num_ok - num_there)
        self._stats.skipped += num_there
        self._stats.written += num_written
        self._stats.bytes_written += num_written * self.block_bytes
        if is_current and num_ok:
            self._hints.learn(batch.keys.take(batch.ok).digests, np.ones(num_ok, np.bool_))
            self._vouching.stored(batch.keys.take(batch.ok & ~batch.was_there))
        num_lost = len(batch.keys) - num_ok
        if batch.refused is not None and batch.refused.code == FULL:
            self._stats.dropped += num_lost
            self._resume_writes_at = self._clock() + self._pause_s
            self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
            self._log.warn(
                "full", "tier %s: %s is full and evicts nothing; writes pause", self.name, self.place
            )
            return
        self._stats.failed += num_lost
        if num_written:
            self._pause_s = _SHORTEST_PAUSE_S

    def _count(self, request: object, keys: Keys) -> None:
        """Tell the admission rule which blocks this request refers to, each once."""
        assert isinstance(request, RemoteRequest)
        assert self._admission is not None
        new = np.array([key not in request.counted for key in keys], np.bool_)
        if new.any():
            request.counted.update(keys.take(new))
            self._admission.count(keys.take(new))
