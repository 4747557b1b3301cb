"""One connection to a server that speaks RESP2: Valkey, Redis, and what is like them.

Owns bytes on a socket. A value that has the expected length is received straight into its destination. Does
not know what a value means, and never tries again: after any error the connection is closed, and never read
further.
"""

from __future__ import annotations

import contextlib
import re
import select
import socket
import ssl
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from kvoffload.errors import KVOffloadError
from kvoffload.tiers.shared.addresses import Addresses
from kvoffload.tiers.shared.printable import MASK, printable

Buffer: TypeAlias = bytes | memoryview
Reply: TypeAlias = "bytes | int | ServerError | None"
Answer: TypeAlias = "Reply | list[Answer]"
"""A reply of any kind; what it has in arrays, too."""
Block: TypeAlias = Sequence[Sequence[memoryview]]
"""Where the values of a block belong, each in parts."""

_LINE_BYTES = 4096
_MOMENT = struct.pack("ll", 0, 5_000)
"""5 ms, as a ``timeval``: by so much a call may be late."""
_MOST_ANSWER_BYTES, _MOST_NESTED = 1 << 20, 16
_MOST_BUFFERS = 512
"""`sendmsg` takes at most 1,024, as `recvmsg` does."""
MOST_AT_ONCE = 128
"""Blocks of `blocks_into`: five buffers each."""
_RECORD_BYTES = 16 << 10
_END = b"\r\n"
_SHORTEST_LINE_BYTES = 4
"""``:1``, with its end."""
_ELEMENT_BYTES = 16
"""Charged for each element of an answer, besides its text: what Python needs for an object, about a third."""
_MOST_DIGITS = 19
_SHORT_WAIT_S = 0.05
"""After so long what has come is looked at, also if it is less than expected."""
_CODE = re.compile(r"[A-Z][A-Z0-9_]{0,31}")


class ProtocolError(KVOffloadError):
    """A reply that the protocol does not allow. The rest of the connection cannot be trusted.

    The message has no text of the server's.
    """


class ServerError(KVOffloadError):
    """An error reply: ``OOM command not allowed``. The connection is in order.

    Args:
        text: as the server sent it; the message is `printable`.
        secrets: passwords, not to appear in the message.

    Attributes:
        code: the first word; empty if it is not of capitals, digits and underscores.
    """

    def __init__(self, text: str, *secrets: str) -> None:
        super().__init__(printable(text, *secrets))
        word = text.partition(" ")[0]
        self.code = word if _CODE.fullmatch(word) else ""


@dataclass(frozen=True)
class Login:
    """How to get in. No form of it as text has the password.

    Attributes:
        username: empty for the server's default user.
        password: empty for none.
        tls: None for a connection in the clear.
    """

    username: str = ""
    password: str = field(default="", repr=False)
    tls: ssl.SSLContext | None = field(default=None, repr=False)


def command(*words: bytes) -> bytes:
    """A command, encoded."""
    parts = [b"*%d\r\n" % len(words)]
    parts += [b"$%d\r\n%b\r\n" % (len(word), word) for word in words]
    return b"".join(parts)


