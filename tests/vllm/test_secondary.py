"""Our disk behind vLLM's RAM tier: made by vLLM's factory, driven like its tiering manager does."""

from __future__ import annotations

import itertools
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from support.vllm_needs import POLLED_TIERS, SECONDARY, lacks, needs

if reason := lacks(*SECONDARY):
    pytest.skip(reason, allow_module_level=True)

from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingCounterMetadata,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
    make_offload_key,
)
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
from vllm.v1.kv_offload.tiering.manager import CPUPrimaryTierOffloadingManager, TieringOffloadingManager
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from kvoffload.errors import ConfigError
from kvoffload.structures.keys import Keys
from support import s3_server
from support.valkey_server import Server, running
from support.vllm_traffic import PATIENCE_S

HIT, MISS, RETRY = LookupResult.HIT, LookupResult.MISS, LookupResult.RETRY
BLOCK_BYTES, NUM_SLOTS = 8192, 32


def config(model: str, tier: dict[str, Any]) -> OffloadingConfig:
    return OffloadingConfig(
        groups=(OffloadingGroupConfig(16, ("layer",), 0),),
        worker_kv_bytes_per_block=BLOCK_BYTES,
        enable_kv_cache_events=False,
        extra_config={"cpu_bytes_to_use": NUM_SLOTS * BLOCK_BYTES, "secondary_tiers": [tier]},
        engine_id="test",
        model=OffloadingModelConfig(model, "bfloat16"),
        cache=OffloadingCacheConfig(16, 1),
        parallel=OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, 1, None, True),
    )


def key(number: int) -> bytes:
    return bytes(make_offload_key(number.to_bytes(32, "big"), 0))


def vllm_config(model: str, rope_theta: float) -> Any:
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(engine_id="test"),
        model_config=SimpleNamespace(model=model, hf_config=SimpleNamespace(rope_theta=rope_theta)),
        cache_config=SimpleNamespace(),
    )


def made_by_a_connector(vllm_config: Any, tier: dict[str, Any], pool: Any, spec: Any) -> Any:
    """Make a tier like vLLM: the frame of a caller has the engine's configuration."""
    return SecondaryTierFactory.create_secondary_tier(tier, pool.data, spec)


class Life:
    """A tier from its opening to its close, with empty RAM."""

    def __init__(
        self, path: Path | None, model: str = "model", rope_theta: float = 1e4, **options: Any
    ) -> None:
        self.pool = np.zeros((NUM_SLOTS, BLOCK_BYTES), np.uint8)
        tier = {
            "type": "KVOffloadDisk" if path else "KVOffloadTier",
            "module_path": "kvoffload.integrations.vllm.secondary",
            **({"path": str(path), "capacity": "2MiB"} if path else {}),
            **options,
        }
        self.spec = TieringOffloadingSpec(config(model, tier))
        self.tier: Any = made_by_a_connector(vllm_config(model, rope_theta), tier, self.pool, self.spec)
        self.numbers = itertools.count()
        self.ctx = ReqContext("r")
        self.tier.on_new_request(self.ctx)

    def run(self, numbers: Sequence[int], *, load: bool) -> Any:
        job = TransferJob(
            job_id=next(self.numbers),
            keys=[key(number) for number in numbers],
            chunk_ids=np.arange(len(numbers), dtype=np.int32),
            is_promotion=load,
            req_context=self.ctx,
        )
        (self.tier.submit_load if load else self.tier.submit_store)(job)
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            for result in self.tier.get_finished_jobs():
                assert result.job_id == job.job_id
                return result
            assert self.tier.has_pending_work()
        raise AssertionError("the job does not end")

    def store(self, numbers: Sequence[int]) -> Any:
        for row, number in enumerate(numbers):
            self.pool[row] = number
        return self.run(numbers, load=False)

    def load(self, numbers: Sequence[int]) -> list[int]:
        """Load blocks, and check their bytes; returns the numbers of the blocks that vLLM may use."""
        self.pool[:] = 0xEE
        result = self.run(numbers, load=True)
        good = {*map(key, numbers)} if result.success else {*(result.successful_keys or ())}
        for row, number in enumerate(numbers):
            if key(number) in good:
                assert (self.pool[row] == number).all()
        return [number for number in numbers if key(number) in good]

    def lookup(self, numbers: Sequence[int]) -> list[Any]:
        return [self.tier.lookup(key(number), self.ctx) for number in numbers]


