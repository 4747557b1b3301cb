"""A fake S3 server that misbehaves in named ways, and a soak run that drives it.

    python tests/support/hostile_s3.py --seed 1 --rounds 200 [--attack NAME ...]

The server keeps objects in a dictionary and behaves like S3, except for the current attack, a name in
`ATTACKS`. The soak run starts server and client as separate processes, to count crashes of the client and to
measure the client's memory alone. It prints one JSON object: attacks, blocks served, wrong bytes, stale
blocks, exceptions raised by calls of the scheduler's thread, crashed processes, growth of the client's peak
RSS, and the longest overrun of a deadline.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import json
import os
import random
import resource
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

BUCKET, KEY_ID, SECRET = "kv-cache", "AKIATESTS", "hunter2hunter2"
HUGE = 10**15
_CHUNK = bytes(1 << 16)
_PATIENCE_S = 20.0
"""Seconds after which the server closes a connection that it floods or lets hang."""
_MODIFIED = "Tue, 24 Nov 2026 00:00:00 GMT"


@dataclass
class Request:
    method: str
    name: str
    headers: dict[str, str]
    query: dict[str, list[str]]
    body: bytes

    @property
    def key_id(self) -> str:
        """The access key that signed the request."""
        credential = self.query.get("X-Amz-Credential", [""])[0]
        if not credential and "Credential=" in (login := self.headers.get("authorization", "")):
            credential = login.split("Credential=")[1]
        return credential.split("/")[0]

    @property
    def is_epoch(self) -> bool:
        return "/epochs/" in self.name and "measure" not in self.name


@dataclass
class Reply:
    """A response. `headers` may contradict `body`."""

    status: str
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""

    def head(self) -> bytes:
        lines = [f"HTTP/1.1 {self.status}", *(f"{name}: {value}" for name, value in self.headers.items())]
        return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n"


class HangupError(Exception):
    """The connection is closed."""


def error(status: str, code: str) -> Reply:
    body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>no</Message></Error>".encode()
    return Reply(status, {"Content-Length": str(len(body)), "Content-Type": "application/xml"}, body)


class HostileS3:
    """A server on a free port. Thread: any; each connection has its thread.

    Args:
        seed: seed of the attacks' random choices.

    Attributes:
        attack: name of the current attack, a key of `ATTACKS`, or "".
        rate: probability that a request is attacked.
        key_id: the accepted access key.
        objects: bytes by name.
        old_epochs: earlier values of each epoch object.
        counts: requests by method, attacked requests, requests to the other host with a login and without.
    """

    def __init__(self, seed: int = 0) -> None:
        self.attack, self.rate, self.key_id = "", 1.0, KEY_ID
        self.objects: dict[str, bytes] = {}
        self.old_epochs: dict[str, list[bytes]] = {}
        self.counts: Counter[str] = Counter()
        self.chance = random.Random(seed)
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._listening = [socket.create_server(("127.0.0.1", 0), backlog=128) for _ in range(2)]
        self.port, self.other_port = (listener.getsockname()[1] for listener in self._listening)
        for listening, serve in zip(self._listening, (self._serve, self._serve_other), strict=True):
            threading.Thread(target=self._accept, args=(listening, serve), daemon=True).start()

    def close(self) -> None:
        for connection in [*self._listening, *self._open]:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()

    def drop_connections(self) -> None:
        for connection in [*self._open]:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    # ---- correct behaviour

    def _accept(self, listening: socket.socket, serve: Callable[[socket.socket], None]) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = listening.accept()
                threading.Thread(target=self._on, args=(client, serve), daemon=True).start()

    def _on(self, client: socket.socket, serve: Callable[[socket.socket], None]) -> None:
        self._open.add(client)
        try:
            client.settimeout(_PATIENCE_S)
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            serve(client)
        except (OSError, HangupError, ValueError):
            pass
        finally:
            self._open.discard(client)
            client.close()

    def _serve(self, client: socket.socket) -> None:
        received = bytearray()
        while (request := _received(client, received)) is not None:
            if request.name.startswith("-/"):
                client.sendall(self._control(request))
                continue
            with self._lock:
                self.counts[request.method] += 1
                attack = ATTACKS[self.attack] if self.attack else None
                if attack is not None and self.chance.random() >= self.rate:
                    attack = None
                if attack is not None:
                    self.counts["attacked"] += 1
            if attack is None:
                self.send(client, self.honest(request))
            else:
                attack(self, client, request)

    def _serve_other(self, client: socket.socket) -> None:
        """Serve as another host, to which requests are redirected."""
        received = bytearray()
        while (request := _received(client, received)) is not None:
            has_login = "authorization" in request.headers or "X-Amz-Signature" in request.query
            self.counts["other host, with a login" if has_login else "other host"] += 1
            self.send(client, self.honest(request))

    def _control(self, request: Request) -> bytes:
        """Serve ``POST /-/set``: set the attributes in a JSON object; returns the counts."""
        for name, value in json.loads(request.body or b"{}").items():
            setattr(self, name, value)
        body = json.dumps(self.counts).encode()
        return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body

    def honest(self, request: Request) -> Reply:
        """Execute a request; returns the reply of a well-behaved server."""
        if request.key_id != self.key_id:
            reply = error("403 Forbidden", "InvalidAccessKeyId")
            return Reply(reply.status, reply.headers) if request.method == "HEAD" else reply
        with self._lock:
            return getattr(self, f"_{request.method.lower()}", self._unknown)(request)

    def _unknown(self, request: Request) -> Reply:
        return error("400 Bad Request", "BadRequest")

    def _put(self, request: Request) -> Reply:
        if request.headers.get("if-none-match") == "*" and request.name in self.objects:
            return error("412 Precondition Failed", "PreconditionFailed")
        if request.is_epoch and request.name in self.objects:
            self.old_epochs.setdefault(request.name, []).append(self.objects[request.name])
        self.objects[request.name] = request.body
        return Reply("200 OK", {"ETag": '"1"', "Content-Length": "0"})

    def _delete(self, request: Request) -> Reply:
        self.objects.pop(request.name, None)
        return Reply("204 No Content")

    def _head(self, request: Request) -> Reply:
        stored = self.objects.get(request.name)
        if stored is None:
            return Reply("404 Not Found", {"Content-Length": "0"})
        return Reply("200 OK", {"Content-Length": str(len(stored)), **_FACTS})

    def _get(self, request: Request) -> Reply:
        stored = self.objects.get(request.name)
        if stored is None:
            return error("404 Not Found", "NoSuchKey")
        return ranged(stored, request)

    # ---- ways to send

    def send(self, client: socket.socket, reply: Reply) -> None:
        client.sendall(reply.head() + reply.body)

    def flood(
        self, client: socket.socket, head: bytes, *, chunked: bool = False, piece: bytes = _CHUNK
    ) -> None:
        """Send a head, and then endless bytes."""
        client.sendall(head)
        if chunked:
            piece = b"%x\r\n%b\r\n" % (len(piece), piece)
        until = time.monotonic() + _PATIENCE_S
        while time.monotonic() < until:
            client.sendall(piece)
        raise HangupError


_FACTS = {"Last-Modified": _MODIFIED, "ETag": '"1"', "Accept-Ranges": "bytes"}


def ranged(content: bytes, request: Request) -> Reply:
    """Return the reply with an object, or with the requested span of the object."""
    span = request.headers.get("range", "")
    if not span:
        return Reply("200 OK", {"Content-Length": str(len(content)), **_FACTS}, content)
    first, _, last = span.removeprefix("bytes=").partition("-")
    begin, end = int(first), min(int(last or len(content)) + 1, len(content))
    if begin >= len(content):
        return error("416 Range Not Satisfiable", "InvalidRange")
    headers = {"Content-Length": str(end - begin), "Content-Range": f"bytes {begin}-{end - 1}/{len(content)}"}
    return Reply("206 Partial Content", headers | _FACTS, content[begin:end])


def _received(client: socket.socket, received: bytearray) -> Request | None:
    """Read the next request of a connection; returns None at the end of the connection."""
    while (end := received.find(b"\r\n\r\n")) < 0:
        if not (chunk := client.recv(1 << 16)):
            return None
        received += chunk
    first, *lines = bytes(received[:end]).decode("latin-1").split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    length = int(headers.get("content-length", "0"))
    while len(received) < end + 4 + length:
        if not (chunk := client.recv(1 << 20)):
            return None
        received += chunk
    body = bytes(received[end + 4 : end + 4 + length])
    del received[: end + 4 + length]
    method, target, _ = first.split(" ")
    parts = urlsplit(target)
    name = unquote(parts.path).removeprefix("/").removeprefix(f"{BUCKET}/")
    return Request(method, name, headers, parse_qs(parts.query), body)


# ---- attacks

Attack = Callable[[HostileS3, socket.socket, Request], None]


def changed(change: Callable[[HostileS3, Request, Reply], Reply | None], of: str = "GET") -> Attack:
    """Make an attack that changes the honest reply to some methods; None leaves the reply unchanged."""

    def attack(server: HostileS3, client: socket.socket, request: Request) -> None:
        reply = server.honest(request)
        if request.method in of.split():
            reply = change(server, request, reply) or reply
        server.send(client, reply)

    return attack


def instead(reply: Reply, of: str = "GET HEAD PUT DELETE") -> Attack:
    """Make an attack that sends this reply."""

    def change(server: HostileS3, request: Request, honest: Reply) -> Reply:
        return Reply(reply.status, reply.headers) if request.method == "HEAD" else reply

    def attack(server: HostileS3, client: socket.socket, request: Request) -> None:
        if request.method in of.split():
            server.send(client, change(server, request, reply))
        else:
            server.send(client, server.honest(request))

    return attack


def flooded(
    status: str, length: int | None, of: str = "GET", *, piece: bytes = _CHUNK, epoch: bool = True
) -> Attack:
    """Make an attack with an endless body.

    `length`: the content length in the head; -1 sends chunks instead; None sends neither.
    """

    def attack(server: HostileS3, client: socket.socket, request: Request) -> None:
        if request.method not in of.split() or (request.is_epoch and not epoch):
            server.send(client, server.honest(request))
            return
        headers = dict(_FACTS)
        if status.startswith("206") and "range" in request.headers:
            begin, _, end = request.headers["range"].removeprefix("bytes=").partition("-")
            headers["Content-Range"] = f"bytes {begin}-{end}/{len(server.objects.get(request.name, b''))}"
        if length is not None:
            headers |= {"Transfer-Encoding": "chunked"} if length < 0 else {"Content-Length": str(length)}
        server.flood(client, Reply(status, headers).head(), chunked=length == -1, piece=piece)

    return attack


def raw(data: bytes, of: str = "GET HEAD PUT DELETE", *, ends: bool = True) -> Attack:
    """Make an attack that sends these bytes as its reply, and closes the connection if it `ends`."""

    def attack(server: HostileS3, client: socket.socket, request: Request) -> None:
        if request.method not in of.split():
            server.send(client, server.honest(request))
            return
        client.sendall(data)
        if ends:
            raise HangupError

    return attack


def _other(server: HostileS3, request: Request, reply: Reply) -> Reply | None:
    names = sorted(name for name in server.objects if "/blocks/" in name and name != request.name)
    if request.is_epoch or not names:
        return None
    return ranged(server.objects[server.chance.choice(names)], request)


def _flip(server: HostileS3, request: Request, reply: Reply) -> Reply | None:
    if not reply.body or request.is_epoch:
        return None
    at = server.chance.randrange(len(reply.body))
    body = bytearray(reply.body)
    body[at] ^= 1 << server.chance.randrange(8)
    return Reply(reply.status, reply.headers, bytes(body))


def _with(reply: Reply, body: bytes, **headers: str) -> Reply:
    changes = {name.replace("_", "-"): value for name, value in headers.items()}
    return Reply(reply.status, {**reply.headers, "Content-Length": str(len(body)), **changes}, body)


def _lied_range(server: HostileS3, request: Request, reply: Reply) -> Reply | None:
    if request.is_epoch or "Content-Range" not in reply.headers:
        return None
    whole = server.objects.get(request.name, b"")
    at = server.chance.randrange(max(1, len(whole) - len(reply.body) + 1))
    return Reply(reply.status, reply.headers, (whole[at:] + whole)[: len(reply.body)])


def _other_range(server: HostileS3, request: Request, reply: Reply) -> Reply | None:
    if "Content-Range" not in reply.headers:
        return None
    content_range = server.chance.choice(
        ["bytes 0-999999999999999/1000000000000000", f"bytes 1-{len(reply.body)}/{len(reply.body) + 1}",
         "bytes */*", "bytes 5-2/10", "words", f"bytes 0-{len(reply.body) - 1}/*"]
    )  # fmt: skip
    return Reply(reply.status, {**reply.headers, "Content-Range": content_range}, reply.body)


def _cut(server: HostileS3, client: socket.socket, request: Request) -> None:
    reply = server.honest(request)
    data = reply.head() + reply.body
    client.sendall(data[: server.chance.randrange(len(data))])
    raise HangupError


def _hang(server: HostileS3, client: socket.socket, request: Request) -> None:
    time.sleep(_PATIENCE_S)
    raise HangupError


def _hang_in_body(server: HostileS3, client: socket.socket, request: Request) -> None:
    reply = server.honest(request)
    client.sendall((reply.head() + reply.body)[: len(reply.head()) + len(reply.body) // 2])
    _hang(server, client, request)


def _drip(server: HostileS3, client: socket.socket, request: Request) -> None:
    reply = server.honest(request)
    data, until = reply.head() + reply.body, time.monotonic() + _PATIENCE_S
    for at in range(len(data)):
        client.sendall(data[at : at + 1])
        time.sleep(0.02)
        if time.monotonic() > until:
            raise HangupError


def _redirect(where: str, status: str = "307 Temporary Redirect") -> Attack:
    def attack(server: HostileS3, client: socket.socket, request: Request) -> None:
        ports = {"same": server.port, "other": server.other_port, "loop": server.port}
        path = f"/{BUCKET}/{request.name}" + ("" if where == "other" else "?loop=1")
        there = f"http://127.0.0.1:{ports[where]}{path}"
        server.send(client, Reply(status, {"Location": there, "Content-Length": "0"}))

    return attack


def _epoch_not_stored(server: HostileS3, client: socket.socket, request: Request) -> None:
    is_epoch_put = request.method == "PUT" and request.is_epoch
    stored = Reply("200 OK", {"ETag": '"1"', "Content-Length": "0"})
    server.send(client, stored if is_epoch_put else server.honest(request))


def _not_stored(server: HostileS3, client: socket.socket, request: Request) -> None:
    if request.method == "PUT" and not request.is_epoch:
        server.send(client, Reply("200 OK", {"ETag": '"1"', "Content-Length": "0"}))
    else:
        server.send(client, server.honest(request))


def _stored_damaged(server: HostileS3, client: socket.socket, request: Request) -> None:
    if request.method == "PUT" and request.body and not request.is_epoch:
        body = bytearray(request.body)
        body[server.chance.randrange(len(body))] ^= 0x10
        request.body = bytes(body[: server.chance.choice([len(body), len(body), len(body) // 2])])
    server.send(client, server.honest(request))


def _on_head(choose: Callable[[HostileS3, Reply], Reply]) -> Attack:
    return changed(lambda server, request, reply: choose(server, reply), "HEAD")


def _replayed_epoch(server: HostileS3, request: Request, reply: Reply) -> Reply | None:
    old = server.old_epochs.get(request.name)
    if not request.is_epoch or not old:
        return None
    return _with(reply, server.chance.choice(old), Content_Range="bytes 0-15/16")


def _epoch(*values: bytes) -> Attack:
    """Make an attack that replies with one of these invalid epochs."""

    def change(server: HostileS3, request: Request, reply: Reply) -> Reply | None:
        if not request.is_epoch or not reply.status.startswith("20"):
            return None
        value = server.chance.choice(values)
        if "range" in request.headers and not value:
            return error("416 Range Not Satisfiable", "InvalidRange")
        return ranged(value, request)

    return changed(change)


def _twice(server: HostileS3, client: socket.socket, request: Request) -> None:
    """Send the honest reply twice."""
    reply = server.honest(request)
    client.sendall((reply.head() + reply.body) * 2)


def _late_other(server: HostileS3, client: socket.socket, request: Request) -> None:
    """Send the honest reply and, 2 ms later on the idle connection, a reply with another object."""
    server.send(client, server.honest(request))
    names = sorted(name for name in server.objects if "/blocks/" in name)
    if names:
        time.sleep(0.002)
        server.send(
            client, ranged(server.objects[server.chance.choice(names)], Request("GET", "", {}, {}, b""))
        )


def _silent_close(server: HostileS3, client: socket.socket, request: Request) -> None:
    server.send(client, server.honest(request))
    raise HangupError


def _chunked(sizes: Callable[[random.Random], int], end: bytes = b"0\r\n\r\n") -> Attack:
    """Make an attack that sends the honest body in chunks."""

    def attack(server: HostileS3, client: socket.socket, request: Request) -> None:
        reply = server.honest(request)
        if request.method != "GET" or not reply.body:
            server.send(client, reply)
            return
        del reply.headers["Content-Length"]
        reply.headers["Transfer-Encoding"] = "chunked"
        pieces, at = [reply.head()], 0
        while at < len(reply.body):
            size = max(1, sizes(server.chance))
            piece = reply.body[at : at + size]
            pieces.append(b"%x\r\n%b\r\n" % (len(piece), piece))
            at += size
        client.sendall(b"".join(pieces) + end)
        if end != b"0\r\n\r\n":
            server.flood(client, b"", piece=b"x: y\r\n" * 1000)

    return attack


def _any(*attacks: Attack) -> Attack:
    """Make an attack that draws one of these for each request."""
    return lambda server, client, request: server.chance.choice(attacks)(server, client, request)


def _gzip(server: HostileS3, request: Request, reply: Reply) -> Reply | None:
    return _with(reply, gzip.compress(reply.body, 1), Content_Encoding="gzip") if reply.body else None


def _whole(server: HostileS3, request: Request, reply: Reply) -> Reply | None:
    content = server.objects.get(request.name)
    return None if content is None else ranged(content, Request("GET", "", {}, {}, b""))


def _new_epoch(server: HostileS3, request: Request, reply: Reply) -> Reply | None:
    value = b"%016x" % server.chance.getrandbits(64)
    return _with(reply, value, Content_Range="bytes 0-15/16") if request.is_epoch else None


def _huge_epoch(server: HostileS3, request: Request, reply: Reply) -> Reply | None:
    is_one = request.is_epoch and reply.status.startswith("20")
    return ranged(bytes(3_000_000), request) if is_one else None


_BOMB = gzip.compress(bytes(200_000_000), 9)
_ALL = "GET HEAD PUT DELETE"
_OK, _IN_CHUNKS = b"HTTP/1.1 200 OK\r\n", b"Transfer-Encoding: chunked\r\n\r\n"
_NO_LENGTHS = (b"-1", b"1e3", b"0x10", b"9" * 30, b"1, 2", b"", b"\xc2\xb2")
_NO_STATUS = (b"HTTP/1.1 20 OK", b"HTTP/1.1 999999 OK", b"HTTP/3 200")
_NO_EPOCHS = (
    b"", b"0" * 15, b"0" * 17, b"-00000000000001f", b"+00000000000001f", b"0x0000000000001f",
    b"0000_0000_0000_f", b"              1f", b"\xff" * 16, b"\xd9\xa0" * 8, b"0000000000000ZZZ",
)  # fmt: skip
_ERROR = b"<Error><Code>SlowDown</Code><Message>wait</Message></Error>"

ATTACKS: dict[str, Attack] = {
    "200 with an error body": instead(_with(Reply("200 OK", dict(_FACTS)), _ERROR), "GET PUT"),
    "cut": _cut,
    "longer": changed(lambda s, q, r: _with(r, r.body + bytes(s.chance.randrange(1, 99999)))),
    "longer than its length": changed(lambda s, q, r: Reply(r.status, r.headers, r.body + r.body)),
    "shorter": changed(lambda s, q, r: _with(r, r.body[: s.chance.randrange(len(r.body) + 1)])),
    "ranges ignored": changed(_whole),
    "ranges lied about": changed(_lied_range),
    "another range said": changed(_other_range),
    "others' bytes": changed(_other),
    "bit flips": changed(_flip),
    "gzip": changed(_gzip),
    "gzip bomb": changed(lambda s, q, r: _with(r, _BOMB, Content_Encoding="gzip")),
    "503": instead(error("503 Slow Down", "SlowDown")),
    "500": instead(error("500 Internal Server Error", "InternalError")),
    "429": instead(error("429 Too Many Requests", "TooManyRequests")),
    "403": instead(error("403 Forbidden", "AccessDenied")),
    "clock skew": instead(error("403 Forbidden", "RequestTimeTooSkewed")),
    "307": _redirect("same"),
    "307 to another host": _redirect("other"),
    "redirect loop": _redirect("loop", "302 Found"),
    "301": instead(error("301 Moved Permanently", "PermanentRedirect")),
    "NoSuchBucket": instead(error("404 Not Found", "NoSuchBucket")),
    "412": instead(error("412 Precondition Failed", "PreconditionFailed")),
    "409": instead(error("409 Conflict", "ConditionalRequestConflict")),
    "501": instead(error("501 Not Implemented", "NotImplemented")),
    "204": instead(Reply("204 No Content")),
    "304": instead(Reply("304 Not Modified", dict(_FACTS))),
    "200 and nothing": instead(Reply("200 OK", {"Content-Length": "0", **_FACTS})),
    "PUT not stored": _not_stored,
    "PUT of an epoch not stored": _epoch_not_stored,
    "PUT stored damaged": _stored_damaged,
    "HEAD finds everything": _on_head(lambda s, r: Reply("200 OK", {"Content-Length": "12345", **_FACTS})),
    "HEAD finds nothing": _on_head(lambda s, r: Reply("404 Not Found", {"Content-Length": "0"})),
    "HEAD says 10^15": _on_head(lambda s, r: Reply("200 OK", {"Content-Length": str(HUGE), **_FACTS})),
    "HEAD with a body": _on_head(lambda s, r: Reply("200 OK", {"Content-Length": "9"}, b"HTTP/1.1 ")),
    "endless, in chunks": flooded("200 OK", -1),
    "endless part, in chunks": flooded("206 Partial Content", -1),
    "endless, no length": flooded("200 OK", None),
    "endless blocks only": flooded("206 Partial Content", -1, epoch=False),
    "10 GB": flooded("200 OK", 10**10),
    "10 GB as a part": flooded("206 Partial Content", 10**10),
    "10^15 in 200": flooded("200 OK", HUGE),
    "10^15 in 206": flooded("206 Partial Content", HUGE),
    "10^15 in 404": flooded("404 Not Found", HUGE),
    "10^15 in 403": flooded("403 Forbidden", HUGE, _ALL),
    "10^15 in 500": flooded("500 Internal Server Error", HUGE, _ALL),
    "10^15 in 503": flooded("503 Slow Down", HUGE, _ALL),
    "10^15 in PUT": flooded("200 OK", HUGE, "PUT"),
    "10^15 in DELETE": flooded("200 OK", HUGE, "DELETE"),
    "10^15 in 307": flooded("307 Temporary Redirect", HUGE, _ALL),
    "endless error": flooded("403 Forbidden", -1, _ALL),
    "invalid lengths": _any(*(raw(_OK + b"Content-Length: %b\r\n\r\n0123" % length, "GET HEAD PUT")
                                   for length in _NO_LENGTHS)),
    "two lengths": raw(_OK + b"Content-Length: 16\r\nContent-Length: 17\r\n\r\n" + bytes(17), "GET HEAD"),
    "length and chunks": raw(_OK + b"Content-Length: 16\r\n" + _IN_CHUNKS + b"0\r\n\r\n", "GET"),
    "an invalid status": _any(*(raw(status + b"\r\n\r\n") for status in _NO_STATUS)),
    "garbage": raw(bytes(range(256)) * 64),
    "no answer": raw(b""),
    "endless headers": lambda s, c, q: s.flood(c, _OK, piece=b"X-A: " + b"y" * 8000 + b"\r\n"),
    "one endless header": lambda s, c, q: s.flood(c, _OK + b"X-A: ", piece=b"y" * 8000),
    "endless 100": lambda s, c, q: s.flood(c, b"", piece=b"HTTP/1.1 100 Continue\r\n\r\n" * 100),
    "chunks": _chunked(lambda chance: chance.randrange(1, 40000)),
    "chunks of one byte": _chunked(lambda chance: 1),
    "endless chunks of one byte": flooded("206 Partial Content", -1, piece=b"x"),
    "endless trailers": _chunked(lambda chance: 8192, b"0\r\n"),
    "a chunk of 10^18": raw(_OK + _IN_CHUNKS + b"f" * 15 + b"\r\n" + bytes(999), "GET"),
    "invalid chunk sizes": raw(_OK + _IN_CHUNKS + b"-5\r\n" + bytes(99), "GET"),
    "answers twice": _twice,
    "late bytes of another object": _late_other,
    "closes silently": _silent_close,
    "hangs": _hang,
    "hangs in the body": _hang_in_body,
    "drips": _drip,
    "replayed epoch": changed(_replayed_epoch),
    "damaged epochs": _epoch(*_NO_EPOCHS),
    "another epoch each time": changed(_new_epoch),
    "a huge epoch": changed(_huge_epoch),
}  # fmt: skip


# ---- the client of a soak run

BLOCK_BYTES, GROUP, NUM_BLOCKS = 24 * 1024, 4, 24
TIMEOUT_S, PROBE_TIMEOUT_S = 0.4, 0.2
_WRITE_TIMES = 5.0
_ROUND_S = 1.5


@dataclass
class Counts:
    """Counts of a run.

    Attributes:
        overrun_s: longest delay of a job beyond its deadline.
        cpu_s: longest CPU time of a call on the scheduler's thread, without the first round.
        growth_mb: growth of the client's peak RSS since the healthy rounds at its start.
        not_back: rounds after which the client did not recover within 20 s.
    """

    attacks: int = 0
    served: int = 0
    wrong: int = 0
    stale: int = 0
    escapes: int = 0
    aborts: int = 0
    not_back: int = 0
    overrun_s: float = 0.0
    cpu_s: float = 0.0
    growth_mb: float = 0.0
    notes: list[str] = field(default_factory=list)


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


class Machine:
    """A tier in front of the fake server, called like a scheduler does. Compares every served block."""

    def __init__(self, port: int, counts: Counts, seed: int, namespace: str = "ns") -> None:
        import numpy as np

        from kvoffload.tiers.kinds.s3 import S3Options
        from kvoffload.tiers.spec import TierOwner
        from support.sharing_client import some_keys

        self.np, self.keys_of, self.counts, self.chance = np, some_keys, counts, random.Random(seed)
        os.environ.update(AWS_ACCESS_KEY_ID=KEY_ID, AWS_SECRET_ACCESS_KEY=SECRET)
        options = S3Options(
            url=f"s3://{BUCKET}/{namespace}",
            endpoint=f"http://127.0.0.1:{port}",
            region="us-east-1",
            pack=GROUP * BLOCK_BYTES,
            timeout=TIMEOUT_S,
            probe_timeout=PROBE_TIMEOUT_S,
        )
        self.tier = options.open(TierOwner(BLOCK_BYTES, 36, "model", on_unavailable=lambda _: None))
        self.request = self.tier.begin_request("r")
        self.tier.extend_path(self.request, some_keys(*range(1, NUM_BLOCKS + 1)))
        self.pool = np.zeros((NUM_BLOCKS, BLOCK_BYTES), np.uint8)
        self.generation = 0
        self.is_warm = False

    def call(self, method: Callable[..., Any], *given: Any) -> Any:
        """Call a method on the scheduler's thread; an exception counts as an escape."""
        before = time.thread_time()
        try:
            return method(*given)
        except Exception as error:
            self.counts.escapes += 1
            self.counts.notes.append(f"{type(error).__name__}: {error}"[:200])
            return None
        finally:
            if self.is_warm:
                self.counts.cpu_s = max(self.counts.cpu_s, time.thread_time() - before)

    def wait(self, job: int, most_s: float) -> Any:
        until = time.monotonic() + most_s + 10.0
        while time.monotonic() < until:
            for result in self.call(self.tier.finished) or []:
                if result.job == job:
                    self.counts.overrun_s = max(self.counts.overrun_s, result.seconds - most_s)
                    return result
            time.sleep(0.001)
        self.counts.overrun_s = max(self.counts.overrun_s, 10.0)
        return None

    def content(self, number: int) -> Any:
        row = self.np.full(BLOCK_BYTES // 2, number, self.np.uint16)
        row[:4] = self.generation
        return row.view(self.np.uint8)

    def write(self, *numbers: int) -> None:
        for row, number in enumerate(numbers):
            self.pool[row] = self.content(number)
        rows = self.np.arange(len(numbers))
        submitted = self.call(self.tier.submit_write, self.keys_of(*numbers), self.pool, rows, self.request)
        if submitted is not None and submitted[0] >= 0 and submitted[1].any():
            self.wait(submitted[0], _WRITE_TIMES * TIMEOUT_S)

    def read(self, *numbers: int) -> list[int]:
        self.pool[:] = 0xEE
        rows = self.np.arange(len(numbers))
        job = self.call(self.tier.submit_read, self.keys_of(*numbers), self.pool, rows)
        result = self.wait(job, TIMEOUT_S) if job is not None else None
        served = []
        for row, number in enumerate(numbers):
            if result is not None and result.ok[row]:
                words = self.pool[row].view(self.np.uint16)
                self.counts.served += 1
                self.counts.wrong += not bool((words[4:] == number).all())
                self.counts.stale += bool((words[:4] != self.generation).any())
                served.append(number)
        return served

    def probe(self, *numbers: int) -> None:
        job = self.call(self.tier.submit_probe, self.keys_of(*numbers))
        if job is not None and job >= 0:
            self.wait(job, PROBE_TIMEOUT_S)

    def step(self) -> None:
        first = 1 + GROUP * self.chance.randrange(NUM_BLOCKS // GROUP - 1)
        numbers = range(first, first + self.chance.choice([1, GROUP, 2 * GROUP]))
        keys = self.keys_of(*numbers)
        self.call(self.tier.contains, keys)
        self.call(self.tier.unknown, keys)
        act = self.chance.choice(["read", "read", "write", "probe"])
        getattr(self, act)(*numbers)
        self.call(self.tier.stats)
        self.call(self.tier.take_changes)

    def hurry(self) -> None:
        """End the pauses of circuit breakers and handshakes."""
        from support.pauses import end_pauses

        end_pauses(self.tier)

    def come_back(self) -> None:
        """Wait until blocks can be written and read again."""
        until = time.monotonic() + 20.0
        whole = range(1, GROUP + 1)
        while time.monotonic() < until:
            self.hurry()
            if self.call(self.tier.is_open):
                self.write(*whole)
                if len(self.read(*whole)) == GROUP:
                    return
                self.tier.presence.clear()
            time.sleep(0.002)
        self.counts.not_back += 1
        self.counts.notes.append(f"not back: {self.tier.peer.last_error}"[:200])


def set_of(port: int, **attributes: Any) -> dict[str, int]:
    """Set attributes of a server in another process; returns the server's counts."""
    connection = HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request("POST", "/-/set", json.dumps(attributes))
    counts: dict[str, int] = json.loads(connection.getresponse().read())
    connection.close()
    return counts


def drive(port: int, seed: int, rounds: list[tuple[int, str]]) -> None:
    """Drive a client through these rounds; prints a line of JSON before and after each round."""
    counts = Counts()
    set_of(port, attack="")
    machine = Machine(port, counts, seed)
    for _ in range(3):
        machine.come_back()
        machine.write(*range(1, NUM_BLOCKS + 1))
        machine.read(*range(1, NUM_BLOCKS + 1))
    warm_mb = peak_mb()
    for number, name in rounds:
        print(json.dumps({"begun": number}), flush=True)
        chance = random.Random(f"{seed} {number}")
        counts.__dict__.update(Counts().__dict__ | {"notes": []})
        set_of(port, attack=name, rate=chance.choice([1.0, 1.0, 0.3]))
        until = time.monotonic() + _ROUND_S
        for _ in range(40):
            machine.step()
            machine.hurry()
            if time.monotonic() > until:
                break
        if chance.random() < 0.2:
            machine.call(machine.tier.clear)
            set_of(port, attack="")
            machine.hurry()
            if machine.tier.drain(20.0):
                machine.generation += 1
        set_of(port, attack="")
        machine.come_back()
        machine.is_warm = True
        counts.attacks, counts.growth_mb = 1, peak_mb() - warm_mb
        print(json.dumps({"ended": number, "attack": name, **counts.__dict__}), flush=True)
    machine.tier.close()


# ---- the run


def _spawn(*words: str, limit_bytes: int = 0) -> subprocess.Popen[str]:
    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (limit_bytes, limit_bytes))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    command = [sys.executable, str(Path(__file__).resolve()), *words]
    before = limited if limit_bytes else None
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=before)


