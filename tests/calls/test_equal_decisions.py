"""Random calls of every kind of manager, recorded and replayed with equal decisions."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import rule, run_state_machine_as_test

from kvoffload.calls import hint_numbers
from kvoffload.calls import parts as parts_module
from kvoffload.calls import recorded as recorded_module
from kvoffload.calls import recorder as recorder_module
from kvoffload.calls import replay as replay_module
from kvoffload.calls.file_format import CLOSED, CONTINUED, FrameReader
from kvoffload.calls.parts import parts_of
from kvoffload.calls.recorded import RecordedManager
from kvoffload.calls.replay import CallReplay
from kvoffload.calls.series import replay_series
from kvoffload.core.admission import ADMISSIONS
from kvoffload.core.hints import Hints
from kvoffload.core.plans import ON_COMPUTE, STORES
from kvoffload.core.policy import POLICIES
from kvoffload.core.protection import Protected
from kvoffload.core.slots import SlotArray
from kvoffload.core.tenants import Quota
from kvoffload.errors import ConfigError
from kvoffload.structures.jit import BoolArray
from kvoffload.structures.keys import Keys
from kvoffload.testing import state_machine as machine_module
from kvoffload.testing.state_machine import ManagerMachine
from support.naive.lru import NaiveLRU
from support.policy_changes import with_policy_changes
from support.recorded_calls import complete, recorded, replayed, rotating, take
from support.resizes import with_resizes
from support.tenant_machine import TenantMachine

RULES = ["all", "reuse:2", "tinylfu", "worth"]
IN_PYTHON = [
    "support.naive.lru:NaiveLRU",
    "support.naive.arc:NaiveARC",
    "support.naive.wtinylfu:NaiveWTinyLFU",
]
CHANGES = ("lru", "arc", "hazard,history_capacity=9,sample_capacity=2,warm_up=1", "fifo")


@pytest.fixture(autouse=True)
def _small_rings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded_module, "RING_WORDS", 1 << 16)
    # The state machine copies a manager before a refused call; a recorded manager's threads cannot be copied.
    monkeypatch.setattr(machine_module, "snapshot", lambda *_, **__: None)


class RecordedMachine(ManagerMachine):
    """State machine of managers that replays the recorded calls at the end."""

    def teardown(self) -> None:
        manager = self.manager
        assert isinstance(manager, RecordedManager)
        manager.end_recording()
        assert manager.recorder.ended == "closed"
        outcome = replayed(manager.recorder.path)
        assert outcome.difference is None, outcome.difference
        assert (outcome.num_cut, outcome.warnings, outcome.end) == (0, [], "closed")
        manager.recorder.path.unlink()


class RecordedTenantMachine(RecordedMachine, TenantMachine):
    """`RecordedMachine` with tenants whose quotas change."""


class RotatingMachine(RecordedMachine):
    """`RecordedMachine` with rotations at any time. Each part is replayed alone."""

    @rule()
    def rotate(self) -> None:
        """Begin a part, or write the state at its beginning."""
        take(self.manager)

    def teardown(self) -> None:
        manager = self.manager
        complete(manager)
        manager.end_recording()
        parts = parts_of(manager.recorder.path)
        for path in parts:
            outcome = replayed(path)
            assert outcome.difference is None, (path.name, outcome.difference)
            assert (outcome.num_cut, outcome.warnings) == (0, [])
            assert outcome.end == (CLOSED if path == parts[-1] else CONTINUED)
        total = replay_series(parts)
        assert (total.difference, total.num_parts, total.num_calls) == (
            None, len(parts), sum(replayed(path).num_calls for path in parts)
        )  # fmt: skip
        for path in parts:
            path.unlink()


class RotatingTenantMachine(RotatingMachine, TenantMachine):
    """`RotatingMachine` with tenants whose quotas change."""


def check(
    policy: str,
    admission: str,
    store: str,
    key_bytes: int,
    share: float,
    changes: tuple[str, ...] = (),
    base: type[RecordedMachine] = RecordedMachine,
    *,
    resizes: bool = False,
    make_recorded: Callable[..., RecordedManager] = recorded,
) -> None:
    with tempfile.TemporaryDirectory() as folder:

        def make() -> RecordedManager:
            return make_recorded(
                Path(folder) / "random.calls",
                policy=policy,
                admission=admission,
                store=store,
                key_bytes=key_bytes,
                enable_events=True,
            )

        machine: Any = type("Machine", (base,), {"make": staticmethod(make)})
        if changes:
            machine = with_policy_changes(machine, changes)
        if resizes:
            machine = with_resizes(machine)
        examples = max(2, round(settings().max_examples * share))
        run_state_machine_as_test(
            machine, settings=settings(max_examples=examples, stateful_step_count=40, deadline=None)
        )


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("policy", POLICIES.names())
def test_a_policy(policy: str, store: str) -> None:
    check(policy, "all", store, 36, 0.15)


@pytest.mark.parametrize("store", STORES)
def test_changes_of_the_policy(store: str) -> None:
    check("lru", "all", store, 32, 0.3, CHANGES)


@pytest.mark.parametrize("store", STORES)
def test_changes_of_policy_and_quotas(store: str) -> None:
    check("lru", "all", store, 32, 0.2, CHANGES, RecordedTenantMachine)


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("policy", ["lru", "wtinylfu", "hazard", "support.naive.lru:NaiveLRU"])
def test_resizes(policy: str, store: str) -> None:
    check(policy, "all", store, 32, 0.2, resizes=True)


def test_resizes_and_changes_of_policy_and_quotas() -> None:
    check("lru", "all", "on-compute", 32, 0.2, CHANGES, RecordedTenantMachine, resizes=True)


@pytest.mark.parametrize("policy", ["support.naive.lru:NaiveLRU", "support.naive.fifo:NaiveFIFO"])
def test_a_policy_that_cannot_be_recorded_is_refused(policy: str, tmp_path: Path) -> None:
    manager = recorded(tmp_path / "one.calls", policy="lru", key_bytes=8)
    change = manager.prepare_policy_change(policy)
    with pytest.raises(ConfigError, match="only to a policy of kvoffload"):
        manager.begin_policy_change(change)
    manager.end_recording()
    manager.begin_policy_change(change)
    assert manager.policy is change.new


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("policy", ["lru", "hazard", "support.naive.lru:NaiveLRU"])
def test_tenants(policy: str, store: str) -> None:
    check(policy, "all", store, 36, 0.25, base=RecordedTenantMachine)


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("policy", IN_PYTHON)
def test_a_policy_in_python(policy: str, store: str) -> None:
    check(policy, "all", store, 13, 0.15)


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("admission", ADMISSIONS.names())
@pytest.mark.slow
def test_an_admission_rule(admission: str, store: str) -> None:
    check("lru", admission, store, 32, 0.1)
    check("support.naive.lru:NaiveLRU", admission, store, 32, 0.1)


@pytest.fixture
def _rotating(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every part large enough for a rotation, and pause the threads of recorders."""
    monkeypatch.setattr(recorder_module, "POLL_S", 1e6)
    monkeypatch.setattr(parts_module, "PARTS", 1 << 40)


