"""The Grafana dashboard of ``kvoffload metrics --dashboard``: panels, queries and explanations.

Writes src/kvoffload/metrics/dashboard.json, which is part of the wheel, so that users need no SDK.

    python tools/dashboard.py         # write the file
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grafana_foundation_sdk.builders import common as shared
from grafana_foundation_sdk.builders import dashboard as grafana
from grafana_foundation_sdk.builders import prometheus, stat, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common
from grafana_foundation_sdk.models import dashboard as models

from kvoffload.metrics.families import LIBRARY_PREFIX, VLLM_PREFIX

FILE = Path(__file__).resolve().parents[1] / "src" / "kvoffload" / "metrics" / "dashboard.json"
_CHOSEN = 'instance=~"$instance",model_name=~"$model"'
_DATASOURCE = models.DataSourceRef(type_val="prometheus", uid="$datasource")


@dataclass(frozen=True)
class Panel:
    """A panel.

    Attributes:
        queries: PromQL and legend of each line.
        unit: a Grafana unit: ``short``, ``percentunit``, ``Bps``, ``s``, ...
        is_number: True for the last value as a number, False for lines over time.
        alarms_above: value above which a number is red.
        is_stacked: True if the lines add up.
    """

    title: str
    text: str
    queries: tuple[tuple[str, str], ...]
    unit: str = "short"
    is_number: bool = False
    alarms_above: float | None = None
    is_stacked: bool = False


# ---- queries


def ours(name: str, more: str = "") -> str:
    """Return the series of one of our metrics. `more`: further matchers."""
    return f"${{prefix}}{name}{{{_CHOSEN}{more and ','}{more}}}"


def theirs(name: str, more: str = "") -> str:
    """Return the series of one of vLLM's own metrics."""
    return f"vllm:{name}{{{_CHOSEN}{more and ','}{more}}}"


def rate(series: str) -> str:
    return f"rate({series}[$__rate_interval])"


def total(series: str, by: str = "") -> str:
    """Return the sum of a counter's rates."""
    return f"sum{by and f' by ({by}) '}({rate(series)})"


def quantile(share: float, name: str) -> str:
    """Return a quantile of one of vLLM's histograms."""
    return f"histogram_quantile({share}, {total(theirs(f'{name}_bucket'), 'le')})"


def lost_in_a_day(*names: str) -> str:
    return " + ".join(f"sum(increase({ours(name)}[24h]))" for name in names)


_LOADED, _LOOKED_UP = ours("hit_blocks_total"), ours("lookup_blocks_total")
_FROM_TIERS = f"(sum({rate(ours('tier_hits_total'))}) or vector(0))"


# ---- panels


def overview() -> Iterator[Panel]:
    yield Panel(
        "Hit ratio",
        "Share of the blocks that the GPU lacked and that were loaded instead of computed.",
        ((f"{total(_LOADED)} / {total(_LOOKED_UP)}", ""),),
        "percentunit",
        is_number=True,
    )
    yield Panel(
        "Loaded",
        "Blocks loaded per second, from RAM and tiers. Each one was not computed.",
        ((total(_LOADED), ""),),
        is_number=True,
    )
    yield Panel(
        "RAM in use",
        "Share of RAM's blocks that can be loaded. Full is normal: RAM fills once and stays full.",
        ((f"sum({ours('ready_blocks')}) / sum({ours('capacity_blocks')})", ""),),
        "percentunit",
        is_number=True,
    )
    yield Panel(
        "Damage, 24 h",
        "Blocks whose checksum did not match, in RAM and tiers. They were computed again. Normal: 0.",
        ((f"{lost_in_a_day('verification_failures_total')} "
          f"+ (sum(increase({ours('tier_mismatches_total')}[24h])) or vector(0))", ""),),
        is_number=True,
        alarms_above=0,
    )  # fmt: skip
    yield Panel(
        "Failed copies, 24 h",
        "Blocks that could not be loaded (computed again) or stored (forgotten). Normal: 0.",
        ((lost_in_a_day("failed_load_blocks_total", "failed_store_blocks_total"), ""),),
        is_number=True,
        alarms_above=0,
    )
    yield Panel(
        "Alarms",
        "Alarms of `kvoffload metrics --rules` that fire now. Empty is good.",
        (('count by (alertname) (ALERTS{alertname=~"KVOffload.*",alertstate="firing"})', "{{alertname}}"),),
        is_number=True,
        alarms_above=0,
    )


