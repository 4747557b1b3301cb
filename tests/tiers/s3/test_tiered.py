"""Whole machines before a bucket: the contract of tiered managers, and objects with several blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from kvoffload.tiering.tiered_manager import TieredManager
from kvoffload.tiers.kinds.s3 import S3Options
from kvoffload.tiers.memory import MemoryTier
from kvoffload.tiers.s3.protocol import S3
from kvoffload.tiers.spec import TierOwner
from kvoffload.traces.sessions import generate
from kvoffload.traces.trace import Trace
from kvoffload.traces.workloads import builtin
from support.refusals import refusal
from support.s3_client import s3_options
from support.s3_server import BUCKET, KEY_ID, SECRET, Rclone, running
from support.sharing_rig import BLOCK_BYTES, CAPACITY, Machine, some_keys
from support.tiered_contract import TieredContract, replay

PACK = 4
"""Blocks in an object."""


@pytest.fixture(scope="module")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rclone]:
    with running(Rclone, tmp_path_factory.mktemp("rclone")) as server:
        assert isinstance(server, Rclone)
        yield server


@pytest.fixture
def server(shared_server: Rclone) -> Rclone:
    shared_server.empty()
    return shared_server


@pytest.fixture(autouse=True)
def keys_to_the_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY_ID)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[Rclone]:
    with running(Rclone, tmp_path) as server:
        assert isinstance(server, Rclone)
        yield server


@pytest.fixture(autouse=True)
def one_request_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rclone may answer 500 to one of several PUTs at once."""
    monkeypatch.setattr(S3, "most_at_once", 1)


@pytest.fixture(scope="module")
def trace() -> Trace:
    return generate(builtin("chat", sessions=25))


class TestTieredBucket(TieredContract):
    kind = "s3"
    timeouts = (0.5, 0.3)
    network_faults: ClassVar = [{"flip_at": 300_001}]

    def described(self, port: int, pack: int = PACK, **options: Any) -> S3Options:
        return s3_options(port, pack=pack * BLOCK_BYTES, **options)

    def url(self, port: int, namespace: str, pack: str = "16KiB") -> str:
        endpoint = f"http://127.0.0.1:{port}"
        return f"s3://{BUCKET}/{namespace}?endpoint={endpoint}&region=us-east-1&pack={pack}"

    def whole(self, num_blocks: int) -> int:
        return num_blocks - num_blocks % PACK

    def test_first_request_hits_blocks_of_another_machine_without_packing(
        self, server: Rclone, make: Callable[..., Machine]
    ) -> None:
        first, second = make(server.port, pack=0), make(server.port, pack=0)
        assert first.serve(*range(1, 23)) == 0
        first.rest()
        assert second.serve(*range(1, 28)) == 22
        assert second.manager.hit_blocks == [0, 22]
        second.rest()
        assert second.tier.stats().written == 5
        assert first.serve(*range(1, 23)) == 22
        assert first.manager.hit_blocks == [22, 0]

    @pytest.mark.slow
    def test_replays_with_and_without_packed_objects(self, server: Rclone, trace: Trace) -> None:
        """Packed objects need fewer requests and lack the blocks at the end of paths."""
        single = replay(trace, self.url(server.port, "single", pack="0"))
        self.check_replay(single, trace)
        url = self.url(server.port, "packed")
        packed = replay(trace, url)
        assert packed.mismatches_served == packed.tiers[1].mismatches_caught == 0
        assert 0 < packed.tiers[1].hit_blocks <= single.tiers[1].hit_blocks
        assert packed.tiers[1].requests < single.tiers[1].requests / 2
        assert 0 < packed.tiers[1].cost < single.tiers[1].cost / 2
        assert replay(trace, url).prefix_hit_ratio > packed.prefix_hit_ratio, "the bucket has the blocks"

    def test_command(self, server: Rclone, tmp_path: Path) -> None:
        assert self.check_command(server, tmp_path)["cost"] > 0

    def test_groups_stored_piece_by_piece_are_written_at_the_end(
        self, server: Rclone, make: Callable[..., Machine]
    ) -> None:
        """Engines compute a prompt in chunks, and an answer block by block."""
        first, second = make(server.port), make(server.port)
        ctx = first.manager.begin_request("r", some_keys(1, 2, 3))
        for chunk in ([1, 2, 3], [4, 5], [6], [7], [8], [9]):
            plan = first.manager.prepare_store(some_keys(*chunk), ctx)
            assert plan is not None
            for key, slot in zip(plan.keys, plan.slots.tolist(), strict=True):
                first.ram.pool[slot].view(np.uint16)[:] = int.from_bytes(key, "big")
            first.ram.seal(plan.keys, plan.slots)
            first.manager.complete_store(plan)
        first.rest()
        assert first.tier.stats().written == 0
        first.manager.finish_request(ctx)
        first.rest()
        assert first.tier.stats().written == 8
        assert second.serve(*range(1, 12)) == 8

    def test_queued_writes_are_whole_groups(self, server: Rclone, make: Callable[..., Machine]) -> None:
        """The bytes in flight have room for 1.5 objects."""
        first, second = make(server.port), make(server.port)
        for machine in (first, second):
            machine.tier.jobs.in_flight_bytes = 6 * BLOCK_BYTES
        first.serve(*range(1, 25))
        first.rest()
        assert first.tier.stats().written == 24
        assert second.serve(*range(1, 25)) == 24
        first.serve(*range(1, 23), *range(101, 112))
        first.rest()
        assert first.tier.stats().written == 24 + 8, (
            "the second path has other groups from the sixth group on"
        )

    def test_part_of_an_object_is_read_when_ram_has_the_rest(
        self, server: Rclone, make: Callable[..., Machine]
    ) -> None:
        first, second = make(server.port), make(server.port)
        first.serve(*range(1, 13))
        first.rest()
        second.serve(1, 2, 3, 4, 5, 6)  # the path ends in the middle of the second object
        second.rest()
        assert second.manager.hit_blocks == [0, 4]
        assert second.serve(*range(1, 13)) == 12
        assert second.manager.hit_blocks == [6, 10]

    def test_objects_larger_than_the_blocks_in_flight_are_refused(self, server: Rclone) -> None:
        tier = self.described(server.port, pack=16).open(TierOwner(BLOCK_BYTES, 36, "model"))
        with refusal("tier s3: 'objects of 16 blocks' is invalid; RAM of 32"):
            TieredManager(CAPACITY, key_bytes=36, ram=MemoryTier(CAPACITY, BLOCK_BYTES), tiers=[tier])
        tier.close()