def soak(
    seed: int, rounds: int, names: list[str], limit_bytes: int = 8 << 30
) -> tuple[Counts, dict[str, Any]]:
    """Run rounds; returns the totals, and the counts of each attack."""
    server = _spawn("--serve", "--seed", str(seed))
    assert server.stdout is not None
    port = int(server.stdout.readline())
    order, chance = [], random.Random(seed)
    while len(order) < rounds:
        order += chance.sample(names, len(names))
    remaining = [*enumerate(order[:rounds])]
    total, each = Counts(), dict[str, Any]()
    try:
        while remaining:
            client = _spawn(
                "--drive",
                str(port),
                "--seed",
                str(seed),
                "--plan",
                json.dumps(remaining),
                limit_bytes=limit_bytes,
            )
            begun, code = _collected(client, total, each), client.wait()
            if code == 0:
                break
            name = dict(remaining).get(begun, "at the start")
            total.aborts += 1
            total.notes.append(f"{name}: the process ended with {client.returncode}")
            each.setdefault(name, Counts()).aborts += 1
            remaining = [entry for entry in remaining if entry[0] > begun] if begun >= 0 else []
    finally:
        server.kill()
        server.wait()
        server.stdout.close()
    return total, {name: entry.__dict__ for name, entry in each.items()}


