"""Each alarm fires on its fault and on nothing else. promtool evaluates the rules on artificial series."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from kvoffload.canary.text_metrics import text_metrics
from kvoffload.metrics.alarms import ALARMS, alarms, rule_file
from kvoffload.metrics.families import FAMILIES, LIBRARY_PREFIX, VLLM_PREFIX
from support.prometheus_server import promtool

PREFIXES = [VLLM_PREFIX, LIBRARY_PREFIX]
DAY = 144
WEEK = 8 * DAY
"""Steps of ten minutes; a week and a day."""


class Case(NamedTuple):
    """Series in promtool's notation, one value for each step, and the step of the check."""

    series: dict[str, str]
    at: int = 60
    step_minutes: int = 1


def steady(rate: float, steps: int = 120) -> str:
    return f"0+{rate}x{steps}"


def jump(before: int, by: int, after: int, start: int = 0) -> str:
    """Make a counter that jumps once."""
    return f"{start}x{before} {start + by}x{after}"


def then(first: float, steps: int, second: float, more_steps: int) -> str:
    """Make a counter that grows at one rate, and then at another."""
    return f"0+{first}x{steps} {first * steps + second}+{second}x{more_steps}"


TIER = {'tier_in_flight{tier="a"}': "5x120", 'tier_written_total{tier="a"}': steady(3),
        'tier_read_total{tier="a"}': "7x120", 'tier_failed_total{tier="a"}': "0x120",
        'tier_mismatches_total{tier="a"}': "0x120"}  # fmt: skip
"""A tier that always has blocks in flight, and finishes them."""
BUDGET = {'tier_write_budget_bytes{tier="a"}': "100000x20 0x120", 'tier_dropped_total{tier="a"}': steady(2)}
STORES = {"lookup_blocks_total": steady(100), "hit_blocks_total": "0x120", "stored_blocks_total": "40x120"}
RATIO = {"lookup_blocks_total": steady(1000, WEEK + 20), "hit_blocks_total": then(600, WEEK, 100, 20)}
"""60 % of 100 blocks a minute for eight days, then 10 %."""

FIRST_AT_ONE = "_x10 1x110"
"""A counter that is first scraped after its first event, because vLLM shows metrics after the first step."""
LATER_AT_ONE = "5x10 _x130 1x110"
"""The same after two hours without a scrape."""
CANARY = 'kvoffload_canary_result{result="%s"}'
RAN = "kvoffload_canary_last_run_timestamp_seconds"


def runs_every(minutes: int, num: int = 10) -> str:
    """Make the time of the canary's last run, in steps of a minute."""
    return " ".join(f"{60 * minutes * run}x{minutes - 1}" for run in range(num))


def grows_or_begins_above_zero(series: str, holds_minutes: int = 59) -> list[Case]:
    return [
        Case({series: jump(20, 1, 90)}, 22),
        Case({series: jump(20, 1, 90)}, 20 + holds_minutes),
        Case({series: FIRST_AT_ONE}, 11),
        Case({series: FIRST_AT_ONE}, 10 + holds_minutes),
        Case({series: LATER_AT_ONE}, 145),
    ]


def is_old(series: str) -> list[Case]:
    """Make an old event, scraped at that time, or before two hours without a scrape."""
    return [
        Case({series: "3x120"}, 110),
        Case({series: FIRST_AT_ONE}, 110),
        Case({series: jump(20, 1, 100)}, 110),
        Case({series: "3x80 _x120 3x200"}, 210),
        Case({series: "0x120"}, 110),
    ]


