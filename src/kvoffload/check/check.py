"""Rows that compare a server with a prediction, and the verdict of the comparison."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum

import msgspec

from kvoffload.check.served import GPU, PLACES, RAM, TIERS, Served
from kvoffload.replay.report import ReplayReport, sums_of
from kvoffload.simulate.report import TimedReport
from kvoffload.text import duration, percent, size
from kvoffload.traces.trace import Trace

HIT_POINTS, TTFT_SHARE, BYTES_SHARE, REQUESTS_SHARE = 0.02, 0.15, 0.1, 0.02
"""Largest differences between server and prediction that count as close. `HIT_POINTS` is a share of all
prompt tokens. The other limits are shares of the server's value."""
_PLACE_TEXTS = {GPU: "hits on the GPU", RAM: "hits in RAM", TIERS: "hits in tiers"}


class Verdict(Enum):
    """Result of a check."""

    CLOSE = "close"
    DIFFERENT = "different"
    NOT_COMPARABLE = "not-comparable"


class Prediction(msgspec.Struct, frozen=True, kw_only=True):
    """Predicted totals of a server, for comparison with `Served`.

    Fields that `Served` also has are described there. `instances` is the number of engines. A field is None
    if the replay does not predict the quantity.
    """

    requests: int
    prompt_tokens: int
    hit_tokens: dict[str, int]
    capacity_blocks: int
    device_blocks: int
    block_tokens: int
    policy: str
    instances: int
    loaded_bytes: int | None = None
    stored_bytes: int | None = None
    ttft_mean_s: float | None = None

    @classmethod
    def of_replay(cls, report: ReplayReport, trace: Trace, block_bytes: int | None) -> Prediction:
        """Return the prediction of ``kvoffload replay``.

        `block_bytes`: bytes of KV in a block; None if unknown.
        """
        stored = report.blocks_written - report.blocks_promoted
        return _prediction(
            report, trace, report.device_hit_blocks, [tier.hit_blocks for tier in report.tiers],
            loaded_bytes=None if block_bytes is None else block_bytes * report.offload_hit_blocks,
            stored_bytes=None if block_bytes is None else block_bytes * stored,
        )  # fmt: skip

    @classmethod
    def of_simulation(cls, report: TimedReport, trace: Trace) -> Prediction:
        """Return the prediction of ``kvoffload simulate``."""
        run = report.with_offload
        links = {link.name: link.bytes_moved for link in run.links}
        return _prediction(
            report, trace, run.device_hit_blocks, [tier.hit_blocks for tier in run.tiers],
            loaded_bytes=links.get("load"), stored_bytes=links.get("store"), ttft_mean_s=run.ttft_s.mean,
        )  # fmt: skip

    @classmethod
    def of_engines(cls, engines: Sequence[Prediction], ttft_mean_s: float | None = None) -> Prediction:
        """Add up the predictions of engines that have equal sizes and share no cache.

        `ttft_mean_s`: mean time to first token of all requests; None if unknown.
        """
        return msgspec.structs.replace(
            engines[0],
            **sums_of(engines, "requests", "prompt_tokens", "capacity_blocks"),
            hit_tokens={place: sum(engine.hit_tokens[place] for engine in engines) for place in PLACES},
            instances=len(engines),
            loaded_bytes=_sum(engine.loaded_bytes for engine in engines),
            stored_bytes=_sum(engine.stored_bytes for engine in engines),
            ttft_mean_s=ttft_mean_s,
        )


def _prediction(
    report: ReplayReport | TimedReport,
    trace: Trace,
    device_hits: int,
    tier_hits: list[int],
    *,
    loaded_bytes: int | None,
    stored_bytes: int | None,
    ttft_mean_s: float | None = None,
) -> Prediction:
    blocks = {GPU: device_hits, RAM: sum(tier_hits[:1]), TIERS: sum(tier_hits[1:])}
    tokens = trace.block_refs * trace.block_tokens
    if trace.prompt_tokens is not None:
        tokens = int(trace.prompt_tokens.sum())
    return Prediction(
        requests=trace.requests,
        prompt_tokens=tokens,
        hit_tokens={place: number * trace.block_tokens for place, number in blocks.items()},
        capacity_blocks=report.capacity_blocks * report.instances,
        device_blocks=report.device_blocks,
        block_tokens=trace.block_tokens,
        policy=report.policy.partition(",")[0],
        instances=report.instances,
        loaded_bytes=loaded_bytes,
        stored_bytes=stored_bytes,
        ttft_mean_s=ttft_mean_s,
    )


