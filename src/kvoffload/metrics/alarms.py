"""Alarms on the metrics, and the rule file for Prometheus.

Owns the expressions, causes and remedies of the alarms. A test compares the texts of `ALARMS` with
``docs/operations.md``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal

from kvoffload.metrics.families import FAMILIES, LIBRARY_PREFIX

RUNBOOK: Final = "docs/operations.md"
_PREFIX = "PREFIX_"
"""Placeholder in expressions for the prefix of the metrics."""
_SCOPE = "job, namespace, model_name, manager"
"""Labels that do not change when an engine is restarted. PromQL that sums by these labels adds up all
instances and engines. A missing label counts as empty."""
_ENGINE = f"instance, engine, {_SCOPE}"


@dataclass(frozen=True)
class Alarm:
    """An alarm: a condition in PromQL, its cause and its remedy.

    Attributes:
        template: PromQL, with a placeholder for the prefix of the metrics.
        hold: time for which the expression must be true before the alarm fires, such as ``10m``. Empty: the
            alarm fires at once.
        summary: one line, with the value and labels as Prometheus templates.
    """

    name: str
    template: str
    severity: Literal["critical", "warning", "info"]
    summary: str
    cause: str
    remedy: str
    hold: str = ""

    def expression(self, prefix: str) -> str:
        """Return the expression in PromQL, for metrics with this prefix."""
        return self.template.replace(_PREFIX, prefix)

    @property
    def runbook(self) -> str:
        """Address of the documentation of this alarm."""
        return f"{RUNBOOK}#{self.name.lower()}"

    @property
    def metrics(self) -> set[str]:
        """Names of our metrics in the expression, without the prefix."""
        return set(re.findall(rf"{_PREFIX}(\w+)", self.template))


def alarms(prefix: str) -> list[Alarm]:
    """Return the alarms for metrics with this prefix.

    For `LIBRARY_PREFIX`, alarms are left out if they use a metric that only vLLM's plug-in reports.
    """
    known = {
        family.series_name("") for family in FAMILIES if prefix != LIBRARY_PREFIX or not family.is_of_vllm
    }
    return [alarm for alarm in ALARMS if alarm.metrics <= known]


def rule_file(prefix: str) -> str:
    """Return the alarms as YAML for ``rule_files`` of Prometheus."""
    return "\n".join(["groups:", "  - name: kvoffload", "    rules:", *_rules(prefix)]) + "\n"


def _rules(prefix: str) -> Iterator[str]:
    for alarm in alarms(prefix):
        yield f"      - alert: {alarm.name}"
        yield "        expr: |"
        yield from (f"          {line}" for line in alarm.expression(prefix).splitlines())
        if alarm.hold:
            yield f"        for: {alarm.hold}"
        yield "        labels:"
        yield f"          severity: {alarm.severity}"
        yield "        annotations:"
        texts = {"summary": alarm.summary, "description": f"{alarm.cause} {alarm.remedy}",
                 "runbook": alarm.runbook}  # fmt: skip
        # A JSON string is a YAML string.
        yield from (f"          {key}: {json.dumps(text, ensure_ascii=False)}" for key, text in texts.items())


# ---- the alarms


def _ratio(period: str, offset: str = "") -> str:
    at = f"[{period}]{offset and f' offset {offset}'}"
    return (
        f"sum by ({_SCOPE}) (increase(PREFIX_hit_blocks_total{at})) "
        f"/ sum by ({_SCOPE}) (increase(PREFIX_lookup_blocks_total{at}))"
    )


def _lookups(period: str, offset: str = "") -> str:
    at = f"[{period}]{offset and f' offset {offset}'}"
    return f"sum by ({_SCOPE}) (increase(PREFIX_lookup_blocks_total{at}))"


def _grew(counter: str, period: str) -> str:
    """Return PromQL that is true if a counter grew in the period, or first appeared with a value above 0.

    vLLM exports no counter before the engine's first step, so `increase` misses the events of that step. The
    second condition finds them: the counter is above 0, and in the 6 hours before the period it had no
    sample, or a larger value because the engine was restarted since.
    """
    return (
        f"increase(PREFIX_{counter}[{period}]) > 0\n"
        f"or (PREFIX_{counter} > 0 unless PREFIX_{counter} >= "
        f"last_over_time(PREFIX_{counter}[6h] offset {period}))"
    )


_CANARY_FAILED = 'kvoffload_canary_result{result="failed"} == 1'
_CANARY_FAILS = f"""{_CANARY_FAILED}
and ignoring (result) changes((
  kvoffload_canary_last_run_timestamp_seconds and ignoring (result) {_CANARY_FAILED}
)[2d:5m]) > 0"""
"""PromQL that is true if the last run of the canary failed, and an earlier run in the last two days, too."""

_HALVED = f"""({_ratio("1h")} < 0.5 * ({_ratio("1h", "1d")}))
unless ({_ratio("1h")} >= 0.5 * ({_ratio("1h", "7d")}))
and {_lookups("1h")} > 1000
and {_lookups("1h", "1d")} > 1000
and {_ratio("1h", "1d")} > 0.05"""

_NOTHING_STORED = f"""sum by ({_ENGINE}) (increase(PREFIX_lookup_blocks_total[30m]))
  - sum by ({_ENGINE}) (increase(PREFIX_hit_blocks_total[30m])) > 1000
