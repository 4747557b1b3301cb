"""The scheduler's interface to a tier that machines share.

Owns the presence cache, the write log and the results of jobs. Never waits for the network: connection
threads move the bytes, and `finished` processes the threads' results.
"""

from __future__ import annotations

import os
import random
import time
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from kvoffload.core.admission import Admission
from kvoffload.errors import MisuseError, UnavailableError
from kvoffload.structures.keys import Keys
from kvoffload.tiers.contract import NO_JOB, GroupedTier, JobResult, Mask, SharedTier, TierStats, checked_rows
from kvoffload.tiers.producer_text import producer_of
from kvoffload.tiers.rate_limited_log import RateLimitedLog
from kvoffload.tiers.shared.connection import CONNECT_S
from kvoffload.tiers.shared.epochs import EpochHistory
from kvoffload.tiers.shared.exchanges import (
    PROBE,
    READ,
    WRITE,
    BlockExchange,
    Exchange,
    Handshake,
    PersistenceQuestion,
    Probe,
    Read,
    Transfer,
    Write,
)
from kvoffload.tiers.shared.groups import BlockGroups, ReportedPath
from kvoffload.tiers.shared.jobs import Jobs
from kvoffload.tiers.shared.peer import Peer
from kvoffload.tiers.shared.presence import PresenceCache
from kvoffload.tiers.shared.printable import printable
from kvoffload.tiers.shared.remote_errors import FULL, REPLICA, CacheResetError, ServerError
from kvoffload.tiers.shared.server import Dialect, RemoteOptions, Server
from kvoffload.tiers.shared.write_log import WriteLog
from kvoffload.tiers.waiting import Backoff, wait_until
from kvoffload.transfer import Blocks, Rows

