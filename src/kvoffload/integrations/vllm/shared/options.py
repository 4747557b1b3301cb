"""The options in ``kv_connector_extra_config``, under vLLM's names or ours, and their checks.

A TOML file (option ``config``, or ``KVOFFLOAD_CONFIG``) and environment variables such as
``KVOFFLOAD_POLICY`` can set the same options (`settings.layers`). Imports no vLLM, because the command line
checks options on machines without vLLM.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, TypeAlias

import msgspec

from kvoffload.core.admission import DEFAULT_ADMISSION, AdmissionName
from kvoffload.core.plans import ON_COMPUTE, ON_DEVICE_EVICTION, StoreName
from kvoffload.core.policy import DEFAULT_POLICY, POLICIES, PolicyName
from kvoffload.core.quotas import ONE_OWNER
from kvoffload.errors import CombinedConfigError, ConfigError
from kvoffload.integrations.vllm.shared.tenants import Tenants
from kvoffload.node.node_manager import NodeManager
from kvoffload.settings.layers import OF_ENGINES, gathered
from kvoffload.settings.paths import FilePath, expanded
from kvoffload.settings.ram import Ram
from kvoffload.settings.read import (
    Count,
    CountOrNothing,
    OneOf,
    Positive,
    Size,
    convert,
    given_once,
    option_names,
    read_options,
    within,
)
from kvoffload.structures.index import MAX_POSITIONS, Index
from kvoffload.tiers.spec import SizedTierOptions, TierOptions, Tiers
from kvoffload.whatif import WhatIfs
from kvoffload.whatif.setting import OneIn

WHERE = "kv_connector_extra_config"
ALWAYS, TIERS, NEVER = "always", "tiers", "never"
VERIFY = (ALWAYS, TIERS, NEVER)
"""Values of the option `verify`, which decides about blocks in RAM, because blocks from tiers are verified
in any case. ``always`` verifies blocks in RAM, too. ``tiers`` and ``never`` both leave blocks in RAM
unverified."""
POLICIES_MODULE = "kvoffload.integrations.vllm.policies"
_SPEC, _SPEC_MODULE = "KVOffloadSpec", "kvoffload.integrations.vllm"
_Threshold: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
_TrackerSize: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=MAX_POSITIONS // 2)]
"""Type of the option ``max_tracker_size``, a parameter of the admission rule ``reuse``."""
COUNT, DROP, STOP = "count", "drop", "stop"
_Share: TypeAlias = Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]


@dataclass(frozen=True)
class AuditOptions:
    """Options of the audit of stored blocks: ``{"share": 0.001, "first": 64}`` or ``share=0.001,first=64``.

    Attributes:
        share: a fraction from 0 to 1. With 0.001, one in 1,000 requests that have hits is audited.
        first: a number N. The first N requests with hits after the engine's start are audited in any case.
        on_difference: reaction to a block that differs. ``count``: only count the block. ``drop``: also
            discard the block. ``stop``: also stop offloading until the cache is reset.
    """

    share: _Share = 0.0
    first: CountOrNothing = 0
    on_difference: Annotated[str, OneOf((COUNT, DROP, STOP))] = DROP

    def __str__(self) -> str:
        return f"share={self.share:g},first={self.first},on_difference={self.on_difference}"


class _AuditParser:
    allowed = "share=0.001,first=64, also with on_difference=count, drop or stop"

    def parse(self, field: str, value: object) -> AuditOptions:
        if isinstance(value, AuditOptions):
            return value
        given = value
        if isinstance(value, str):
            pairs = [setting.partition("=") for setting in value.split(",")]
            if not all(equals and setting for _, equals, setting in pairs):
                raise ConfigError(field, value, f"allowed: {self.allowed}")
            given = given_once(field, [(name, setting) for name, _, setting in pairs])
        if not isinstance(given, Mapping):
            raise ConfigError(field, value, f"allowed: {self.allowed}")
        options = within(field, AuditOptions, given)
        if not options.share and not options.first:
            why = f"it audits nothing: give share or first; allowed: {self.allowed}"
            raise ConfigError(field, value, why)
        return options


Audit: TypeAlias = Annotated[AuditOptions, _AuditParser()]


@dataclass(frozen=True)
class RecordOptions:
    """Options of a recording: ``/var/log/kv.jsonl``, ``/var/log/kv.jsonl,calls``, or an object.

    Attributes:
        path: absolute path of the file for a trace of the engine's requests (`record.Recorder`).
        calls: True to record also the calls of methods of RAM's manager, in a second file ``NAME.calls``
            (`calls.recorder.CallRecorder`).
    """

    path: str
    calls: bool = False

    def __str__(self) -> str:
        return self.path + ",calls" * self.calls


class _RecordParser:
    allowed = "an absolute path, NAME.jsonl; with the calls of the manager NAME.jsonl,calls"

    def parse(self, field: str, value: object) -> RecordOptions:
        given = value
        if isinstance(value, str):
            path, *settings = value.split(",")
            calls = bool(settings) and settings in (["calls"], ["calls=true"])
            if settings and not calls and settings != ["calls=false"]:
                raise ConfigError(field, value, f"allowed: {self.allowed}")
            given = {"path": path, "calls": calls}
        if isinstance(given, Mapping):
            given = within(field, RecordOptions, given)
        if not isinstance(given, RecordOptions):
            raise ConfigError(field, value, f"allowed: {self.allowed}")
        given = replace(given, path=expanded(field, given.path))
        if not (os.path.isabs(given.path) and given.path.endswith(".jsonl")):
            raise ConfigError(field, given.path, f"allowed: {self.allowed}")
        return given


Record: TypeAlias = Annotated[RecordOptions, _RecordParser()]


@dataclass(frozen=True)
class VLLMOptions:
    """The user's options, after all checks.

    Attributes:
        ram: the RAM pool.
        policy: a name, ``module:Class`` or ``path/to/file.py:Class``.
        admission: name and parameters of an admission rule.
        store: ``on-compute`` or ``on-device-eviction``.
        verify: ``always``, ``tiers`` or ``never``. None: ``always`` for a shared pool, otherwise ``tiers``.
        prompt_only: True to store only blocks of the prompt. True is the default, as in vLLM.
        blocks_per_chunk: number of engine blocks in a block of kvoffload; None if not given.
            `EngineFacts.blocks_per_chunk` is the value that the engine uses.
        tokens_per_chunk: number of tokens in a block of kvoffload (option ``block_size``), as an alternative
            to `blocks_per_chunk`.
        self_describing_events: True to include the tokens of the blocks in KV events.
        tiers: the tiers behind RAM, from the fastest to the slowest.
        tier_deadline_s: the longest time that a request waits for tiers.
        recompute_tokens_per_s: the engine's prefill speed; None if unknown. If the speed is known, a tier is
            not read when computing the blocks would be faster.
        audit: options of the audit, which compares stored blocks with computed blocks; None: no audit.
            Audited requests are computed although RAM holds their blocks.
        record: the file in which the engine's requests are recorded as a trace, and the option to record the
            calls of RAM's manager, too. None: no recording.
        record_max_bytes: size limit of the trace, and a separate limit of the same size for the calls.
        live_settings: absolute path of a JSON file with options that can change while the engine runs; None:
            no file.
        tenants: quotas of tenants in bytes of RAM and of tiers; None: no quotas.
        what_if: settings of RAM whose hit ratios are estimated on a sample of the blocks.
        what_if_sample: the sample of `what_if` holds one block in this many. None: the default, one in 192
            for blocks of 16 tokens.
    """

    ram: Ram
    policy: PolicyName = DEFAULT_POLICY
    admission: AdmissionName = DEFAULT_ADMISSION
    store: StoreName = ON_COMPUTE
    verify: Annotated[str, OneOf(VERIFY)] | None = None
    prompt_only: bool = True
    blocks_per_chunk: Count | None = None
    tokens_per_chunk: Count | None = field(default=None, metadata={"option": "block_size"})
    self_describing_events: bool = field(default=False, metadata={"option": "self_describing_kv_events"})
    tiers: Tiers = ()
    tier_deadline_s: Positive = 2.0
    recompute_tokens_per_s: Positive | None = None
    audit: Audit | None = None
    record: Record | None = None
    record_max_bytes: Size = 2**30
    live_settings: FilePath | None = None
    tenants: Tenants | None = None
    what_if: WhatIfs = ()
    what_if_sample: OneIn | None = None

    @property
    def ram_bytes(self) -> int:
        """Bytes of RAM, for all workers of the engine together."""
        return self.ram.size

    @property
    def verification(self) -> str:
        """The value of `verify`, or its default if it is None."""
        return self.verify or (ALWAYS if self.ram.shared else TIERS)


ONE_BY_ONE = f"with store {ON_DEVICE_EVICTION} allowed: one engine block, because the GPU drops single blocks"

VLLMS_NAMES = {"cpu_bytes_to_use": "ram", "eviction_policy": "policy", "offload_prompt_only": "prompt_only"}
"""Mapping: vLLM's name of an option -> our name."""

