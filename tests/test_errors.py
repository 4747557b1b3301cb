"""Exceptions keep their message and their fields when they cross a process boundary."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest

from kvoffload.errors import CanaryError, CombinedConfigError, ConfigError, KVOffloadError, UnavailableError

ERRORS = [
    ConfigError("policy", "lur", "allowed: lru"),
    UnavailableError("ram", "8 GiB", "the machine has 4 GiB free"),
    CombinedConfigError("open", [ConfigError("ram", None, "give a size"), ConfigError("model", 7, "a text")]),
    CanaryError("not found", status=404),
]


@pytest.mark.parametrize("clone", [lambda error: pickle.loads(pickle.dumps(error)), copy.copy])
@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_an_error_can_be_sent_to_another_process(
    error: KVOffloadError, clone: Callable[[KVOffloadError], KVOffloadError]
) -> None:
    received = clone(error)
    assert type(received) is type(error)
    assert str(received) == str(error)
    assert {**vars(received), "problems": None} == {**vars(error), "problems": None}
    problems = getattr(error, "problems", ())
    assert [str(each) for each in getattr(received, "problems", ())] == [str(each) for each in problems]
