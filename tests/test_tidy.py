"""The architecture as tests: imports between rooms, public names, lengths of functions, docstrings."""

from __future__ import annotations

import ast
import functools
import graphlib
import re
import subprocess
import sys
from pathlib import Path

import kvoffload

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "kvoffload"

MAY_IMPORT = {
    "errors": set(),
    "_version": set(),
    "text": set(),
    "settings": {"errors"},
    "model": {"settings", "errors"},
    "structures": {"errors"},
    "core": {"structures", "settings", "errors"},
    "policies": {"core", "structures", "errors"},
    "admission": {"core", "structures", "errors"},
    "whatif": {"core", "structures", "settings", "errors"},
    "calls": {"core", "structures", "settings", "errors", "_version"},
    "node": {"core", "structures", "text", "errors"},
    "transfer": {"structures", "errors"},
    "tiers": {"transfer", "core", "structures", "settings", "text", "errors"},
    "tiering": {"tiers", "core", "structures", "errors"},
    "cache": {"node", "tiering", "tiers", "transfer", "core", "structures", "settings", "text", "errors"},
    "metrics": {"cache", "tiering", "tiers", "core", "errors"},
    "traces": {"core", "settings", "structures", "text", "errors"},
    "replay": {
        *("traces", "tiering", "tiers", "transfer", "core", "structures", "settings", "text", "errors"),
        *("whatif", "_version"),
    },
    "explain": {"replay", "traces", "tiers", "core", "settings", "text", "errors", "_version"},
    "simulate": {
        *("replay", "traces", "tiering", "tiers", "transfer", "core", "structures", "settings", "errors"),
        *("text", "_version"),
    },
    "check": {"simulate", "replay", "metrics", "traces", "settings", "text", "errors"},
    "openai_server": {"tiers", "errors"},
    "calibration": {
        *("openai_server", "simulate", "replay", "tiers", "transfer", "structures", "errors", "_version"),
    },
    "sweep": {
        *("simulate", "replay", "traces", "tiers", "core", "structures", "settings", "text", "errors"),
        "_version",
    },
    "plan": {
        *("sweep", "check", "simulate", "replay", "traces", "tiers", "core", "settings", "text", "errors"),
        "_version",
    },
    "canary": {"openai_server", "metrics", "errors"},
    "pages": {"explain", "plan", "sweep", "check", "settings", "text", "errors", "_version"},
    "testing": {
        *("replay", "traces", "tiers", "transfer", "admission", "policies", "core", "structures", "errors"),
    },
    "integrations": {
        "whatif",
        *(
            "cache",
            "metrics",
            "tiering",
            "tiers",
            "traces",
            "transfer",
            "node",
            "calls",
            "model",
            "admission",
        ),
        *("core", "structures", "settings", "errors", "text", "_version"),
    },
    "cli": {
        *(
            "node",
            "calls",
            "integrations",
            "metrics",
            "calibration",
            "canary",
            "check",
            "explain",
            "model",
            "whatif",
            "pages",
            "plan",
            "sweep",
            "simulate",
            "replay",
        ),
        *("traces", "tiers", "core", "structures", "settings", "text", "errors", "_version"),
    },
}
"""Room -> other rooms that it may import, from the lowest to the highest room."""

FORBIDDEN_IN_CONTROL_PLANE = {"torch", "vllm", "threading", "asyncio", "time", "os"}
NUMBA_ONLY_IN = {
    *("structures/jit.py", "structures/kernel_cache.py", "structures/structs.py", "structures/batches.py"),
    *("structures/shipped.py", "tiers/checksum.py", "transfer/copies.py", "transfer/streaming.py"),
}
CONTROL_PLANE = {"structures", "core", "policies", "admission"}
MAX_LINES_OF_A_FUNCTION, MAX_PARAMETERS, MAX_PARAMETERS_IN_CONTROL_PLANE = 60, 8, 7
"""Limits of functions; the second excludes kernels and commands. Keyword parameters do not count."""


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@functools.cache
def imports_of(path: Path) -> set[str]:
    """Return the dotted names of the modules that a file imports."""
    names: set[str] = set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def sources() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def test_rooms_import_only_lower_rooms_by_rule() -> None:
    below: set[str] = set()
    for room, allowed in MAY_IMPORT.items():
        assert allowed <= below, room
        below.add(room)