_ALLOWED_VLLM_VALUES: dict[str, tuple[Any, ...]] = {
    "spec_name": (_SPEC,),
    "spec_module_path": (_SPEC_MODULE, f"{_SPEC_MODULE}.spec"),
    "cache_policy_module_path": (POLICIES_MODULE,),
    "secondary_tiers": ([], ()),
    "canonical_layout": (False,),
}
_WHY = {
    "cache_policy_module_path": f"; {_SPEC} takes the policy as policy: module:Class",
    "secondary_tiers": "; give the tiers behind RAM as tiers",
    "canonical_layout": "; blocks keep the engine's layout",
}
"""Mapping: vLLM option with one allowed value -> end of the message that refuses other values."""

_READ_BY_VLLM = ("sync_load_budget_bytes", "enable_telemetry", "tier_poll_interval_s", "backpressure")
"""Options of vLLM's own connector and tiers, of any version. We accept and ignore them."""

_ALSO_KNOWN = (*_ALLOWED_VLLM_VALUES, *_READ_BY_VLLM, "store_threshold", "max_tracker_size", "config")
NAMES = tuple(sorted({*option_names(VLLMOptions), *VLLMS_NAMES, *_ALSO_KNOWN}))
"""Every option that `parse_options` accepts."""


def parse_options(extra_config: Mapping[str, Any]) -> VLLMOptions:
    """Parse and check the options in ``kv_connector_extra_config``, under vLLM's names or ours.

    A number may be given as text, a size may have a unit, and a switch must be true or false. If an option is
    given under both names, the values must be equal.

    Raises: `CombinedConfigError` with all problems. For each problem, its message has the option, the value,
    and the allowed values or the most similar option name.
    """
    given = gathered(extra_config, OF_ENGINES, VLLMS_NAMES)
    problems = [
        ConfigError(name, given[name], f"allowed: {json.dumps(allowed[0])}{_WHY.get(name, '')}")
        for name, allowed in _ALLOWED_VLLM_VALUES.items()
        if given.get(name) is not None and given[name] not in allowed
    ]
    given, more_problems = _with_vllms_threshold(given)
    problems += more_problems
    if given.get("blocks_per_chunk") is not None and given.get("block_size") is not None:
        why = "blocks_per_chunk is given as well and has the same meaning; give one"
        problems.append(ConfigError("block_size", given["block_size"], why))
    options = read_options(
        VLLMOptions, given, WHERE, other_names=VLLMS_NAMES, also_known=_ALSO_KNOWN, problems=problems
    )
    problems = list(_wrong_in_engines(options.tiers))
    if options.ram.shared and options.verification != ALWAYS:
        why = f"with shared RAM allowed: {ALWAYS}, because other processes write the blocks"
        problems.append(ConfigError("verify", options.verify, why))
    if options.ram.shared and options.store != ON_COMPUTE:
        why = f"with shared RAM allowed: {ON_COMPUTE}, because {ON_DEVICE_EVICTION} follows one device"
        problems.append(ConfigError("store", options.store, why))
    if options.ram.shared:
        try:
            NodeManager.check_policy(POLICIES.find(options.policy)(Index(1, 1)))
        except ConfigError as problem:
            problems.append(ConfigError("policy", options.policy, problem.allowed))
    if options.what_if and (options.ram.shared or options.store != ON_COMPUTE):
        why = f"allowed: with store {ON_COMPUTE}, and without shared RAM, because shadows follow one engine"
        problems.append(ConfigError("what_if", ";".join(s.label for s in options.what_if), why))
    if options.store == ON_DEVICE_EVICTION and (options.blocks_per_chunk or 1) > 1:
        problems.append(ConfigError("blocks_per_chunk", options.blocks_per_chunk, ONE_BY_ONE))
    if options.live_settings is not None and not os.path.isabs(options.live_settings):
        problems.append(ConfigError("live_settings", options.live_settings, "allowed: an absolute path"))
    if options.live_settings is not None and options.ram.shared:
        why = "with shared RAM not allowed, because all its engines use one policy"
        problems.append(ConfigError("live_settings", options.live_settings, why))
    if options.ram.shared and options.record is not None and options.record.calls:
        why = "with shared RAM only without calls, because decisions depend on the calls of other processes"
        problems.append(ConfigError("record", str(options.record), why))
    problems += _wrong_tenants(options)
    if problems:
        raise CombinedConfigError(WHERE, problems)
    return options