@pytest.mark.slow
@pytest.mark.usefixtures("_rotating")
@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("policy", POLICIES.names())
def test_parts_of_a_policy(policy: str, store: str) -> None:
    check(policy, "all", store, 36, 0.6, base=RotatingMachine, make_recorded=rotating)


@pytest.mark.slow
@pytest.mark.usefixtures("_rotating")
@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("admission", ADMISSIONS.names())
def test_parts_of_a_rule(admission: str, store: str) -> None:
    check("lru", admission, store, 32, 0.6, base=RotatingMachine, make_recorded=rotating)


@pytest.mark.slow
@pytest.mark.usefixtures("_rotating")
@pytest.mark.parametrize("store", STORES)
def test_parts_with_changes_of_policy_and_quotas_and_resizes(store: str) -> None:
    check("lru", "all", store, 32, 0.6, CHANGES, RotatingTenantMachine, resizes=True, make_recorded=rotating)


def traffic(
    manager: RecordedManager, seed: int, requests: int = 200, between: Callable[[], None] = lambda: None
) -> None:
    """Serve requests with shared prefixes, single lookups, parts of plans, damage, pins, hints and resets.

    Args:
        between: called between two calls of a request.
    """
    chance = random.Random(seed)
    prefixes = [[chance.randbytes(36) for _ in range(20)] for _ in range(6)]
    for number in range(requests):
        keys = chance.choice(prefixes)[: chance.randint(1, 20)] + [chance.randbytes(36) for _ in range(3)]
        hints = Hints(tenant=f"team {number % 3}", priority=number % 2)
        ctx = manager.begin_request(f"request-{number}", keys[:2] if number % 3 else keys, hints=hints)
        if number % 4 == 0:
            manager.expect(ctx)
        if number % 5 == 0:
            for key in keys[:4]:
                manager.lookup_key(key, ctx)
            manager.contains(keys[:6], ctx)
        between()
        ready = manager.lookup(keys, ctx).num_ready
        if number % 8 == 0:
            manager.withdraw(ctx)
        if ready:
            *pieces, last = manager.prepare_load(keys[:ready], ctx).split()
            between()
            for piece in pieces:
                manager.complete_load(piece)
            manager.complete_load(last, damaged=[0] if chance.random() < 0.1 else [])
            pins, _ = manager.pin_ready(keys)
            rows = np.arange(len(pins))
            for piece in pins.split([rows[1:], rows[:1], rows[:0]] if number % 2 else [rows[:0], rows]):
                manager.unpin(piece)
        plan = manager.prepare_store(
            keys if number % 7 else Keys.pack(keys, 36), ctx, admitted=number % 9 == 0
        )
        between()
        if plan is not None and number % 2:
            for piece in plan.split():
                manager.complete_store(piece, success=chance.random() < 0.9)
        elif plan is not None:
            if number % 10 == 0:
                manager.reset()
            manager.complete_store(plan, success=chance.random() < 0.9)
        if number % 11 == 0:
            manager.discard(keys[:2])
            manager.keep(keys[:3])
            manager.touch(keys[:5])
        end = Hints(finish_reason="stop" if number % 2 else "the user's own words")
        manager.finish_request(ctx, keys if number % 6 == 0 else (), hints=end)
        if number % 60 == 59:
            manager.reset(drop_in_flight=True)


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("policy", ["hazard", "wtinylfu", "arc", "gdsf", "support.naive.lru:NaiveLRU"])
def test_traffic(policy: str, store: str, tmp_path: Path) -> None:
    for seed in range(max(1, settings().max_examples // 20)):
        manager = recorded(tmp_path / "kv.calls", 64, policy=policy, store=store, key_bytes=36)
        traffic(manager, seed)
        manager.end_recording()
        outcome = replayed(manager.recorder.path)
        assert outcome.difference is None, (seed, outcome.difference)
        assert outcome.header.keys == ("whole" if ":" in policy else "hashes")
        assert {"lookup", "prepare_store", "prepare_load", "unpin", "reset", "discard"} < set(outcome.calls)


def check_parts(manager: RecordedManager, change: Callable[[random.Random], None] = lambda _: None) -> None:
    """Record traffic in parts that begin while requests, loads and stores run; replay each part alone."""
    chance = random.Random(7)

    def between() -> None:
        if chance.random() < 0.15:
            take(manager)
        change(chance)

    traffic(manager, 7, 70, between)
    complete(manager)
    manager.end_recording()
    parts = parts_of(manager.recorder.path)
    assert len(parts) > 5
    outcomes = [replayed(path) for path in parts]
    assert [outcome.difference for outcome in outcomes] == [None] * len(parts)
    assert sum(outcome.num_calls for outcome in outcomes) == manager._log.num_calls


@pytest.mark.usefixtures("_rotating")
@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("policy", POLICIES.names())
def test_parts_of_traffic(policy: str, store: str, tmp_path: Path) -> None:
    check_parts(rotating(tmp_path / "kv.calls", 64, policy=policy, store=store, key_bytes=36))


@pytest.mark.usefixtures("_rotating")
@pytest.mark.parametrize("admission", RULES)
def test_parts_of_traffic_with_a_rule(admission: str, tmp_path: Path) -> None:
    check_parts(rotating(tmp_path / "kv.calls", 64, admission=admission, key_bytes=36))


@pytest.mark.usefixtures("_rotating")
@pytest.mark.parametrize("store", STORES)
def test_parts_during_changes(store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Policy and size change in steps, with quotas of tenants; hints are renumbered."""
    monkeypatch.setattr(hint_numbers, "MOST_HINTS", 5)
    monkeypatch.setattr(replay_module, "MOST_HINTS", 5)
    quotas = {"team 0": Quota(8, 40), "team 1": Quota(4)}
    manager = rotating(tmp_path / "kv.calls", 64, store=store, key_bytes=36, tenants=quotas)

    def change(chance: random.Random) -> None:
        if not manager.advance_policy_change(1) and chance.random() < 0.2:
            manager.begin_policy_change(manager.prepare_policy_change(chance.choice(["lru", "arc", "gdsf"])))
        if not manager.advance_resize(1) and chance.random() < 0.2:
            manager.begin_resize(chance.randint(20, 64))

    check_parts(manager, change)
    with FrameReader(parts_of(manager.recorder.path)[-1]) as reader:
        assert len(CallReplay(reader)._hints) <= 5


def test_a_recording_has_no_key_and_no_text(tmp_path: Path) -> None:
    manager = recorded(tmp_path / "kv.calls", key_bytes=36)
    key = b"the engine's hash of a prompt, 36 B."
    assert len(key) == 36
    ctx = manager.begin_request("the id", [key], hints=Hints(tenant="the tenant", finish_reason="the stop"))
    manager.prepare_store([key], ctx)
    manager.finish_request(ctx)
    manager.end_recording()
    with open(manager.recorder.path, "rb") as file:
        content = file.read()
    assert replayed(manager.recorder.path).difference is None
    for secret in (b"the engine", b"the id", b"the tenant", b"the stop"):
        assert secret not in content


class Failing(NaiveLRU):
    """Policy with a bug: each method sometimes raises after its work."""

    name = "failing"
    _num_calls = 0

    def _fail(self, error: type[Exception]) -> None:
        self._num_calls += 1
        if self._num_calls % 5 == 0:
            raise error("a bug")

    def access(self, slots: SlotArray, reused: BoolArray) -> None:
        super().access(slots, reused)
        self._fail(KeyError)

    def replace(self, keys: Keys, slots: SlotArray, num_free: int, protected: Protected) -> None:
        self._fail(ValueError)
        super().replace(keys, slots, num_free, protected)

    def remove(self, slots: SlotArray) -> None:
        super().remove(slots)
        self._fail(ZeroDivisionError)


class NamesFreeSlots(NaiveLRU):
    """Policy that chooses slot 0 as every victim."""

    name = "wrong"

    def victim(self, key: bytes, protected: Protected) -> int:
        return 0


@pytest.mark.parametrize(
    ("policy", "store"),
    [*((Failing, store) for store in STORES), (NamesFreeSlots, ON_COMPUTE)],
)
def test_exceptions_of_a_policy_are_replayed(policy: type[NaiveLRU], store: str, tmp_path: Path) -> None:
    manager = recorded(tmp_path / "kv.calls", 4, policy=policy, store=store, key_bytes=36)
    chance, raised = random.Random(2), list[str]()

    def attempt(call: Callable[[], Any]) -> Any:
        try:
            return call()
        except Exception as error:
            raised.append(type(error).__name__)
            return None

    keys = [chance.randbytes(36) for _ in range(9)]
    for number in range(60):
        batch = keys[number % 7 : number % 7 + 3]
        ctx = manager.begin_request("x", batch)
        if ready := manager.lookup(batch, ctx).num_ready:
            load = attempt(lambda: manager.prepare_load(batch[:ready], ctx))  # noqa: B023
            if load is not None:
                attempt(lambda: manager.complete_load(load, damaged=[0]))  # noqa: B023
        plan = attempt(lambda: manager.prepare_store(batch, ctx))  # noqa: B023
        if plan is not None:
            attempt(lambda: manager.complete_store(plan, success=bool(number % 3)))  # noqa: B023
        attempt(lambda: manager.touch(batch))  # noqa: B023
        attempt(lambda: manager.finish_request(ctx))  # noqa: B023
        if number % 20 == 19:
            manager.reset(drop_in_flight=True)
    manager.end_recording()
    assert len({*raised}) >= (3 if policy is Failing else 1)
    outcome = replayed(manager.recorder.path)
    assert outcome.difference is None, outcome.difference


def test_calls_with_invalid_arguments_are_not_recorded(tmp_path: Path) -> None:
    manager = recorded(tmp_path / "kv.calls", policy=NaiveLRU, store=ON_COMPUTE)
    ctx = manager.begin_request("x")
    for call in (manager.lookup, manager.touch, manager.prepare_store, manager.prepare_load):
        with pytest.raises(ValueError, match="has 5 bytes"):
            call([b"short"], ctx)
    manager.end_recording()
    assert not replayed(manager.recorder.path).calls
