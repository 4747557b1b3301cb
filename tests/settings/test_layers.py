"""Options have one name and one grammar in arguments, the environment and a file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvoffload.errors import CombinedConfigError, ConfigError
from kvoffload.integrations.vllm.shared.options import VLLMOptions, parse_options
from kvoffload.settings.layers import gathered
from kvoffload.settings.ram import RamOptions
from kvoffload.settings.read import convert, possible_values, read_options
from kvoffload.tiers.kinds.disk import DiskOptions
from support.run_cli import kvoffload

FILE = """
ram = "2GiB"
policy = "s3fifo,small_share=0.2"
store = "on-compute"
[[tiers]]
type = "disk"
path = "/ssd/kv"
capacity = "500GiB"
policy = "arc"
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "kvoffload.toml"
    path.write_text(FILE)
    return path


def test_arguments_override_the_environment_and_the_environment_the_file(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVOFFLOAD_CONFIG", str(file))
    monkeypatch.setenv("KVOFFLOAD_POLICY", "lirs")
    monkeypatch.setenv("KVOFFLOAD_PROMPT_ONLY", "false")
    options = parse_options({"ram": "1GiB"})
    assert (options.ram_bytes, options.policy, options.prompt_only) == (1 << 30, "lirs", False)
    assert options.tiers == (DiskOptions(path=("/ssd/kv",), capacity="500GiB", policy="arc"),)
    assert parse_options({"cpu_bytes_to_use": 4096, "eviction_policy": "arc"}).policy == "arc"
    monkeypatch.delenv("KVOFFLOAD_POLICY")
    assert parse_options({}).policy == "s3fifo,small_share=0.2"
    assert parse_options({}).ram_bytes == 2 << 30


def test_the_option_names_a_file(file: Path) -> None:
    assert parse_options({"config": str(file)}) == VLLMOptions(
        RamOptions(2 << 30),
        "s3fifo,small_share=0.2",
        tiers=(DiskOptions(path=("/ssd/kv",), capacity="500GiB", policy="arc"),),
    )


def test_tiers_in_the_environment_are_a_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVOFFLOAD_TIERS", "disk:/a:1TiB,policy=hazard,write_cost=0.5+disk:/b:2TiB")
    first, second = parse_options({"ram": 1}).tiers
    assert (first.policy, second.capacity) == ("hazard,write_cost=0.5", "2TiB")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("policy = ", "config: '{path}' is invalid; it is not a TOML file"),
        (
            "polcy = 'lru'",
            "config polcy: 'lru' is invalid; there is no such option (did you mean policy?)",
        ),
        (None, "config: '{path}' is invalid; it cannot be read (No such file or directory)"),
    ],
)
def test_invalid_files_are_refused(tmp_path: Path, text: str | None, problem: str) -> None:
    path = tmp_path / "options.toml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        gathered({"config": str(path)}, ["policy"])
    assert str(caught.value).startswith(problem.format(path=path))


def test_commands_take_their_defaults_from_file_and_environment(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = kvoffload("vllm-config", "--config", file, "--format", "json")
    assert done.returncode == 0, done.stderr
    extra = json.loads(done.stdout)["kv_connector_extra_config"]
    assert extra["cpu_bytes_to_use"] == "2GiB"
    assert extra["eviction_policy"] == "s3fifo,small_share=0.2"
    assert extra["tiers"] == ["disk:/ssd/kv:500GiB,policy=arc"]
    monkeypatch.setenv("KVOFFLOAD_POLICY", "sieve")
    monkeypatch.setenv("KVOFFLOAD_RAM", "40")
    arguments = ("replay", "agent", "--no-data", "--quiet", "--format", "json")
    report = json.loads(kvoffload(*arguments).stdout)
    assert (report["policy"], report["capacity_blocks"]) == ("sieve", 40)
    assert json.loads(kvoffload(*arguments, "--policy", "fifo").stdout)["policy"] == "fifo"


def test_all_problems_are_reported_at_once() -> None:
    with pytest.raises(CombinedConfigError) as caught:
        read_options(
            VLLMOptions, {"polcy": 1, "verify": "allways", "tiers": ["disk:/x:5", {"type": "disk"}]}, "all"
        )
    assert [problem.field for problem in caught.value.problems] == [
        "polcy",
        "ram",
        "verify",
        "tiers[1].capacity",
        "tiers[1].path",
    ]
    assert "did you mean always?" in str(caught.value)


def test_invalid_values_are_refused_with_the_allowed_ones() -> None:
    assert convert("n", "3", int) == 3
    assert convert("n", "3", int | None) == 3
    with pytest.raises(ConfigError, match="n: 'three' is invalid; allowed: a whole number"):
        convert("n", "three", int)
    assert possible_values(int | None) == "a whole number"
    assert possible_values(bool) == "true, false"


def test_options_that_belong_together_come_from_one_layer(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVOFFLOAD_ADMISSION", "tinylfu")
    assert parse_options({"ram": 1, "store_threshold": 2}).admission == "reuse:2"
    file.write_text("store_threshold = 3\nmax_tracker_size = 77\n")
    assert parse_options({"ram": 1, "config": str(file)}).admission == "tinylfu"
    monkeypatch.delenv("KVOFFLOAD_ADMISSION")
    assert parse_options({"ram": 1, "config": str(file)}).admission == "reuse:3,max_tracker_size=77"
    monkeypatch.setenv("KVOFFLOAD_POLICY", "arc")
    assert parse_options({"ram": 1, "policy": None}).policy == "arc"


def test_options_that_vllm_reads_itself_are_refused_in_a_file(file: Path) -> None:
    file.write_text("blocks_per_chunk = 4\n")
    with pytest.raises(ConfigError, match="config blocks_per_chunk: 4 is invalid"):
        parse_options({"ram": 1, "config": str(file)})


def test_the_flag_has_the_options_of_file_and_environment(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.write_text('verify = "always"\nprompt_only = false\n')
    monkeypatch.setenv("KVOFFLOAD_TIER_DEADLINE_S", "5")
    done = kvoffload("vllm-config", "--ram", "1GiB", "--config", file, "--format", "json")
    extra = json.loads(done.stdout)["kv_connector_extra_config"]
    assert (extra["verify"], extra["prompt_only"], extra["tier_deadline_s"]) == ("always", False, "5")


def test_no_tiers_and_several_wrong_tiers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVOFFLOAD_TIERS", "none")
    assert parse_options({"ram": 1}).tiers == ()
    with pytest.raises(CombinedConfigError) as caught:
        parse_options({"ram": 1, "tiers": ["disk:5GiB", {"type": "tape"}, "simulated:5GiB"]})
    assert [problem.field for problem in caught.value.problems] == ["tiers[0].path", "tiers[1].type"]
    with pytest.raises(CombinedConfigError, match="keeps no blocks"):
        parse_options({"ram": 1, "tiers": ["simulated:5GiB"]})
    with pytest.raises(CombinedConfigError, match="policy is given twice"):
        parse_options({"ram": 1, "tiers": ["disk:/a:5GiB,policy=lru,policy=arc"]})
    with pytest.raises(CombinedConfigError, match=r"without \| and , in their names"):
        parse_options({"ram": 1, "tiers": [{"type": "disk", "path": "/a|b", "capacity": "1GiB"}]})


def test_a_file_that_is_no_text(file: Path) -> None:
    file.write_bytes(b"policy = '\xff'")
    with pytest.raises(ConfigError, match="it is not a TOML file"):
        gathered({"config": str(file)}, ["policy"])
    with pytest.raises(ConfigError, match="allowed: the path of a TOML file"):
        gathered({"config": 5}, ["policy"])
