"""tools/mutation.py: a seed gives equal mutants, mutants can have an effect, and their own code runs."""

from __future__ import annotations

import ast
import importlib
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

for needed in ("cosmic_ray", "coverage"):
    pytest.importorskip(needed, reason=f"{needed} is not installed (pip install --group mutation)")

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def mutants() -> Iterator[SimpleNamespace]:
    """The modules of tools/mutants, which are not in the package."""
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        parts = ("make", "names", "reach", "trial")
        yield SimpleNamespace(**{module: importlib.import_module(f"mutants.{module}") for module in parts})
    finally:
        sys.path.remove(str(ROOT / "tools"))
        for name in [name for name in sys.modules if name.split(".")[0] == "mutants"]:
            del sys.modules[name]


def write(root: Path, modules: dict[str, str]) -> Path:
    """Write a package of these modules below `root`."""
    for name, text in modules.items():
        file = root / "kvoffload" / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(textwrap.dedent(text))
    return root


def changed_texts(make: ModuleType, source: str) -> set[str]:
    """Return the texts at the places of a source that can be mutated."""
    lines = textwrap.dedent(source).splitlines()
    texts = set()
    for first, last in make.places(textwrap.dedent(source)):
        assert first[0] == last[0], "these examples have one line each"
        texts.add(lines[first[0] - 1][first[1] : last[1]])
    return texts


# ---- choice of mutants


def test_a_seed_is_an_order_of_mutants(mutants: SimpleNamespace) -> None:
    def drawn(number: int, seed: int) -> list[tuple[str, str, int]]:
        chosen = mutants.make.choose(ROOT / "src", ["kvoffload/policies/hazard/path_runs.py"], number, seed)
        return [(mutant.path, mutant.operator, mutant.occurrence) for mutant in chosen]

    ten = drawn(10, 7)
    assert len(set(ten)) == 10
    assert drawn(4, 7) == ten[:4]
    assert drawn(10, 8) != ten


def test_mutants_are_other_programs(mutants: SimpleNamespace) -> None:
    path = "kvoffload/structures/keylists.py"
    before = (ROOT / "src" / path).read_text()
    for mutant in mutants.make.choose(ROOT / "src", [path], 40, 1):
        assert ast.dump(ast.parse(mutant.source)) != ast.dump(ast.parse(before))
        assert mutant.diff.count("\n+") >= 1


def test_changes_without_effect_are_excluded(mutants: SimpleNamespace) -> None:
    source = '''
        """Not 1 of these."""
        Name: TypeAlias = 2 | 3
        def f(a: 4 | 5, b: int = 6) -> 7 | 8:
            """Nor 9."""
            raise ValueError(10 + a)
            log.warn("x", 11)
            return f"{a + 12}"
        def __repr__(self):
            return 13
        if TYPE_CHECKING:
            x = 14
        prefetch(table, 15)
        prefetch_rows(table, 16)
        def _prefetch_used(table):
            return table + 17
    '''
    assert changed_texts(mutants.make, source) == {
        "6", "raise ValueError(10 + a)", 'log.warn("x", 11)',
    }  # fmt: skip


def test_statements_with_lasting_effects_are_removed(mutants: SimpleNamespace) -> None:
    source = """
        def f(a):
            '''No statement.'''
            local = a
            a.b = local
            a[local] = a
            a.b.c()
            local += a
            raise a
    """
    assert changed_texts(mutants.make, source) == {
        "a.b = local", "a[local] = a", "a.b.c()", "local += a", "raise a", "+="
    } - {"+="}  # fmt: skip


# ---- users of a changed line


TOY = {
    "constants": "LIMIT = 3\n",
    "core/helpers": """
        from core.jit import inline, kernel
        from constants import LIMIT as MOST

        @inline
        def clipped(x):
            return min(x, MOST)

        @kernel(int)
        def one(x):
            return clipped(x)

        @kernel(int)
        def other(x):
            return x
    """,
    "caller": """
        from core.helpers import one, other

        def ask(x):
            return one(x)

        def ask_other(x):
            return other(x)

        async def ask_later(x):
            a_local_name = one(x)
            return a_local_name

        class Other:
            one: int  # a field with the name of a kernel

        def make(x):
            return Other(x)
    """,
}


@pytest.mark.parametrize("mark", ["@kernel(int)", "@long_kernel", "@LRU.compiled"])
def test_a_kernel_includes_the_helpers_compiled_into_it(
    mutants: SimpleNamespace, tmp_path: Path, mark: str
) -> None:
    toy = {path: text.replace("@kernel(int)", mark) for path, text in TOY.items()}
    known = mutants.names.definitions(write(tmp_path, toy))

    def used_by(path: str, line: int) -> set[str]:
        place = mutants.names.at(known, f"kvoffload/{path}.py", line)
        return {user.names[0] for user in mutants.names.users(known, place)}

    assert used_by("constants", 1) == {"clipped", "one", "ask", "ask_later"}
    assert used_by("core/helpers", 7) == {"one", "ask", "ask_later"}
    assert used_by("core/helpers", 15) == {"ask_other"}
    assert used_by("caller", 5) == set()


