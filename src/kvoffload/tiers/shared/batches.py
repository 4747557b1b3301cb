"""What is said to a server: each batch is one exchange, and keeps what has come of it if it is cut short.

Owns the commands, and when a block counts as read, written or there. Runs on the thread of a line; decides
nothing about other batches. Every exchange about blocks asks for the epoch first, so that it notices a reset
by another machine before it believes anything else.
"""

from __future__ import annotations

import re
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from kvoffload.structures.keys import Keys
from kvoffload.tiers.contract import Mask
from kvoffload.tiers.shared.identity import (
    HEADER,
    HEADER_BYTES,
    Asked,
    Naming,
    about_name,
    epoch_name,
    head_bytes,
    names_of_rests,
)
from kvoffload.tiers.valkey.resp import (
    MOST_AT_ONCE,
    Block,
    Connection,
    ProtocolError,
    Reply,
    ServerError,
    command,
)
from kvoffload.transfer import Blocks
from kvoffload.transfer.copies import address_of

WINDOW_BYTES = 4 << 20
"""Blocks that are asked for, or sent, at a time: the next window is asked for before this one is received.
What has been received is verified while it is in the processor's cache."""
FULL = "OOM"
"""What a server answers that has no room and evicts nothing."""
_EPOCH = re.compile(rb"[0-9a-f]{16}")
ELSEWHERE = {"MOVED", "ASK", "TRYAGAIN"}
"""What a node of a cluster answers about blocks that are not its, or not any more. It is well."""


class NotSentError(ConnectionError):
    """A batch ended in the queue, because a circuit breaker opened."""


class QueuedTooLongError(TimeoutError):
    """A batch ended in the queue, at its deadline."""


class SilentError(TimeoutError):
    """The server has sent nothing, and taken nothing, for as long as it may be silent."""


class WasResetError(Exception):
    """The epoch is another one, or gone: nothing of this batch counts."""

    def __init__(self) -> None:
        super().__init__("the cache was reset")


@dataclass(eq=False, kw_only=True)
class Batch(ABC):
    """One exchange.

    Attributes:
        submitted: when it was asked for.
        deadline: when it ends at the latest, whether it has begun or not.
        ended: when it did.
        error: why it was cut short, or None.
        hangs_up: whether its connection ends with it.
    """

    deadline: float
    submitted: float = field(default_factory=time.monotonic)
    ended: float = 0.0
    error: Exception | None = None
    hangs_up: bool = False
    _unclaimed: list[None] = field(default_factory=lambda: [None])

    def claim(self) -> bool:
        """Take the batch: True for one caller alone, the line that runs it or the tier that gives it up.

        Thread: any; `pop` of a list is atomic.
        """
        try:
            self._unclaimed.pop()
        except IndexError:
            return False
        return True

    @abstractmethod
    def run(self, connection: Connection) -> None:
        """Say it. Raises `OSError`, `ProtocolError`, `ServerError`, `WasResetError`."""


@dataclass(eq=False, kw_only=True)
class Greeting(Batch):
    """Learns the present epoch, or makes a new one.

    Attributes:
        name: where the epoch is. is_reset: everything before is forgotten.
        number: the epoch, once it is known.
        about: the producer's text for people, stored beside the epoch; empty for none.
    """

    name: bytes
    about: bytes = b""
    is_reset: bool = False
    number: int | None = None

    @property
    def found(self) -> list[int]:
        """All epochs that it has found."""
        return [] if self.number is None else [self.number]

    def run(self, connection: Connection) -> None:
        new = b"%016x" % secrets.randbits(64)
        # Several machines may find none at the same instant: the first makes it, and all take what is there.
        options = () if self.is_reset else (b"NX",)
        asked = [command(b"SET", self.name, new, *options), command(b"GET", self.name)]
        connection.send([*asked, *self.telling(self.name), rights_asked(self.name)], self.deadline)
        made, found = connection.reply(self.deadline), connection.reply(self.deadline)
        self.hear_told(connection)
        for reply in (made, found, *rights_refused(connection, self.deadline)):
            if isinstance(reply, ServerError):
                raise reply
        # Of two resets at once the later one counts; both are after what was before.
        self.number = epoch_found(found)

    def telling(self, epoch: bytes) -> list[bytes]:
        """The command that stores the producer's text beside an epoch, if there is one."""
        return [command(b"SET", about_name(epoch), self.about, b"EX", _ABOUT_S)] if self.about else []

    def hear_told(self, connection: Connection) -> None:
        """Read the reply to `telling`. It does not matter: the text is for people."""
        if self.about:
            connection.reply(self.deadline)


