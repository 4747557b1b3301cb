"""``valkey://HOST:PORT/NAMESPACE``: a Valkey or Redis server that machines share; ``valkeys://`` over TLS.

``valkey+cluster://HOST:PORT,HOST:PORT/NAMESPACE`` and ``valkeys+cluster://...``: a cluster, by some of its
nodes.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
import re
import ssl
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeAlias
from urllib.parse import urlsplit

from kvoffload.core.admission import DEFAULT_ADMISSION, AdmissionName, create_admission
from kvoffload.errors import ConfigError, UnavailableError
from kvoffload.settings.read import Duration
from kvoffload.tiers.shared.addresses import Addresses
from kvoffload.tiers.shared.printable import printable
from kvoffload.tiers.shared.silence import ImpatientConnection
from kvoffload.tiers.shared.tier import RemoteOptions, RemoteTier
from kvoffload.tiers.spec import TierOptions, TierOwner, redacted
from kvoffload.tiers.valkey.cluster import ClusterTier
from kvoffload.tiers.valkey.cluster_map import Address
from kvoffload.tiers.valkey.resp import Connection, Login, ServerError

USERNAME, PASSWORD = "KVOFFLOAD_VALKEY_USERNAME", "KVOFFLOAD_VALKEY_PASSWORD"
_PORT = 6379
_START_S, _COMMAND_START_S = 1.0, 5.0
_REPLAY_S, _SILENCE_S = 30.0, 5.0
"""In a replay: the longest time of a probe, read or write, and of a silence of the server."""
_COUNTED_BLOCKS = 1 << 16
"""An admission rule counts as for a cache of so many blocks: how many the server holds is not ours to
know.
"""
_LINES = 2
"""For reads, writes and probes each: while one verifies, the other receives. In a cluster one a node."""
_TO_BE_REFUSED = {"WRONGPASS", "NOAUTH", "NOPERM", "ERR"}
"""What a server answers to a login or a command that it will never allow."""
_OF_A_CLUSTER = {"MOVED", "CLUSTERDOWN"}
"""What a node of a cluster says who is taken for a server that stands alone."""


class Place(NamedTuple):
    """The parts of a URL."""

    scheme: str
    nodes: tuple[Address, ...]
    namespace: str

    @property
    def is_cluster(self) -> bool:
        return self.scheme.endswith("+cluster")

    @property
    def has_tls(self) -> bool:
        return self.scheme.startswith("valkeys")

    def __str__(self) -> str:
        return ",".join(f"{host}:{port}" for host, port in self.nodes) + f"/{self.namespace}"


class _URLParser:
    allowed = (
        "valkey://HOST:PORT/NAMESPACE or valkeys://..., of a cluster valkey+cluster://HOST:PORT,HOST:PORT/"
        "NAMESPACE or valkeys+cluster://..., the namespace of letters, digits and ._-; user and password "
        f"from {USERNAME} and {PASSWORD}, or password_file=FILE"
    )

    def parse(self, field: str, value: object) -> str:
        text = str(value)
        try:
            place_of(text)
        except ValueError:
            raise ConfigError(field, redacted(text), f"allowed: {self.allowed}") from None
        return text


def place_of(url: str) -> Place:
    """The parts of a URL. Raises `ValueError`."""
    parts = urlsplit(url)
    namespace = parts.path.removeprefix("/")
    nodes = [urlsplit(f"//{node}") for node in parts.netloc.split(",")]
    found = Place(parts.scheme, tuple((node.hostname or "", node.port or _PORT) for node in nodes), namespace)
    if (
        "@" in parts.netloc
        or parts.query
        or parts.fragment
        or not all(host for host, _ in found.nodes)
        or found.scheme not in ValkeyOptions.schemes
        or (len(nodes) > 1 and not found.is_cluster)
        or not re.fullmatch(r"[\w.-]{1,64}", namespace, re.ASCII)
    ):
        raise ValueError
    return found


URL: TypeAlias = Annotated[str, _URLParser()]


@dataclass(frozen=True, kw_only=True)
class ValkeyOptions(TierOptions):
    """A server that speaks RESP2, or a cluster. It decides what leaves: give it ``maxmemory-policy
    allkeys-lru``.

    Attributes:
        url: the server, or some nodes of the cluster, and the namespace.
        ttl: after how long the server forgets a block; by default when it likes.
        timeout: a read has ended by then, with what has arrived. probe_timeout: the same for a probe.
        identity: what the weights are called, equal on all machines; by default it is found out.
        admission: which blocks are written.
        password_file: a file with the password alone, read again for each connection; by default the
            password is in the environment.
        ca, cert, cert_key: files, for TLS: who signs the server's certificate, and one of our own.
    """

    name = "valkey"
    schemes = ("valkey", "valkeys", "valkey+cluster", "valkeys+cluster")

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

    def open(self, owner: TierOwner) -> RemoteTier | ClusterTier:
        """Waits five seconds at most for the server. An engine waits one, starts without it, and finds it
        when it is there.
        """
        if owner.block_bytes == 0:
            raise ConfigError(
                "tier", str(self), "without data it has nothing to hold; take simulated:CAPACITY"
            )
        place = place_of(self.url)
        connect = self.connector(_SILENCE_S if owner.counts_blocks else None)
        _warn_if_open_to_all(place, connect.login)
        tier = self._tier(owner, place, connect)
        try:
            tier.wait_until_open(_COMMAND_START_S if owner.go_on_without is None else _START_S)
            if not owner.counts_blocks:
                tier.measure(_START_S)
        except UnavailableError as error:
            if (why := _never(tier.last_error, place)) is not None:
                tier.close()
                raise ConfigError("tier", tier.place, why) from None
            if owner.go_on_without is None:
                tier.close()
                raise
            text = "kvoffload: tier %s is not there yet; it is used when it is: %s"
            logging.getLogger("kvoffload.remote").error(text, self.name, error)
        return tier

    def _tier(self, owner: TierOwner, place: Place, connect: Connector) -> RemoteTier | ClusterTier:
        fingerprint = owner.fingerprint + self.identity
        if owner.shared_fingerprint is not None:
            fingerprint = owner.shared_fingerprint(self.identity)
        # A replay has time, and its decisions may not depend on how fast a server answers.
        patience_s = _REPLAY_S if owner.counts_blocks else 0.0
        options = RemoteOptions(
            namespace=place.namespace,
            timeout_s=max(self.timeout, patience_s),
            probe_timeout_s=max(self.probe_timeout, patience_s),
            ttl_s=0 if self.ttl is None else max(1, round(self.ttl)),
            write_timeout_s=patience_s or None,
            gives_up_at_once=owner.counts_blocks,
        )
        admission = create_admission(self.admission, owner.key_bytes, _COUNTED_BLOCKS)
        more: dict[str, Any] = {
            "block_bytes": owner.block_bytes,
            "fingerprint": fingerprint,
            "admission": admission,
        }
        if place.is_cluster:
            return ClusterTier(self.name, str(place), [*place.nodes], connect, options, **more)
        (node,) = place.nodes
        return RemoteTier(
            self.name, str(place), lambda deadline: connect(node, deadline), options, lines=_LINES, **more
        )

    def login(self) -> Login:
        """How to get in, from the environment and files. Raises `ConfigError`."""
        password = os.environ.get(PASSWORD, "")
        if self.password_file:
            try:
                password = password_in(self.password_file)
            except (OSError, UnicodeDecodeError) as error:
                why = getattr(error, "strerror", None) or "it is no text"
                raise ConfigError("password_file", self.password_file, f"it cannot be read ({why})") from None
        tls = None
        if place_of(self.url).has_tls:
            try:
                tls = ssl.create_default_context(cafile=self.ca or None)
                if self.cert:
                    tls.load_cert_chain(self.cert, self.cert_key or None)
            except OSError as error:
                raise ConfigError(
                    "ca" if not self.cert else "cert", self.ca or self.cert, str(error)
                ) from None
        elif self.ca or self.cert or self.cert_key:
            raise ConfigError(
                "url", self.url, "ca, cert and cert_key are for valkeys:// and valkeys+cluster://"
            )
        return Login(os.environ.get(USERNAME, ""), password, tls)

    def connector(self, silence_s: float | None = None) -> Connector:
        """A new connector with the present login, as `Connector`. Raises `ConfigError`."""
        return Connector(self.login(), self.password_file, silence_s)


def password_in(path: str) -> str:
    """The password of a file, without the white space around it. Raises `OSError`, `UnicodeDecodeError`."""
    return Path(path).read_text().strip()


class Connector:
    """Connects to servers of one tier; keeps their addresses, and reads a changed password.

    The password file is read before each connection. While it cannot be read, or is empty, as it may be for a
    moment when it is replaced, the last password is used.

    Args:
        password_file: empty if the password does not come from a file.
        silence_s: connections give up when the server is silent for so long; None for never.

    Thread: any; each line of a tier connects by itself.
    """

    def __init__(self, login: Login, password_file: str = "", silence_s: float | None = None) -> None:
        self.login, self._password_file, self._silence_s = login, password_file, silence_s
        self._addresses = Addresses()

    def __call__(self, address: Address, deadline: float) -> Connection:
        """Connect and log in, until the deadline (of `time.monotonic`). Raises as `Connection`."""
        if self._password_file:
            with contextlib.suppress(OSError, UnicodeDecodeError):
                password = password_in(self._password_file)
                if password and password != self.login.password:
                    self.login = replace(self.login, password=password)
        if self._silence_s is None:
            return Connection(*address, self.login, deadline, self._addresses)
        return ImpatientConnection(*address, self.login, deadline, self._addresses, silence_s=self._silence_s)


def _never(error: Exception, place: Place) -> str | None:
    """Why this will never be a tier; None if it may become one."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return printable(error)
    if not isinstance(error, ServerError):
        return None
    if error.code in _OF_A_CLUSTER and not place.is_cluster:
        return f"it is a node of a cluster: take valkey+cluster:// ({error})"
    return str(error) if error.code in _TO_BE_REFUSED else None


def _warn_if_open_to_all(place: Place, login: Login) -> None:
    if all(_is_near(host) for host, _ in place.nodes) or (login.tls is not None and login.password):
        return
    lacks = " and ".join(["TLS"] * (login.tls is None) + ["a password"] * (not login.password))
    text = "kvoffload: the tier at %s is used without %s: who can reach it can read prompts out of it"
    logging.getLogger("kvoffload.remote").warning(text, place, lacks)


def _is_near(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
