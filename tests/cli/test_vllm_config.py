"""``kvoffload vllm-config``: the printed option is valid for vLLM's plug-in."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from kvoffload.cli.vllm_config import vllm_config
from kvoffload.errors import ConfigError
from kvoffload.integrations.vllm.scheduler_side.live_settings import LiveOptions
from kvoffload.integrations.vllm.shared.options import parse_options
from support.run_cli import kvoffload

HOME = "kvoffload.integrations.vllm"


def printed(*arguments: str) -> dict[str, Any]:
    done = CliRunner().invoke(vllm_config, arguments)
    assert done.exit_code == 0, done.output
    flag, value = shlex.split(done.stdout)
    assert flag == "--kv-transfer-config"
    config: dict[str, Any] = json.loads(value)
    as_json = CliRunner().invoke(vllm_config, [*arguments, "--format", "json"])
    assert json.loads(as_json.stdout) == config
    return config


def test_the_shortest_command() -> None:
    assert printed("--ram", "64GiB") == {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "spec_name": "KVOffloadSpec",
            "spec_module_path": HOME,
            "cpu_bytes_to_use": "64GiB",
        },
    }


def test_all_options_together() -> None:
    given = "--ram 1GiB --policy hazard --admission reuse:2 --store on-compute --verify always"
    flag = printed(*given.split(), "--all-tokens", "--blocks-per-chunk", "3", "--connector")
    assert (flag["kv_connector"], flag["kv_connector_module_path"]) == (
        "KVOffloadConnector",
        f"{HOME}.connector",
    )
    options = parse_options(flag["kv_connector_extra_config"])
    assert (options.ram_bytes, options.policy, options.admission) == (2**30, "hazard", "reuse:2")
    assert (options.store, options.verify, options.prompt_only) == ("on-compute", "always", False)
    assert options.blocks_per_chunk == 3


def test_limits_of_waits_and_recordings() -> None:
    given = "--ram 1GiB --tier-deadline-s 0.5 --recompute-tokens-per-s 8000 --record /var/log/kv.jsonl"
    flag = printed(*given.split(), "--record-max-bytes", "10GiB")
    assert flag["kv_connector"] == "KVOffloadConnector"
    options = parse_options(flag["kv_connector_extra_config"])
    assert (options.tier_deadline_s, options.recompute_tokens_per_s) == (0.5, 8_000)
    assert (str(options.record), options.record_max_bytes) == ("/var/log/kv.jsonl", 10 * 2**30)
    done = kvoffload("vllm-config", "--ram", "1GiB", "--record-max-bytes", "much")
    assert done.stderr.startswith("kvoffload: --record-max-bytes: 'much' is invalid; allowed: ")


def test_every_option_of_the_page_has_a_flag() -> None:
    """Each option in the table of docs/vllm.md has a flag of the command."""
    page = (Path(__file__).resolve().parents[2] / "docs/vllm.md").read_text()
    (table,) = re.findall(r"^\| ours \|.*\n\|-.*\n((?:\|.*\n)+)", page, re.M)
    options = re.findall(r"^\| `(\w+)` \|", table, re.M)
    assert set(options) >= {"ram", "tiers", "tier_deadline_s", "record_max_bytes"}
    flags = {flag for option in vllm_config.params for flag in option.opts}
    names = {"prompt_only": "all_tokens"}
    assert {f"--{names.get(name, name).replace('_', '-')}" for name in options} <= flags


def test_an_audit() -> None:
    flag = printed("--ram", "1GiB", "--audit", "share=0.01,first=8")
    audit = parse_options(flag["kv_connector_extra_config"]).audit
    assert audit is not None
    assert (audit.share, audit.first, audit.on_difference) == (0.01, 8, "drop")
    done = kvoffload("vllm-config", "--ram", "1GiB", "--audit", "share=2")
    assert done.returncode == 2
    assert "--audit share: '2' is invalid; allowed: a number from 0.0 to 1.0" in done.stderr


def test_storing_on_device_eviction_selects_our_connector() -> None:
    flag = printed("--ram", "1GiB", "--store", "on-device-eviction")
    assert flag["kv_connector"] == "KVOffloadConnector"
    assert flag["kv_connector_extra_config"]["store"] == "on-device-eviction"


def test_a_path_with_a_quote_survives_the_shell() -> None:
    done = CliRunner().invoke(vllm_config, ["--ram", "1GiB", "--policy", "/it's not here.py:X"])
    assert isinstance(done.exception, ConfigError)
    assert "there is no file /it's not here.py" in str(done.exception)


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (["--ram", "x"], "--ram: 'x'"),
        (["--policy", "lruu"], "did you mean lru?"),
        (
            ["--ram", "1GiB,shared=node", "--policy", "examples/my_policy.py:MyPolicy"],
            "--policy: 'examples/my_policy.py:MyPolicy' is invalid; a policy in Python cannot be shared",
        ),
        (["--ram", "64"], "ram: '64' is invalid; allowed: a size such as 64GiB"),
        (
            ["--tier", "disk:relative/kv:1TiB"],
            "--tier[0].path: 'relative/kv' is invalid; allowed: an abso",
        ),
        (
            ["--tier", "disk:/kv:1TiB", "--tiers", "disk:/x/../kv:2TiB"],
            "--tier[1].path: '/x/../kv' is inval",
        ),
        (["--store", "on-device-eviction", "--blocks-per-chunk", "4"], "--blocks-per-chunk: 4 is invalid"),
        (["--audit", "share=0.5,share=0.1"], "--audit share: '0.1' is invalid; it is given twice"),
        (["--ram", "64GiB,size=2GiB"], "--ram size: '2GiB' is invalid; it is given twice"),
        (["--tenants", "\udcff"], "--tenants: '\\udcff' is invalid"),
        (["--tenants", "[" * 100_000], "--tenants: '[["),
        (["--what-if", "[" * 100_000], "--what-if: '[["),
    ],
)
def test_invalid_options_print_no_configuration(bad: list[str], reason: str) -> None:
    done = CliRunner().invoke(vllm_config, ["--ram", "1GiB", *bad])
    assert isinstance(done.exception, ConfigError)
    assert reason in str(done.exception)
    assert not done.stdout


def test_a_tier_behind_ram() -> None:
    flag = printed("--ram", "1GiB", "--tier", "disk:/nvme/kv:1TiB,policy=arc", "--tier", "disk:/hdd:2TiB")
    assert flag["kv_connector_extra_config"]["tiers"] == [
        "disk:/nvme/kv:1TiB,policy=arc",
        "disk:/hdd:2TiB",
    ]
    done = CliRunner().invoke(vllm_config, ["--ram", "1GiB", "--tier", "tape:/x:1TiB"])
    assert "--tier[0].type: 'tape'" in str(done.exception)


def test_a_server_behind_ram() -> None:
    url = "valkeys://cache:6379/team-a?ttl=7d&ca=/etc/kv/ca.pem"
    extra = printed("--ram", "64GiB", "--tier", "disk:/nvme/kv:1TiB", "--tier", url)[
        "kv_connector_extra_config"
    ]
    assert extra["tiers"] == ["disk:/nvme/kv:1TiB", url]
    assert [tier.name for tier in parse_options(extra).tiers] == ["disk", "valkey"]
    bucket = "s3://kv-cache/team-a?region=eu-1&pack=8MiB"
    extra = printed("--ram", "64GiB", "--tier", bucket)["kv_connector_extra_config"]
    assert extra["tiers"] == [bucket]
    assert [tier.name for tier in parse_options(extra).tiers] == ["s3"]
    done = CliRunner().invoke(vllm_config, ["--ram", "64GiB", "--tier", "valkey://me:hunter2@cache/team-a"])
    assert isinstance(done.exception, ConfigError)
    assert "hunter2" not in f"{done.output} {done.exception}"
    assert "valkey://***@cache/team-a" in str(done.exception)


def test_problems_name_options_as_they_were_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = kvoffload("vllm-config", "--ram", "0", "--policy", "lfru", "--tier", "disk:/x")
    assert [line.split(" is invalid")[0] for line in done.stderr.splitlines()] == [
        "kvoffload: vllm-config:", "  --ram: '0'", "  --policy: 'lfru'", "  --tier[0]: 'disk:/x'",
    ]  # fmt: skip
    file = tmp_path / "kvoffload.toml"
    file.write_text('policy = "lfru"\n')
    done = kvoffload("vllm-config", "--ram", "4GiB", "--config", str(file))
    assert done.stderr.startswith(f"kvoffload: {file}: policy: 'lfru' is invalid")
    monkeypatch.setenv("KVOFFLOAD_POLICY", "lfru")
    done = kvoffload("vllm-config", "--ram", "4GiB")
    assert done.stderr.startswith("kvoffload: KVOFFLOAD_POLICY: 'lfru' is invalid")


@pytest.mark.parametrize(
    ("variables", "file"),
    [
        ({}, 'ram = "1GiB"\nadmission = "reuse:2"\nmax_tracker_size = 77'),
        ({}, 'ram = {size = "2GiB", shared = "node", keep = "1h"}\nverify = "always"'),
        ({"ADMISSION": "reuse:4", "MAX_TRACKER_SIZE": "9"}, 'ram = 1073741824\npolicy = "arc"'),
        ({"STORE_THRESHOLD": "2"}, 'ram = "1GiB"\nadmission = "worth"'),
        ({"MAX_TRACKER_SIZE": "9", "POLICY": "arc"}, 'ram = "1GiB"\nadmission = "reuse:4"\npolicy = "lfu"'),
        (
            {"RAM": "3GiB", "TIERS": "disk:/a:5GiB"},
            'ram = "1GiB"\ntiers = ["disk:/b:9GiB"]\nprompt_only = false',
        ),
    ],
)
def test_the_flag_has_the_options_that_an_engine_would_read(
    variables: dict[str, str], file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The printed options of environment and file equal those of an engine with this environment and file."""
    path = tmp_path / "kvoffload.toml"
    path.write_text(file)
    with monkeypatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(f"KVOFFLOAD_{name}", value)
        extra = printed("--config", str(path))["kv_connector_extra_config"]
        expected = parse_options({"config": str(path)})
    assert parse_options(extra) == expected


