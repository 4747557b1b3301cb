"""The end of all pauses of a tier that machines share, instead of a wait for them."""

from __future__ import annotations

from typing import Any

from kvoffload.tiers.valkey.cluster import ClusterTier


def end_pauses(tier: Any) -> None:
    """Allow handshakes, attempts of open circuit breakers, writes and requests for the map now."""
    if isinstance(tier, ClusterTier):
        tier._ask_at = tier._maintain_at = 0.0
        for node in tier.nodes.values():
            end_pauses(node)
        return
    tier._resume_writes_at = tier.peer._next_handshake = 0.0
    breakers = tier.peer.breakers
    for breaker in (breakers.server, *breakers.operations.values()):
        if breaker.is_open:
            breaker.next_attempt = 0.0
