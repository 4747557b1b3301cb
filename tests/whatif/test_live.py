"""Shadows in an engine: reports, periods, advice, failures."""

from __future__ import annotations

import gc
import logging
from typing import Any

import pytest

from kvoffload.core.manager import OffloadingManager
from kvoffload.whatif import Estimate, Shadows, WhatIf
from kvoffload.whatif.background import Background, Task
from kvoffload.whatif.live_shadows import PERIOD_S, REPORT_S, LiveShadows, advice, usual_one_in
from kvoffload.whatif.shadows import ENOUGH_REQUESTS

LOG = logging.getLogger("kvoffload.test_what_if")
PATIENCE_S = 60.0
NUM_KEYS = 320
"""Keys of a loop: LRU has no hits with less room."""


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
    live.settle()


class ByHand(Background):
    """Runs a task when `end` is called."""

    def __init__(self) -> None:
        super().__init__("by hand")
        self.task: Task | None = None
        self.num_tasks = 0

    @property
    def is_busy(self) -> bool:
        return self.task is not None

    def run(self, task: Task) -> None:
        assert self.task is None
        self.task, self.num_tasks = task, self.num_tasks + 1

    def end(self) -> None:
        task, self.task = self.task, None
        assert task is not None
        task()


def reported(manager: OffloadingManager, live: LiveShadows, first: int, count: int = 1) -> None:
    """Report requests of one new block each."""
    for number in range(first, first + count):
        ctx = manager.begin_request("", key := [number.to_bytes(32, "little")])
        manager.lookup(key, ctx)
        manager.finish_request(ctx)
        live.finished(ctx)


def by_hand() -> tuple[OffloadingManager, LiveShadows, ByHand]:
    manager, background = OffloadingManager(200), ByHand()
    shadows = Shadows((WhatIf(capacity=2),), 200, one_in=1)
    return manager, LiveShadows(shadows, 0.0, LOG, background), background


def test_a_report_serves_no_recorded_request() -> None:
    """The next step after a report starts to serve them in the background thread."""
    manager, live, background = by_hand()
    shadows = live.shadows
    assert shadows is not None
    reported(manager, live, 0, 10)
    live.work()
    assert (background.num_tasks, live.due(REPORT_S)) == (0, [])
    live.work()
    assert (background.num_tasks, shadows.num_looked_up) == (1, 0)
    background.end()
    assert shadows.num_looked_up == 10
    reported(manager, live, 10)
    live.work()
    assert shadows.is_waiting, "a few requests wait for the next report"
    assert [estimate.hit_ratio for estimate in live.due(2 * REPORT_S)] == [0.0, 0.0]


def test_requests_are_recorded_while_the_shadows_work() -> None:
    manager, live, background = by_hand()
    reported(manager, live, 0, ENOUGH_REQUESTS)
    live.work()
    reported(manager, live, 0, 5)
    live.work()
    assert (background.num_tasks, live.due(REPORT_S)) == (1, []), (
        "one task at a time, and no report during a task"
    )
    background.end()
    live.due(REPORT_S)
    live.work()
    background.end()
    assert live.shadows is not None
    assert live.shadows.num_looked_up == ENOUGH_REQUESTS + 5
    assert (background.num_tasks, live.shadows.is_waiting) == (2, False)


