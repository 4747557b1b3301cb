"""Settings that a running engine reads from a file."""

from __future__ import annotations

import json
import logging
import os
import time
from pathlib import Path

import pytest

from kvoffload.core.manager import OffloadingManager
from kvoffload.core.plans import ON_COMPUTE, ON_DEVICE_EVICTION
from kvoffload.core.tenants import MAX_TENANTS, Quota
from kvoffload.errors import CombinedConfigError
from kvoffload.integrations.vllm.scheduler_side import live_settings
from kvoffload.integrations.vllm.scheduler_side.live_settings import LiveSettings
from kvoffload.integrations.vllm.shared.options import parse_options
from kvoffload.settings.watched import INTERVAL_S
from kvoffload.tiering.tiered_manager import TieredManager
from kvoffload.tiers.simulated import NoMemory, SimulatedTier
from kvoffload.tiers.spec import names_of
from support.naive.lru import NaiveLRU
from support.timeouts import HANGS_S


class Rig:
    """A manager of ten blocks, its live settings, and a clock that advances one second with each step."""

    def __init__(self, tmp_path: Path, store: str = ON_COMPUTE) -> None:
        self.path, self.now, self.store = tmp_path / "live.json", 0.0, store
        options = parse_options({"ram": 2**20, "policy": "lru", "store": self.store})
        self.live = LiveSettings(str(self.path), options, clock=lambda: self.now)
        self.new_manager()

    def new_manager(self) -> None:
        self.manager = OffloadingManager(10, key_bytes=8, policy="lru")
        self.manager.complete_store(self.manager.prepare_store([bytes([n]) * 8 for n in range(10)]))
        self.live.apply_to(self.manager)

    def write(self, text: str) -> None:
        new = self.path.with_suffix(".new")
        new.write_text(text)
        os.rename(new, self.path)

    def step(self) -> None:
        self.now += INTERVAL_S
        self.live.step()

    def step_until(self, policy: str) -> None:
        deadline = time.monotonic() + HANGS_S
        while self.manager.policy.name != policy or self.manager.advance_policy_change(0):
            assert time.monotonic() < deadline
            self.step()


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path)


def test_a_policy_changes_and_changes_back(rig: Rig) -> None:
    rig.step()
    order = rig.manager.policy.order()
    rig.write('{"policy": "arc"}')
    rig.step_until("arc")
    assert rig.manager.policy.order() == order
    rig.write('{"policy": "lru"}')
    rig.step_until("lru")
    assert rig.manager.policy.order() == order
    assert rig.manager.counters().ready == 10


def test_the_same_policy_changes_nothing(rig: Rig) -> None:
    before = rig.manager.policy
    rig.write('{"policy": "lru"}')
    for _ in range(5):
        rig.step()
    assert rig.manager.policy is before


def test_quotas_change(rig: Rig) -> None:
    rig.write('{"tenants": {"a": {"min": "512KiB"}, "b": {"max": "256KiB"}}}')
    rig.step()
    tenants = rig.manager.stats().tenants
    assert {name: (tenant.min, tenant.max) for name, tenant in tenants.items()} == {
        "a": (5, None),
        "b": (0, 2),
        "other": (0, None),
    }
    rig.write('{"policy": "arc"}')
    rig.step_until("arc")
    assert rig.manager.stats().tenants.keys() == {"a", "b", "other"}, "kept"
    rig.write('{"tenants": {}}')
    rig.step()
    assert rig.manager.stats().tenants.keys() == {"other"}