FIRES = {
    "KVOffloadWrongAnswers": [Case({CANARY % "different": "0x20 1x60"})],
    "KVOffloadWrongBlocks": [
        Case({'audited_blocks_total{result="different"}': series}, at)
        for series, at in ((jump(20, 1, 900), 21), (jump(20, 1, 900), 800), (FIRST_AT_ONE, 11))
    ],
    "KVOffloadCanaryFails": [
        # A run every ten minutes; the second failure.
        Case({CANARY % "failed": "0x20 1x60", RAN: runs_every(10)}, 48),
        # A run every two hours.
        Case({CANARY % "failed": "0x130 1x400", RAN: runs_every(120)}, 360 + 17),
        Case({CANARY % "failed": "0x130 1x400", RAN: runs_every(120)}, 520),
    ],
    "KVOffloadCanaryStopped": [Case({RAN: "0x300"}, DAY + 6, 10)],
    "KVOffloadPaused": [
        Case({"paused": series}, at) for series, at in (("0x20 1x600", 21), ("0x20 1x600", 600), ("1x5", 0))
    ],
    "KVOffloadInternalError": grows_or_begins_above_zero("internal_errors_total"),
    "KVOffloadDamagedMemory": grows_or_begins_above_zero("verification_failures_total"),
    "KVOffloadDamagedTier": grows_or_begins_above_zero('tier_mismatches_total{tier="a"}'),
    "KVOffloadFailedLoads": grows_or_begins_above_zero("failed_load_blocks_total", holds_minutes=29),
    "KVOffloadFailedStores": [
        Case({"failed_store_blocks_total": steady(2), "stored_blocks_total": steady(10)})
    ],
    "KVOffloadTierUnreachable": [Case({'tier_circuit_open{tier="a"}': "0x20 1x60"})],
    "KVOffloadTierStalled": [
        Case(TIER | {'tier_written_total{tier="a"}': then(3, 20, 0, 100)}),
        Case(TIER | {'tier_written_total{tier="a"}': "0x120"}),
    ],
    "KVOffloadTierFails": [Case({'tier_failed_total{tier="a"}': steady(1)})],
    "KVOffloadWriteBudgetSpent": [Case(BUDGET)],
    "KVOffloadDiskTooSlow": [
        Case({"not_offered_blocks_total": steady(2), "evicted_blocks_total": steady(10)}, 90)
    ],
    "KVOffloadHitRatioHalved": [
        Case(RATIO, WEEK + 12, 10),
        # Without a week of data.
        Case(
            {"lookup_blocks_total": steady(1000, 3 * DAY), "hit_blocks_total": then(600, 2 * DAY, 100, 20)},
            2 * DAY + 12,
            10,
        ),
    ],
    "KVOffloadNothingStored": [
        Case(STORES, 90),
        Case(STORES | {'refused_blocks_total{reason="admission"}': steady(10)}, 90),
        Case(STORES | {'refused_blocks_total{reason="no_room"}': steady(100)}, 90),
    ],
    "KVOffloadRecordingStopped": [Case({"unrecorded_requests_total": steady(1)})],
}