def hits() -> Iterator[Panel]:
    yield Panel(
        "Hits by place",
        "Blocks loaded per second, by where they were: RAM or a tier behind it.",
        ((f"{total(_LOADED)} - {_FROM_TIERS}", "RAM"), (total(ours("tier_hits_total"), "tier"), "{{tier}}")),
        is_stacked=True,
    )
    yield Panel(
        "Hit ratio",
        "Share of the blocks that the GPU lacked and that were loaded. It falls after a restart or reset, "
        "and if prompts change near their beginning.",
        ((f"{total(_LOADED, 'instance')} / {total(_LOOKED_UP, 'instance')}", "{{instance}}"),),
        "percentunit",
    )
    yield Panel(
        "Prompt tokens by place (vLLM)",
        "Prompt tokens per second: from the GPU's own cache (device), RAM (host), disk or a server, and "
        "computed.",
        ((total(theirs("prompt_tokens_cached_by_source_total"), "source"), "{{source}}"),
         (f"{total(theirs('prompt_tokens_total'))} - {total(theirs('prompt_tokens_cached_total'))}",
          "computed")),
        is_stacked=True,
    )  # fmt: skip


def misses() -> Iterator[Panel]:
    yield Panel(
        "Misses by reason",
        "Blocks per second that were looked up and not loaded, by reason. `never_seen` needs no action; "
        "`evicted` asks for more RAM or another policy; the others name a fault or a limit.",
        ((total(ours("miss_blocks_total"), "reason"), "{{reason}}"),),
        is_stacked=True,
    )
    yield Panel(
        "Not stored, by reason",
        "Blocks per second that were offered and not stored. `admission`: by the rule or the policy; "
        "`no_room`: all of RAM was in use.",
        ((total(ours("refused_blocks_total"), "reason"), "{{reason}}"),),
        is_stacked=True,
    )
    yield Panel(
        "Not loaded from tiers, by reason",
        "Blocks per second that a tier had and that were computed all the same: RAM had no room, reading "
        "would have taken longer, the read failed, or a server had lost them.",
        ((total(ours("not_promoted_blocks_total"), "reason"), "{{reason}}"),),
        is_stacked=True,
    )


def transfers() -> Iterator[Panel]:
    yield Panel(
        "Bytes between GPU and RAM (vLLM)",
        "Bytes per second loaded to the GPU and stored from it.",
        ((total(theirs("kv_offload_load_bytes_total")), "load"),
         (total(theirs("kv_offload_store_bytes_total")), "store")),
        "Bps",
    )  # fmt: skip
    yield Panel(
        "Bytes of tiers",
        "Bytes per second read from and written to each tier.",
        ((total(ours("tier_bytes_read_total"), "tier"), "{{tier}} read"),
         (total(ours("tier_bytes_written_total"), "tier"), "{{tier}} written")),
        "Bps",
    )  # fmt: skip
    yield Panel(
        "Speed while a copy runs (vLLM)",
        "Bytes per second of copying. Compare with the GPU's link: PCIe 4.0 x16 has 31.5 GB/s, 5.0 63 GB/s.",
        ((f"{total(theirs('kv_offload_load_bytes_total'))} / {total(theirs('kv_offload_load_time_total'))}",
          "load"),
         (f"{total(theirs('kv_offload_store_bytes_total'))} / {total(theirs('kv_offload_store_time_total'))}",
          "store")),
        "Bps",
    )  # fmt: skip
    yield Panel(
        "Time to the first token (vLLM)",
        "Median and 95th percentile, of all requests.",
        tuple((quantile(share, "time_to_first_token_seconds"), f"{share:.0%}") for share in (0.5, 0.95)),
        "s",
    )
    yield Panel(
        "Waits for tiers (vLLM)",
        "Time for which a request waited until its blocks had come from a tier, or it gave up: median and "
        "95th percentile. At most `tier_deadline_s`.",
        tuple(
            (quantile(share, "kv_offload_lookup_async_delay_seconds"), f"{share:.0%}")
            for share in (0.5, 0.95)
        ),
        "s",
    )