def _wrong_tenants(options: VLLMOptions) -> Iterator[ConfigError]:
    """Yield the conflicts between quotas and other options."""
    if options.tenants is None:
        return
    if options.ram.shared:
        why = "with shared RAM there are no quotas, because blocks belong to engines; see ram: share"
        yield ConfigError("tenants", str(options.tenants), why)
    if options.store == ON_DEVICE_EVICTION:
        yield ConfigError("tenants", str(options.tenants), ONE_OWNER)
    if options.tenants.min_bytes > options.ram_bytes:
        why = f"the minimums add up to {options.tenants.min_bytes} bytes; ram has {options.ram_bytes}"
        yield ConfigError("tenants", str(options.tenants), why)
    yield from options.tenants.wrong_tiers(options.tiers)


def _wrong_in_engines(tiers: Iterable[TierOptions]) -> Iterator[ConfigError]:
    """Yield the problems of tier options that a replay accepts and an engine refuses."""
    used_paths = set[str]()
    for number, tier in enumerate(tiers):
        for path in getattr(tier, "path", ()):
            if not os.path.isabs(path):
                yield ConfigError(f"tiers[{number}].path", path, "allowed: an absolute path")
            if (place := os.path.normpath(path)) in used_paths:
                yield ConfigError(
                    f"tiers[{number}].path", path, "allowed: a directory that no other tier uses"
                )
            used_paths.add(place)
        if not tier.keeps_blocks:
            yield ConfigError(f"tiers[{number}]", str(tier), f"a {tier.name} tier keeps no blocks")
        if isinstance(tier, SizedTierOptions):
            try:
                convert(f"tiers[{number}].capacity", tier.capacity, Size)
            except ConfigError as problem:
                yield problem


