"""Replays: counts, real bytes, damage, and the decision log."""

from __future__ import annotations

import hashlib
import io

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvoffload.core.plans import ON_COMPUTE, ON_DEVICE_EVICTION
from kvoffload.errors import ConfigError
from kvoffload.replay.config import ReplayConfig
from kvoffload.replay.data import DataPlane
from kvoffload.replay.decisions import DecisionLog
from kvoffload.replay.faults import KINDS, parse_injection
from kvoffload.replay.replay import Replay
from kvoffload.replay.report import ReplayReport
from kvoffload.replay.trace_keys import TraceKeys
from kvoffload.testing.audit import audit
from kvoffload.tiers.spec import parse_tiers
from kvoffload.traces.sessions import generate
from kvoffload.traces.trace import Trace
from kvoffload.traces.workloads import builtin
from support.small_trace import trace_of


@pytest.fixture(scope="module")
def small_chat() -> Trace:
    return generate(builtin("chat", sessions=150))


@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=20, unique=True))
@example([-(2**63), -1, 0, 1, 2**63 - 1])
def test_keys_contain_their_block_ids(ids: list[int]) -> None:
    keys, codes = TraceKeys(trace_of(ids)), np.arange(len(ids), dtype=np.int32)[::-1]
    assert keys.ids(keys.of_blocks(codes)).tolist() == ids[::-1]
    assert len({bytes(key) for key in keys.of_blocks(codes)}) == len(ids)


def test_counts_by_hand() -> None:
    # Capacity 3. Request 0 stores 1 2 3. Request 1 hits 1 2, and 4 replaces 3. Request 2 misses 5 6, which
    # replace the two coldest blocks: 4 (the tail of the last path) and 2.
    log = io.BytesIO()
    trace = trace_of([1, 2, 3], [1, 2, 4], [5, 6], [1, 2])
    report = Replay(trace, ReplayConfig(3), decisions=log).run()
    assert log.getvalue().decode() == (
        "0 hit 0 0\n0 admit 3\n0 store 1 2 3\n"
        "1 hit 0 2\n1 admit 1\n1 evict 3\n1 store 4\n"
        "2 hit 0 0\n2 admit 2\n2 evict 4 2\n2 store 5 6\n"
        "3 hit 0 1\n3 admit 1\n3 evict 6\n3 store 2\n"
    )
    assert (report.prefix_hit_blocks, report.block_refs, report.unique_blocks) == (3, 10, 6)
    assert (report.blocks_written, report.blocks_evicted) == (7, 4)
    assert report.tokens_saved == 3 * 512


def test_a_device_serves_the_head_of_a_prefix() -> None:
    report = Replay(trace_of([1, 2, 3], [4, 5], [1, 2, 3]), ReplayConfig(9, device_blocks=4)).run()
    # The device of 4 blocks holds 1 2 and 4 5, because a tail is evicted first; 3 comes from the tier.
    assert (report.device_hit_blocks, report.offload_hit_blocks) == (2, 1)
    # The optimum: 3 of 8 references are the second use of a block.
    assert report.optimum_hit_ratio == 3 / 8


def test_a_request_longer_than_the_tier_stores_its_head() -> None:
    log = io.BytesIO()
    report = Replay(trace_of([1, 2, 3, 4], [1, 2, 3, 4]), ReplayConfig(2), decisions=log).run()
    assert b"0 drop 3 4\n0 store 1 2\n" in log.getvalue()
    assert b"1 hit 0 2\n1 full 2\n" in log.getvalue()
    assert (report.prefix_hit_blocks, report.blocks_dropped) == (2, 4)
    assert report.block_hit_ratio == 2 / 8


@pytest.mark.parametrize(("store", "device_blocks"), [(ON_COMPUTE, 0), (ON_DEVICE_EVICTION, 2)])
def test_promoted_blocks_are_block_hits(store: str, device_blocks: int) -> None:
    """With a victim tier they were not counted, so that the block hits were fewer than the prefix hits."""
    config = ReplayConfig(2, device_blocks=device_blocks, store=store, tiers=parse_tiers("tiers", "9"))
    report = Replay(trace_of([1, 2], [3, 4], [5, 6], [1, 2]), config).run()
    assert report.blocks_promoted == report.prefix_hit_blocks == 2
    assert report.block_hit_ratio == 2 / 8


