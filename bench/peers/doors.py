"""Direct access to the values and objects of shared servers.

Knows no product. `bench/integrity.py` starts the servers and sets the environment variable `SERVER`.
"""

from __future__ import annotations

import os
import secrets
import socket
from pathlib import Path
from typing import Any, NamedTuple

SERVER = "INTEGRITY_SERVER"
BUCKET, KEY_ID, SECRET = "kv-cache", "bench", "bench"


def server() -> str:
    """Return the address of this product's server: a local port, or a URL."""
    return os.environ[SERVER]


def namespace(directory: Path) -> str:
    """Return the unique name of a scene, equal in all its lives."""
    place = directory / "namespace"
    if not place.exists():
        place.write_text(f"scene-{secrets.token_hex(8)}")
    return place.read_text()


def ask(port: int, *words: bytes) -> bytes | None:
    """Send a command to a Valkey server; returns its simple reply. Raises `OSError`."""
    with socket.create_connection(("127.0.0.1", port)) as door, door.makefile("rb") as answer:
        parts = b"".join(b"$%d\r\n%s\r\n" % (len(word), word) for word in words)
        door.sendall(b"*%d\r\n%s" % (len(words), parts))
        head = answer.readline().rstrip()
        if head.startswith(b"-"):
            raise OSError(head.decode())
        if not head.startswith(b"$"):
            return head[1:]
        return None if head == b"$-1" else answer.read(int(head[1:]))


def changed(whole: bytes, offset: int, memory: bytes) -> bytes:
    """Replace the bytes at `offset` with `memory`."""
    return whole[:offset] + memory + whole[offset + len(memory) :]


class Values(NamedTuple):
    """A `Medium`: a block in a Valkey server, as one value or several concatenated values."""

    port: int
    names: tuple[bytes, ...]

    def read(self, offset: int, end: int) -> bytes:
        return b"".join(ask(self.port, b"GET", name) or b"" for name in self.names)[offset:end]

    def write(self, offset: int, memory: bytes) -> None:
        self._put(changed(self.read(0, self.size()), offset, memory))

    def truncate(self, length: int) -> None:
        self._put(self.read(0, length))

    def size(self) -> int:
        """Sum the sizes; 0 if the values do not exist."""
        return sum(self._sizes())

    def _sizes(self) -> list[int]:
        return [int(ask(self.port, b"STRLEN", name) or 0) for name in self.names]

    def _put(self, memory: bytes) -> None:
        for name, size in zip(self.names, self._sizes(), strict=True):
            value, memory = memory[:size], memory[size:]
            if size:
                ask(self.port, b"SET", name, value)


class Object(NamedTuple):
    """A `Medium`: object in a bucket."""

    endpoint: str
    name: str

    @property
    def _store(self) -> Any:
        from obstore.store import S3Store

        config: Any = {"endpoint": self.endpoint, "region": "us-east-1"}
        config |= {"access_key_id": KEY_ID, "secret_access_key": SECRET}
        return S3Store(BUCKET, config=config, client_options={"allow_http": True})

    def read(self, offset: int, end: int) -> bytes:
        import obstore

        return bytes(obstore.get(self._store, self.name).bytes())[offset:end]

    def write(self, offset: int, memory: bytes) -> None:
        self._put(changed(self.read(0, self.size()), offset, memory))

    def truncate(self, length: int) -> None:
        self._put(self.read(0, length))

    def _put(self, memory: bytes) -> None:
        import obstore

        obstore.put(self._store, self.name, memory, use_multipart=False)

    def delete(self) -> None:
        import obstore

        obstore.delete(self._store, self.name)

    def size(self) -> int:
        """Return the size; 0 if the object does not exist."""
        import obstore

        try:
            return int(obstore.head(self._store, self.name)["size"])
        except FileNotFoundError:
            return 0
