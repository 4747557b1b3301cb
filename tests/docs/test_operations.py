"""docs/operations.md describes each alarm with the texts of its rule, and its examples run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvoffload.core.manager import OffloadingManager
from kvoffload.metrics.alarms import ALARMS, RUNBOOK

CODE = r"```python\n(.*?)```"
ROOT = Path(__file__).resolve().parents[2]


def test_each_alarm_has_a_section_with_the_texts_of_its_rule() -> None:
    page = (ROOT / RUNBOOK).read_text()
    sections = dict(re.findall(r"^### (KVOffload\w+)\n(.*?)(?=^##|\Z)", page, re.M | re.S))
    assert list(sections) == [alarm.name for alarm in ALARMS]
    for alarm in ALARMS:
        # Lines are wrapped for readers.
        text = " ".join(sections[alarm.name].split())
        assert text == f"*{alarm.severity}.* {alarm.cause} **Remedy.** {alarm.remedy}"


def test_the_example_of_a_policy_change_runs() -> None:
    (code,) = [code for code in re.findall(CODE, (ROOT / RUNBOOK).read_text(), re.S) if "change" in code]
    manager = OffloadingManager(4, key_bytes=8)
    plan = manager.prepare_store([b"12345678"])
    assert plan is not None
    manager.complete_store(plan)
    exec(code, {"manager": manager})
    assert manager.policy.name == "hazard"
    assert manager.stats().ready == 1


def test_the_example_of_the_collector_runs(capsys: pytest.CaptureFixture[str]) -> None:
    client = pytest.importorskip(
        "prometheus_client", reason="no prometheus_client: pip install 'kvoffload[metrics]'"
    )
    page = (ROOT / RUNBOOK).read_text()
    (code,) = [code for code in re.findall(CODE, page, re.S) if "Collector" in code]
    names: dict[str, object] = {}
    try:
        exec(code, names)
    finally:
        client.REGISTRY.unregister(names["metrics"])
    (printed,) = re.findall(r"It prints `([\d.]+)`", page)
    assert capsys.readouterr().out == f"{printed}\n"
