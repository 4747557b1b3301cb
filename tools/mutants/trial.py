"""Trial of a mutant: runs the tests that can notice it, in a copy of the sources.

All kernels take half a minute to compile, so a copy includes the compiled kernels. numba validates kernels by
the size and time of their file, `structures.jit` by the times of all files. Therefore a mutant keeps size and
time (each file ends with padding), and only kernels that contain the mutant are deleted.
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
"""Time limit to the first test, which includes compilation of kernels. A test hangs after `HANG_S` plus
`_HANG_FACTOR` times its recorded duration."""


class Outcome(enum.Enum):
    """Outcome of a trial."""

    KILLED = "killed"
    TIMEOUT = "timeout"
    SURVIVED = "survived"
    NOT_REACHED = "not reached"
    NOT_RUN = "not run"


class Result(NamedTuple):
    """An outcome.

    Attributes:
        by: the test that failed or hung, or another reason.
        num_tests: number of finished tests.
    """

    outcome: Outcome
    by: str = ""
    num_tests: int = 0
    seconds: float = 0.0


class Limits(NamedTuple):
    """Limits of a trial.

    Attributes:
        max_memory_bytes: limit of a test's address space.
        longest_s: tests with a longer recorded duration are omitted.
    """

    max_memory_bytes: int
    longest_s: float


def prepare(source: Path, base: Path) -> None:
    """Copy the sources for `run`. Raises `RuntimeError` if `base` is a copy of other sources."""
    files = [file for file in sorted(source.rglob("*")) if file.is_file() and "__pycache__" not in file.parts]
    for file in files:
        copied, content = base / file.relative_to(source), file.read_bytes()
        if not copied.exists():
            copied.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(file, copied)
            if file.suffix == ".py":
                _rewrite(copied, content, len(content) + _PADDING_BYTES)
        elif not copied.read_bytes().startswith(content):
            raise RuntimeError(f"{file} has changed since {base} was copied: use an empty directory")


def _rewrite(file: Path, content: bytes, size: int) -> None:
    """Replace the content, padded to `size`; keeps the file's time."""
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
    if not (stamp := source / STAMP).exists():
        return  # no kernels are compiled
    # The package deletes all kernels if the stamp is not the digest of the sources.
    code = "from kvoffload.structures import kernel_cache; print(kernel_cache.digest_of_sources(), end='')"
    stamped = subprocess.run(
        [reach.suite.python, "-c", code], env=reach.suite.environment(source), capture_output=True, text=True
    )
    if stamped.returncode == 0:  # otherwise the tests will show that the mutant cannot be imported
        stamp.write_text(stamped.stdout)


def run(mutant: Mutant, reach: Reach, base: Path, limits: Limits) -> Result:
    """Run the tests until a test fails, hangs or crashes Python.

    The failed test runs once more, alone. If it then passes, it is ignored, and the other tests continue.
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
            print(f"flaky, ignored: {result.by}", file=sys.stderr)
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
            # Also processes that tests left behind.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    result = _judge(read(journal), child.returncode, hangs)
    if result.outcome is Outcome.NOT_RUN:
        print((work / "log").read_text()[-2000:], file=sys.stderr)
    return result


def _wait(child: subprocess.Popen[bytes], journal: Path, wall_s: dict[str, float]) -> bool:
    """Wait until the process ends or a test hangs; returns True if it hangs."""
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
        return Result(Outcome.KILLED, next(failed, "an error on import of the tests"), num_tests)
    selected = next((row["selected"] for row in rows if "selected" in row), None)
    if code == 0 and selected == num_tests:
        return Result(Outcome.SURVIVED, "", num_tests)
    return Result(Outcome.NOT_RUN, f"pytest ended with {code}")