_ABOUT_S = b"2592000"
"""30 days: an engine stores its text again when it connects, and that of one that is gone ends."""
_MEASURED_BLOCKS, _MEASURED_TIMES = 8, 3
_MEASUREMENT_S = b"60"


@dataclass(eq=False, kw_only=True)
class Measurement(Batch):
    """How fast reads from this server are, now: a block of zeros is stored under a name of its own, read, and
    deleted; if that fails it ends by itself.

    Attributes:
        name: what the block is called.
        round_trip_s: of the shortest question; bytes_per_s: of several blocks at once; the best of three.
    """

    name: bytes
    block_bytes: int
    round_trip_s: float = 0.0
    bytes_per_s: float = 0.0

    def run(self, connection: Connection) -> None:
        begin, end = b"*5\r\n$3\r\nSET\r\n", b"\r\n$2\r\nEX\r\n$2\r\n%b\r\n" % _MEASUREMENT_S
        row = memoryview(bytearray(self.block_bytes))
        length = b"$%d\r\n" % (HEADER_BYTES + self.block_bytes)
        name = b"$%d\r\n%b\r\n" % (len(self.name), self.name)
        connection.send([begin, name, length, bytes(HEADER_BYTES), row, end], self.deadline)
        if isinstance(found := connection.reply(self.deadline), ServerError):
            raise found
        asked = command(b"EXISTS", self.name)
        self.round_trip_s = min(self._timed(connection, [asked], row) for _ in range(_MEASURED_TIMES))
        asked = command(b"GET", self.name)
        several = [asked] * _MEASURED_BLOCKS
        seconds = min(self._timed(connection, several, row) for _ in range(_MEASURED_TIMES))
        transferring_s = seconds - self.round_trip_s if seconds > self.round_trip_s else seconds
        self.bytes_per_s = _MEASURED_BLOCKS * self.block_bytes / transferring_s
        connection.send([command(b"DEL", self.name)], self.deadline)
        connection.reply(self.deadline)

    def _timed(self, connection: Connection, asked: list[bytes], row: memoryview) -> float:
        begun, header = time.monotonic(), memoryview(bytearray(HEADER_BYTES))
        connection.send([b"".join(asked)], self.deadline)
        for _ in asked:
            if len(asked) == 1:
                connection.reply(self.deadline)
            else:
                connection.value_into([header, row], 2 * self.block_bytes, self.deadline)
        return max(time.monotonic() - begun, 1e-9)


