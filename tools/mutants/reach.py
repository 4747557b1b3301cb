"""Which tests can notice a mutant: those that run the line, or a function that uses what is on it.

Owns the record of one run of all tests over the sources as they are: what each reached, how long it took, and
which did not pass. Tests that come later are added to it.
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
"""As `sitecustomize`: measures in every Python that a test starts."""


class Suite(NamedTuple):
    """Some tests, and the Python that runs them.

    Attributes:
        where, options: for pytest: where they are, and which of those.
        root: of the repository.
        directory: for what is recorded of them.
    """

    python: str
    where: tuple[str, ...]
    options: tuple[str, ...]
    root: Path
    directory: Path

    def command(self, journal: Path, temporary: Path) -> list[str]:
        """Runs tests of the files that are added to it."""
        return [
            self.python, "-m", "pytest", "-p", "mutants.watch", "-p", "no:cacheprovider", "-q", "--no-header",
            "--hypothesis-seed=0", "--journal", str(journal), "--basetemp", str(temporary), *self.options,
        ]  # fmt: skip

    def environment(self, *path: Path, **more: str) -> dict[str, str]:
        """In which Python finds what is in `path`, before anything that is installed."""
        found = os.pathsep.join(map(str, (*path, BENCH)))
        return {**os.environ, "PYTHONPATH": found, "PYTHONHASHSEED": "0", **more}


class Reach:
    """What each test reaches in `source`, a directory that has the package."""

    def __init__(self, suite: Suite, source: Path) -> None:
        self.suite, self._source = suite, source
        self._known = names.definitions(source)
        self._journal = suite.directory / "tests.jsonl"
        self._settings = suite.directory / "settings.ini"
        self._lines: dict[str, dict[int, list[str]]] = {}
        self._imported: dict[str, frozenset[str]] = {}
        self.wall_s: dict[str, float] = {}
        """The tests that pass, and how long each takes."""
        self.not_passed: set[str] = set()

    def gather(self) -> None:
        """Run the tests that are not in the record. Raises `RuntimeError` when they cannot be run."""
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
            raise RuntimeError(f"the tests cannot be run: see {directory / 'log'}")
        self._read()

    def _read(self) -> None:
        measured = coverage.Coverage(config_file=str(self._settings))
        measured.load()
        measured.combine()
        measured.save()
        data = measured.get_data()
        for file in map(Path, data.measured_files()):
            # Some tests start a Python of the checkout itself, which no mutant gets into.
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
        """The kernels that are other machine code when this line is another."""
        if path.endswith("structures/jit.py"):
            return [one for one in self._known if one.is_kernel]
        place = names.at(self._known, path, line)
        return [one for one in [place, *names.users(self._known, place)] if one.is_kernel] if place else []

    def tests(self, path: str, line: int) -> list[str]:
        """Tests that can notice a change of this line, the quickest first."""
        place = names.at(self._known, path, line)
        if place is None:
            return self._sorted(self._that_ran(path, range(1, 1 << 20)))
        ran: set[str] = set()
        if place.is_traced and self._body(place):
            ran = self._that_ran(path, _statement(self._source / path, line, place))
            if "" not in ran:
                return self._sorted(ran)
        # It runs when modules are imported, or unseen.
        users = names.users(self._known, place)
        unseen = {name for one in (place, *users) if one is place or not one.is_traced for name in one.names}
        ran |= {test for test in self.wall_s if self._imports(test.split("::")[0]) & unseen}
        return self._sorted(ran.union(*(self._body(one) for one in users if one.is_traced)))

    def _imports(self, test_file: str) -> frozenset[str]:
        """Names that a file of tests imports: it may call a kernel itself."""
        if test_file not in self._imported:
            self._imported[test_file] = names.imports(self.suite.root / test_file)
        return self._imported[test_file]

    def _sorted(self, tests: set[str]) -> list[str]:
        return sorted(tests & self.wall_s.keys(), key=lambda test: (self.wall_s[test], test))

    def _that_ran(self, path: str, lines: range) -> set[str]:
        measured = self._lines.get(path, {})
        return {test for line, tests in measured.items() if line in lines for test in tests}

    def _body(self, function: Definition) -> set[str]:
        """Tests that ran some of it; not its ``def``, which runs when it is imported."""
        first, last = function.body or function.lines
        return self._that_ran(function.path, range(first, last + 1)) - {""}


def _statement(file: Path, line: int, place: Definition) -> range:
    """Lines of the statement that a line belongs to: coverage.py may see it run at another one.

    Of a statement with a block those before the block; of a function's head all of its body.
    """
    first, last = place.body or place.lines
    if line < first:
        return range(first, last + 1)
    found = range(line, line + 1)
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or 0):
            block = getattr(node, "body", None)
            end = block[0].lineno if block else (node.end_lineno or 0) + 1
            # Walked from the outside in: the last one is the innermost.
            found = range(node.lineno, max(end, node.lineno + 1)) if line < end else found
    return found
