"""The options in ``kv_connector_extra_config``, and the messages for wrong options."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvoffload.admission.reuse import ReuseAdmission
from kvoffload.core.admission import ADMISSIONS, create_admission
from kvoffload.core.manager import OffloadingManager
from kvoffload.core.policy import POLICIES
from kvoffload.errors import CombinedConfigError, ConfigError, UnavailableError
from kvoffload.integrations.vllm.shared.options import (
    NAMES,
    AuditOptions,
    VLLMOptions,
    parse_options,
)
from kvoffload.settings.ram import RamOptions
from kvoffload.tiers.disk.lock import DirectoryLock
from kvoffload.tiers.kinds.disk import DiskOptions
from kvoffload.tiers.rate_limited_log import RateLimitedLog
from kvoffload.tiers.spec import TierOwner, open_tiers

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "my_policy.py"


def refused(**given: Any) -> list[ConfigError]:
    with pytest.raises(CombinedConfigError) as caught:
        parse_options(given)
    return list(caught.value.problems)


def message(**given: Any) -> str:
    (problem,) = refused(**given)
    return str(problem)


def test_defaults() -> None:
    assert parse_options({"ram": 4096}) == VLLMOptions(RamOptions(4096))
    options = parse_options({"cpu_bytes_to_use": "64GiB", "spec_name": "KVOffloadSpec"})
    assert (options.ram_bytes, options.policy, options.admission) == (2**36, "lru", "all")
    assert (options.store, options.verification, options.prompt_only) == ("on-compute", "tiers", True)


def test_ram_that_engines_share() -> None:
    shared = RamOptions(2**30, "node", 60.0)
    for value in ({"size": "1GiB", "shared": "node", "keep": "1min"}, "1GiB,shared=node,keep=60"):
        options = parse_options({"ram": value})
        assert (options.ram, options.ram_bytes, options.verification) == (shared, 2**30, "always")
    assert parse_options({"ram": "1GiB,shared=node,keep=0"}).ram.keep_s == 0.0
    ram = parse_options({"ram": "4GiB,shared=node,share=1GiB"}).ram
    assert (ram.share, ram.share_blocks(1023)) == (2**30, 255)
    assert parse_options({"ram": "4GiB,shared=node"}).ram.share_blocks(1023) == 0
    assert "ram.share: '1GiB' is invalid; allowed with shared=node" in message(ram="4GiB,share=1GiB")
    assert "allowed: up to the size, 1GiB" in message(ram="1GiB,shared=node,share=2GiB")
    assert "ram.share" in message(ram="1GiB,shared=node,share=much")
    assert "ram.shared: 'host' is invalid; allowed: node" in message(ram="1GiB,shared=host")
    assert "ram.keep: 'ever' is invalid; allowed: 0, or a time such as" in message(
        ram="1GiB,shared=node,keep=ever"
    )
    assert "because other processes write the blocks" in message(ram="1GiB,shared=node", verify="tiers")
    assert "follows one device" in message(ram="1GiB,shared=node", store="on-device-eviction")


def test_the_audit_as_a_table_or_as_text() -> None:
    table = {"share": 0.001, "first": 64}
    assert parse_options({"ram": 4096, "audit": table}).audit == AuditOptions(0.001, 64, "drop")
    text = "share=0.5,on_difference=stop"
    assert parse_options({"ram": 4096, "audit": text}).audit == AuditOptions(0.5, 0, "stop")
    assert parse_options({"ram": 4096}).audit is None


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"share": 2}, "audit.share: 2 is invalid; allowed: a number from 0.0 to 1.0"),
        ("first=-1", "audit.first: '-1' is invalid; allowed: a whole number, 0 or more"),
        ("first=1,on_difference=dorp", "allowed: count, drop, stop (did you mean drop?)"),
        ({"frist": 3}, "there is no such option (did you mean first?)"),
        ({}, "it audits nothing: give share or first"),
        ("share=0", "it audits nothing: give share or first"),
        ("0.1", "allowed: share=0.001,first=64"),
        (True, "allowed: share=0.001,first=64"),
    ],
)
def test_wrong_audits(value: object, words: str) -> None:
    assert words in message(ram=4096, audit=value)


@pytest.mark.parametrize("value", [1 << 30, "1GiB", "1073741824", " 1 GiB ", float(1 << 30)])
@pytest.mark.parametrize("name", ["ram", "cpu_bytes_to_use"])
def test_sizes(name: str, value: object) -> None:
    assert parse_options({name: value}).ram_bytes == 1 << 30


@pytest.mark.parametrize("value", [0, -1, "0", "a lot", 1.5, True, [], {}, float("nan"), float("inf")])
def test_impossible_sizes(value: object) -> None:
    assert message(ram=value).startswith(f"ram: {value!r} is invalid; ")


@pytest.mark.parametrize("given", [{}, {"ram": None}])
def test_size_must_be_given(given: dict[str, Any]) -> None:
    assert "missing; give" in message(**given)


@pytest.mark.parametrize(
    ("our_name", "vllm_name", "value", "other_value", "field"),
    [
        ("ram", "cpu_bytes_to_use", "1GiB", "2GiB", "ram_bytes"),
        ("policy", "eviction_policy", "arc", "lru", "policy"),
        ("prompt_only", "offload_prompt_only", False, True, "prompt_only"),
    ],
)
def test_two_names_of_an_option(
    our_name: str, vllm_name: str, value: Any, other_value: Any, field: str
) -> None:
    base = {} if our_name == "ram" else {"ram": 4096}
    expected = getattr(parse_options({**base, our_name: value}), field)
    for given in ({vllm_name: value}, {our_name: value, vllm_name: value}):
        assert getattr(parse_options({**base, **given}), field) == expected
    problem = (
        f"{vllm_name}: {other_value!r} is invalid; {our_name}, another name of this option, is {value!r}"
    )
    assert problem in message(**base, **{our_name: value, vllm_name: other_value})


@pytest.mark.parametrize("policy", [*POLICIES.names(), "kvoffload.policies.arc:ARC", f"{EXAMPLE}:MyPolicy"])
def test_every_policy(policy: str) -> None:
    options = parse_options({"ram": 4096, "eviction_policy": policy})
    OffloadingManager(4, key_bytes=36, policy=options.policy, admission=options.admission)


@pytest.mark.parametrize("name", ["policy", "eviction_policy"])
def test_unknown_policy_names_the_nearest(name: str) -> None:
    text = message(ram=1, **{name: "hazzard"})
    assert text.startswith(f"{name}: 'hazzard' is invalid; allowed: ")
    assert "did you mean hazard?" in text


@pytest.mark.parametrize("rule", [*ADMISSIONS.names(), "reuse:3"])
def test_every_admission_rule(rule: str) -> None:
    assert parse_options({"ram": 1, "admission": rule}).admission == rule


def test_vllms_threshold_is_reuse() -> None:
    assert parse_options({"ram": 1, "store_threshold": 0}).admission == "all"
    assert parse_options({"ram": 1, "store_threshold": 1, "max_tracker_size": 9}).admission == "all"
    assert parse_options({"ram": 1, "store_threshold": "3"}).admission == "reuse:3"
    assert parse_options({"ram": 1, "store_threshold": 3, "admission": "reuse:3"}).admission == "reuse:3"
    assert "admission is 'all'" in message(ram=1, store_threshold=3, admission="all")


def test_size_of_the_tracker() -> None:
    text = parse_options({"ram": 1, "store_threshold": 2, "max_tracker_size": 7}).admission
    assert text == "reuse:2,max_tracker_size=7"
    rule = create_admission(text, 36, 100)
    assert isinstance(rule, ReuseAdmission)
    assert len(rule._counts) == 7
    assert "a parameter of reuse" in message(ram=1, admission="tinylfu", max_tracker_size=7)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("admission", "reuse:x"),
        ("admission", 2),
        ("store_threshold", -1),
        ("store_threshold", True),
        ("max_tracker_size", 0),
        ("blocks_per_chunk", 0),
        ("blocks_per_chunk", "many"),
        ("block_size", 1.5),
        ("store", "on-eviction"),
        ("verify", "sometimes"),
        ("verify", ["always"]),
        ("offload_prompt_only", "no"),
        ("self_describing_kv_events", "yes"),
        ("canonical_layout", True),
        ("canonical_layout", 1),
        ("policy", 3),
        ("spec_name", "CPUOffloadingSpec"),
        ("spec_module_path", "elsewhere"),
        ("cache_policy_module_path", "elsewhere"),
        ("tiers", "disk"),
        ("tier_deadline_s", 0),
        ("recompute_tokens_per_s", True),
        ("secondary_tiers", [{"type": "fs"}]),
    ],
)
def test_impossible_values(name: str, value: object) -> None:
    text = message(ram=1, **{name: value})
    assert text.startswith(f"{name}: {value!r} is invalid; ")
    assert "allowed" in text


def test_a_switch_is_written_as_in_json() -> None:
    assert "allowed: false;" in message(ram=1, canonical_layout=True)


OWNER = TierOwner(4096, 36, "model")
DISK = {"type": "disk", "path": "/data/kv", "capacity": "500GiB"}


@pytest.mark.parametrize(
    ("tier", "problem"),
    [
        ("disk", "tiers[0]: 'disk'"),
        ({**DISK, "capacity": "5%"}, "tiers[0].capacity: '5%'"),
        ({"type": "disk", "path": "/x"}, "tiers[0].capacity: missing"),
        ({**DISK, "type": "redis"}, "tiers[0].type: 'redis'"),
        ({**DISK, "path": 3}, "tiers[0].path: 3"),
        ({**DISK, "path": [""]}, "tiers[0].path: ['']"),
        ({**DISK, "path": ["/x", "/y", "/x"]}, "list of directories, each once"),
        ({**DISK, "capacity": "many"}, "tiers[0].capacity: 'many'"),
        ({**DISK, "capacity": True}, "tiers[0].capacity: True"),
        ({**DISK, "polcy": "lru"}, "tiers[0].polcy: 'lru'"),
        ({**DISK, "policy": "lruu"}, "tiers[0].policy: 'lruu'"),
        ({**DISK, "admission": "reuse:x"}, "tiers[0].admission: 'reuse:x'"),
        ({**DISK, "max_write_bytes_per_day": "much"}, "tiers[0].max_write_bytes_per_day: 'much'"),
    ],
)
def test_wrong_tiers_are_named(tier: object, problem: str) -> None:
    text = message(ram=1, tiers=[tier])
    assert problem in text
    assert re.search("is invalid; |: missing; ", text)


def test_tiers() -> None:
    text = parse_options(
        {"ram": "1GiB", "tiers": [DISK, {**DISK, "path": ["/a", "/b"], "policy": "arc", "salt": "v2"}]}
    ).tiers
    assert text == (
        DiskOptions(path=("/data/kv",), capacity="500GiB"),
        DiskOptions(path=("/a", "/b"), capacity="500GiB", policy="arc", salt="v2"),
    )


def test_directories_share_the_capacity_and_one_budget(tmp_path: Path) -> None:
    paths = tuple(str(tmp_path / name) for name in "ab")
    single = DiskOptions(path=paths[:1], capacity="1MiB").open(TierOwner(4096, 36, "model", "replica"))
    both = DiskOptions(path=paths, capacity="2MiB", max_write_bytes_per_day=1 << 30).open(OWNER)
    assert (single.name, both.name) == ("disk", "disk")
    assert both.stats().capacity == 2 * single.stats().capacity > 0
    assert (single.stats().write_budget_bytes, both.stats().write_budget_bytes) == (None, 1 << 30)
    for tier in (single, both):
        tier.close()
    slabs = sorted(str(path.parent.relative_to(tmp_path)) for path in tmp_path.rglob("kvoffload-*.slab"))
    assert slabs == ["a", "a/replica", "b"]


def test_missing_directories_are_reported_to_an_owner_that_continues_without_them(tmp_path: Path) -> None:
    """One of two directories is missing, then both; the owner gets the remaining tiers."""
    missing: list[UnavailableError] = []
    owner = TierOwner(4096, 36, "model", on_unavailable=missing.append)
    both = DiskOptions(path=(str(tmp_path / "a"), str(tmp_path / "b")), capacity="2MiB")
    alone = DiskOptions(path=(str(tmp_path / "c"),), capacity="1MiB")
    held = [DirectoryLock(made(tmp_path / "a"), RateLimitedLog("test"))]
    with pytest.raises(UnavailableError, match="has it open"):
        both.open(OWNER)
    first, second = open_tiers([both, alone], owner)
    assert first.stats().capacity == second.stats().capacity
    assert [error.value for error in missing] == [str(tmp_path / "a")]
    first.close()
    second.close()
    held.append(DirectoryLock(made(tmp_path / "b"), RateLimitedLog("test")))
    missing.clear()
    (remaining,) = open_tiers([both, alone], owner)
    assert [error.value for error in missing] == [str(tmp_path / "a"), str(tmp_path / "b")]
    remaining.close()
    for lock in held:
        lock.release()
    for tier in open_tiers([both, alone], owner):
        tier.close()
    with pytest.raises(ConfigError, match="capacity_bytes"):
        open_tiers([replace(alone, capacity="1KiB")], owner)


def made(directory: Path) -> Path:
    directory.mkdir(exist_ok=True)
    return directory


@pytest.mark.parametrize("fails", ["path", "max_write_bytes_per_day"])
def test_a_tier_that_cannot_be_opened_leaves_nothing_locked(tmp_path: Path, fails: str) -> None:
    (tmp_path / "file").write_text("")
    second, budget = ("file", None) if fails == "path" else ("b", -1)
    paths = str(tmp_path / "a"), str(tmp_path / second)
    with pytest.raises(ConfigError, match=fails):
        DiskOptions(path=paths, capacity="2MiB", max_write_bytes_per_day=budget).open(OWNER)
    DiskOptions(path=paths[:1], capacity="1MiB").open(OWNER).close()


@pytest.mark.parametrize(
    "given",
    [
        {"tiers": [], "secondary_tiers": ()},
        {"tiers": [DISK], "tier_deadline_s": 0.5, "recompute_tokens_per_s": 20000},
        {"canonical_layout": False},
        {"blocks_per_chunk": 3},
        {"block_size": "48"},
        {"spec_module_path": "kvoffload.integrations.vllm"},
        {"eviction_policy": "arc", "cache_policy_module_path": "kvoffload.integrations.vllm.policies"},
        {"store": "on-device-eviction", "verify": "always", "self_describing_kv_events": True},
    ],
)
def test_options_of_vllm_are_accepted(given: dict[str, Any]) -> None:
    assert set(given) <= set(NAMES)
    parse_options({"ram": 1, **given})


def test_the_size_of_chunks_is_given_once() -> None:
    assert "give one" in message(ram=1, blocks_per_chunk=3, block_size=48)


@pytest.mark.parametrize(
    ("name", "near"),
    [("evction_policy", "eviction_policy"), ("RAM", ""), ("cpu_bytes", "cpu_bytes_to_use"), ("zzz", "")],
)
def test_unknown_options_name_the_nearest(name: str, near: str) -> None:
    text = message(ram=1, **{name: 1})
    assert "there is no such option" in text
    assert (f"did you mean {near}?" in text) == bool(near)
    assert ", ".join(NAMES) in text


def test_all_problems_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_options({"policy": "x", "store": "y", "nonsense": 1, "blocks_per_chunk": 0})
    assert isinstance(caught.value, CombinedConfigError)
    assert {problem.field for problem in caught.value.problems} == {
        "ram", "policy", "store", "nonsense", "blocks_per_chunk"
    }  # fmt: skip
    lines = str(caught.value).splitlines()
    assert lines[0] == "kv_connector_extra_config:"
    assert len(lines) == 6
