"""Network namespaces for tests that cut a network."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import pytest

from support.valkey_server import PATIENCE_S

T = TypeVar("T")


TIMEOUT_S, PROBE_S, LATE = 2.0, 0.2, 10
"""Deadlines in seconds, and the factor of a deadline within which a job must end."""


def ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True)
    assert done.returncode == 0, (words, done.stderr)


def made(kind: type[T]) -> Iterator[T]:
    """Make namespaces and close them at the end; skip the test if this machine does not allow them."""
    try:
        namespaces: Any = kind()
    except (AssertionError, OSError) as error:
        pytest.skip(f"no {kind.__name__} of network namespaces can be made here: {error}")
    yield namespaces
    namespaces.close()


def wait_until(is_done: Callable[[], bool]) -> None:
    until = time.monotonic() + PATIENCE_S
    while not is_done():
        assert time.monotonic() < until
        time.sleep(0.0005)
