"""Adapters of kvoffload's shared tiers to `contract`: a Valkey server, and a bucket."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from kvoffload.structures.keys import Keys
from kvoffload.tiers.contract import NO_JOB
from kvoffload.tiers.kinds.s3 import S3Options
from kvoffload.tiers.kinds.valkey import ValkeyOptions
from kvoffload.tiers.producer_text import producer_of
from kvoffload.tiers.s3 import protocol
from kvoffload.tiers.shared import identity
from kvoffload.tiers.shared.groups import BlockGroups
from kvoffload.tiers.shared.identity import SingleEpoch
from kvoffload.tiers.spec import TierOptions, TierOwner
from peers.contract import KEY_BYTES, TIMEOUT_S, Adapter, Place, page_aligned, until_ended
from peers.doors import BUCKET, Object, Values, ask, namespace, server
from peers.kvoffload_tier import KvoffloadTier, keys_of


class KvoffloadShared(KvoffloadTier):
    """A `Product` without the location of its blocks."""

    def __init__(self, directory: Path, model: str, block_bytes: int, num_blocks: int) -> None:
        self.pool = page_aligned(num_blocks, block_bytes)
        self._namespace, self._producer = namespace(directory), producer_of(model)
        self._tier: Any = self._options().open(TierOwner(block_bytes, KEY_BYTES, model))

    @abstractmethod
    def _options(self) -> TierOptions: ...

    @abstractmethod
    def _media(self, keys: Keys) -> Sequence[Values | Object]:
        """Locate blocks in the current epoch."""

    def read(self, numbers: Sequence[int], blocks_per_job: int) -> list[bool]:
        """Probe unknown blocks first, as a scheduler does."""
        keys = keys_of(numbers)
        unknown = keys.take(self._tier.unknown(keys).nonzero()[0])
        if len(unknown) and (job := self._tier.submit_probe(unknown)) != NO_JOB:
            jobs = {job}
            until_ended(jobs, lambda: jobs.difference_update(result.job for result in self._tier.finished()))
        return super().read(numbers, blocks_per_job)

    def forget(self, numbers: Sequence[int]) -> None:
        """Reset the tier, which never deletes single sound blocks."""
        self._tier.clear()
        assert self._tier.drain(TIMEOUT_S)

    def places(self, numbers: Sequence[int]) -> dict[int, Place]:
        """Locate existing blocks, with their headers."""
        media = zip(numbers, self._media(keys_of(numbers)), strict=True)
        return {number: Place(medium, 0, size) for number, medium in media if (size := medium.size())}

    def records(self) -> list[Place]:
        return []


class KvoffloadValkey(KvoffloadShared):
    """A `Product`: kvoffload's Valkey tier."""

    def _options(self) -> TierOptions:
        url = f"valkey://127.0.0.1:{server()}/{self._namespace}"
        return ValkeyOptions(url=url, timeout=TIMEOUT_S, probe_timeout=TIMEOUT_S)

    def forget(self, numbers: Sequence[int]) -> None:
        """Reset the tier and delete the values, so that the server has as much memory as with others."""
        for value in self._media(keys_of(numbers)):
            ask(value.port, b"DEL", *value.names)
        super().forget(numbers)

    def _media(self, keys: Keys) -> Sequence[Values]:
        port = int(server())
        number = ask(port, b"GET", identity.epoch_name(self._namespace, self._producer)) or b"0"
        epoch = SingleEpoch(self._namespace, self._producer, int(number, 16))
        names = epoch.names(keys)
        return [Values(port, both) for both in zip(names, identity.rest_names(names), strict=True)]


class KvoffloadS3(KvoffloadShared):
    """A `Product`: kvoffload's S3 tier."""

    def _options(self) -> TierOptions:
        return S3Options(
            url=f"s3://{BUCKET}/{self._namespace}",
            endpoint=server(),
            region="us-east-1",
            pack=0,
            timeout=TIMEOUT_S,
            probe_timeout=TIMEOUT_S,
        )

    def _media(self, keys: Keys) -> Sequence[Object]:
        name = protocol.epoch_name(self._namespace, self._producer).decode()
        epoch = SingleEpoch(self._namespace, self._producer, int(Object(server(), name).read(0, 16), 16))
        names = [protocol.object_name(epoch, group.name) for group in BlockGroups(1).parts(keys)]
        return [Object(server(), name) for name in names]


ADAPTERS = {
    "kvoffload-valkey": Adapter(version("kvoffload"), "`valkey://`, time-outs of 300 s", KvoffloadValkey),
    "kvoffload-s3": Adapter(version("kvoffload"), "`s3://`, an object for each block", KvoffloadS3),
}
