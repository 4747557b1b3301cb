"""Prometheus text of canary runs, for the node exporter's textfile collector."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from kvoffload.canary.run import CanaryReport
from kvoffload.canary.verdict import Verdict

FAILED = "failed"
"""Value of the label ``result`` for a run that ended with a `CanaryError`, so that it has no verdict."""


def text_metrics(report: CanaryReport | None, counts: Mapping[str, int], now_s: float) -> str:
    """Return the metrics of the last run.

    Args:
        report: None if the run ended with a `CanaryError`, for example because the server did not answer.
        counts: number of runs for each verdict, and for ``failed``.
        now_s: Unix time of the end of the run.
    """
    return "".join(f"{line}\n" for line in _lines(report, counts, now_s))


def _lines(report: CanaryReport | None, counts: Mapping[str, int], now_s: float) -> Iterator[str]:
    names = [*(verdict.value for verdict in Verdict), FAILED]
    last = FAILED if report is None else report.verdict
    yield from _metric(
        "runs_total", "counter", "Runs by result.", {name: counts.get(name, 0) for name in names}
    )
    yield from _metric(
        "result", "gauge", "1 for the result of the last run.", {n: int(n == last) for n in names}
    )
    yield from _metric("last_run_timestamp_seconds", "gauge", "End of the last run.", f"{now_s:.3f}")
    if report is None:
        return
    tier_tokens = sum(phase.tier_tokens or 0 for phase in report.phases)
    largest = max((row.difference for row in report.differences), default=0.0)
    yield from _metric("tier_tokens", "gauge", "Prompt tokens of the last run from tiers.", tier_tokens)
    yield from _metric("largest_difference", "gauge", "Largest difference, in log-probability.", largest)
    yield from _metric("noise", "gauge", "Largest difference of sound answers.", report.noise)
    yield from _metric("threshold", "gauge", "Differences above it are alarms.", report.threshold)


def _metric(name: str, kind: str, text: str, values: Mapping[str, int] | float | str) -> Iterator[str]:
    full = f"kvoffload_canary_{name}"
    yield f"# HELP {full} {text}"
    yield f"# TYPE {full} {kind}"
    if isinstance(values, Mapping):
        for result, value in values.items():
            yield f'{full}{{result="{result}"}} {value}'
    else:
        yield f"{full} {values}"
