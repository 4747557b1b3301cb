"""A TCP proxy in front of a server, with faults of networks and broken servers.

Each fault is an attribute and may be set while connections are open. The proxy knows the framing of RESP2
replies, so that it can exchange or repeat whole replies.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

_CHUNK_BYTES = 1 << 16


@dataclass
class Faults:
    """Faults of all connections together.

    Attributes:
        refuse: new connections are closed at once.
        hang: nothing passes in either direction; connections stay open.
        delay_s: seconds before each piece of a reply.
        bytes_per_s: bandwidth of replies; None for no limit.
        cut_after: bytes of replies after which connections are closed, counted since `FaultProxy.set`.
        flip_at: number of the reply byte whose lowest bit is flipped, counted in the same way.
        replies: maps the RESP2 replies that have arrived together to the replies to send; None for no change.
        answer: a reply that replaces the server's, or a function from the request to a reply; None forwards
            the request. The connection is closed after this reply.
    """

    refuse: bool = False
    hang: bool = False
    delay_s: float = 0.0
    bytes_per_s: float | None = None
    cut_after: int | None = None
    flip_at: int | None = None
    replies: Callable[[list[bytes]], list[bytes]] | None = None
    answer: bytes | Callable[[bytes], bytes | None] | None = None


class FaultProxy:
    """A listener that forwards everything to the server, with faults.

    Args:
        port, host: the server.
        tls: files with a certificate and its key. Clients then use TLS; the server does not.
        client_ca: file with the certificate of the CA that signs clients' certificates; empty if clients need
            no certificate.
        tls_version: highest version of TLS.

    Attributes:
        port: port for clients.
        faults: the present faults.
        num_connections: connections made so far.

    Thread: any. Close the proxy at the end, or use it as a context.
    """

    def __init__(
        self,
        port: int,
        host: str = "127.0.0.1",
        *,
        tls: tuple[str, str] | None = None,
        client_ca: str = "",
        tls_version: ssl.TLSVersion = ssl.TLSVersion.MAXIMUM_SUPPORTED,
    ) -> None:
        self._to = host, port
        self._tls: ssl.SSLContext | None = None
        if tls is not None:
            self._tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            self._tls.load_cert_chain(*tls)
            self._tls.maximum_version = tls_version
            if client_ca:
                self._tls.verify_mode = ssl.CERT_REQUIRED
                self._tls.load_verify_locations(client_ca)
        self.faults = Faults()
        self.num_connections = 0
        self._passed = 0
        self._lock = threading.Lock()
        self._sockets: set[socket.socket] = set()
        self._closed = False
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listening.getsockname()[1]
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def __enter__(self) -> FaultProxy:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def allow_client_ca(self, pem: str) -> None:
        """Accept clients' certificates of another CA as well."""
        assert self._tls is not None
        self._tls.load_verify_locations(pem)

    def use_certificate(self, pem: str, key: str) -> None:
        """Use another certificate for new connections."""
        assert self._tls is not None
        self._tls.load_cert_chain(pem, key)

    def redirect(self, port: int) -> None:
        """Forward new connections to another port."""
        self._to = self._to[0], port

    def set(self, **faults: object) -> None:
        """Replace all faults, and count bytes from 0."""
        with self._lock:
            self._passed = 0
            self.faults = Faults(**faults)  # type: ignore[arg-type]

    def drop_connections(self) -> None:
        """Close all open connections."""
        with self._lock:
            sockets, self._sockets = self._sockets, set()
        for opened in sockets:
            with contextlib.suppress(OSError):
                opened.shutdown(socket.SHUT_RDWR)
            opened.close()

    def close(self) -> None:
        """Close everything, and wait for the threads."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        self.drop_connections()
        for thread in self._threads:
            thread.join()

    # ---- threads of the proxy

    def _accept(self) -> None:
        while not self._closed:
            try:
                client, _ = self._listening.accept()
            except OSError:
                return
            if self.faults.refuse:
                client.close()
                continue
            try:
                if self._tls is not None:
                    client = self._tls.wrap_socket(client, server_side=True)
                server = socket.create_connection(self._to)
            except OSError:
                client.close()
                continue
            with self._lock:
                if self._closed:  # `close` no longer looks at new connections
                    client.close()
                    server.close()
                    return
                self.num_connections += 1
                self._sockets |= {client, server}
            for source, to, is_reply in ((client, server, False), (server, client, True)):
                thread = threading.Thread(target=self._pass_on, args=(source, to, is_reply), daemon=True)
                self._threads.append(thread)
                thread.start()

    def _pass_on(self, source: socket.socket, to: socket.socket, is_reply: bool) -> None:
        held = b""
        try:
            while piece := source.recv(_CHUNK_BYTES):
                while self.faults.hang and not self._closed:
                    time.sleep(0.001)
                if not is_reply:
                    if (answer := self._answer(piece)) is not None:
                        source.sendall(answer)
                        return
                    to.sendall(piece)
                    continue
                if self.faults.replies is not None:
                    replies, held = split_replies(held + piece)
                    piece = b"".join(self.faults.replies(replies)) if replies else b""
                for chunk in self._slowly(piece):
                    chunk, is_last = self._damaged(chunk)
                    to.sendall(chunk)
                    if is_last:
                        return
        except (OSError, EOFError):
            pass
        finally:
            self._hang_up(source, to)

    def _answer(self, request: bytes) -> bytes | None:
        answer = self.faults.answer
        return answer(request) if callable(answer) else answer

    def _slowly(self, piece: bytes) -> Iterator[bytes]:
        faults = self.faults
        if faults.delay_s:
            time.sleep(faults.delay_s)
        if faults.bytes_per_s is None:
            yield piece
            return
        step = max(1, int(faults.bytes_per_s / 100))
        for start in range(0, len(piece), step):
            time.sleep(step / faults.bytes_per_s)
            if self._closed:
                raise EOFError
            yield piece[start : start + step]

    def _damaged(self, chunk: bytes) -> tuple[bytes, bool]:
        """Return the bytes to forward, and True if the connection ends after them."""
        with self._lock:
            start, faults = self._passed, self.faults
            self._passed += len(chunk)
        if faults.flip_at is not None and start <= faults.flip_at < start + len(chunk):
            at = faults.flip_at - start
            chunk = chunk[:at] + bytes([chunk[at] ^ 1]) + chunk[at + 1 :]
        if faults.cut_after is not None and start + len(chunk) >= faults.cut_after:
            return chunk[: max(0, faults.cut_after - start)], True
        return chunk, False

    def _hang_up(self, *sockets: socket.socket) -> None:
        with self._lock:
            self._sockets -= {*sockets}
        for opened in sockets:
            with contextlib.suppress(OSError):
                opened.shutdown(socket.SHUT_RDWR)
            opened.close()


class FaultProxies:
    """Proxies in front of all masters of a cluster, with the same faults. As `FaultProxy`."""

    def __init__(self, proxies: Sequence[FaultProxy]) -> None:
        self.proxies = proxies

    @property
    def ports(self) -> list[int]:
        return [proxy.port for proxy in self.proxies]

    def set(self, **faults: object) -> None:
        for proxy in self.proxies:
            proxy.set(**faults)

    def drop_connections(self) -> None:
        for proxy in self.proxies:
            proxy.drop_connections()


def split_replies(stream: bytes) -> tuple[list[bytes], bytes]:
    """Return the complete RESP2 replies, without arrays, and the rest of the stream."""
    replies, at = [], 0
    while (end := stream.find(b"\r\n", at)) >= 0:
        end += 2
        if stream[at : at + 1] == b"$" and (length := int(stream[at + 1 : end - 2])) >= 0:
            end += length + 2
        if end > len(stream):
            break
        replies.append(stream[at:end])
        at = end
    return replies, stream[at:]
