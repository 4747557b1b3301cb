"""Downloads of metrics from servers with unusual or invalid answers."""

from __future__ import annotations

import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest

from kvoffload.errors import ConfigError, UnavailableError
from kvoffload.metrics import fetch as module
from kvoffload.metrics.fetch import fetch, metrics_url

TEXT = b"up 1\n"


def head(length: int | None, status: str = "200 OK") -> bytes:
    size = "" if length is None else f"Content-Length: {length}\r\n"
    return f"HTTP/1.1 {status}\r\n{size}Connection: close\r\n\r\n".encode()


ANSWERS = {
    "/metrics": [head(5), TEXT],
    "/without_length": [head(None), TEXT],
    "/half": [head(50), TEXT],
    "/missing": [head(0, "404 Not Found")],
    "/not_http": [b"hello\r\n\r\n"],
    "/slow": [head(None), *[b"#"] * 100],
    "/long": [head(None), *[b"x" * 65536] * 20],
}


@pytest.fixture
def server() -> Iterator[str]:
    """A server that sends an answer in pieces; slow answers have a piece every 50 ms."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with suppress(OSError):
            while True:
                client, _ = listener.accept()
                with client, suppress(OSError):
                    path = re.search(r" (\S+) ", client.recv(4096).decode())
                    assert path is not None
                    for piece in ANSWERS[path[1]]:
                        client.sendall(piece)
                        if path[1] == "/slow":
                            time.sleep(0.05)

    threading.Thread(target=serve, daemon=True).start()
    yield f"127.0.0.1:{listener.getsockname()[1]}"
    listener.close()


@pytest.mark.parametrize("path", ["", "/v1", "/metrics", "/without_length"])
def test_a_whole_answer_is_returned(server: str, path: str) -> None:
    assert fetch(server + path, 5.0) == TEXT.decode()


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("/half", "the server's answer is incomplete"),
        ("/missing", "the server answers HTTP 404 Not Found"),
        ("/not_http", "no answer"),
        ("/slow", "no complete answer in 0.3 s"),
    ],
)
def test_invalid_answers_are_one_error(server: str, path: str, why: str) -> None:
    with pytest.raises(UnavailableError, match=re.escape(why)):
        fetch(server + path, 0.3)


def test_an_endless_answer_is_refused(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_BYTES", 1 << 20)
    with pytest.raises(UnavailableError, match="more than 1,048,576 bytes"):
        fetch(server + "/long", 5.0)


@pytest.mark.parametrize(
    "address", ["", "http://", "ftp://host/metrics", "http://[bad", "host:0", "http://host:99999"]
)
def test_invalid_addresses_are_refused(address: str) -> None:
    with pytest.raises(ConfigError, match=r"an HTTP address .* such as http://localhost:8000/metrics"):
        metrics_url(address)


@pytest.mark.parametrize(
    "address", ["http://me:hunter2@host:8000", "me:hunter2@host:8000", "http://me:hunter2@host:x"]
)
def test_password_in_an_address_is_refused_and_masked(address: str) -> None:
    with pytest.raises(ConfigError, match=r"\*\*\*@host.*without user name and password") as refusal:
        metrics_url(address)
    assert "hunter2" not in str(refusal.value)


@pytest.mark.parametrize(
    ("address", "url"),
    [
        ("host:8000", "http://host:8000/metrics"),
        ("http://host/v1/", "http://host/metrics"),
        ("https://host/team-a/v1", "https://host/team-a/metrics"),
        ("https://host/team-a/metrics", "https://host/team-a/metrics"),
    ],
)
def test_addresses_are_completed(address: str, url: str) -> None:
    assert metrics_url(address) == url