@pytest.mark.parametrize(("name", "meant"), [("POLCY", "POLICY"), ("TIER", "TIERS"), ("RECORDS", "RECORD")])
def test_a_misspelt_variable_is_refused(name: str, meant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"KVOFFLOAD_{name}", "secret")
    done = kvoffload("vllm-config", "--ram", "4GiB")
    assert done.returncode == 2
    assert f"KVOFFLOAD_{name}' is invalid; no option; did you mean KVOFFLOAD_{meant}?" in done.stderr
    assert "secret" not in done.stderr


@pytest.mark.parametrize(
    ("sizes", "warning"),
    [
        (("999TiB",), "ram: 999 TiB is more than 64 TiB, and hosts have less: is the unit right?"),
        (
            ("1GiB", "disk:/nvme:1MiB"),
            "tiers: disk:/nvme:1MiB is smaller than the RAM of 1 GiB before it, and saves little",
        ),
        (
            ("1GiB", "disk:/nvme:2GiB", "disk:/hdd:1.5GiB"),
            "tiers: disk:/hdd:1.5GiB is smaller than the tier disk:/nvme:2GiB before it, and saves little",
        ),
        (("64TiB",), None),
        (("1GiB", "disk:/nvme:1GiB"), None),
    ],
)
def test_sizes_with_a_wrong_unit_give_a_warning(sizes: tuple[str, ...], warning: str | None) -> None:
    """Regression: 999 TiB of RAM, and 1 MiB of disk behind 1 GiB of RAM, gave no warning."""
    ram, *tiers = sizes
    done = CliRunner().invoke(
        vllm_config, ["--ram", ram, *(word for tier in tiers for word in ("--tier", tier))]
    )
    assert done.exit_code == 0, done.output
    assert done.stderr == ("" if warning is None else f"kvoffload: {warning}\n")
    assert "--kv-transfer-config" in done.stdout


def test_the_help_names_the_live_settings() -> None:
    words = " ".join(CliRunner().invoke(vllm_config, ["--help"]).output.split())
    assert f"engine takes: {', '.join(field.name for field in fields(LiveOptions))}." in words
