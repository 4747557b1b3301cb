"""What is said to a bucket: the batches of `batches`, in requests of S3, side by side.

Owns the names of objects and what is in them (docs/formats.md), and when a block counts as read, written or
there. Runs on the thread of a line.
"""

from __future__ import annotations

import contextlib
import re
import secrets
import time
from collections.abc import Coroutine, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from kvoffload.tiers.contract import Mask
from kvoffload.tiers.s3.bucket import Bucket, BucketError, Bytes, Found, Span
from kvoffload.tiers.s3.http import Buffer
from kvoffload.tiers.shared.batches import (
    FULL,
    BlockBatch,
    Greeting,
    Measurement,
    Probe,
    Read,
    Speech,
    WasResetError,
    Write,
)
from kvoffload.tiers.shared.identity import FORMAT, HEADER, HEADER_BYTES, Epoch
from kvoffload.tiers.shared.places import Part
from kvoffload.tiers.valkey.resp import ProtocolError, ServerError
from kvoffload.transfer.copies import address_of, copy_blocks

_EPOCH_BYTES = 16
_EPOCH = re.compile(rb"[0-9a-f]{16}")
_WINDOW_BYTES = 1 << 20
"""Blocks of an object that are verified at a time."""
_FULL = {"507", "503", "429", "QuotaExceeded"}
"""What a server answers that has no room, or no time for so much."""
_MEASURED_BLOCKS, _MEASURED_TIMES = 4, 3
_FAREWELL_S = 1.0

Request: TypeAlias = Coroutine[Any, Any, None]


def epoch_name(namespace: str, producer: bytes) -> bytes:
    """Where the present epoch is. Not among the blocks: a rule that lets those expire must leave it."""
    return f"{namespace}/{FORMAT}/epochs/{producer.hex()}".encode()


def about_name(epoch: str) -> str:
    """The name of a producer's text, for people, beside an epoch of that name."""
    place, _, producer = epoch.rpartition("/epochs/")
    return f"{place}/abouts/{producer}"


def object_name(epoch: Epoch, name: str) -> str:
    """Where an object with blocks is."""
    place = f"{epoch.namespace}/{FORMAT}/blocks/{epoch.producer.hex()}/{epoch.number:016x}"
    return f"{place}/{name[:2]}/{name}"


@dataclass(eq=False, kw_only=True)
class ObjectGreeting(Greeting):
    """Learns the present epoch, or makes a new one."""

    def run(self, connection: Any) -> None:
        connection.run([self._greet(connection)], self.deadline)

    async def _greet(self, bucket: Bucket) -> None:
        name, new = self.name.decode(), b"%016x" % secrets.randbits(64)
        before = b""
        if self.is_reset:
            _, before = await bucket.value(name, _EPOCH_BYTES)
            await bucket.put(name, len(new), lambda: [new])
        else:
            found, _ = await bucket.value(name, _EPOCH_BYTES)
            if found is Found.ABSENT:
                # Several machines may find none at once: the first makes it, and all take what is there.
                await bucket.put(name, len(new), lambda: [new], only_new=True)
                if self.about:
                    with contextlib.suppress(BucketError):
                        await bucket.put(about_name(name), len(self.about), lambda: [self.about])
        found, value = await bucket.value(name, _EPOCH_BYTES)
        if before and value == before:  # it would bring back what was to be forgotten
            raise ProtocolError("the server has acknowledged a new epoch, and still has the old one")
        self.number = _epoch_of(value)
        if found is Found.ABSENT:
            raise ProtocolError("no epoch where one was just made")
        if self.number is None:
            raise ProtocolError(
                f"the epoch, object {name}, is damaged: it must be 16 hexadecimal digits; "
                "reset the cache, or delete the object"
            )


