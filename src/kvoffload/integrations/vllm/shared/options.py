"""What users may write into ``kv_connector_extra_config``: vLLM's names and ours, checked all at once.

The same options may stand in a TOML file (``config``, or ``KVOFFLOAD_CONFIG``) and in the environment
(``KVOFFLOAD_POLICY``): see `options`. Imports no vLLM: the command line checks flags with it where vLLM is
not installed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeAlias

import msgspec

from kvoffload.core.admission import DEFAULT_ADMISSION, AdmissionName
from kvoffload.core.plans import ON_COMPUTE, ON_DEVICE_EVICTION, StoreName
from kvoffload.core.policy import DEFAULT_POLICY, PolicyName
from kvoffload.errors import CombinedConfigError, ConfigError
from kvoffload.settings.layers import OF_ENGINES, gathered
from kvoffload.settings.read import Count, Positive, Size, convert, option_names, read_options
from kvoffload.tiers.spec import SizedTierOptions, TierOptions, Tiers

WHERE = "kv_connector_extra_config"
ALWAYS, TIERS, NEVER = "always", "tiers", "never"
VERIFY = (ALWAYS, TIERS, NEVER)
"""Which blocks are checked against their checksum when they are read: also those in RAM; those that a tier
behind RAM has held; none."""
POLICIES_MODULE = "kvoffload.integrations.vllm.policies"
_SPEC, _SPEC_MODULE = "KVOffloadSpec", "kvoffload.integrations.vllm"
_NotNegative: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]
_Verify: TypeAlias = Literal["always", "tiers", "never"]


@dataclass(frozen=True)
class VLLMOptions:
    """What the user asked for, checked.

    Attributes:
        ram_bytes: of all workers of the engine together, as vLLM counts them.
        policy: a name, ``module:Class`` or ``path/to/file.py:Class``; it can be imported.
        admission: a rule.
        store: ``on-compute`` or ``on-device-eviction``.
        verify: ``always``, ``tiers`` or ``never``.
        prompt_only: leave out blocks computed after the prompt. True is vLLM's default, too.
        blocks_per_chunk: engine blocks in one block of ours; None where `tokens_per_chunk` says it, or
            neither was given. vLLM reads both for itself and gives the answer in its configuration.
        tokens_per_chunk: the same in tokens (``block_size``).
        self_describing_events: KV events carry the tokens of their blocks.
        tiers: behind RAM, from the fastest to the slowest.
        tier_deadline_s: how long a request waits for tiers at the longest.
        recompute_tokens_per_s: how fast the engine computes prompts: reads that would take longer are not
            begun. None while it is not known.
        record: an absolute path for a trace of what the engine is asked (`record.Recorder`).
        record_max_bytes: at which the recording ends.
    """

    ram_bytes: Size = field(metadata={"option": "ram"})
    policy: PolicyName = DEFAULT_POLICY
    admission: AdmissionName = DEFAULT_ADMISSION
    store: StoreName = ON_COMPUTE
    verify: _Verify = "tiers"
    prompt_only: bool = True
    blocks_per_chunk: Count | None = None
    tokens_per_chunk: Count | None = field(default=None, metadata={"option": "block_size"})
    self_describing_events: bool = field(default=False, metadata={"option": "self_describing_kv_events"})
    tiers: Tiers = ()
    tier_deadline_s: Positive = 2.0
    recompute_tokens_per_s: Positive | None = None
    record: str | None = None
    record_max_bytes: Size = 2**30


ONE_BY_ONE = f"with store {ON_DEVICE_EVICTION} allowed: one engine block, as the GPU drops them"

VLLMS_NAMES = {"cpu_bytes_to_use": "ram", "eviction_policy": "policy", "offload_prompt_only": "prompt_only"}
"""What vLLM calls options of ours."""

_ALLOWED_OF_VLLMS: dict[str, tuple[Any, ...]] = {
    "spec_name": (_SPEC,),
    "spec_module_path": (_SPEC_MODULE, f"{_SPEC_MODULE}.spec"),
    "cache_policy_module_path": (POLICIES_MODULE,),
    "secondary_tiers": ([], ()),
    "canonical_layout": (False,),
}
_WHY = {
    "cache_policy_module_path": f"; {_SPEC} takes policies as policy: module:Class",
    "secondary_tiers": "; what this specification has behind RAM is its tiers",
    "canonical_layout": "; blocks are kept as the engine lays them out",
}
"""Options of vLLM's own specifications that this one can only have in one way, and why."""