class Connection:
    """A connection, logged in.

    Attributes:
        host: as it was given.
        has_received: whether anything has come since this was last set to False.

    Every call takes the time (of `time.monotonic`) at which it ends at the latest. So does the constructor,
    which finds the host, connects and logs in.

    Args:
        addresses: kept for several connections; None for a lookup for this one alone.

    Raises: `OSError` (`TimeoutError` at the deadline) and `ProtocolError`: then close it; `ServerError` if
        the login is refused. Thread: one, but for `abort`.
    """

    def __init__(
        self, host: str, port: int, login: Login, deadline: float, addresses: Addresses | None = None
    ) -> None:
        self.host, self._left, self._password = host, 0, login.password
        _seconds_left(deadline)
        self._socket: socket.socket = (addresses or Addresses()).connected(host, port, deadline)
        try:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if login.tls is not None:
                self._socket.settimeout(_seconds_left(deadline))
                self._socket = login.tls.wrap_socket(self._socket, server_hostname=host)
            self._is_plain = login.tls is None
            if self._is_plain:
                # The kernel ends each call after a moment, and we look at the deadline between calls. With a
                # time-out of Python's each would be two calls, and none could wait for a whole block.
                self._socket.setblocking(True)
                for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                    self._socket.setsockopt(socket.SOL_SOCKET, option, _MOMENT)
            self._poll = select.poll()
            self._poll.register(self._socket, select.POLLIN)
            self._held = bytearray(_LINE_BYTES)
            self._buffer = memoryview(self._held)
            self._begin = self._end = 0
            self.has_received = False
            self._log_in(login, deadline)
        except BaseException:
            self._socket.close()
            raise

    def _log_in(self, login: Login, deadline: float) -> None:
        if not login.password:
            return
        words = (login.username, login.password) if login.username else (login.password,)
        self.send([command(b"AUTH", *(word.encode(errors="surrogateescape") for word in words))], deadline)
        found = self.reply(deadline)
        if isinstance(found, ServerError):
            # Servers without this command, and proxies, repeat its arguments, whole or cut: only the code is
            # kept.
            why = ": it has no password, or no AUTH command" if found.code == "ERR" else ""
            raise ServerError(f"{found.code or 'an error'} in reply to AUTH{why}")
        if found != b"OK":
            raise ProtocolError("AUTH is answered with neither OK nor an error")

    def error(self, line: bytes) -> ServerError:
        """The error of a reply line, ``-ERR ...``, without the password."""
        return ServerError(line[1:].decode(errors="surrogateescape"), self._password)

    def shown(self, text: str | bytes) -> str:
        """Text of the server as it may be printed, without the password."""
        return printable(text, self._password)

    def masked(self, text: str) -> str:
        """Text of the server as it was sent, without the password: not yet printable."""
        return text.replace(self._password, MASK) if self._password else text

    def abort(self) -> None:
        """Make the call that is under way fail. Thread: any."""
        with contextlib.suppress(OSError):
            # Not `SSLSocket.shutdown`: it drops the TLS state first, and another thread may be sending.
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def close(self) -> None:
        """Close it: from here on no byte can arrive. Idempotent."""
        self._socket.close()

    @property
    def is_in_step(self) -> bool:
        """Between exchanges: whether nothing has come that was not asked for, and the server has not hung up.

        Over TLS, which says things of its own, what nobody has looked at yet does not count.
        """
        if self._begin != self._end:
            return False
        if not self._is_plain:
            return True
        try:
            self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except OSError as nothing:
            return isinstance(nothing, BlockingIOError)
        return False

    def send(self, buffers: Sequence[Buffer], deadline: float) -> None:
        """Send all of these, one after the other."""
        if not self._is_plain:
            # `SSLSocket.sendall` applies the time-out to each record of 16 KiB, not to all of them together.
            for buffer in buffers:
                view = memoryview(buffer)
                for begin in range(0, len(view), _RECORD_BYTES):
                    self._socket.settimeout(_seconds_left(deadline))
                    self._socket.sendall(view[begin : begin + _RECORD_BYTES])
            return
        left = [memoryview(buffer) for buffer in buffers]
        while left:
            _seconds_left(deadline)
            try:
                count = self._socket.sendmsg(left[:_MOST_BUFFERS])
            except BlockingIOError:
                continue  # its moment is over
            left = _behind(left, count)

    def reply(self, deadline: float) -> Reply:
        """A reply that is not an array, of up to 4 KiB."""
        line = self._line(deadline)
        kind, text = line[:1], line[1:]
        if kind == b"+":
            return text
        if kind == b"-":
            return self.error(line)
        if kind == b":":
            return _number(text)
        if kind == b"$":
            if (length := _number(text)) == -1:
                return None
            if not 0 <= length <= _LINE_BYTES:
                raise ProtocolError(f"a value of {length} bytes where a small one should be")
            value = bytearray(length)
            self._take(memoryview(value), deadline)
            self._end_of_value(deadline)
            return bytes(value)
        raise ProtocolError(f"a reply that begins with {kind!r}")

    def answer(self, deadline: float) -> Answer:
        """A reply of any kind, of up to 1 MiB; arrays are lists. For what is asked now and then."""
        self._left = _MOST_ANSWER_BYTES
        return self._answer(deadline, _MOST_NESTED)

    def lines(self, count: int, deadline: float, shortest: int = _SHORTEST_LINE_BYTES) -> list[bytes]:
        """So many replies of one line each, as they are: ``:1``, ``-ERR ...``. Faster than `reply`.

        Args:
            shortest: bytes of the usual reply with its end. The thread is woken when so many bytes have come
                for each reply, not for each reply that the server sends.
        """
        found: list[bytes] = []
        while len(found) < count:
            whole = bytes(self._buffer[self._begin : self._end]).split(b"\r\n")[:-1][: count - len(found)]
            if not whole:
                if self._end - self._begin >= _LINE_BYTES:
                    raise ProtocolError("a line without an end")
                self._wait_for(shortest * (count - len(found)) - (self._end - self._begin), deadline)
                self._receive_more(deadline)
            self._begin += sum(map(len, whole)) + 2 * len(whole)
            found += whole
        return found

    def short_replies(self, count: int, deadline: float) -> list[Reply]:
        """So many replies that are values of one line, errors, or nothing. Faster than `reply`."""
        found: list[Reply] = []
        length = None
        while len(found) < count:
            # Each reply that is missing has a line at least; one that has begun is missing.
            for line in self.lines(count - len(found), deadline):
                if length is not None:
                    if len(line) != length:
                        raise ProtocolError(f"a value of {len(line)} bytes where {length} should be")
                    found.append(line)
                    length = None
                elif line == b"$-1":
                    found.append(None)
                elif line[:1] == b"-":
                    found.append(self.error(line))
                elif line[:1] == b"$":
                    length = _number(line[1:])
                else:
                    raise ProtocolError(f"a reply that begins with {line[:1]!r} where a value should be")
        return found

    def value_into(self, parts: Sequence[memoryview], most_bytes: int, deadline: float) -> Reply:
        """Receive a value into these, one after the other: its length, None if there is none, or the error.

        A value of another length than all together is received and thrown away, if it is of `most_bytes` or
        less; a longer one ends the connection.
        """
        line = self._line(deadline)
        kind, text = line[:1], line[1:]
        if kind == b"-":
            return self.error(line)
        if kind != b"$":
            raise ProtocolError(f"a reply that begins with {kind!r} where a value should be")
        length, expected = _number(text), sum(map(len, parts))
        if length == -1:
            return None
        if length == expected:
            for part in parts:
                self._take(part, deadline)
        elif 0 <= length <= most_bytes:
            scratch = memoryview(bytearray(min(length, 1 << 16)))
            for start in range(0, length, 1 << 16):
                self._take(scratch[: min(1 << 16, length - start)], deadline)
        else:
            raise ProtocolError(f"a value of {length} bytes where {expected} should be")
        self._end_of_value(deadline)
        return length

    def blocks_into(self, blocks: Sequence[Block], deadline: float) -> int:
        """Receive the values of these blocks, in as few calls to the kernel as can be; how many came.

        All blocks are alike, and `MOST_AT_ONCE` at most. Where a value is not there, or of another length, it
        ends before its block, whose replies come next: `value_into` reads them. So it does where time or the
        connection end, if any block has come; over TLS none comes in this way. What did not come may have
        left anything in its parts. Cost: where the last values are not there, up to `_MOMENT`.
        """
        if not self._is_plain:
            return 0
        form = _Form([sum(map(len, parts)) for parts in blocks[0]])
        said, buffers = form.laid_out(blocks)
        count, total = self._held_into(buffers), form.num_bytes * len(blocks)
        left = _behind(buffers, count)
        while count < total and form.is_sound(said, count):
            try:
                received = self._receive(left, deadline, socket.MSG_WAITALL)
            except OSError:
                if count < form.num_bytes:
                    raise
                break
            count += received
            left = _behind(left, received)
        came = form.sound_blocks(said, count)
        if (used := came * form.num_bytes) < count:
            self._hold(b"".join(buffers)[used:count] + self._buffer[self._begin : self._end])
        return came

    # ---- inside

    def _hold(self, received: bytes) -> None:
        """Take this for what has been received and not been used."""
        self._held = bytearray(received.ljust(_LINE_BYTES, b"\0"))
        self._buffer = memoryview(self._held)
        self._begin, self._end = 0, len(received)

    def _held_into(self, buffers: Sequence[memoryview]) -> int:
        """Use what has been received already: how many bytes."""
        count = 0
        for buffer in buffers:
            size = min(len(buffer), self._end - self._begin)
            buffer[:size] = self._buffer[self._begin : self._begin + size]
            self._begin += size
            count += size
            if self._begin == self._end:
                break
        return count

    def _answer(self, deadline: float, most_nested: int) -> Answer:
        line = self._line(deadline)
        kind, text = line[:1], line[1:]
        self._left -= _ELEMENT_BYTES + len(line)
        if self._left < 0:
            raise ProtocolError(f"an answer of more than {_MOST_ANSWER_BYTES} bytes")
        if kind in b"+-":
            return text if kind == b"+" else self.error(line)
        if kind not in (b":", b"$", b"*"):
            raise ProtocolError(f"a reply that begins with {kind!r}")
        count = _number(text)
        if kind == b":":
            return count
        if count == -1:
            return None
        self._left -= max(count, 0)
        if count < 0 or self._left < 0 or most_nested == 0:
            raise ProtocolError(f"an answer of more than {_MOST_ANSWER_BYTES} bytes, or nested too deeply")
        if kind == b"*":
            return [self._answer(deadline, most_nested - 1) for _ in range(count)]
        value = bytearray(count)
        self._take(memoryview(value), deadline)
        self._end_of_value(deadline)
        return bytes(value)

    def _line(self, deadline: float) -> bytes:
        """A line of a reply, without its end."""
        while (at := self._held.find(b"\r\n", self._begin, self._end)) < 0:
            if self._end - self._begin >= _LINE_BYTES:
                raise ProtocolError("a line without an end")
            self._receive_more(deadline)
        line = bytes(self._buffer[self._begin : at])
        self._begin = at + 2
        if not line:
            raise ProtocolError("an empty line")
        return line

    def _take(self, into: memoryview, deadline: float) -> None:
        """Fill a buffer: with what has been received already, then from the socket."""
        filled = min(len(into), self._end - self._begin)
        into[:filled] = self._buffer[self._begin : self._begin + filled]
        self._begin += filled
        while filled < len(into):
            filled += self._receive([into[filled:]], deadline, socket.MSG_WAITALL)

    def _end_of_value(self, deadline: float) -> None:
        while self._end - self._begin < 2:
            self._receive_more(deadline)
        if self._held[self._begin : self._begin + 2] != b"\r\n":
            raise ProtocolError("a value that does not end where it should")
        self._begin += 2

    def _wait_for(self, num_bytes: int, deadline: float) -> None:
        """Wait until so many bytes can be received, the connection ends, or `_SHORT_WAIT_S` is over.

        A server sends the reply to each SET by itself. To be woken for each costs as much CPU time as to send
        the block; so the kernel wakes this thread when all of them have come.
        """
        if not self._is_plain or num_bytes <= _SHORTEST_LINE_BYTES:
            return
        wait_s = min(_seconds_left(deadline), _SHORT_WAIT_S)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, min(num_bytes, _LINE_BYTES))
        try:
            self._poll.poll(1e3 * wait_s)
        finally:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)

    def _receive_more(self, deadline: float) -> None:
        """Add to what has been received and not been used, which is less than `_LINE_BYTES`."""
        rest = self._held[self._begin : self._end]
        self._buffer[: len(rest)] = rest
        self._begin, self._end = 0, len(rest)
        self._end += self._receive([self._buffer[self._end : _LINE_BYTES]], deadline)

    def _receive(self, into: Sequence[memoryview], deadline: float, flags: int = 0) -> int:
        while True:
            left = _seconds_left(deadline)
            try:
                if self._is_plain:
                    count = self._socket.recvmsg_into(into, 0, flags)[0]
                else:
                    self._socket.settimeout(left)
                    count = self._socket.recv_into(into[0])
            except BlockingIOError:
                continue  # its moment is over
            if count == 0:
                raise ConnectionResetError("the server has closed the connection")
            self.has_received = True
            return count