def ram() -> Iterator[Panel]:
    yield Panel(
        "Stored and evicted",
        "Blocks per second. If both are high and hits are few, RAM is too small: try `hazard` or an "
        "admission rule.",
        ((total(ours("stored_blocks_total")), "stored"), (total(ours("evicted_blocks_total")), "evicted"),
         (total(ours("discarded_blocks_total")), "discarded")),
    )  # fmt: skip
    yield Panel(
        "Blocks in RAM",
        "Blocks that can be loaded, that are being loaded or verified (pinned), and that are being stored "
        "(writing).",
        tuple(
            (f"sum({ours(f'{name}_blocks')})", name) for name in ("capacity", "ready", "pinned", "writing")
        ),
    )
    yield Panel(
        "Lost to tiers and offers",
        "Blocks per second that left RAM before a tier took them (the tier writes too slowly), and with "
        "`on-device-eviction` blocks that the GPU dropped before they were offered.",
        ((total(ours("not_offered_blocks_total")), "not offered to a tier"),
         (total(ours("lost_blocks_total")), "dropped by the GPU")),
    )  # fmt: skip
    yield Panel(
        "State of the policy",
        "Values that the eviction policy reports, such as the sizes of ARC's lists or whether `hazard` acts "
        "as LRU.",
        ((f"sum by (policy, name, instance) ({ours('policy_state')})", "{{policy}} {{name}} {{instance}}"),),
    )


def what_if() -> Iterator[Panel]:
    yield Panel(
        "Hit ratio of other settings",
        "With `what_if`: estimated share of the looked-up blocks that RAM would serve under each setting, of "
        "the last one to two hours. `current` is the estimate for the setting in use.",
        ((f"avg by (setting, instance) ({ours('what_if_hit_ratio')})", "{{setting}} {{instance}}"),),
        "percentunit",
    )
    yield Panel(
        "Gain of other settings, at least",
        "Estimated gain of hit ratio minus its error (95 % interval). Above 0: the setting is better.",
        ((f"avg by (setting, instance) ({ours('what_if_gain')} - {ours('what_if_gain_error')})",
          "{{setting}} {{instance}}"),),
        "percentunit",
    )  # fmt: skip


def tenants() -> Iterator[Panel]:
    yield Panel(
        "Blocks of tenants",
        "With quotas: blocks that each tenant holds, readable or being stored. In a shared pool with shares: "
        "`own` blocks of the engine, of `others`, and of engines that have `ended`.",
        (
            (f"sum by (tenant, instance) ({ours('tenant_held_blocks')})", "{{tenant}} {{instance}}"),
            (
                f"sum by (tenant, tier, instance) ({ours('tenant_tier_held_blocks')})",
                "{{tenant}} {{tier}} {{instance}}",
            ),
        ),
    )
    yield Panel(
        "Loaded and evicted by tenant",
        "Blocks per second. A tenant that loses many blocks and holds only its minimum needs a higher one.",
        ((total(ours("tenant_loaded_blocks_total"), "tenant"), "{{tenant}} loaded"),
         (total(ours("tenant_evicted_blocks_total"), "tenant"), "{{tenant}} evicted")),
    )  # fmt: skip


