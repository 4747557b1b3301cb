"""Servers accept the configurations that docs/cluster.md shows."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvoffload.cli.main import cli
from kvoffload.tiers.valkey.resp import Login
from support.valkey_server import PATIENCE_S, running, valkey

PAGE = (Path(__file__).resolve().parents[2] / "docs/cluster.md").read_text()


def written(directory: Path, setting: str) -> str:
    """Write the page's code block with this setting to a file; return its path."""
    (block,) = (block for block in re.findall(r"^```\n(.*?)^```", PAGE, re.M | re.S) if setting in block)
    (path := directory / "valkey.conf").write_text(block)
    return str(path)


def test_two_nodes_of_a_cluster_start_beside_each_other(tmp_path: Path) -> None:
    """Both nodes start in one directory, as a newcomer may start them."""
    typed = [shlex.split(line) for line in re.findall(r"^valkey-server valkey.conf .*", PAGE, re.M)]
    first, second = (words[words.index("--cluster-config-file") :] for words in typed)
    options = ("--include", written(tmp_path, "cluster-enabled yes"), "--cluster-enabled", "yes")
    login = Login("", "PASSWORD")
    with running(tmp_path, *options, *first, login=login), running(
        tmp_path, *options, *second, login=login
    ) as node:  # fmt: skip
        assert b"cluster_known_nodes:1" in node.execute("CLUSTER", "INFO")


def test_a_team_has_its_namespace_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running(tmp_path, "--include", written(tmp_path, "user team-a")) as server:
        monkeypatch.setenv("KVOFFLOAD_VALKEY_USERNAME", "team-a")
        monkeypatch.setenv("KVOFFLOAD_VALKEY_PASSWORD", "PASSWORD")
        own_ping = CliRunner().invoke(cli, ["tier", "ping", f"{server.url}/team-a"])
        other_ping = CliRunner().invoke(cli, ["tier", "ping", f"{server.url}/team-b"])
    assert (own_ping.exit_code, other_ping.exit_code) == (0, 1), own_ping.output + other_ping.output
    assert "The server can be a tier." in own_ping.output
    assert "REFUSED" in other_ping.output


def test_the_lines_for_tls_are_read(tmp_path: Path) -> None:
    """The server exits after reading them, because it has no TLS or no certificate."""
    ended = subprocess.run(
        [valkey(), written(tmp_path, "tls-port")], capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert ended.returncode != 0
    assert "TLS" in ended.stdout
    assert "CONFIG FILE ERROR" not in ended.stderr
