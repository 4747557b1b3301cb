"""Assumptions of a plan that do not follow from the recording, each with its source."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from kvoffload.plan.clock import InTime
from kvoffload.plan.findings import Findings
from kvoffload.plan.fleet import SERVER_BYTES_PER_BYTE, Fleet
from kvoffload.plan.prices import MEANING, Server, flattened
from kvoffload.simulate.machine import QUANTITIES, Quantity
from kvoffload.text import duration, round_size


class Assumption(msgspec.Struct, frozen=True):
    """An assumption that does not follow from the recording, with its source."""

    name: str
    value: str
    source: str


def assumptions(findings: Findings) -> list[Assumption]:
    """List the assumptions of the answer that do not follow from the recording."""
    fleet, evidence, in_time = findings.fleet, findings.evidence, findings.in_time
    block, prices, one_in = round_size(fleet.block_bytes), fleet.prices, findings.one_in
    room = f"{fleet.gpus} with {round_size(fleet.kv_bytes_per_gpu)} for blocks each"
    if fleet.gpu_blocks:
        room = f"{fleet.gpus}, {fleet.gpu_blocks:,} blocks in each engine"
    listed = [
        Assumption("block", block, "bytes of a token (--model) times the recording's tokens per block"),
        Assumption("GPUs", room, "given"),
        Assumption("engines", f"{fleet.replicas}, requests by {fleet.routing}",
                   "given; each has its own GPUs, RAM and SSDs"),
        Assumption("GPU cache", "lru", "vLLM's own; requests end when they are served"),
        Assumption("load", f"{fleet.load:g}x the recording's", "given; sessions stay whole"),
        Assumption("traffic", f"{fleet.scale:g} times the recording's", "given; of sessions like these"),
        Assumption("rate", f"as in these {evidence.duration_s / 3600:,.1f} hours, day and night",
                   "the recording, assumed to be typical"),
        Assumption("busiest minute", f"{evidence.busy:.1f} times the mean",
                   "the recording's references; writes and reads are assumed to follow them"),
        Assumption("replicas", "writes and loads are spread evenly", "assumed"),
    ]  # fmt: skip
    if not evidence.time_unit:
        listed.insert(
            0, Assumption("time unit", "ms", "assumed: the recording does not state it; --time-unit")
        )
    if evidence.assumed:
        source = "header of the recording; docs/traces.md explains it"
        listed.insert(0, Assumption("conversion", evidence.assumed, source))
    if one_in > 1:
        source = "by the length of the recording, or given; the answer is measured on all sessions"
        listed.append(Assumption("searched on", f"one of {one_in:,} sessions", source))
    if fleet.tokens_per_s:
        source = "the machine's, without attention"
        if fleet.prefill_tokens_per_s:
            source = "given; not measured here" + ("; waits are the machine's" if in_time else "")
        listed.append(Assumption("prefill", f"{fleet.tokens_per_s:,g} tokens/s a GPU", source))
    if in_time is not None:
        listed += _of_timing(in_time)
    listed.append(Assumption("prices", f"in {prices.currency}, {prices.date}", prices.source))
    shares = evidence.whole is not None and fleet.may_share
    if evidence.whole is not None and fleet.shared_ram:
        pools = f"{fleet.engines_of_host} engines of a host share one, if the answer says so"
        listed.append(Assumption("RAM pools", pools, "given; one lock, no wait for it"))
    listed += _of_servers(fleet, are_searched=shares)
    for name, value in flattened(prices).items():
        if name not in ("currency", "source", "date") and (shares or not name.startswith("server.")):
            unit = f" {prices.currency}" if name.endswith("price") else ""
            listed.append(Assumption(name, f"{value}{unit}", MEANING[name]))
    return listed


def _of_servers(fleet: Fleet, *, are_searched: bool) -> list[Assumption]:
    """List the assumptions about servers. If servers for sale were not searched, list the reason instead."""
    if are_searched:
        source = "policy and overhead of Valkey, measured; engines find each other's blocks at once"
        return [Assumption("servers", f"lru, {SERVER_BYTES_PER_BYTE:g} bytes for a byte of blocks", source)]
    if not fleet.prices.server.slots or fleet.prices.server == Server():
        return []
    reason = "a target in seconds would time each purchase on all engines"
    return [Assumption("servers", "not searched", "one engine only" if fleet.replicas == 1 else reason)]


def _of_timing(timed: InTime) -> Iterator[Assumption]:
    """List the assumptions of timed replays."""
    machine = timed.machine
    yield Assumption("machine", machine.name, f"of an engine, given; model: {machine.model or 'unknown'}")
    for name in QUANTITIES:
        number: Quantity | None = getattr(machine, name)
        if number is not None:
            yield Assumption(name, _with_unit(name, number.value), number.source)
    if timed.all_engines:
        yield Assumption(
            "timed engines", f"all {timed.engines}, each on its own machine", "what they share is shared"
        )
    elif timed.engines > 1:
        engine = f"the busiest of {timed.engines}, with {timed.requests:,} requests"
        yield Assumption("timed engine", engine, "other engines wait less, if their machines are equal")
    yield Assumption("requests at a time", f"{timed.max_running:,}", "assumed, of an engine")
    yield Assumption("tokens a step", f"{timed.step_tokens:,}", "assumed, of an engine")
    if timed.load != 1:
        yield Assumption(
            "arrival rate", f"{timed.load:g} times the recording's", "scale; with full-size caches"
        )


def _with_unit(name: str, value: float) -> str:
    """Format the value of a `Machine` field with its unit: ``50.4 GB/s``, ``5 ms``.

    The end of the field's `name` determines the unit: ``_bytes_per_s`` means GB/s, ``tokens_per_s`` and
    ``_squared`` mean no unit, and all other fields are times.
    """
    if name.endswith("_bytes_per_s"):
        return f"{value / 1e9:.4g} GB/s"
    if name.endswith(("tokens_per_s", "_squared")):
        return f"{value:.4g}"
    return duration(value)
