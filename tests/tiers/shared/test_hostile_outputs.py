"""Text of hostile servers is escaped, and has no password, in logs, errors, reports and tables."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Iterator
from typing import Any

import pytest

from kvoffload.errors import ConfigError, UnavailableError
from kvoffload.tiers.kinds import valkey as kind
from kvoffload.tiers.kinds.valkey import ValkeyOptions
from kvoffload.tiers.shared.printable import MOST_CHARACTERS, printable
from kvoffload.tiers.shared.remote_errors import ServerError
from kvoffload.tiers.spec import TierOwner
from kvoffload.tiers.valkey.protocol import epoch_number
from kvoffload.tiers.valkey.resp import Connection
from support.hostile_resp import HANG, PASSWORD, REPLIES, FakeServer, Moment, encoded, has_leaked, on
from support.refusals import refusal
from support.run_cli import kvoffload

ESCAPES = "\x1b[31mred\n2026-11-24 forged\r\x00\x7f\x9b \u202e"
OWNER = TierOwner(4096, 36, "model")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("OOM command not allowed", "OOM command not allowed"),
        ("a\nb\r\x1b[31m\x00\x7f", r"a\nb\r\x1b[31m\x00\x7f"),
        ("caf\xe9 \u202e \U0001f600 \udcff", r"caf\xe9 \u202e \U0001f600 \udcff"),
        (b"\xff\xfe ok", r"\udcff\udcfe ok"),
        ("[/foo] 'it' \\n", "[/foo] 'it' \\n"),
        ("", ""),
    ],
)
def test_text_is_one_line_of_printable_ascii(text: str | bytes, shown: str) -> None:
    assert printable(text) == shown
    assert printable(printable(text)) == shown, "escaping twice changes nothing"


def test_text_is_short() -> None:
    assert printable("x" * MOST_CHARACTERS) == "x" * MOST_CHARACTERS
    for text in ("x" * 201, "x" * 4000, "\n" * 4000, b"\xff" * 4000):
        assert len(printable(text)) == MOST_CHARACTERS
        assert printable(text).endswith("...")


def test_secrets_are_masked_before_the_text_is_cut() -> None:
    assert printable(f"a {PASSWORD} b {PASSWORD}", PASSWORD) == "a *** b ***"
    assert printable(b"a \xff b", os.fsdecode(b"\xff")) == "a *** b"
    assert "hunter2" not in printable("x" * 195 + PASSWORD, PASSWORD)
    assert printable("abc", "") == "abc"


def test_error_has_a_code_and_a_safe_text() -> None:
    error = ServerError(f"ERR {ESCAPES} {PASSWORD}", PASSWORD)
    assert error.code == "ERR"
    assert not has_leaked(f"{error} {error!r} {vars(error)}")
    assert ServerError(f"{PASSWORD} no").code == ""


# ---- a tier


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeServer]:
    monkeypatch.setenv(kind.PASSWORD, PASSWORD)
    server = FakeServer(1)
    yield server
    server.stop()


def url(server: FakeServer) -> str:
    return f"valkey://127.0.0.1:{server.port}/ns"


@pytest.mark.parametrize("name", [name for name in REPLIES if "password" in name or name.startswith("error")])
def test_text_of_a_server_is_escaped_in_every_output(
    name: str, server: FakeServer, caplog: pytest.LogCaptureFixture
) -> None:
    """A command fails at its start; an engine continues without the tier."""
    attack = REPLIES[name]
    server.attack = attack[0] if isinstance(attack, tuple) else attack
    texts = []
    with caplog.at_level(logging.DEBUG):
        for owner in (OWNER, TierOwner(4096, 36, "model", on_unavailable=lambda error: None)):
            try:
                tier = ValkeyOptions(url=url(server)).open(owner)
            except ConfigError as error:
                texts.append(f"{error} {error!r}")
            else:
                texts.append(f"{tier.last_error} {tier.last_error!r} {tier.stats()}")
                tier.close()
    for command in ("ping", "inspect", "bench"):
        for form in ("terminal", "json"):
            done = kvoffload("tier", command, url(server), "--format", form)
            assert "Traceback" not in done.stderr
            texts += (done.stdout + done.stderr).splitlines()
    for text in [*texts, *(record.getMessage() for record in caplog.records)]:
        assert "hunter2" not in text
        assert text.isascii() or "─" in text, "a rule of a table"
        assert "\x1b" not in text
        assert "\n2026" not in text


def test_login_error_is_a_code_with_its_meaning(server: FakeServer) -> None:
    server.attack = REPLIES["echo of the password"]  # type: ignore[assignment]
    with refusal("ERR in reply to AUTH: it has no password, or no AUTH command"):
        ValkeyOptions(url=url(server)).open(OWNER)


def facts(**values: str) -> bytes:
    plain = {"redis_version": "7.0.0", "role": "master", "maxmemory": "1000", "used_memory": "10"}
    return encoded("".join(f"{name}:{value}\r\n" for name, value in (plain | values).items()).encode())


@pytest.mark.parametrize(
    "text", ["[/foo]", "[bold]x", "[link=http://h]y[/link]", ESCAPES, "x" * 3000, PASSWORD]
)
def test_markup_escapes_and_secrets_in_facts_are_printed_as_text(server: FakeServer, text: str) -> None:
    line = text.replace("\r", " ")
    names = ("redis_version", "role", "mem_allocator", "maxmemory_policy")
    reply = facts(**dict.fromkeys(names, line))
    settings = encoded([b"save", line.encode(), b"maxmemory-samples", b"9" * 300])

    def attack(moment: Moment) -> Any:
        return [{b"INFO": reply, b"CONFIG": settings}.get(moment.verb, moment.correct)]

    server.attack = attack
    for form in ("terminal", "json"):
        done = kvoffload("tier", "ping", url(server), "--format", form)
        assert (done.returncode, done.stderr) == (0, "")
        assert "hunter2" not in done.stdout
        assert "\x1b" not in done.stdout
        assert "\n2026" not in done.stdout
    (report,) = json.loads(done.stdout)
    assert report["version"] == f"Redis {printable(line, PASSWORD)}"[:MOST_CHARACTERS] or len(line) > 190


def test_names_of_a_namespace_are_printed_as_text(server: FakeServer) -> None:
    names = [
        b"kvo1:ns:[/foo]\x1b[31m\n:0:1",
        b"kvo1:ns:epoch",
        b":epoch",
        b"x:y:z:0:1",
        b"kvo1:ns::epoch",
        b"kvo1:ns:",
    ]
    reply = encoded([b"0", [*names, 7, None, []]])
    server.attack = on(b"SCAN", reply)
    done = kvoffload("tier", "inspect", url(server))
    assert (done.returncode, done.stderr) == (0, "")
    assert r"producer [/foo]\x1b[31m\n" in done.stdout
    for nonsense in (b"+OK\r\n", b"*0\r\n", b"*2\r\n:1\r\n:2\r\n", b"$-1\r\n"):
        server.attack = on(b"SCAN", nonsense)
        done = kvoffload("tier", "inspect", url(server))
        assert done.returncode == 2
        assert "SCAN" in done.stderr


# ---- epochs and rights


@pytest.mark.parametrize(
    "value",
    [b"-00000000000001f", b"0x00000000000001", b"0000_0000_0000_1", b"00000000000000AF", b"", b"\xff" * 16],
)
def test_damaged_epoch_is_refused_with_the_remedy(server: FakeServer, value: bytes) -> None:
    assert epoch_number(value) is None
    tier = ValkeyOptions(url=url(server)).open(OWNER)
    server.values[tier.peer.keyspace.epoch_keys[0]] = value
    with pytest.raises(UnavailableError, match="16 hexadecimal digits; reset the cache to replace it"):
        ValkeyOptions(url=url(server)).open(OWNER)
    tier.clear()
    assert tier.drain(60.0)
    assert epoch_number(server.values[tier.peer.keyspace.epoch_keys[0]]) is not None
    tier.close()


@pytest.mark.parametrize("verb", [b"SET", b"GET", b"EXISTS", b"DEL"])
def test_missing_right_is_refused_with_the_servers_reason(server: FakeServer, verb: bytes) -> None:
    server.attack = on(verb, b"-NOPERM User a has no permissions to run the '%b' command\r\n" % verb.lower())
    with refusal(f"NOPERM .* '{verb.decode().lower()}' command"):
        ValkeyOptions(url=url(server)).open(OWNER)
    done = kvoffload("tier", "ping", url(server))
    assert done.returncode == 1
    assert f"REFUSED  {verb.decode()}: NOPERM" in done.stdout
    assert "The server cannot be a tier." in done.stdout


# ---- bounds


def test_short_lines_count_towards_the_bound_of_a_reply(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvoffload.cli.tier._TIMEOUT_S", 60.0)
    monkeypatch.setattr("kvoffload.tiers.valkey.inspection._REPLY_S", 60.0)
    for lines in (b"+\r\n", b"-\r\n", b":1\r\n", b"$0\r\n\r\n", b"*0\r\n"):
        server.attack = on(b"SCAN", b"*200000\r\n" + lines * 200_000)
        done = kvoffload("tier", "inspect", url(server))
        assert done.returncode == 2
        assert "an answer of more than 1048576 bytes" in done.stderr


@pytest.mark.parametrize("verb", [b"SCAN", b"GET", b"STRLEN"])
def test_inspection_of_a_hanging_server_ends(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch, verb: bytes
) -> None:
    """The default is 5 s after the last reply; once it was a minute."""
    waited: list[float] = []
    original = Connection.answer

    def answer(self: Any, deadline: float) -> Any:
        waited.append(deadline - time.monotonic())
        return original(self, min(deadline, time.monotonic() + 0.2))

    monkeypatch.setattr(Connection, "answer", answer)
    server.values[b"kvo1:ns:aa:0:1"] = b"x"
    server.attack = on(verb, HANG)
    done = kvoffload("tier", "inspect", url(server))
    assert done.returncode == 2
    assert "cannot be used now: TimeoutError" in done.stderr
    assert max(waited) <= 5.0
