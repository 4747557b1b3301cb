"""`open_tier` opens every kind of tier, against real servers."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvoffload import (
    DiskTier,
    Keys,
    LookupResult,
    MemoryTier,
    SecondaryTier,
    StripedTier,
    TieredManager,
    open_tier,
)
from kvoffload.errors import UnavailableError
from support import s3_server
from support.refusals import refusal
from support.valkey_server import PATIENCE_S, Server, free_port, redis, running

BLOCK_BYTES, CAPACITY = 4096, 8
KEYS = Keys.pack([bytes([number]) * 32 for number in range(4)], 32)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(tmp_path_factory.mktemp("server"), program=redis()) as started:
        yield started


class Machine:
    """RAM with one tier behind it."""

    def __init__(self, tier: SecondaryTier) -> None:
        self.ram = MemoryTier(CAPACITY, BLOCK_BYTES)
        self.manager = TieredManager(
            CAPACITY, key_bytes=32, ram=self.ram, tiers=[tier], deadline_s=PATIENCE_S
        )

    def store(self) -> None:
        """Store blocks whose bytes are their numbers, and close."""
        blocks = np.repeat(np.arange(len(KEYS), dtype=np.uint8), BLOCK_BYTES).reshape(-1, BLOCK_BYTES)
        ctx = self.manager.begin_request("w", KEYS)
        plan = self.manager.prepare_store(KEYS, ctx)
        assert plan is not None
        self.ram.write(plan.keys, plan.slots, blocks, plan.rows)
        self.manager.complete_store(plan)
        self.manager.finish_request(ctx)
        assert self.manager.flush(PATIENCE_S)
        self.manager.close()

    def load(self) -> list[int]:
        """Load the blocks and close; return their first bytes."""
        ctx, until = self.manager.begin_request("r", KEYS), time.monotonic() + PATIENCE_S
        while (result := self.manager.lookup(KEYS, ctx)).stopped_by is LookupResult.RETRY:
            assert time.monotonic() < until
            self.manager.poll()
            time.sleep(0.001)
        plan = self.manager.prepare_load(KEYS[: result.num_ready], ctx)
        blocks = np.zeros((CAPACITY, BLOCK_BYTES), np.uint8)
        assert self.ram.read(plan.keys, plan.slots, blocks, np.arange(len(plan.keys))).all()
        self.manager.complete_load(plan)
        self.manager.close()
        return blocks[: len(plan.keys), 0].tolist()


def machine(url: str, fingerprint: str = "model") -> Machine:
    patient = {"url": url, "timeout": PATIENCE_S, "probe_timeout": PATIENCE_S}
    return Machine(open_tier(patient, block_bytes=BLOCK_BYTES, fingerprint=fingerprint))


def check_sharing(url: str) -> None:
    """Check that a second machine loads the blocks of the first, and a machine of another producer none."""
    machine(url).store()
    assert machine(url).load() == [0, 1, 2, 3]
    assert machine(url, "another model").load() == []


def test_a_server_is_opened_by_its_url(server: Server) -> None:
    check_sharing(f"{server.url}/open-tier")


@pytest.mark.slow
def test_a_bucket_is_opened_by_its_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3_server.KEY_ID)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", s3_server.SECRET)
    with s3_server.running(s3_server.Rclone, tmp_path) as bucket:
        check_sharing(f"s3://{s3_server.BUCKET}/ns?endpoint={bucket.endpoint}&region=us-east-1&pack=8KiB")


def test_a_disk_is_opened_by_its_text(tmp_path: Path) -> None:
    for _ in range(2):
        tier = open_tier(f"disk:{tmp_path}/a:1MiB,policy=arc", block_bytes=BLOCK_BYTES, fingerprint="model")
        assert isinstance(tier, DiskTier)
        assert tier.name == "disk"
        tier.close()
    striped = open_tier(f"disk:{tmp_path}/b|{tmp_path}/c:2MiB", block_bytes=BLOCK_BYTES, fingerprint="model")
    assert isinstance(striped, StripedTier)
    striped.close()


def test_a_refused_directory_leaves_no_directory_open(tmp_path: Path) -> None:
    (tmp_path / "c").write_text("")
    paths = [f"{tmp_path}/{name}" for name in "abc"]
    with refusal("c"):
        open_tier(f"disk:{'|'.join(paths)}:3MiB", block_bytes=BLOCK_BYTES, fingerprint="model")
    for path in paths[:2]:
        open_tier(f"disk:{path}:1MiB", block_bytes=BLOCK_BYTES, fingerprint="model").close()


def test_a_label_is_the_name(tmp_path: Path) -> None:
    tier = open_tier(f"disk:{tmp_path}:1MiB,label=slow", block_bytes=BLOCK_BYTES, fingerprint="model")
    assert tier.name == "slow"
    tier.close()


def test_a_server_that_does_not_answer_is_refused_or_used_later() -> None:
    url = f"valkey://127.0.0.1:{free_port()}/ns"
    with pytest.raises(UnavailableError, match="cannot be used now"):
        open_tier(url, block_bytes=BLOCK_BYTES, fingerprint="model")
    tier = open_tier(url, block_bytes=BLOCK_BYTES, fingerprint="model", must_answer=False)
    assert not tier.contains(KEYS).any()
    tier.close()


@pytest.mark.parametrize(
    ("description", "given", "message"),
    [
        ("tape:/dev/st0:1TiB", {}, "tape"),
        ("simulated:1MiB", {}, "stores no bytes"),
        ("valkey://cache/ns", {"fingerprint": ""}, "fingerprint: ''"),
        ("valkey://cache/ns", {"block_bytes": 0}, "block_bytes: 0"),
        ("valkey://cache/ns", {"key_bytes": "32"}, "key_bytes: '32'"),
    ],
)
def test_a_mistake_is_refused(description: str, given: dict[str, object], message: str) -> None:
    options: dict[str, object] = {"block_bytes": BLOCK_BYTES, "fingerprint": "model"}
    with refusal(message):
        open_tier(description, **(options | given))  # type: ignore[arg-type]
