"""``valkey://HOST:PORT/NAMESPACE``: a Valkey or Redis server that machines share; ``valkeys://`` over TLS."""

from __future__ import annotations

import ipaddress
import logging
import os
import re
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NamedTuple, TypeAlias
from urllib.parse import urlsplit

from kvoffload.config import Duration
from kvoffload.core.admission import DEFAULT_ADMISSION, AdmissionName, create_admission
from kvoffload.errors import ConfigError, UnavailableError
from kvoffload.tiers.options import TierOptions, TierOwner, redacted
from kvoffload.tiers.remote.resp import Connection, Login, ServerError
from kvoffload.tiers.remote.tier import RemoteOptions, RemoteTier

USERNAME, PASSWORD = "KVOFFLOAD_VALKEY_USERNAME", "KVOFFLOAD_VALKEY_PASSWORD"
_PORT = 6379
_START_S = 1.0
_REPLAY_S = 30.0
_COUNTED_BLOCKS = 1 << 16
"""An admission rule counts as for a cache of so many blocks: how many the server holds is not ours to
know.
"""
_TO_BE_REFUSED = {"WRONGPASS", "NOAUTH", "NOPERM", "ERR", "MOVED", "CLUSTERDOWN"}
"""What a server answers to a login or a command that it will never allow, and what a node of a cluster
says.
"""


class _Address(NamedTuple):
    scheme: str
    host: str
    port: int
    namespace: str


class _URLParser:
    allowed = (
        "valkey://HOST:PORT/NAMESPACE or valkeys://..., the namespace of letters, digits and ._-; user and "
        f"password from {USERNAME} and {PASSWORD}, or password_file=FILE"
    )

    def parse(self, field: str, value: object) -> str:
        text = str(value)
        try:
            address_of(text)
        except ValueError:
            raise ConfigError(field, redacted(text), f"allowed: {self.allowed}") from None
        return text


def address_of(url: str) -> _Address:
    """The parts of a URL. Raises `ValueError`."""
    parts = urlsplit(url)
    namespace = parts.path.removeprefix("/")
    wrong = "@" in parts.netloc or parts.query or parts.fragment or not parts.hostname
    if (
        wrong
        or parts.scheme not in ValkeyOptions.schemes
        or not re.fullmatch(r"[\w.-]{1,64}", namespace, re.ASCII)
    ):
        raise ValueError
    return _Address(parts.scheme, parts.hostname or "", parts.port or _PORT, namespace)


URL: TypeAlias = Annotated[str, _URLParser()]


@dataclass(frozen=True, kw_only=True)
class ValkeyOptions(TierOptions):
    """A server that speaks RESP2. It decides what leaves: give it ``maxmemory-policy allkeys-lru``.

    Attributes:
        url: the server and the namespace.
        ttl: after how long the server forgets a block; by default when it likes.
        timeout: a read has ended by then, with what has arrived. probe_timeout: the same for a probe.
        identity: what the weights are called, equal on all machines; by default it is found out.
        admission: which blocks are written.
        password_file: a file with the password alone; by default it is in the environment.
        ca, cert, cert_key: files, for TLS: who signs the server's certificate, and one of our own.
    """

    name = "valkey"
    schemes = ("valkey", "valkeys")

    url: URL
    ttl: Duration | None = None
    timeout: Duration = 2.0
    probe_timeout: Duration = 0.05
    identity: str = ""
    admission: AdmissionName = DEFAULT_ADMISSION
    password_file: str = ""
    ca: str = ""
    cert: str = ""
    cert_key: str = ""

    def open(self, owner: TierOwner) -> RemoteTier:
        """Waits a second at most for the server. An engine starts without it, and finds it when it is
        there.
        """
        if owner.block_bytes == 0:
            raise ConfigError(
                "tier", str(self), "without data it has nothing to hold; take simulated:CAPACITY"
            )
        address, login = address_of(self.url), self._login()
        _warn_if_open_to_all(address, login)
        fingerprint = owner.fingerprint + self.identity
        if owner.shared_fingerprint is not None:
            fingerprint = owner.shared_fingerprint(self.identity)
        # A replay has time, and its decisions may not depend on how fast a server answers.
        patience_s = _REPLAY_S if owner.counts_blocks else 0.0
        tier = RemoteTier(
            self.name,
            f"{address.host}:{address.port}/{address.namespace}",
            lambda deadline: Connection(address.host, address.port, login, deadline),
            RemoteOptions(
                namespace=address.namespace,
                timeout_s=max(self.timeout, patience_s),
                probe_timeout_s=max(self.probe_timeout, patience_s),
                ttl_s=0 if self.ttl is None else max(1, round(self.ttl)),
            ),
            block_bytes=owner.block_bytes,
            fingerprint=fingerprint,
            admission=create_admission(self.admission, owner.key_bytes, _COUNTED_BLOCKS),
        )
        try:
            tier.wait_until_open(_START_S)
            if not owner.counts_blocks:
                tier.measure(_START_S)
        except UnavailableError as error:
            said = tier.last_error
            never = isinstance(said, ssl.SSLCertVerificationError)
            if never or (isinstance(said, ServerError) and said.code in _TO_BE_REFUSED):
                tier.close()
                raise ConfigError("tier", tier.place, str(said)) from None
            if owner.go_on_without is None:
                tier.close()
                raise
            text = "kvoffload: tier %s is not there yet; it is used when it is: %s"
            logging.getLogger("kvoffload.remote").error(text, self.name, error)
        return tier

    def _login(self) -> Login:
        password = os.environ.get(PASSWORD, "")
        if self.password_file:
            try:
                password = Path(self.password_file).read_text().strip()
            except (OSError, UnicodeDecodeError) as error:
                why = getattr(error, "strerror", None) or "it is no text"
                raise ConfigError("password_file", self.password_file, f"it cannot be read ({why})") from None
        tls = None
        if address_of(self.url).scheme == "valkeys":
            try:
                tls = ssl.create_default_context(cafile=self.ca or None)
                if self.cert:
                    tls.load_cert_chain(self.cert, self.cert_key or None)
            except OSError as error:
                raise ConfigError(
                    "ca" if not self.cert else "cert", self.ca or self.cert, str(error)
                ) from None
        elif self.ca or self.cert or self.cert_key:
            raise ConfigError("url", self.url, "ca, cert and cert_key are for valkeys://")
        return Login(os.environ.get(USERNAME, ""), password, tls)


def _warn_if_open_to_all(address: _Address, login: Login) -> None:
    try:
        is_near = ipaddress.ip_address(address.host).is_loopback
    except ValueError:
        is_near = address.host == "localhost"
    if is_near or (login.tls is not None and login.password):
        return
    lacks = " and ".join(["TLS"] * (login.tls is None) + ["a password"] * (not login.password))
    text = "kvoffload: the tier at %s:%d is used without %s: who can reach it can read prompts out of it"
    logging.getLogger("kvoffload.remote").warning(text, address.host, address.port, lacks)