def tiers() -> Iterator[Panel]:
    yield Panel(
        "Use of tiers",
        "Share of a tier's capacity that can be read. Full is normal. The capacity of a server is unknown.",
        ((f"sum by (tier, instance) ({ours('tier_ready')}) / "
          f"(sum by (tier, instance) ({ours('tier_capacity')}) > 0)", "{{tier}} {{instance}}"),),
        "percentunit",
    )  # fmt: skip
    yield Panel(
        "In flight",
        "Blocks being written or read. A line that stays above 0 without reads or writes is a hung tier.",
        ((f"sum by (tier) ({ours('tier_in_flight')})", "{{tier}}"),),
    )
    yield Panel(
        "Not written",
        "Blocks per second that the tier's rule or policy refused, that were dropped because the tier was "
        "busy or out of budget, or that another machine had written.",
        tuple(
            (total(ours(f"tier_{name}_total"), "tier"), f"{{{{tier}}}} {name}")
            for name in ("refused", "dropped", "skipped", "evicted")
        ),
    )
    yield Panel(
        "Faults",
        "Blocks per second that failed, did not match their checksum, exceeded their deadline or were gone "
        "from a server, and exceptions. Normal: 0.",
        tuple(
            (total(ours(f"tier_{name}_total"), "tier"), f"{{{{tier}}}} {name}")
            for name in ("failed", "mismatches", "timeouts", "stale", "errors")
        ),
    )
    yield Panel(
        "Servers with an open circuit breaker",
        "Servers that do not answer; no request waits for them. Normal: 0.",
        ((f"sum by (tier, instance) ({ours('tier_circuit_open')})", "{{tier}} {{instance}}"),),
    )
    yield Panel(
        "Probes of shared tiers",
        "Blocks per second that a server was asked for, and that it had.",
        ((total(ours("tier_probes_total"), "tier"), "{{tier}} asked"),
         (total(ours("tier_probe_hits_total"), "tier"), "{{tier}} found")),
    )  # fmt: skip
    yield Panel(
        "Write budget",
        "Bytes that may still be written in these 24 hours, of tiers with a limit.",
        ((f"sum by (tier, instance) ({ours('tier_write_budget_bytes')})", "{{tier}} {{instance}}"),),
        "bytes",
    )
    yield Panel(
        "Cost of buckets, 24 h",
        "Price of requests and received bytes, at the prices of the tier's URL.",
        ((f"sum by (tier) (increase({ours('tier_cost_total')}[24h]))", "{{tier}}"),),
    )


def soundness() -> Iterator[Panel]:
    yield Panel(
        "Damaged and failed blocks",
        "Blocks in an hour: damaged in RAM, not loaded, not stored, and internal errors. Normal: 0.",
        tuple(
            (f"sum(increase({ours(f'{name}_total')}[1h]))", name)
            for name in (
                "verification_failures",
                "failed_load_blocks",
                "failed_store_blocks",
                "internal_errors",
            )
        ),
    )
    yield Panel(
        "Canary",
        "Result of the last run of `kvoffload canary --prometheus`. `different` means wrong answers.",
        (("max by (result) (kvoffload_canary_result)", "{{result}}"),),
    )
    yield Panel(
        "Canary: largest difference",
        "Largest difference of an answer from the caches, in log-probability, and the threshold above which "
        "it is an alarm.",
        (("max(kvoffload_canary_largest_difference)", "difference"),
         ("max(kvoffload_canary_threshold)", "threshold")),
    )  # fmt: skip
    yield Panel(
        "Audit (vLLM)",
        "Stored blocks compared with computed ones in an hour, by result. `different` means wrong blocks.",
        ((f"sum by (result) (increase({ours('audited_blocks_total')}[1h]))", "{{result}}"),),
    )


SECTIONS = {
    "Overview": overview,
    "Hits": hits,
    "Misses": misses,
    "Bytes and latency": transfers,
    "RAM and policy": ram,
    "Tenants": tenants,
    "What if": what_if,
    "Tiers": tiers,
    "Damage, canary, audit": soundness,
}


# ---- Grafana


