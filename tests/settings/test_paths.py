"""A leading ``~`` is the home directory, in every option with a path and on every way to set it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

import kvoffload
from kvoffload import ConfigError, DiskTier
from kvoffload.core.policy import POLICIES
from kvoffload.integrations.vllm.shared.options import parse_options
from kvoffload.settings.layers import read_file
from kvoffload.settings.paths import expanded
from kvoffload.tiers.kinds.disk import DiskOptions
from kvoffload.tiers.kinds.s3 import S3Options
from kvoffload.tiers.kinds.valkey import ValkeyOptions
from kvoffload.tiers.spec import parse_tier, parse_tiers
from support.run_cli import kvoffload as run
from support.token_engine import layout_of


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home directory, and a working directory in which no test may create ``~``."""
    (tmp_path / "home").mkdir()
    (tmp_path / "work").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "home"


@pytest.fixture(autouse=True)
def nothing_is_named_tilde(home: Path) -> Iterator[None]:
    yield
    assert not list(home.parent.glob("work/*"))


def test_expansion(home: Path) -> None:
    unchanged = ["/data/kv", "kv", "./~", "a~b", ""]
    assert [expanded("x", path) for path in unchanged] == unchanged
    assert expanded("x", "~") == str(home)
    assert expanded("x", "~/kv") == f"{home}/kv"
    assert expanded("x", "~root/kv").startswith("/")
    with pytest.raises(
        ConfigError, match=r"^x: '~nobody-here/kv' is invalid; there is no home directory ~nobody-here;"
    ):
        expanded("x", "~nobody-here/kv")


@pytest.mark.parametrize(
    "tier",
    [
        "disk:~/kv:1GiB",
        {"type": "disk", "path": "~/kv", "capacity": "1GiB"},
        {"type": "disk", "path": [Path("~/kv")], "capacity": "1GiB"},
    ],
)
def test_a_disk(home: Path, tier: str | Mapping[str, object]) -> None:
    options = parse_tier("tier", tier)
    assert isinstance(options, DiskOptions)
    assert options.path == (f"{home}/kv",)
    with pytest.raises(ConfigError, match="each once"):
        parse_tier("tier", f"disk:~/kv|{home}/kv:1GiB")


def test_a_disk_of_an_engine_and_a_disk_tier(home: Path) -> None:
    layout = layout_of()
    with kvoffload.open(model="toy", layout=layout, ram=20 * layout.block_bytes, tiers="disk:~/kv:4MiB"):
        assert (home / "kv").is_dir()
    DiskTier("~/direct", 4 << 20, 4096, key_bytes=32, fingerprint="m").close()
    assert (home / "direct").is_dir()


def test_files_of_servers_and_buckets(home: Path) -> None:
    files = {name: f"~/{name}" for name in ("password_file", "ca", "cert", "cert_key")}
    server = parse_tier("tier", {"url": "valkeys://cache:6379/team", **files})
    assert isinstance(server, ValkeyOptions)
    assert {name: getattr(server, name) for name in files} == {name: f"{home}/{name}" for name in files}
    bucket = parse_tier("tier", "s3://bucket/prefix?credentials_file=~/keys")
    assert isinstance(bucket, S3Options)
    assert bucket.credentials_file == f"{home}/keys"
    with pytest.raises(ConfigError, match=r"^tier\.ca: 5 is invalid; allowed: the path of a file"):
        parse_tier("tier", {"url": "valkeys://cache:6379/team", "ca": 5})


def test_options_of_vllm(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = parse_options({"ram": "1GiB", "record": "~/kv.jsonl,calls", "live_settings": "~/live.json"})
    assert options.record is not None
    assert (options.record.path, options.live_settings) == (f"{home}/kv.jsonl", f"{home}/live.json")
    (home / "kv.toml").write_text('ram = "1GiB"\ntiers = ["disk:~/kv:1GiB"]\nrecord = "~/kv.jsonl"\n')
    monkeypatch.setenv("KVOFFLOAD_CONFIG", "~/kv.toml")
    options = parse_options({})
    (disk,) = options.tiers
    assert (getattr(disk, "path", None), str(options.record)) == ((f"{home}/kv",), f"{home}/kv.jsonl")
    assert read_file("~/kv.toml")["ram"] == "1GiB"


def test_policies_in_a_file(home: Path) -> None:
    (home / "mine.py").write_text("from kvoffload.policies.lru import LRU as Mine\n")
    assert POLICIES.find("~/mine.py:Mine").name == "lru"
    with pytest.raises(ConfigError, match=rf"there is no file {home}/other\.py"):
        POLICIES.find("~/other.py:Mine")


def test_the_command_line(home: Path) -> None:
    """A shell does not expand the ``~`` behind ``=``."""
    done = run("trace", "generate", "chat", "--output=~/chat.jsonl", "--sessions=2")
    assert (done.returncode, done.stderr) == (0, "")
    (home / "kv.toml").write_text('policy = "sieve"\n')
    options = ("--capacity=50", "--no-data", "--config=~/kv.toml", "--format=json", "--output=~/out.json")
    done = run("replay", str(home / "chat.jsonl"), *options)
    assert done.returncode == 0, done.stderr
    assert "sieve" in json.dumps(json.loads((home / "out.json").read_text()))


def test_several_tiers_keep_their_places(home: Path) -> None:
    disks = parse_tiers("tiers", "disk:~/a|~/b:1GiB+disk:~/c:2GiB")
    assert [str(disk) for disk in disks] == [f"disk:{home}/a|{home}/b:1GiB", f"disk:{home}/c:2GiB"]
    assert [parse_tier("tier", str(disk)) for disk in disks] == [*disks]
