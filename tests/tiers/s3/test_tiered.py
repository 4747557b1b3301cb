"""Whole machines that share a bucket: managers with RAM in front of it, and replays; also while it dies."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvoffload.core.plans import LookupResult
from kvoffload.errors import ConfigError
from kvoffload.replay.data import DataPlane
from kvoffload.replay.replay import Replay, ReplayConfig
from kvoffload.replay.report import ReplayReport
from kvoffload.sweep.grid import Grid
from kvoffload.tiering.manager import TieredManager
from kvoffload.tiers.kinds.s3 import S3Options
from kvoffload.tiers.s3.protocol import S3
from kvoffload.tiers.spec import TierOwner, parse_tiers
from kvoffload.traces.sessions import generate
from kvoffload.traces.trace import Trace
from kvoffload.traces.workloads import builtin
from support.fault_proxy import FaultProxy
from support.run_cli import kvoffload
from support.s3_server import BUCKET, KEY_ID, PATIENCE_S, SECRET, Rclone, running
from support.sharing_rig import BLOCK_BYTES, CAPACITY, Machine, some_keys

HIT, MISS, RETRY = LookupResult.HIT, LookupResult.MISS, LookupResult.RETRY
PACK = 4


@pytest.fixture(scope="module")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rclone]:
    """A bucket of rclone, with one request at a time: it may answer 500 to one of several PUTs at once."""
    with (
        pytest.MonkeyPatch.context() as patched,
        running(Rclone, tmp_path_factory.mktemp("rclone")) as server,
    ):
        patched.setattr(S3, "most_at_once", 1)
        patched.setenv("AWS_ACCESS_KEY_ID", KEY_ID)
        patched.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
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
def make() -> Iterator[Callable[..., Machine]]:
    made: list[Machine] = []

    def one(port: int, pack: int = PACK, **options: Any) -> Machine:
        patient = {"timeout": PATIENCE_S, "probe_timeout": PATIENCE_S}
        made.append(
            Machine(
                S3Options(
                    url=f"s3://{BUCKET}/ns",
                    endpoint=f"http://127.0.0.1:{port}",
                    region="us-east-1",
                    pack=pack * BLOCK_BYTES,
                    **(patient | options),
                )
            )
        )
        return made[-1]

    yield one
    for machine in made:
        machine.manager.close(PATIENCE_S)


@pytest.mark.parametrize("pack", [0, PACK])
def test_the_first_request_of_a_machine_hits_what_another_has_computed(
    server: Rclone, make: Callable[..., Machine], pack: int
) -> None:
    first, second = make(server.port, pack), make(server.port, pack)
    assert first.serve(*range(1, 23)) == 0
    first.rest()
    found = 22 if pack == 0 else 20
    assert second.serve(*range(1, 28)) == found, "what is left at the end of a path is in no object"
    assert second.manager.hit_blocks == [0, found]
    second.rest()
    assert second.tier.stats().written == (5 if pack == 0 else 4)
    assert first.serve(*range(1, 23)) == 22
    assert first.manager.hit_blocks == [22, 0]


def test_groups_that_are_stored_piece_by_piece_are_written_at_the_end(
    server: Rclone, make: Callable[..., Machine]
) -> None:
    """As engines do: a prompt is computed in chunks, an answer block by block."""
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


def test_what_waits_for_its_turn_is_written_in_whole_groups(
    server: Rclone, make: Callable[..., Machine]
) -> None:
    """There is room for one object and a half at a time."""
    first, second = make(server.port), make(server.port)
    for machine in (first, second):
        machine.tier.jobs.in_flight_bytes = 6 * BLOCK_BYTES
    first.serve(*range(1, 25))
    first.rest()
    assert first.tier.stats().written == 24
    assert second.serve(*range(1, 25)) == 24
    first.serve(*range(1, 23), *range(101, 112))
    first.rest()
    assert first.tier.stats().written == 24 + 8, "from the sixth group on it is another path"


def test_a_part_of_an_object_is_read_when_ram_has_the_rest(
    server: Rclone, make: Callable[..., Machine]
) -> None:
    first, second = make(server.port), make(server.port)
    first.serve(*range(1, 13))
    first.rest()
    second.serve(1, 2, 3, 4, 5, 6)  # of the second object what lies on this path is not there
    second.rest()
    assert second.manager.hit_blocks == [0, 4]
    assert second.serve(*range(1, 13)) == 12
    assert second.manager.hit_blocks == [6, 10]


def test_key_by_key_as_vllm_asks(server: Rclone, make: Callable[..., Machine]) -> None:
    first, second = make(server.port), make(server.port)
    first.serve(*range(1, 21))
    first.rest()
    ctx = second.manager.begin_request("r", some_keys(*range(1, 25)))
    until = time.monotonic() + PATIENCE_S
    while RETRY in (found := [second.manager.lookup_key(key, ctx) for key in some_keys(*range(1, 25))]):
        second.manager.poll()
        assert time.monotonic() < until
        time.sleep(0.0005)
    assert found == [HIT] * 20 + [MISS] * 4
    assert second.tier.stats().probes == 24, "each block was asked for once"


def test_a_reset_of_one_is_a_reset_for_all(server: Rclone, make: Callable[..., Machine]) -> None:
    first, second = make(server.port), make(server.port)
    first.serve(*range(1, 21))
    first.rest()
    second.manager.reset(drop_in_flight=True)
    assert second.serve(*range(1, 21)) == 0
    assert first.serve(*range(1, 21)) == 20, "its own RAM is its own affair"
    first.manager.reset(drop_in_flight=True)
    assert first.serve(*range(1, 21)) == 0


def test_an_object_that_is_larger_than_what_ram_may_have_on_its_way_is_refused(server: Rclone) -> None:
    options = S3Options(
        url=f"s3://{BUCKET}/ns", endpoint=server.endpoint, region="us-east-1", pack=16 * BLOCK_BYTES
    )
    tier = options.open(TierOwner(BLOCK_BYTES, 36, "model"))
    from kvoffload.tiers.memory import MemoryTier

    with pytest.raises(ConfigError, match="tier s3: 'objects of 16 blocks' is invalid; RAM of 32"):
        TieredManager(CAPACITY, key_bytes=36, ram=MemoryTier(CAPACITY, BLOCK_BYTES), tiers=[tier])
    tier.close()


@pytest.mark.slow
def test_a_server_that_hangs_and_dies_under_load_costs_hits_and_nothing_else(
    tmp_path: Path, make: Callable[..., Machine]
) -> None:
    """Every request is answered with its own bytes; afterwards the server is used again."""
    with running(Rclone, tmp_path) as server:
        machines = [make(server.port, timeout=0.5, probe_timeout=0.3) for _ in range(2)]
        chance = np.random.default_rng(7)
        over = threading.Event()
        problems: list[BaseException] = []

        def load(machine: Machine, seed: int) -> None:
            random = np.random.default_rng(seed)
            try:
                while not over.is_set():
                    machine.serve(*range(1, 4 + int(random.integers(1, 24))))
            except BaseException as problem:
                problems.append(problem)

        threads = [threading.Thread(target=load, args=(one, n)) for n, one in enumerate(machines)]
        for thread in threads:
            thread.start()
        for _ in range(2):
            with server.stopped():
                time.sleep(float(chance.uniform(0.1, 0.5)))
            time.sleep(0.2)
            server.stop()
            time.sleep(0.2)
            server.start()
            time.sleep(0.5)
        over.set()
        for thread in threads:
            thread.join()
        assert not problems
        until = time.monotonic() + PATIENCE_S
        for one in machines:
            one.rest()
            assert one.tier.stats().mismatches == 0
            assert one.manager.stats().writing == 0
            while not one.tier.is_open("read"):
                one.tier.end_pauses()
                assert time.monotonic() < until


# ---- replays


@pytest.fixture(scope="module")
def few_chats() -> Trace:
    return generate(builtin("chat", sessions=25))


def replay(trace: Trace, port: int, namespace: str, more: str) -> ReplayReport:
    url = f"s3://{BUCKET}/{namespace}?endpoint=http://127.0.0.1:{port}&region=us-east-1{more}"
    data = DataPlane(40, BLOCK_BYTES)
    try:
        return Replay(trace, ReplayConfig(40, tiers=parse_tiers("tiers", url)), data).run()
    finally:
        data.close()


@pytest.fixture(scope="module")
def single(shared_server: Rclone, few_chats: Trace) -> ReplayReport:
    """A replay with an object for each block."""
    return replay(few_chats, shared_server.port, "single", "&pack=0")


@pytest.mark.slow
def test_a_replay_with_an_object_for_each_block_is_one_with_a_tier_that_holds_all(
    single: ReplayReport, few_chats: Trace
) -> None:
    planned = Replay(few_chats, ReplayConfig(40, tiers=parse_tiers("tiers", "1000000"))).run()
    assert single.mismatches_served == 0
    assert single.prefix_hit_ratio == planned.prefix_hit_ratio
    assert single.tiers[1].name == "s3"
    assert single.tiers[1].hit_blocks == planned.tiers[1].hit_blocks > 0


@pytest.mark.slow
def test_a_replay_with_packed_objects_has_fewer_requests_and_the_ends_of_paths_less(
    shared_server: Rclone, single: ReplayReport, few_chats: Trace
) -> None:
    packed = replay(few_chats, shared_server.port, "packed", "&pack=16KiB")
    assert packed.mismatches_served == packed.tiers[1].mismatches_caught == 0
    assert 0 < packed.tiers[1].hit_blocks <= single.tiers[1].hit_blocks
    assert packed.tiers[1].requests < single.tiers[1].requests / 2
    assert 0 < packed.tiers[1].cost < single.tiers[1].cost / 2
    again = replay(few_chats, shared_server.port, "packed", "&pack=16KiB")
    assert again.prefix_hit_ratio > packed.prefix_hit_ratio, "it starts warm"


@pytest.mark.slow
def test_a_replay_through_a_bad_network_serves_nothing_wrong(shared_server: Rclone, few_chats: Trace) -> None:
    with FaultProxy(shared_server.port) as proxy:
        proxy.set(flip_at=300_001)
        assert replay(few_chats, proxy.port, "bad-network", "&pack=16KiB").mismatches_served == 0


def test_the_command(server: Rclone, tmp_path: Path) -> None:
    trace = tmp_path / "small.jsonl"
    kvoffload("trace", "generate", "chat", "--sessions", "40", "--output", trace)
    arguments = ("replay", trace, "--capacity", "60", "--block-bytes", "4KiB", "--quiet", "--format", "json")
    url = f"s3://{BUCKET}/ns?endpoint={server.endpoint}&region=us-east-1&pack=16KiB"
    done = kvoffload(*arguments, "--tier", url)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert [tier["name"] for tier in report["tiers"]] == ["ram", "s3"]
    assert report["tiers"][1]["hit_blocks"] > 0
    assert report["tiers"][1]["cost"] > 0
    done = kvoffload(*arguments, "--tier", "s3://me:hunter2@bucket/n")
    assert done.returncode != 0
    assert "s3://***@bucket/n" in done.stderr
    assert "hunter2" not in done.stderr + done.stdout
    assert "Traceback" not in done.stderr


def test_what_has_no_bytes_has_no_bucket() -> None:
    with pytest.raises(ConfigError, match="use simulated:CAPACITY"):
        parse_tiers("t", "s3://bucket/n")[0].open(TierOwner(0, 8, "m"))
    with pytest.raises(ConfigError, match="a sweep replays without bytes; allowed: simulated:CAPACITY"):
        Grid(("lru",), tiers=("s3://bucket/n",))
