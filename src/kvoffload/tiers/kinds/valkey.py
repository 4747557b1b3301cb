"""The kind ``valkey://HOST:PORT/NAMESPACE``: a Valkey or Redis server that machines share.

``valkey+cluster://HOST:PORT,HOST:PORT/NAMESPACE`` names some nodes of a cluster. ``valkeys://`` and
``valkeys+cluster://`` connect over TLS.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, TypeAlias

from kvoffload.core.admission import Admission
from kvoffload.errors import ConfigError
from kvoffload.settings.paths import FilePath
from kvoffload.settings.read import Duration
from kvoffload.tiers.shared.addresses import is_loopback
from kvoffload.tiers.shared.certificates import certificate_refusal, client_certificate_refusal
from kvoffload.tiers.shared.remote_errors import ServerError
from kvoffload.tiers.shared.remote_options import LOGGER, SharedTierOptions
from kvoffload.tiers.shared.remote_tier import RemoteTier
from kvoffload.tiers.spec import TierOwner, redacted
from kvoffload.tiers.valkey.cluster import ClusterTier
from kvoffload.tiers.valkey.login import PASSWORD, USERNAME, Connector, find_login, tls_context
from kvoffload.tiers.valkey.protocol import valkey_tier
from kvoffload.tiers.valkey.resp import Login
from kvoffload.tiers.valkey.url import SCHEMES, ServerURL, parse_url

_NUM_THREADS = 2
"""Number of threads for each type of operation: read, write, probe. One thread verifies while another
receives. Each node of a cluster has only one thread for each type."""
_REFUSALS = {"WRONGPASS", "NOAUTH", "NOPERM", "ERR"}
"""Codes of permanent errors."""


class _URLParser:
    allowed = (
        "valkey://HOST:PORT/NAMESPACE or valkeys://..., for a cluster valkey+cluster://HOST:PORT,HOST:PORT/"
        "NAMESPACE or valkeys+cluster://..., the namespace of letters, digits and ._-; user and password "
        f"from {USERNAME} and {PASSWORD}, or password_file=FILE"
    )

    def parse(self, field: str, value: object) -> str:
        text = str(value)
        try:
            parse_url(text)
        except ValueError:
            raise ConfigError(field, redacted(text), f"allowed: {self.allowed}") from None
        return text


URL: TypeAlias = Annotated[str, _URLParser()]


@dataclass(frozen=True, kw_only=True)
class ValkeyOptions(SharedTierOptions):
    """Options of a tier on a server that speaks RESP2, such as Valkey, or on a cluster of such servers.

    The server must evict blocks itself: set its ``maxmemory-policy`` to ``volatile-lru``, and `ttl` here.

    Attributes:
        url: the server, or some nodes of the cluster, and the namespace.
        ttl: lifetime of a block on the server in seconds; by default the server decides.
        password_file: file that contains only the password. It is read again for each connection. By default
            the password comes from the environment.
        ca: file with the certificate of the CA that signed the server's certificate.
        cert, cert_key: files with the client's certificate and its key.
    """

    name = "valkey"
    schemes = SCHEMES
    start_s = 5.0
    engine_start_s = 1.0
    silence_s: ClassVar[float] = 5.0
    """In a replay, a connection fails if the server neither sends nor accepts a byte for so many seconds."""

    url: URL
    ttl: Duration | None = None
    password_file: FilePath = ""
    ca: FilePath = ""
    cert: FilePath = ""
    cert_key: FilePath = ""

    def connect(
        self, owner: TierOwner, fingerprint: str, admission: Admission | None
    ) -> RemoteTier | ClusterTier:
        url = parse_url(self.url)
        connect = self.connector(self.silence_s if owner.counts_blocks else math.inf)
        _warn_if_open_to_all(url, connect.login)
        ttl_s = 0 if self.ttl is None else max(1, round(self.ttl))
        options = self.remote_options(owner, url.namespace, fingerprint, ttl_s)
        if url.is_cluster:
            return ClusterTier(self.name, str(url), [*url.nodes], connect, options, admission=admission)
        (node,) = url.nodes
        options = replace(options, num_threads=_NUM_THREADS)
        return valkey_tier(
            self.name, str(url), lambda deadline: connect(node, deadline), options, admission=admission
        )

    def refusal(self, error: BaseException) -> str | None:
        if (refusal := certificate_refusal(error, "ca", "the URL")) is not None:
            return refusal
        if (refusal := client_certificate_refusal(error, "cert and cert_key")) is not None:
            return refusal
        if not isinstance(error, ServerError) or error.is_busy:
            return None
        if error.is_of_cluster and not parse_url(self.url).is_cluster:
            return f"it is a node of a cluster: use valkey+cluster:// ({error})"
        return str(error) if error.code in _REFUSALS else None

    def connector(self, silence_s: float = math.inf) -> Connector:
        """Return a new connector with the present login. `silence_s` is an argument of `Connector`.

        Raises: `ConfigError` if the password or the files for TLS cannot be used.
        """
        tls, tls_files = None, (self.ca, self.cert, self.cert_key)
        if parse_url(self.url).has_tls:
            tls = tls_context(*tls_files)
        elif self.ca or self.cert or self.cert_key:
            why = "ca, cert and cert_key are for valkeys:// and valkeys+cluster://"
            raise ConfigError("url", self.url, why)
        return Connector(find_login(self.password_file, tls), self.password_file, silence_s, tls_files)


def _warn_if_open_to_all(url: ServerURL, login: Login) -> None:
    if all(is_loopback(host) for host, _ in url.nodes) or (login.tls is not None and login.password):
        return
    lacks = " and ".join(["TLS"] * (login.tls is None) + ["a password"] * (not login.password))
    text = "kvoffload: the tier at %s is used without %s: anyone who can connect can read prompts from it"
    LOGGER.warning(text, url, lacks)
