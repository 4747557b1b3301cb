"""A pytest plugin that stops the test process once in each test, to find tests that depend on speed.

    PYTHONPATH=tests KVOFFLOAD_STALL_S=2.5 KVOFFLOAD_STALL_SEED=1 pytest -p support.stalls -n 8 tests/tiers

The moment is random, up to 2 s after the start of the test. Tests that end earlier are not stopped, so run it
with several seeds. A deadline that passes during the stop has expired when the process continues.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Iterator

import pytest

STALL_S = float(os.environ.get("KVOFFLOAD_STALL_S", "2.5"))
SEED = int(os.environ.get("KVOFFLOAD_STALL_SEED", "1"))

# A separate process, because a stopped process cannot continue itself. Each input line has the seconds until
# the stop; an empty line ends the test.
_STOPPER = """
import os, select, signal, sys, time
pid, stall_s = int(sys.argv[1]), float(sys.argv[2])
for line in iter(lambda: os.read(0, 4096), b""):
    *_, last = line.decode().split("\\n")[:-1]
    if last and not select.select([0], [], [], float(last))[0]:
        os.kill(pid, signal.SIGSTOP)
        time.sleep(stall_s)
        os.kill(pid, signal.SIGCONT)
"""


@pytest.fixture(scope="session")
def stopper() -> Iterator[subprocess.Popen[bytes]]:
    """A process that sends this process SIGSTOP and SIGCONT on command."""
    command = [sys.executable, "-I", "-S", "-c", _STOPPER, str(os.getpid()), str(STALL_S)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, bufsize=0) as process:
        yield process


@pytest.fixture(autouse=True)
def stall(request: pytest.FixtureRequest, stopper: subprocess.Popen[bytes]) -> Iterator[None]:
    """Stop this process once in the test, at a moment that depends on `SEED` and the test's name."""
    assert stopper.stdin is not None
    seconds = 10 ** random.Random(f"{SEED} {request.node.nodeid}").uniform(-2.5, 0.3)
    stopper.stdin.write(f"{seconds:.4f}\n".encode())
    yield
    stopper.stdin.write(b"\n")


def pytest_report_header() -> str:
    return f"stalls of {STALL_S} s, seed {SEED}"
