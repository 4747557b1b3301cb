"""Our classes against the interfaces of every known version of vLLM, without vLLM.

tests/vllm_interfaces/signatures.json has the interfaces; tools/vllm_signatures.py writes that file.
"""

from __future__ import annotations

import ast
import functools
import logging
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from kvoffload.errors import ConfigError
from kvoffload.integrations.vllm import plugin
from kvoffload.integrations.vllm.shared.versions import (
    SINCE_CONNECTOR,
    SINCE_DEVICES,
    SINCE_SECONDARY,
    check_version,
    engine_facts,
    events,
    facts_with_chunks,
    fences_come_late,
    minor,
    warn_of_seeds,
)
from support.vllm_forms import SIGNATURES, VERSIONS, forms, signature, versions_since

OUR_ROOM = Path(__file__).resolve().parents[2] / "src" / "kvoffload" / "integrations" / "vllm"

OURS = {
    "OffloadingSpec": "KVOffloadSpec",
    "OffloadingManager": "KVOffloadManager",
    "OffloadingWorker": "KVOffloadWorker",
    "CachePolicy": "VLLMPolicy",
    "SecondaryTierManager": "KVOffloadTier",
}
"""Interface -> our class that implements it."""
CASES = [
    (interface, version)
    for interface in OURS
    for version in (versions_since(SINCE_SECONDARY) if interface == "SecondaryTierManager" else VERSIONS)
]


@functools.cache
def our_classes() -> dict[str, dict[str, ast.arguments]]:
    """Return every class of the package with the parameters of its methods, read from the source."""
    result = {}
    for path in OUR_ROOM.rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                result[node.name] = {
                    method.name: method.args for method in node.body if isinstance(method, ast.FunctionDef)
                }
    return result


def test_every_version_is_known() -> None:
    known = {
        version
        for members in SIGNATURES["OffloadingManager"].values()
        for of in members.values()
        for version in of
    }
    assert sorted(known) == VERSIONS


@pytest.mark.parametrize(("interface", "version"), CASES)
def test_our_class_takes_every_call(interface: str, version: str) -> None:
    """Every abstract method exists, and our methods take the arguments that the version passes."""
    our_class = our_classes()[OURS[interface]]
    for member, form in forms(interface, version).items():
        if "(" not in form or member == "__init__":
            continue
        marks, _, listed = form.rstrip(")").partition("(")
        if "abstractmethod" in marks:
            assert member in our_class, f"{OURS[interface]} lacks {member}, which is abstract in {version}"
        if member not in our_class or "property" in marks:
            continue
        passed = [name.rstrip("=") for name in listed.split(", ") if name]
        args = our_class[member]
        names = [parameter.arg for parameter in (*args.posonlyargs, *args.args)]
        required = len(names) - len(args.defaults)
        where = f"{OURS[interface]}.{member} in {version}: called with {passed}, takes {names}"
        assert args.vararg is not None or len(passed) <= len(names), where
        assert args.vararg is not None or required <= len(passed), where
        # Callers of abstract methods pass arguments by position, except for these.
        for by_name in {"success", "expedited", "req_context"} & set(passed):
            assert args.kwarg is not None or by_name in names + [
                parameter.arg for parameter in args.kwonlyargs
            ], where


@pytest.mark.parametrize("version", versions_since(SINCE_SECONDARY))
def test_every_member_of_a_tier_is_decided(version: str) -> None:
    """Each member that a version adds is implemented, or listed here with the reason to inherit it."""
    inherited = {
        "block_size_bytes": "the size of a slot of vLLM's RAM",
        "bp_detector": "vLLM measures the stores and drops some of them",
        "cache_hit_source": "follows from `medium`",
        "serve_external_requests": "no peer asks our tiers",
    }
    our_members = our_classes()["KVOffloadTier"].keys() | {"medium", "tolerates_off_thread_polling"}
    assert set(forms("SecondaryTierManager", version)) - our_members <= inherited.keys()


def test_the_result_of_a_job_has_the_fields_that_we_set() -> None:
    source = ast.parse((OUR_ROOM / "secondary.py").read_text())
    used = {
        keyword.arg
        for node in ast.walk(source)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "JobResult"
        for keyword in node.keywords
    }
    assert {"job_id", "success", "successful_keys"} <= used
    for version in versions_since(SINCE_SECONDARY):
        assert used <= forms("JobResult", version).keys()


