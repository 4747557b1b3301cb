"""The option ``tenants``: quotas in bytes, and quotas that follow a file."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from kvoffload.core.tenants import Quota
from kvoffload.errors import CombinedConfigError
from kvoffload.integrations.vllm.shared.options import parse_options
from kvoffload.integrations.vllm.shared.tenants import QuotaBytes, TenantOptions, in_blocks

GIVEN = {"a": {"min": "1GiB", "max": "2GiB"}, "other": {"max": 2**29}}
QUOTAS = {"a": QuotaBytes(2**30, 2**31), "other": QuotaBytes(0, 2**29)}


def tenants(value: Any, **options: Any) -> TenantOptions:
    found = parse_options({"ram": "4GiB", "tenants": value, **options}).tenants
    assert found is not None
    return found


def message(value: Any, **options: Any) -> str:
    with pytest.raises(CombinedConfigError) as caught:
        parse_options({"ram": "4GiB", "tenants": value, **options})
    (problem,) = caught.value.problems
    return str(problem)


def test_three_forms(tmp_path: Path) -> None:
    path = tmp_path / "quotas.json"
    path.write_text(json.dumps(GIVEN))
    assert tenants(GIVEN) == tenants(json.dumps(GIVEN)) == TenantOptions(QUOTAS)
    assert tenants(f"file:{path}") == TenantOptions(QUOTAS, str(path))
    assert str(tenants(f"file:{path}")) == f"file:{path}"
    assert parse_options({"ram": "4GiB"}).tenants is None


def test_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVOFFLOAD_TENANTS", json.dumps(GIVEN))
    assert parse_options({"ram": "4GiB"}).tenants == TenantOptions(QUOTAS)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("a=1GiB", "tenants: 'a=1GiB' is invalid; allowed: {"),
        ("file:quotas.json", "allowed: {"),
        ("file:/nowhere/quotas.json", "the file cannot be read"),
        ({"a": "1GiB"}, "tenants.a: '1GiB' is invalid; allowed: {"),
        ({"a": {"most": 1}}, "tenants.a.most"),
        ({"a": {"min": "much"}}, "tenants.a.min"),
        ({"a": {"min": "2GiB", "max": "1GiB"}}, "tenants.a.max"),
        ({"a": {"min": "3GiB"}, "b": {"min": "2GiB"}}, "add up to 5368709120 bytes; ram has 4294967296"),
        ({str(number): {} for number in range(63)}, "allowed: up to 62 tenants"),
    ],
)
def test_wrong_quotas_are_refused(value: Any, expected: str) -> None:
    assert expected in message(value)


def test_a_shared_pool_has_no_quotas() -> None:
    assert "with shared RAM there are no quotas" in message(GIVEN, ram="4GiB,shared=node")


def test_blocks_of_a_pool() -> None:
    assert in_blocks(QUOTAS, 2**32, 1001) == {"a": Quota(250, 500), "other": Quota(0, 125)}
    assert in_blocks({"a": QuotaBytes(0, 1)}, 2**32, 10) == {"a": Quota(0, 1)}


def test_quotas_follow_a_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    module = pytest.importorskip("kvoffload.integrations.vllm.scheduler_side.quotas")
    path = tmp_path / "quotas.json"
    path.write_text(json.dumps(GIVEN))
    quotas = module.Quotas(tenants(f"file:{path}"), 2**32, 1000)
    assert quotas.current == {"a": Quota(250, 500), "other": Quota(0, 125)}
    assert quotas.changed(10.0) is None
    path.write_text('{"b": {"min": "2GiB"}}')
    assert quotas.changed(10.5) is None, "a look a second"
    assert quotas.changed(11.0) == {"b": Quota(500)}
    assert quotas.changed(12.0) is None, "reported once"
    path.write_text('{"b": {"min": "much"}}')
    assert quotas.changed(13.0) is None
    assert "tenants.b.min" in caplog.text
    os.remove(path)
    assert quotas.changed(14.0) is None, "without a file the last quotas apply"
    path.write_text("{}")
    assert quotas.changed(15.0) == {}
