"""Lookup of classes by a typed text: names, modules, files."""

from __future__ import annotations

import os
import pickle
import re
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from kvoffload import policies
from kvoffload.admission.reuse import ReuseAdmission
from kvoffload.core.admission import ADMISSIONS, create_admission
from kvoffload.core.manager import OffloadingManager
from kvoffload.core.policy import POLICIES
from kvoffload.errors import ConfigError
from kvoffload.policies.lru import LRU

POLICY = """
from support.naive.lru import NaiveLRU

class Mine(NaiveLRU):
    name = "mine"
    rounds: int = 3
    share: float = 0.5
    label = "no parameter: no annotation"
    _hidden: int = 1

class Another:
    pass
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(POLICY)
    return path


def refused(name: str) -> str:
    with pytest.raises(ConfigError) as caught:
        POLICIES.find(name)
    message = str(caught.value)
    assert message.startswith(f"policy: {name!r} is invalid; ")
    return message.split("; ", 1)[1]


def test_names_modules_and_classes() -> None:
    assert POLICIES.find("lru") is POLICIES.find("kvoffload.policies.lru:LRU") is POLICIES.find(LRU) is LRU


def test_an_alias_of_a_type_is_no_class(tmp_path: Path) -> None:
    """`isinstance` on Python 3.10 considers it a class."""
    (tmp_path / "aliased.py").write_text(POLICY + "\nKeys = list[int]\n")
    assert "subclass" in refused(f"{tmp_path / 'aliased.py'}:Keys")
    assert POLICIES.find(f"{tmp_path / 'aliased.py'}:Mine").name == "mine"


def test_a_class_in_a_file(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cls = POLICIES.find(f"{file}:Mine")
    assert cls.name == "mine"
    monkeypatch.chdir(file.parent)
    assert POLICIES.find("mine.py:Mine") is POLICIES.find("./mine.py:Mine") is cls
    assert pickle.loads(pickle.dumps(cls)) is cls


def test_another_process_finds_it_by_the_same_text(file: Path) -> None:
    """The module has the same name there, so one process can read the other's pickles."""
    pickled = pickle.dumps(POLICIES.find(f"{file}:Mine")).hex()
    code = (
        "import pickle\n"
        "from kvoffload.core.policy import POLICIES\n"
        f"found = POLICIES.find({f'{file}:Mine'!r})\n"
        f"assert pickle.loads(bytes.fromhex({pickled!r})) is found"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr


def test_two_files_of_one_name_are_two_modules(file: Path, tmp_path: Path) -> None:
    other = tmp_path / "other" / "mine.py"
    other.parent.mkdir()
    other.write_text(POLICY)
    assert POLICIES.find(f"{other}:Mine") is not POLICIES.find(f"{file}:Mine")


@pytest.mark.parametrize(
    "name",
    [
        *("lfu,max_count", "sieve,patience", "s3fifo,patience", "hazard,history_capacity"),
        *("hazard,sample_capacity", "hazard,half_life", "hazard,warm_up"),
        *("reuse,store_threshold", "reuse,max_tracker_size"),
    ],
)
def test_a_number_that_kernels_cannot_take_is_refused(name: str) -> None:
    registry = ADMISSIONS if name.startswith("reuse") else POLICIES
    with pytest.raises(ConfigError, match=r": a whole number from [01] to \d+$"):
        registry.find(f"{name}={2**63}")


def test_errors_name_the_problem(file: Path, tmp_path: Path) -> None:
    assert refused(f"{file}x.py:Mine") == f"there is no file {file}x.py"
    assert refused(f"{file}:Yours") == f"{file} has no Yours; it has Mine"
    assert refused(f"{file}:Another") == "it must be a subclass of EvictionPolicy"
    assert refused(f"{tmp_path}:Mine").startswith("it cannot be imported: No module")
    assert refused("kvoffload.policies.lru:LRUU") == "kvoffload.policies.lru has no LRUU; it has LRU"
    assert refused("no.such.module:Mine").startswith("it cannot be imported: No module")
    for file in ("hazard.policy", "_2q"):  # an imported module is not a name
        assert "module:Class, or path/to/file.py:Class" in refused(file)
    assert refused("lruu").endswith("module:Class, or path/to/file.py:Class (did you mean lru?)")
    assert "path/to/file.py:Class" in refused(f"{file}")
    assert "path/to/file.py:Class" in refused(f"{file}:")
    assert "path/to/file.py:Class" in refused(":Mine")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("class Mine:\n  def f(:\n", "it cannot be imported: invalid syntax .*broken.py, line 2"),
        ("import nowhere", "it cannot be imported: No module named 'nowhere'"),
        ("1 / 0", "it cannot be imported: ZeroDivisionError: division by zero"),
        ("import sys; sys.exit(3)", "it cannot be imported: SystemExit: 3"),
    ],
)
def test_a_file_that_cannot_be_run_is_forgotten(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "broken.py"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        POLICIES.find(f"{path}:Mine")
    path.write_text(POLICY)  # repaired: the failure is not remembered
    assert POLICIES.find(f"{path}:Mine").name == "mine"


NEEDS_A_NAME = 'Mine needs a class attribute name, such as name = "mine"'


@pytest.mark.parametrize(
    ("methods", "name", "message"),
    [
        (("insert", "hit"), "'mine'", "Mine does not implement forget, reset, victim"),
        (("insert", "hit", "forget", "reset", "victim"), None, NEEDS_A_NAME),
        (("insert", "hit", "forget", "reset", "victim"), "5", NEEDS_A_NAME),
        (("insert", "hit", "forget", "reset", "victim"), "''", NEEDS_A_NAME),
    ],
)
def test_an_incomplete_class_is_refused(
    tmp_path: Path, methods: tuple[str, ...], name: str | None, message: str
) -> None:
    """A replay ended with a traceback, a sweep after the first replay."""
    lines = ["from kvoffload import BlockwisePolicy", "class Mine(BlockwisePolicy):"]
    lines += [f"    def {method}(self, *args): pass" for method in methods]
    lines += [f"    name = {name}"] if name else []
    path = tmp_path / "incomplete.py"
    path.write_text("\n".join(lines))
    assert refused(f"{path}:Mine") == message


def test_a_broken_entry_point_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    points = [EntryPoint("broken", "no.such.module:Policy", "kvoffload.policies")]
    monkeypatch.setattr("kvoffload.settings.registry.entry_points", lambda group: points)
    assert "broken" in POLICIES.names()
    assert refused("broken").startswith("it cannot be imported: No module")


def test_parameters_are_annotated_attributes_with_defaults(file: Path) -> None:
    cls = POLICIES.find(f"{file}:Mine,share=0.25,rounds=7")
    assert issubclass(cls, POLICIES.find(f"{file}:Mine"))
    assert (vars(cls)["rounds"], vars(cls)["share"], cls.name) == (7, 0.25, "mine")
    listed = POLICIES.parameters(POLICIES.find(f"{file}:Mine"))
    assert [(parameter.name, parameter.default, parameter.allowed) for parameter in listed] == [
        ("rounds", 3, "a whole number"),
        ("share", 0.5, "a number"),
    ]
    assert POLICIES.parameters(LRU) == []


def test_the_first_parameter_may_follow_a_name() -> None:
    cls = ADMISSIONS.find("reuse:3,max_tracker_size=10")
    rule = cls.for_cache(key_bytes=8, capacity_blocks=4)
    assert isinstance(rule, ReuseAdmission)
    assert (rule.store_threshold, rule.max_tracker_size) == (3, 10)
    assert create_admission("reuse:1", 8, 4) is create_admission("all", 8, 4) is None


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            "s3fifo,small_share=1",
            "small_share=1' is invalid; small_share: allowed: a number above 0 and below 1",
        ),
        ("s3fifo,patience=1.5", "patience: allowed: a whole number from 0 to 2147483647"),
        (
            "hazard,write_cost=nan",
            "write_cost: allowed: a number from -1 to 1000",
        ),
        ("s3fifo,shar=1", "'shar' is unknown or given twice; allowed: small_share=0.1, patience=8192"),
        ("s3fifo,patience=1,patience=2", "'patience' is unknown or given twice"),
        ("s3fifo,patience", "'patience' is unknown or given twice"),
        ("lru,a=1", "'a' is unknown or given twice; allowed: none"),
        ("lru:5", "lru has no parameters"),
    ],
)
def test_wrong_parameters(text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(problem)):
        POLICIES.find(text)


def test_a_new_file_is_a_new_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file in the room suffices: there is no list of policies to edit."""
    monkeypatch.setattr(policies, "__path__", [*policies.__path__, str(tmp_path)])
    assert "toy" not in POLICIES.names()
    (tmp_path / "toy.py").write_text(POLICY.replace('"mine"', '"toy"'))
    assert "toy" in POLICIES.names()
    assert OffloadingManager(4, key_bytes=8, policy="toy,rounds=5").policy.name == "toy"
    (tmp_path / "toy.py").unlink()
    monkeypatch.delitem(sys.modules, "kvoffload.policies.toy")
    assert "toy" not in POLICIES.names()
