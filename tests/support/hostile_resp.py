"""A fake RESP server that misbehaves, a table of named attacks, and a driver that counts their effects.

    PYTHONPATH=src:tests python tests/support/hostile_resp.py --seed 1 --rounds 3 [--only WORD]

A round runs every attack once against a new tier: `REPLIES` against one server, `MAPS` against a cluster of
three. The program prints counts. It exits with 1 if a wrong byte was served, a call of the scheduler's thread
raised, a log line contained the password or a control character, or a tier did not recover.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import random
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np

from kvoffload.structures.keys import Keys
from kvoffload.tiers.contract import NO_JOB
from kvoffload.tiers.shared.server import RemoteOptions
from kvoffload.tiers.valkey.cluster import ClusterTier
from kvoffload.tiers.valkey.protocol import valkey_tier
from kvoffload.tiers.valkey.resp import Connection, Login
from support.pauses import end_pauses

PASSWORD = "hunter2-secret"
BLOCK_BYTES = 24 << 10
"""Two values in a server."""
NUM_BLOCKS, TIMEOUT_S, PROBE_S = 24, 0.2, 0.1
PATIENCE_S, RECOVERY_S = 60.0, 20.0
"""Time until a test fails; not a measurement."""

FEW, NEW = list(range(1, 9)), list(range(101, 109))
"""Blocks that are present when an attack begins, and blocks that are absent."""
CLOSE, HANG = "close", "hang"
Piece: TypeAlias = "bytes | float | str"
"""A part of a reply: bytes to send, seconds to pause, `CLOSE` or `HANG`."""


@dataclass
class Moment:
    """A command, and the facts that an attack may use in its reply.

    Attributes:
        correct: the reply of a well-behaved server.
        earlier: replies sent so far, at most 200.
    """

    server: FakeServer
    rng: random.Random
    words: list[bytes]
    correct: bytes
    earlier: list[bytes]

    @property
    def verb(self) -> bytes:
        return self.words[0].upper()

    @property
    def is_epoch(self) -> bool:
        return len(self.words) > 1 and b":epoch" in self.words[1]

    def has_value(self) -> bool:
        """Return True if the correct reply is a block's value."""
        return self.correct[:1] == b"$" and len(self.correct) > 64

    def value(self) -> bytes:
        return self.correct[self.correct.index(b"\r\n") + 2 : -2]


Attack: TypeAlias = Callable[[Moment], Iterable[Piece]]


def bulk(value: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(value), value)


def encoded(answer: Any) -> bytes:
    """Encode a Python value in RESP2; a `str` becomes a simple string."""
    if isinstance(answer, list):
        return b"*%d\r\n" % len(answer) + b"".join(map(encoded, answer))
    if isinstance(answer, int):
        return b":%d\r\n" % answer
    if isinstance(answer, str):
        return b"+%b\r\n" % answer.encode()
    return b"$-1\r\n" if answer is None else bulk(answer)


# ---- the server


