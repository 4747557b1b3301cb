"""A client of a bucket, for tests."""

from __future__ import annotations

import time
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


STRIDE = HEADER_BYTES + BLOCK_BYTES


def digests(*numbers: int) -> Any:
    return some_keys(*numbers).digests


PATH = tuple(range(1, 24))
"""Five whole groups of four, and three blocks that are in none."""


class Client(SharingClient):
    """A machine: a tier, RAM, and a request whose path is `PATH`."""

    def __init__(
        self,
        port: int,
        *,
        fingerprint: str = "model",
        namespace: str = "ns",
        pack: int = PACK,
        most_at_once: int = 1,
        **options: Any,
    ) -> None:
        patient = {"timeout": PATIENCE_S, "probe_timeout": PATIENCE_S}
        described = S3Options(
            url=f"s3://{BUCKET}/{namespace}",
            endpoint=f"http://127.0.0.1:{port}",
            region="us-east-1",
            pack=pack * BLOCK_BYTES,
            **(patient | options),
        )
        tier: Any = described.open(TierOwner(BLOCK_BYTES, 36, fingerprint))
        tier.dialect.most_at_once = most_at_once  # rclone may answer 500 to one of several PUTs at once
        super().__init__(tier, BLOCK_BYTES, tier.begin_request("r"))
        tier.follow(self.record, some_keys(*PATH))

    def check(self, result: JobResult, *numbers: int) -> list[int]:
        for row, number in enumerate(numbers):
            is_right = bool((self.pool[row].view(np.uint16) == number).all())
            assert is_right or not result.ok[row], "a wrong block was served"
            assert is_right or (self.pool[row] == CANARY).all(), "what was not verified is in no row"
        assert (self.pool[len(numbers) :] == CANARY).all()
        return [number for number, ok in zip(numbers, result.ok, strict=True) if ok]

    def object(self, number: int) -> str:
        """The name of the object that a block is in."""
        epoch = self.tier.peer.epoch
        assert epoch is not None
        return object_name(epoch, self.tier.groups.parts(some_keys(number))[0].name)

    def try_again_now(self) -> None:
        """End all pauses."""
        self.tier.end_pauses()

    def come_back(self) -> None:
        """Wait until the tier is open."""
        until = time.monotonic() + PATIENCE_S
        while not self.tier.is_open("read"):
            self.try_again_now()
            assert time.monotonic() < until
            time.sleep(0.001)
