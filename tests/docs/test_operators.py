"""Sizes, flags, manifests and a systemd unit in the docs agree with each other and with the commands."""

from __future__ import annotations

import configparser
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from kvoffload.integrations.vllm.shared.options import VLLMOptions, parse_options
from kvoffload.settings.read import parse_size
from support.run_cli import kvoffload

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
UNIT = (EXAMPLES / "vllm-kvoffload.service").read_text()
PAGES = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]


def bytes_of(quantity: str) -> int:
    """Parse a size of Kubernetes or Docker, such as ``72Gi`` or ``72g``; returns bytes."""
    return parse_size("size", quantity.upper())


def flag_in(arguments: list[str]) -> dict[str, Any]:
    flag: dict[str, Any] = json.loads(arguments[arguments.index("--kv-transfer-config") + 1])
    return flag


def printed_by(file: str) -> dict[str, Any]:
    """Run the command in the head of a file; return its JSON output."""
    (command,) = re.findall(r"^# +kvoffload (vllm-config .*)$", (EXAMPLES / file).read_text(), re.M)
    done = kvoffload(*shlex.split(command))
    assert done.returncode == 0, done.stderr
    printed: dict[str, Any] = json.loads(done.stdout)
    return printed


def options_in(flag: dict[str, Any]) -> VLLMOptions:
    return parse_options(flag["kv_connector_extra_config"])


def test_the_table_of_ram_equals_the_tools_output() -> None:
    done = subprocess.run([sys.executable, ROOT / "tools" / "ram_table.py"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout in (ROOT / "docs" / "start-vllm.md").read_text()


def test_kubernetes_has_room_for_the_pool() -> None:
    service, engine = kubernetes_objects()
    pod = engine["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    flag = flag_in(container["args"])
    assert flag == printed_by("kubernetes.yaml")
    options = options_in(flag)
    assert engine["spec"]["selector"]["matchLabels"] == service["spec"]["selector"]
    assert service["spec"]["selector"] == engine["spec"]["template"]["metadata"]["labels"]
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    claims = {claim["metadata"]["name"]: claim["spec"] for claim in engine["spec"]["volumeClaimTemplates"]}
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    assert set(mounts.values()) == {*volumes, *claims}
    shm = volumes[mounts["/dev/shm"]]["emptyDir"]
    assert shm["medium"] == "Memory"
    assert bytes_of(shm["sizeLimit"]) > options.ram_bytes
    assert bytes_of(container["resources"]["limits"]["memory"]) >= bytes_of(shm["sizeLimit"]) + 32 * 2**30
    (tier,) = options.tiers
    disk = Path(tier.path[0])
    room = claims[mounts[str(disk.parent)]]["resources"]["requests"]["storage"]
    assert bytes_of(room) > parse_size("capacity", tier.capacity)
    # A start without a home copies the kernels to /tmp.
    assert {entry["name"]: entry.get("value") for entry in container["env"]}["HOME"] in mounts


KUBERNETES = "1.37"
"""Version of the schemas."""


def kubernetes_objects() -> list[Any]:
    return list(yaml.safe_load_all((EXAMPLES / "kubernetes.yaml").read_text()))


def test_kubernetes_objects_fit_the_schemas() -> None:
    objects = kubernetes_objects()
    assert [each["kind"] for each in objects] == ["Service", "StatefulSet"]
    for each in objects:
        assert kubernetes_validate.validate(each, KUBERNETES, strict=True) == KUBERNETES


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("spec", "template", "spec", "containers", 0, "image"), 1),
        (("spec", "template", "spec", "volumes", 0, "emptyDir", "sizeLimits"), "72Gi"),
        (("spec", "replica"), 1),
        (("spec", "template", "spec", "containers", 0, "resources", "limit"), {}),
    ],
)
def test_the_schemas_find_mistakes(path: tuple[str | int, ...], value: object) -> None:
    engine = at = kubernetes_objects()[1]
    for step in path[:-1]:
        at = at[step]
    at[path[-1]] = value
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(engine, KUBERNETES, strict=True)


def _fields(**types: Any) -> dict[str, Any]:
    """Return the schema of an object with exactly these fields."""
    return {
        "type": "object",
        "additionalProperties": False,
        "required": list(types),
        "properties": {name: kind if isinstance(kind, dict) else {"type": kind}
                       for name, kind in types.items()},
    }  # fmt: skip


ENGINE = _fields(
    enablePrefixCaching="boolean",
    tensorParallelSize="integer",
    extraArgs={"type": "array", "items": {"type": "string"}},
)
MODEL = _fields(
    **dict.fromkeys(("name", "repository", "tag", "modelURL"), "string"),
    **dict.fromkeys(("requestMemory", "limitMemory", "shmSize"), "string"),
    **dict.fromkeys(("replicaCount", "requestCPU"), "integer"),
    requestGPU=["integer", "number", "string"],
    vllmConfig=ENGINE,
)
HELM = _fields(servingEngineSpec=_fields(modelSpec={"type": "array", "items": MODEL}))
"""Names and types of the values that the example uses, as in the schema of vllm-stack 0.1.12.

The chart's own schema is in no package and allows unknown names, so it does not find misspelt names.
"""


def helm_values() -> Any:
    return yaml.safe_load((EXAMPLES / "helm-values.yaml").read_text())


def test_helm_values_fit_the_charts_names_and_types() -> None:
    jsonschema.Draft202012Validator.check_schema(HELM)
    jsonschema.validate(helm_values(), HELM)


