"""The architecture, held by a test: which room imports which, what is public, how long files are."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import kvoffload
from kvoffload.core.jit import _SHARING

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "kvoffload"

# Room -> rooms and modules of ours that it may import, besides itself.
MAY_IMPORT = {
    "core": {"admission", "errors", "policies", "types"},
    "policies": {"core", "errors", "plugins"},
    "admission": {"core", "errors", "plugins"},
    "transfer": {"core", "errors"},
    # A tier behind RAM has a manager of its own, with any policy and admission rule.
    "tiers": {"admission", "core", "errors", "policies", "transfer", "types"},
    "replay": {
        "admission",
        "config",
        "core",
        "errors",
        "policies",
        "testing",
        "tiering",
        "tiers",
        "transfer",
        "types",
    },
    "testing": {"admission", "core", "errors", "policies", "tiers", "transfer", "types"},
    "integrations": {
        "admission",
        "config",
        "core",
        "errors",
        "policies",
        "tiering",
        "tiers",
        "transfer",
        "types",
    },
    "compat": {"admission", "core", "errors", "policies", "types"},
    "tiering": {"core", "errors", "tiers", "transfer", "types"},
    "types": {"core"},
    "errors": set(),
    "config": {"errors"},
    "plugins": {"errors"},
}
"""`cli` and the package itself may import everything."""

MAY_ALSO_IMPORT = {
    # Judges a policy as its user would: by replays, against the optimum. No room of ours imports it, so the
    # arrow from `replay` to the rest of `testing` closes no circle.
    "testing/conformance.py": {"replay"},
}

FORBIDDEN_IN_CONTROL_PLANE = {"torch", "vllm", "threading", "asyncio", "time", "os"}
NUMBA_ONLY_IN = {"core/jit.py", "tiers/checksum.py", "transfer/copies.py", "transfer/streaming.py"}
LONG_FOR_A_REASON = {
    "core/manager.py": "the life-cycle is one idea; its docstrings are the contract of the library",
    "testing/machine.py": "the rules of the state machine and the model that they keep are read together",
}


def imports_of(path: Path) -> set[str]:
    """Modules that a file imports, dotted."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def sources() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def test_imports_point_one_way() -> None:
    wrong = []
    for path in sources():
        room, name = room_of(path), str(path.relative_to(PACKAGE))
        if room not in MAY_IMPORT:
            continue
        allowed = MAY_IMPORT[room] | MAY_ALSO_IMPORT.get(name, set())
        for module in imports_of(path):
            parts = module.split(".")
            if parts[0] == "kvoffload" and len(parts) > 1:
                known = (PACKAGE / parts[1]).is_dir() or (PACKAGE / f"{parts[1]}.py").exists()
                if known and parts[1] != room and parts[1] not in allowed:
                    wrong.append(f"{name} imports {module}")
    assert not wrong


def test_nobody_imports_what_may_import_more() -> None:
    exceptions = {"kvoffload." + name.removesuffix(".py").replace("/", ".") for name in MAY_ALSO_IMPORT}
    assert not [path for path in sources() if exceptions & imports_of(path)]


def test_every_room_has_a_rule() -> None:
    rooms = {room_of(path) for path in sources()} - {"__init__", "cli"}
    assert rooms == set(MAY_IMPORT)


def test_the_control_plane_knows_no_world() -> None:
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


def test_kernels_share_helpers_in_some_rooms_only() -> None:
    """An edit of a shared helper must make the kernels stale that it is compiled into: see `core.jit`."""
    inlined = {
        f"{path.relative_to(PACKAGE.parent).with_suffix('')}".replace("/", ".") + f".{node.name}"
        for path in sources()
        if room_of(path) not in _SHARING
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef) and any("inline" in ast.dump(d) for d in node.decorator_list)
    }
    assert len(inlined) > 3
    assert not [f"{path}: {shared}" for path in sources() for shared in inlined & imports_of(path)]


def test_only_transfer_knows_torch() -> None:
    knowing = {
        room_of(path) for path in sources() if any(m.split(".")[0] == "torch" for m in imports_of(path))
    }
    assert knowing <= {"transfer"}


def test_only_integrations_know_engines() -> None:
    knowing = {path for path in sources() if any(m.split(".")[0] == "vllm" for m in imports_of(path))}
    assert {room_of(path) for path in knowing} <= {"integrations"}
    # The command line checks flags where vLLM is not installed.
    assert not {"options.py", "versions.py"} & {path.name for path in knowing}


def test_files_are_one_idea() -> None:
    long = {
        str(path.relative_to(PACKAGE)): lines
        for path in sources()
        if (lines := len(path.read_text().splitlines())) > 400
    }
    assert set(long) <= set(LONG_FOR_A_REASON), long


def test_no_unfinished_work() -> None:
    words = ("TO" + "DO", "FIX" + "ME", "NotImplemented" + "Error", "XX" + "X")
    found = [
        f"{path.relative_to(ROOT)}: {word}"
        for path in [*sources(), *(ROOT / "tests").rglob("*.py"), *(ROOT / "bench").glob("*.py")]
        for word in words
        if word in path.read_text()
    ]
    assert not found


def test_public_names_exist_and_are_documented() -> None:
    assert kvoffload.__all__ == sorted(kvoffload.__all__)
    assert set(kvoffload.__all__) == set(kvoffload._HOME)
    for name in kvoffload.__all__:
        found = getattr(kvoffload, name)
        if name != "OffloadKey":  # an alias of bytes
            assert found.__doc__, name


def test_public_classes_document_every_public_method() -> None:
    missing = []
    for name in kvoffload.__all__:
        found = getattr(kvoffload, name)
        if isinstance(found, type) and found.__module__.startswith("kvoffload"):
            for attribute, value in vars(found).items():
                inherited = any(getattr(base, attribute, None) for base in found.__mro__[1:])
                if callable(value) and not attribute.startswith("_") and not value.__doc__ and not inherited:
                    missing.append(f"{name}.{attribute}")
    assert not missing


def test_import_is_free_of_heavy_modules() -> None:
    code = "import sys, kvoffload; print({'numba', 'torch', 'numpy'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_nothing_of_this_machine_is_in_the_tree() -> None:
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if tracked.returncode:
        return  # an unpacked archive has no list of files
    home = "/" + "work" + "/"
    found = []
    for name in tracked.stdout.split():
        path = ROOT / name
        if path.is_file() and path.suffix in {".py", ".md", ".toml", ".sh", ""} and path.name != "LICENSE":
            text = path.read_text(errors="ignore")
            if home in text or "index" + "-url" in text:
                found.append(name)
    assert not found
