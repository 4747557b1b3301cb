"""Runs programs in forks of a process that has already imported their modules.

    python -m support.launcher DIRECTORY MODULE...

An import of vLLM or SGLang takes 9 s of CPU time. ``MODULE:FUNCTION`` calls a function of a module.

Each line of the standard input is a program in JSON: the arguments of ``python``, the environment, and the
files for its output. The reply is the process id. Each program has its own session, as if a shell had started
it. Its exit code is written to a file in the directory.
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from support.timeouts import HANGS_S

_freeze = gc.freeze


class Forked:
    """A program in a fork. The methods are those of `subprocess.Popen`."""

    def __init__(self, pid: int, directory: Path) -> None:
        self.pid, self._code = pid, directory / str(pid)

    def poll(self) -> int | None:
        return int(self._code.read_text()) if self._code.exists() else None

    def wait(self, timeout: float = HANGS_S) -> int:
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            assert time.monotonic() < deadline, f"process {self.pid} does not end"
            time.sleep(0.05)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Launcher:
    """A process that has imported modules, and forks programs."""

    def __init__(self, modules: tuple[str, ...]) -> None:
        self._lock, self._directory = threading.Lock(), tempfile.TemporaryDirectory()
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "support.launcher", self._directory.name, *modules],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | paths(),
        )  # fmt: skip

    def start(
        self, arguments: list[str], environment: dict[str, str], output: Path, errors: Path | None = None
    ) -> Forked:
        """Start ``python ARGUMENTS``: a module with ``-m``, code with ``-c``, or a file."""
        program = {
            "arguments": arguments, "environment": environment, "output": str(output),
            "errors": str(errors or output),
        }  # fmt: skip
        programs, replies = self._process.stdin, self._process.stdout
        assert programs is not None
        assert replies is not None
        with self._lock:
            programs.write(json.dumps(program) + "\n")
            programs.flush()
            return Forked(int(replies.readline()), Path(self._directory.name))

    def run(self, arguments: list[str], environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
        """Run ``python ARGUMENTS`` to its end."""
        with tempfile.TemporaryDirectory() as directory:
            output, errors = Path(directory, "output"), Path(directory, "errors")
            code = self.start(arguments, environment, output, errors).wait()
            return subprocess.CompletedProcess(arguments, code, output.read_text(), errors.read_text())

    def close(self) -> None:
        self._process.communicate()
        self._directory.cleanup()


@functools.cache
def launcher(*modules: str) -> Launcher:
    """The launcher of this process with these modules, started on first use."""
    made = Launcher(modules)
    atexit.register(made.close)
    return made


def paths() -> dict[str, str]:
    """Variables with which a process finds this Python's commands and modules."""
    return {
        "PATH": os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"])),
        "PYTHONPATH": os.pathsep.join(part for part in sys.path if part),
    }


# ---- in the launcher's process


def main(directory: str, *modules: str) -> None:
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # imports print to the standard output
    for name in modules:
        module, _, function = name.partition(":")
        imported = importlib.import_module(module)
        if function:
            getattr(imported, function)()
    sys.stdout.flush()
    sys.stderr.flush()
    gc.collect()
    _freeze()
    signal.signal(signal.SIGCHLD, lambda *_: note_ends(Path(directory)))
    for line in sys.stdin:
        program = json.loads(line)
        if not os.fork():
            os.setsid()
            with replies:
                print(os.getpid(), file=replies)
            become(program)
            return
    os._exit(0)  # Triton's modules complain at the end of an interpreter


def note_ends(directory: Path) -> None:
    """Write the exit codes of the programs that have ended."""
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG)) != (0, 0):
            pid, status = ended
            new = directory / f"{pid}.new"
            new.write_text(str(os.waitstatus_to_exitcode(status)))
            new.rename(directory / str(pid))


def become(program: dict[str, Any]) -> None:
    """Run a program in this process."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    create = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    output, errors = (os.open(program[name], create, 0o600) for name in ("output", "errors"))
    for target, source in ((0, os.open(os.devnull, os.O_RDONLY)), (1, output), (2, errors)):
        os.dup2(source, target)
    os.environ.clear()
    os.environ.update(program["environment"])
    kind, *arguments = program["arguments"]
    if kind == "-m":
        sys.argv = arguments
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    elif kind == "-c":
        sys.argv = ["-c", *arguments[1:]]
        exec(compile(arguments[0], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv = [kind, *arguments]
        runpy.run_path(kind, run_name="__main__")


if __name__ == "__main__":
    main(*sys.argv[1:])