def build() -> str:
    """Return the dashboard as JSON."""
    made = (
        grafana.Dashboard("kvoffload")
        .uid("kvoffload")
        .description("KV-cache blocks in RAM and tiers. What each alarm means: docs/operations.md.")
        .tags(["kvoffload", "vllm"])
        .time("now-3h", "now")
        .refresh("30s")
        .tooltip(models.DashboardCursorSync.CROSSHAIR)
        .variables(variables())
    )
    numbers = itertools.count(1)
    for title, panels in SECTIONS.items():
        made.with_row(grafana.Row(title).id(next(numbers)))
        chosen = list(panels())
        for panel, span in zip(chosen, spans(chosen), strict=True):
            made.with_panel(drawn(panel).id(next(numbers)).span(span))
    return json.dumps(made.build(), cls=JSONEncoder, indent=1, sort_keys=True) + "\n"


def variables() -> list[Any]:
    sources = {"vLLM": VLLM_PREFIX, "library": LIBRARY_PREFIX}
    options = [models.VariableOption(name == "vLLM", name, prefix) for name, prefix in sources.items()]
    all_of_them = models.VariableOption(True, "All", "$__all")
    chosen = [
        grafana.QueryVariable(name)
        .label(label)
        .datasource(_DATASOURCE)
        .query(f"label_values(${{prefix}}capacity_blocks, {source})")
        .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .multi(True)
        .include_all(True)
        .all_value(".*")
        .current(all_of_them)
        for name, label, source in (("instance", "Instance", "instance"), ("model", "Model", "model_name"))
    ]
    return [
        grafana.DatasourceVariable("datasource").label("Data source").type("prometheus"),
        grafana.CustomVariable("prefix")
        .label("Source")
        .description("vLLM's plug-in, or the collector of an engine of your own")
        .values(", ".join(f"{name} : {prefix}" for name, prefix in sources.items()))
        .options(options)
        .current(options[0]),
        *chosen,
    ]


def spans(panels: list[Panel]) -> list[int]:
    """Return widths that fill rows of 24 columns: all numbers in a row, two or three line panels in a row."""
    if panels[0].is_number:
        return [24 // len(panels)] * len(panels)
    pairs = {0: 0, 1: 2, 2: 1}[len(panels) % 3]
    return [8] * (len(panels) - 2 * pairs) + [12] * (2 * pairs)


def drawn(panel: Panel) -> Any:
    made: Any = number_panel(panel) if panel.is_number else line_panel(panel)
    made.title(panel.title).description(panel.text).unit(panel.unit).datasource(_DATASOURCE)
    for position, (query, legend) in enumerate(panel.queries):
        target = prometheus.Dataquery().expr(query).legend_format(legend).ref_id(chr(ord("A") + position))
        made.with_target(target.datasource(_DATASOURCE))
    return made


def number_panel(panel: Panel) -> Any:
    last = shared.ReduceDataOptions().calcs(["lastNotNull"])
    made = stat.Panel().height(4).graph_mode(common.BigValueGraphMode.NONE).reduce_options(last)
    steps = [models.Threshold(None, "green")]
    if panel.alarms_above is not None:
        # Grafana's thresholds are inclusive.
        steps.append(models.Threshold(panel.alarms_above + 0.01, "red"))
    thresholds = grafana.ThresholdsConfig().mode(models.ThresholdsMode.ABSOLUTE).steps(steps)
    made.thresholds(thresholds).no_value("-")
    return made


def line_panel(panel: Panel) -> Any:
    made = timeseries.Panel().height(8).min(0).show_points(common.VisibilityMode.NEVER)
    made.fill_opacity(30 if panel.is_stacked else 0)
    legend = shared.VizLegendOptions().show_legend(True).placement(common.LegendPlacement.BOTTOM)
    made.legend(legend.display_mode(common.LegendDisplayMode.LIST))
    made.tooltip(shared.VizTooltipOptions().mode(common.TooltipDisplayMode.MULTI))
    if panel.is_stacked:
        made.stacking(shared.StackingConfig().mode(common.StackingMode.NORMAL))
    return made


if __name__ == "__main__":
    FILE.write_text(build())
    print(
        f"{FILE.relative_to(FILE.parents[3])}: {sum(len(list(made())) for made in SECTIONS.values())} panels"
    )
