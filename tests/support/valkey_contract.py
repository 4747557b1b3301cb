"""Tests that a Valkey server and a Valkey cluster pass, in addition to `SharedTierContract`."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from ssl import TLSVersion
from typing import Any, ClassVar

import pytest

from kvoffload.errors import ConfigError
from kvoffload.tiers.shared.identity import HEADER_BYTES, head_bytes
from kvoffload.tiers.valkey.login import PASSWORD, USERNAME
from support.shared_tier_contract import GROUP, Damage, Rig, SharedTierContract
from support.valkey_client import BLOCK_BYTES, Client
from support.valkey_server import Server, self_signed

HEAD_BYTES = HEADER_BYTES + head_bytes(BLOCK_BYTES)
"""Bytes of the first value of a block. The second value has the rest."""
READ_REPLY_BYTES = len(GROUP) * (HEADER_BYTES + BLOCK_BYTES + 18) + 23
"""Bytes of the reply to a read of `GROUP`: two values with their lengths for each block, and the epoch."""


class ValkeyContract(SharedTierContract):
    """Tests of rights and TLS, with blocks of two values.

    Attributes:
        rights: the commands that a tenant needs.
    """

    rights: ClassVar[str]

    @abstractmethod
    def servers(self, rig: Rig) -> list[Server]:
        """Return the servers behind the rig."""

    @abstractmethod
    def over_tls(self, rig: Rig, files: tuple[str, str], **tls: Any) -> AbstractContextManager[str]:
        """Put TLS in front of the rig, with this certificate and key; yields the URL. The servers in the
        wheel have no TLS. `tls` are arguments of `FaultProxy`."""

    @pytest.fixture
    def tenant(self, rig: Rig, monkeypatch: pytest.MonkeyPatch) -> Any:
        """A user with rights only in the namespace ``tenant-a``, set in the environment."""
        for server in self.servers(rig):
            user = f"a on >hunter2 ~kvo1:tenant-a:* {self.rights}"
            assert server.execute("ACL", "SETUSER", *user.split()) == b"OK"
        monkeypatch.setenv(USERNAME, "a")
        monkeypatch.setenv(PASSWORD, "hunter2")
        yield
        for server in self.servers(rig):
            assert server.execute("ACL", "DELUSER", "a") == 1

    @pytest.mark.usefixtures("tenant")
    def test_rights_keep_tenants_apart(self, rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
        client = rig.connect(namespace="tenant-a")
        assert client.write(*self.many) == client.read(*self.many) == self.many
        client.reset()
        assert "hunter2" not in f"{vars(client.tier)} {client.tier.stats()}"
        with pytest.raises(ConfigError, match="NOPERM") as refused:
            rig.connect(namespace="tenant-b")
        assert "hunter2" not in str(refused.value)
        monkeypatch.setenv(PASSWORD, "wrong")
        with pytest.raises(ConfigError, match="WRONGPASS"):
            rig.connect(namespace="tenant-a")

    def test_blocks_return_over_tls(self, rig: Rig, make: Callable[..., Client], tmp_path: Path) -> None:
        pem, key = self_signed(tmp_path)
        with self.over_tls(rig, (pem, key)) as url:
            client = make(url, ca=pem)
            assert client.write(*self.many) == client.read(*self.many) == self.many

    def test_other_certificates_are_refused(
        self, rig: Rig, make: Callable[..., Client], tmp_path: Path
    ) -> None:
        other, _ = self_signed(tmp_path, "other")
        with self.over_tls(rig, self_signed(tmp_path)) as url:
            for ca in (other, ""):
                with pytest.raises(
                    ConfigError, match=r"certificate verify failed: .*; give the certificate of its CA in ca$"
                ):
                    make(url, ca=ca)
            with pytest.raises(ConfigError, match=r"give a name of the certificate in the URL$"):
                make(url.replace("127.0.0.1", "localhost"), ca=str(tmp_path / "server.pem"))

    @pytest.mark.parametrize("version", [TLSVersion.TLSv1_2, TLSVersion.TLSv1_3])
    def test_refusal_of_the_clients_certificate_is_no_outage(
        self, rig: Rig, make: Callable[..., Client], tmp_path: Path, version: TLSVersion
    ) -> None:
        (pem, key), (own, own_key) = self_signed(tmp_path), self_signed(tmp_path, "client")
        with self.over_tls(rig, (pem, key), client_ca=own, tls_version=version) as url:
            client = make(url, ca=pem, cert=own, cert_key=own_key)
            assert client.write(*GROUP) == client.read(*GROUP) == GROUP
            for options in ({}, {"cert": pem, "cert_key": key}):
                with pytest.raises(ConfigError, match=r"accepts in cert and cert_key$"):
                    make(url, ca=pem, **options)


Change = Callable[[bytes, bytes], bytes]


def whole(name: str, change: Change, split_at: int = HEAD_BYTES, *, is_received: bool = True) -> Damage:
    """Return a damage to the header and bytes of block 2; `change` also gets the ones of block 4."""

    def apply(server: Any, client: Client) -> None:
        value, other = (b"".join(map(server.get, client.names(number))) for number in (2, 4))
        changed = change(value, other)
        for key, data in zip(client.names(2), (changed[:split_at], changed[split_at:]), strict=True):
            server.put(key, data)

    return Damage(name, apply, (1, 3, 4, 5) if is_received else (1,), is_received)


def values(
    name: str, change: Callable[[bytes, bytes], tuple[bytes, bytes]], *, is_received: bool = True
) -> Damage:
    """Return a damage to the two values of block 2; `change` gets both."""

    def apply(server: Any, client: Client) -> None:
        first, second = map(server.get, client.names(2))
        for key, data in zip(client.names(2), change(first, second), strict=True):
            server.put(key, data)

    return Damage(name, apply, (1, 3, 4, 5) if is_received else (1,), is_received)


def flipped(value: bytes, at: int, bit: int) -> bytes:
    return value[:at] + bytes([value[at] ^ bit]) + value[at + 1 :]


SIZE, HEAD = HEADER_BYTES, HEAD_BYTES
DAMAGES = [
    whole("flip in the block", lambda value, _: flipped(value, SIZE + 100, 1)),
    whole("flip in its first byte", lambda value, _: flipped(value, SIZE, 1)),
    whole("flip in the header", lambda value, _: flipped(value, 20, 4)),
    whole("flip in the checksum", lambda value, _: flipped(value, SIZE - 1, 128)),
    whole("another version", lambda value, _: value[:8] + b"\2" + value[9:]),
    whole("another producer", lambda value, _: value[:24] + bytes(16) + value[40:]),
    whole("another epoch", lambda value, _: flipped(value, 40, 1)),
    whole("swapped with another", lambda _, other: other),
    whole("another's block", lambda value, other: value[:SIZE] + other[SIZE:]),
    whole("another's header", lambda value, other: other[:SIZE] + value[SIZE:]),
    whole("another's second value", lambda value, other: value[:HEAD] + other[HEAD:]),
    whole("truncated by one", lambda value, _: value[:-1]),
    whole("truncated to nothing", lambda *_: b""),
    whole("only the header", lambda value, _: value[:SIZE]),
    whole("longer by one", lambda value, _: value + b"\0"),
    whole("much longer", lambda value, _: value * 4, is_received=False),
    whole("zeros", lambda value, _: bytes(len(value))),
    whole("zeros in the block", lambda value, _: value[:SIZE] + bytes(BLOCK_BYTES)),
    whole("zeros in the second value", lambda value, _: value[:HEAD] + bytes(len(value) - HEAD)),
    whole("shifted", lambda value, _: value[1:] + value[:1]),
    whole("cut a byte earlier", lambda value, _: value, HEAD - 1),
    whole("cut a byte later", lambda value, _: value, HEAD + 1),
    values("first value longer", lambda first, second: (first + b"\0", second)),
    values("first value shorter", lambda first, second: (first[:-1], second)),
    values(
        "first value much longer",
        lambda first, second: (first + 4 * (first + second), second),
        is_received=False,
    ),
    values("whole in the first value", lambda first, second: (first + second, second)),
    values("values exchanged", lambda first, second: (second, first)),
]