class FakeServer:
    """A server on a free port that keeps values in a dict. It is well-behaved until `attack` is set.

    Attributes:
        rate: share of replies that are attacked.
        slots: called for each ``CLUSTER SLOTS``; returns the encoded reply.
    """

    def __init__(self, seed: int) -> None:
        self.values: dict[bytes, bytes] = {}
        self.attack: Attack | None = None
        self.rate = 1.0
        self.slots: Callable[[], bytes] = lambda: b"-ERR This instance has cluster support disabled\r\n"
        self.num_attacks = 0
        self._rng, self._earlier = random.Random(seed), [b"+OK\r\n"]
        self._over, self._lock = threading.Event(), threading.Lock()
        self.clients: list[socket.socket] = []
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listening.getsockname()[1]
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def stop(self) -> None:
        self._over.set()
        with suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        self.disconnect()
        for thread in self._threads:
            thread.join(PATIENCE_S)

    def disconnect(self) -> None:
        """Close all connections, as a restart of the server does."""
        for client in list(self.clients):
            with suppress(OSError):  # closed already
                client.shutdown(socket.SHUT_RDWR)

    def correct_reply(self, words: list[bytes]) -> bytes:
        """Execute the command; returns the reply of a well-behaved server."""
        verb, names = words[0].upper(), words[1:]
        if verb == b"SET":
            if b"NX" in words[3:] and names[0] in self.values:
                return b"$-1\r\n"
            self.values[names[0]] = names[1]
            return b"+OK\r\n"
        if verb == b"GET":
            return encoded(self.values.get(names[0]))
        if verb == b"EXISTS":
            return encoded(sum(name in self.values for name in names))
        if verb == b"DEL":
            return encoded(sum(self.values.pop(name, None) is not None for name in names))
        if verb == b"CLUSTER":
            is_info = names[0].upper() == b"INFO"
            return encoded(b"cluster_state:ok\r\ncluster_size:3\r\n") if is_info else self.slots()
        simple = {
            b"AUTH": "OK",
            b"PING": "PONG",
            b"WAIT": 0,
            b"DBSIZE": len(self.values),
            b"INFO": b"redis_version:7.0.0\r\nrole:master\r\nmaxmemory:1000\r\nused_memory:10\r\n",
            b"CONFIG": [b"save", b""],
            b"SCAN": [b"0", list(self.values)[:1000]],
            b"STRLEN": len(self.values.get(names[0] if names else b"", b"")),
            b"TTL": -1,
        }
        return encoded(simple[verb]) if verb in simple else b"-ERR unknown command\r\n"

    # ---- threads of the server

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listening.accept()
            except OSError:
                return
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.clients.append(client)
            thread = threading.Thread(target=self._serve, args=(client,), daemon=True)
            thread.start()
            self._threads.append(thread)

    def _serve(self, client: socket.socket) -> None:
        with suppress(OSError, ValueError), client, client.makefile("rb") as stream:
            while (words := _command(stream)) and not self._over.is_set():
                for piece in self._reply(words):
                    if piece is CLOSE:
                        return
                    if piece is HANG:
                        self._over.wait()
                        return
                    if isinstance(piece, float):
                        self._over.wait(piece)
                    elif isinstance(piece, bytes):
                        client.sendall(piece)

    def _reply(self, words: list[bytes]) -> Iterable[Piece]:
        with self._lock:
            attack = self.attack
            correct = self.correct_reply(words)
            moment = Moment(self, self._rng, words, correct, self._earlier)
            pieces: Iterable[Piece] = [correct]
            if attack is not None and self._rng.random() < self.rate:
                pieces_of_attack = attack(moment)
                pieces = pieces_of_attack if isinstance(pieces_of_attack, Iterator) else [*pieces_of_attack]
                self.num_attacks += pieces != [correct]
            self._earlier.append(correct)
            del self._earlier[:-200]
        return pieces


def _command(stream: Any) -> list[bytes]:
    """Read the next command; returns an empty list at the end of the stream."""
    line = stream.readline()
    if not line:
        return []
    words = []
    for _ in range(int(line[1:])):
        length = int(stream.readline()[1:])
        words.append(stream.read(length))
        stream.read(2)
    return words


# ---- attacks on replies


def always(*pieces: Piece) -> Attack:
    """Send the same reply to every command."""
    return lambda moment: pieces


def on_values(change: Callable[[Moment], Iterable[Piece]]) -> Attack:
    """Attack only replies with a block's value."""
    return lambda moment: change(moment) if moment.has_value() else [moment.correct]


def on(verb: bytes, *pieces: Piece) -> Attack:
    """Send the same reply to every command with this verb."""
    return lambda moment: pieces if moment.verb == verb else [moment.correct]


def on_epochs(*values: bytes | None) -> Attack:
    """Reply with another epoch, drawn from `values`, or at random."""

    def attack(moment: Moment) -> Iterable[Piece]:
        if moment.verb != b"GET" or not moment.is_epoch:
            return [moment.correct]
        value = moment.rng.choice(values) if values else b"%016x" % moment.rng.getrandbits(64)
        return [encoded(value)]

    return attack


def with_length(length: Callable[[int], bytes]) -> Attack:
    """Send a value with a wrong length."""
    return on_values(lambda m: [b"$%b\r\n%b\r\n" % (length(len(m.value())), m.value())])


def _flipped(moment: Moment) -> Iterable[Piece]:
    value = bytearray(moment.value())
    value[moment.rng.randrange(len(value))] ^= 1 << moment.rng.randrange(8)
    return [bulk(bytes(value))]


def _swapped(moment: Moment) -> Iterable[Piece]:
    values = [value for value in moment.server.values.values() if len(value) == len(moment.value())]
    return [bulk(moment.rng.choice(values))]