def _sum(numbers: Iterable[int | None]) -> int | None:
    known = list(numbers)
    return None if None in known else sum(number for number in known if number is not None)


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """A compared quantity.

    Attributes:
        name: name for users.
        unit: ``requests``, ``tokens``, ``share``, ``bytes``, ``s``.
        server, predicted: the two values.
        difference: ``(predicted - server) / server``; for the unit ``share``, ``predicted - server``.
        limit: largest absolute difference that counts as close.
        is_close: True if the difference is within the limit.
    """

    name: str
    unit: str
    server: float
    predicted: float
    difference: float
    limit: float
    is_close: bool


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """Comparison of a server with the prediction from its recording; its fields are the JSON keys.

    Attributes:
        verdict: ``close`` if every row is within its limit. ``different`` if a row exceeds its limit.
            ``not-comparable`` if server and recording have different requests.
        rows: quantities that both the server and the prediction have.
        settings: differences between the server's set-up and the predicted set-up, as sentences.
    """

    verdict: str
    rows: list[Row]
    settings: list[str]


def check(server: Served, predicted: Prediction) -> Check:
    """Compare a server with the prediction from its recording."""
    rows = [
        _relative("requests", "requests", server.requests, predicted.requests, REQUESTS_SHARE),
        _relative("prompt tokens", "tokens", server.prompt_tokens, predicted.prompt_tokens, REQUESTS_SHARE),
    ]
    is_comparable = all(row.is_close for row in rows)
    for place in PLACES:
        shares = (
            server.hit_tokens[place] / max(1.0, server.prompt_tokens),
            predicted.hit_tokens[place] / max(1, predicted.prompt_tokens),
        )
        if place != TIERS or any(shares):
            rows.append(_row(_PLACE_TEXTS[place], "share", *shares, shares[1] - shares[0], HIT_POINTS))
    for name, measured, expected in (
        ("bytes loaded", server.loaded_bytes, predicted.loaded_bytes),
        ("bytes stored", server.stored_bytes, predicted.stored_bytes),
    ):
        if expected is not None:
            rows.append(_relative(name, "bytes", measured, expected, BYTES_SHARE))
    if server.ttft_mean_s is not None and predicted.ttft_mean_s is not None:
        rows.append(_relative("TTFT, mean", "s", server.ttft_mean_s, predicted.ttft_mean_s, TTFT_SHARE))
    verdict = Verdict.NOT_COMPARABLE
    if is_comparable:
        verdict = Verdict.CLOSE if all(row.is_close for row in rows) else Verdict.DIFFERENT
    return Check(verdict=verdict.value, rows=rows, settings=_settings(server, predicted))


def value_text(row: Row, value: float) -> str:
    """Format a value of a row: ``12.5 %``, ``1.2 GiB``, ``320 ms``."""
    if row.unit == "share":
        return percent(value)
    if row.unit == "bytes":
        return size(int(value))
    return duration(value) if row.unit == "s" else f"{value:,.0f}"


def _relative(name: str, unit: str, measured: float, expected: float, limit: float) -> Row:
    difference = (expected - measured) / measured if measured else float(expected != 0)
    return _row(name, unit, measured, expected, difference, limit)


def _row(name: str, unit: str, measured: float, expected: float, difference: float, limit: float) -> Row:
    return Row(
        name=name, unit=unit, server=float(measured), predicted=float(expected), difference=difference,
        limit=limit, is_close=abs(difference) <= limit,
    )  # fmt: skip


def _settings(server: Served, predicted: Prediction) -> list[str]:
    """Describe the settings in which the server differs from the prediction."""
    differences = []
    # The third value: engines share a pool, and each of them reports the size of the whole pool.
    same = (0, predicted.capacity_blocks, predicted.capacity_blocks * predicted.instances)
    if server.capacity_blocks not in same:
        differences.append(
            f"RAM: the server has {server.capacity_blocks:,} blocks, predicted are "
            f"{predicted.capacity_blocks:,}: --capacity {server.capacity_blocks // predicted.instances}"
        )
    tokens = server.device_blocks * server.device_block_tokens
    if tokens and tokens != predicted.device_blocks * predicted.block_tokens:
        wanted = tokens // predicted.block_tokens
        differences.append(
            f"GPU: the server has {tokens:,} tokens, predicted are "
            f"{predicted.device_blocks * predicted.block_tokens:,}: --device-blocks {wanted}"
        )
    if server.policies and predicted.policy not in server.policies:
        differences.append(
            f"policy: the server has {', '.join(server.policies)}, predicted is {predicted.policy}: "
            f"--policy {server.policies[0]}"
        )
    return differences