_READ_BY_VLLM = ("sync_load_budget_bytes", "enable_telemetry", "tier_poll_interval_s", "backpressure")
"""Options that vLLM's own connector or tiers read, in some version: they are theirs."""

_ALSO_KNOWN = (*_ALLOWED_OF_VLLMS, *_READ_BY_VLLM, "store_threshold", "max_tracker_size", "config")
NAMES = tuple(sorted({*option_names(VLLMOptions), *VLLMS_NAMES, *_ALSO_KNOWN}))
"""Every option that `parse_options` knows."""


def parse_options(extra_config: Mapping[str, Any]) -> VLLMOptions:
    """Check ``kv_connector_extra_config``, vLLM's names and ours alike.

    Numbers may be given as text, sizes with a unit, switches as true and false. One thing under two names
    is refused unless both say the same.

    Raises `CombinedConfigError`: every problem with its option, its value and what is allowed; an unknown
    option with the name that is nearest.
    """
    given = gathered(extra_config, OF_ENGINES, VLLMS_NAMES)
    problems = [
        ConfigError(name, given[name], f"allowed: {json.dumps(allowed[0])}{_WHY.get(name, '')}")
        for name, allowed in _ALLOWED_OF_VLLMS.items()
        if given.get(name) is not None and given[name] not in allowed
    ]
    given, wrong = _with_vllms_threshold(given)
    problems += wrong
    if given.get("blocks_per_chunk") is not None and given.get("block_size") is not None:
        why = "blocks_per_chunk is given as well, which says the same; give one"
        problems.append(ConfigError("block_size", given["block_size"], why))
    options = read_options(
        VLLMOptions, given, WHERE, other_names=VLLMS_NAMES, also_known=_ALSO_KNOWN, problems=problems
    )
    problems = list(_wrong_in_engines(options.tiers))
    if options.store == ON_DEVICE_EVICTION and (options.blocks_per_chunk or 1) > 1:
        problems.append(ConfigError("blocks_per_chunk", options.blocks_per_chunk, ONE_BY_ONE))
    if options.record is not None and not (
        os.path.isabs(options.record) and options.record.endswith(".jsonl")
    ):
        problems.append(ConfigError("record", options.record, "allowed: an absolute path, NAME.jsonl"))
    if problems:
        raise CombinedConfigError(WHERE, problems)
    return options


def _wrong_in_engines(tiers: Iterable[TierOptions]) -> Iterator[ConfigError]:
    """What a replay can have behind RAM, and an engine cannot."""
    seen = set[str]()
    for number, tier in enumerate(tiers):
        for path in getattr(tier, "path", ()):
            if not os.path.isabs(path):
                yield ConfigError(f"tiers[{number}].path", path, "allowed: an absolute path")
            if (place := os.path.normpath(path)) in seen:
                yield ConfigError(f"tiers[{number}].path", path, "allowed: a directory of one tier alone")
            seen.add(place)
        if not tier.keeps_blocks:
            yield ConfigError(f"tiers[{number}]", str(tier), f"a {tier.name} tier keeps no blocks")
        if isinstance(tier, SizedTierOptions):
            try:
                convert(f"tiers[{number}].capacity", tier.capacity, Size)
            except ConfigError as problem:
                yield problem


def _with_vllms_threshold(given: dict[str, Any]) -> tuple[dict[str, Any], list[ConfigError]]:
    """vLLM's threshold and the size of its tracker are parameters of the rule ``reuse``."""
    problems, rule = list[ConfigError](), given.get("admission")
    threshold = tracker = None
    try:
        if given.get("store_threshold") is not None:
            threshold = convert("store_threshold", given["store_threshold"], _NotNegative)
        if given.get("max_tracker_size") is not None:
            tracker = convert("max_tracker_size", given["max_tracker_size"], Count)
    except ConfigError as problem:
        return given, [problem]
    if threshold is not None:
        native = f"reuse:{threshold}" if threshold >= 2 else DEFAULT_ADMISSION
        if rule is not None and rule != native:
            why = f"admission is {rule!r}, which says otherwise; give one"
            problems.append(ConfigError("store_threshold", threshold, why))
        rule = native
    if tracker is not None and str(rule)[:5] == "reuse":
        rule = f"{rule},max_tracker_size={tracker}"
    elif tracker is not None and rule not in (None, DEFAULT_ADMISSION):
        why = f"it belongs to reuse, and admission is {rule!r}"
        problems.append(ConfigError("max_tracker_size", tracker, why))
    return {**given, "admission": rule}, problems