_WRITE_TIMEOUT_FACTOR = 5.0
"""Default timeout of a write, as a multiple of the timeout of a read. Writes may take longer, because no
request waits for a write."""
CLOSE_S = 2 * CONNECT_S
"""Longest wait of `close`, for all threads together. A connection attempt takes at most `CONNECT_S`."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0

E = TypeVar("E", bound=BlockExchange)


@dataclass(eq=False)
class RemoteRequest:
    """The tier's state of a request.

    Attributes:
        counted: keys that the admission rule has already counted for this request.
        reported: record of the groups of the request's path that `BlockGroups.add_path` has added.
    """

    counted: set[bytes] = field(default_factory=set)
    reported: ReportedPath = field(default_factory=ReportedPath)


class ConnectingTier(SharedTier):
    """A tier that connects to its server in the background.

    Attributes:
        place: the server, for messages.
    """

    place: str

    @abstractmethod
    def wait_until_open(self, timeout_s: float) -> None:
        """Wait for the server. Raises `UnavailableError`; its cause is the error of the server or network."""


class RemoteTier(ConnectingTier, GroupedTier):
    """Blocks in a server that several machines share.

    `SharedTier` and `GroupedTier` document the methods. In addition:

    - Every read verifies each block's name, producer, namespace, epoch, key, length and checksum. A block
      that fails the check is a miss, is counted as a mismatch, and is deleted on the server. Blocks with
      equal keys have equal bytes, so it does not matter in which order several machines write them.
    - A job ends by its deadline. Its result contains the blocks that were received and verified in time.
      Nothing writes to the job's rows after its end.
    - Three consecutive failures open the circuit breaker of the server. A read or write that has transferred
      some of its blocks by its deadline is no failure. While the breaker is open, every block is a miss
      without a request to the server, and queued jobs end. Only handshakes are sent, every few seconds.
    - Probes, reads and writes also have a breaker each, which three consecutive failures open. After a pause
      the tier makes one attempt, for which no request waits. If the attempt succeeds, the breaker closes;
      otherwise the next pause begins.
    - After a confirmed reset, new reads on all machines return no block from before the reset. Until the
      reset is confirmed, this tier is empty.
    - If a failover makes the server a replica, the tier connects again, and is empty until it has found the
      master.
    - Each exchange about blocks checks the epoch. If a server loses its epoch, the next handshake creates a
      new epoch. Earlier blocks of the server are never found again.
    - The server evicts blocks, not the tier. The tier deletes only damaged blocks, and never lists the
      server's contents.
    - With `groups`, consecutive blocks of a request's path share an object. Only whole groups are written,
      and only blocks of reported paths (`extend_path`) can be found.

    Args:
        name: name in reports and metrics.
        admission: chooses the blocks to write. If it is None, all blocks are written.
        groups: groups of blocks that share an object; None if each block has its own name.
        clock: returns monotonic seconds, for the presence cache and pauses.
        chance: returns a random number in [0, 1), for the jitter of pauses.
        history: for a node of a cluster, the history of epochs that all nodes share; None for any other
            server. A node sends nothing until `begin` is called.

    Memory: 16 MiB for the presence cache; 150 bytes for each ended epoch. Thread: the scheduler's; the tier
    runs ``3 * options.num_threads`` threads. Raises: `MisuseError` in a process forked from the tier's
    process.
    """

    def __init__(
        self,
        name: str,
        server: Server,
        options: RemoteOptions,
        *,
        admission: Admission | None = None,
        groups: BlockGroups | None = None,
        clock: Callable[[], float] = time.monotonic,
        chance: Callable[[], float] = random.random,
        history: EpochHistory | None = None,
    ) -> None:
        self.name, self.place, self.options = name, server.place, options
        self.block_bytes = self.stored_bytes = options.block_bytes
        self.probe_timeout_s = options.probe_timeout_s
        self.groups, self.group_blocks = groups, 1 if groups is None else groups.group_blocks
        identity = producer_of(f"{name} {server.place} {options.namespace} {options.fingerprint}")
        self.identity = int.from_bytes(identity[:8], "big")
        self.dialect: Dialect[Any] = server.dialect
        self._admission, self._clock = admission, clock
        self.presence, self._write_log = PresenceCache(clock), WriteLog()
        self._full_backoff = Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)
        self._resume_writes_at = 0.0
        self._writing: set[bytes] = set()
        self._results: list[JobResult] = []
        self._stats = TierStats(ready=0)
        self._log = RateLimitedLog("kvoffload.remote")
        self._pid = os.getpid()
        self.jobs = Jobs(name, server, options, self.group_blocks)
        self.peer = Peer(
            name, server, options, send=self.jobs.send, forget=self._forget, clock=clock, chance=chance,
            history=history,
        )  # fmt: skip
        if history is None:
            self.peer.start()

    def begin(self) -> None:
        """Start all threads of a cluster node, and send the first handshake.

        Raises: `RuntimeError` if a thread cannot be started; `begin` may then be called again.
        """
        self.jobs.start()
        self.peer.start()

    def wait_until_open(self, timeout_s: float) -> None:
        """Wait until the first handshake has succeeded, at most `timeout_s` seconds.

        Raises: `UnavailableError` if the handshake fails, or has not succeeded within this time. After a
            time-out the handshake is repeated.
        """

        def has_outcome() -> bool:
            self.process_ended()
            if self.peer.handshake is None and not isinstance(self.peer.last_error, TimeoutError):
                return True
            self.peer.maintain()
            return self.peer.epoch is not None

        wait_until(has_outcome, timeout_s)
        if self.peer.epoch is None:
            raise unavailable(self.place, self.peer.last_error)

    # ---- requests

    def begin_request(self, request_id: str) -> object:
        return RemoteRequest()

    def extend_path(self, request: object, path: Keys) -> None:
        assert isinstance(request, RemoteRequest)
        if self.groups is not None:
            self.groups.add_path(request.reported, path)

    def cut(self, keys: Keys, room: int) -> int:
        return min(room, len(keys)) if self.groups is None else self.groups.cut(keys, room)

    def finish_request(self, request: object, path: Keys) -> None:
        if self._admission is not None:
            self._count_use(request, path)
            self._admission.refresh(path)

    # ---- blocks

    def contains(self, keys: Keys, request: object | None = None) -> Mask:
        if not self.is_open(READ):
            return np.zeros(len(keys), np.bool_)
        return self._addressable(keys, self.presence.present(keys.digests))

    def unknown(self, keys: Keys, request: object | None = None) -> Mask:
        if not (self.is_open(PROBE) and self.is_open(READ)):
            return np.zeros(len(keys), np.bool_)
        return self._addressable(keys, ~self.presence.known(keys.digests))

    def submit_probe(self, keys: Keys) -> int:
        if not self.is_open(PROBE):
            return NO_JOB
        self._stats.probes += len(keys)
        return self.jobs.submit(self._new(Probe, keys, self.options.probe_timeout_s))

    def read_room(self, keys: Keys) -> int:
        return min(len(keys), self.jobs.room(READ))

    def submit_read(self, keys: Keys, pool: Blocks, rows: Rows) -> int:
        checked = checked_rows(keys, pool, rows, self.block_bytes)
        count = min(len(keys), self.jobs.room(READ)) if self.is_open(READ) else 0
        if count == 0:
            job = self.jobs.next_job()
            self._results.append(JobResult(job, np.zeros(len(keys), np.bool_), 0.0))
            return job
        rows, timeout_s = checked[:count], self.options.timeout_s
        return self.jobs.submit(
            self._new(Read, keys[:count], timeout_s, pool=pool, rows=rows, num_rows=len(keys))
        )

    def submit_write(
        self, keys: Keys, pool: Blocks, rows: Rows, request: object | None = None
    ) -> tuple[int, Mask]:
        checked = checked_rows(keys, pool, rows, self.block_bytes)
        accepted = np.zeros(len(keys), np.bool_)
        if self._admission is not None and request is not None:
            self._count_use(request, keys)
        is_open = self.is_open(WRITE)
        is_attempt = not is_open and self.peer.may_attempt(WRITE)
        if not (is_open or is_attempt) or self._clock() < self._resume_writes_at:
            self._stats.dropped += len(keys)
            return NO_JOB, accepted
        self._forget_partial_groups(keys)
        wanted = np.flatnonzero(self._not_being_written(keys) & ~self.presence.present(keys.digests))
        if self._admission is not None:
            admitted = wanted[self._admission.admit(keys.take(wanted))]
            self._stats.refused += len(wanted) - len(admitted)
            wanted = admitted
        room = self.jobs.room(WRITE)
        self._stats.dropped += max(0, len(wanted) - room)
        wanted = self._whole_groups(keys, wanted[:room])
        if len(wanted) == 0:
            return NO_JOB, accepted
        accepted[wanted] = True
        timeout_s = self.options.write_timeout_s or _WRITE_TIMEOUT_FACTOR * self.options.timeout_s
        write = self._new(
            Write, keys.take(wanted), timeout_s, pool=pool, rows=checked[wanted], ttl_s=self.options.ttl_s
        )
        self._writing.update(write.keys)
        if is_attempt:
            self.peer.breakers.attempts[WRITE] = write.job
        return self.jobs.submit(write), accepted

    @property
    def queue_room(self) -> int:
        return self.jobs.room(WRITE)

    def finished(self) -> list[JobResult]:
        self.process_ended()
        results, self._results = self._results, []
        return results

    def delete(self, keys: Keys) -> int:
        """Mark blocks as absent in this process's presence cache. The server keeps the blocks.

        On the server, only reads delete blocks, namely damaged blocks that they find (`Read.damaged`).
        """
        count = int(np.count_nonzero(self.presence.present(keys.digests)))
        self.presence.learn(keys.digests, np.zeros(len(keys), np.bool_))
        return count

    def clear(self) -> None:
        if self._admission is not None:
            self._admission.reset()
        self.peer.reset()

    def take_changes(self) -> list[tuple[list[bytes], bool]]:
        return self._write_log.take()

    def drain(self, timeout_s: float) -> bool:
        def is_drained() -> bool:
            self.process_ended()
            if self.has_no_jobs and not self.peer.reset_wanted:
                return True
            self._maintain()
            return False

        return wait_until(is_drained, timeout_s)

    def stats(self) -> TierStats:
        moving = sum(len(exchange.keys) for exchange in self._awaited() if isinstance(exchange, Transfer))
        breakers = self.peer.breakers
        stats = replace(
            self._stats,
            in_flight=moving,
            circuit_open=int(breakers.is_out),
            outages=breakers.num_outages,
            outage_s=breakers.outage_s,
        )
        self.dialect.add_costs(stats)
        return stats

    def stop(self) -> None:
        """Abort the jobs in flight without waiting. Idempotent."""
        if self.peer.is_closed or os.getpid() != self._pid:
            return
        self.peer.is_closed = True
        self.peer.close_epoch()
        self.jobs.stop()

    def join(self, until: float) -> None:
        """After `stop`, wait until all threads have ended, or until the time `until` (`time.monotonic`)."""
        self.jobs.join(until)
        self.process_ended()

    def close(self) -> None:
        if os.getpid() != self._pid:
            return
        self.stop()
        self.join(time.monotonic() + CLOSE_S)

    # ---- availability

    def is_open(self, kind: str | None = None) -> bool:
        """Return True if operations of type `kind` may be sent.

        If `kind` is None, return True if the server is usable at all. While an epoch is unknown or a circuit
        breaker is open, each call also processes replies, and sends the handshakes and attempts that are due.
        """
        if os.getpid() != self._pid:
            raise MisuseError("this process was forked from the process that has the tier and cannot use it")
        if self.peer.is_closed:
            return False
        if self.peer.needs_maintenance:
            # The presence cache may change only here and in `finished`. Otherwise a reply that arrives
            # between the calls of `contains` and `unknown` could make both False for a present block.
            self.process_ended()
            self._maintain()
        return self.peer.is_open(kind)

    @property
    def last_error(self) -> Exception:
        """The last failure of a connection or of the server."""
        return self.peer.last_error

    @property
    def has_no_jobs(self) -> bool:
        """True if no caller waits for a job in flight."""
        return not self._awaited()

    @property
    def is_idle(self) -> bool:
        """True if no exchange is in flight and all results have been taken."""
        return not self.jobs.in_flight and not self._results

    def _maintain(self) -> None:
        """Send a handshake if it is due. Send an attempt for each half-open breaker of reads or probes."""
        self.peer.maintain()
        breakers, options = self.peer.breakers, self.options
        if self.peer.may_attempt(READ) and (keys := breakers.retry_keys.get(READ)) is not None:
            pool, rows = np.empty((len(keys), self.block_bytes), np.uint8), np.arange(len(keys))
            read = self._new(Read, keys, options.timeout_s, pool=pool, rows=rows)
            breakers.attempts[READ] = self.jobs.submit(read)
        if self.peer.may_attempt(PROBE) and (keys := breakers.retry_keys.get(PROBE)) is not None:
            breakers.attempts[PROBE] = self.jobs.submit(self._new(Probe, keys, options.probe_timeout_s))

    def _forget(self, *, same_epoch: bool) -> None:
        self.presence.clear()
        if not same_epoch:
            self._write_log.lost_all()

    # ---- jobs

    def _new(self, kind: type[E], keys: Keys, timeout_s: float, **more: Any) -> E:
        """Create an exchange about blocks for a new job. The epoch must be known."""
        epoch = self.peer.epoch
        assert epoch is not None
        return kind(
            job=self.jobs.next_job(),
            keys=keys,
            epoch=epoch,
            block_bytes=self.block_bytes,
            objects=() if self.groups is None else self.groups.parts(keys),
            deadline=time.monotonic() + timeout_s,
            **{"num_rows": len(keys), **more},
        )

    def _awaited(self) -> list[BlockExchange]:
        """Return the exchanges in flight for which a caller waits.

        These are all exchanges except a probe or a read that `_maintain` has sent to test the server.
        """
        attempts = {job for kind, job in self.peer.breakers.attempts.items() if kind != WRITE}
        return [exchange for exchange in self.jobs.in_flight.values() if exchange.job not in attempts]

    def process_ended(self) -> None:
        """Process the exchanges that have ended. The next call of `finished` returns their results."""
        for exchange in self.jobs.take_ended():
            self._process(exchange)

    def _process(self, exchange: Exchange) -> None:
        if isinstance(exchange, PersistenceQuestion):
            self.peer.take_persistence(exchange)
            return
        if newly_open := self.peer.note(exchange):
            self.jobs.drop_queued(newly_open)
        if _is_from_replica(exchange):
            self.jobs.reconnect()
        if isinstance(exchange, Handshake):
            self.peer.take_handshake(exchange)
        elif isinstance(exchange, BlockExchange):
            self._process_blocks(exchange)

    def _process_blocks(self, exchange: BlockExchange) -> None:
        self.jobs.remove(exchange)
        is_awaited = exchange.kind == WRITE or not self.peer.breakers.is_attempt(exchange)
        if self.peer.breakers.is_attempt(exchange):
            del self.peer.breakers.attempts[exchange.kind]
        is_current = self.peer.epoch is not None and exchange.epoch == self.peer.epoch
        was_reset = isinstance(exchange.error, CacheResetError)
        if was_reset or not is_current:
            exchange.ok[:] = False
        if (was_reset or _is_from_replica(exchange)) and is_current:
            # After a failover, connections may lead to different servers.
            self.jobs.reconnect()
            self.peer.take_reset()
        stale = None
        if isinstance(exchange, Read):
            stale = exchange.absent
            self._process_read(exchange)
        elif isinstance(exchange, Write):
            self._process_write(exchange, is_current)
        elif is_awaited:
            self._stats.probe_hits += int(np.count_nonzero(exchange.ok))
        if is_current and not was_reset:
            self._learn(exchange)
        if exchange.refused is not None and exchange.refused.code != FULL:
            text = "tier %s: %s refuses: %s"
            self._log.warn("refused", text, self.name, self.place, printable(exchange.refused))
        if isinstance(exchange.error, TimeoutError):
            self._stats.timeouts += len(exchange.keys) - int(np.count_nonzero(exchange.ok))
        if is_awaited:
            # Blocks beyond the limit were not requested, so they are neither present nor stale.
            ok, stale = (_padded(mask, exchange.num_rows) for mask in (exchange.ok, stale))
            assert ok is not None
            self._results.append(JobResult(exchange.job, ok, exchange.ended - exchange.submitted, stale))

    def _learn(self, exchange: BlockExchange) -> None:
        """Record in the presence cache and the write log whether the server has the blocks."""
        keys = exchange.keys
        if isinstance(exchange, Write):
            if exchange.ok.any():
                there = keys.take(exchange.ok)
                self.presence.learn(there.digests, np.ones(len(there), np.bool_))
                self._write_log.stored(keys.take(exchange.ok & ~exchange.was_there))
            return
        self.presence.learn(keys.digests, exchange.ok)
        if isinstance(exchange, Read):
            self._write_log.lost(keys.take(exchange.absent | exchange.damaged))
            if exchange.deleted.any():
                deleted = keys.take(exchange.deleted)
                self.presence.learn(deleted.digests, np.zeros(len(deleted), np.bool_))
        elif exchange.error is None and exchange.refused is None:
            self._write_log.lost(keys.take(exchange.current & ~exchange.ok))

    def _process_read(self, read: Read) -> None:
        num_read, num_stale = int(np.count_nonzero(read.ok)), int(np.count_nonzero(read.absent))
        num_damaged = int(np.count_nonzero(read.damaged))
        self._stats.read += num_read
        self._stats.bytes_read += num_read * self.block_bytes
        self._stats.stale += num_stale
        self._stats.mismatches += num_damaged
        self._stats.failed += len(read.keys) - num_read - num_stale - num_damaged
        if num_damaged:
            text = "tier %s: %d blocks in %s have wrong checksums; they are computed again"
            self._log.error("damage", text, self.name, num_damaged, self.place)

    def _process_write(self, write: Write, is_current: bool) -> None:
        self._writing.difference_update(write.keys)
        num_there, num_ok = int(np.count_nonzero(write.was_there)), int(np.count_nonzero(write.ok))
        num_written = max(0, num_ok - num_there)
        self._stats.skipped += num_there
        self._stats.written += num_written
        self._stats.bytes_written += num_written * self.block_bytes
        num_lost = len(write.keys) - num_ok
        if write.refused is not None and write.refused.code == FULL:
            self._stats.dropped += num_lost
            self._resume_writes_at = self._clock() + self._full_backoff.next_s()
            text = "tier %s: %s is full and evicts nothing; writes pause"
            self._log.warn("full", text, self.name, self.place)
            return
        self._stats.failed += num_lost
        if num_written:
            self._full_backoff.reset()

    # ---- groups and admission

    def _not_being_written(self, keys: Keys) -> Mask:
        """Return a mask of the blocks without a write in flight.

        If `keys` contains a block more than once, the mask is False from the second position on.
        """
        new = dict.fromkeys(key for key in keys if key not in self._writing)
        return np.array([new.pop(key, key) is None for key in keys], np.bool_)

    def _addressable(self, keys: Keys, wanted: Mask) -> Mask:
        """Return `wanted` without the blocks whose group, and therefore the object's name, is unknown."""
        return wanted if self.groups is None else wanted & self.groups.known(keys.digests)

    def _forget_partial_groups(self, keys: Keys) -> None:
        """Drop all blocks of a group from the presence cache if one of them may be absent on the server.

        An object contains all blocks of its group, so if one block is absent, all are.
        """
        if self.groups is not None and self.group_blocks > 1:
            for group in self.groups.whole(keys):
                digests = keys.digests[group.rows]
                if not self.presence.present(digests).all():
                    self.presence.forget(digests)

    def _whole_groups(self, keys: Keys, wanted: npt.NDArray[np.intp]) -> npt.NDArray[np.intp]:
        """Return the elements of `wanted` (indices into `keys`) whose blocks form whole groups."""
        if self.groups is None or self.group_blocks == 1 or len(wanted) == 0:
            return wanted
        whole = [group.rows for group in self.groups.whole(keys.take(wanted))]
        rows: npt.NDArray[np.intp] = wanted[np.sort(np.concatenate(whole))] if whole else wanted[:0]
        return rows

    def _count_use(self, request: object, keys: Keys) -> None:
        """Count a use of these blocks in the admission rule, once for each request and block."""
        assert isinstance(request, RemoteRequest)
        assert self._admission is not None
        new = np.array([key not in request.counted for key in keys], np.bool_)
        if new.any():
            request.counted.update(keys.take(new))
            self._admission.count(keys.take(new))


def unavailable(place: str, error: Exception) -> UnavailableError:
    """Return an `UnavailableError` for the server at `place`, with `error` as its cause."""
    unavailable_error = UnavailableError("tier", place, f"{type(error).__name__}: {printable(error)}")
    unavailable_error.__cause__ = error
    return unavailable_error


def _is_from_replica(exchange: Exchange) -> bool:
    """Return True if the reply came from a replica. After a failover, the master has another address."""
    reply = exchange.error or getattr(exchange, "refused", None)
    return isinstance(reply, ServerError) and reply.code == REPLICA


def _padded(mask: Mask | None, num_rows: int) -> Mask | None:
    return None if mask is None else np.append(mask, np.zeros(num_rows - len(mask), np.bool_))