def _of_another_epoch(moment: Moment) -> Iterable[Piece]:
    name = moment.words[1]
    same = [
        value
        for other, value in moment.server.values.items()
        if other != name and other.rpartition(b":")[2] == name.rpartition(b":")[2]
    ]
    return [bulk(moment.rng.choice(same)) if same else moment.correct]


def _dripping(moment: Moment) -> Iterator[Piece]:
    for at in range(len(moment.correct)):
        yield moment.correct[at : at + 1]
        yield 0.002


def _cut(moment: Moment) -> Iterable[Piece]:
    return [moment.correct[: moment.rng.randrange(len(moment.correct))], CLOSE]


def _stops(moment: Moment) -> Iterable[Piece]:
    return [moment.correct[: moment.rng.randrange(len(moment.correct))], HANG]


def _lying_set(moment: Moment) -> Iterable[Piece]:
    """Reply OK, but drop the value or store it under another name."""
    if moment.verb == b"SET" and not moment.is_epoch:
        moment.server.num_attacks += 1
        value = moment.server.values.pop(moment.words[1], b"")
        if moment.rng.random() < 0.5 and moment.server.values:
            moment.server.values[moment.rng.choice(list(moment.server.values))] = value
    return [moment.correct]


def _stored_flipped(moment: Moment) -> Iterable[Piece]:
    if moment.verb == b"SET" and not moment.is_epoch and moment.words[1] in moment.server.values:
        moment.server.num_attacks += 1
        value = bytearray(moment.server.values[moment.words[1]])
        if value:
            value[moment.rng.randrange(len(value))] ^= 0x10
        moment.server.values[moment.words[1]] = bytes(value)
    return [moment.correct]


def _in_another_order() -> Attack:
    held: list[bytes] = []

    def attack(moment: Moment) -> Iterable[Piece]:
        if held:
            return [moment.correct, held.pop()]
        if moment.rng.random() < 0.2:
            held.append(moment.correct)
            return []
        return [moment.correct]

    return attack


def _echo(moment: Moment) -> Iterable[Piece]:
    if moment.verb != b"AUTH":
        return [moment.correct]
    words = " ".join(f"'{word.decode()}'" for word in moment.words[1:])
    return [f"-ERR unknown command 'AUTH', with args beginning with: {words}\r\n".encode()]


def _garbage(moment: Moment) -> Iterable[Piece]:
    return [moment.rng.randbytes(moment.rng.randrange(1, 3000))]


def error(text: str) -> Attack:
    return always(f"-{text}\r\n".encode())


