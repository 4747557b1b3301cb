"""Warnings of the disk tier: the first of a kind at once, then one a minute, which counts those between."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvoffload.tiers.disk import notices
from kvoffload.tiers.disk.notices import INTERVAL_S, Notices


def test_lines_of_a_kind_are_limited_and_counted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = SimpleNamespace(now=0.0)  # a machine that has just been started
    monkeypatch.setattr(notices, "time", SimpleNamespace(monotonic=lambda: clock.now))
    log = Notices("kvoffload.test")

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
