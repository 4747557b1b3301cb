"""Batches of a bucket with failed requests, and handshakes overtaken by a reset. Uses no network."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import numpy as np
import pytest

from kvoffload.structures.keys import Keys
from kvoffload.tiers.s3.bucket import Bucket, BucketError, Found, Ledger, Prices
from kvoffload.tiers.s3.protocol import s3_tier
from kvoffload.tiers.shared.remote_tier import RemoteTier
from kvoffload.tiers.shared.server import RemoteOptions

PATIENCE_S, BLOCK_BYTES = 60.0, 4096
FREE = Prices(0, 0, 0)
OPTIONS = RemoteOptions(namespace="p", fingerprint="producer", block_bytes=BLOCK_BYTES)
KEYS = Keys.pack([bytes([number]) * 36 for number in range(2)], 36)

Before = Callable[[str, str], Awaitable[None]]


class Objects:
    """A bucket in memory. `before` is awaited before each request, with its method and object."""

    def __init__(self) -> None:
        self.held: dict[str, bytes] = {}
        self.methods: list[str] = []
        self.before: Before | None = None

    def names(self, word: str) -> list[str]:
        return sorted(name for name in self.held if word in name)

    async def ask(self, method: str, name: str) -> None:
        self.methods.append(method)
        if self.before is not None:
            await self.before(method, name)


class Unsigned:
    """A signer that signs nothing, because no request leaves the process."""

    def refresh(self, refused: int | None = None) -> bool:
        return False


class MemoryBucket(Bucket):
    """A bucket whose requests go to `Objects`."""

    def __init__(self, objects: Objects) -> None:
        super().__init__(Unsigned(), Ledger(FREE))  # type: ignore[arg-type]
        self.objects = objects

    async def get(self, name: str, span: Any, receiver: Any) -> Found:
        await self.objects.ask("GET", name)
        if name not in self.objects.held:
            return Found.ABSENT
        data = memoryview(self.objects.held[name])
        if len(data) != span.size:
            return Found.OTHER_SIZE
        data = data[span.begin : span.end]
        while len(data):
            room = receiver.room()
            count = min(len(room), len(data))
            room[:count] = data[:count]
            receiver.add(count)
            data = data[count:]
        return Found.WHOLE

    async def size(self, name: str) -> int | None:
        await self.objects.ask("HEAD", name)
        return len(self.objects.held[name]) if name in self.objects.held else None

    async def put(self, name: str, length: int, pieces: Any, *, only_new: bool = False) -> None:
        await self.objects.ask("PUT", name)
        if not (only_new and name in self.objects.held):
            self.objects.held[name] = b"".join(bytes(piece) for piece in pieces())

    async def delete(self, name: str) -> None:
        await self.objects.ask("DELETE", name)
        self.objects.held.pop(name, None)


@pytest.fixture
def objects() -> Objects:
    return Objects()


@pytest.fixture
def tier(objects: Objects) -> Iterator[RemoteTier]:
    made = s3_tier(
        "s3",
        "bucket/p",
        lambda deadline: MemoryBucket(objects),
        dataclasses.replace(OPTIONS, timeout_s=PATIENCE_S, probe_timeout_s=PATIENCE_S),
        ledger=Ledger(FREE),
    )
    yield made
    made.close()


def result(tier: RemoteTier, job: int) -> Any:
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        for result in tier.finished():
            if result.job == job:
                return result
        time.sleep(0.001)
    raise AssertionError("the job does not end")


def write(tier: RemoteTier) -> None:
    tier.wait_until_open(PATIENCE_S)
    job, taken = tier.submit_write(KEYS, np.full((2, BLOCK_BYTES), 7, np.uint8), np.arange(2))
    assert taken.all()
    assert result(tier, job).ok.all()


@pytest.mark.parametrize("how", ["hangs", "500"])
def test_read_overtaken_by_a_reset_serves_nothing(objects: Objects, tier: RemoteTier, how: str) -> None:
    """An object from before a confirmed reset arrives, and the request for the other object fails."""
    write(tier)
    (epoch,) = objects.names("/epochs/")
    objects.held[epoch] = b"%016x" % 12345  # the reset of another machine
    second = objects.names("/blocks/")[1]
    if how == "hangs":
        tier.options = dataclasses.replace(tier.options, timeout_s=2.0)

    async def fail(method: str, name: str) -> None:
        if name == second and method == "GET":
            if how == "hangs":
                await asyncio.sleep(PATIENCE_S)
            raise BucketError("InternalError", "500")

    objects.before = fail
    out = np.zeros((2, BLOCK_BYTES), np.uint8)
    assert not result(tier, tier.submit_read(KEYS, out, np.arange(2))).ok.any()
    objects.before = None
    tier.wait_until_open(PATIENCE_S)
    assert tier.peer.epoch is not None
    assert tier.peer.epoch.number == 12345, "the tier has noticed the reset"


@pytest.mark.parametrize(("code", "status"), [("QuotaExceeded", "403"), ("SlowDown", "503"), ("507", "507")])
def test_writes_to_a_full_bucket_are_dropped_and_pause(
    objects: Objects, tier: RemoteTier, code: str, status: str
) -> None:
    async def refuse(method: str, name: str) -> None:
        if method == "PUT" and "/blocks/" in name:
            raise BucketError(code, status)

    objects.before = refuse
    tier.wait_until_open(PATIENCE_S)
    block = np.full((2, BLOCK_BYTES), 7, np.uint8)
    job, taken = tier.submit_write(KEYS, block, np.arange(2))
    assert taken.all()
    assert not result(tier, job).ok.any()
    assert (tier.stats().dropped, tier.stats().failed) == (2, 0)
    assert not tier.submit_write(KEYS, block, np.arange(2))[1].any(), "writes pause"


def test_cost_begins_at_zero_and_has_all_prices() -> None:
    ledger = Ledger(Prices(per_1000_puts=3000.0, per_1000_gets=500.0, per_gb_read=2e9))
    assert ledger.cost == 0
    ledger.add(puts=1, gets=10, bytes_received=100)
    assert ledger.cost == pytest.approx(1 * 3.0 + 10 * 0.5 + 100 * 2.0)


def test_failed_request_is_not_repeated(objects: Objects, tier: RemoteTier) -> None:
    write(tier)

    async def fail(method: str, name: str) -> None:
        if method == "HEAD":
            raise ConnectionResetError("cut")

    objects.before = fail
    objects.methods.clear()
    assert not result(tier, tier.submit_probe(KEYS)).ok.any()
    assert objects.methods.count("HEAD") <= 2, "a HEAD for each object"


def test_late_handshake_does_not_end_the_new_epoch(objects: Objects) -> None:
    """A reset on another connection ends before the reply to a slow handshake."""
    may_go_on = False
    has_begun = False

    async def slow(method: str, name: str) -> None:
        nonlocal has_begun
        if "/epochs/" in name and method == "GET" and not has_begun:
            has_begun = True
            while not may_go_on:
                await asyncio.sleep(0.001)

    objects.before = slow
    tier = s3_tier(
        "s3",
        "bucket/p",
        lambda deadline: MemoryBucket(objects),
        OPTIONS,
        ledger=Ledger(FREE),
    )
    try:
        deadline = time.monotonic() + PATIENCE_S
        while not has_begun and time.monotonic() < deadline:
            time.sleep(0.001)
        first = tier.peer.handshake
        assert first is not None
        tier.clear()
        assert tier.drain(PATIENCE_S)
        assert tier.peer.epoch is not None
        number = tier.peer.epoch.number
        may_go_on = True
        while not first.ended and time.monotonic() < deadline:
            time.sleep(0.001)
        tier.finished()
        assert not tier.peer.history.has_ended(number, time.monotonic())
        assert not tier.peer.history.is_outdated(number, 0.0)
    finally:
        may_go_on = True
        tier.close()


def test_request_that_swallows_cancellations_ends(objects: Objects) -> None:
    """Before Python 3.12 `asyncio.wait_for` does so when its task has just ended."""
    num_cancelled = 0

    async def stubborn() -> None:
        nonlocal num_cancelled
        while num_cancelled < 3:
            try:
                await asyncio.sleep(PATIENCE_S)
            except asyncio.CancelledError:
                num_cancelled += 1

    bucket = MemoryBucket(objects)
    begun = time.monotonic()
    with pytest.raises(TimeoutError):
        bucket.run([stubborn()], begun + 0.01)
    assert num_cancelled == 3
    assert time.monotonic() - begun < PATIENCE_S / 2
    bucket.close()


@pytest.mark.parametrize("last", [0.0, PATIENCE_S], ids=["all fail", "one is late"])
def test_exceptions_of_all_requests_are_read(
    objects: Objects, caplog: pytest.LogCaptureFixture, last: float
) -> None:
    """Asyncio logs a traceback for each unread exception."""

    async def fail(delay_s: float) -> None:
        await asyncio.sleep(delay_s)
        raise BucketError("InternalError", "500")

    bucket = MemoryBucket(objects)
    with pytest.raises(TimeoutError if last else BucketError):
        bucket.run([fail(0), fail(0), fail(last)], time.monotonic() + (0.05 if last else PATIENCE_S))
    bucket.close()
    del bucket
    gc.collect()
    assert not caplog.records
