"""Each field of vLLM's configuration changes a producer's fingerprint, or is listed as not affecting KV."""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from support.vllm_engine import write_llama
from support.vllm_needs import VERSION

pytest.importorskip("vllm.v1", reason="vllm is not installed here: `make test-vllm` builds an environment")

from vllm import config as vllm_configs
from vllm.engine.arg_utils import EngineArgs

from kvoffload.errors import ConfigError
from kvoffload.integrations.vllm.shared import producer_table
from kvoffload.integrations.vllm.shared.producer import (
    GIVEN,
    commit_of,
    draft_model,
    find_configuration,
    kv_configuration,
    plain,
    why_not_kept,
)
from kvoffload.integrations.vllm.shared.producer_table import WITHOUT_EFFECT
from kvoffload.integrations.vllm.shared.tiers import Producer
from kvoffload.model.weights import files_of
from support.vllm_bound_fields import BOUND

pytestmark = pytest.mark.filterwarnings("ignore")

SECTIONS = {
    "vllm_config": "VllmConfig",
    "model_config": "ModelConfig",
    "multimodal_config": "MultiModalConfig",
    "cache_config": "CacheConfig",
    "parallel_config": "ParallelConfig",
    "scheduler_config": "SchedulerConfig",
    "device_config": "DeviceConfig",
    "load_config": "LoadConfig",
    "attention_config": "AttentionConfig",
    "mamba_config": "MambaConfig",
    "kernel_config": "KernelConfig",
    "lora_config": "LoRAConfig",
    "speculative_config": "SpeculativeConfig",
    "diffusion_config": "DiffusionConfig",
    "compilation_config": "CompilationConfig",
}
OF_OTHER_VERSIONS = {
    *("calculate_kv_scales", "swap_space", "cpu_offload_gb", "cpu_kvcache_space_bytes"),
    *("is_encoder_decoder", "max_model_len", "watchdog_config", "enable_return_routed_experts"),
    *("simple_cpu_offload_num_blocks", "user_specified_mamba_block_size", "sd_worker_cls"),
    *("max_num_partial_prefills", "max_long_partial_prefills", "disable_lookahead_block_hashes"),
}
"""Fields in our table that this vLLM does not have."""
TABLE_OF = (0, 32)

needs_the_tables_version = pytest.mark.skipif(
    VERSION != TABLE_OF,
    reason="the table lists the fields of vLLM 0.32; unknown fields of other versions are bound",
)


def class_of(section: str) -> Any:
    name = SECTIONS[section]
    if hasattr(vllm_configs, name):
        return getattr(vllm_configs, name)
    return getattr(__import__(f"vllm.config.{section.removesuffix('_config')}", fromlist=[name]), name)


def fields_of(section: str) -> list[str]:
    return [field.name for field in dataclasses.fields(class_of(section))]


def without_effect(section: str) -> set[str]:
    return {field for fields in WITHOUT_EFFECT.get(section, {}).values() for field in fields.split()}


def made(model: Path, **settings: Any) -> Any:
    """Return the configuration of an engine, without the engine."""
    arguments = {"dtype": "float32", "block_size": 32, "max_model_len": 512, **settings}
    transfer = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
    args = EngineArgs(
        model=str(model),
        skip_tokenizer_init=True,
        enforce_eager=True,
        kv_transfer_config=transfer,
        **arguments,
    )
    return args.create_engine_config()


@pytest.fixture(scope="module")
def config(llama: Path) -> Any:
    """A configuration with every section, including sections that a plain Llama lacks."""
    config = made(llama)
    for section in ("lora_config", "speculative_config", "diffusion_config"):
        object.__setattr__(config, section, blank(section))
    object.__setattr__(config.speculative_config, "method", "eagle")
    object.__setattr__(config.model_config, "multimodal_config", blank("multimodal_config"))
    return config


def blank(section: str) -> Any:
    """Return a configuration section of vLLM with defaults; None for a missing default."""
    result = object.__new__(class_of(section))
    for field in dataclasses.fields(class_of(section)):
        value = None
        if field.default is not dataclasses.MISSING:
            value = getattr(field.default, "default", field.default)
        object.__setattr__(result, field.name, None if "Undefined" in repr(value) else value)
    return result


def with_field(config: Any, section: str, field: str, value: Any) -> Any:
    """Return a copy of the configuration with another value of one field."""
    changed = copy.copy(config)
    if section == "vllm_config":
        object.__setattr__(changed, field, value)
    elif section == "multimodal_config":
        model = with_value(config.model_config, "multimodal_config", None)
        object.__setattr__(model, section, with_value(config.model_config.multimodal_config, field, value))
        object.__setattr__(changed, "model_config", model)
    else:
        object.__setattr__(changed, section, with_value(getattr(config, section), field, value))
    return changed