@dataclass(eq=False, kw_only=True)
class ObjectMeasurement(Measurement):
    """How fast reads from this bucket are, now."""

    def run(self, connection: Any) -> None:
        bucket, name = connection, self.name.decode()
        zeros = bytes(HEADER_BYTES + self.block_bytes)
        bucket.run([bucket.put(name, len(zeros), lambda: [zeros])], self.deadline)
        try:
            self.round_trip_s = min(
                self._seconds(bucket, [bucket.size(name)]) for _ in range(_MEASURED_TIMES)
            )
            several = min(
                self._seconds(bucket, [bucket.value(name, len(zeros)) for _ in range(_MEASURED_BLOCKS)])
                for _ in range(_MEASURED_TIMES)
            )
            transferring_s = several - self.round_trip_s if several > self.round_trip_s else several
            self.bytes_per_s = _MEASURED_BLOCKS * self.block_bytes / transferring_s
        finally:
            with contextlib.suppress(Exception):
                bucket.run([bucket.delete(name)], time.monotonic() + _FAREWELL_S)

    def _seconds(self, bucket: Bucket, requests: list[Any]) -> float:
        begun = time.monotonic()
        bucket.run(requests, self.deadline)
        return max(time.monotonic() - begun, 1e-9)


@dataclass(eq=False, kw_only=True)
class _ObjectBatch(BlockBatch):
    """A batch about blocks in objects.

    Attributes:
        parts: the objects that its blocks are in; blocks in none are not there.
        group_blocks: how many blocks an object has.
    """

    epoch: Epoch
    parts: list[Part]
    group_blocks: int
    _found: int | None = None
    _is_answered: bool = False

    @property
    def _stride(self) -> int:
        return HEADER_BYTES + self.block_bytes

    @property
    def _object_bytes(self) -> int:
        """The size of every object that is sound."""
        return self.group_blocks * self._stride

    def _exchange(self, bucket: Bucket, requests: Iterable[Request]) -> None:
        """Make these requests, and read the epoch beside them, so that no block from before a reset counts.
        If requests fail, the others count where the epoch is still this one."""
        self._found, self._is_answered = None, False
        try:
            bucket.run([self._hear_epoch(bucket), *requests], self.deadline)
        finally:
            if self._found != self.epoch.number:
                self.ok[:] = False
                if self._is_answered:
                    raise WasResetError
        for part in self.parts:
            self.current[part.rows] = True

    async def _hear_epoch(self, bucket: Bucket) -> None:
        name = epoch_name(self.epoch.namespace, self.epoch.producer).decode()
        _, value = await bucket.value(name, _EPOCH_BYTES)
        self._found = _epoch_of(value)
        self._is_answered = True

    def _name(self, part: Part) -> str:
        return object_name(self.epoch, part.name)

    async def _look(self, bucket: Bucket, part: Part, there: Mask) -> None:
        # An object of another size is damage. It is a miss here, a write replaces it, a read deletes it.
        there[part.rows] = await bucket.size(self._name(part)) == self._object_bytes


@dataclass(eq=False, kw_only=True)
class ObjectProbe(_ObjectBatch, Probe):
    """Asks which objects are there."""

    def run(self, connection: Any) -> None:
        self._exchange(connection, [self._look(connection, part, self.ok) for part in self.parts])


