"""The settings of vLLM that determine the bytes of KV blocks, as a flat mapping.

The mapping is part of the fingerprint of a producer, which is an engine that computes blocks.
`producer_table` lists the fields of vLLM's configuration that do not change the bytes. Every other field is
*bound*, that is, part of the mapping. Does not know weights (`kvoffload.model.weights`), tiers or versions.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence, Set
from contextvars import ContextVar
from enum import Enum
from pathlib import PurePath
from typing import Any, TypeAlias

import numpy as np

from kvoffload.errors import ConfigError
from kvoffload.integrations.vllm.shared.producer_table import (
    ENVIRONMENT_WITHOUT_EFFECT,
    HF_WITHOUT_EFFECT,
    OTHER_VARIABLES,
    SECTIONS,
    WITHOUT_EFFECT,
)

Plain: TypeAlias = "bool | int | float | str | list[Plain] | dict[str, Plain] | None"

_SECRET = re.compile(r"secret|passw|credential|api_?key|access_?key|(hf|auth|bearer|session)_?token", re.I)
_NO_DRAFT = {None, "ngram", "ngram_gpu", "suffix"}
"""Methods of speculative decoding without a draft model."""
_DEEPEST = 12
_LIBRARIES = ("torch", "flashinfer-python", "triton")

GIVEN: ContextVar[Any] = ContextVar("kvoffload_vllm_configuration", default=None)
"""vLLM's configuration while the constructor of `KVOffloadConnector` runs; otherwise None."""


def find_configuration(spec: Any, engine_id: str) -> Any:
    """Return vLLM's configuration of the engine `engine_id`; None if it is not found.

    Call this function from the constructor of the specification `spec`. vLLM 0.25 passes the configuration to
    this constructor. Later versions pass it only to the connector, whose constructor creates the
    specification. So this function also searches the local variables on the call stack.
    """
    candidates: list[Any] = [getattr(spec, "vllm_config", None), GIVEN.get()]
    frame = sys._getframe(1)
    while frame is not None:
        candidates.append(frame.f_locals.get("vllm_config"))
        frame = frame.f_back  # type: ignore[assignment]
    for candidate in candidates:
        transfer = getattr(candidate, "kv_transfer_config", None)
        if transfer is not None and getattr(transfer, "engine_id", None) == engine_id:
            return candidate
    return None


def kv_configuration(vllm_config: Any) -> dict[str, Plain]:
    """Return the settings, other than weights and block key, that determine the bytes of a KV block.

    Names are dotted, ``model.hf_config.rope_theta``. Values are JSON and equal on all machines. The settings
    contain no paths of weights, no addresses and no secrets.

    Args:
        vllm_config: vLLM's configuration of an engine, resolved.

    Cost: some milliseconds.
    """
    settings = dict(_flat("", _section("vllm_config", vllm_config)))
    settings.update(_flat("environment.", _environment()))
    settings.update(_flat("platform.", _platform(vllm_config)))
    return dict(sorted(settings.items()))


def why_not_kept(vllm_config: Any, *, sees_requests: bool, are_named: bool) -> str:
    """Return the reason why tiers cannot keep this engine's blocks for later processes; "" if there is none.

    Args:
        sees_requests: True if the connector sees every request. The connector then keeps requests with a LoRA
            adapter away from tiers.
        are_named: True if the user has named the weights for this tier (`identity` or `salt`). The user must
            then change the name whenever the weights change.
    """
    if getattr(vllm_config.cache_config, "calculate_kv_scales", False):
        return "with calculate_kv_scales the scales of the KV cache depend on the first request of a process"
    if are_named:
        return ""
    if getattr(vllm_config, "weight_transfer_config", None) is not None:
        return "with weight_transfer_config the weights may change while the engine runs"
    if getattr(vllm_config, "lora_config", None) is not None and not sees_requests:
        return (
            "keys contain the name and path of a LoRA adapter, not its contents; use KVOffloadConnector, "
            "which keeps requests with an adapter out of tiers"
        )
    return ""


def draft_model(vllm_config: Any) -> str:
    """Return the name or path of the draft model; "" if there is none, or if the main model contains it."""
    speculative = getattr(vllm_config, "speculative_config", None)
    if speculative is None or getattr(speculative, "method", None) in _NO_DRAFT:
        return ""
    draft = getattr(speculative, "draft_model_config", None)
    name = str(getattr(draft, "model", "") or getattr(speculative, "model", "") or "")
    return "" if name == str(vllm_config.model_config.model) else name


def commit_of(model_config: Any) -> str:
    """Return the hub commit of a model; "" if unknown."""
    return str(getattr(getattr(model_config, "hf_config", None), "_commit_hash", None) or "")


# ---- sections


def _section(name: str, config: Any) -> Plain:
    """Return the bound fields of a section of vLLM's configuration, without secrets."""
    if config is None:
        return None
    without = {field for names in WITHOUT_EFFECT.get(name, {}).values() for field in names.split()}
    section: dict[str, Plain] = {}
    for field in _names(config):
        value = getattr(config, field, None)
        if field in without or field.startswith("__") or _SECRET.search(field):
            continue
        short = field.removesuffix("_config") if name == "vllm_config" else field
        section[short] = _value(field, value)
    _amend(name, config, section)
    return section