QUIET = {
    "KVOffloadWrongAnswers": [Case({CANARY % "within-noise": "1x80", CANARY % "different": "0x80"})],
    "KVOffloadWrongBlocks": [
        Case({'audited_blocks_total{result="close"}': steady(5)}),
        Case({'audited_blocks_total{result="different"}': "0x20 3x20 0x60"}, 42),
    ],
    "KVOffloadCanaryFails": [
        # One run fails, every two hours.
        Case({CANARY % "failed": "0x119 1x119 0x119", RAN: runs_every(120)}, 230),
        Case({CANARY % "failed": "0x119 1x119 0x119", RAN: runs_every(120)}, 250),
        # The first run fails.
        Case({CANARY % "failed": "1x60", RAN: "5x60"}, 50),
        # Two runs fail, and the next run has a result.
        Case({CANARY % "failed": "0x9 1x19 0x30", RAN: runs_every(10)}, 45),
    ],
    "KVOffloadCanaryStopped": [
        # A run every six hours.
        Case({RAN: "0x36 21600x36 43200x36 64800x36 86400x36"}, DAY + 6, 10),
    ],
    "KVOffloadPaused": [Case({"paused": "0x20 1x40 0x60"}, at) for at in (20, 62)],
    "KVOffloadInternalError": is_old("internal_errors_total"),
    "KVOffloadDamagedMemory": is_old("verification_failures_total"),
    "KVOffloadDamagedTier": is_old('tier_mismatches_total{tier="a"}'),
    "KVOffloadFailedLoads": is_old("failed_load_blocks_total"),
    "KVOffloadFailedStores": [
        Case({"failed_store_blocks_total": steady(1), "stored_blocks_total": steady(10)}),
        Case({"failed_store_blocks_total": "0x120", "stored_blocks_total": "0x120"}),
    ],
    "KVOffloadTierUnreachable": [Case({'tier_circuit_open{tier="a"}': "0x20 1x5 0x60"}, 26)],
    "KVOffloadTierStalled": [
        Case(TIER),
        Case(TIER | {'tier_written_total{tier="a"}': "0x120", 'tier_in_flight{tier="a"}': "0x120"}),
        # Failed reads and wrong checksums have their own alarms.
        Case(TIER | {'tier_written_total{tier="a"}': "0x120", 'tier_read_total{tier="a"}': steady(1)}),
    ],
    "KVOffloadTierFails": [Case({'tier_failed_total{tier="a"}': jump(20, 5, 60)}, 25)],
    "KVOffloadWriteBudgetSpent": [
        Case({'tier_write_budget_bytes{tier="a"}': "100000x20 50000x120"} | {
            'tier_dropped_total{tier="a"}': steady(2)}),
        # Nothing to write, as at night.
        Case(BUDGET | {'tier_dropped_total{tier="a"}': "9x120"}),
    ],
    "KVOffloadDiskTooSlow": [
        Case({"not_offered_blocks_total": steady(0.5), "evicted_blocks_total": steady(10)}, 90),
        Case({"not_offered_blocks_total": "4x120", "evicted_blocks_total": "9x120"}, 90),
    ],
    "KVOffloadHitRatioHalved": [
        Case(RATIO | {"hit_blocks_total": then(600, WEEK, 350, 20)}, WEEK + 12, 10),
        # Too few requests to judge.
        Case({"lookup_blocks_total": steady(100, WEEK + 20), "hit_blocks_total": then(60, WEEK, 10, 20)},
             WEEK + 12, 10),
        # Too few requests now.
        Case({"lookup_blocks_total": then(1000, WEEK, 100, 20), "hit_blocks_total": then(600, WEEK, 10, 20)},
             WEEK + 12, 10),
        # Few hits at any time.
        Case(RATIO | {"hit_blocks_total": then(40, WEEK, 10, 20)}, WEEK + 12, 10),
        # As low as yesterday at this time: nightly work.
        Case(RATIO | {"hit_blocks_total": then(600, WEEK - DAY - 6, 100, DAY + 30)}, WEEK + 12, 10),
        # As low as a week ago: a weekend. 60 % on each other day.
        Case(RATIO | {"hit_blocks_total": f"0+100x{DAY + 20} {100 * DAY + 2600}+600x{7 * DAY - 20} "
                      f"{100 * DAY + 2600 + 600 * (7 * DAY - 20) + 100}+100x20"}, WEEK + 12, 10),
        # No traffic.
        Case({"lookup_blocks_total": then(1000, WEEK, 0, 20), "hit_blocks_total": then(600, WEEK, 0, 20)},
             WEEK + 12, 10),
    ],
    "KVOffloadNothingStored": [
        Case(STORES | {"stored_blocks_total": steady(0.1)}, 90),
        Case(STORES | {"hit_blocks_total": steady(99)}, 90),
        Case(STORES | {"lookup_blocks_total": "900x120"}, 90),
        # Prompts that are used once, with reuse:2.
        Case(STORES | {'refused_blocks_total{reason="admission"}': steady(95)}, 90),
    ],
    "KVOffloadRecordingStopped": [Case({"unrecorded_requests_total": "5x120"})],
}  # fmt: skip


def named(series: str) -> str:
    """Return a series with the labels of a target and of an engine."""
    name, _, labels = series.partition("{")
    full = name if name.startswith("kvoffload_canary_") else VLLM_PREFIX + name
    return f'{full}{{instance="h:1",job="kv",{labels or "}"}'


def check(tmp_path: Path, cases: dict[str, list[Case]], expected: bool) -> None:
    """Evaluate the rules on each case: only the case's own alarm fires, or none."""
    (tmp_path / "rules.yml").write_text(rule_file(VLLM_PREFIX))
    known = [(alarm.name, case) for alarm in ALARMS for case in cases[alarm.name]]
    # `at` must be a step of the evaluation.
    for minutes, evaluation_minutes in ((1, 1), (10, 30)):
        tests = [described(name, case, expected) for name, case in known if case.step_minutes == minutes]
        made = {"rule_files": ["rules.yml"], "evaluation_interval": f"{evaluation_minutes}m", "tests": tests}
        (tmp_path / "test.yml").write_text(yaml.safe_dump(made))
        promtool("test", "rules", tmp_path / "test.yml")


