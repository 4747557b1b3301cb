"""Log lines about failures: the first of a kind at once, then one in ten seconds with a count of the rest."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest

from kvoffload.tiers import rate_limited_log
from kvoffload.tiers.rate_limited_log import INTERVAL_S, RateLimitedLog


def test_lines_of_a_kind_are_limited_and_counted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = SimpleNamespace(now=0.0)  # the clock of a machine that has just started
    monkeypatch.setattr(rate_limited_log, "time", SimpleNamespace(monotonic=lambda: clock.now))
    log = RateLimitedLog("kvoffload.test")

    def lines(kind: str, operation: str) -> list[str]:
        caplog.clear()
        log.warn(kind, "cannot %s", operation)
        return caplog.messages

    assert lines("read", "a") == ["cannot a"]
    assert lines("read", "b") == []
    assert lines("write", "c") == ["cannot c"], "another kind"
    clock.now += INTERVAL_S / 2
    assert lines("read", "d") == []
    clock.now += INTERVAL_S / 2
    assert lines("read", "e") == ["cannot e (and 2 like it before)"]
    clock.now += INTERVAL_S
    assert lines("read", "f") == ["cannot f"], "no line was suppressed"


def test_errors_have_the_same_limit(caplog: pytest.LogCaptureFixture) -> None:
    log = RateLimitedLog("kvoffload.test")
    for number in range(3):
        log.error("load", "block %d failed", number)
    assert caplog.record_tuples == [("kvoffload.test", logging.ERROR, "block 0 failed")]
