"""The HTTP client of OpenAI-compatible servers: failures have one line, and secrets stay secret."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from kvoffload.errors import ConfigError
from kvoffload.openai_server import NoAnswerError, OpenAIServer

Answer = Callable[[BaseHTTPRequestHandler], None]


class Serving:
    """A server whose GET requests call `answer`; `keys` holds the received keys."""

    def __init__(self) -> None:
        self.keys: list[str | None] = []
        self.answer: Answer = lambda handler: send(handler, b"{}")
        serving = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                serving.keys.append(self.headers.get("Authorization"))
                serving.answer(self)

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()


def send(handler: BaseHTTPRequestHandler, body: bytes, status: int = 200, **headers: str) -> None:
    handler.send_response(status)
    for name, value in headers.items():
        handler.send_header(name, value)
    handler.end_headers()
    handler.wfile.write(body)


@pytest.fixture
def serving() -> Iterator[Serving]:
    made = Serving()
    yield made
    made.server.shutdown()
    made.server.server_close()


def test_a_redirect_does_not_take_the_key_elsewhere(serving: Serving) -> None:
    other = Serving()
    serving.answer = lambda handler: send(handler, b"", 307, Location=f"{other.url}/v1/models")
    with pytest.raises(NoAnswerError, match="/v1/models answers HTTP 307") as error:
        OpenAIServer(serving.url, api_key="key", timeout_s=10.0).json("/v1/models")
    other.server.shutdown()
    other.server.server_close()
    assert error.value.status == 307
    assert (serving.keys, other.keys) == (["Bearer key"], [])


def test_user_and_password_of_an_address_are_not_shown(serving: Serving) -> None:
    server = OpenAIServer(serving.url.replace("//", "//me:hidden@") + "/v1", timeout_s=10.0)
    assert server.json("/v1/models") == {}
    serving.answer = lambda handler: send(handler, b"no", 500)
    with pytest.raises(NoAnswerError) as error:
        server.json("/v1/models")
    assert "hidden" not in str(error.value) + server.url


@pytest.mark.parametrize(
    "url", ["localhost:8000", "file:///etc", "ftp://host", "http://", "http://h:port", ""]
)
def test_only_http_addresses_are_accepted(url: str) -> None:
    with pytest.raises(ConfigError, match=r"url: .*allowed: http://HOST:PORT"):
        OpenAIServer(url, timeout_s=1.0)


def test_a_key_that_http_cannot_send_is_refused_and_not_shown(serving: Serving) -> None:
    """A file of a secret usually ends with a line feed, which is not part of the key."""
    OpenAIServer(serving.url, api_key="sk-key\n", timeout_s=10.0).get("/")
    assert serving.keys == ["Bearer sk-key"]
    for key in ("sk-secret\nsk-other", "sk-\u2026secret"):
        with pytest.raises(ConfigError, match="OPENAI_API_KEY") as error:
            OpenAIServer(serving.url, api_key=key, timeout_s=10.0)
        assert "secret" not in str(error.value)


def test_text_of_a_server_is_one_printable_line_without_the_key(serving: Serving) -> None:
    serving.answer = lambda handler: send(handler, b"\x1b[2Jwrong key sk-key\nTraceback", 401)
    with pytest.raises(NoAnswerError) as error:
        OpenAIServer(serving.url, api_key="sk-key", timeout_s=10.0).get("/")
    assert str(error.value).endswith(r"answers HTTP 401: \x1b[2Jwrong key ***\nTraceback")
    serving.answer = lambda handler: send(handler, b"[" * 100_000)
    with pytest.raises(NoAnswerError, match="did not answer with JSON"):
        OpenAIServer(serving.url, timeout_s=10.0).json("/")


def test_a_reply_byte_by_byte_does_not_extend_the_deadline(serving: Serving) -> None:
    sent = []

    def slowly(handler: BaseHTTPRequestHandler) -> None:
        send(handler, b"")
        while not sent or time.monotonic() < sent[0] + 60:
            sent.append(time.monotonic())
            try:
                handler.wfile.write(b"x")
            except OSError:
                return
            time.sleep(0.01)

    serving.answer = slowly
    with pytest.raises(NoAnswerError, match=r"does not answer in 0\.2 s"):
        OpenAIServer(serving.url, timeout_s=0.2).get("/")


@pytest.mark.parametrize("length", [3, 10])
def test_an_incomplete_reply_is_refused(serving: Serving, length: int) -> None:
    serving.answer = lambda handler: send(handler, b"abc", **{"Content-Length": str(length)})
    server = OpenAIServer(serving.url, timeout_s=10.0)
    if length == 3:
        assert server.get("/") == b"abc"
        return
    with pytest.raises(NoAnswerError, match="does not answer"):
        server.get("/")