class _Form:
    """How the values of blocks stand in a stream, if all are there: ``$LENGTH``, value, end of line.

    Attributes:
        num_bytes: of one block in the stream.
    """

    def __init__(self, lengths: Sequence[int]) -> None:
        self._lines = [b"$%d\r\n" % length for length in lengths]
        self._lengths = lengths
        self._around = b"".join([line + _END for line in self._lines])
        self.num_bytes = sum(lengths) + len(self._around)

    def laid_out(self, blocks: Sequence[Block]) -> tuple[memoryview, list[memoryview]]:
        """Room for what stands around the values, and all buffers in the order of the stream."""
        said = memoryview(bytearray(len(self._around) * len(blocks)))
        buffers: list[memoryview] = []
        begin = end = 0
        for block in blocks:
            for line, parts in zip(self._lines, block, strict=True):
                end += len(line)
                buffers.append(said[begin:end])
                buffers += parts
                begin, end = end, end + len(_END)
        buffers.append(said[begin:end])
        return said, buffers

    def is_sound(self, said: memoryview, count: int) -> bool:
        """Whether all that stands around the values in the first `count` bytes is as it should be."""
        whole, left = divmod(count, self.num_bytes)
        known = whole * len(self._around)
        for line, length in zip(self._lines, self._lengths, strict=True):
            for size, is_around in ((len(line), True), (length, False), (len(_END), True)):
                known += min(left, size) * is_around
                left = max(0, left - size)
        return said[:known] == (self._around * (whole + 1))[:known]

    def sound_blocks(self, said: memoryview, count: int) -> int:
        """The blocks that have come, up to the first that is not as it should be."""
        whole, size = count // self.num_bytes, len(self._around)
        if said[: whole * size] == self._around * whole:
            return whole
        return next(n for n in range(whole) if said[n * size : (n + 1) * size] != self._around)


def _behind(buffers: list[memoryview], count: int) -> list[memoryview]:
    """What is left of these without their first `count` bytes."""
    done = 0
    while done < len(buffers) and count >= len(buffers[done]):
        count -= len(buffers[done])
        done += 1
    left = buffers[done:]
    if count:
        left[0] = left[0][count:]
    return left


def _number(text: bytes) -> int:
    if not text.removeprefix(b"-").isdigit() or len(text) > _MOST_DIGITS:
        raise ProtocolError(f"{len(text)} bytes where a number of up to {_MOST_DIGITS} digits should be")
    return int(text)


def _seconds_left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0.0:
        raise TimeoutError("its time was up")
    return left
