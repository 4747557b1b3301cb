"""One mutant against the tests that can notice it, in a copy of the sources.

Kernels take half a minute to compile, all of them, so a copy brings those of the sources along. numba asks a
file's size and time whether its kernels still hold, and `structures.jit` asks the times of all: here a mutant
keeps both (the end of each file is padding), and the kernels that it is compiled into are deleted.
"""

from __future__ import annotations

import contextlib
import enum
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from mutants.make import Mutant
from mutants.reach import Reach
from mutants.watch import read

_PADDING_BYTES = 512
STAMP = Path("kvoffload/structures/__pycache__/kernels.stamp")
_FIRST_TEST_S, HANG_S, _HANG_FACTOR = 600.0, 120.0, 10.0
"""How long it takes to the first test, at most: kernels compile. And a test that takes so long, and so many
times what it took before, hangs."""


class Outcome(enum.Enum):
    """What became of a mutant."""

    KILLED = "killed"
    TIMEOUT = "timeout"
    SURVIVED = "survived"
    NOT_REACHED = "not reached"
    NOT_RUN = "not run"


class Result(NamedTuple):
    """An outcome.

    Attributes:
        by: the test that failed or hangs, or what else ended it.
        num_tests: how many ended.
    """

    outcome: Outcome
    by: str = ""
    num_tests: int = 0
    seconds: float = 0.0


class Limits(NamedTuple):
    """What a run is limited to.

    Attributes:
        max_memory_bytes: addresses that a test may take.
        longest_s: tests that took longer before are left out.
    """

    max_memory_bytes: int
    longest_s: float


def prepare(source: Path, base: Path) -> None:
    """A copy of the sources for `run`. Raises `RuntimeError` when there is one already, of others."""
    files = [file for file in sorted(source.rglob("*")) if file.is_file() and "__pycache__" not in file.parts]
    for file in files:
        copied, content = base / file.relative_to(source), file.read_bytes()
        if not copied.exists():
            copied.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(file, copied)
            if file.suffix == ".py":
                _rewrite(copied, content, len(content) + _PADDING_BYTES)
        elif not copied.read_bytes().startswith(content):
            raise RuntimeError(f"{file} has changed since {base} was made: begin in an empty directory")


def _rewrite(file: Path, content: bytes, size: int) -> None:
    """Other content, with the file's time, of this size."""
    times = file.stat()
    file.write_bytes(content + b"#" * (size - len(content)))
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert file.stat().st_size == size, "a mutant is longer than the padding"


def place(mutant: Mutant, reach: Reach, base: Path, source: Path) -> None:
    """Make `source` a copy of `base` with the mutant in it."""
    shutil.copytree(base, source)
    file = source / mutant.path
    _rewrite(file, mutant.source.encode(), file.stat().st_size)
    for stale in file.parent.glob(f"__pycache__/{file.stem}.*.pyc"):
        stale.unlink()
    for kernel in reach.compiled_into(mutant.path, mutant.line):
        kept = (source / kernel.path).parent / "__pycache__"
        for stale in kept.glob(f"{Path(kernel.path).stem}.{kernel.names[0]}-*.nb[ic]"):
            stale.unlink()
    # The package deletes all kernels if the stamp is not the digest of the sources.
    digest = "from kvoffload.structures.kernel_cache import digest_of_sources as digest; print(digest(), end='')"
    stamped = subprocess.run(
        [reach.suite.python, "-c", digest], env=reach.suite.environment(source), capture_output=True, text=True
    )
    if stamped.returncode == 0:  # otherwise the tests will show that the mutant cannot be imported
        (source / STAMP).write_text(stamped.stdout)


def run(mutant: Mutant, reach: Reach, base: Path, limits: Limits) -> Result:
    """Run the tests until one fails. A test that hangs, or crashes Python, is one that fails.

    The one that failed runs once more, alone: if it passes, it did not fail because of the mutant.
    """
    reached_by = reach.tests(mutant.path, mutant.line)
    if not reached_by:
        return Result(Outcome.NOT_REACHED)
    tests = [test for test in reached_by if reach.wall_s[test] <= limits.longest_s]
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(dir=base.parent, ignore_cleanup_errors=True) as directory:
        work = Path(directory)
        place(mutant, reach, base, work / "src")
        result = Result(Outcome.SURVIVED)
        while tests:
            result = _run_tests(tests, work, reach, limits)
            if result.by not in tests or _run_tests([result.by], work, reach, limits).by == result.by:
                break
            print(f"failed once, and not again: {result.by}", file=sys.stderr)
            tests.remove(result.by)
    return result._replace(seconds=round(time.monotonic() - begun, 1))


def _run_tests(tests: list[str], work: Path, reach: Reach, limits: Limits) -> Result:
    chosen, journal, suite = work / "chosen", work / "journal", reach.suite
    chosen.write_text(json.dumps(tests))
    journal.unlink(missing_ok=True)
    command = [*suite.command(journal, work / "tmp"), "--exitfirst", "--chosen", str(chosen)]
    command += sorted({test.split("::")[0] for test in tests})
    environment = suite.environment(work / "src", HYPOTHESIS_STORAGE_DIRECTORY=str(work / "hypothesis"))
    with (work / "log").open("w") as log:
        child = subprocess.Popen(
            command, cwd=suite.root, env=environment, stdout=log, stderr=log, start_new_session=True
        )
        try:
            resource.prlimit(child.pid, resource.RLIMIT_AS, (limits.max_memory_bytes,) * 2)
            hangs = _wait(child, journal, reach.wall_s)
        finally:
            # Also what the tests have left behind.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    result = _judge(read(journal), child.returncode, hangs)
    if result.outcome is Outcome.NOT_RUN:
        print((work / "log").read_text()[-2000:], file=sys.stderr)
    return result


def _wait(child: subprocess.Popen[bytes], journal: Path, wall_s: dict[str, float]) -> bool:
    """Until it ends, or a test hangs: then True."""
    size, since, limit_s = 0, time.monotonic(), _FIRST_TEST_S
    while child.poll() is None:
        time.sleep(0.2)
        if journal.exists() and journal.stat().st_size != size:
            size, since = journal.stat().st_size, time.monotonic()
            running = [row.get("test", "") for row in read(journal)][-1:]
            limit_s = HANG_S + _HANG_FACTOR * sum(wall_s.get(test, 0.0) for test in running)
        if time.monotonic() - since > limit_s:
            return True
    return False


def _judge(rows: list[dict[str, Any]], code: int, hangs: bool) -> Result:
    num_tests = sum("ended" in row for row in rows)
    running = next((row["test"] for row in reversed(rows) if "test" in row), "before the first test")
    if hangs:
        return Result(Outcome.TIMEOUT, running, num_tests)
    if code < 0:
        return Result(Outcome.KILLED, f"{running} ({signal.Signals(-code).name})", num_tests)
    if code in (1, 2):
        failed = (row["failed"] for row in reversed(rows) if "failed" in row)
        return Result(Outcome.KILLED, next(failed, "an error when tests are imported"), num_tests)
    selected = next((row["selected"] for row in rows if "selected" in row), None)
    if code == 0 and selected == num_tests:
        return Result(Outcome.SURVIVED, "", num_tests)
    return Result(Outcome.NOT_RUN, f"pytest ended with {code}")
