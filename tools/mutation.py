"""Mutation testing: ``python tools/mutation.py --seed 1 --output /tmp/mutants``.

Draws mutants of the control plane, the tiers and the verification, and runs each against the tests that can
notice it. Prints the number of killed mutants, and the diff of every other mutant: either a test is missing,
or the mutant is equivalent to the program. The run can be stopped and continued.

Needs cosmic-ray and coverage.py (``pip install --group mutation``). cosmic-ray makes the mutants but does not
run them, because a kernel must be compiled again if and only if it contains the mutant. mutmut is no
alternative: it changes functions behind a switch, and therefore cannot change kernels.
"""

from __future__ import annotations

import argparse
import json
import math
import secrets
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from mutants import make, trial
from mutants.make import Mutant
from mutants.reach import Reach, Suite
from mutants.trial import Limits, Outcome, Result
from mutants.watch import read

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src"
ROOMS = {
    "structures": "kvoffload/structures",
    "core": "kvoffload/core",
    "tiering": "kvoffload/tiering",
    "disk": "kvoffload/tiers/disk",
    "tiers": "kvoffload/tiers",
    "verification": "kvoffload/integrations/vllm/scheduler_side/verification.py",
}
"""Rooms by name; a path belongs to the first room that it begins with."""
IN_VLLM = "kvoffload/integrations"
WHERE = {
    False: ("tests", "--ignore=tests/vllm", "--ignore=tests/tools/test_mutation.py"),
    True: ("tests/vllm/test_adapter.py",),
}
"""Tests without and with vLLM; the other files of tests/vllm start engines."""
GIB = 1024**3


def files(only: list[str]) -> list[str]:
    """List the files to mutate, relative to `SOURCE`."""
    every = [str(file.relative_to(SOURCE)) for file in sorted(SOURCE.rglob("*.py"))]
    return [path for path in every if room(path) and (not only or any(text in path for text in only))]


def room(path: str) -> str:
    return next((name for name, begins in ROOMS.items() if path.startswith(begins)), "")


def identity(row: dict[str, Any] | Mutant) -> tuple[str, str, int]:
    """Return the identity of a mutant or of its row in the journal."""
    if isinstance(row, Mutant):
        return row.path, row.operator, row.occurrence
    return row["path"], row["operator"], row["occurrence"]


def again(journal: Path, paths: list[str]) -> Iterator[Mutant]:
    """Yield a journal's mutants of these files that were not killed; prints mutants that no longer exist."""
    rows = {identity(row): row for row in read(journal)}
    for row in rows.values():
        if Outcome(row["outcome"]) in (Outcome.KILLED, Outcome.TIMEOUT) or row["path"] not in paths:
            continue
        mutant = make.make(SOURCE, row["path"], row["line"], row["operator"], row["occurrence"])
        if mutant is not None and mutant.diff == row["diff"]:
            yield mutant
        else:
            print(f"the source has changed, mutant skipped:\n{row['diff']}", file=sys.stderr)


def run_all(chosen: list[Mutant], reaches: dict[bool, Reach], arguments: argparse.Namespace) -> None:
    """Run mutants in parallel, and write a row for each."""
    limits = Limits(arguments.memory_gib * GIB, arguments.longest_s)

    def run_one(mutant: Mutant) -> Result:
        reach = reaches.get(mutant.path.startswith(IN_VLLM))
        if reach is None:
            return Result(Outcome.NOT_RUN, "needs --vllm-python")
        return trial.run(mutant, reach, arguments.output / "base", limits)

    threads = ThreadPoolExecutor(arguments.jobs)
    try:
        running = {threads.submit(run_one, mutant): mutant for mutant in chosen}
        for number, done in enumerate(as_completed(running), 1):
            mutant, result = running[done], done.result()
            row = mutant._asdict() | result._asdict() | {"outcome": result.outcome.value}
            del row["source"]
            with (arguments.output / "mutants.jsonl").open("a") as journal:
                journal.write(json.dumps(row) + "\n")
            print(
                f"{number} of {len(chosen)}: {result.outcome.value} {mutant.path}:{mutant.line} "
                f"{result.by} ({result.num_tests} tests, {result.seconds} s)",
                file=sys.stderr,
            )
    finally:
        threads.shutdown(cancel_futures=True)


def report(rows: list[dict[str, Any]]) -> str:
    """Format a table by room, and each mutant that was not killed."""
    outcomes = [outcome.value for outcome in Outcome]
    counts = {name: Counter(row["outcome"] for row in rows if room(row["path"]) == name) for name in ROOMS}
    counts["all"] = Counter(row["outcome"] for row in rows)
    lines = [["", *outcomes], ["---"] * (1 + len(outcomes))]
    lines += [[name, *(str(count[outcome]) for outcome in outcomes)] for name, count in counts.items()]
    text = ["| " + " | ".join(line) + " |" for line in lines]
    for row in rows:
        if row["outcome"] != Outcome.KILLED.value:
            why = f"{row['outcome']}, {row['operator']}, {row['num_tests']} tests {row['by']}".rstrip()
            text += ["", f"{row['path']}:{row['line']}: {why}", "", "```diff", row["diff"].rstrip(), "```"]
    return "\n".join(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--output", type=Path, required=True, help="folder for the records; the same folder continues a run"
    )
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--number", type=int, default=200, help="number of mutants")
    parser.add_argument(
        "--only", action="append", default=[], help="only files whose path contains this text"
    )
    parser.add_argument("--again", type=Path, help="a mutants.jsonl: run its mutants that were not killed")
    parser.add_argument("--tests", default="", help="tests to run: an expression for pytest's -m")
    parser.add_argument(
        "--longest-s",
        type=float,
        default=math.inf,
        help="omit tests that take longer (run them with --again)",
    )
    parser.add_argument("--vllm-python", default=".venv-vllm/bin/python", help="made by `make vllm-env`")
    parser.add_argument("--jobs", type=int, default=2, help="mutants in parallel")
    parser.add_argument("--memory-gib", type=int, default=16, help="limit of a test's address space")
    arguments = parser.parse_args()
    seed = secrets.randbits(31) if arguments.seed is None else arguments.seed
    output = arguments.output = arguments.output.resolve()
    print(f"seed {seed}", file=sys.stderr)

    trial.prepare(SOURCE, output / "base")
    if arguments.again:
        chosen = todo = list(again(arguments.again, files(arguments.only)))
    else:
        chosen = list(make.choose(SOURCE, files(arguments.only), arguments.number, seed))
        known = {identity(row) for row in read(output / "mutants.jsonl")}
        todo = [mutant for mutant in chosen if identity(mutant) not in known]
    options = ("-m", arguments.tests) if arguments.tests else ()
    suites = {
        in_vllm: Suite(python, WHERE[in_vllm], options, ROOT, output / name)
        for in_vllm, python, name in (
            (False, sys.executable, "tests"),
            (True, arguments.vllm_python, "tests-vllm"),
        )
    }
    reaches = {}
    for in_vllm, suite in suites.items():
        wanted = any(mutant.path.startswith(IN_VLLM) == in_vllm for mutant in todo)
        if wanted and Path(suite.python).exists():
            reach = reaches[in_vllm] = Reach(suite, output / "base")
            reach.gather()
            if reach.not_passed:
                print(f"omitted, because they do not pass: {sorted(reach.not_passed)}", file=sys.stderr)
    run_all(todo, reaches, arguments)

    latest = {identity(row): row for row in read(output / "mutants.jsonl")}
    print(f"seed {seed}, {len(chosen)} mutants\n")
    print(report([latest[identity(mutant)] for mutant in chosen]))


if __name__ == "__main__":
    main()