@dataclass(eq=False, kw_only=True)
class BlockBatch(Batch):
    """An exchange about blocks.

    Attributes:
        job: the number of its job. num_rows: of the job's result; its blocks are the first of them.
        current: which of its blocks belong to an epoch that has been confirmed: no other counts.
        ok: which of its blocks are there, read, or written.
        refused: the last error that the server gave for a single block.
    """

    name: ClassVar[str]

    job: int
    num_rows: int
    keys: Keys
    epoch: Naming
    block_bytes: int
    ok: Mask = field(init=False)
    current: Mask = field(init=False)
    refused: ServerError | None = None

    def __post_init__(self) -> None:
        self.ok, self.current = np.zeros((2, len(self.keys)), np.bool_)

    def _check_epoch(self, connection: Connection, asked: Asked) -> Mask:
        """Receive what was asked for about the epoch: which blocks it confirms. Raises `WasResetError`."""
        confirmed, reset = np.zeros(len(asked.names), np.bool_), False
        replies = connection.short_replies(len(asked.names), self.deadline)
        for row, (reply, expected) in enumerate(zip(replies, asked.numbers, strict=True)):
            if isinstance(reply, ServerError):
                self.refused = reply
                if reply.code not in ELSEWHERE:
                    raise reply
            else:
                number = epoch_number(reply)
                confirmed[row] = expected is not None and number == expected
                reset |= expected is not None and number != expected
        if reset:
            raise WasResetError
        of_blocks: Mask = confirmed[asked.of]
        return of_blocks

    def _values(self, names: list[bytes]) -> list[list[bytes]]:
        """What the values of the blocks with these names are called: all first ones, then all second ones, if
        they have any."""
        return [names] if head_bytes(self.block_bytes) == self.block_bytes else [names, names_of_rests(names)]

    def _are_there(self, connection: Connection, names: list[bytes]) -> Mask:
        """Ask for the epoch, and which of these blocks are there."""
        asked, values = self.epoch.asked(self.keys), self._values(names)
        connection.send([_asked(b"GET", asked.names) + _asked(b"EXISTS", *values)], self.deadline)
        self.current = self._check_epoch(connection, asked)
        found = np.zeros(len(names), np.bool_)
        all_of_it = b":%d" % len(values)
        for row, line in enumerate(connection.lines(len(names), self.deadline)):
            if line == all_of_it:
                found[row] = True
            elif line[:1] == b"-":
                self.refused = connection.error(line)
            elif line not in (b":0", b":1"):
                raise ProtocolError(f"an unexpected reply that begins with {line[:1]!r}")
        return found & self.current


@dataclass(eq=False, kw_only=True)
class Probe(BlockBatch):
    """Asks which blocks are there."""

    name = "probe"

    def run(self, connection: Connection) -> None:
        self.ok = self._are_there(connection, self.epoch.names(self.keys))