BUILT_ON = {
    "BlockPool": ["_maybe_evict_cached_block", "get_num_free_blocks"],
    "OffloadingConnectorScheduler": [
        *("_maximal_prefix_lookup", "_build_store_jobs", "_update_req_states", "_generate_job_id"),
        "reset_cache",
    ],
    "SchedulerOffloadConfig": ["kv_group_configs", "num_workers", "offload_prompt_only"],
    "TransferJobStatus": ["req_id", "pending_count", "keys", "is_store", "fenced_block_ids"],
    "RequestOffloadState": [
        *("config", "req", "req_context", "offloading_context", "transfer_jobs"),
        *("group_states", "update_offload_keys"),
    ],
    "RequestGroupState": ["offload_keys", "next_stored_chunk_idx"],
    "GroupOffloadConfig": [
        *("group_idx", "tokens_per_block", "tokens_per_chunk", "hashes_per_chunk", "requires_cow_source"),
    ],
    "GPULoadStoreSpec": ["__init__"],
}


@pytest.mark.parametrize("interface", list(BUILT_ON))
def test_the_methods_that_the_connector_overrides_are_unchanged(interface: str) -> None:
    """They are unchanged since the first version that the connector supports."""
    oldest, *newer_versions = [forms(interface, version) for version in versions_since(SINCE_CONNECTOR)]
    assert newer_versions
    for newer in newer_versions:
        assert [newer[member] for member in BUILT_ON[interface]] == [
            oldest[member] for member in BUILT_ON[interface]
        ]


HANDLER = "SingleDirectionOffloadingHandler"
HOST_REGISTER = "vllm.v1.kv_offload.cpu.host_register"
OF_A_HANDLER = ("transfer_async", "get_finished", "wait", "shutdown")


def calls_of_devices() -> list[tuple[str, ast.Call]]:
    """Return the calls of vLLM in `cuda`, by name of the called function; our own methods do not count."""
    result = []
    for node in ast.walk(ast.parse((OUR_ROOM / "worker_side" / "cuda.py").read_text())):
        if isinstance(node, ast.Call):
            called = node.func
            if isinstance(called, ast.Name) and called.id in (HANDLER, "host_register", "host_unregister"):
                result.append((called.id, node))
            elif isinstance(called, ast.Attribute) and called.attr in OF_A_HANDLER:
                result.append((called.attr, node))
    return result


@pytest.mark.parametrize("version", versions_since(SINCE_DEVICES))
def test_vllms_copies_on_devices_take_our_calls(version: str) -> None:
    """`cuda` makes no other calls to vLLM."""
    handler, registering = forms(HANDLER, version), forms(HOST_REGISTER, version)
    calls = calls_of_devices()
    assert {name for name, _ in calls} == {HANDLER, *OF_A_HANDLER, *registering}
    for name, call in calls:
        of_a_class = name not in registering
        form = (handler if of_a_class else registering)["__init__" if name == HANDLER else name]
        by_name = {parameter.arg: parameter.value for parameter in call.keywords if parameter.arg is not None}
        assert len(by_name) == len(call.keywords), "keywords must be spelled out, so that they can be checked"
        signature(form).bind(*["self"] * of_a_class, *call.args, **by_name)


@pytest.mark.parametrize(
    ("version", "runner", "zeroing", "late"),
    [
        ("0.32.0", {"use_v2_model_runner": True}, {"needs_kv_cache_zeroing": True}, True),
        ("0.32.0", {"use_v2_model_runner": True}, {"needs_kv_cache_zeroing": False}, False),
        ("0.32.0", {"use_v2_model_runner": False}, {"needs_kv_cache_zeroing": True}, False),
        # An unknown fact counts as late.
        ("0.34.0", {}, {"needs_kv_cache_zeroing": True}, True),
        ("0.33.0", {"use_v2_model_runner": True}, {}, True),
        ("built from source", {}, {}, True),
        # These versions run only without a GPU, and then there is no runner V2.
        ("0.25.0", {}, {}, False),
        ("0.31.2+cpu", {}, {"needs_kv_cache_zeroing": True}, False),
    ],
)
def test_fences_come_late_on_runner_v2_with_zeroing(
    version: str, runner: dict[str, bool], zeroing: dict[str, bool], late: bool
) -> None:
    assert fences_come_late(SimpleNamespace(**runner), SimpleNamespace(**zeroing), version) is late


