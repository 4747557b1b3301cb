"""pytest plugin: runs chosen tests in order, and records result, duration and coverage of each.

`reach` and `trial` load it with ``-p mutants.watch``. Knows nothing about mutants. Imports nothing of the
package, so that a mutant cannot break it.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings

RUNNING_TEST = "KVOFFLOAD_MUTATION_TEST"
"""Environment variable with the id of the running test, for coverage.py in the test's child processes."""


def read(journal: Path) -> list[dict[str, Any]]:
    """Read the entries in order, without an incomplete last line."""
    text = journal.read_text() if journal.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--journal", type=Path, required=True, help="JSONL file for results and durations")
    parser.addoption(
        "--chosen",
        type=Path,
        help="JSON list of tests to run, in this order; default: all tests that are not in the journal",
    )


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Let Hypothesis search for failures only, without shrinking and health checks."""
    settings.register_profile(
        "mutation",
        settings(),
        phases=(Phase.explicit, Phase.generate),
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    settings.load_profile("mutation")
    config.pluginmanager.register(_Watch(config.getoption("--journal"), config.getoption("--chosen")))


class _Watch:
    def __init__(self, journal: Path, chosen: Path | None) -> None:
        self._journal, self._chosen = journal, chosen

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        if self._chosen is None:
            known = {row.get("ended") for row in read(self._journal)}
            items[:] = [item for item in items if item.nodeid not in known]
        else:
            rank = {test: rank for rank, test in enumerate(json.loads(self._chosen.read_text()))}
            items[:] = sorted((item for item in items if item.nodeid in rank), key=lambda i: rank[i.nodeid])
        self._note(selected=len(items))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        self._note(test=item.nodeid)
        os.environ[RUNNING_TEST] = item.nodeid
        self._switch_context(item.nodeid)
        begun = time.process_time() + _children_s(), time.perf_counter()
        try:
            return (yield)
        finally:
            cpu_s, wall_s = time.process_time() + _children_s() - begun[0], time.perf_counter() - begun[1]
            self._note(ended=item.nodeid, cpu_s=round(cpu_s, 3), wall_s=round(wall_s, 3))
            self._switch_context("")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed or report.skipped:
            self._note(**{report.outcome: report.nodeid})

    def _note(self, **entry: Any) -> None:
        with self._journal.open("a") as file:
            file.write(json.dumps(entry) + "\n")

    @staticmethod
    def _switch_context(name: str) -> None:
        """Set coverage.py's context to the current test, if it measures."""
        with contextlib.suppress(ImportError):
            import coverage

            running = coverage.Coverage.current()
            if running is not None:
                running.switch_context(name)


def _children_s() -> float:
    times = os.times()
    return times.children_user + times.children_system