def test_an_idle_step_only_checks_for_a_due_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most steps of an engine are idle for the shadows."""
    manager, live, background = by_hand()
    live.work()
    calls = list[str]()
    monkeypatch.setattr(live, "_collect", lambda: calls.append("collect"))
    monkeypatch.setattr(ByHand, "is_busy", property(lambda _: bool(calls.append("busy"))))
    reported(manager, live, 0, 5)
    for _ in range(3):
        live.work()
    assert not calls
    live.reset()
    live.work()
    assert calls == ["busy", "collect"]
    assert background.num_tasks == 1


def test_a_reset_during_work_forgets_earlier_blocks() -> None:
    """Requests from before the reset may be served after it; requests after the reset have no hits."""
    manager, live, background = by_hand()
    reported(manager, live, 0, ENOUGH_REQUESTS)
    live.work()
    reported(manager, live, 1000, 3)
    live.reset()
    reported(manager, live, 0, 2)
    background.end()
    live.work()
    background.end()
    assert live.shadows is not None
    assert live.shadows.num_looked_up == ENOUGH_REQUESTS + 2
    assert [estimate.hit_ratio for estimate in live.due(REPORT_S)] == [0.0, 0.0]
    assert [shadow.manager.stats().ready for shadow in live.shadows.members] == [2, 2]
    live.reset()
    live.work()
    background.end()
    assert [shadow.manager.stats().ready for shadow in live.shadows.members] == [0, 0]


def test_a_restart_is_made_in_the_background() -> None:
    manager, live, background = by_hand()
    old, made = live.shadows, list[Shadows]()

    def make() -> Shadows:
        made.append(Shadows((WhatIf(capacity=2),), 200, policy="sieve", one_in=1))
        return made[-1]

    reported(manager, live, 0, 3)
    live.restart(make, 1.0)
    assert (made, live.due(1.0 + REPORT_S)) == ([], [])
    live.work()
    reported(manager, live, 3, 3)
    assert (made, live.shadows) == ([], old)
    live.restart(make, 2.0)
    background.end()
    live.work()
    background.end()
    assert len(made) == 2, "a second change during the restart makes new shadows"
    live.work()
    assert live.shadows is made[1]
    assert not live.shadows.is_waiting


def test_the_thread_ends_with_its_owner() -> None:
    manager, live = made()
    loop(manager, live)
    thread = live._background._thread
    assert thread is not None
    assert thread.is_alive()
    live.close()
    assert not thread.is_alive()
    assert live.due(REPORT_S) == []
    loop(manager, live)
    _, live = made()
    live.restart(lambda: Shadows((WhatIf(capacity=2),), 200), 1.0)
    live.work()
    thread = live._background._thread
    assert thread is not None
    live._background.wait()
    del live
    gc.collect()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


def test_a_restart_resets_counts_and_period(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    manager, live = made()
    loop(manager, live)
    live.restart(lambda: Shadows((WhatIf(capacity=2),), 200, policy="sieve", one_in=1), PERIOD_S - 1)
    live.settle()
    assert live.due(PERIOD_S + REPORT_S) == []
    loop(manager, live)
    estimates = live.due(PERIOD_S + 2 * REPORT_S)
    assert [estimate.setting for estimate in estimates] == ["current", "capacity=2"]
    assert estimates[1].is_better
    assert not caplog.records, "no advice before the end of the new period"


def test_an_error_of_a_restart_stops_the_shadows_only(caplog: pytest.LogCaptureFixture) -> None:
    _, live = made()
    live.restart(lambda: Shadows((), 200, policy="nonsense"), 1.0)
    live.settle()
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


def test_without_a_better_setting_there_is_no_advice(caplog: pytest.LogCaptureFixture) -> None:
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

    monkeypatch.setattr(live.shadows.members[1], "live", fail)
    loop(manager, live)
    assert [estimate.setting for estimate in live.due(REPORT_S)] == ["current", "policy=arc"]
    (record,) = caplog.records
    assert "what_if capacity=2 has failed and is left out: RuntimeError('boom')" in record.getMessage()


@pytest.mark.parametrize("method", ["finished", "serve", "reset_blocks", "forget", "estimates"])
def test_an_internal_error_stops_the_shadows_only(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    manager, live = made()

    def fail(*_: Any) -> None:
        raise RuntimeError("boom")

    monkeypatch.setattr(live.shadows, method, fail)
    loop(manager, live, 1)
    live.reset()
    live.settle()
    live.due(REPORT_S)
    assert live.shadows is None
    assert "what_if has stopped after an internal error: RuntimeError('boom')" in caplog.text
    loop(manager, live, 1)
    live.reset()
    assert live.due(3 * PERIOD_S) == []


def test_the_default_rate_is_a_block_in_3072_tokens() -> None:
    assert [usual_one_in(tokens) for tokens in (16, 64, 512, 0)] == [192, 48, 8, 3072]