def test_an_engine_whose_connector_is_not_found_counts_as_late() -> None:
    assert fences_come_late(None, None, "0.32.0")


def test_devices_are_not_claimed_for_versions_that_do_not_take_our_calls() -> None:
    """The previous version lacks the module that pins the pool."""
    before = VERSIONS[: VERSIONS.index(versions_since(SINCE_DEVICES)[0])]
    assert before
    assert not any(forms(HOST_REGISTER, version) for version in before)


def test_versions() -> None:
    assert minor("0.32.0+cpu") == (0, 32)
    assert minor("0.33.1.dev3") == (0, 33)
    assert minor("dev") is None


@pytest.mark.parametrize("version", ["0.25.0", "0.32.0+cpu", "0.33.9"])
def test_a_known_version_logs_nothing(version: str, caplog: pytest.LogCaptureFixture) -> None:
    check_version(version)
    assert not caplog.records


@pytest.mark.parametrize("version", ["0.24.9", "0.9.2"])
def test_an_old_version_is_refused(version: str) -> None:
    with pytest.raises(ConfigError, match=r"vllm: .*kvoffload needs vLLM 0.25 to 0.33"):
        check_version(version)


def test_a_feature_may_need_a_newer_version() -> None:
    with pytest.raises(ConfigError, match=r"the connector needs vLLM 0.32 to 0.33"):
        check_version("0.31.0", since=(0, 32), feature="the connector")


