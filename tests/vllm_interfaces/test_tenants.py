"""The option ``tenants``: quotas in bytes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvoffload.core.tenants import Quota
from kvoffload.errors import CombinedConfigError
from kvoffload.integrations.vllm.shared.options import parse_options
from kvoffload.integrations.vllm.shared.tenants import TenantOptions
from kvoffload.tiering.tiered_manager import TieredManager
from kvoffload.tiers.simulated import NoMemory, SimulatedTier
from kvoffload.tiers.spec import parse_tiers

GIVEN = {"a": {"min": "1GiB", "max": "2GiB"}, "other": {"max": 2**29}}
QUOTAS = TenantOptions({"a": (2**30, 2**31), "other": (0, 2**29)}, {})


def tenants(value: Any, **options: Any) -> TenantOptions:
    parsed = parse_options({"ram": "4GiB", "tenants": value, **options}).tenants
    assert parsed is not None
    return parsed


def message(value: Any, **options: Any) -> str:
    with pytest.raises(CombinedConfigError) as caught:
        parse_options({"ram": "4GiB", "tenants": value, **options})
    (problem,) = caught.value.problems
    return str(problem)


def test_two_forms() -> None:
    assert tenants(GIVEN) == tenants(json.dumps(GIVEN)) == QUOTAS
    assert parse_options({"ram": "4GiB"}).tenants is None


def test_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVOFFLOAD_TENANTS", json.dumps(GIVEN))
    assert parse_options({"ram": "4GiB"}).tenants == QUOTAS


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("a=1GiB", "tenants: 'a=1GiB' is invalid; allowed: {"),
        ({"a": "1GiB"}, "tenants.a: '1GiB' is invalid; allowed: {"),
        ({"a": {"most": 1}}, "tenants.a.most"),
        ({"a": {"min": "much"}}, "tenants.a.min"),
        ({"a": {"min": "2GiB", "max": "1GiB"}}, "tenants.a.max"),
        ({"a": {"min": "3GiB"}, "b": {"min": "2GiB"}}, "add up to 5368709120 bytes; ram has 4294967296"),
        ({str(number): {} for number in range(63)}, "allowed: up to 62 tenants"),
        ({"": {"min": 1}}, "a tenant needs a name"),
    ],
)
def test_wrong_quotas_are_refused(value: Any, expected: str) -> None:
    assert expected in message(value)


def test_a_victim_tier_has_no_quotas() -> None:
    assert "dropped blocks belong to no request" in message(GIVEN, store="on-device-eviction")


def test_a_shared_pool_has_no_quotas() -> None:
    assert "with shared RAM there are no quotas" in message(GIVEN, ram="4GiB,shared=node")


TIERED = {"a": {"min": "1GiB", "tiers": {"disk": {"min": "10GiB", "max": "20GiB"}}}}
DISK = "disk:/nvme/kv:40GiB"


def test_quotas_of_tiers() -> None:
    parsed = tenants(TIERED, tiers=[DISK])
    assert parsed.ram == {"a": (2**30, None)}
    assert parsed.tiers == {"disk": {"a": (10 * 2**30, 20 * 2**30)}}


@pytest.mark.parametrize(
    ("tiers", "expected"),
    [
        ([], "tenants: 'tiers.disk' is invalid; allowed as tiers: none"),
        ([f"{DISK},label=nvme"], "allowed as tiers: nvme"),
        (["valkey://cache:6379/kv?label=disk"], "allowed as tiers: none"),
        (["disk:/nvme/kv:9GiB"], "the minimums exceed its capacity of 9663676416 bytes"),
    ],
)
def test_quotas_of_unsuitable_tiers_are_refused(tiers: list[str], expected: str) -> None:
    assert expected in message(TIERED, tiers=tiers)


def test_wrong_quotas_of_tiers_name_the_option() -> None:
    assert "tenants.a.tiers.disk.most" in message({"a": {"tiers": {"disk": {"most": 1}}}}, tiers=[DISK])
    assert "tenants.a.tiers: 'disk'" in message({"a": {"tiers": "disk"}}, tiers=[DISK])


def test_open_tiers_get_quotas_in_their_blocks() -> None:
    given = TenantOptions({"a": (0, None), "b": (0, None)}, {"simulated": {"a": (10 * 2**30, None)}})
    options = parse_tiers("tiers", "simulated:40GiB")
    manager = TieredManager(
        8, ram=NoMemory(8), tiers=[SimulatedTier(400, key_bytes=32)], tenants=given.in_blocks(2**32, 8)
    )
    given.set_tiers(manager, options)
    [counts] = manager.tier_tenants()
    assert (counts["a"].min, counts["a"].max) == (100, None)
    TenantOptions({"a": (0, None)}, {}).set_tiers(manager, options)
    assert [*manager.tier_tenants()[0]] == ["other"], "a change replaces all quotas"


def test_blocks_of_a_pool() -> None:
    assert QUOTAS.in_blocks(2**32, 1001) == {"a": Quota(250, 500), "other": Quota(0, 125)}
    assert TenantOptions({"a": (0, 1)}, {}).in_blocks(2**32, 10) == {"a": Quota(0, 1)}