@dataclass(eq=False, kw_only=True)
class Transfer(BlockBatch):
    """An exchange about blocks whose bytes are in rows of a pool."""

    pool: Blocks
    rows: npt.NDArray[np.int64]

    def _addresses(self, of: slice | npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        found: npt.NDArray[np.int64] = address_of(self.pool) + self.rows[of] * self.pool.strides[0]
        return found

    def _row(self, number: int) -> memoryview:
        return memoryview(self.pool[self.rows[number]])

    def _windows(self, count: int) -> Iterator[slice]:
        size = max(1, WINDOW_BYTES // max(1, self.block_bytes))
        return (slice(start, min(start + size, count)) for start in range(0, count, size))


@dataclass(eq=False, kw_only=True)
class Read(Transfer):
    """Receives blocks into their rows, and verifies them. What is ok when it is cut short was verified.

    Attributes:
        absent: blocks that the server does not have.
        damaged: blocks that are not what was stored under their key; they are deleted there.
    """

    name = "read"

    absent: Mask = field(init=False)
    damaged: Mask = field(init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.absent, self.damaged = np.zeros((2, len(self.keys)), np.bool_)
        self._headers = np.zeros(len(self.keys), HEADER)
        self._header_bytes = memoryview(self._headers.view(np.uint8))  # type: ignore[arg-type]
        self._arrived: list[int] = []

    def run(self, connection: Connection) -> None:
        names = self.epoch.names(self.keys)
        try:
            windows = [*self._windows(len(names))]
            for number, window in enumerate(windows):
                if number == 0:
                    self._ask(connection, names, window)
                if number + 1 < len(windows):
                    # Asked for before the last is received, so that the server never waits for us.
                    self._ask(connection, names, windows[number + 1])
                asked = self.epoch.asked(self.keys[window])
                self.current[window] = self._check_epoch(connection, asked)
                self._receive_all(connection, window)
        finally:
            self._verify()
        self._delete_damaged(connection, names)
        # Perhaps nothing is damaged, and these were the answers to something else.
        self.hangs_up = bool(self.damaged.any())

    def _ask(self, connection: Connection, names: list[bytes], window: slice) -> None:
        asked = self.epoch.asked(self.keys[window])
        # One value of a block after the other, as they are received.
        values = [_asked_one_by_one(b"GET", some) for some in self._values(names[window])]
        blocks = b"".join([one for block in zip(*values, strict=True) for one in block])
        connection.send([_asked(b"GET", asked.names) + blocks], self.deadline)

    def _receive_all(self, connection: Connection, window: slice) -> None:
        """Several at a time; what is not there, or is not of its length, alone, and then fewer at a time."""
        row, at_once = window.start, MOST_AT_ONCE
        while row < window.stop:
            blocks = [self._parts(one) for one in range(row, min(row + at_once, window.stop))]
            came = connection.blocks_into(blocks, self.deadline)
            self._arrived += (row + np.flatnonzero(self.current[row : row + came])).tolist()
            row, at_once = row + came, min(2 * at_once, MOST_AT_ONCE)
            if came < len(blocks):
                self._receive(connection, row)
                row, at_once = row + 1, 1
        self._verify()

    def _parts(self, row: int) -> Block:
        """Where the values of a block belong."""
        at, head, block = HEADER_BYTES * row, head_bytes(self.block_bytes), self._row(row)
        first = [self._header_bytes[at : at + HEADER_BYTES], block[:head]]
        return [first] if head == self.block_bytes else [first, [block[head:]]]

    def _receive(self, connection: Connection, row: int) -> None:
        parts = self._parts(row)
        # What is much longer than a block is no block of anybody.
        most = 2 * (HEADER_BYTES + self.block_bytes)
        found = [connection.value_into(part, most, self.deadline) for part in parts]
        refused = [one for one in found if isinstance(one, ServerError)]
        if refused:
            self.refused = refused[0]
        elif not self.current[row]:
            pass
        elif None in found:
            self.absent[row] = True
        elif found != [sum(map(len, part)) for part in parts]:
            self.damaged[row] = True
        else:
            self._arrived.append(row)

    def _verify(self) -> None:
        at = np.array(self._arrived, np.int64)
        self._arrived.clear()
        if len(at):
            keys, headers = self.keys.take(at), self._headers[at]
            self.ok[at] = self.epoch.sound(keys, headers, self._addresses(at), self.block_bytes)
            self.damaged[at] = ~self.ok[at]

    def _delete_damaged(self, connection: Connection, names: list[bytes]) -> None:
        damaged = np.flatnonzero(self.damaged).tolist()
        if damaged:
            values = self._values([names[row] for row in damaged])
            connection.send([_asked(b"DEL", *values)], self.deadline)
            for line in connection.lines(len(damaged), self.deadline):
                if line[:1] not in (b":", b"-"):
                    raise ProtocolError(f"an unexpected reply that begins with {line[:1]!r}")


@dataclass(eq=False, kw_only=True)
class Write(Transfer):
    """Stores the blocks that the server does not have.

    Attributes:
        ttl_s: after how long the server forgets them; 0 for when it likes.
        was_there: blocks that another machine had written.
    """

    name = "write"

    ttl_s: int = 0
    was_there: Mask = field(init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.was_there = np.zeros(len(self.keys), np.bool_)

    def run(self, connection: Connection) -> None:
        names = self.epoch.names(self.keys)
        self.was_there = self._are_there(connection, names)
        self.ok |= self.was_there
        missing = np.flatnonzero(self.current & ~self.was_there)
        for window in self._windows(len(missing)):
            self._store(connection, names, missing[window])
            if self.refused is not None and self.refused.code not in ELSEWHERE:
                return

    def _store(self, connection: Connection, names: list[bytes], at: npt.NDArray[np.int64]) -> None:
        """Send these blocks, and read all replies together."""
        each = 1 if head_bytes(self.block_bytes) == self.block_bytes else 2
        connection.send(self._commands(names, at), self.deadline)
        lines = connection.lines(each * len(at), self.deadline, len(b"+OK\r\n"))
        if lines.count(b"+OK") == len(lines):
            self.ok[at] = True
            return
        for line in lines:
            if line[:1] == b"-":
                self.refused = connection.error(line)
            elif line != b"+OK":
                raise ProtocolError(f"an unexpected reply that begins with {line[:1]!r}")
        stored = [lines[n : n + each] == [b"+OK"] * each for n in range(0, len(lines), each)]
        self.ok[at] = stored

    def _commands(self, names: list[bytes], at: npt.NDArray[np.int64]) -> list[bytes | memoryview]:
        """The commands that store these blocks, in parts: what stands around a value, a value, and so on."""
        sealed = self.epoch.headers(self.keys.take(at), self._addresses(at), self.block_bytes).tobytes()
        options = [b"EX", b"%d" % self.ttl_s] if self.ttl_s else []
        end = b"\r\n" + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in options)
        begin = b"*%d\r\n$3\r\nSET\r\n" % (3 + len(options))
        head, rows, pool = head_bytes(self.block_bytes), self.rows[at].tolist(), self.pool
        # Of all blocks alike: what stands before the name, and between the name and the value.
        before = b"%b%b$%d\r\n" % (end, begin, len(names[0]))
        between = b"\r\n$%d\r\n" % (HEADER_BYTES + head)
        rest = b"%b%b$%d\r\n" % (end, begin, len(names[0]) + 1)
        buffers: list[bytes | memoryview] = []
        for number, (name, row) in enumerate(zip([names[n] for n in at.tolist()], rows, strict=True)):
            block = memoryview(pool[row])
            header = sealed[number * HEADER_BYTES : (number + 1) * HEADER_BYTES]
            if head == self.block_bytes:
                buffers += (b"%b%b%b%b" % (before, name, between, header), block)
            else:
                (second,) = names_of_rests([name])
                after = b"\r\n$%d\r\n" % (self.block_bytes - head)
                buffers += (b"%b%b%b%b" % (before, name, between, header), block[:head],
                            b"%b%b%b" % (rest, second, after), block[head:])  # fmt: skip
        first = buffers[0]
        buffers[0] = first[len(end) :]
        buffers.append(end)
        return buffers


class Speech(NamedTuple):
    """How one kind of engine is spoken to: the classes of its batches, and where its epoch is, by namespace
    and producer. These are for what speaks RESP2."""

    greeting: type[Greeting] = Greeting
    measurement: type[Measurement] = Measurement
    probe: type[Probe] = Probe
    read: type[Read] = Read
    write: type[Write] = Write
    epoch_name: Callable[[str, bytes], bytes] = epoch_name


def _asked(verb: bytes, *names: list[bytes]) -> bytes:
    """One command for each row of these lists of names, encoded. In a list all have one length."""
    return b"".join(_asked_one_by_one(verb, *names))


def _asked_one_by_one(verb: bytes, *names: list[bytes]) -> list[bytes]:
    if not names[0]:
        return []
    begin = b"*%d\r\n$%d\r\n%b\r\n" % (1 + len(names), len(verb), verb)
    form = begin + b"".join([b"$%d\r\n%%b\r\n" % len(one[0]) for one in names])
    return [form % row for row in zip(*names, strict=True)]


def rights_asked(epoch: bytes) -> bytes:
    """Commands that need the rights to EXISTS and DEL, on a key beside `epoch` that nobody writes.

    A tier without these rights would ask and be refused at each probe, and leave damaged blocks in place. So
    a greeting fails without them, as ``tier ping`` says.
    """
    name = epoch + b":rights"
    return command(b"EXISTS", name) + command(b"DEL", name)


def rights_refused(connection: Connection, deadline: float) -> list[ServerError]:
    """Read the replies to `rights_asked`: errors, but for those of a slot that has moved."""
    replies = [connection.reply(deadline) for _ in ("EXISTS", "DEL")]
    return [one for one in replies if isinstance(one, ServerError) and one.code not in ELSEWHERE]


def epoch_found(reply: Reply) -> int:
    """The epoch of a reply. Raises `ProtocolError` if it is missing or damaged."""
    number = epoch_number(reply)
    if number is None:
        raise ProtocolError(
            "the epoch was evicted at once" if reply is None else
            "the epoch in the server is not 16 hexadecimal digits; reset the cache to replace it"
        )  # fmt: skip
    return number


def epoch_number(reply: Reply) -> int | None:
    """Parse an epoch: 16 hexadecimal digits in lower case; None for anything else."""
    return int(reply, 16) if isinstance(reply, bytes) and _EPOCH.fullmatch(reply) else None
