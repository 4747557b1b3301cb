"""Fixtures of real vLLM engines: tiny models, engines that run them, and their answers without offloading."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support.vllm_engine import HYBRID, Engine, write_llama
from support.vllm_traffic import Expected


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of the tiny model."""
    return write_llama(tmp_path_factory.mktemp("model") / "llama")


@pytest.fixture(scope="session")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of the model with two KV groups."""
    return write_llama(tmp_path_factory.mktemp("model") / "hybrid", HYBRID)


@pytest.fixture(scope="session")
def start_engine() -> Iterator[Callable[..., Engine]]:
    """A function that starts an engine and ends the previous one: a process has room for one engine."""
    running: list[Engine] = []

    def start(*args: Any, **settings: Any) -> Engine:
        while running:
            running.pop().close()
        running.append(Engine(*args, **settings))
        return running[0]

    yield start
    while running:
        running.pop().close()


@pytest.fixture(scope="session")
def on_llama(start_engine: Callable[..., Engine], llama: Path) -> Expected:
    """Answers of the tiny model without offloading."""
    return Expected(start_engine(llama, None))


@pytest.fixture(scope="session")
def on_hybrid(start_engine: Callable[..., Engine], hybrid: Path) -> Expected:
    """Answers of the model with two KV groups without offloading."""
    return Expected(start_engine(hybrid, None, num_gpu_blocks_override=44))