def test_blocks_are_loaded_in_this_life_and_the_next(tmp_path: Path) -> None:
    life = Life(tmp_path)
    assert life.lookup([1, 2]) == [MISS, MISS]
    assert life.store([1, 2, 3]).success
    assert life.store([1, 2, 3]).success, "a store of present blocks succeeds"
    assert life.lookup([1, 4]) == [HIT, MISS]
    assert life.load([3, 1]) == [3, 1]
    life.tier.on_request_finished(life.ctx)
    life.tier.shutdown()
    again = Life(tmp_path)
    assert again.lookup([1, 2, 3, 4]) == [HIT, HIT, HIT, MISS]
    assert again.load([1, 2, 3]) == [1, 2, 3]
    assert again.load([1, 9]) == [1], "an absent block is not reported as loaded"
    again.tier.shutdown()
    overridden = Life(tmp_path, rope_theta=1e6)
    assert overridden.lookup([1]) == [MISS]
    overridden.tier.shutdown()
    other = Life(tmp_path, model="another")
    assert other.lookup([1, 2, 3]) == [MISS] * 3
    other.tier.shutdown()


def test_keys_of_another_hash_are_refused_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    life = Life(tmp_path)
    short = bytes(make_offload_key(bytes(16), 0))
    job = TransferJob(
        job_id=7, keys=[short], chunk_ids=np.zeros(1, np.int32), is_promotion=False, req_context=life.ctx
    )
    with caplog.at_level(logging.ERROR, "vllm.kvoffload"):
        for _ in range(2):
            life.tier.submit_store(job)
            (result,) = life.tier.get_finished_jobs()
            assert result.success, "of no block"
            assert life.tier.lookup(short, life.ctx) is MISS
        life.tier.drain_jobs()
    error, unreached = (record.getMessage() for record in caplog.records if record.levelno == logging.ERROR)
    assert "keys have 20 bytes, and tiers need keys of 36 bytes; set --prefix-caching-hash-algo" in error
    assert f"this reset does not reach disk:{tmp_path}" in unreached
    life.tier.shutdown()


def test_a_disk_that_cannot_be_opened_leaves_the_engine_running(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = Life(tmp_path)
    first.store([1])
    with caplog.at_level(logging.ERROR, "vllm.kvoffload"):
        second = Life(tmp_path)
    assert "runs WITHOUT a tier behind RAM" in caplog.text
    assert f"process {os.getpid()} has it open" in caplog.text
    assert second.lookup([1]) == [MISS]
    assert second.store([1]).success, "a store of no block succeeds"
    assert second.load([1]) == []
    second.tier.drain_jobs()
    second.tier.shutdown()
    assert first.load([1]) == [1]
    first.tier.shutdown()
    with pytest.raises(ConfigError, match="capacity_bytes"):
        Life(tmp_path, capacity="1KiB")


def test_damage_is_not_loaded(tmp_path: Path) -> None:
    life = Life(tmp_path)
    life.store(list(range(1, 21)))
    life.tier.shutdown()
    (slab,) = tmp_path.glob("*.slab")
    bytes_of = slab.read_bytes()
    at = bytes_of.index(bytes([7]) * BLOCK_BYTES)
    with slab.open("r+b") as file:
        file.seek(at + 100)
        file.write(b"\xff")
    again = Life(tmp_path)
    assert again.load(list(range(1, 21))) == [number for number in range(1, 21) if number != 7]
    assert again.lookup([6, 7]) == [HIT, MISS]
    again.tier.shutdown()


def test_a_reset_also_clears_the_disk(tmp_path: Path) -> None:
    life = Life(tmp_path)
    life.store([1, 2])
    life.tier.drain_jobs()
    assert life.lookup([1, 2]) == [MISS, MISS]
    life.tier.shutdown()
    again = Life(tmp_path)
    assert again.lookup([1, 2]) == [MISS, MISS]
    again.tier.shutdown()


def test_a_reset_returns_when_the_disk_would_not_remember_after_a_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    life = Life(tmp_path)
    life.store([1, 2])
    disk, calls = life.tier._tier, []

    def noted(name: str) -> Callable[..., Any]:
        method = getattr(disk, name)

        def call(*arguments: Any) -> Any:
            calls.append(name)
            return method(*arguments)

        return call

    for name in ("clear", "drain"):
        monkeypatch.setattr(disk, name, noted(name))
    life.tier.drain_jobs()
    assert calls == ["drain", "clear", "drain"]
    life.tier.shutdown()


@pytest.mark.parametrize("where", ["contains", "finished", "submit_read", "begin_request", "drain"])
def test_an_internal_error_does_not_stop_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, where: str
) -> None:
    life = Life(tmp_path)
    life.store([1, 2, 3])

    def fail(*_: Any) -> None:
        raise RuntimeError("told to fail")

    monkeypatch.setattr(life.tier._tier, where, fail)
    if where == "finished":
        assert not life.run([1, 2], load=True).success, "a job in flight is reported as failed"
    elif where == "submit_read":
        assert life.load([1, 2]) == []
    elif where == "begin_request":
        life.tier.on_new_request(ReqContext("another"))
    elif where == "drain":
        life.tier.drain_jobs()
    assert life.lookup([1]) == [MISS]
    assert life.tier.broken
    assert life.load([1, 2]) == []
    assert life.store([4, 5]).success, "nothing is written, which is no failure"
    life.tier.on_request_finished(life.ctx)
    assert not life.tier.has_pending_work()
    with caplog.at_level(logging.ERROR, "vllm.kvoffload"):
        life.tier.drain_jobs()
    assert f"this reset does not reach disk:{tmp_path}" in caplog.text
    life.tier.shutdown()


