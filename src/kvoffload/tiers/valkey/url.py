"""URLs of Valkey servers and clusters."""

from __future__ import annotations

import re
from typing import NamedTuple
from urllib.parse import urlsplit

from kvoffload.tiers.valkey.cluster_map import Address

SCHEMES = ("valkey", "valkeys", "valkey+cluster", "valkeys+cluster")
_PORT = 6379


class ServerURL(NamedTuple):
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


def parse_url(text: str) -> ServerURL:
    """Parse a URL. Raises `ValueError`."""
    parts = urlsplit(text)
    namespace = parts.path.removeprefix("/")
    nodes = [urlsplit(f"//{node}") for node in parts.netloc.split(",")]
    url = ServerURL(
        parts.scheme,
        tuple((node.hostname or "", _PORT if node.port is None else node.port) for node in nodes),
        namespace,
    )
    if (
        "@" in parts.netloc
        or parts.query
        or parts.fragment
        or not all(host and port for host, port in url.nodes)
        or url.scheme not in SCHEMES
        or (len(nodes) > 1 and not url.is_cluster)
        or not re.fullmatch(r"[\w.-]{1,64}", namespace, re.ASCII)
    ):
        raise ValueError(text)
    return url