def test_refused_blocks_are_named() -> None:
    log = io.BytesIO()
    report = Replay(trace_of([1, 2], [1, 2, 3], [1]), ReplayConfig(9, "lru", "reuse:2"), decisions=log).run()
    assert log.getvalue().decode() == (
        "0 hit 0 0\n0 refuse 1 2\n1 hit 0 0\n1 admit 2\n1 refuse 3\n1 store 1 2\n2 hit 0 1\n"
    )
    assert report.blocks_refused == 3


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_every_byte_is_verified(small_chat: Trace, policy: str) -> None:
    capacity = small_chat.unique_blocks // 10
    data = DataPlane(capacity, 4096)
    run = Replay(small_chat, ReplayConfig(capacity, policy), data)
    report = run.run()
    bare = Replay(small_chat, ReplayConfig(capacity, policy)).run()
    assert report.blocks_verified == report.offload_hit_blocks > 0
    assert report.bytes_loaded == report.offload_hit_blocks * 4096
    assert report.bytes_stored == report.blocks_written * 4096
    assert (report.mismatches_caught, report.mismatches_served) == (0, 0)
    assert report.decisions_sha256 == bare.decisions_sha256, "bytes must not change decisions"
    audit(run.manager)
    data.close()


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_damage_is_a_miss_and_never_served(small_chat: Trace, kind: str) -> None:
    capacity = small_chat.unique_blocks // 5
    data = DataPlane(capacity, 4096, parse_injection(f"{kind}:0.05", seed=7))
    run = Replay(small_chat, ReplayConfig(capacity), data)
    report = run.run()
    whole = Replay(small_chat, ReplayConfig(capacity)).run()
    assert report.mismatches_served == 0
    assert 0 < report.mismatches_caught <= report.damage_injected
    assert report.prefix_hit_blocks < whole.prefix_hit_blocks, "damage must cost hits"
    audit(run.manager)
    data.close()


def test_a_wrong_byte_that_the_tier_overlooks_is_reported(
    small_chat: Trace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: without the tier's verification, the replay detects the wrong bytes."""
    monkeypatch.setattr("kvoffload.tiers.memory.MemoryTier.verify_slots", _trusting)
    monkeypatch.setattr("kvoffload.tiers.memory.MemoryTier.read", _reading_blindly)
    data = DataPlane(small_chat.unique_blocks, 4096, parse_injection("bitflip:0.05", seed=7))
    report = Replay(small_chat, ReplayConfig(small_chat.unique_blocks), data).run()
    assert report.mismatches_caught == 0
    assert report.mismatches_served > 0
    data.close()


def _trusting(tier: object, keys: object, slots: np.ndarray) -> np.ndarray:
    return np.ones(len(slots), np.bool_)


def _reading_blindly(tier, keys, slots, dest, dest_rows) -> np.ndarray:  # type: ignore[no-untyped-def]
    dest[dest_rows] = tier.pool[slots]
    return np.ones(len(slots), np.bool_)


def test_replay_is_deterministic(small_chat: Trace) -> None:
    reports = [Replay(small_chat, ReplayConfig(500, "arc", "reuse:2", 100)).run() for _ in range(2)]
    assert reports[0].decisions_sha256 == reports[1].decisions_sha256


def test_the_digest_equals_the_digest_of_the_file(small_chat: Trace) -> None:
    log = io.BytesIO()
    report = Replay(small_chat, ReplayConfig(500), decisions=log).run()
    assert hashlib.sha256(log.getvalue()).hexdigest() == report.decisions_sha256


def test_a_cache_with_room_for_all_blocks_equals_an_infinite_cache(small_chat: Trace) -> None:
    report = Replay(small_chat, ReplayConfig(10**9)).run()
    assert report.prefix_hit_ratio == report.infinite_hit_ratio == report.optimum_hit_ratio
    assert report.blocks_evicted == 0


def test_numbers_are_written_as_python_writes_them() -> None:
    ids = np.array([0, 7, 10, -1, 10**18, 2**63 - 1, -(2**63), 99, 100], np.int64)
    log = io.BytesIO()
    DecisionLog(log).blocks(3, "store", ids)
    assert log.getvalue() == f"3 store {' '.join(str(i) for i in ids.tolist())}\n".encode()


def test_a_long_line_grows_the_buffer() -> None:
    ids = np.arange(10**12, 10**12 + 10_000, dtype=np.int64)
    log = io.BytesIO()
    DecisionLog(log).blocks(0, "evict", ids)
    assert log.getvalue().split()[2:] == [str(i).encode() for i in ids.tolist()]


def test_json_has_every_promised_field(small_chat: Trace) -> None:
    report = Replay(small_chat, ReplayConfig(100)).run()
    promised = (
        "trace policy admission capacity_blocks device_blocks requests block_refs unique_blocks "
        "prefix_hit_blocks prefix_hit_ratio device_hit_blocks offload_hit_blocks block_hit_ratio "
        "blocks_written blocks_evicted blocks_refused bytes_stored bytes_loaded blocks_verified "
        "mismatches_caught mismatches_served control_plane_s data_plane_s version decisions_sha256"
    )
    assert set(promised.split()) <= set(ReplayReport.__struct_fields__)
    assert report.to_json().startswith(b'{\n  "trace": "')


@pytest.mark.parametrize("capacity_blocks", [0, -1])
def test_a_capacity_without_a_block_is_refused(capacity_blocks: int) -> None:
    """A replay with one block instead would have more hits than its optimum."""
    with pytest.raises(
        ConfigError, match=f"capacity_blocks: {capacity_blocks} is invalid; allowed: 1 or more"
    ):
        Replay(trace_of([1], [1]), ReplayConfig(capacity_blocks)).run()
