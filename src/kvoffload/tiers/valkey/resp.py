"""A connection to a server that speaks RESP2, such as Valkey or Redis.

Receives a value of the expected length directly into its destination. Knows neither keys nor checksums. Never
retries: after an error the connection must be closed.
"""

from __future__ import annotations

import contextlib
import math
import select
import socket
import ssl
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from kvoffload.tiers.shared.addresses import Addresses
from kvoffload.tiers.shared.printable import MASK, printable
from kvoffload.tiers.shared.remote_errors import BUSY, ProtocolError, ServerError

Buffer: TypeAlias = bytes | memoryview
Reply: TypeAlias = "bytes | int | ServerError | None"
Answer: TypeAlias = "Reply | list[Answer]"
"""A reply of any type; an array is a list."""
Block: TypeAlias = Sequence[Sequence[memoryview]]
"""Memory for the values of a block. Each value has a sequence of buffers."""

_LINE_BYTES = 4096
_MOMENT = struct.pack("ll", 0, 5_000)
"""Time-out of one system call, 5 ms as a ``timeval``. A method may exceed its deadline by up to 5 ms."""
_MOST_ANSWER_BYTES, _MOST_NESTED = 1 << 20, 16
_MOST_BUFFERS = 512
"""Largest number of buffers in one system call; `sendmsg` and `recvmsg` accept 1,024."""
MOST_AT_ONCE = 128
"""Largest number of blocks in one call of `blocks_into`. A block has up to five buffers."""
_RECORD_BYTES = 16 << 10
_END = b"\r\n"
_SHORTEST_LINE_BYTES = 4
"""Length of the reply ``:1`` with its line end."""
_ELEMENT_BYTES = 16
"""Bytes that each element of a reply adds to the reply's size, which `_MOST_ANSWER_BYTES` limits. The bytes
stand for the element's Python object."""
_MOST_DIGITS = 19
SHORT_WAIT_S = 0.05
"""Longest wait until all expected bytes have arrived, in seconds. Then the bytes that are there are read."""


@dataclass(frozen=True)
class Login:
    """Credentials of a connection. `repr` and `str` omit the password.

    Attributes:
        username: empty for the server's default user.
        password: empty for none.
        tls: None for an unencrypted connection.
    """

    username: str = ""
    password: str = field(default="", repr=False)
    tls: ssl.SSLContext | None = field(default=None, repr=False)


def command(*words: bytes) -> bytes:
    """Encode a command, which is an array of the words."""
    parts = [b"*%d\r\n" % len(words)]
    parts += [b"$%d\r\n%b\r\n" % (len(word), word) for word in words]
    return b"".join(parts)