@pytest.mark.parametrize("version", ["0.34.0", "1.0", "dev"])
def test_an_unknown_version_is_mentioned(version: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        check_version(version)
    assert version in caplog.text


def test_facts_since_0_26() -> None:
    config = SimpleNamespace(
        engine_id="e",
        extra_config={"ram": 1},
        groups=[SimpleNamespace(tokens_per_block=size, layer_names=(f"l{size}",)) for size in (16, 32)],
        model=SimpleNamespace(name="m", dtype="bfloat16"),
        cache=SimpleNamespace(blocks_per_chunk=3),
        worker_kv_bytes_per_block=4096,
        parallel=SimpleNamespace(world_size=2, rank=1),
        enable_kv_cache_events=True,
    )
    facts = engine_facts(SimpleNamespace(config=config), "0.32.0")
    assert facts.identity["groups"] == [(16, ("l16",)), (32, ("l32",))]
    assert (facts.identity["vllm"], facts.identity["model"]) == ("0.32.0", "m")
    assert facts.identity["parallel"] == [2, 1, 1, 1, 1]
    assert facts.replica == ""
    config.parallel.data_parallel_size, config.parallel.data_parallel_index = 2, 1
    assert engine_facts(SimpleNamespace(config=config)).replica == "replica-1"
    assert (facts.tokens_per_block, facts.blocks_per_chunk, facts.worker_block_bytes) == ((16, 32), 3, 4096)
    assert (facts.num_workers, facts.rank, facts.replicated, facts.enable_events) == (2, 1, False, True)
    assert facts_with_chunks(SimpleNamespace(config=config), facts, 7) is facts, (
        "vLLM has already read the option"
    )
    config.replicated_layout = True
    assert engine_facts(SimpleNamespace(config=config)).replicated


@pytest.mark.parametrize(("stride", "expected"), [(0, 96), (7, 64)])
def test_facts_of_0_25(stride: int, expected: int) -> None:
    spec = SimpleNamespace(
        vllm_config=SimpleNamespace(
            kv_transfer_config=SimpleNamespace(engine_id="e"),
            parallel_config=SimpleNamespace(world_size=1, rank=0, tensor_parallel_size=1),
            model_config=SimpleNamespace(model="m"),
            cache_config=SimpleNamespace(cache_dtype="auto"),
        ),
        kv_cache_config=SimpleNamespace(
            num_blocks=10,
            kv_cache_groups=[SimpleNamespace(layer_names=["l0", "l1"])],
            kv_cache_tensors=[SimpleNamespace(size=size, block_stride=stride) for size in (640, 320)],
        ),
        extra_config={},
        gpu_block_size=(16,),
        block_size_factor=2,
        kv_events_config=SimpleNamespace(enable_kv_cache_events=False),
    )
    facts = engine_facts(spec, "0.25.0")
    assert facts.identity["groups"] == [(16, ("l0", "l1"))]
    assert (facts.worker_block_bytes, facts.tokens_per_block, facts.blocks_per_chunk) == (expected, (16,), 2)
    assert facts_with_chunks(spec, facts, None) is facts
    facts = facts_with_chunks(spec, facts, 3)
    assert (facts.blocks_per_chunk, facts.identity["blocks_per_chunk"]) == (3, 3)
    assert spec.block_size_factor == 3, "its scheduler reads it there"


def test_seeded_keys_are_warned_of(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    for version in ("0.29.0", "0.33.0", "dev"):
        warn_of_seeds(version)
    assert not caplog.records
    warn_of_seeds("0.28.0")
    assert "vLLM 0.28.0 seeds its keys differently" in caplog.text
    assert "set PYTHONHASHSEED to a number" in caplog.text
    caplog.clear()
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    warn_of_seeds("0.28.0")
    assert not caplog.records


def test_events_name_their_medium() -> None:
    old = SimpleNamespace(OffloadingEvent=SimpleNamespace)
    new = SimpleNamespace(OffloadingEvent=SimpleNamespace, Medium=SimpleNamespace(CPU="the enum's"))
    assert events(old, [b"k"], True) == [SimpleNamespace(keys=[b"k"], medium="CPU", removed=True)]
    assert events(new, [], False)[0].medium == "the enum's"


@dataclass
class NewestEvent:
    keys: list[bytes]
    medium: str
    removed: bool
    locality: str | None = None
    ownership: str | None = None


def test_events_of_a_shared_tier_need_events_with_an_owner() -> None:
    old = SimpleNamespace(OffloadingEvent=SimpleNamespace, Medium=SimpleNamespace(CPU="c", STORAGE="s"))
    assert events(old, [b"k"], False, "valkey") == []
    new = SimpleNamespace(
        OffloadingEvent=NewestEvent, Medium=old.Medium, Locality=SimpleNamespace(REMOTE="remote")
    )
    assert events(new, [b"k"], True, "valkey") == [NewestEvent([b"k"], "s", True, "remote", "valkey")]


# ---- the plug-in


class Factory:
    """A stand-in for vLLM's factories, which take each name once."""

    def __init__(self) -> None:
        self._registry: dict[str, tuple[str, str]] = {}

    def register(self, name: str, module_path: str, class_name: str) -> None:
        assert name not in self._registry
        self._registry[name] = (module_path, class_name)

    register_spec = register_connector = register


def test_the_plugin_registers_once(monkeypatch: pytest.MonkeyPatch) -> None:
    specs, connectors = Factory(), Factory()
    for module, attribute, factory in (
        ("vllm.v1.kv_offload.factory", "OffloadingSpecFactory", specs),
        ("vllm.distributed.kv_transfer.kv_connector.factory", "KVConnectorFactory", connectors),
    ):
        faked: Any = ModuleType(module)
        setattr(faked, attribute, factory)
        parts = module.split(".")
        for length in range(1, len(parts)):
            monkeypatch.setitem(sys.modules, ".".join(parts[:length]), ModuleType(parts[length - 1]))
        monkeypatch.setitem(sys.modules, module, faked)
    for _ in range(2):
        plugin.register()
    home = "kvoffload.integrations.vllm"
    assert specs._registry == {"KVOffloadSpec": (f"{home}.spec", "KVOffloadSpec")}
    assert connectors._registry == {"KVOffloadConnector": (f"{home}.connector", "KVOffloadConnector")}


def test_the_plugin_never_raises(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with caplog.at_level(logging.WARNING):
        plugin.register()
    assert "not registered with vLLM" in caplog.text
