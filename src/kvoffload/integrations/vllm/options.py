"""What users may write into ``kv_connector_extra_config``: vLLM's names and ours, checked all at once.

Owns names, defaults and what is allowed. Imports no vLLM: the command line checks flags with it where vLLM
is not installed.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from kvoffload.config import parse_size
from kvoffload.core.admission import ADMISSIONS, DEFAULT_ADMISSION
from kvoffload.core.plans import ON_COMPUTE, STORES
from kvoffload.core.policy import DEFAULT_POLICY, POLICIES
from kvoffload.errors import CombinedConfigError, ConfigError
from kvoffload.integrations.vllm.tiers import TierOptions, parse_tiers
from kvoffload.plugins import Registry

T = TypeVar("T")

WHERE = "kv_connector_extra_config"
ALWAYS, TIERS, NEVER = "always", "tiers", "never"
VERIFY = (ALWAYS, TIERS, NEVER)
"""Which blocks are checked against their checksum when they are read: also those in RAM; those that a tier
behind RAM has held; none."""
POLICIES_MODULE = "kvoffload.integrations.vllm.policies"
_SPEC, _SPEC_MODULE = "KVOffloadSpec", "kvoffload.integrations.vllm"

_OWN = (
    "admission",
    "policy",
    "prompt_only",
    "ram",
    "recompute_tokens_per_s",
    "store",
    "tier_deadline_s",
    "tiers",
    "verify",
)
_VLLMS = (
    "block_size",
    "blocks_per_chunk",
    "cache_policy_module_path",
    "canonical_layout",
    "cpu_bytes_to_use",
    "eviction_policy",
    "max_tracker_size",
    "offload_prompt_only",
    "secondary_tiers",
    "self_describing_kv_events",
    "spec_module_path",
    "spec_name",
    "store_threshold",
)
NAMES = tuple(sorted((*_OWN, *_VLLMS)))
"""Every option that `parse_options` knows."""


@dataclass(frozen=True)
class VLLMOptions:
    """What the user asked for, checked.

    Attributes:
        ram_bytes: of all workers of the engine together, as vLLM counts them.
        policy: a name, ``module:Class`` or ``path/to/file.py:Class``; it can be imported.
        admission: a rule in the form of `kvoffload.admission`.
        store: ``on-compute`` or ``on-device-eviction``.
        verify: ``always``, ``tiers`` or ``never``.
        prompt_only: leave out blocks computed after the prompt. True is vLLM's default, too.
        blocks_per_chunk: engine blocks in one block of ours; None where `tokens_per_chunk` says it, or
            nobody did. vLLM reads both for itself and gives the answer in its configuration.
        tokens_per_chunk: the same in tokens (``block_size``).
        self_describing_events: KV events carry the tokens of their blocks.
        tiers: behind RAM, from the fastest to the slowest.
        tier_deadline_s: how long a request waits for tiers at the longest.
        recompute_tokens_per_s: how fast the engine computes prompts: reads that would take longer are not
            begun. None while nobody knows.
    """

    ram_bytes: int
    policy: str = DEFAULT_POLICY
    admission: str = DEFAULT_ADMISSION
    store: str = ON_COMPUTE
    verify: str = TIERS
    prompt_only: bool = True
    blocks_per_chunk: int | None = None
    tokens_per_chunk: int | None = None
    self_describing_events: bool = False
    tiers: tuple[TierOptions, ...] = ()
    tier_deadline_s: float = 2.0
    recompute_tokens_per_s: float | None = None


def parse_options(extra_config: Mapping[str, Any]) -> VLLMOptions:
    """Check ``kv_connector_extra_config``, vLLM's names and ours alike.

    Numbers may be given as text, sizes with a unit, switches as true and false. One thing under two names
    is refused unless both say the same.

    Raises `CombinedConfigError`: every problem with its option, its value and what is allowed; an unknown
    option with the name that is nearest.
    """
    return _Reader(extra_config).read()


class _Reader:
    """One pass over the options, which notes problems and goes on."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        self.given, self.problems = given, list[ConfigError]()

    def read(self) -> VLLMOptions:
        for name in self.given:
            if name not in NAMES:
                near = difflib.get_close_matches(str(name), NAMES, 1)
                hint = f" (did you mean {near[0]}?)" if near else ""
                self._wrong(name, f"there is no such option{hint}; allowed: {', '.join(NAMES)}")
        ram = self._either("ram", "cpu_bytes_to_use", _size)
        if self.given.get("ram") is None and self.given.get("cpu_bytes_to_use") is None:
            self._wrong("ram", "it must be given: bytes, or a size such as 64GiB")
        blocks, tokens = self._one("blocks_per_chunk", _count), self._one("block_size", _count)
        if blocks is not None and tokens is not None:
            self._wrong("block_size", "blocks_per_chunk is given as well, which says the same; give one")
        self._only_ours()
        options = VLLMOptions(
            ram_bytes=ram or 0,
            policy=self._either("policy", "eviction_policy", _policy) or DEFAULT_POLICY,
            admission=self._admission(),
            store=self._one("store", _choice(STORES)) or ON_COMPUTE,
            verify=self._one("verify", _choice(VERIFY)) or TIERS,
            prompt_only=self._either("prompt_only", "offload_prompt_only", _switch) is not False,
            blocks_per_chunk=blocks,
            tokens_per_chunk=tokens,
            self_describing_events=bool(self._one("self_describing_kv_events", _switch)),
            tier_deadline_s=self._one("tier_deadline_s", _positive) or 2.0,
            recompute_tokens_per_s=self._one("recompute_tokens_per_s", _positive),
            tiers=self._one("tiers", parse_tiers) or (),
        )
        if self.problems:
            raise CombinedConfigError(WHERE, self.problems)
        return options

    def _admission(self) -> str:
        """The rule; vLLM's threshold and the size of its tracker are parameters of ``reuse``."""
        rule = self._one("admission", _admission)
        threshold = self._one("store_threshold", _not_negative)
        tracker = self._one("max_tracker_size", _count)
        if threshold is not None:
            native = f"reuse:{threshold}" if threshold >= 2 else DEFAULT_ADMISSION
            if rule is not None and rule != native:
                self._wrong("store_threshold", f"admission is {rule!r}, which says otherwise; give one")
            rule = native
        rule = rule or DEFAULT_ADMISSION
        if tracker is not None and rule[:5] == "reuse":
            return f"{rule},max_tracker_size={tracker}"
        if tracker is not None and rule != DEFAULT_ADMISSION:
            self._wrong("max_tracker_size", f"it belongs to reuse, and admission is {rule!r}")
        return rule

    def _only_ours(self) -> None:
        """What vLLM's own specs understand, and this one can only have in one way."""
        ours = {
            "spec_name": (_SPEC,),
            "spec_module_path": (_SPEC_MODULE, f"{_SPEC_MODULE}.spec", None),
            "cache_policy_module_path": (POLICIES_MODULE, None),
        }
        why = {"cache_policy_module_path": f"; {_SPEC} takes policies as policy: module:Class"}
        for name, allowed in ours.items():
            if name in self.given and self.given[name] not in allowed:
                self._wrong(name, f"allowed: {allowed[0]}{why.get(name, '')}")
        if self.given.get("secondary_tiers") not in (None, [], ()):
            self._wrong("secondary_tiers", "allowed: []; what this specification has behind RAM is its tiers")
        if self._one("canonical_layout", _switch):
            self._wrong("canonical_layout", "allowed: false; blocks are kept as the engine lays them out")

    def _one(self, name: str, check: Callable[[str, Any], T]) -> T | None:
        """The value of an option, None where it was not given or is wrong."""
        if self.given.get(name) is None:
            return None
        try:
            return check(name, self.given[name])
        except ConfigError as problem:
            self.problems.append(problem)
            return None

    def _either(self, ours: str, vllms: str, check: Callable[[str, Any], T]) -> T | None:
        """The value of an option that has two names."""
        first, second = self._one(ours, check), self._one(vllms, check)
        if first is not None and second is not None and first != second:
            self._wrong(vllms, f"{ours} is {self.given[ours]!r}, which is another name for it; give one")
        return second if first is None else first

    def _wrong(self, name: str, allowed: str) -> None:
        self.problems.append(ConfigError(name, self.given.get(name), allowed))