def described(name: str, case: Case, expected: bool) -> dict[str, Any]:
    """Return a case in promtool's format."""
    fired = {"labels": f'{{alertname="{name}"}}', "value": 1}
    query = {
        "expr": 'count by (alertname) (ALERTS{alertstate="firing"})',
        "eval_time": f"{case.at * case.step_minutes}m",
        "exp_samples": [fired] if expected else [],
    }
    series = [{"series": named(series_name), "values": values} for series_name, values in case.series.items()]
    return {"name": name, "interval": f"{case.step_minutes}m", "input_series": series,
            "promql_expr_test": [query]}  # fmt: skip


def test_every_alarm_has_a_case_that_fires_and_one_that_does_not() -> None:
    assert {alarm.name for alarm in ALARMS} == set(FIRES) == set(QUIET)


@pytest.mark.slow
def test_each_alarm_fires_on_its_fault_only(tmp_path: Path) -> None:
    check(tmp_path, FIRES, expected=True)


@pytest.mark.slow
def test_no_alarm_fires_without_its_fault(tmp_path: Path) -> None:
    check(tmp_path, QUIET, expected=False)


def test_prefixes_are_the_only_difference() -> None:
    """Therefore the cases above are valid for the library, too."""
    in_vllm = {alarm.name: alarm.expression(VLLM_PREFIX) for alarm in ALARMS}
    for alarm in alarms(LIBRARY_PREFIX):
        assert alarm.expression(LIBRARY_PREFIX) == in_vllm[alarm.name].replace(VLLM_PREFIX, LIBRARY_PREFIX)


@pytest.mark.parametrize("prefix", PREFIXES)
def test_prometheus_reads_the_rule_file(tmp_path: Path, prefix: str) -> None:
    (tmp_path / "rules.yml").write_text(rule_file(prefix))
    promtool("check", "rules", tmp_path / "rules.yml")


def test_the_rule_file_is_yaml_with_every_text() -> None:
    (group,) = yaml.safe_load(rule_file(VLLM_PREFIX))["groups"]
    assert [rule["alert"] for rule in group["rules"]] == [alarm.name for alarm in ALARMS]
    for rule, alarm in zip(group["rules"], ALARMS, strict=True):
        assert rule["expr"].strip() == alarm.expression(VLLM_PREFIX)
        assert rule["annotations"]["description"] == f"{alarm.cause} {alarm.remedy}"
        assert rule.get("for", "") == alarm.hold


def test_the_library_has_all_alarms_except_for_vllms_features() -> None:
    missing = {alarm.name for alarm in ALARMS} - {alarm.name for alarm in alarms(LIBRARY_PREFIX)}
    assert missing == {"KVOffloadWrongBlocks", "KVOffloadPaused", "KVOffloadRecordingStopped"}


def test_alarms_use_existing_metrics_by_their_kind() -> None:
    counters = {family.series_name("") for family in FAMILIES if family.is_counter}
    gauges = {family.series_name("") for family in FAMILIES if not family.is_counter}
    for alarm in ALARMS:
        assert alarm.metrics <= counters | gauges, alarm.name
        for name in alarm.metrics:
            ranged = rf"(increase|rate)\(PREFIX_{name}(\{{[^}}]*\}})?\["
            # The alarm for wrong blocks stays until a restart of the engine resets the counter.
            is_ranged = name in counters and alarm.name != "KVOffloadWrongBlocks"
            assert bool(re.search(ranged, alarm.template)) == is_ranged, (alarm.name, name)


def test_alarms_of_the_canary_use_existing_metrics() -> None:
    written = text_metrics(None, {}, 0.0)
    for alarm in ALARMS:
        for name, labels in re.findall(r"(kvoffload_canary_\w+)(\{[^}]*\})?", alarm.template):
            assert f"\n{name}{labels} " in written, alarm.name