def test_a_mutant_keeps_time_and_size_and_drops_its_kernels(mutants: SimpleNamespace, tmp_path: Path) -> None:
    source = write(tmp_path / "src", TOY)
    mutants.trial.prepare(source, tmp_path / "base")
    cache = tmp_path / "base" / "kvoffload" / "core" / "__pycache__"
    cache.mkdir()
    for name in ("helpers.one-9.py311.nbi", "helpers.one-9.py311.1.nbc", "helpers.other-13.py311.nbi"):
        (cache / name).touch()
    (cache / "helpers.cpython-311.pyc").touch()
    suite = mutants.reach.Suite(sys.executable, (), (), tmp_path, tmp_path)
    reach = mutants.reach.Reach(suite, tmp_path / "base")

    def kept(path: str, line: int) -> set[str]:
        mutant = mutants.make.Mutant(path, line, "", 0, "x = 1\n", "")
        work = tmp_path / f"work{line}"
        mutants.trial.place(mutant, reach, tmp_path / "base", work)
        before, after = ((root / path).stat() for root in (tmp_path / "base", work))
        assert (before.st_size, before.st_mtime_ns) == (after.st_size, after.st_mtime_ns)
        assert (work / path).read_text().startswith("x = 1\n#")
        return {file.name.split("-")[0] for file in (work / "kvoffload/core/__pycache__").iterdir()}

    pyc = "helpers.cpython"
    assert kept("kvoffload/core/helpers.py", 15) == {"helpers.one"}
    assert kept("kvoffload/core/helpers.py", 7) == {"helpers.other"}
    assert kept("kvoffload/constants.py", 1) == {"helpers.other", pyc}
    assert kept("kvoffload/caller.py", 5) == {"helpers.one", "helpers.other", pyc}


# ---- the whole tool

ADDED = """
    STEP = 1

    def added(x):
        while x < 10:
            x = x + STEP
        return x

    def loose(x):
        return x > 0

    def unseen(x):
        return x - 1

    def inline(function):
        return function

    @inline
    def helper(x):
        return 2 * x
"""
TESTS = """
    from pathlib import Path

    from kvoffload.added import added, helper, loose

    def test_added():
        assert added(3) == 10

    def test_loose():
        assert loose(5)
        assert helper(3) == 6

    def test_fails():
        assert added(3) == 11

    def test_fails_the_second_time():
        seen = Path(__file__).with_name("seen")
        times = len(seen.read_text()) if seen.exists() else 0
        seen.write_text("x" * (times + 1))
        assert loose(5) and times != 1
"""


@pytest.mark.slow
def test_mutants_meet_the_tests_that_can_notice_them(
    mutants: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write(tmp_path / "src", {"__init__": "", "added": ADDED})
    (tmp_path / "test_toy.py").write_text(textwrap.dedent(TESTS))
    mutants.trial.prepare(source, tmp_path / "out" / "base")
    suite = mutants.reach.Suite(sys.executable, ("test_toy.py",), (), tmp_path, tmp_path / "out" / "tests")
    reach = mutants.reach.Reach(suite, tmp_path / "out" / "base")
    reach.gather()
    assert reach.not_passed == {"test_toy.py::test_fails"}
    passed = {"test_toy.py::test_added", "test_toy.py::test_loose", "test_toy.py::test_fails_the_second_time"}
    assert set(reach.wall_s) == passed

    limits = mutants.trial.Limits(4 * 1024**3, 60.0)

    def outcome(line: int, now: str) -> tuple[str, str, int]:
        path = "kvoffload/added.py"
        lines = (source / path).read_text().splitlines()
        lines[line - 1] = now
        mutant = mutants.make.Mutant(path, line, "", 0, "\n".join(lines) + "\n", "")
        result = mutants.trial.run(mutant, reach, tmp_path / "out" / "base", limits)
        return result.outcome.value, result.by, result.num_tests

    assert outcome(7, "    return x + 1") == ("killed", "test_toy.py::test_added", 1)
    # A test that fails once and passes when it is repeated does not count.
    assert outcome(10, "    return x > 1") == ("survived", "", 1)
    assert outcome(13, "    return x + 1") == ("not reached", "", 0)
    # Runs of kernel helpers and reads of constants are not traced: the tests of their users run.
    assert outcome(20, "    return 3 * x")[:2] == ("killed", "test_toy.py::test_loose")
    assert outcome(2, "STEP = 9") == ("killed", "test_toy.py::test_added", 1)
    killed, by, _ = outcome(10, "    import os; os.kill(os.getpid(), 11)")
    assert killed == "killed"
    assert by.endswith("(SIGSEGV)")
    monkeypatch.setattr(mutants.trial, "HANG_S", 1.0)
    assert outcome(6, "        x = x - STEP") == ("timeout", "test_toy.py::test_added", 0)