def test_rooms_import_only_allowed_rooms() -> None:
    wrong = []
    for path in sources():
        room = room_of(path)
        if room == "__init__":
            continue  # the package itself imports public names from every room
        rooms = {module.split(".")[1] for module in imports_of(path) if module.startswith("kvoffload.")}
        forbidden = (rooms & set(MAY_IMPORT)) - MAY_IMPORT[room] - {room}
        wrong += [f"{path.relative_to(PACKAGE)}: {other}" for other in forbidden]
    assert not wrong


def test_no_import_cycle() -> None:
    names = {".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts): path for path in sources()}
    graph = {name: imports_of(path) & set(names) - {name} for name, path in names.items()}
    graphlib.TopologicalSorter(graph).prepare()


def test_no_test_imports_another_test_file() -> None:
    """Tests, and programs in their strings, share code only through tests/support and conftest.py files."""
    line = re.compile(r"^\s*(?:from|import)\s.*\btest_\w+", re.MULTILINE)
    assert not {
        f"{path.relative_to(ROOT)}: {statement}"
        for path in (ROOT / "tests").rglob("*.py")
        for statement in line.findall(path.read_text())
    }


def test_every_room_has_a_rule() -> None:
    assert {room_of(path) for path in sources()} - {"__init__"} == set(MAY_IMPORT)


def test_the_control_plane_does_no_io() -> None:
    wrong = [
        f"{path.relative_to(PACKAGE)} imports {module}"
        for path in sources()
        if room_of(path) in {"core", "policies", "admission"}
        for module in imports_of(path)
        if module.split(".")[0] in FORBIDDEN_IN_CONTROL_PLANE
    ]
    assert not wrong


def test_only_a_few_files_know_numba() -> None:
    knowing = {
        str(path.relative_to(PACKAGE))
        for path in sources()
        if {module.split(".")[0] for module in imports_of(path)} & {"numba", "llvmlite"}
    }
    assert knowing <= NUMBA_ONLY_IN


def test_only_copies_and_transformers_know_torch() -> None:
    knowing = {
        path.relative_to(PACKAGE).parent
        for path in sources()
        if any(m.split(".")[0] == "torch" for m in imports_of(path))
    }
    assert knowing <= {Path("transfer"), Path("integrations/transformers")}


def test_only_tiers_that_machines_share_know_the_network() -> None:
    """In addition, no kind of medium imports another kind."""
    knowing = {
        str(path.relative_to(PACKAGE))
        for path in sources()
        if {module.split(".")[0] for module in imports_of(path)} & {"socket", "ssl"}
    }
    own = {
        "tiers/valkey/resp.py",
        "tiers/shared/addresses.py",
        "tiers/shared/certificates.py",
        "tiers/s3/host.py",
        "tiers/valkey/login.py",
        "tiers/s3/http.py",
    }
    assert knowing <= own
    importing = {
        (str(path.relative_to(PACKAGE).parent), medium)
        for path in sources()
        for medium in ("disk", "shared", "valkey", "s3")
        if any(module.startswith(f"kvoffload.tiers.{medium}.") for module in imports_of(path))
    }
    inside = {(room, medium) for room, medium in importing if room.startswith("tiers")}
    assert {room for room, medium in inside if medium == "disk"} == {"tiers/disk", "tiers/kinds"}
    assert not {("tiers/disk", "shared"), ("tiers/s3", "valkey"), ("tiers/valkey", "s3")} & inside
    assert not {("tiers/shared", "valkey"), ("tiers/shared", "s3")} & inside


def test_only_integrations_know_engines() -> None:
    engines = {"vllm", "transformers"}
    knowing = {path for path in sources() if {m.split(".")[0] for m in imports_of(path)} & engines}
    assert {room_of(path) for path in knowing} <= {"integrations"}
    # The command line checks flags without vLLM.
    assert not {"options.py", "versions.py"} & {path.name for path in knowing}


def test_no_class_overrides_a_private_method_of_another() -> None:
    """A method that subclasses redefine needs a public name and a docstring."""
    bases, own, aliases = {}, {}, {}
    for path in sources():
        module, tree = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts), parsed(path)
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                aliases |= {f"{module}.{name.name}": f"{node.module}.{name.name}" for name in node.names}
            elif isinstance(node, ast.ClassDef):
                classes = [base.value if isinstance(base, ast.Subscript) else base for base in node.bases]
                bases[f"{module}.{node.name}"] = [f"{module}.{ast.unparse(base)}" for base in classes]
                own[f"{module}.{node.name}"] = {
                    name
                    for statement in node.body
                    for name in [
                        getattr(statement, "name", ""),
                        *map(ast.unparse, getattr(statement, "targets", [])),
                    ]
                    if name.startswith("_") and not name.startswith("__")
                }

    def inherited(name: str) -> set[str]:
        methods = set()
        for base in bases[name]:
            base = aliases.get(base, base)
            methods |= own[base] | inherited(base) if base in own else set()
        return methods

    assert len(own) > 300
    assert not {name: both for name in own if (both := own[name] & inherited(name))}