def _collected(client: subprocess.Popen[str], total: Counts, each: dict[str, Any]) -> int:
    """Add up the lines of a client; returns the number of the last round that the client began."""
    begun = -1
    assert client.stdout is not None
    with client.stdout:
        for line in client.stdout:
            line_counts = json.loads(line)
            begun = line_counts.pop("begun", begun)
            if line_counts.pop("ended", None) is None:
                continue
            for counts in (total, each.setdefault(line_counts.pop("attack"), Counts())):
                for name, value in line_counts.items():
                    if name in ("overrun_s", "cpu_s", "growth_mb"):
                        setattr(counts, name, max(getattr(counts, name), value))
                    else:
                        setattr(counts, name, getattr(counts, name) + value)
    return begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=len(ATTACKS))
    parser.add_argument(
        "--attack", nargs="+", choices=sorted(ATTACKS), default=sorted(ATTACKS), metavar="NAME"
    )
    parser.add_argument("--each", action="store_true", help="print a line for each attack")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--drive", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--plan", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        print(HostileS3(given.seed).port, flush=True)
        threading.Event().wait()
    if given.drive:
        drive(given.drive, given.seed, [(number, name) for number, name in json.loads(given.plan)])
        return
    total, each = soak(given.seed, given.rounds, given.attack)
    if given.each:
        for name, counts in sorted(each.items()):
            print(f"{name:28}", json.dumps({key: value for key, value in counts.items() if value}))
    print(json.dumps(total.__dict__))
    is_sound = not (total.wrong or total.escapes or total.aborts or total.stale or total.not_back)
    sys.exit(0 if is_sound else 1)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # like pytest, to import `support`
    main()
