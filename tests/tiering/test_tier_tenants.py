"""Quotas of tiers behind RAM: owners of blocks, victims of a scan, owners after a restart."""

from __future__ import annotations

import string
from pathlib import Path

import numpy as np
import pytest

from kvoffload.core.hints import Hints
from kvoffload.core.tenants import Quota
from kvoffload.errors import ConfigError
from kvoffload.structures.keys import Keys
from kvoffload.tiering.tiered_manager import TieredManager
from kvoffload.tiers.simulated import NoMemory, SimulatedTier
from kvoffload.tiers.striped import StripedTier
from support.disk_blocks import Disk, keys_of
from support.letters import keys, text
from support.tiering_rig import Rig

SCAN = string.ascii_uppercase


def manager_with(tier: SimulatedTier | StripedTier, ram_blocks: int = 40) -> TieredManager:
    return TieredManager(
        ram_blocks, ram=NoMemory(ram_blocks), tiers=[tier], key_bytes=1, max_in_flight=1.0,
        tenants={"a": Quota(), "b": Quota()},
    )  # fmt: skip


def serve(manager: TieredManager, letters: str, tenant: str) -> None:
    """Store blocks as one request of a tenant, and write them to the tier."""
    ctx = manager.begin_request(tenant, keys(letters), hints=Hints(tenant=tenant))
    if (plan := manager.prepare_store(keys(letters), ctx)) is not None:
        manager.complete_store(plan)
    manager.finish_request(ctx)
    assert manager.settle(1.0)


def in_tier(manager: TieredManager, letters: str) -> str:
    present = manager.lanes[0].tier.contains(Keys.pack(keys(letters), 1))
    return text(key for key, is_here in zip(keys(letters), present, strict=True) if is_here)


def held(manager: TieredManager) -> dict[str, int]:
    [tenants] = manager.tier_tenants()
    return {name: counts.held for name, counts in tenants.items()}


@pytest.mark.parametrize(("quotas", "kept"), [({}, ""), ({"a": Quota(4)}, "abcd")])
def test_a_scan_leaves_a_tenant_its_minimum_of_the_tier(quotas: dict[str, Quota], kept: str) -> None:
    manager = manager_with(SimulatedTier(10, key_bytes=1))
    manager.set_tier_tenants("simulated", quotas)
    serve(manager, "abcd", "a")
    for letter in SCAN:
        serve(manager, letter, "b")
    assert in_tier(manager, "abcd") == kept
    assert held(manager) == ({"a": 4, "other": 6} if quotas else {})


def test_a_tenant_at_its_maximum_evicts_its_own_blocks() -> None:
    manager = manager_with(SimulatedTier(10, key_bytes=1))
    manager.set_tier_tenants("simulated", {"b": Quota(0, 3)})
    serve(manager, "abcd", "a")
    for letter in "UVWXYZ":
        serve(manager, letter, "b")
    assert held(manager) == {"b": 3, "other": 4}
    assert in_tier(manager, "abcdUVWXYZ") == "abcdXYZ"


def test_an_offer_with_blocks_of_two_tenants_gives_each_its_own() -> None:
    """`flush` offers all blocks of RAM, without a request."""
    manager = manager_with(SimulatedTier(40, key_bytes=1))
    manager.set_tier_tenants("simulated", {"a": Quota(), "b": Quota()})
    serve(manager, "abc", "a")
    serve(manager, "XY", "b")
    serve(manager, "pqrs", "nobody's")
    manager.lanes[0].tier.delete(Keys.pack(keys("abcXYpqrs"), 1))
    assert held(manager) == {"a": 0, "b": 0, "other": 0}
    assert manager.flush(1.0)
    assert held(manager) == {"a": 3, "b": 2, "other": 4}


def test_a_stripe_divides_quotas() -> None:
    tier = StripedTier([SimulatedTier(20, key_bytes=1, identity=number) for number in (1, 2)])
    manager = manager_with(tier)
    manager.set_tier_tenants(tier.name, {"a": Quota(10, 13), "b": Quota(0, 1)})
    [tenants] = manager.tier_tenants()
    assert (tenants["a"].min, tenants["a"].max, tenants["b"].max, tenants["other"].max) == (10, 12, 2, None)
    serve(manager, string.ascii_lowercase, "a")
    assert 6 <= held(manager)["a"] <= 12


