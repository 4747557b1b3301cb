"""The map of a cluster: requests it from a node, and checks the reply. Does not know tiers."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from itertools import pairwise

from kvoffload.tiers.shared.exchanges import Exchange
from kvoffload.tiers.shared.remote_errors import ProtocolError, ServerError
from kvoffload.tiers.valkey.divisions import NUM_SLOTS, divisions_between
from kvoffload.tiers.valkey.resp import Answer, Connection, command

Address = tuple[str, int]
"""Host and port of a node."""

_HOST = re.compile(
    r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]{0,251}[A-Za-z0-9_.])?|[0-9A-Fa-f:.]{2,45}(?:%[\w.-]{1,16})?"
)
"""Pattern of a DNS name or an IP address. A map with any other host is refused, so that a malicious host name
never reaches the resolver or the log.
"""
_MOST_PORTS = 1 << 16
MOST_MASTERS = 128
"""Largest number of masters. It is limited because this process runs three threads for each master."""


@dataclass(eq=False, kw_only=True)
class MapQuestion(Exchange):
    """Asks one node for the slots of all nodes, on a new connection.

    If the node reports that the cluster is down, the node's map is not used, because the node cannot reach
    most masters and may have missed a failover.

    Attributes:
        divisions: divisions of each node, in ascending order. Nodes without a division are left out.
        num_replicas: number of connected replicas of each node.
    """

    closes_connection: bool = True
    divisions: dict[Address, tuple[int, ...]] = field(default_factory=dict)
    num_replicas: dict[Address, int] = field(default_factory=dict)

    def run(self, connection: Connection) -> None:
        connection.send([command(b"CLUSTER", b"INFO"), command(b"CLUSTER", b"SLOTS")], self.deadline)
        state, answer = (connection.answer(self.deadline) for _ in range(2))
        for error in (state, answer):
            if isinstance(error, ServerError):
                raise error
        if not isinstance(state, bytes):
            raise ProtocolError("the reply to CLUSTER INFO is not text")
        if b"cluster_state:ok" not in state:
            raise ServerError("CLUSTERDOWN cluster_state is not ok at the node that was asked for the map")
        divisions: dict[Address, set[int]] = {}
        num_replicas: dict[Address, int] = {}
        for first, last, address, replicas in _ranges(answer, connection.host):
            num_replicas[address] = replicas
            divisions.setdefault(address, set()).update(divisions_between(first, last))
        self.divisions = {address: tuple(sorted(own)) for address, own in divisions.items() if own}
        if len(self.divisions) > MOST_MASTERS:
            self.divisions = {}
            raise ProtocolError(f"CLUSTER SLOTS has more than {MOST_MASTERS} masters")
        self.num_replicas = num_replicas


def _ranges(answer: Answer, asked_host: str) -> list[tuple[int, int, Address, int]]:
    """Parse the reply to ``CLUSTER SLOTS``.

    Returns a tuple for each range of slots: first slot, last slot, master, and number of replicas.

    Args:
        asked_host: host of the node that sent the reply. It stands for a host that is empty in the reply.

    Raises: `ProtocolError` if a slot is outside of 0 to 16,383, a slot is in two ranges, or a master has no
        port or no plausible host.
    """
    if not isinstance(answer, list):
        raise ProtocolError("the reply to CLUSTER SLOTS is not an array")
    ranges, num_slots = [], 0
    for entry in answer:
        first, last, node, *replicas = entry if isinstance(entry, list) and len(entry) > 2 else (None,) * 3
        if not (isinstance(first, int) and isinstance(last, int) and 0 <= first <= last < NUM_SLOTS):
            raise ProtocolError(f"CLUSTER SLOTS has a range outside of slots 0 to {NUM_SLOTS - 1}")
        num_slots += last - first + 1
        address = _address(node, asked_host)
        if address is not None:
            ranges.append((first, last, address, len(replicas)))
    if num_slots > NUM_SLOTS:
        raise ProtocolError("CLUSTER SLOTS has a slot in two ranges")
    if any(after[0] <= before[1] for before, after in pairwise(sorted(ranges))):
        raise ProtocolError("CLUSTER SLOTS has a slot in two ranges")
    return ranges


def _address(node: Answer, asked_host: str) -> Address | None:
    """Parse the address of a master; return None if the node that sent the reply does not know the host."""
    host, port = node[:2] if isinstance(node, list) and len(node) > 1 else (0, 0)
    if not isinstance(port, int) or not 0 < port < _MOST_PORTS:
        raise ProtocolError(f"CLUSTER SLOTS has a node without a port from 1 to {_MOST_PORTS - 1}")
    if host is None or host == b"":
        return asked_host, port
    if host == b"?":
        return None
    name = host.decode(errors="replace") if isinstance(host, bytes) else ""
    if not _HOST.fullmatch(name) or ".." in name:
        raise ProtocolError("CLUSTER SLOTS has a node whose host is neither a name nor an address")
    return name, port
