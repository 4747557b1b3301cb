"""Processes of vLLM's OpenAI server without new interpreters, which would import vLLM for 9 s of CPU time."""

from __future__ import annotations

import os

SERVER = "vllm.entrypoints.openai.api_server"


def import_server() -> None:
    """Import the modules of the server and of its engine's processes, before the server is forked."""
    import vllm.entrypoints.openai.api_server
    import vllm.v1.engine.core
    import vllm.v1.executor.multiproc_executor
    import vllm.v1.worker.cpu_worker  # noqa: F401

    import kvoffload.structures.jit  # noqa: F401  (imports numba)

    inspect_models_here()
    fork_engines()


def inspect_models_here() -> None:
    """Let vLLM look at a model's class in this process.

    By default it starts an interpreter, because CUDA must stay uninitialized.
    """
    from vllm.model_executor.models import registry
    from vllm.platforms import current_platform

    if current_platform.is_cpu() and hasattr(registry, "_run_in_subprocess"):
        registry._run_in_subprocess = lambda inspect: inspect()


def fork_engines() -> None:
    """vLLM's CPU build starts new interpreters for engines. Other builds may fork."""
    from vllm.utils import system_utils

    def choose_fork() -> None:
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"

    if hasattr(system_utils, "_maybe_force_spawn"):
        system_utils._maybe_force_spawn = choose_fork
