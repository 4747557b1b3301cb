"""Forks vLLM's OpenAI servers from a process that has imported vLLM: an import takes 8 s of CPU time.

Each line of the standard input is a task in JSON: arguments, environment, and the file for the output. The
reply is the server's process id. Each server has its own session, as if a shell had started it.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import signal
import sys
from typing import Any

SERVER = "vllm.entrypoints.openai.api_server"


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # imports print to the standard output
    import_server()
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no server becomes a zombie
    for line in sys.stdin:
        task = json.loads(line)
        if not os.fork():
            os.setsid()
            with answers:
                print(os.getpid(), file=answers)
            become_server(task)
            return
    os._exit(0)  # Triton's modules complain at the end of an interpreter


def import_server() -> None:
    """Import the modules of the server and of its engine's processes."""
    import vllm.entrypoints.openai.api_server
    import vllm.v1.engine.core
    import vllm.v1.executor.multiproc_executor
    import vllm.v1.worker.cpu_worker  # noqa: F401

    import kvoffload.structures.jit  # noqa: F401  (imports numba)


def become_server(task: dict[str, Any]) -> None:
    """Run the server in this process; the engine's processes are forked, too."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    output = os.open(task["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    for target, source in ((0, os.open(os.devnull, os.O_RDONLY)), (1, output), (2, output)):
        os.dup2(source, target)
    os.environ.clear()
    os.environ.update(task["environment"])
    sys.argv = [SERVER, *task["arguments"]]
    fork_engines()
    runpy.run_module(SERVER, run_name="__main__", alter_sys=True)


def fork_engines() -> None:
    """vLLM's CPU build starts new interpreters, which would import vLLM again. Other builds may fork."""
    from vllm.utils import system_utils

    def choose_fork() -> None:
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"

    if hasattr(system_utils, "_maybe_force_spawn"):
        system_utils._maybe_force_spawn = choose_fork


if __name__ == "__main__":
    main()