REPLIES: dict[str, Attack | tuple[Attack, float]] = {
    "length one more": with_length(lambda n: b"%d" % (n + 1)),
    "length one less": with_length(lambda n: b"%d" % (n - 1)),
    "length zero": with_length(lambda n: b"0"),
    "length negative": with_length(lambda n: b"-%d" % n),
    "length of a terabyte": with_length(lambda n: b"1000000000000"),
    "length beyond 64 bits": with_length(lambda n: b"9" * 30),
    "length of 4,000 digits": with_length(lambda n: b"9" * 4000),
    "length as Python writes it": with_length(lambda n: b"%d_0" % (n // 10)),
    "length with a blank": with_length(lambda n: b" %d" % n),
    "longer value": on_values(lambda m: [bulk(m.value() + b"x")]),
    "twice the value": on_values(lambda m: [bulk(2 * m.value())]),
    "shorter value": on_values(lambda m: [bulk(m.value()[:-1])]),
    "empty value": on_values(lambda m: [bulk(b"")]),
    "flipped bit": (on_values(_flipped), 0.3),
    "value of another block": (on_values(_swapped), 0.3),
    "value of another epoch": (on_values(_of_another_epoch), 0.5),
    "no value": on_values(lambda m: [b"$-1\r\n"]),
    "wrong end of value": on_values(lambda m: [m.correct[:-2] + b"zz"]),
    "bomb: a gigabyte": on_values(lambda m: [b"$1073741824\r\n", bytes(1 << 20), CLOSE]),
    "bomb: array of a million": always(b"*1000000\r\n"),
    "bomb: nested arrays": always(b"*1\r\n" * 50_000),
    "bomb: a million simple strings": always(b"+\r\n" * 300_000),
    "endless line": always(b"-" + b"x" * 200_000),
    "endless number": always(b":" + b"1" * 200_000),
    "empty lines": always(b"\r\n" * 1000),
    "line feeds only": (lambda m: [m.correct.replace(b"\r\n", b"\n")], 0.3),
    "RESP3 push": (lambda m: [b">2\r\n+invalidate\r\n*1\r\n$1\r\na\r\n", m.correct], 0.2),
    "RESP3 attribute": (lambda m: [b"|1\r\n+ttl\r\n:3600\r\n", m.correct], 0.2),
    "RESP3 null": (always(b"_\r\n"), 0.3),
    "RESP3 big number": (always(b"(3492890328409238509324850943850943825024385\r\n"), 0.3),
    "RESP3 verbatim string": (always(b"=15\r\ntxt:Some string\r\n"), 0.3),
    "RESP3 set": (always(b"~2\r\n:1\r\n:2\r\n"), 0.3),
    "RESP3 boolean": (always(b"#t\r\n"), 0.3),
    "drip": (_dripping, 0.1),
    "reply twice": (lambda m: [m.correct, m.correct], 0.2),
    "no reply": (always(), 0.1),
    "another order": _in_another_order(),
    "an earlier reply": (lambda m: [m.rng.choice(m.earlier)], 0.3),
    "cut": (_cut, 0.2),
    "stops": (_stops, 0.1),
    "closes": (always(CLOSE), 0.3),
    "hangs": (always(HANG), 0.2),
    "garbage": (_garbage, 0.3),
    "HTTP": always(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n", CLOSE),
    "TLS alert": always(b"\x15\x03\x01\x00\x02\x02\x28", CLOSE),
    "a million replies at once": (always(b"+OK\r\n" * 300_000), 0.3),
    "always OK": always(b"+OK\r\n"),
    "always 1": always(b":1\r\n"),
    "always 2": always(b":2\r\n"),
    "always nothing": always(b"$-1\r\n"),
    "always an array": always(b"*0\r\n"),
    "MOVED": (error("MOVED 3999 127.0.0.1:6381"), 0.5),
    "ASK": (error("ASK 3999 127.0.0.1:6381"), 0.5),
    "TRYAGAIN": (error("TRYAGAIN Multiple keys request during rehashing of slot"), 0.5),
    "CLUSTERDOWN": (error("CLUSTERDOWN Hash slot not served"), 0.5),
    "LOADING": (error("LOADING Redis is loading the dataset in memory"), 0.5),
    "READONLY": (error("READONLY You can't write against a read only replica."), 0.5),
    "OOM": on(b"SET", b"-OOM command not allowed when used memory > 'maxmemory'.\r\n"),
    "MISCONF": on(b"SET", b"-MISCONF Errors writing to the AOF file\r\n"),
    "NOAUTH": error("NOAUTH Authentication required."),
    "NOPERM": (error("NOPERM this user has no permissions to run the command"), 0.5),
    "WRONGTYPE": (error("WRONGTYPE Operation against a key holding the wrong kind of value"), 0.3),
    "BUSY": (error("BUSY Redis is busy running a script."), 0.5),
    "error without words": (always(b"-\r\n"), 0.5),
    "error with line feeds and escapes": error("ERR \x1b[31mred\x1b[0m\n2026-11-24 forged line\x00\x07"),
    "error with markup": error("ERR [/foo] [bold]x[/bold] [link=http://h]y[/link]"),
    "error of 4,000 bytes": error("ERR " + "x" * 4000),
    "error that is no UTF-8": always(b"-ERR \xff\xfe\x80\r\n"),
    "echo of the password": _echo,
    "password in every error": error(f"ERR you said {PASSWORD}"),
    "password in every reply": always(f"+{PASSWORD}\r\n".encode()),
    "password as a number": always(f":{PASSWORD}\r\n".encode()),
    "password as an error code": always(f"-{PASSWORD} {PASSWORD}\r\n".encode()),
    "EXISTS says 1 of 2": on(b"EXISTS", b":1\r\n"),
    "EXISTS says all": on(b"EXISTS", b":2\r\n"),
    "EXISTS says none": on(b"EXISTS", b":0\r\n"),
    "EXISTS says 3": on(b"EXISTS", b":3\r\n"),
    "EXISTS says -1": on(b"EXISTS", b":-1\r\n"),
    "SET lies": _lying_set,
    "SET flips": _stored_flipped,
    "SET queued": on(b"SET", b"+QUEUED\r\n"),
    "random epochs": (on_epochs(), 0.5),
    "no epoch": (on_epochs(None), 0.5),
    "two epochs in turn": on_epochs(b"%016x" % 1, b"%016x" % 2),
    "epoch with a sign": on_epochs(b"-00000000000001f"),
    "epoch as Python writes it": on_epochs(b"0x00000000000001", b"0000_0000_0000_1", b"  000000000001  "),
    "epoch in capitals": on_epochs(b"00000000000000AF"),
    "epoch of another length": on_epochs(b"", b"1", b"0" * 15, b"0" * 17, b"0" * 4000),
    "epoch that is no text": on_epochs(b"\xff" * 16, bytes(16)),
}
"""Name -> attack, or attack and the share of replies that it attacks (1 by default)."""


# ---- attacks on the map of a cluster

Slots: TypeAlias = "list[Any]"


def _correct_map(ports: list[int]) -> Slots:
    bounds = [16384 * number // len(ports) for number in range(len(ports) + 1)]
    return [
        [first, end - 1, [b"127.0.0.1", port, b"id"]]
        for first, end, port in zip(bounds, bounds[1:], ports, strict=False)
    ]


def _plus(*ranges: Slots) -> Callable[[random.Random, list[int]], Slots]:
    """Append ranges to the correct map."""
    return lambda rng, ports: [*_correct_map(ports), *ranges]


def _host(name: bytes | None) -> Callable[[random.Random, list[int]], Slots]:
    """Give the last node this host."""
    return lambda rng, ports: [
        *_correct_map(ports)[:-1],
        [*_correct_map(ports)[-1][:2], [name, ports[-1], b"id"]],
    ]


def _port(port: Any) -> Callable[[random.Random, list[int]], Slots]:
    return lambda rng, ports: [
        *_correct_map(ports)[:-1],
        [*_correct_map(ports)[-1][:2], [b"127.0.0.1", port, b"id"]],
    ]


def _nodes(count: int, rng: random.Random | None = None) -> Slots:
    size = 16384 // count
    return [
        [
            number * size,
            (number + 1) * size - 1,
            [b"127.1.%d.%d" % (number // 250, number % 250 + 1), rng.randrange(1, 65536) if rng else 1, b""],
        ]
        for number in range(count)
    ]


def _flipping(rng: random.Random, ports: list[int]) -> Slots:
    return _correct_map(rng.sample(ports, len(ports)))


NODE = [b"127.0.0.1", 1, b"id"]
MAPS: dict[str, Callable[[random.Random, list[int]], Any]] = {
    "slot 16384": _plus([16384, 16384, NODE]),
    "slots to 16447": lambda rng, ports: [[0, 16447, [b"127.0.0.1", ports[0], b"id"]]],
    "slots to 10^6": _plus([16384, 10**6, NODE]),
    "slots to 10^9": lambda rng, ports: [[0, 10**9, [b"127.0.0.1", ports[0], b"id"]]],
    "slots to 10^11": _plus([0, 10**11, NODE]),
    "slots of 25 digits": _plus([10**25, 10**25, NODE]),
    "negative slots": _plus([-16384, -1, NODE]),
    "last before first": _plus([200, 100, NODE]),
    "slots that are text": _plus([b"0", b"100", NODE]),
    "slots that are missing": lambda rng, ports: _correct_map(ports)[:-1],
    "overlapping ranges": _plus([0, 16383, NODE]),
    "the same range 5,000 times": lambda rng, ports: 5000 * [[0, 16383, [b"127.0.0.1", ports[0], b"id"]]],
    "16,384 ranges": lambda rng, ports: [[n, n, [b"127.0.0.1", ports[0], b""]] for n in range(16384)],
    "256 nodes": lambda rng, ports: _nodes(256),
    "16,384 nodes": lambda rng, ports: _nodes(16384),
    "128 nodes": lambda rng, ports: _nodes(128),
    "128 new nodes each time": lambda rng, ports: _nodes(128, rng),
    "no ranges": lambda rng, ports: [],
    "a range of nothing": _plus([]),
    "a range without a node": _plus([0, 1]),
    "a node without a port": _plus([0, 1, [b"127.0.0.1"]]),
    "no array": lambda rng, ports: "OK",
    "nothing": lambda rng, ports: None,
    "numbers": lambda rng, ports: [1, 2, 3],
    "deep arrays": lambda rng, ports: [[[[[[[[[[[[]]]]]]]]]]]],
    "a million strings": lambda rng, ports: 300_000 * [""],
    "port 0": _port(0),
    "port -1": _port(-1),
    "port 65536": _port(65536),
    "port 10^12": _port(10**12),
    "port as text": _port(b"6379"),
    "port that is nothing": _port(None),
    "host with line feed and escapes": _host(b"h\n\x1b[31mforged"),
    "host with markup": _host(b"[/foo]"),
    "host of 4,000 bytes": _host(b"h" * 4000),
    "host that is no UTF-8": _host(b"\xff\xfe"),
    "host with a blank": _host(b"a b"),
    "host with a zero": _host(b"a\0b"),
    "host that is unknown": _host(b"?"),
    "host that is empty": _host(b""),
    "host that is nothing": _host(None),
    "host that is a number": lambda rng, ports: [[0, 16383, [7, ports[0], b""]]],
    "host that cannot be found": _host(b"nobody.invalid"),
    "host with an empty label": _host(b"a..b"),
    "1,000 replicas": lambda rng, ports: [
        [*_correct_map(ports)[0], *1000 * [NODE]],
        *_correct_map(ports)[1:],
    ],
    "flipping": _flipping,
}
"""Name -> the answer to ``CLUSTER SLOTS`` for nodes at these ports."""
CHANGING_MAPS = {"flipping", "128 new nodes each time"}


# ---- the driver


@dataclass
class Outcome:
    """Counts of one attack.

    Attributes:
        attacks: incorrect replies.
        served: blocks that were read and compared; wrong: blocks with wrong bytes.
        escapes: exceptions raised by calls of the scheduler's thread; first: traceback of the first one.
        leaks: log lines with the password or a control character.
        late_s: longest delay of a read or probe beyond its deadline.
        cpu_s: longest CPU time of a call on the scheduler's thread; slowest: name of this call.
        threads: largest number of threads of the tier.
        recovered: True if a block could be read after the attack.
    """

    name: str
    attacks: int = 0
    served: int = 0
    wrong: int = 0
    escapes: int = 0
    leaks: int = 0
    late_s: float = 0.0
    cpu_s: float = 0.0
    slowest: str = ""
    threads: int = 0
    recovered: bool = False
    first: str = ""

    @property
    def is_good(self) -> bool:
        return not (self.wrong or self.escapes or self.leaks) and self.recovered


class _Log(logging.Handler):
    """Collects the formatted lines of our loggers."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def has_leaked(text: str) -> bool:
    return "hunter2" in text or not text.isprintable() or len(text) > 1000


@dataclass
class Driver:
    """Makes random calls of the scheduler's thread to a tier."""

    tier: Any
    rng: random.Random
    outcome: Outcome
    pool: Any = field(default_factory=lambda: np.zeros((NUM_BLOCKS, BLOCK_BYTES), np.uint8))

    def call(self, do: Callable[..., Any], *arguments: Any) -> Any:
        """Call the tier; an exception counts as an escape."""
        begun = time.thread_time()
        try:
            return do(*arguments)
        except Exception:
            self.outcome.escapes += 1
            self.outcome.first = self.outcome.first or traceback.format_exc()
            return None
        finally:
            seconds = time.thread_time() - begun
            if seconds > self.outcome.cpu_s:
                self.outcome.cpu_s, self.outcome.slowest = seconds, getattr(do, "__name__", "")

    def wait(self, job: int | None, timeout_s: float | None) -> Any:
        """Wait for the result of a job, and record its delay beyond the deadline."""
        until, begun = time.monotonic() + PATIENCE_S, time.monotonic()
        while job not in (None, NO_JOB):
            for result in self.call(self.tier.finished) or ():
                if result.job == job:
                    if timeout_s is not None:
                        late_s = time.monotonic() - begun - timeout_s
                        self.outcome.late_s = max(self.outcome.late_s, late_s)
                    return result
            assert time.monotonic() < until, "the job does not end"
            time.sleep(0.0005)
        return None

    def step(self, kind: str, numbers: list[int]) -> int:
        """Look up, then write, probe or read these blocks; returns the number served."""
        keys = Keys.pack([number.to_bytes(36, "big") for number in numbers], 36)
        rows = np.arange(len(numbers))
        self.call(self.tier.contains, keys)
        self.call(self.tier.unknown, keys)
        if kind == "write":
            for row, number in enumerate(numbers):
                self.pool[row].view(np.uint16)[:] = number
            submitted = self.call(self.tier.submit_write, keys, self.pool, rows)
            self.wait(submitted and submitted[0], None)
        elif kind == "probe":
            self.wait(self.call(self.tier.submit_probe, keys), PROBE_S)
        else:
            return self.read(numbers, keys, rows)
        return 0

    def read(self, numbers: list[int], keys: Keys, rows: Any) -> int:
        self.pool[:] = 0xEE
        result = self.wait(self.call(self.tier.submit_read, keys, self.pool, rows), TIMEOUT_S)
        if result is None:
            return 0
        good = [row for row in range(len(numbers)) if result.ok[row]]
        wrong = sum(not (self.pool[row].view(np.uint16) == numbers[row]).all() for row in good)
        self.outcome.served += len(good)
        self.outcome.wrong += wrong
        return len(good)

    def random_step(self) -> int:
        numbers = self.rng.sample(range(1, NUM_BLOCKS + 1), self.rng.randint(1, 8))
        if self.rng.random() < 0.05:
            self.call(self.tier.clear)
        threads = sum(thread.name.startswith("kvoffload-") for thread in threading.enumerate())
        self.outcome.threads = max(self.outcome.threads, threads)
        return self.step(self.rng.choice(("write", "read", "read", "probe")), numbers)

    def try_again_now(self) -> None:
        """End all pauses, so that the attack or the recovery continues."""
        end_pauses(self.tier)

    def wait_for(self, number: int) -> None:
        """Wait until a step serves `number` blocks."""
        until = time.monotonic() + RECOVERY_S
        while time.monotonic() < until:
            self.try_again_now()
            if self.random_step() >= number:
                self.outcome.recovered = True
                return
            time.sleep(0.0005)


@contextmanager
def listening(outcome: Outcome) -> Iterator[None]:
    """Count log lines that contain the password or a control character."""
    log, logger = _Log(), logging.getLogger("kvoffload")
    logger.addHandler(log)
    was = logger.propagate
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(log)
        logger.propagate = was
        outcome.leaks += sum(map(has_leaked, log.lines))


def _opened(servers: list[FakeServer], is_cluster: bool) -> Any:
    options = RemoteOptions(
        namespace="ns", fingerprint="model", block_bytes=BLOCK_BYTES, timeout_s=TIMEOUT_S,
        probe_timeout_s=PROBE_S,
    )  # fmt: skip
    login = Login("", PASSWORD)
    if is_cluster:
        seeds = [("127.0.0.1", server.port) for server in servers]
        connect = lambda address, deadline: Connection(*address, login, deadline)  # noqa: E731
        return ClusterTier("valkey", "cluster/ns", seeds, connect, options)
    (server,) = servers
    to = lambda deadline: Connection("127.0.0.1", server.port, login, deadline)  # noqa: E731
    return valkey_tier("valkey", "server/ns", to, replace(options, num_threads=2))


def _run(name: str, servers: list[FakeServer], seed: int, steps: int, begin: Callable[[], None],
         end: Callable[[], None], must_attack: bool = False) -> Outcome:  # fmt: skip
    """Write and read blocks, attack for some steps, and read again.

    `must_attack` adds steps until an attack has taken place, because a busy machine may be too slow.
    """
    outcome = Outcome(name)
    gc.collect()
    gc.disable()  # collecting the garbage of the fake server is no cost of the tier
    with listening(outcome):
        driver = Driver(_opened(servers, len(servers) > 1), random.Random(seed), outcome)
        driver.wait_for(1)
        driver.step("write", FEW)
        driver.call(driver.tier.clear)  # leaves values of an older epoch on the server
        driver.wait_for(1)
        driver.step("write", FEW)
        outcome.recovered = False
        begin()
        until = time.monotonic() + PATIENCE_S
        fixed = [("read", FEW), ("write", NEW), ("probe", FEW), ("read", FEW), ("read", NEW)]
        for number in range(steps):
            driver.try_again_now()
            if number < len(fixed):
                driver.step(*fixed[number])
            else:
                driver.random_step()
            if time.monotonic() > until:
                break
        while must_attack and not servers[0].num_attacks and time.monotonic() < until:
            driver.try_again_now()
            driver.step("read", FEW)
        end()
        driver.wait_for(1)
        tiers = [driver.tier, *getattr(driver.tier, "_nodes", {}).values()]
        driver.call(driver.tier.close)
        outcome.leaks += sum(has_leaked(f"{tier.last_error} {tier.last_error!r}") for tier in tiers)
        outcome.attacks = sum(server.num_attacks for server in servers)
    gc.enable()
    return outcome


def attack_replies(name: str, seed: int, steps: int = 40) -> Outcome:
    """Run an attack on the replies of one server."""
    entry = REPLIES[name]
    attack, rate = entry if isinstance(entry, tuple) else (entry, 1.0)
    server = FakeServer(seed)

    def begin() -> None:
        server.rate, server.attack = rate, attack
        for client in server.clients:  # new connections are attacked from their first reply
            with suppress(OSError):
                client.shutdown(socket.SHUT_RDWR)

    def end() -> None:
        server.attack = None
        for epoch in [key for key in server.values if b":epoch" in key]:
            server.values.pop(epoch, None)

    try:
        return _run(name, [server], seed, steps, begin, end, must_attack=rate == 1.0)
    finally:
        server.stop()


def attack_map(name: str, seed: int, steps: int = 40) -> Outcome:
    """Run an attack on the map of a cluster."""
    servers = [FakeServer(seed + number) for number in range(3)]
    ports, rng = [server.port for server in servers], random.Random(seed)
    correct = encoded(_correct_map(ports))

    def begin() -> None:
        for server in servers:
            server.slots = attacked
            # Nodes fail at random, so that the tier requests the map.
            server.attack, server.rate = error("MOVED 1 127.0.0.1:1"), 0.3

    first = encoded(MAPS[name](rng, ports))

    def attacked() -> bytes:
        servers[0].num_attacks += 1
        return encoded(MAPS[name](rng, ports)) if name in CHANGING_MAPS else first

    def end() -> None:
        for server in servers:
            server.slots, server.attack = (lambda: correct), None

    end()
    try:
        return _run(name, servers, seed, steps, begin, end)
    finally:
        for server in servers:
            server.stop()


def run(seed: int, rounds: int, only: str = "", steps: int = 40) -> Iterator[Outcome]:
    """Run every attack `rounds` times, after a short run that compiles and imports everything."""
    attack_replies("no value", seed, 3)
    for number in range(rounds):
        for table, attack in ((REPLIES, attack_replies), (MAPS, attack_map)):
            for name in table:
                if only in name:
                    yield attack(name, seed + number, steps)


def summary(outcomes: list[Outcome]) -> dict[str, Any]:
    return {
        "runs": len(outcomes),
        "attacks": sum(outcome.attacks for outcome in outcomes),
        "served": sum(outcome.served for outcome in outcomes),
        "wrong": sum(outcome.wrong for outcome in outcomes),
        "escapes": sum(outcome.escapes for outcome in outcomes),
        "leaks": sum(outcome.leaks for outcome in outcomes),
        "late_s": max(outcome.late_s for outcome in outcomes),
        "cpu_s": max(outcome.cpu_s for outcome in outcomes),
        "threads": max(outcome.threads for outcome in outcomes),
        "not_recovered": [outcome.name for outcome in outcomes if not outcome.recovered],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 30))
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--only", default="", help="run only attacks whose name contains this word")
    parser.add_argument("--format", choices=["table", "json"], default="table")
    given = parser.parse_args()
    print(f"seed {given.seed}", file=sys.stderr)
    outcomes = []
    for outcome in run(given.seed, given.rounds, given.only, given.steps):
        outcomes.append(outcome)
        if given.format == "table":
            mark = " " if outcome.is_good else "!"
            print(f"{mark} {outcome.name:36} {outcome.attacks:7,} attacks {outcome.served:6,} served "
                  f"{outcome.wrong} wrong {outcome.escapes} escapes {outcome.leaks} leaks "
                  f"{1e3 * outcome.late_s:7.1f} ms late {1e3 * outcome.cpu_s:6.1f} ms CPU in "
                  f"{outcome.slowest:12} {outcome.threads:4} threads"
                  + ("" if outcome.recovered else "  NOT RECOVERED"), flush=True)  # fmt: skip
            if outcome.first:
                print(outcome.first)
    if given.format == "json":
        runs = [asdict(outcome) for outcome in outcomes]
        print(json.dumps({"summary": summary(outcomes), "runs": runs}, indent=2))
    else:
        print(json.dumps(summary(outcomes)))
    sys.exit(0 if all(outcome.is_good for outcome in outcomes) else 1)


if __name__ == "__main__":
    main()
