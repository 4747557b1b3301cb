"""Hints of requests: label numbers, reports to policies, and the end of requests in a replay."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvoffload.core.hints import NO_HINTS, NUM_COARSE, NUM_LABELS, Hints, Labels
from kvoffload.core.manager import OffloadingManager
from kvoffload.core.policy import EvictionPolicy
from kvoffload.core.request import Path, Used
from kvoffload.core.slots import SlotArray
from kvoffload.core.state import Cache, Entering
from kvoffload.errors import ConfigError
from kvoffload.policies.lru import LRU
from kvoffload.replay.config import ReplayConfig
from kvoffload.replay.data import DataPlane
from kvoffload.replay.replay import Replay
from kvoffload.replay.trace_keys import TraceKeys
from kvoffload.structures.index import ABSENT, Index
from kvoffload.structures.keys import Keys
from kvoffload.structures.lists import Lists, push_all, unlink_all
from kvoffload.structures.structs import Struct
from kvoffload.testing.audit import audit, duplicate_slots
from kvoffload.testing.scripts import play, random_script
from kvoffload.tiers.kinds.simulated import SimulatedOptions
from kvoffload.traces.sessions import generate
from kvoffload.traces.trace import Trace, TraceHints
from kvoffload.traces.workloads import builtin
from support.letters import keys, make, store
from support.naive.lru import NaiveLRU

STOP, TOOLS = Hints("stop"), Hints("tool_calls")

# ---- labels


def numbers_of(*hints: Hints) -> list[int]:
    labels = Labels()
    return [labels.number(item) for item in hints]


def test_no_hints_is_0_and_labels_are_numbered_in_order() -> None:
    assert numbers_of(NO_HINTS, STOP, TOOLS, Hints(), STOP, TOOLS) == [0, 1, 2, 0, 1, 2]
    assert numbers_of(TOOLS, STOP) == [1, 2]
    assert numbers_of(STOP, Hints("stop", session_over=True), Hints(session_over=True)) == [1, 2, 3]


def test_tenant_and_time_to_live_subdivide_the_end() -> None:
    other = Hints("stop", tenant="a")
    assert numbers_of(STOP, other, Hints(tenant="a"), Hints("stop", tenant="b"), other) == [1, 8, 9, 10, 8]


def test_times_to_live_are_distinguished_by_octave() -> None:
    times = [100, 110, 200, 0, -1, math.inf, math.nan, 1e-300, 1e300]
    numbers = numbers_of(*(Hints(time_to_live_s=time) for time in times))
    assert numbers[:4] == [8, 8, 9, 10]
    assert numbers[4:] == [10, 11, 10, 10, 11], "impossible times count as the shortest or longest"


def test_labels_beyond_the_last_number_get_0() -> None:
    """Without a free number, an end gets 0, and a tenant the number of the end."""
    ends = [Hints(f"reason {i}") for i in range(NUM_COARSE + 3)]
    assert numbers_of(*ends) == [*range(1, NUM_COARSE), 0, 0, 0, 0]
    tenants = [Hints("stop", tenant=str(i)) for i in range(NUM_LABELS)]
    assert numbers_of(*tenants) == [*range(NUM_COARSE, NUM_LABELS), *[1] * NUM_COARSE]


def test_any_number_of_labels_takes_bounded_memory() -> None:
    labels = Labels()
    for i in range(10_000):
        assert labels.number(Hints("stop", tenant=str(i))) < NUM_LABELS
    assert len(labels._known) <= 4096
    assert labels.number(Hints("stop", tenant="0")) == NUM_COARSE
    assert labels.number(Hints("stop", tenant="9999")) == 1


hints_of_any_kind = st.builds(
    Hints,
    st.sampled_from(["", "stop", "length", "a word"]),
    st.booleans(),
    st.integers(-2, 2),
    st.sampled_from([None, 0.0, 30.0, 3600.0]),
    st.sampled_from(["", "a", "b"]),
)


@given(st.lists(hints_of_any_kind, max_size=60))
def test_equal_hints_have_equal_numbers(items: list[Hints]) -> None:
    labels = Labels()
    first = [labels.number(item) for item in items]
    assert all(0 <= number < NUM_LABELS for number in first)
    assert [labels.number(item) for item in items] == first, "a number never changes"
    assert all((number == 0) or item != NO_HINTS for item, number in zip(items, first, strict=True))


@given(hints_of_any_kind, hints_of_any_kind)
def test_hints_of_begin_and_end_are_complete(hints: Hints, other: Hints) -> None:
    assert hints.at_begin.updated(hints.at_end) == hints
    merged = hints.updated(other)
    for field in Hints.__slots__:
        at_end = getattr(other, field)
        assert getattr(merged, field) == (
            getattr(hints, field) if at_end == getattr(NO_HINTS, field) else at_end
        )
    assert NO_HINTS.at_begin is NO_HINTS
    assert NO_HINTS.at_end is NO_HINTS


# ---- managers and policies


class RecordsRequests(NaiveLRU):
    """A policy that records the reports of requests, and checks that no use follows the end."""

    def __init__(self, index: Index) -> None:
        super().__init__(index)
        self.reports: list[tuple[list[bytes], list[int], Hints]] = []
        self.calls: list[str] = []

    def access(self, slots: SlotArray, reused: Any) -> None:
        self.calls.append("access")
        super().access(slots, reused)

    def finished(self, path: Keys, slots: SlotArray, hints: Hints) -> None:
        assert slots.dtype == np.int32
        self.calls.append("finished")
        self.reports.append((list(path), slots.tolist(), hints))


def test_hints_of_begin_and_end_merge() -> None:
    manager = make(RecordsRequests)
    ctx = manager.begin_request("r", keys("ab"), hints=Hints(priority=2, tenant="me"))
    assert ctx.hints == Hints(priority=2, tenant="me")
    manager.finish_request(ctx, hints=Hints("stop", tenant="you"))
    assert ctx.hints == Hints("stop", priority=2, tenant="you")
    manager.finish_request(manager.begin_request("r"), hints=STOP)
    manager.finish_request(manager.begin_request("r", hints=TOOLS))
    manager.finish_request(manager.begin_request("r"))
    policy: Any = manager.policy
    assert [hints for _, _, hints in policy.reports] == [ctx.hints, STOP, TOOLS, NO_HINTS]


@pytest.mark.parametrize("admission", ["all", "reuse:2"])
def test_the_end_is_reported_once_after_the_uses(admission: str) -> None:
    manager = make(RecordsRequests, 3, admission=admission)
    for _ in range(2):
        store(manager, "ab")
    ctx = manager.begin_request("r", keys("ab"))
    manager.touch(keys("a"), ctx)
    store(manager, "abcd", ctx)
    policy: Any = manager.policy
    policy.reports.clear()
    policy.calls.clear()
    manager.finish_request(ctx, hints=STOP)
    slots = manager.slots_of(keys("abcd")).tolist()
    assert policy.reports == [(keys("abcd"), slots, STOP)]
    assert slots[3] == ABSENT
    assert policy.calls == ["access", "finished"]
    whole = manager.begin_request("w")
    manager.finish_request(whole, keys("ba"))
    assert policy.reports[1:] == [(keys("ba"), slots[1::-1], NO_HINTS)]
    assert policy.calls[2:] == ["access", "finished"]


@pytest.mark.parametrize("store_mode", ["on-compute", "on-device-eviction"])
@pytest.mark.parametrize("seed", range(6))
def test_slots_are_right_in_any_history(store_mode: str, seed: int) -> None:
    manager = OffloadingManager(6, key_bytes=20, policy=RecordsRequests, store=store_mode)
    policy: Any = manager.policy
    script = random_script(seed, num_steps=200)

    def check(manager: OffloadingManager) -> int:
        if policy.reports:
            path, slots, _ = policy.reports[-1]
            if len(policy.reports) > check.num_reports:  # type: ignore[attr-defined]
                assert slots == manager.slots_of(path).tolist()
                check.num_reports = len(policy.reports)  # type: ignore[attr-defined]
        return len(policy.reports)

    check.num_reports = 0  # type: ignore[attr-defined]
    ends = [action == "finish" for action, _, _ in script]
    counts = [number for _, _, number in play(manager, script, check)]
    assert counts == np.cumsum(ends).tolist(), "each request that finishes has one end, at its finish"


def test_policies_without_hooks_are_not_called() -> None:
    assert NaiveLRU.finished is EvictionPolicy.finished
    for policy in ("lru", NaiveLRU):
        manager, plain = make(policy, 3), make(policy, 3)
        for letters in ("abc", "ad", "ae"):
            ctx, same = manager.begin_request("r", hints=STOP), plain.begin_request("r")
            store(manager, letters, ctx)
            store(plain, letters, same)
            manager.finish_request(ctx, hints=TOOLS)
            plain.finish_request(same)
        assert manager.policy.order() == plain.policy.order()
        audit(manager)


class Label(Struct):
    """State of a compiled policy that records the reports which it receives."""

    order: Lists
    label: int
    length: int
    slot: int
    uses: int


class Labelled(LRU):
    """LRU whose kernels record the reported labels."""

    def __init__(self, index: Index) -> None:
        super().__init__(index)
        self.state = Label(order=Lists(self.capacity_blocks, 1))


@Labelled.compiled
def access(own: Label, used: Used) -> None:
    own.uses += used.count


@Labelled.compiled
def replace(own: Label, new: Entering, cache: Cache, path: Path) -> None:
    push_all(own.order.links, own.order.num_positions, new.slots, new.count)


@Labelled.compiled
def remove(own: Label, used: Used) -> None:
    unlink_all(own.order.links, used.slots, used.count)


@Labelled.compiled
def finished(own: Label, path: Path) -> None:
    own.label, own.length, own.slot = path.label, path.length, path.found[path.length - 1]
    own.uses += 100


class UsedInPython(Labelled):
    """A policy that receives uses in Python, and the end in a kernel."""

    def access(self, slots: SlotArray, reused: Any) -> None:
        assert self.state.uses < 100, "the end was reported before the uses"
        super().access(slots, reused)


class EndsInPython(Labelled):
    """A policy that receives uses in a kernel, and the end in Python."""

    def finished(self, path: Keys, slots: SlotArray, hints: Hints) -> None:
        self.state.label, self.state.length, self.state.slot = 1, len(path), slots[-1]
        self.state.uses += 100


@pytest.mark.parametrize("policy", [Labelled, UsedInPython, EndsInPython])
@pytest.mark.parametrize("options", [{}, {"admission": "reuse:1"}, {"store": "on-device-eviction"}])
def test_a_compiled_policy_receives_the_label(policy: Any, options: dict[str, str]) -> None:
    manager = make(policy, 90, **options)
    store(manager, "abc")
    ctx = manager.begin_request("r", keys("ab"), hints=Hints(priority=1))
    store(manager, "abd", ctx)
    manager.finish_request(ctx, hints=STOP)
    state = manager.policy.state
    label = 1 if policy is EndsInPython else numbers_of(Hints(priority=1), Hints("stop", priority=1))[1]
    assert (state.label, state.length) == (label, 3)
    assert state.slot == manager.slots_of(keys("d"))[0]
    assert state.uses // 100 == 1, "once"


def test_a_path_that_grows_keeps_its_label() -> None:
    manager = OffloadingManager(4000, key_bytes=2, policy=Labelled)
    ctx = manager.begin_request("r", [b"aa"], hints=TOOLS)
    many = [number.to_bytes(2, "big") for number in range(3000)]
    manager.lookup(many, ctx)
    manager.finish_request(ctx)
    policy: Any = manager.policy
    assert (policy.state.label, policy.state.length) == (1, 3001)


# ---- replays


def trace_of(requests: list[tuple[int, int, list[int]]], hints: list[Hints] | None = None) -> Trace:
    """Create a trace from arrival times in ms, output tokens and block ids."""
    times, tokens, blocks = zip(*requests, strict=True)
    flat = [block for ids in blocks for block in ids]
    ids = list(dict.fromkeys(flat))
    return Trace(
        "test",
        512,
        np.array(ids, np.int64),
        np.array([ids.index(block) for block in flat], np.int32),
        np.cumsum([0, *map(len, blocks)]).astype(np.int64),
        np.array(times, np.int64),
        np.array(tokens, np.int64),
        hints=TraceHints.of(hints) if hints else None,
    )


class Log(NaiveLRU):
    """Records beginnings and ends of requests in one list; the tenant identifies a request."""

    log: list[tuple[str, str]] = []  # noqa: RUF012  (of the last replay)

    def __init__(self, index: Index) -> None:
        super().__init__(index)
        type(self).log = []

    def observe(self, path: Keys, slots: SlotArray, start: int, on_device: int) -> None:
        self.log.append(("begin", str(len(path))))

    def finished(self, path: Keys, slots: SlotArray, hints: Hints) -> None:
        self.log.append(("end", hints.tenant))
        assert hints.finish_reason == f"reason {hints.tenant}", "a hint given at the end"
        assert hints.priority == len(path), "a hint given at the beginning"


def ends_of(requests: list[tuple[int, int, int]], tokens_per_s: float, **options: Any) -> list[list[int]]:
    """Return the requests that end before each request, and finally at the end of the trace.

    Requests are (ms, tokens, number of blocks)."""
    hints = [Hints(f"reason {i}", priority=size, tenant=str(i)) for i, (_, _, size) in enumerate(requests)]
    first = np.cumsum([0, *(size for _, _, size in requests)]).tolist()
    rows = [
        (ms, tokens, [*range(first[i], first[i] + size)]) for i, (ms, tokens, size) in enumerate(requests)
    ]
    config = ReplayConfig(50, Log, decode_tokens_per_s=tokens_per_s, **options)
    Replay(trace_of(rows, hints), config).run()
    ended: list[list[int]] = [[]]
    for event, number in Log.log:
        if event == "begin":
            ended.append([])
        else:
            ended[-1].append(int(number))
    return ended


MODES: list[dict[str, Any]] = [
    {},
    {"device_blocks": 3},
    {"device_blocks": 3, "store": "on-device-eviction"},
    {"tiers": (SimulatedOptions(capacity="60"),)},
]


@pytest.mark.parametrize("mode", MODES, ids=["alone", "device", "victim", "tiers"])
def test_a_request_ends_when_it_has_generated_its_answer(mode: dict[str, Any]) -> None:
    # At 100 tokens/s: 0 until 1000 ms, 1 until 600, 2 until 600, 3 at once, 4 until 5000.
    requests = [(0, 100, 2), (100, 50, 2), (200, 40, 2), (600, 0, 1), (600, 440, 3), (1000, 9000, 1)]
    assert ends_of(requests, 100, **mode) == [[], [], [], [1, 2], [3], [0], [4, 5]]
    assert ends_of(requests, 0, **mode) == [[], [0], [1], [2], [3], [4], [5]], (
        "at speed 0 a request ends when it is served"
    )


@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(0, 90), st.integers(1, 3)), min_size=1, max_size=12),
    st.sampled_from([250.0, 1000.0, 1e9]),
)
def test_each_request_ends_once_in_order_and_never_early(
    requests: list[tuple[int, int, int]], tokens_per_s: float
) -> None:
    """End times may decrease, because the file is in order of arrival."""
    ends = ends_of(requests, tokens_per_s)
    end_ms = [ms + tokens * 1000 / tokens_per_s for ms, tokens, _ in requests]
    assert sorted(request_ended for ended in ends for request_ended in ended) == [*range(len(requests))]
    waiting: set[int] = set()
    for request, ended in enumerate(ends):
        now = requests[request][0] if request < len(requests) else math.inf
        assert ended == sorted(
            (request_ended for request_ended in waiting if end_ms[request_ended] <= now),
            key=lambda i: (end_ms[i], i),
        )
        waiting = (waiting - {*ended}) | {request}


@pytest.fixture(scope="module")
def small_chat() -> Trace:
    return generate(builtin("chat", sessions=150))


@pytest.mark.parametrize("mode", MODES, ids=["alone", "device", "victim", "tiers"])
@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_ends_without_requests_between_equal_immediate_ends(
    small_chat: Trace, policy: str, mode: dict[str, Any]
) -> None:
    mode = {**mode, "device_blocks": 400} if mode.get("device_blocks") else mode
    if "tiers" in mode:
        mode = {"tiers": (SimulatedOptions(capacity="900").in_blocks(None, small_chat.unique_blocks),)}
    usual = Replay(small_chat, ReplayConfig(600, policy, **mode)).run()
    at_once = Replay(small_chat, ReplayConfig(600, policy, decode_tokens_per_s=1e12, **mode)).run()
    late = Replay(small_chat, ReplayConfig(600, policy, decode_tokens_per_s=20, **mode))
    assert at_once.decisions_sha256 == usual.decisions_sha256
    report = late.run()
    assert report.decisions_sha256 != usual.decisions_sha256
    assert (report.decode_tokens_per_s, usual.decode_tokens_per_s) == (20, 0)
    assert report.prefix_hit_ratio <= report.optimum_hit_ratio
    audit(late.manager)


@pytest.mark.parametrize("policy", ["lru", "arc", "s3fifo", NaiveLRU])
def test_labels_change_nothing_for_policies_that_ignore_them(small_chat: Trace, policy: Any) -> None:
    hints = TraceHints.of(
        Hints(("stop", "tool_calls")[i % 2], priority=i % 3) for i in range(small_chat.requests)
    )
    labelled = dataclasses.replace(small_chat, hints=hints)
    reports = [Replay(trace, ReplayConfig(300, policy)).run() for trace in (small_chat, labelled)]
    assert reports[0].decisions_sha256 == reports[1].decisions_sha256


def test_with_bytes_and_late_ends_every_byte_is_right(small_chat: Trace) -> None:
    for mode in ({}, {"device_blocks": 300, "store": "on-device-eviction"}):
        config = ReplayConfig(600, decode_tokens_per_s=20, **mode)  # type: ignore[arg-type]
        data = DataPlane(600, 4096)
        report = Replay(small_chat, config, data).run()
        data.close()
        assert report.blocks_verified == report.offload_hit_blocks > 0
        assert report.mismatches_served == 0
        assert report.decisions_sha256 == Replay(small_chat, config).run().decisions_sha256


def test_in_a_victim_tier_a_block_dropped_meanwhile_is_no_duplicate() -> None:
    trace = generate(builtin("agent", sessions=3, sessions_per_minute=3))
    assert np.all(np.diff(trace.block_ids) > 0)
    config = ReplayConfig(2600, "lru", "all", 200, "on-device-eviction", decode_tokens_per_s=5)
    replay = Replay(trace, config)
    counts = []

    def check(done: int) -> None:
        device, slots = replay._device, duplicate_slots(replay.manager)
        assert device is not None
        assert slots is not None
        counts.append(len(slots))
        ids = TraceKeys.ids(replay.manager.index.keys_at(np.array(slots, np.int64)))
        assert device.contains(np.searchsorted(trace.block_ids, ids)).all()

    replay.run(check)
    assert max(counts) > 0, "there were duplicates to check"
    audit(replay.manager)


@pytest.mark.parametrize("speed", [-1, math.nan, math.inf, "fast", None])
def test_an_invalid_speed_is_one_clear_error(small_chat: Trace, speed: Any) -> None:
    message = "decode-tokens-per-s: (.* is invalid|missing); allowed: a number, 0 or more"
    with pytest.raises(ConfigError, match=message):
        Replay(small_chat, ReplayConfig(9, decode_tokens_per_s=speed))


def test_a_very_slow_request_ends_with_the_trace() -> None:
    assert ends_of([(0, 1, 1), (10**9, 0, 1)], 1e-300) == [[], [], [1, 0]]