def test_functions_are_short() -> None:
    wrong = []
    for path in sources():
        for node in ast.walk(parsed(path)):
            if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                continue
            name = f"{path.relative_to(PACKAGE)}: {node.name}"
            body = [item for item in node.body if not isinstance(getattr(item, "value", None), ast.Constant)]
            lines = (node.end_lineno or 0) - (body or node.body)[0].lineno + 1
            if lines > MAX_LINES_OF_A_FUNCTION:
                wrong.append(f"{name} has {lines} lines")
            marks = {ast.unparse(mark).split("(")[0] for mark in node.decorator_list}
            count = len([item for item in node.args.args if item.arg not in ("self", "cls")])
            is_exempt = marks & {"kernel", "long_kernel", "inline", "click.command"}
            limit = MAX_PARAMETERS if not is_exempt else count
            if room_of(path) in CONTROL_PLANE:
                limit = MAX_PARAMETERS_IN_CONTROL_PLANE
            if count > limit:
                wrong.append(f"{name} has {count} parameters")
    assert not wrong, "\n".join(wrong)


FIRST_WORDS = {"What", "Whether", "Who", "Whose", "Where", "How", "Of", "As", "To", "Which", "That", "Why"}
"""Words that a docstring does not begin with: it begins with a noun or a verb (CONTRIBUTING.md)."""


def test_docstrings_begin_with_a_noun_or_a_verb() -> None:
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    wrong = [
        f"{path.relative_to(PACKAGE)}:{getattr(node, 'lineno', 1)}: {docstring.splitlines()[0]}"
        for path in sources()
        for node in ast.walk(parsed(path))
        if isinstance(node, kinds) and (docstring := ast.get_docstring(node))
        if docstring.split()[0].strip(",.:;") in FIRST_WORDS
    ]
    assert not wrong


def test_no_unfinished_work() -> None:
    words = ("TO" + "DO", "FIX" + "ME", "NotImplemented" + "Error", "XX" + "X")
    marks = [
        f"{path.relative_to(ROOT)}: {word}"
        for path in [
            *sources(),
            *(ROOT / "tests").rglob("*.py"),
            *(ROOT / "bench").glob("*.py"),
            *(ROOT / "tools").glob("*.py"),
        ]
        for word in words
        if word in path.read_text()
    ]
    assert not marks


def test_public_names_exist_and_are_documented() -> None:
    assert kvoffload.__all__ == sorted(kvoffload.__all__)
    assert set(kvoffload.__all__) == set(kvoffload._HOME)
    for name in kvoffload.__all__:
        value = getattr(kvoffload, name)
        if name != "OffloadKey":  # an alias of bytes
            assert value.__doc__, name


def test_public_classes_document_every_public_method() -> None:
    missing = []
    for name in kvoffload.__all__:
        cls = getattr(kvoffload, name)
        if isinstance(cls, type) and cls.__module__.startswith("kvoffload"):
            for attribute, value in vars(cls).items():
                inherited = any(getattr(base, attribute, None) for base in cls.__mro__[1:])
                if callable(value) and not attribute.startswith("_") and not value.__doc__ and not inherited:
                    missing.append(f"{name}.{attribute}")
    assert not missing


def test_import_is_free_of_heavy_modules() -> None:
    code = "import sys, kvoffload; print({'numba', 'torch', 'numpy'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_no_path_of_this_machine_is_in_the_tree() -> None:
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if tracked.returncode:
        return  # an unpacked archive has no list of files
    home = "/" + "work" + "/"
    names_found = []
    for name in tracked.stdout.split():
        path = ROOT / name
        if path.is_file() and path.suffix in {".py", ".md", ".toml", ".sh", ""} and path.name != "LICENSE":
            text = path.read_text(errors="ignore")
            if home in text or "index" + "-url" in text:
                names_found.append(name)
    assert not names_found
