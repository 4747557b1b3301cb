"""Selection of the tests that can notice a mutant: tests that run its line, or a function that uses it.

Owns the record of one run of all tests over the original sources: the lines that each test reached, its
duration, and the tests that did not pass. New tests are added to the record.
"""

from __future__ import annotations

import ast
import os
import subprocess
from pathlib import Path
from typing import NamedTuple

import coverage

from mutants import names
from mutants.names import Definition
from mutants.watch import RUNNING_TEST, read

BENCH = Path(__file__).resolve().parent.parent

_COVERAGE = f"""[run]
source_pkgs = kvoffload
parallel = true
concurrency = thread,multiprocessing
core = ctrace
context = ${{{RUNNING_TEST}-}}
sigterm = true
"""
_START = "import coverage\ncoverage.process_startup()\n"
"""Content of `sitecustomize`: measures coverage in every Python process of a test."""


class Suite(NamedTuple):
    """A set of tests, and the Python that runs them.

    Attributes:
        where, options: pytest's arguments: paths, and options that select tests.
        root: root of the repository.
        directory: folder of the record.
    """

    python: str
    where: tuple[str, ...]
    options: tuple[str, ...]
    root: Path
    directory: Path

    def command(self, journal: Path, temporary: Path) -> list[str]:
        """Return a command that runs the tests of the files appended to it."""
        return [
            self.python, "-m", "pytest", "-p", "mutants.watch", "-p", "no:cacheprovider", "-q", "--no-header",
            "--hypothesis-seed=0", "--journal", str(journal), "--basetemp", str(temporary), *self.options,
        ]  # fmt: skip

    def environment(self, *path: Path, **variables: str) -> dict[str, str]:
        """Return the environment in which Python imports from `path` before installed packages."""
        search_path = os.pathsep.join(map(str, (*path, BENCH)))
        return {**os.environ, "PYTHONPATH": search_path, "PYTHONHASHSEED": "0", **variables}


class Reach:
    """The lines that each test reaches in `source`, a directory with the package."""

    def __init__(self, suite: Suite, source: Path) -> None:
        self.suite, self._source = suite, source
        self._known = names.definitions(source)
        self._journal = suite.directory / "tests.jsonl"
        self._settings = suite.directory / "settings.ini"
        self._lines: dict[str, dict[int, list[str]]] = {}
        self._imported: dict[str, frozenset[str]] = {}
        self.wall_s: dict[str, float] = {}
        """Duration of each passing test."""
        self.not_passed: set[str] = set()

    def gather(self) -> None:
        """Run the tests that are not in the record. Raises `RuntimeError` if pytest fails."""
        directory = self.suite.directory
        (directory / "reached").mkdir(parents=True, exist_ok=True)
        self._settings.write_text(f"{_COVERAGE}data_file = {directory / 'reached' / 'lines'}\n")
        (directory / "sitecustomize.py").write_text(_START)
        environment = self.suite.environment(
            self._source, directory, COVERAGE_PROCESS_START=str(self._settings)
        )
        with (directory / "log").open("a") as log:
            command = [*self.suite.command(self._journal, directory / "temporary"), *self.suite.where]
            code = subprocess.run(
                command, cwd=self.suite.root, env=environment, stdout=log, stderr=log
            ).returncode
        if code not in (0, 1, 5):  # passed, some failed, none to run
            raise RuntimeError(f"pytest ended with {code}: see {directory / 'log'}")
        self._read()

    def _read(self) -> None:
        measured = coverage.Coverage(config_file=str(self._settings))
        measured.load()
        measured.combine()
        measured.save()
        data = measured.get_data()
        for file in map(Path, data.measured_files()):
            # Some tests run the code of the checkout itself, which contains no mutant.
            if file.is_relative_to(self._source):
                self._lines[str(file.relative_to(self._source))] = data.contexts_by_lineno(str(file))
        rows = read(self._journal)
        self.not_passed = {row[how] for row in rows for how in ("failed", "skipped") if how in row}
        self.wall_s = {
            row["ended"]: row["wall_s"]
            for row in rows
            if "ended" in row and row["ended"] not in self.not_passed
        }

    # ---- questions

    def compiled_into(self, path: str, line: int) -> list[Definition]:
        """Find the kernels whose machine code depends on this line."""
        if path.endswith("structures/jit.py"):
            return [definition for definition in self._known if definition.is_kernel]
        changed = names.at(self._known, path, line)
        if changed is None:
            return []
        return [
            definition for definition in [changed, *names.users(self._known, changed)] if definition.is_kernel
        ]

    def tests(self, path: str, line: int) -> list[str]:
        """Find the tests that can notice a change of this line, the fastest first."""
        changed = names.at(self._known, path, line)
        if changed is None:
            return self._sorted(self._that_ran(path, range(1, 1 << 20)))
        ran: set[str] = set()
        if changed.is_traced and self._body(changed):
            ran = self._that_ran(path, _statement(self._source / path, line, changed))
            if "" not in ran:
                return self._sorted(ran)
        # The line runs on import, or untraced.
        users = names.users(self._known, changed)
        unseen = {
            name
            for definition in (changed, *users)
            if definition is changed or not definition.is_traced
            for name in definition.names
        }
        ran |= {test for test in self.wall_s if self._imports(test.split("::")[0]) & unseen}
        return self._sorted(
            ran.union(*(self._body(definition) for definition in users if definition.is_traced))
        )

    def _imports(self, test_file: str) -> frozenset[str]:
        """Return the names that a test file imports, because it may call a kernel directly."""
        if test_file not in self._imported:
            self._imported[test_file] = names.imports(self.suite.root / test_file)
        return self._imported[test_file]

    def _sorted(self, tests: set[str]) -> list[str]:
        return sorted(tests & self.wall_s.keys(), key=lambda test: (self.wall_s[test], test))

    def _that_ran(self, path: str, lines: range) -> set[str]:
        measured = self._lines.get(path, {})
        return {test for line, tests in measured.items() if line in lines for test in tests}

    def _body(self, function: Definition) -> set[str]:
        """Return the tests that ran lines of its body; the ``def`` runs on import."""
        first, last = function.body or function.lines
        return self._that_ran(function.path, range(first, last + 1)) - {""}


def _statement(file: Path, line: int, place: Definition) -> range:
    """Return the lines of the statement at a line, because coverage.py may record another of its lines.

    For a statement with a block: the lines before the block. For the head of a function: its whole body.
    """
    first, last = place.body or place.lines
    if line < first:
        return range(first, last + 1)
    lines = range(line, line + 1)
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or 0):
            block = getattr(node, "body", None)
            end = block[0].lineno if block else (node.end_lineno or 0) + 1
            # `ast.walk` goes from the outside in: the last match is the innermost.
            lines = range(node.lineno, max(end, node.lineno + 1)) if line < end else lines
    return lines