def test_impossible_quotas_are_refused() -> None:
    manager = manager_with(SimulatedTier(10, key_bytes=1))
    for tier, quotas, message in (
        ("disk", {"a": Quota()}, "tier: 'disk' is invalid; allowed: simulated"),
        ("simulated", {"c": Quota()}, "a tenant of a tier needs a quota of RAM"),
        ("simulated", {"a": Quota(11)}, "more than the capacity of 10"),
    ):
        with pytest.raises(ConfigError, match=message):
            manager.set_tier_tenants(tier, quotas)
    rig = Rig(tenants={"a": Quota()})
    rig.manager.set_tier_tenants("t0", {})
    with pytest.raises(ConfigError, match="the tier t0 takes no quotas"):
        rig.manager.set_tier_tenants("t0", {"a": Quota()})


# ---- a disk


def owned_by(tenant: list[str], disk: Disk, quotas: dict[str, Quota]) -> None:
    """Set quotas; new blocks belong to the tenant that `tenant` names at that time."""
    disk.tier.set_tenants(quotas, lambda keys: tenant[0])


def counts(disk: Disk) -> dict[str, int]:
    return {name: counts.held for name, counts in disk.tier.tenants().items()}


def test_after_a_restart_a_block_belongs_to_the_tenant_that_loads_it(tmp_path: Path) -> None:
    tenant, quotas = ["a"], {"a": Quota(4), "b": Quota(2)}
    disk = Disk(tmp_path, 8)
    owned_by(tenant, disk, quotas)
    size = disk.layout.num_blocks
    assert disk.write(range(size)) == [*range(size)]
    assert counts(disk) == {"a": size, "b": 0, "other": 0}
    disk.tier.close()
    disk = Disk(tmp_path, 8)
    disk.versions = dict.fromkeys(range(size), 0)
    owned_by(tenant, disk, quotas)
    assert counts(disk) == {"a": 0, "b": 0, "other": size}, "owners are not on the disk"
    assert disk.read([0, 1, 2]) == [0, 1, 2]
    assert counts(disk) == {"a": 3, "b": 0, "other": size - 3}
    disk.audit()
    tenant[0] = "b"
    for number in range(100, 100 + size):
        disk.write([number])
        disk.audit()
    assert disk.here([0, 1, 2]) == [0, 1, 2], "below the minimum of a"
    assert disk.here(range(3, size)) == [], "blocks without an owner are evicted first"
    assert counts(disk) == {"a": 3, "b": size - 3, "other": 0}
    disk.tier.close()


def test_a_cleared_disk_has_no_owners(tmp_path: Path) -> None:
    disk = Disk(tmp_path, 8)
    owned_by(["a"], disk, {"a": Quota(4)})
    disk.write([1, 2, 3])
    disk.tier.clear()
    assert counts(disk) == {"a": 0, "other": 0}
    assert disk.write([4, 5]) == [4, 5]
    assert counts(disk) == {"a": 2, "other": 0}
    disk.audit()
    disk.tier.close()


def test_random_owners_agree_with_a_count(tmp_path: Path) -> None:
    """The seed is the parameter of the generator: 37."""
    draw, tenant = np.random.default_rng(37), ["a"]
    disk = Disk(tmp_path, 12)
    owned_by(tenant, disk, {"a": Quota(4), "b": Quota(0, 3)})
    owners: dict[int, str] = {}
    for _ in range(200):
        tenant[0] = str(draw.choice(["a", "b", "c"]))
        numbers = draw.choice(60, 3, replace=False).tolist()
        stored = [number for number in numbers if number not in disk.here(numbers)]
        owners.update(dict.fromkeys(disk.write(stored), tenant[0]))
        here = disk.here(range(60))
        expected = [owners[number] for number in here]
        held_by = counts(disk)
        assert held_by["a"] == expected.count("a")
        assert held_by["b"] == expected.count("b") <= 3
        assert held_by["other"] == expected.count("c")
        disk.audit()
    assert len(keys_of(here)) == disk.layout.num_blocks
    disk.tier.close()