def with_value(section: Any, field: str, value: Any) -> Any:
    changed = copy.copy(section)
    object.__setattr__(changed, field, value)
    return changed


def another(value: Any) -> Any:
    """Return a different value, of the same type if that is simple."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return value + 1
    return "another"


@needs_the_tables_version
@pytest.mark.parametrize("section", list(SECTIONS))
def test_every_field_of_vllm_is_in_one_list(section: str) -> None:
    bound, without, known = {*BOUND[section].split()}, without_effect(section), {*fields_of(section)}
    assert bound & without == set()
    assert known - bound - without == set(), (
        "decide in producer_table.py or vllm_bound_fields.py, and in docs/integrity.md"
    )
    assert (bound | without) - known <= OF_OTHER_VERSIONS


@needs_the_tables_version
def test_every_section_of_vllm_is_known() -> None:
    sections = {field for field in BOUND["vllm_config"].split() if field.endswith("_config")}
    assert sections - {"additional_config"} == {*SECTIONS} - {"vllm_config", "multimodal_config"}
    assert {*BOUND} == {*SECTIONS} == producer_table.SECTIONS | {"vllm_config"}


@needs_the_tables_version
@pytest.mark.parametrize("section", list(SECTIONS))
def test_a_changed_field_makes_another_producer_or_is_in_the_list(config: Any, section: str) -> None:
    before, wrong = kv_configuration(config), []
    for field in fields_of(section):
        if (
            field in ("hf_config", "hf_text_config", "draft_model_config", "draft_load_config")
            or field in SECTIONS
        ):
            continue
        holder = config if section == "vllm_config" else getattr(config, section, None)
        holder = config.model_config.multimodal_config if section == "multimodal_config" else holder
        changed = with_field(config, section, field, another(getattr(holder, field, None)))
        is_bound = kv_configuration(changed) != before
        if is_bound != (field not in without_effect(section)):
            wrong.append(field)
    assert wrong == []


@pytest.mark.parametrize(
    ("field", "value"),
    [("rope_parameters", {"rope_type": "default", "rope_theta": 1e6}), ("rms_norm_eps", 0.1),
     ("unheard_of", 1), ("sliding_window", 64), ("quantization_config", {"quant_method": "fp8"})],
)  # fmt: skip
def test_a_changed_field_of_the_models_configuration_makes_another_producer(
    config: Any, field: str, value: Any
) -> None:
    hf_config = copy.deepcopy(config.model_config.hf_config)
    setattr(hf_config, field, value)
    changed = with_field(config, "model_config", "hf_config", hf_config)
    changed = with_field(changed, "model_config", "hf_text_config", hf_config)
    result, before = kv_configuration(changed), kv_configuration(config)
    names = {name for name in {*result, *before} if result.get(name) != before.get(name)}
    assert names
    assert all(name.startswith(f"model.hf_config.{field}") for name in names)


@pytest.mark.parametrize(
    ("value", "other"),
    [
        (np.float32(1e4), np.float32(1e6)),
        (np.arange(3000), np.arange(3000)[::-1]),
        (functools.partial(int, base=2), functools.partial(int, base=8)),
    ],
    ids=["number", "array", "partial"],
)
def test_values_of_any_type_are_distinguished(value: Any, other: Any) -> None:
    assert plain(value) == plain(copy.copy(value))
    assert plain(value) != plain(other)


def test_a_model_of_one_file_is_known_by_its_size_and_time(tmp_path: Path) -> None:
    model = tmp_path / "m.gguf"
    model.write_bytes(b"one")
    before = files_of(str(model))
    model.write_bytes(b"another")
    assert before
    assert files_of(str(model)) != before


def test_an_unknown_field_is_bound(config: Any) -> None:
    """A newer vLLM may have further fields."""

    @dataclasses.dataclass
    class NewerCacheConfig(class_of("cache_config")):  # type: ignore[misc]
        squeezing: int = 1

    newer = object.__new__(NewerCacheConfig)
    newer.__dict__.update(config.cache_config.__dict__, squeezing=2)
    result = kv_configuration(with_field(config, "vllm_config", "cache_config", newer))
    assert result["cache.squeezing"] == 2


def test_the_mapping_is_json_and_the_same_for_a_copy_of_the_model_elsewhere(
    llama: Path, tmp_path: Path
) -> None:
    first = kv_configuration(made(llama))
    assert first == kv_configuration(made(write_llama(tmp_path / "copy")))
    text = json.dumps(first)
    assert str(llama) not in text
    assert " at 0x" not in text
    assert first["model.hf_config.rope_parameters.rope_theta"] == 10000.0
    assert first["model.dtype"] == "float32"
    assert first["load.load_format"] == "auto"


@pytest.mark.parametrize(
    "settings",
    [{"hf_overrides": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}},
     {"hf_overrides": {"rms_norm_eps": 0.1}}, {"dtype": "half", "quantization": "fp8"},
     {"block_size": 16}, {"dtype": "bfloat16"}, {"load_format": "dummy"}, {"max_model_len": 256}],
)  # fmt: skip
def test_settings_of_a_user_make_another_producer(llama: Path, settings: dict[str, Any]) -> None:
    assert kv_configuration(made(llama, **settings)) != kv_configuration(made(llama))


def test_the_seed_counts_for_random_weights_only(llama: Path) -> None:
    assert kv_configuration(made(llama, seed=1)) == kv_configuration(made(llama, seed=2))
    dummies = [kv_configuration(made(llama, seed=seed, load_format="dummy")) for seed in (1, 2)]
    assert dummies[0] != dummies[1]


def test_no_secret_is_in_the_mapping(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "hunter2")
    extra = {"s3_secret_access_key": "hunter2", "uri": "s3://weights"}
    result = kv_configuration(with_field(config, "load_config", "model_loader_extra_config", extra))
    assert "hunter2" not in json.dumps(result)
    assert result["load.model_loader_extra_config.uri"] == "s3://weights"


def test_variables_that_change_kv_are_bound(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    before = kv_configuration(config)
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    assert kv_configuration(config) == before
    for name in ("VLLM_KV_CACHE_LAYOUT", "VLLM_FLOAT32_MATMUL_PRECISION", "ONEDNN_DEFAULT_FPMATH_MODE"):
        monkeypatch.setenv(name, "HND")
        assert kv_configuration(config)[f"environment.{name}"] == "HND"


# ---- finding it


def test_the_configuration_belongs_to_this_engine(config: Any) -> None:
    """It comes from our connector, a calling frame of vLLM's constructor, or the specification (0.25)."""
    engine, spec = config.kv_transfer_config.engine_id, SimpleNamespace()

    def made_by_a_connector(vllm_config: Any) -> Any:
        return find_configuration(spec, engine)

    assert find_configuration(spec, engine) is None
    assert made_by_a_connector(config) is config
    assert made_by_a_connector(SimpleNamespace()) is None
    assert find_configuration(spec, "another engine") is None
    assert find_configuration(SimpleNamespace(vllm_config=config), engine) is config
    given = GIVEN.set(config)
    assert find_configuration(spec, engine) is config
    GIVEN.reset(given)