and sum by ({_ENGINE}) (increase(PREFIX_stored_blocks_total[30m])) == 0
unless sum by ({_ENGINE}) (increase(PREFIX_refused_blocks_total{{reason="admission"}}[30m]))
  > 0.5 * (sum by ({_ENGINE}) (increase(PREFIX_lookup_blocks_total[30m]))
           - sum by ({_ENGINE}) (increase(PREFIX_hit_blocks_total[30m])))"""

_STALLED = """min_over_time(PREFIX_tier_in_flight[10m]) > 0
and increase(PREFIX_tier_written_total[10m]) + increase(PREFIX_tier_read_total[10m])
  + increase(PREFIX_tier_failed_total[10m]) + increase(PREFIX_tier_mismatches_total[10m]) == 0"""

_BUDGET_SPENT = """PREFIX_tier_write_budget_bytes
  <= 0.01 * max_over_time(PREFIX_tier_write_budget_bytes[1d])
and increase(PREFIX_tier_dropped_total[30m]) > 0"""

ALARMS: Final = (
    Alarm(
        name="KVOffloadWrongAnswers",
        template='kvoffload_canary_result{result="different"} == 1',
        severity="critical",
        summary="The canary's last run at {{ $labels.instance }} got wrong answers from the caches",
        cause="Answers from the caches differ from computed answers by more than the engine's noise.",
        remedy="Take the engine out of service, or restart it without kvoffload. Run `kvoffload canary URL` "
        "by hand. Its output shows which answers are wrong: answers from the device's cache, answers from "
        "the tiers, or both. Report the fault with this output.",
    ),
    Alarm(
        name="KVOffloadWrongBlocks",
        template='PREFIX_audited_blocks_total{result="different"} > 0',
        severity="critical",
        summary="An audit found {{ $value | humanize }} wrong blocks at {{ $labels.instance }}",
        cause="A stored block differs from the block that the engine computed. The copy, the layout or the "
        "engine has a bug.",
        remedy="Take the engine out of service. The engine's log names the block, the KV group and the "
        "tensor. Report the fault with the log. The alarm ends when the engine is restarted.",
    ),
    Alarm(
        name="KVOffloadCanaryFails",
        template=_CANARY_FAILS,
        hold="15m",
        severity="warning",
        summary="The last run of the canary at {{ $labels.instance }} got no result, and an earlier one too",
        cause="At least two runs of `kvoffload canary` within two days got no result, including the last "
        "run.",
        remedy="Read the canary's log. Until a run has a result, wrong answers go unnoticed.",
    ),
    Alarm(
        name="KVOffloadCanaryStopped",
        template="time() - kvoffload_canary_last_run_timestamp_seconds > 86400",
        hold="15m",
        severity="warning",
        summary="The last run of the canary at {{ $labels.instance }} ended {{ $value | humanizeDuration }} "
        "ago",
        cause="`kvoffload canary --watch` has ended or hangs, or its timer no longer starts it.",
        remedy="Start the canary again. To run it less than once a day, raise the 86400 seconds in the rule "
        "of this alarm.",
    ),
    Alarm(
        name="KVOffloadPaused",
        template="PREFIX_paused == 1",
        severity="critical",
        summary="Nothing is offloaded at {{ $labels.instance }} until a reset",
        cause="Offloading is paused: kvoffload had an internal error, or an audit with `on_difference=stop` "
        "found a wrong block. The engine continues, and computes every block.",
        remedy="Save the log: it names the reason. Report the fault. Then reset the cache "
        "(POST /reset_prefix_cache?reset_external=true) or restart the engine; the alarm ends with the next "
        "step.",
    ),
    Alarm(
        name="KVOffloadInternalError",
        template=_grew("internal_errors_total", "1h"),
        severity="critical",
        summary="A bug of kvoffload at {{ $labels.instance }} in the last hour",
        cause="kvoffload raised an exception. The engine continues. vLLM's plug-in offloads nothing until "
        "a reset; KVOffloadPaused fires until then.",
        remedy="Save the log: it has the traceback. Report the fault.",
    ),
    Alarm(
        name="KVOffloadDamagedMemory",
        template=_grew("verification_failures_total", "1h"),
        severity="warning",
        summary="{{ $value | humanize }} blocks in RAM at {{ $labels.instance }} failed their checksum",
        cause="Bytes in RAM changed after they were stored. The blocks were computed again, so answers are "
        "right.",
        remedy="Look for memory errors of the machine (`dmesg`, `edac-util`, the BMC's log) and test the "
        "memory. If the memory is sound, another process writes to the pool in /dev/shm.",
    ),
    Alarm(
        name="KVOffloadDamagedTier",
        template=_grew("tier_mismatches_total", "1h"),
        severity="warning",
        summary="{{ $value | humanize }} blocks of {{ $labels.tier }} failed their checksum",
        cause="A disk or server returned bytes that differ from the written bytes. The blocks were computed "
        "again, so answers are right.",
        remedy="For a disk, read the drive's health (`smartctl -a`), and run `kvoffload disk verify PATH` "
        "while the engine is stopped. Replace the drive if the number of damaged blocks keeps growing. For "
        "a server, check the memory of its machine.",
    ),
    Alarm(
        name="KVOffloadFailedLoads",
        template=_grew("failed_load_blocks_total", "30m"),
        severity="warning",
        summary="{{ $value | humanize }} blocks at {{ $labels.instance }} could not be loaded",
        cause="A copy from RAM to the device failed. If `kv_load_failure_policy` is `recompute`, the blocks "
        "were computed again.",
        remedy="Read the worker's log for the device's error. If `kv_load_failure_policy` is `fail` (vLLM's "
        "default), each request that needed one of these blocks ended with an error. To let vLLM compute "
        "such blocks again, start the engine with the flag that `kvoffload vllm-config` prints.",
    ),
    Alarm(
        name="KVOffloadFailedStores",
        template="increase(PREFIX_failed_store_blocks_total[30m])\n"
        "  > 0.1 * (increase(PREFIX_failed_store_blocks_total[30m])\n"
        "           + increase(PREFIX_stored_blocks_total[30m]))",
        hold="15m",
        severity="warning",
        summary="{{ $value | humanize }} blocks at {{ $labels.instance }} could not be stored",
        cause="More than a tenth of the stores to RAM failed: a copy failed, or the engine reused blocks "
        "before their copy had ended.",
        remedy="Read the worker's log. If it has no errors, the engine reused blocks too early: use the "
        "store mode `on-compute` instead of `on-device-eviction`.",
    ),
    Alarm(
        name="KVOffloadTierUnreachable",
        template=f"max by ({_ENGINE}, tier) (PREFIX_tier_circuit_open) > 0",
        hold="10m",
        severity="warning",
        summary="{{ $value }} servers of {{ $labels.tier }} do not answer {{ $labels.instance }}",
        cause="The server of a tier, or the network, is down or too slow. Requests do not wait for the "
        "server.",
        remedy="Run `kvoffload tier ping URL` on the engine's machine: the command names the fault. The tier "
        "is used again when the server answers.",
    ),
    Alarm(
        name="KVOffloadTierStalled",
        template=_STALLED,
        hold="5m",
        severity="warning",
        summary="{{ $value }} blocks of {{ $labels.tier }} are in flight and none finishes",
        cause="The disk of a tier, or its file system, hangs (NFS, a failing SSD). Requests compute the "
        "tier's blocks again.",
        remedy="Look for hung I/O (`dmesg`, `cat /proc/PID/task/*/wchan`) and repair the disk. If the I/O "
        "does not return, restart the engine.",
    ),
    Alarm(
        name="KVOffloadTierFails",
        template=f"sum by ({_ENGINE}, tier) (increase(PREFIX_tier_failed_total[10m])) > 0",
        hold="10m",
        severity="warning",
        summary="{{ $value | humanize }} reads or writes of {{ $labels.tier }} failed in ten minutes",
        cause="The disk of a tier is full, read-only or broken, or the server of a tier refuses commands.",
        remedy="The engine's log names the error. For a disk, compare `df` with `kvoffload disk inspect "
        "PATH`. For a server, run `kvoffload tier ping URL`.",
    ),
    Alarm(
        name="KVOffloadWriteBudgetSpent",
        template=_BUDGET_SPENT,
        hold="15m",
        severity="warning",
        summary="{{ $labels.tier }} may write {{ $value | humanize1024 }}B more today, and drops blocks",
        cause="A disk tier has written `max_write_bytes_per_day` in the last 24 hours.",
        remedy="Use `admission=worth` or `reuse:2` for the tier. The tier then writes fewer blocks that "
        "nobody reads again. Raise the budget only if the SSD's endurance allows it.",
    ),
    Alarm(
        name="KVOffloadDiskTooSlow",
        template=f"sum by ({_ENGINE}) (rate(PREFIX_not_offered_blocks_total[30m]))\n"
        f"  > 0.1 * sum by ({_ENGINE}) (rate(PREFIX_evicted_blocks_total[30m]))",
        hold="30m",
        severity="info",
        summary="{{ $value | humanize }} blocks/s at {{ $labels.instance }} left RAM before a tier took them",
        cause="A tier writes more slowly than RAM evicts. More than a tenth of the evicted blocks left "
        "RAM before the tier could take them.",
        remedy="Add RAM, use a faster disk, or let the tier store less (`admission=reuse:2`).",
    ),
    Alarm(
        name="KVOffloadHitRatioHalved",
        template=_HALVED,
        hold="30m",
        severity="warning",
        summary="The hit ratio of {{ $labels.model_name }}{{ $labels.manager }} fell to "
        "{{ $value | humanizePercentage }}",
        cause="The hit ratio is less than half of the value at this time yesterday, and less than half of "
        "the value a week ago. Possible causes: a restart or reset emptied RAM, a tier is missing, or "
        "the beginning of the prompts changed (a date, id or salt).",
        remedy="Compare the reasons of today's misses with the reasons of yesterday's misses. Check that "
        "every tier works. After a restart, wait until RAM is full. If prompts changed, move the changing "
        "part to the end of the prompt.",
    ),
    Alarm(
        name="KVOffloadNothingStored",
        template=_NOTHING_STORED,
        hold="15m",
        severity="warning",
        summary="{{ $value | humanize }} blocks were missing at {{ $labels.instance }}, and none was stored",
        cause="RAM has stored nothing for 30 minutes, because all its blocks are in use, the engine offers "
        "no blocks, or offloading is paused.",
        remedy="If the metric `refused_blocks` grows with reason `no_room`, add RAM. If not, look at the "
        "metrics `paused` and `failed_store_blocks`.",
    ),
    Alarm(
        name="KVOffloadRecordingStopped",
        template="increase(PREFIX_unrecorded_requests_total[15m]) > 0",
        hold="15m",
        severity="info",
        summary="{{ $value | humanize }} requests at {{ $labels.instance }} are missing from the recording",
        cause="The recording has reached `record_max_bytes`, or its disk is full or too slow.",
        remedy="Move the recording and restart the engine, or raise `record_max_bytes`.",
    ),
)