@dataclass(eq=False, kw_only=True)
class ObjectRead(_ObjectBatch, Read):
    """Receives objects, or spans of them, verifies their blocks, and copies those that are sound into their
    rows.

    Attributes:
        deleted: blocks in objects of which one block was not sound: the objects are deleted.
    """

    deleted: Mask = field(init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.deleted = np.zeros(len(self.keys), np.bool_)

    def run(self, connection: Any) -> None:
        try:
            self._exchange(connection, [self._fetch(connection, part) for part in self.parts])
        finally:
            damaged = [part for part in self.parts if self.damaged[part.rows].any()]
            for part in damaged:
                self.deleted[part.rows] = True
        if damaged:
            connection.run([connection.delete(self._name(part)) for part in damaged], self.deadline)

    async def _fetch(self, bucket: Bucket, part: Part) -> None:
        begin, end = int(part.at[0]), int(part.at[-1]) + 1
        span = Span(begin * self._stride, end * self._stride, self._object_bytes)
        found = await bucket.get(self._name(part), span, _Blocks(self, part, begin, end))
        if found is Found.ABSENT:
            self.absent[part.rows] = True
        elif found is Found.OTHER_SIZE:
            self.damaged[part.rows] = True

    def take(self, part: Part, begin: int, found: Bytes) -> None:
        """Verify blocks of a part, and copy the sound ones into their rows.

        Args:
            begin: place of the first one in the object.
            found: shape ``(n, header and block)``.

        Raises: `TimeoutError` after the deadline, when rows may have been given away.
        """
        if time.monotonic() >= self.deadline:
            raise TimeoutError("deadline exceeded")
        first, last = np.searchsorted(part.at, [begin, begin + len(found)])
        rows, at = part.rows[first:last], part.at[first:last] - begin
        headers = np.ascontiguousarray(found[at, :HEADER_BYTES]).view(HEADER).reshape(-1)
        addresses = address_of(found) + at * self._stride + HEADER_BYTES
        sound = self.epoch.sound(self.keys.take(rows), headers, addresses, self.block_bytes)
        self.damaged[rows] = ~sound
        copy_blocks(found[:, HEADER_BYTES:], at[sound], self.pool, self.rows[rows[sound]])
        self.ok[rows[sound]] = True


class _Blocks:
    """Receives blocks of a part of an object. Verifies a few at a time, while the processor's cache has them.

    Args:
        begin, end: places of the blocks in the object.
    """

    def __init__(self, batch: ObjectRead, part: Part, begin: int, end: int) -> None:
        self._batch, self._part, self._at, self._end = batch, part, begin, end
        self._stride = HEADER_BYTES + batch.block_bytes
        self._most = min(max(1, _WINDOW_BYTES // self._stride), end - begin)
        self._window: Bytes | None = None
        self._memory = memoryview(b"")
        self._fill = 0

    def room(self) -> memoryview:
        if self._window is None:  # only where an object has been found
            self._window = np.empty((self._most, self._stride), np.uint8)
            self._memory = memoryview(self._window.reshape(-1))  # type: ignore[arg-type]
        return self._memory[self._fill : self._stride * min(self._most, self._end - self._at)]

    def add(self, count: int) -> None:
        assert self._window is not None
        self._fill += count
        num_blocks = min(self._most, self._end - self._at)
        if self._fill == self._stride * num_blocks:
            self._batch.take(self._part, self._at, self._window[:num_blocks])
            self._at, self._fill = self._at + num_blocks, 0


@dataclass(eq=False, kw_only=True)
class ObjectWrite(_ObjectBatch, Write):
    """Stores the objects that are not there. All blocks of each are in the batch."""

    def run(self, connection: Any) -> None:
        self._exchange(connection, [self._look(connection, part, self.was_there) for part in self.parts])
        self.ok |= self.was_there
        missing = [part for part in self.parts if not self.was_there[part.rows].any()]
        connection.run([self._put(connection, part) for part in missing], self.deadline)

    async def _put(self, bucket: Bucket, part: Part) -> None:
        try:
            await bucket.put(self._name(part), self._object_bytes, lambda: self._pieces(part))
        except BucketError as error:
            if not {error.code, error.status} & _FULL:
                raise
            self.refused = ServerError(f"{FULL} {error}")
        else:
            self.ok[part.rows] = True

    def _pieces(self, part: Part) -> Iterator[Buffer]:
        """Blocks with their headers, a few at a time, while the processor's cache has them.

        A copy, because a transport may keep what the socket has not taken.
        """
        most = max(1, _WINDOW_BYTES // self._stride)
        for first in range(0, len(part.rows), most):
            rows = part.rows[first : first + most]
            data = np.empty((len(rows), self._stride), np.uint8)
            headers = self.epoch.headers(self.keys.take(rows), self._addresses(rows), self.block_bytes)
            data[:, :HEADER_BYTES] = headers.view(np.uint8).reshape(-1, HEADER_BYTES)
            copy_blocks(self.pool, self.rows[rows], data[:, HEADER_BYTES:], np.arange(len(data)))
            yield memoryview(data.reshape(-1))  # type: ignore[arg-type]


OBJECTS = Speech(ObjectGreeting, ObjectMeasurement, ObjectProbe, ObjectRead, ObjectWrite, epoch_name)
"""How a bucket is spoken to."""


def _epoch_of(value: bytes) -> int | None:
    """The epoch that an object has; None for anything but 16 hexadecimal digits."""
    return int(value, 16) if _EPOCH.fullmatch(value) is not None else None
