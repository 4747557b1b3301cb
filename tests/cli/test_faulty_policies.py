"""A policy of a user that fails: one line with method and block, then the traceback of the user's code."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest

from support.run_cli import kvoffload

POLICY = """
from kvoffload import BlockwisePolicy


class Mine(BlockwisePolicy):
    name = "mine"

    def __init__(self, index):
        super().__init__(index)
        self.reset()

    def reset(self):
        self.slots = {}

    def hit(self, slot):
        self.slots[slot] = self.slots.pop(slot)

    def insert(self, slot, key):
        self.slots[slot] = key

    def victim(self, key, protected):
        slot = next(slot for slot in self.slots if slot not in protected)
        self.forget(slot)
        return slot

    def forget(self, slot):
        del self.slots[slot]
"""


@pytest.fixture
def policy(tmp_path: Path, request: pytest.FixtureRequest) -> str:
    """The policy, with another definition of a method."""
    path = tmp_path / "mine.py"
    path.write_text(POLICY + textwrap.indent(request.param, "    "))
    return f"{path}:Mine"


def with_method(*cases: tuple[str, str]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(("policy", "message"), cases, indirect=["policy"])


def without_compilation(errors: str) -> list[str]:
    return [line for line in errors.splitlines() if "compiling kernels" not in line]


@with_method(
    ("def victim(self, key, protected):\n    return self.oldest(key)\n"
     "def oldest(self, key):\n    return {}[1]",
     r"kvoffload: policy Mine: victim\(key [0-9a-f]{64}\) raised KeyError: 1 \(mine\.py, line \d+\)"),
    ("def hit(self, slot):\n    raise ValueError('two\\nlines')",
     r"kvoffload: policy Mine: hit\(slot \d+\) raised ValueError: two lines \(mine\.py, line \d+\)"),
    ("def replace(self, keys, slots, num_free, protected):\n"
     "    super().replace(keys, slots, num_free, protected)\n"
     "def insert(self, slot, key):\n    assert False",
     r"kvoffload: policy Mine: insert\(slot \d+, key [0-9a-f]{64}\) raised AssertionError \(mine\.py, "),
    ("def finished(self, path, slots, hints):\n    1 / 0",
     r"kvoffload: policy Mine: finished raised ZeroDivisionError: division by zero \(mine\.py, line \d+\)"),
    ("def __init__(self, index):\n    open('/no/such/file')",
     r"kvoffload: policy Mine: __init__ raised FileNotFoundError: "),
)  # fmt: skip
def test_an_exception_is_one_line_and_the_users_traceback(policy: str, message: str) -> None:
    done = kvoffload("replay", "chat", "--capacity", "1%", "--no-data", "--quiet", "--policy", policy)
    first, *lines = without_compilation(done.stderr)
    assert done.returncode == 2
    assert re.match(message, first), first
    assert lines[0] == "Traceback (most recent call last):"
    assert "mine.py" in lines[1]
    assert "src/kvoffload" not in lines[1]


@with_method(
    *((f"def victim(self, key, protected):\n    return {slot}", f"victim returned {slot} for key ")
      for slot in ("None", "'3'", "1.5", "2**40", "[]")),
)  # fmt: skip
def test_a_victim_that_is_no_slot_is_one_line(policy: str, message: str) -> None:
    done = kvoffload("replay", "chat", "--capacity", "1%", "--no-data", "--quiet", "--policy", policy)
    assert done.returncode == 2
    (line,) = without_compilation(done.stderr)
    assert line.startswith(f"kvoffload: policy 'mine': {message.replace('2**40', str(2**40))}")
    assert line.endswith("; allowed: the number of a slot, 0 to 307")


@with_method(("def victim(self, key, protected):\n    1 / 0", "victim(key "))
def test_a_sweep_names_method_and_block(policy: str, message: str) -> None:
    done = kvoffload(
        "sweep", "chat", "--capacities", "1%", "--policies", f"lru,{policy}", "--jobs", "1", "--quiet"
    )
    assert done.returncode == 1
    assert f"policy Mine: {message}" in done.stderr
    assert "raised ZeroDivisionError: division by zero (mine.py, line " in done.stderr


def test_an_exception_of_kvoffload_itself_stays_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("kvoffload.cli.pool.pools", broken)
    with pytest.raises(ZeroDivisionError):
        kvoffload("pool", "ls")
