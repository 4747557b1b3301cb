"""``kvoffload policies``: built-in and third-party policies, including broken packages."""

from __future__ import annotations

import json
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvoffload.cli.policies import policies as command
from kvoffload.core import policy as contract
from kvoffload.core.admission import ADMISSIONS, DEFAULT_ADMISSION
from kvoffload.core.policy import POLICIES
from kvoffload.errors import ConfigError

KEYS = ["name", "summary", "good_for", "paper", "parameters", "kind", "default", "flagship"]


def listed() -> list[dict[str, object]]:
    done = CliRunner().invoke(command, ["--format", "json"])
    assert done.exit_code == 0, done.output
    entries: list[dict[str, object]] = json.loads(done.stdout)
    return entries


def test_every_policy_and_rule_is_described() -> None:
    entries = listed()
    assert [entry["name"] for entry in entries if entry["kind"] == "policy"] == POLICIES.names()
    rules = [entry["name"] for entry in entries if entry["kind"] == "admission"]
    assert rules == ADMISSIONS.names()
    for entry in entries:
        assert list(entry) == KEYS
        assert entry["summary"], entry
        assert entry["good_for"], entry
        assert entry["paper"] or entry["kind"] == "admission", entry


def test_the_default_and_the_flagship_are_marked() -> None:
    entries = listed()
    for kind, default in (("policy", contract.DEFAULT_POLICY), ("admission", DEFAULT_ADMISSION)):
        marked = [entry["name"] for entry in entries if entry["kind"] == kind and entry["default"]]
        assert marked == [default]
    assert [entry["name"] for entry in entries if entry["flagship"]] == [contract.FLAGSHIP]


def test_the_table_equals_the_json() -> None:
    done = CliRunner().invoke(command, env={"COLUMNS": "120"})
    assert done.exit_code == 0
    lines = done.stdout.splitlines()
    assert len(lines) <= 24, "one screen"
    for entry in listed():
        (line,) = [line for line in lines if line.split()[:1] == [entry["name"]]]
        assert entry["summary"] in line, "in one line"
        assert ("(default)" in line) == entry["default"]


@pytest.mark.parametrize(
    ("name", "words"),
    [("arc", ["FAST 2003", "chat under pressure"]), ("reuse", ["store_threshold=2 (a whole number"]),
     ("hazard", ["write_cost=None (", "the index is Gittins"])],
)  # fmt: skip
def test_one_policy_in_detail(name: str, words: list[str]) -> None:
    done = CliRunner().invoke(command, [name], env={"COLUMNS": "200"})
    assert done.exit_code == 0
    for word in words:
        assert word in done.stdout


def test_an_unknown_policy() -> None:
    done = CliRunner().invoke(command, ["lri"])
    assert isinstance(done.exception, ConfigError)
    assert "did you mean lru?" in str(done.exception)


@pytest.fixture
def third_parties(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "sound_policy.py").write_text(
        "from kvoffload.policies.lru import LRU\n\n\n"
        "class Mine(LRU):\n    good_for = 'nothing else'\n\n\n"
        "class Told(LRU):\n    '''Do as LRU does.\n\n    And no more.\n    '''\n"
    )
    (tmp_path / "broken_policy.py").write_text("raise RuntimeError('two\\nlines')\n")
    monkeypatch.syspath_prepend(tmp_path)
    points = [
        EntryPoint("a-mine", "sound_policy:Mine", "kvoffload.policies"),
        EntryPoint("a-told", "sound_policy:Told", "kvoffload.policies"),
        EntryPoint("x-absent", "no_such_module:Policy", "kvoffload.policies"),
        EntryPoint("x-broken", "broken_policy:Policy", "kvoffload.policies"),
        EntryPoint("x-other", "json:JSONDecoder", "kvoffload.policies"),
    ]
    monkeypatch.setattr(
        "kvoffload.settings.registry.entry_points",
        lambda group: [point for point in points if point.group == group],
    )


@pytest.mark.usefixtures("third_parties")
def test_policies_of_other_packages() -> None:
    entries = {entry["name"]: entry for entry in listed()}
    assert entries["a-told"]["summary"] == "Do as LRU does."
    assert entries["a-mine"]["summary"] == "", (
        "a class without docstring does not inherit its parent's summary"
    )
    assert entries["a-mine"]["good_for"] == "nothing else"
    assert list(entries["a-mine"]) == KEYS


@pytest.mark.usefixtures("third_parties")
def test_failed_imports_are_listed_with_their_error() -> None:
    entries = {entry["name"]: entry for entry in listed()}
    assert entries["x-absent"]["error"] == "ModuleNotFoundError: No module named 'no_such_module'"
    assert entries["x-broken"]["error"] == "RuntimeError: two lines"
    assert "subclass of EvictionPolicy" in str(entries["x-other"]["error"])
    assert list(entries["x-absent"]) == [*KEYS, "error"]
    done = CliRunner().invoke(command, env={"COLUMNS": "200"})
    assert done.exit_code == 0
    assert "cannot be imported: RuntimeError: two lines" in done.stdout
