"""Lines about failures: the first of a kind at once, then one in ten seconds, which counts those between."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest

from kvoffload.tiers import rate_limited_log
from kvoffload.tiers.rate_limited_log import INTERVAL_S, RateLimitedLog


def test_lines_of_a_kind_are_limited_and_counted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = SimpleNamespace(now=0.0)  # a machine that has just been started
    monkeypatch.setattr(rate_limited_log, "time", SimpleNamespace(monotonic=lambda: clock.now))
    log = RateLimitedLog("kvoffload.test")

    def said(kind: str, what: str) -> list[str]:
        caplog.clear()
        log.warn(kind, "cannot %s", what)
        return caplog.messages

    assert said("read", "a") == ["cannot a"]
    assert said("read", "b") == []
    assert said("write", "c") == ["cannot c"], "another kind"
    clock.now += INTERVAL_S / 2
    assert said("read", "d") == []
    clock.now += INTERVAL_S / 2
    assert said("read", "e") == ["cannot e (and 2 like it before)"]
    clock.now += INTERVAL_S
    assert said("read", "f") == ["cannot f"], "none between"


def test_errors_have_the_same_limit(caplog: pytest.LogCaptureFixture) -> None:
    log = RateLimitedLog("kvoffload.test")
    for number in range(3):
        log.error("load", "block %d failed", number)
    assert caplog.record_tuples == [("kvoffload.test", logging.ERROR, "block 0 failed")]