def _with_vllms_threshold(given: dict[str, Any]) -> tuple[dict[str, Any], list[ConfigError]]:
    """Convert ``store_threshold`` and ``max_tracker_size`` to the rule ``reuse``. Also returns problems."""
    problems, rule = list[ConfigError](), given.get("admission")
    threshold = tracker = None
    try:
        if given.get("store_threshold") is not None:
            threshold = convert("store_threshold", given["store_threshold"], _Threshold)
        if given.get("max_tracker_size") is not None:
            tracker = convert("max_tracker_size", given["max_tracker_size"], _TrackerSize)
    except ConfigError as problem:
        return given, [problem]
    if threshold is not None:
        native = f"reuse:{threshold}" if threshold >= 2 else DEFAULT_ADMISSION
        if rule is not None and rule != native:
            why = f"admission is {rule!r}, which contradicts it; give one"
            problems.append(ConfigError("store_threshold", threshold, why))
        rule = native
    if tracker is not None and str(rule)[:5] == "reuse":
        rule = f"{rule},max_tracker_size={tracker}"
    elif tracker is not None and rule not in (None, DEFAULT_ADMISSION):
        why = f"it is a parameter of reuse, and admission is {rule!r}"
        problems.append(ConfigError("max_tracker_size", tracker, why))
    return {**given, "admission": rule}, problems