class Connection:
    """A connection to a server, after login.

    The constructor resolves the host, connects and logs in. Deadlines are times of `time.monotonic`.

    Attributes:
        host: host that was passed to the constructor.
        has_received: set to True when a byte arrives; the caller sets it to False.

    Args:
        addresses: cache of resolved hosts; None to resolve the host for this connection alone.
        silence_s: a call fails if the server neither sends nor accepts a byte for this time. Replays set it,
            because their deadlines are long.

    Raises:
        OSError: a failure of the network, or `TimeoutError` at the deadline or after `silence_s`. Close the
            connection.
        ProtocolError: an invalid reply. Close the connection.
        ServerError: the server refuses the login (constructor only).

    Thread: one, except `abort`.
    """

    def __init__(
        self,
        host: str,
        port: int,
        login: Login,
        deadline: float,
        addresses: Addresses | None = None,
        silence_s: float = math.inf,
    ) -> None:
        self.host, self._password = host, login.password
        self._answer_bytes_left = self._most_answer_bytes = 0
        self._silence_s = silence_s
        _seconds_left(deadline)
        self._socket: socket.socket = (addresses or Addresses()).connected(host, port, deadline)
        try:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if login.tls is not None:
                self._socket.settimeout(_seconds_left(deadline))
                self._socket = login.tls.wrap_socket(self._socket, server_hostname=host)
            self._is_plain = login.tls is None
            if self._is_plain:
                # The kernel ends each call after 5 ms, and the deadline is checked between calls. Python's
                # time-out would need two system calls, and could not wait for a whole block.
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
        reply = self.reply(deadline)
        if isinstance(reply, ServerError):
            if reply.is_busy:
                raise ServerError(f"ERR {BUSY}")
            # Keep only the code: proxies, and servers without AUTH, repeat the password in the error.
            why = ": it has no password, or no AUTH command" if reply.code == "ERR" else ""
            raise ServerError(f"{reply.code or 'an error'} in reply to AUTH{why}")
        if reply != b"OK":
            raise ProtocolError("the reply to AUTH is neither OK nor an error")

    def error(self, line: bytes) -> ServerError:
        """Return the error of a reply line such as ``-ERR ...``, with the password masked."""
        return ServerError(line[1:].decode(errors="surrogateescape"), self._password)

    def shown(self, text: str | bytes) -> str:
        """Return text of the server as `printable` text, with the password masked."""
        return printable(text, self._password)

    def masked(self, text: str) -> str:
        """Return text of the server unchanged, except that the password is masked."""
        return text.replace(self._password, MASK) if self._password else text

    def abort(self) -> None:
        """Make the call that another thread has in progress fail. Thread: any."""
        with contextlib.suppress(OSError):
            # Not `SSLSocket.shutdown`: it drops the TLS state first, and another thread may be sending.
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection. No byte is received afterwards. Idempotent."""
        self._socket.close()

    @property
    def is_in_step(self) -> bool:
        """True if the connection is open and no unexpected byte has arrived. Only valid between exchanges.

        Over TLS, bytes in the socket are not checked, because they may be messages of the TLS protocol.
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
        """Send all buffers in order."""
        remaining = _without_first([memoryview(buffer) for buffer in buffers], 0)
        until = self._until(deadline)
        while remaining:
            seconds = self._patience_s(until, deadline)
            try:
                if self._is_plain:
                    count = self._socket.sendmsg(remaining[:_MOST_BUFFERS])
                else:
                    # `sendall` would apply the time-out to each record of 16 KiB, not to the whole call.
                    self._socket.settimeout(seconds)
                    count = self._socket.send(remaining[0][:_RECORD_BYTES])
            except (BlockingIOError, TimeoutError):
                continue  # after 5 ms
            except OSError as error:
                self._raise_alert()
                if isinstance(error, ssl.SSLEOFError):  # no `ConnectionError`
                    raise ConnectionResetError("the server has closed the connection") from None
                raise
            remaining, until = _without_first(remaining, count), self._until(deadline)

    def reply(self, deadline: float) -> Reply:
        """Read a reply of up to 4 KiB. An array raises `ProtocolError`."""
        self._answer_bytes_left = self._most_answer_bytes = _LINE_BYTES
        answer = self._answer(deadline, 0)
        assert not isinstance(answer, list)
        return answer

    def answer(self, deadline: float) -> Answer:
        """Read a reply of any type, up to 1 MiB. An array becomes a list. This is slow, for rare commands."""
        self._answer_bytes_left = self._most_answer_bytes = _MOST_ANSWER_BYTES
        return self._answer(deadline, _MOST_NESTED)

    def lines(self, count: int, deadline: float, shortest: int = _SHORTEST_LINE_BYTES) -> list[bytes]:
        """Read `count` replies of one line each; returns the lines unparsed, such as ``:1`` or ``-ERR ...``.

        This is faster than `reply`.

        Args:
            shortest: usual length of a reply, line end included. To wake up only once, the thread sleeps
                until about ``count * shortest`` bytes have arrived, but at most `SHORT_WAIT_S`.
        """
        lines: list[bytes] = []
        while len(lines) < count:
            whole = bytes(self._buffer[self._begin : self._end]).split(b"\r\n")[:-1][: count - len(lines)]
            if not whole:
                if self._end - self._begin >= _LINE_BYTES:
                    raise ProtocolError("a line without an end")
                self._wait_for(shortest * (count - len(lines)) - (self._end - self._begin), deadline)
                self._receive_more(deadline)
            self._begin += sum(map(len, whole)) + 2 * len(whole)
            lines += whole
        return lines

    def short_replies(self, count: int, deadline: float) -> list[Reply]:
        """Read `count` replies, each a value of one line, an error or a null. This is faster than `reply`."""
        replies: list[Reply] = []
        length = None
        while len(replies) < count:
            # Each missing reply has at least one more line. An incomplete reply is missing, too.
            for line in self.lines(count - len(replies), deadline):
                if length is not None:
                    if len(line) != length:
                        raise ProtocolError(f"a value of {len(line)} bytes where {length} should be")
                    replies.append(line)
                    length = None
                elif line == b"$-1":
                    replies.append(None)
                elif line[:1] == b"-":
                    replies.append(self.error(line))
                elif line[:1] == b"$":
                    length = _number(line[1:])
                else:
                    raise ProtocolError(f"a reply that begins with {line[:1]!r} where a value should be")
        return replies

    def value_into(self, parts: Sequence[memoryview], most_bytes: int, deadline: float) -> Reply:
        """Receive a value into the memory `parts`; returns the value's length, None for a null, or an error.

        If the value's length is not the length of all `parts` together, its bytes are discarded.

        Raises: `ProtocolError` if a value to discard is longer than `most_bytes`.
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
            for memory in parts:
                self._fill(memory, deadline)
        elif 0 <= length <= most_bytes:
            scratch = memoryview(bytearray(min(length, 1 << 16)))
            for start in range(0, length, 1 << 16):
                self._fill(scratch[: min(1 << 16, length - start)], deadline)
        else:
            raise ProtocolError(f"a value of {length} bytes where {expected} should be")
        self._end_of_value(deadline)
        return length

    def blocks_into(self, blocks: Sequence[Block], deadline: float) -> int:
        """Receive the values of these blocks with few system calls; returns the number of received blocks.

        Stops before a block with a null, an error or a value of another length. The caller must then read the
        replies of this block with `value_into`. If at least one block has arrived, an exceeded deadline or
        the end of the connection is no error. The memory of the blocks that were not received is undefined.
        Over TLS, receives nothing and returns 0.

        Args:
            blocks: memory of at most `MOST_AT_ONCE` blocks of equal layout.

        Cost: up to 5 ms more if the last values are nulls.
        """
        if not self._is_plain:
            return 0
        layout = _BlockLayout([sum(map(len, parts)) for parts in blocks[0]])
        framing, buffers = layout.laid_out(blocks)
        count, total = self._move_unused(buffers), layout.num_bytes * len(blocks)
        remaining = _without_first(buffers, count)
        while count < total and layout.is_sound(framing, count):
            try:
                received = self.receive(remaining, deadline, socket.MSG_WAITALL)
            except OSError:
                if count < layout.num_bytes:
                    raise
                break
            count += received
            remaining = _without_first(remaining, received)
        num_received = layout.sound_blocks(framing, count)
        if (used := num_received * layout.num_bytes) < count:
            self._put_back(b"".join(buffers)[used:count] + self._buffer[self._begin : self._end])
        return num_received

    # ---- inside

    def _put_back(self, received: bytes) -> None:
        """Replace the contents of the receive buffer by `received`, bytes that are not parsed yet."""
        self._held = bytearray(received.ljust(_LINE_BYTES, b"\0"))
        self._buffer = memoryview(self._held)
        self._begin, self._end = 0, len(received)

    def _move_unused(self, buffers: Sequence[memoryview]) -> int:
        """Move received but unparsed bytes from the receive buffer into `buffers`; returns their number."""
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
        self._answer_bytes_left -= _ELEMENT_BYTES + len(line)
        if self._answer_bytes_left < 0:
            raise ProtocolError(f"an answer of more than {self._most_answer_bytes} bytes")
        if kind in b"+-":
            return text if kind == b"+" else self.error(line)
        if kind not in (b":", b"$", b"*"):
            raise ProtocolError(f"a reply that begins with {kind!r}")
        count = _number(text)
        if kind == b":":
            return count
        if count == -1:
            return None
        self._answer_bytes_left -= max(count, 0)
        if count < 0 or self._answer_bytes_left < 0 or (kind == b"*" and most_nested == 0):
            raise ProtocolError(
                f"an answer of more than {self._most_answer_bytes} bytes, or nested too deeply"
            )
        if kind == b"*":
            return [self._answer(deadline, most_nested - 1) for _ in range(count)]
        value = bytearray(count)
        self._fill(memoryview(value), deadline)
        self._end_of_value(deadline)
        return bytes(value)

    def _line(self, deadline: float) -> bytes:
        """Read a line of a reply; returns the line without its end."""
        while (at := self._held.find(b"\r\n", self._begin, self._end)) < 0:
            if self._end - self._begin >= _LINE_BYTES:
                raise ProtocolError("a line without an end")
            self._receive_more(deadline)
        line = bytes(self._buffer[self._begin : at])
        self._begin = at + 2
        if not line:
            raise ProtocolError("an empty line")
        return line

    def _fill(self, into: memoryview, deadline: float) -> None:
        """Fill `into` with unread bytes of the buffer, then with bytes from the socket."""
        filled = min(len(into), self._end - self._begin)
        into[:filled] = self._buffer[self._begin : self._begin + filled]
        self._begin += filled
        while filled < len(into):
            filled += self.receive([into[filled:]], deadline, socket.MSG_WAITALL)

    def _end_of_value(self, deadline: float) -> None:
        while self._end - self._begin < 2:
            self._receive_more(deadline)
        if self._held[self._begin : self._begin + 2] != b"\r\n":
            raise ProtocolError("a value that does not end where it should")
        self._begin += 2

    def _wait_for(self, num_bytes: int, deadline: float) -> None:
        """Wait until `num_bytes` can be received, the connection ends, or `SHORT_WAIT_S` is over.

        Without this wait, each reply to a SET would wake up the thread, because a server sends them
        separately. A wake-up costs as much CPU time as sending a block.
        """
        if not self._is_plain or num_bytes <= _SHORTEST_LINE_BYTES:
            return
        wait_s = min(_seconds_left(deadline), SHORT_WAIT_S)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, min(num_bytes, _LINE_BYTES))
        try:
            self._poll.poll(1e3 * wait_s)
        finally:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)

    def _receive_more(self, deadline: float) -> None:
        """Receive bytes into the buffer, after the unused bytes, which must be fewer than `_LINE_BYTES`."""
        unused = self._held[self._begin : self._end]
        self._buffer[: len(unused)] = unused
        self._begin, self._end = 0, len(unused)
        self._end += self.receive([self._buffer[self._end : _LINE_BYTES]], deadline)

    def receive(self, into: Sequence[memoryview], deadline: float, flags: int = 0) -> int:
        """Receive at least one byte into these buffers, in order; returns the number of received bytes.

        Over TLS only the first buffer is filled. `flags` is an argument of `socket.recvmsg_into`.
        """
        until = self._until(deadline)
        while True:
            seconds = self._patience_s(until, deadline)
            try:
                if self._is_plain:
                    count = self._socket.recvmsg_into(into, 0, flags)[0]
                else:
                    self._socket.settimeout(seconds)
                    count = self._socket.recv_into(into[0])
            except (BlockingIOError, TimeoutError):
                continue  # after 5 ms
            if count == 0:
                raise ConnectionResetError("the server has closed the connection")
            self.has_received = True
            return count

    def _raise_alert(self) -> None:
        """After a failed `send`, raise the TLS alert that the server sent before it closed the connection.

        The alert contains the reason. For example, with TLS 1.3 a server may refuse the client's certificate
        only after the client's handshake. Raises nothing if there is no alert.
        """
        if isinstance(self._socket, ssl.SSLSocket):
            self._socket.settimeout(0.0)
            try:
                self._socket.recv(1)
            except ssl.SSLError as error:
                if "ALERT" in (error.reason or ""):
                    raise
            except OSError:
                pass

    def _until(self, deadline: float) -> float:
        """Return the time until which to wait for the next byte: `silence_s` from now, at most `deadline`."""
        return min(deadline, time.monotonic() + self._silence_s)

    def _patience_s(self, until: float, deadline: float) -> float:
        """Return the seconds left until `until`, a result of `_until`. Raises `TimeoutError` if none are."""
        seconds = until - time.monotonic()
        if seconds <= 0.0 and until < deadline:
            raise TimeoutError(f"nothing received for {self._silence_s:g} s")
        return seconds if seconds > 0.0 else _seconds_left(deadline)


class _BlockLayout:
    """Layout of blocks in a stream of replies, if no reply is a null.

    A value consists of a line ``$LENGTH``, the bytes, and a line end. All but the bytes is the framing.

    Attributes:
        num_bytes: length of one block in the stream, framing included.
    """

    def __init__(self, lengths: Sequence[int]) -> None:
        self._lines = [b"$%d\r\n" % length for length in lengths]
        self._lengths = lengths
        self._framing = b"".join([line + _END for line in self._lines])
        self.num_bytes = sum(lengths) + len(self._framing)

    def laid_out(self, blocks: Sequence[Block]) -> tuple[memoryview, list[memoryview]]:
        """Return new memory for the framing, and all buffers (framing and values) in stream order."""
        framing = memoryview(bytearray(len(self._framing) * len(blocks)))
        buffers: list[memoryview] = []
        begin = end = 0
        for block in blocks:
            for line, parts in zip(self._lines, block, strict=True):
                end += len(line)
                buffers.append(framing[begin:end])
                buffers += parts
                begin, end = end, end + len(_END)
        buffers.append(framing[begin:end])
        return framing, buffers

    def is_sound(self, framing: memoryview, count: int) -> bool:
        """Return True if the framing in the first `count` bytes is correct."""
        whole, remaining = divmod(count, self.num_bytes)
        known = whole * len(self._framing)
        for line, length in zip(self._lines, self._lengths, strict=True):
            for size, is_framing in ((len(line), True), (length, False), (len(_END), True)):
                known += min(remaining, size) * is_framing
                remaining = max(0, remaining - size)
        return framing[:known] == (self._framing * (whole + 1))[:known]

    def sound_blocks(self, framing: memoryview, count: int) -> int:
        """Return the number of whole blocks before the first block with wrong framing."""
        whole, size = count // self.num_bytes, len(self._framing)
        if framing[: whole * size] == self._framing * whole:
            return whole
        return next(n for n in range(whole) if framing[n * size : (n + 1) * size] != self._framing)


def _without_first(buffers: list[memoryview], count: int) -> list[memoryview]:
    """Return the buffers without their first `count` bytes."""
    done = 0
    while done < len(buffers) and count >= len(buffers[done]):
        count -= len(buffers[done])
        done += 1
    remaining = buffers[done:]
    if count:
        remaining[0] = remaining[0][count:]
    return remaining


def _number(text: bytes) -> int:
    if not text.removeprefix(b"-").isdigit() or len(text) > _MOST_DIGITS:
        raise ProtocolError(f"{len(text)} bytes where a number of up to {_MOST_DIGITS} digits should be")
    return int(text)


def _seconds_left(deadline: float) -> float:
    seconds = deadline - time.monotonic()
    if seconds <= 0.0:
        raise TimeoutError("deadline exceeded")
    return seconds
