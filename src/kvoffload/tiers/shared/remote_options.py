"""Options that all shared tiers have, and the opening of a shared tier."""

from __future__ import annotations

import logging
from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from kvoffload.core.admission import DEFAULT_ADMISSION, Admission, AdmissionName, create_admission
from kvoffload.errors import ConfigError, UnavailableError
from kvoffload.settings.read import Duration
from kvoffload.tiers.producer_text import add_salt
from kvoffload.tiers.shared.remote_tier import ConnectingTier
from kvoffload.tiers.shared.server import RemoteOptions
from kvoffload.tiers.spec import TierOptions, TierOwner

_COUNTED_BLOCKS = 1 << 16
"""Capacity that the admission rule assumes, because the capacity of a server is unknown."""
_REPLAY_S = 30.0
"""Deadline of a probe, read or write in a replay."""
LOGGER = logging.getLogger("kvoffload.remote")


@dataclass(frozen=True, kw_only=True)
class SharedTierOptions(TierOptions):
    """Options of a tier that machines share.

    Attributes:
        timeout: deadline of a read; blocks that arrive before the deadline count.
        probe_timeout: deadline of a probe.
        identity: name of the weights, equal on all machines; by default it is detected.
        admission: name of the admission rule, which chooses the blocks to write.
        start_s: longest wait for the server when the tier is opened.
        engine_start_s: longest wait of an engine for the server. After this wait the engine starts, even if
            the server does not reply yet.
    """

    start_s: ClassVar[float]
    engine_start_s: ClassVar[float]

    timeout: Duration = 2.0
    probe_timeout: Duration = 0.05
    identity: str = ""
    admission: AdmissionName = DEFAULT_ADMISSION

    @abstractmethod
    def connect(self, owner: TierOwner, fingerprint: str, admission: Admission | None) -> ConnectingTier:
        """Create a tier that connects in the background. Raises `ConfigError` for an invalid option."""

    @abstractmethod
    def refusal(self, error: BaseException) -> str | None:
        """Return the reason of `error` as text if it is permanent; return None if a retry may succeed."""

    def remote_options(
        self, owner: TierOwner, namespace: str, fingerprint: str, ttl_s: int = 0
    ) -> RemoteOptions:
        """Return the options of a `RemoteTier` for this owner.

        Replays have long deadlines, because their decisions must not depend on the speed of a server.
        """
        least_s = _REPLAY_S if owner.counts_blocks else 0.0
        return RemoteOptions(
            namespace=namespace,
            fingerprint=fingerprint,
            block_bytes=owner.block_bytes,
            timeout_s=max(self.timeout, least_s),
            probe_timeout_s=max(self.probe_timeout, least_s),
            ttl_s=ttl_s,
            write_timeout_s=least_s or None,
            gives_up_at_once=owner.counts_blocks,
        )

    def open(self, owner: TierOwner) -> ConnectingTier:
        """Open the tier and wait for the server.

        If the owner has `on_unavailable`, waits up to `engine_start_s`. If the server does not reply in that
        time, returns a tier that is empty until the server replies. If the owner has no `on_unavailable`,
        waits up to `start_s` and then raises `UnavailableError`.

        Raises: `ConfigError` for an invalid option, or for a permanent error of the server (`refusal`), such
            as a refused login.
        """
        if owner.block_bytes == 0:
            why = "a replay without data has no bytes to store; use simulated:CAPACITY"
            raise ConfigError("tier", str(self), why)
        fingerprint = add_salt(owner.fingerprint, self.identity)
        if owner.shared_fingerprint is not None:
            fingerprint = owner.shared_fingerprint(self.identity)
        admission = create_admission(self.admission, owner.key_bytes, _COUNTED_BLOCKS)
        tier = self.connect(owner, fingerprint, admission)
        try:
            tier.wait_until_open(self.start_s if owner.on_unavailable is None else self.engine_start_s)
        except UnavailableError as error:
            refusal = None if error.__cause__ is None else self.refusal(error.__cause__)
            if refusal is not None:
                tier.close()
                raise ConfigError("tier", tier.place, refusal) from None
            if owner.on_unavailable is None:
                tier.close()
                raise
            text = "kvoffload: tier %s does not answer yet; it is used when it answers: %s"
            LOGGER.error(text, self.name, error)
        return tier