# ---- a server that machines share


def step(life: Life, numbers: Sequence[int]) -> list[Any]:
    """Return the results of a step's lookups of these blocks."""
    assert not [*life.tier.get_finished_jobs()]
    result = life.lookup(numbers)
    life.tier.on_schedule_end(None)
    return result


def until_known(life: Life, numbers: Sequence[int]) -> list[Any]:
    deadline = time.monotonic() + PATIENCE_S
    while RETRY in (state := step(life, numbers)):
        assert life.tier.has_pending_work()
        assert time.monotonic() < deadline
    return state


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with running(tmp_path) as server:
        yield server


def sharing(server: Server, **options: Any) -> Life:
    patient = {"timeout": PATIENCE_S, "probe_timeout": PATIENCE_S, "identity": "weights"}
    return Life(None, url=f"{server.url}/ns", **(patient | options))


def test_an_engine_finds_blocks_stored_by_another(server: Server) -> None:
    first, second = sharing(server), sharing(server)
    assert step(first, [1, 2]) == [RETRY] * 2
    assert until_known(first, [1, 2]) == [MISS] * 2
    assert first.store([1, 2, 3]).success
    assert first.lookup([1, 2, 3]) == [HIT] * 3
    assert second.tier.locality is Locality.REMOTE
    assert until_known(second, [1, 2, 3, 4]) == [HIT] * 3 + [MISS]
    assert second.tier._tier.stats().probes == 4, "once, however often they were looked up"
    assert second.load([3, 1]) == [3, 1]
    server.execute("DEL", second.tier._tier.inner.peer.epoch.names(Keys.pack([key(2)], len(key(2))))[0])
    assert second.load([1, 2]) == [1]
    assert until_known(second, [2]) == [MISS]
    first.tier.drain_jobs()
    assert first.lookup([1]) == [RETRY], "after a reset the tier has to probe again"
    assert second.load([1, 3]) == [], "no engine gets an older block"
    for life in (first, second):
        life.tier.shutdown()


def test_only_own_writes_are_reported(server: Server) -> None:
    first, second = sharing(server), sharing(server)
    for life in (first, second):
        assert life.tier.take_events() == []
    first.store([1])
    second.store([1, 2])
    (event,) = second.tier.take_events()
    assert (event.keys, event.removed, event.medium) == ([key(2)], False, Medium.STORAGE)
    assert (event.locality, event.ownership) == (Locality.REMOTE, "valkey")
    server.execute("DEL", second.tier._tier.inner.peer.epoch.names(Keys.pack([key(2)], len(key(2))))[0])
    assert second.load([1, 2]) == [1]
    (event,) = second.tier.take_events()
    assert (event.keys, event.removed) == ([key(2)], True)
    for life in (first, second):
        life.tier.shutdown()


def test_engines_find_blocks_that_others_stored_in_a_bucket_piece_by_piece(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3_server.KEY_ID)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", s3_server.SECRET)
    with s3_server.running(s3_server.Rclone, tmp_path) as bucket:
        patient = {"timeout": PATIENCE_S, "probe_timeout": PATIENCE_S, "identity": "weights"}
        url = f"s3://{s3_server.BUCKET}/ns?endpoint={bucket.endpoint}&region=us-east-1"
        first, second = (Life(None, url=url, **patient) for _ in range(2))
        assert until_known(first, [1, 2]) == [MISS] * 2
        for numbers in ([1, 2], [3]):
            deadline = time.monotonic() + PATIENCE_S
            while not first.store(numbers).success:
                assert time.monotonic() < deadline
        assert second.tier.locality is Locality.REMOTE
        assert until_known(second, [1, 2, 3, 4]) == [HIT] * 3 + [MISS]
        assert second.load([3, 1]) == [3, 1]
        for life in (first, second):
            life.tier.shutdown()