def _amend(name: str, config: Any, section: dict[str, Plain]) -> None:
    """Adjust fields that depend on other fields of the section."""
    if name == "vllm_config":
        dummy = str(getattr(getattr(config, "load_config", None), "load_format", "")).endswith("dummy")
        model = section.get("model")
        if dummy and isinstance(model, dict):
            model["seed"] = plain(getattr(config.model_config, "seed", None))
    if name == "model_config":
        hf_config, text = getattr(config, "hf_config", None), getattr(config, "hf_text_config", None)
        if text is hf_config:
            section.pop("hf_text_config", None)
    if name == "multimodal_config" and section.get("mm_encoder_fp8_scale_path"):
        section["mm_encoder_fp8_scale_path"] = _digest_of_file(str(config.mm_encoder_fp8_scale_path))
    if name == "speculative_config" and getattr(config, "method", None) in _NO_DRAFT:
        section.clear()


def _value(field: str, value: Any) -> Plain:
    if field in ("hf_config", "hf_text_config"):
        return _hf_fields(value)
    if field == "draft_model_config":
        return _section("model_config", value)
    if field == "draft_load_config":
        return _section("load_config", value)
    if field in SECTIONS:
        return _section(field, value)
    return plain(value)


def _hf_fields(config: Any) -> Plain:
    """Return the fields of a Hugging Face configuration that has been overridden by vLLM's options."""
    try:
        fields = config.to_dict()
    except Exception:
        # A configuration with custom code may hold objects that cannot be copied.
        fields = vars(config)
    return _without(plain(fields), HF_WITHOUT_EFFECT)


def _without(value: Plain, names: Mapping[str, str]) -> Plain:
    if isinstance(value, dict):
        return {name: _without(inner, names) for name, inner in value.items() if name not in names}
    if isinstance(value, list):
        return [_without(inner, names) for inner in value]
    return value


def _environment() -> Plain:
    try:
        from vllm.envs import environment_variables
    except ImportError:
        environment_variables = {}
    names = {name for name in environment_variables if name.startswith("VLLM_") and not _SECRET.search(name)}
    names = (names - ENVIRONMENT_WITHOUT_EFFECT) | {*OTHER_VARIABLES}
    return {name: os.environ[name] for name in names if name in os.environ}


def _platform(vllm_config: Any) -> Plain:
    """Return the device and the kernel libraries, which determine rounding and the layout of pages."""
    platform: dict[str, Plain] = {}
    for library in _LIBRARIES:
        try:
            platform[library] = importlib.metadata.version(library)
        except importlib.metadata.PackageNotFoundError:
            continue
    uses_transformers = getattr(vllm_config.model_config, "using_transformers_backend", None)
    if callable(uses_transformers) and uses_transformers():
        platform["transformers"] = importlib.metadata.version("transformers")
    from vllm.platforms import current_platform

    platform["device"] = str(getattr(current_platform, "device_type", ""))
    if not current_platform.is_cpu():
        platform["capability"] = plain(current_platform.get_device_capability())
    return platform


# ---- values


def plain(value: Any, depth: int = 0) -> Plain:
    """Convert a value to JSON that is equal in every process: types, enums and functions become names.

    Raises: `ConfigError` for a value that is nested more than 12 levels deep.
    """
    if depth > _DEEPEST:
        raise ConfigError(
            "configuration", type(value).__name__, "it has more than 12 levels and cannot be compared"
        )
    if isinstance(value, Enum):
        return value.name
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if value == value and abs(value) != float("inf") else str(value)
    if isinstance(value, (bytes, bytearray)):
        return value.hex()
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, Mapping):
        return {
            str(plain(name) if isinstance(name, Enum) else name): plain(inner, depth + 1)
            for name, inner in value.items() if not _SECRET.search(str(name))
        }  # fmt: skip
    if isinstance(value, Set):
        return sorted(
            (plain(inner, depth + 1) for inner in value), key=lambda item: json.dumps(item, sort_keys=True)
        )
    if isinstance(value, Sequence):
        return [plain(inner, depth + 1) for inner in value]
    return _of_object(value, depth)


def _of_object(value: Any, depth: int) -> Plain:
    if isinstance(value, np.generic):
        return plain(value.item(), depth + 1)
    if callable(as_list := getattr(value, "tolist", None)):  # arrays of numpy, tensors of torch
        digest = hashlib.sha256(json.dumps(plain(as_list(), depth + 1)).encode()).hexdigest()
        return f"{value.dtype} {list(value.shape)} sha256 {digest[:32]}"
    if isinstance(value, functools.partial):
        return [plain(value.func), plain(value.args, depth + 1), plain(value.keywords, depth + 1)]
    if isinstance(value, type) or (callable(value) and hasattr(value, "__qualname__")):
        return f"{value.__module__}.{value.__qualname__}"
    if type(value).__module__ == "torch":
        return str(value).removeprefix("torch.")
    if callable(convert := getattr(value, "to_dict", None)):
        return plain(convert(), depth + 1)
    if names := _names(value):
        return {
            name: plain(getattr(value, name, None), depth + 1) for name in names if not _SECRET.search(name)
        }
    # Any other object becomes the name of its type: the object's text may contain an address.
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _names(config: Any) -> list[str]:
    if dataclasses.is_dataclass(config):
        return [field.name for field in dataclasses.fields(config)]
    return [*getattr(type(config), "model_fields", {})] or [*getattr(config, "__dict__", {})]


def _flat(before: str, value: Plain) -> Iterator[tuple[str, Plain]]:
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _flat(f"{before}{name}." if isinstance(inner, dict) else f"{before}{name}", inner)
    elif before:
        yield before.removesuffix("."), value


def _digest_of_file(path: str) -> str:
    try:
        with open(path, "rb") as file:
            return "sha256 " + hashlib.sha256(file.read()).hexdigest()[:32]
    except OSError:
        return path