def test_without_a_configuration_tiers_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"tiers: .*vLLM's configuration was not found"):
        Producer.of(SimpleNamespace(identity={}), None)


def test_blocks_that_no_later_process_can_identify_are_not_kept(config: Any) -> None:
    def why(sees_requests: bool = False, are_named: bool = False, **sections: Any) -> str:
        base = {"cache_config": SimpleNamespace(), "lora_config": None, "weight_transfer_config": None}
        return why_not_kept(
            SimpleNamespace(**{**base, **sections}), sees_requests=sees_requests, are_named=are_named
        )

    assert why() == ""
    assert "LoRA" in why(lora_config=config.lora_config)
    assert why(lora_config=config.lora_config, sees_requests=True) == ""
    assert why(lora_config=config.lora_config, are_named=True) == ""
    assert "weights may change" in why(weight_transfer_config=object(), sees_requests=True)
    assert why(weight_transfer_config=object(), are_named=True) == ""
    calibrated = SimpleNamespace(calculate_kv_scales=True)
    assert "first request" in why(cache_config=calibrated, are_named=True)


def test_a_draft_model_with_its_own_kv_is_detected() -> None:
    def of(method: str | None, draft: str) -> str:
        speculative = SimpleNamespace(method=method, draft_model_config=SimpleNamespace(model=draft))
        return draft_model(
            SimpleNamespace(speculative_config=speculative, model_config=SimpleNamespace(model="org/model"))
        )

    assert of("eagle", "org/head") == "org/head"
    assert of("mtp", "org/model") == of("ngram", "org/head") == ""
    assert commit_of(SimpleNamespace(hf_config=SimpleNamespace(_commit_hash="abc"))) == "abc"
    assert commit_of(None) == ""
