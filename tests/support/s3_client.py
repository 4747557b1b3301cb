"""A machine that shares blocks in a bucket, for tests."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvoffload.tiers.contract import JobResult
from kvoffload.tiers.kinds.s3 import S3Options
from kvoffload.tiers.s3.protocol import object_name
from kvoffload.tiers.shared.identity import HEADER_BYTES
from kvoffload.tiers.spec import TierOwner
from support.s3_server import BUCKET, PATIENCE_S
from support.sharing_client import CANARY, SharingClient, some_keys

BLOCK_BYTES, PACK = 24 * 1024, 4
"""Bytes of a block; blocks in an object."""
STRIDE = HEADER_BYTES + BLOCK_BYTES
PATH = tuple(range(1, 24))
"""Five whole groups of four blocks, and three blocks without a group."""


def s3_options(port: int, *, namespace: str = "ns", **options: Any) -> S3Options:
    """Return options for the bucket of a test's server. The deadlines are `PATIENCE_S` by default."""
    patient = {"timeout": PATIENCE_S, "probe_timeout": PATIENCE_S}
    url, endpoint = f"s3://{BUCKET}/{namespace}", f"http://127.0.0.1:{port}"
    return S3Options(url=url, endpoint=endpoint, region="us-east-1", **(patient | options))


class Client(SharingClient):
    """A machine: a tier, RAM, and a request whose path is `PATH`."""

    def __init__(
        self,
        port: int,
        *,
        fingerprint: str = "model",
        pack: int = PACK,
        most_at_once: int = 1,
        on_unavailable: Any = None,
        **options: Any,
    ) -> None:
        described = s3_options(port, pack=pack * BLOCK_BYTES, **options)
        owner = TierOwner(BLOCK_BYTES, 36, fingerprint, on_unavailable=on_unavailable)
        tier: Any = described.open(owner)
        tier.dialect.most_at_once = most_at_once  # rclone may answer 500 to one of several PUTs at once
        super().__init__(tier, BLOCK_BYTES, tier.begin_request("r"))
        tier.extend_path(self.record, some_keys(*PATH))

    def check(self, result: JobResult, *numbers: int) -> list[int]:
        for row, number in enumerate(numbers):
            is_right = (self.pool[row].view(np.uint16) == number).all()
            assert is_right or (self.pool[row] == CANARY).all(), "unverified bytes are in a row"
        return super().check(result, *numbers)

    def object(self, number: int) -> str:
        """Return the name of the object with a block."""
        epoch = self.tier.peer.epoch
        assert epoch is not None
        return object_name(epoch, self.tier.groups.parts(some_keys(number))[0].name)

    def names(self, number: int) -> list[str]:
        return [self.object(number)]

    def epoch_key(self, number: int) -> str:
        name: bytes = self.tier.peer.keyspace.epoch_keys[0]
        return name.decode()
