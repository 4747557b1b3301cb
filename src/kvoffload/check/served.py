"""Totals of a running server, from its metrics."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

from kvoffload.errors import ConfigError
from kvoffload.metrics.families import TIER, VLLM_PREFIX
from kvoffload.metrics.fetch import fetch
from kvoffload.metrics.scrape import Sample, samples
from kvoffload.settings.paths import expanded

GPU, RAM, TIERS = "gpu", "ram", "tiers"
PLACES = (GPU, RAM, TIERS)
_PLACE_OF_SOURCE = {"device": GPU, "host": RAM}
"""Mapping: vLLM's name for a source of cached tokens -> place. Every other name stands for a tier behind RAM
or for another engine, and counts as `TIERS`."""
_TIMEOUT_S = 10.0
_NEEDED = "vLLM's metrics with offloading by kvoffload"


@dataclass(frozen=True, kw_only=True)
class Served:
    """Totals of a server since its start, summed over all engines in the scrape.

    Attributes:
        requests: number of finished requests.
        prompt_tokens: number of tokens of all prompts.
        hit_tokens: number of prompt tokens that were cached in each place: `GPU`, `RAM`, `TIERS`.
        loaded_bytes: number of bytes copied from RAM to the GPU.
        stored_bytes: number of bytes copied from the GPU to RAM.
        ttft_sum_s: sum of the times to first token, in seconds.
        ttft_requests: number of requests in this sum.
        capacity_blocks: number of slots of RAM, summed over all engines; 0 if the server does not report it.
        device_blocks: number of usable blocks in one engine's GPU cache; 0 if unknown.
        device_block_tokens: number of tokens in a block of the GPU's cache; 0 if unknown.
        policies: names of the eviction policies of RAM. A policy that reports no state is missing from this
            field.
        engines: number of engines that report the size of their RAM.
        tier_blocks: for each tier behind RAM, its capacity in blocks, summed over all engines; 0 if unknown.
    """

    requests: float
    prompt_tokens: float
    hit_tokens: Mapping[str, float]
    loaded_bytes: float
    stored_bytes: float
    ttft_sum_s: float
    ttft_requests: float
    capacity_blocks: int = 0
    device_blocks: int = 0
    device_block_tokens: int = 0
    policies: tuple[str, ...] = ()
    engines: int = 0
    tier_blocks: Mapping[str, int] = field(default_factory=dict)

    @property
    def ttft_mean_s(self) -> float | None:
        """Mean time to first token; None before the first token."""
        return self.ttft_sum_s / self.ttft_requests if self.ttft_requests else None

    def since(self, before: Served) -> Served:
        """Return the increase of all totals since an earlier scrape.

        Raises: `ConfigError` if a total has shrunk, because then the server was restarted in between.
        """
        grown = {
            total.name: getattr(self, total.name) - getattr(before, total.name)
            for total in fields(self)
            if isinstance(getattr(self, total.name), float)
        }
        hits = {place: self.hit_tokens[place] - before.hit_tokens[place] for place in PLACES}
        for name, value in {**grown, **hits}.items():
            if value < 0:
                why = f"its {name} exceed the server's by {-value:,.0f}: was the server restarted since?"
                raise ConfigError("since", "the earlier scrape", why)
        return replace(self, **grown, hit_tokens=hits)


def read_served(option: str, source: str) -> Served:
    """Read the metrics of a server.

    Args:
        option: name of the option, for messages.
        source: ``http://HOST:PORT``, with or without ``/metrics``, or a file with a saved scrape.

    Raises: `ConfigError` if the source has no metrics of vLLM with kvoffload.
    """
    return served(option, source, samples(_text(option, source)))


def served(option: str, source: str, read: Sequence[Sample]) -> Served:
    """Return the totals in the samples of a scrape. Raises: as `read_served`."""
    totals: dict[str, float] = {}
    hits = dict.fromkeys(PLACES, 0.0)
    has_sources, device = False, (0, 0)
    policies, engines, tiers = list[str](), 0, dict[str, int]()
    for sample in read:
        if not math.isfinite(sample.value):
            continue
        name = sample.name.removesuffix("_total")
        totals[name] = totals.get(name, 0.0) + sample.value
        if name == "vllm:prompt_tokens_cached_by_source":
            has_sources = True
            hits[_PLACE_OF_SOURCE.get(sample.labels.get("source", ""), TIERS)] += sample.value
        elif name == "vllm:cache_config_info":
            # One less, because vLLM never uses one of the blocks.
            device = (max(0, _whole(sample, "num_gpu_blocks") - 1), _whole(sample, "block_size"))
        elif name == f"{VLLM_PREFIX}policy_state":
            policies.append(sample.labels.get("policy", ""))
        elif name == f"{VLLM_PREFIX}capacity_blocks":
            engines += 1
        elif name.startswith(VLLM_PREFIX + TIER) and (tier := sample.labels.get("tier")) is not None:
            is_size = name == f"{VLLM_PREFIX}{TIER}capacity"
            tiers[tier] = tiers.get(tier, 0) + (int(sample.value) if is_size else 0)
    if "vllm:prompt_tokens" not in totals or f"{VLLM_PREFIX}lookup_blocks" not in totals:
        missing = (
            "vllm:prompt_tokens" if "vllm:prompt_tokens" not in totals else f"{VLLM_PREFIX}lookup_blocks"
        )
        raise ConfigError(option, source, f"it has no metric {missing}_total; needed: {_NEEDED}")
    if not has_sources:  # before vLLM 0.32
        hits[GPU] = totals.get("vllm:prefix_cache_hits", 0.0)
        hits[RAM] = totals.get("vllm:external_prefix_cache_hits", 0.0)
    return Served(
        requests=totals.get("vllm:request_success", 0.0),
        prompt_tokens=totals["vllm:prompt_tokens"],
        hit_tokens=hits,
        loaded_bytes=totals.get("vllm:kv_offload_load_bytes", 0.0),
        stored_bytes=totals.get("vllm:kv_offload_store_bytes", 0.0),
        ttft_sum_s=totals.get("vllm:time_to_first_token_seconds_sum", 0.0),
        ttft_requests=totals.get("vllm:time_to_first_token_seconds_count", 0.0),
        capacity_blocks=int(totals.get(f"{VLLM_PREFIX}capacity_blocks", 0)),
        device_blocks=device[0],
        device_block_tokens=device[1],
        policies=tuple(dict.fromkeys(policies)),
        engines=engines,
        tier_blocks=tiers,
    )


def _whole(sample: Sample, label: str) -> int:
    text = sample.labels.get(label, "")
    return int(text) if text.isdecimal() else 0


def _text(option: str, source: str) -> str:
    path = Path(expanded(option, source))
    try:
        if "://" not in source and (path.exists() or ":" not in source):
            return path.read_text(errors="replace")
    except OSError as error:
        why = f"allowed: http://HOST:PORT, or a file with saved metrics ({error.strerror})"
        raise ConfigError(option, source, why) from None
    return fetch(source, _TIMEOUT_S, field=option)