def test_quotas_that_a_tier_refuses_change_neither_ram_nor_another_tier(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A tier takes fewer different names in its life than RAM, so RAM had the new quotas already."""
    path, names = tmp_path / "live.json", [f"t{n}" for n in range(MAX_TENANTS - 1)]
    disks = [f"disk:{tmp_path / name}:1MiB" for name in "ab"]
    options = parse_options({"ram": 2**20, "policy": "lru", "tiers": disks})
    tiers = [SimulatedTier(capacity, key_bytes=8) for capacity in (100, 100)]
    for tier, name in zip(tiers, names_of(options.tiers), strict=True):
        tier.name = name
    manager = TieredManager(10, key_bytes=8, policy="lru", ram=NoMemory(10), tiers=tiers)
    first, second = manager.tier_names
    for name in names[:-1]:
        manager.set_tenants({name: Quota(1)})
        manager.set_tier_tenants(second, {name: Quota(1)})
    now = 0.0
    live = LiveSettings(str(path), options, clock=lambda: now)
    live.apply_to(manager)

    def write(name: str) -> None:
        nonlocal now
        quota = {"min": "512KiB"}
        path.write_text(json.dumps({"tenants": {name: quota | {"tiers": {first: quota, second: quota}}}}))
        now += INTERVAL_S
        live.step()

    write(names[0])
    before = manager.stats().tenants, manager.tier_tenants()
    assert before[0].keys() == {names[0], "other"}
    assert [quotas.keys() for quotas in before[1]] == [{names[0], "other"}] * 2
    write(names[-1])
    assert "nothing is changed" in caplog.text
    assert (manager.stats().tenants, manager.tier_tenants()) == before


def test_the_used_part_of_ram_changes(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    rig.write('{"ram": "512KiB"}')
    rig.step()
    assert (rig.manager.usable_blocks, rig.manager.counters().ready) == (5, 5)
    assert "5 blocks are in use" in caplog.text
    rig.write('{"policy": "arc"}')
    rig.step_until("arc")
    assert rig.manager.usable_blocks == 5, "kept"
    rig.write('{"ram": "1MiB"}')
    rig.step()
    assert (rig.manager.usable_blocks, rig.manager.counters().free) == (10, 5)


def test_the_size_changes_in_steps_and_a_change_is_reported_once(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_settings, "NUM_BLOCKS", 2)
    rig.write('{"ram": "512KiB"}')
    rig.now += INTERVAL_S
    assert [rig.live.step() for _ in range(5)] == [False, False, True, False, False]


def test_size_and_quotas_change_together(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    """New quotas must fit the new size, and old quotas the old size; otherwise nothing changes."""
    rig.write('{"tenants": {"a": {"min": "896KiB"}}}')
    rig.step()
    rig.write('{"ram": "512KiB", "tenants": {"a": {"min": "256KiB"}}}')
    rig.step()
    assert rig.manager.usable_blocks == 5
    rig.write('{"ram": "512KiB", "tenants": {"a": {"min": "896KiB"}}}')
    rig.step()
    assert (rig.manager.usable_blocks, rig.manager.tenants["a"].min_blocks) == (5, 2)
    many = ", ".join(f'"{number}": {{"min": "0"}}' for number in range(62))
    rig.write(f'{{"ram": "1MiB", "tenants": {{{many}}}}}')
    rig.step()
    rig.step()
    assert (rig.manager.usable_blocks, rig.manager.tenants["a"].min_blocks) == (5, 2)
    rig.write('{"ram": "1MiB", "tenants": {"a": {"min": "896KiB"}}}')
    rig.step()
    assert (rig.manager.usable_blocks, rig.manager.tenants["a"].min_blocks) == (10, 8)
    rig.write('{"ram": "512KiB"}')
    rig.step()
    assert (rig.manager.usable_blocks, rig.manager.tenants["a"].min_blocks) == (10, 8)
    assert caplog.text.count("nothing is changed") == 3


def test_quotas_that_are_refused_after_a_growth_report_no_change(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    rig.write('{"ram": "512KiB", "tenants": {"a": {"min": "256KiB"}}}')
    rig.step()
    caplog.set_level(logging.INFO)
    many = ", ".join(f'"{number}": {{"min": "0"}}' for number in range(62))
    rig.write(f'{{"ram": "1MiB", "tenants": {{{many}}}}}')
    rig.now += INTERVAL_S
    assert [rig.live.step() for _ in range(3)] == [False, False, False]
    assert rig.manager.usable_blocks == 5
    assert "nothing is changed" in caplog.text
    assert "blocks are in use" not in caplog.text


@pytest.mark.parametrize(
    "text",
    [
        '{"ram": "2MiB"}',
        '{"ram": "1KiB"}',
        '{"ram": "0"}',
        '{"policy": "lur"}',
        '{"polcy": "arc"}',
        "{",
        '{"policy": 3}',
        '{"tenants": {"a": {"min": "much"}}}',
        '{"tenants": {"a": {"min": "2MiB"}}}',
    ],
)
def test_wrong_settings_change_nothing_and_are_logged_once(
    rig: Rig, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    rig.write(text)
    with caplog.at_level(logging.ERROR):
        for _ in range(5):
            rig.step()
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert "nothing is changed" in caplog.text
    assert rig.manager.policy.name == "lru"
    rig.write('{"policy": "arc"}')
    rig.step_until("arc")


def test_a_policy_that_fails_when_it_is_made(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    rig.write(f'{{"policy": "{__name__}:Broken"}}')
    deadline = time.monotonic() + HANGS_S
    while "cannot be prepared" not in caplog.text:
        assert time.monotonic() < deadline
        rig.step()
    assert "no memory for it" in caplog.text
    assert rig.manager.policy.name == "lru"
    rig.write('{"policy": "arc"}')
    rig.step_until("arc")


class Broken(NaiveLRU):
    """A policy whose constructor raises."""

    def __init__(self, index: object) -> None:
        raise RuntimeError("no memory for it")


def test_the_file_changes_again_during_a_change(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_settings, "NUM_BLOCKS", 1)
    rig.write('{"policy": "fifo"}')
    deadline = time.monotonic() + HANGS_S
    while not rig.manager.advance_policy_change(0):
        assert time.monotonic() < deadline
        rig.step()
    rig.write('{"policy": "lru"}')
    rig.step()
    assert rig.manager.advance_policy_change(0), "the first change continues"
    rig.step_until("fifo")
    rig.step_until("lru")


def test_a_policy_that_fails_when_it_adopts_blocks(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    rig.write(f'{{"policy": "{__name__}:FailsLater"}}')
    deadline = time.monotonic() + HANGS_S
    while "the policy stays lru" not in caplog.text:
        assert time.monotonic() < deadline
        rig.step()
    order = rig.manager.policy.order()
    assert rig.manager.policy.name == "lru"
    assert len(order) == 10
    rig.manager.reset()
    rig.step()
    rig.write('{"policy": "arc"}')
    rig.step_until("arc")


class FailsLater(NaiveLRU):
    """A policy that raises when it adopts a block."""

    def insert(self, slot: int, key: bytes) -> None:
        raise RuntimeError("not this block")


def test_a_file_in_another_encoding(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    rig.path.write_bytes('{"tenants": {"Müller": {}}}'.encode("latin-1"))
    for _ in range(3):
        rig.step()
    assert caplog.text.count("nothing is changed") == 1
    rig.write("[" * 100_000)
    rig.step()
    assert caplog.text.count("nothing is changed") == 2


def test_a_victim_tier_has_no_quotas(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig(tmp_path, ON_DEVICE_EVICTION)
    rig.write('{"tenants": {"a": {"min": "512KiB"}}}')
    rig.step()
    assert "dropped blocks belong to no request" in caplog.text
    assert rig.manager.stats().tenants == {}
    rig.write('{"tenants": {}}')
    rig.step()
    assert caplog.text.count("nothing is changed") == 1


def test_a_new_manager_gets_the_policy_of_the_file(rig: Rig) -> None:
    rig.write('{"policy": "arc"}')
    rig.step_until("arc")
    rig.new_manager()
    assert rig.manager.policy.name == "lru"
    rig.step_until("arc")


def test_wrong_options(tmp_path: Path) -> None:
    with pytest.raises(CombinedConfigError, match="absolute path"):
        parse_options({"ram": "1GiB", "live_settings": "live.json"})
    with pytest.raises(CombinedConfigError, match="one policy"):
        parse_options({"ram": "1GiB,shared=node", "live_settings": str(tmp_path / "live.json")})