def test_engines_of_other_weights_share_nothing(server: Server) -> None:
    first, second = sharing(server), sharing(server, identity="other weights")
    first.store([1])
    assert until_known(second, [1]) == [MISS]
    with pytest.raises(ConfigError, match="identity=NAME"):
        sharing(server, identity="")
    for life in (first, second):
        life.tier.shutdown()


def test_engines_of_another_configuration_share_nothing_under_equal_weight_names(
    server: Server,
) -> None:
    first, second, same = sharing(server), sharing(server, rope_theta=1e6), sharing(server)
    first.store([31])
    assert until_known(second, [31]) == [MISS]
    assert until_known(same, [31]) == [HIT]
    for life in (first, second, same):
        life.tier.shutdown()


def test_a_tier_without_the_engines_configuration_is_refused(tmp_path: Path) -> None:
    tier = {"type": "KVOffloadDisk", "module_path": "kvoffload.integrations.vllm.secondary"}
    tier |= {"path": str(tmp_path), "capacity": "2MiB"}
    pool = np.zeros((NUM_SLOTS, BLOCK_BYTES), np.uint8)
    with pytest.raises(ConfigError, match="vLLM's configuration was not found"):
        made_by_a_connector(None, tier, pool, TieringOffloadingSpec(config("model", tier)))


def test_a_server_that_does_not_answer_is_a_miss(server: Server) -> None:
    life = sharing(server, timeout="300ms", probe_timeout="200ms")
    life.store([1])
    with server.stopped():
        assert until_known(life, [2]) == [MISS]
        assert life.load([1]) == []
        assert until_known(life, [3]) == [MISS]
        life.tier.drain_jobs()
    life.tier.shutdown()


def test_metrics_are_defined_and_reported(tmp_path: Path) -> None:
    """Each name that is reported is defined, and the first report has every counter."""
    life = Life(tmp_path, label="nvme")
    defined = type(life.tier).build_metric_definitions({})
    life.tier.on_request_finished(life.ctx)
    reported = {*re.findall(r"vllm:\w+", str(life.tier.get_stats().data))}
    counters = {name for name, made in defined.items() if isinstance(made, OffloadingCounterMetadata)}
    assert counters <= reported <= defined.keys(), "with the first report every counter exists"
    life.tier.on_new_request(life.ctx)
    life.store([1, 2])
    life.load([1])
    life.tier.on_request_finished(life.ctx)
    assert life.tier.get_stats() is not None, "without a running request each call reports"
    life.tier.on_new_request(life.ctx)
    assert life.tier.get_stats() is None, "while requests run at most ten times a second"
    assert all(name.startswith("vllm:kvoffload_tier_") for name in defined)
    assert all(definition.labelnames == ("tier",) for definition in defined.values())
    life.tier.shutdown()


def test_an_empty_store_reports_no_bytes(tmp_path: Path) -> None:
    life = Life(tmp_path)
    assert life.store([1]).transfer_bytes == BLOCK_BYTES
    assert life.store([1]).transfer_bytes == 0, "vLLM would count the bytes of the job"
    life.tier.shutdown()


def test_configuration_is_shown(tmp_path: Path) -> None:
    life = Life(tmp_path, policy="arc")
    assert set(life.tier.config_info()) == set(type(life.tier).config_info_keys({}))
    shown = life.tier.config_info()
    assert (shown["kvoffload_tier"], shown["kvoffload_policy"]) == ("disk", "arc")
    assert shown["kvoffload_capacity"] == "2MiB"
    assert str(tmp_path) not in str(shown), "labels are public, paths are not"
    life.tier.shutdown()