@pytest.mark.parametrize(
    ("name", "value"), [("requestCPU", "8"), ("shmsize", "72Gi"), ("tag", 0.32), ("replicaCount", True)]
)
def test_the_values_schema_finds_mistakes(name: str, value: object) -> None:
    values = helm_values()
    values["servingEngineSpec"]["modelSpec"][0][name] = value
    with pytest.raises(jsonschema.ValidationError, match=name):
        jsonschema.validate(values, HELM)


def test_helm_has_room_for_the_pool() -> None:
    (model,) = helm_values()["servingEngineSpec"]["modelSpec"]
    flag = flag_in(model["vllmConfig"]["extraArgs"])
    assert flag == printed_by("helm-values.yaml")
    assert bytes_of(model["shmSize"]) > options_in(flag).ram_bytes
    assert bytes_of(model["limitMemory"]) >= bytes_of(model["shmSize"]) + 32 * 2**30
    assert model["requestMemory"] == model["limitMemory"]
    # Without these the chart turns prefix caching off, and mounts no /dev/shm.
    assert model["vllmConfig"]["enablePrefixCaching"] is True
    assert model["vllmConfig"]["tensorParallelSize"] >= 1


def test_the_unit_starts_with_a_valid_flag() -> None:
    unit = configparser.ConfigParser(strict=True, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read_string(UNIT.replace("\\\n", " "))
    service = unit["Service"]
    (command,) = re.findall(r"/kvoffload (vllm-config [^)]*)\)", service["ExecStart"])
    done = kvoffload(*shlex.split(command))
    assert done.returncode == 0, done.stderr
    (tier,) = options_in(json.loads(done.stdout)).tiers
    home = Path("/var/lib")
    assert Path(tier.path[0]).parent in [home / name for name in service["StateDirectory"].split()]
    assert service["LimitMEMLOCK"] == "infinity"
    assert "$(" not in service["ExecStart"].replace("$$(", ""), "systemd reads a single $ itself"


def test_containers_get_room_for_the_pool() -> None:
    started = 0
    for page in PAGES:
        text = page.read_text().replace("\\\n", " ")
        for line in re.findall(r"^(?:docker|podman) run .*$", text, re.M):
            (shm,), (ram,) = re.findall(r"--shm-size (\w+)", line), re.findall(r"--ram (\w+)", line)
            assert bytes_of(shm) > parse_size("ram", ram), f"{page.name}: {line}"
            started += 1
    assert started >= 2


def test_every_flag_of_a_page_is_valid() -> None:
    commands = set[str]()
    for page in PAGES:
        text = page.read_text().replace("\\\n", " ")
        commands |= set(re.findall(r"\$\(kvoffload (vllm-config [^)]*)\)", text))
        commands |= set(re.findall(r"^kvoffload (vllm-config [^#\n]*)", text, re.M))
    assert len(commands) >= 8
    for command in commands:
        done = kvoffload(*shlex.split(command))
        assert done.returncode == 0, f"{command}: {done.stderr}"


def test_the_version_of_vllm_equals_cis() -> None:
    (version,) = re.findall(r"^VLLM \?= (.*)$", (ROOT / "Makefile").read_text(), re.M)
    page = (ROOT / "docs" / "start-vllm.md").read_text()
    assert set(re.findall(r"pip install vllm==([\d.]+)", page)) == {version}
    assert f"VLLM=v{version}\n" in (EXAMPLES / "Containerfile").read_text()


NEEDS = {"--report": "report", ".parquet": "parquet", "s3://": "s3", "--scheduler": "dask",
         "--tokenizer": "tokenizers", "--from kv-events:tcp": "zmq"}  # fmt: skip
"""Text in a command -> the extra that it needs."""


@pytest.mark.parametrize("page", [path for path in PAGES if path.name in ("README.md", "start-planner.md")],
                         ids=lambda path: path.name)  # fmt: skip
def test_the_install_line_is_enough_for_the_commands(page: Path) -> None:
    commands = re.findall(r"^(?:\$ )?kvoffload .*$", page.read_text(), re.M)
    needed = {extra for line in commands for mark, extra in NEEDS.items() if mark in line}
    readme = (ROOT / "README.md").read_text()
    (extras,) = re.findall(r"^pip install '?kvoffload(?:\[(.*)\])?'? ", readme, re.M)
    assert needed <= set(extras.split(","))


def test_the_first_wheel_takes_seconds() -> None:
    page = (ROOT / "docs" / "container.md").read_text()
    assert page.split("```")[1].strip().startswith("pip wheel . --no-deps -w dist ")


def test_the_readme_has_the_numbers_of_its_sources() -> None:
    readme, planner, performance = (
        (ROOT / name).read_text() for name in ("README.md", "docs/start-planner.md", "docs/performance.md")
    )
    (sentence,) = re.findall(r"It prints `(Buy [^`]*)`", readme)
    # The page continues this sentence with the sources of the saving; a slow test runs the command.
    assert sentence.rstrip(")") in " ".join(planner.split())
    times_us = re.findall(r"^\| kvoffload, (\w+) \| ([\d.]+) µs \| ([\d.]+) µs \|", readme, re.M)
    ratios = re.findall(r"^\| vLLM 0.32, (\w+) \| ([\d.]+) times .*\| ([\d.]+) times \|", readme, re.M)
    assert [policy for policy, *_ in times_us] == [policy for policy, *_ in ratios] == ["LRU", "ARC"]
    for blocks, number in (("1", 1), ("1,024", 2)):
        cells = re.findall(rf"^\| {blocks} \| (.*) \|$", performance, re.M)[0].split(" | ")
        for (_, *times), (_, *factors), measured, factor in zip(
            times_us, ratios, cells[::2], cells[1::2], strict=True
        ):
            assert factor == f"{factors[number - 1]}x"
            assert f"{float(measured):.3g}" == f"{float(times[number - 1]):.3g}"
