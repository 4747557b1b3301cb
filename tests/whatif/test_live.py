"""Shadows in an engine: reports, periods, advice, failures."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from kvoffload.core.manager import OffloadingManager
from kvoffload.whatif import Estimate, Shadows, WhatIf
from kvoffload.whatif.live import PERIOD_S, REPORT_S, LiveShadows, advice, usual_one_in

LOG = logging.getLogger("kvoffload.test_what_if")
NUM_KEYS = 320
"""Keys of a loop: under LRU nothing hits in less room. A multiple of `ENOUGH_WAITING`, so that none waits."""


def made(settings: tuple[WhatIf, ...] = (WhatIf(capacity=2),)) -> tuple[OffloadingManager, LiveShadows]:
    manager = OffloadingManager(200)
    return manager, LiveShadows(Shadows(settings, 200, one_in=1), 0.0, LOG)


def loop(manager: OffloadingManager, live: LiveShadows, rounds: int = 4) -> None:
    for number in range(NUM_KEYS * rounds):
        ctx = manager.begin_request("", key := [(number % NUM_KEYS).to_bytes(32, "little")])
        manager.lookup(key, ctx)
        manager.finish_request(ctx)
        live.finished(ctx)
        live.work()


def test_a_report_serves_no_waiting_request() -> None:
    """The next steps serve the requests, a bounded number of blocks each."""
    manager, live = made()
    shadows = live.shadows
    assert shadows is not None
    for number in range(10):
        ctx = manager.begin_request("", [(300 * number + row).to_bytes(32, "little") for row in range(40)])
        manager.lookup([(300 * number).to_bytes(32, "little")], ctx)
        manager.finish_request(ctx)
        live.finished(ctx)
    live.work()
    assert live.due(REPORT_S) == []
    assert (len(shadows._waiting), shadows.num_looked_up) == (10, 0)
    live.work(100)
    assert len(shadows._waiting) == 7
    live.work(100)
    live.work(100)
    live.work(100)
    assert (len(shadows._waiting), shadows.num_looked_up) == (0, 400)
    live.finished(ctx)
    live.work()
    assert len(shadows._waiting) == 1, "a few requests wait for the next report"
    assert [estimate.hit_ratio for estimate in live.due(2 * REPORT_S)] == [0.0, 0.0]


def test_a_restart_begins_new_counts_and_a_new_period(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    manager, live = made()
    loop(manager, live)
    live.restart(lambda: Shadows((WhatIf(capacity=2),), 200, policy="sieve", one_in=1), PERIOD_S - 1)
    assert live.due(PERIOD_S + REPORT_S) == []
    loop(manager, live)
    found = live.due(PERIOD_S + 2 * REPORT_S)
    assert [estimate.setting for estimate in found] == ["current", "capacity=2"]
    assert found[1].is_better
    assert not caplog.records, "no advice before the end of the new period"


def test_an_error_of_a_restart_stops_the_shadows_only(caplog: pytest.LogCaptureFixture) -> None:
    _, live = made()
    live.restart(lambda: Shadows((), 200, policy="nonsense"), 1.0)
    assert live.shadows is None
    assert "what_if has stopped after an internal error: " in caplog.text
    live.restart(lambda: Shadows((WhatIf(capacity=2),), 200), 2.0)
    assert live.shadows is None


def test_estimates_are_due_after_ten_seconds() -> None:
    manager, live = made()
    loop(manager, live)
    assert live.due(REPORT_S - 1) == []
    assert [estimate.setting for estimate in live.due(REPORT_S)] == ["current", "capacity=2"]
    assert live.due(REPORT_S + 1) == []


def test_advice_is_given_once_an_hour(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    manager, live = made()
    loop(manager, live)
    for now_s in range(0, int(PERIOD_S), 60):
        live.due(float(now_s))
    assert not caplog.records
    for now_s in range(int(PERIOD_S), int(2 * PERIOD_S), 60):
        live.due(float(now_s))
    (record,) = caplog.records
    assert "with capacity=2 RAM would serve 75.0 ±" in record.getMessage()
    assert "% of the looked-up blocks instead of 0.0 ±" in record.getMessage()


def test_nothing_better_is_no_advice(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    manager, live = made((WhatIf(policy="fifo"),))
    loop(manager, live)
    live.due(PERIOD_S)
    assert not caplog.records


def test_advice_names_the_surest_gain() -> None:
    current = Estimate("current", 0.3, 0.01)
    unsure = Estimate("policy=arc", 0.4, 0.09, 0.1, 0.09)
    sure = Estimate("capacity=2", 0.38, 0.01, 0.08, 0.01)
    assert "with capacity=2 RAM would serve 38.0 ±1.0 %" in advice([current, unsure, sure])
    assert "+8.0 ±1.0 % (95 % interval)" in advice([current, unsure, sure])
    assert advice([current, Estimate("policy=arc", 0.31, 0.02, 0.01, 0.02)]) == ""
    assert advice([]) == ""


def test_a_failing_setting_is_logged_and_the_others_stay(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager, live = made((WhatIf(capacity=2), WhatIf(policy="arc")))
    assert live.shadows is not None

    def fail(*_: Any) -> None:
        raise RuntimeError("boom")

    monkeypatch.setattr(live.shadows._shadows[1], "live", fail)
    loop(manager, live)
    assert [estimate.setting for estimate in live.due(REPORT_S)] == ["current", "policy=arc"]
    (record,) = caplog.records
    assert "what_if capacity=2 has failed and is left out: RuntimeError('boom')" in record.getMessage()


@pytest.mark.parametrize("method", ["finished", "work", "reset", "estimates"])
def test_an_internal_error_stops_the_shadows_only(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    manager, live = made()

    def fail(*_: Any) -> None:
        raise RuntimeError("boom")

    monkeypatch.setattr(live.shadows, method, fail)
    loop(manager, live, 1)
    live.reset()
    live.due(REPORT_S)
    assert live.shadows is None
    assert "what_if has stopped after an internal error: RuntimeError('boom')" in caplog.text
    loop(manager, live, 1)
    live.reset()
    assert live.due(3 * PERIOD_S) == []


def test_the_usual_rate_is_a_block_in_2048_tokens() -> None:
    assert [usual_one_in(tokens) for tokens in (16, 64, 512, 0)] == [128, 32, 8, 2048]