class Peer(SecondaryTierManager):
    """A tier that looks up blocks of its parent in vLLM's poll thread, like a peer of another engine."""

    medium = Medium.STORAGE
    tolerates_off_thread_polling = True

    def __init__(self, spec: Any, view: memoryview) -> None:
        super().__init__(spec, view, "peer")
        self.finished: list[int] = []
        self.threads: set[str] = set()
        self.found: set[bytes] = set()
        self.rounds = 0

    def serve_external_requests(self, parent: Any) -> None:
        self.rounds += 1
        self.threads.add(threading.current_thread().name)
        ctx = ReqContext(f"peer {self.rounds}")
        parent.on_new_request(ctx)
        for number in range(12):
            if parent.lookup(key(number), ctx) is HIT:
                self.found.add(key(number))
        parent.on_request_finished(ctx)

    def lookup(self, key: bytes, req_context: Any) -> Any:
        return MISS

    def submit_store(self, job_metadata: Any) -> None:
        self.finished.append(job_metadata.job_id)

    def submit_load(self, job_metadata: Any) -> None:
        raise AssertionError("it has nothing")

    def get_finished_jobs(self) -> Any:
        done, self.finished = self.finished, []
        return [JobResult(job_id=job, success=True) for job in done]

    def on_new_request(self, req_context: Any) -> Any:
        return RequestOffloadingContext()

    def drain_jobs(self) -> None:
        pass


def behind_vllms_ram(life: Life) -> tuple[Any, Any]:
    """Return vLLM's own tiering manager with the tier of this life and a `Peer`, and the peer."""
    pool = life.pool
    region = SimpleNamespace(create_kv_memoryview=lambda: pool.data, cleanup=lambda: None)
    primary = CPUPrimaryTierOffloadingManager(NUM_SLOTS, region)
    peer = Peer(life.spec, pool.data)
    return TieringOffloadingManager(primary, [life.tier, peer], tier_poll_interval_s=0.001), peer


@needs(*POLLED_TIERS)
@pytest.mark.parametrize("where", ["disk", "server"])
def test_vllms_manager_also_uses_the_tier_from_its_poll_thread(
    tmp_path: Path, request: pytest.FixtureRequest, where: str
) -> None:
    """A peer looks up blocks in the poll thread, while the scheduler's thread stores and promotes them."""
    life = Life(tmp_path) if where == "disk" else sharing(request.getfixturevalue("server"))
    life.store(list(range(30)))
    life.tier.on_request_finished(life.ctx)
    manager, peer = behind_vllms_ram(life)
    try:
        for turn in range(10):
            numbers, absent = range(turn % 5 * 6, turn % 5 * 6 + 6), [40 + turn]
            ctx = ReqContext(f"request {turn}")
            with manager.lock:
                manager.on_new_request(ctx)
            results: list[Any] = []
            deadline = time.monotonic() + PATIENCE_S
            while time.monotonic() < deadline:
                with manager.lock:
                    results = [manager.lookup(key(number), ctx) for number in [*numbers, *absent]]
                    manager.on_schedule_end(ScheduleEndContext((), ()))
                if not {RETRY, LookupResult.HIT_PENDING} & {*results}:
                    break
                time.sleep(0.001)
            assert results == [HIT] * 6 + [MISS]
            with manager.lock:
                manager.on_request_finished(ctx)
        until = time.monotonic() + PATIENCE_S
        while peer.found != {*map(key, range(12))}:
            assert time.monotonic() < until
            time.sleep(0.001)
        with manager.lock:
            assert "vllm:kvoffload_tier_written" in str(manager.get_stats())
            shown = [dict(labels) for labels in manager.config_info()]
        assert shown[1]["kvoffload_tier"] == ("disk" if where == "disk" else "valkey")
        assert "vllm_offload_tier_poll" in peer.threads
        assert not life.tier.broken
    finally:
        manager.shutdown()


def test_bad_options_stop_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="polcy"):
        Life(tmp_path, polcy="lru")
    with pytest.raises(ConfigError, match="lruu"):
        Life(tmp_path, policy="lruu")


@pytest.mark.parametrize("where", ["contains", "finished", "submit_read", "submit_write", "begin_request"])
def test_a_tier_that_raises_is_a_miss_and_is_used_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """The exception comes from the tier itself, not from the adapter."""
    life = Life(tmp_path)
    life.store([1, 2, 3])

    def fail(*_: Any) -> None:
        raise KeyError("told to fail")

    with monkeypatch.context() as trouble:
        trouble.setattr(life.tier._tier.inner, where, fail)
        if where == "contains":
            assert life.lookup([1]) == [MISS]
        elif where == "finished":
            assert not [*life.tier.get_finished_jobs()]
        elif where == "submit_read":
            assert life.load([1, 2]) == []
        elif where == "submit_write":
            assert life.store([4, 5]).success, "nothing is written, which is no failure"
        else:
            life.tier.on_new_request(ReqContext("another"))
    assert not life.tier.broken
    assert life.load([1, 2]) == [1, 2]
    life.tier.shutdown()