def _size(name: str, value: Any) -> int:
    if isinstance(value, str):
        size = parse_size(name, value)
    elif isinstance(value, int) and not isinstance(value, bool):
        size = value
    elif isinstance(value, float) and value.is_integer():
        size = int(value)
    else:
        raise ConfigError(name, value, "allowed: bytes, or a size such as 64GiB")
    if size < 1:
        raise ConfigError(name, value, "it must be more than nothing")
    return size


def _integer(name: str, value: Any, smallest: int) -> int:
    # JSON and shells give numbers as text as well, and vLLM takes them.
    text = str(value) if isinstance(value, (int, str)) and not isinstance(value, bool) else ""
    if not text.strip().isdecimal() or int(text) < smallest:
        raise ConfigError(name, value, f"allowed: a whole number, {smallest} or more")
    return int(text)


def _count(name: str, value: Any) -> int:
    return _integer(name, value, 1)


def _not_negative(name: str, value: Any) -> int:
    return _integer(name, value, 0)


def _positive(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise ConfigError(name, value, "allowed: a number, more than 0")
    return float(value)


def _switch(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(name, value, "allowed: true, false")
    return value


def _choice(allowed: tuple[str, ...]) -> Callable[[str, Any], str]:
    def check(name: str, value: Any) -> str:
        if value not in allowed:
            near = difflib.get_close_matches(str(value), allowed, 1)
            hint = f" (did you mean {near[0]}?)" if near else ""
            raise ConfigError(name, value, f"allowed: {', '.join(allowed)}{hint}")
        return str(value)

    return check


def _policy(name: str, value: Any) -> str:
    return _named(POLICIES, name, value)


def _named(registry: Registry[Any], name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise ConfigError(name, value, f"allowed: the name of one ({', '.join(registry.names())})")
    try:
        registry.find(value)
    except ConfigError as problem:
        raise ConfigError(name, value, problem.allowed) from None
    return value


def _admission(name: str, value: Any) -> str:
    return _named(ADMISSIONS, name, value)
