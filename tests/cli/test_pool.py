"""`kvoffload pool`: list, inspect and remove the pools of a machine."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvoffload.cli.pool import pool as command
from kvoffload.errors import ConfigError, UnavailableError
from kvoffload.node.node_manager import NodeManager
from kvoffload.node.pool_directory import FACTS, STATE, PoolDirectory
from support.node_process import KEYS


def run(*arguments: object) -> str:
    result = CliRunner().invoke(command, [str(argument) for argument in arguments])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


class Pool:
    """A pool with 4 blocks; 3 blocks were loaded."""

    def __init__(self, root: Path) -> None:
        facts = {"model": "llama", "block_bytes": 4096}
        self.directory = PoolDirectory.join(facts, "a", keep_s=600.0, root=root, has_keeper=False)
        self.manager = NodeManager(16, directory=self.directory)
        plan = self.manager.prepare_store(KEYS[:4])
        assert plan is not None
        self.manager.complete_store(plan)
        self.manager.complete_load(self.manager.prepare_load(KEYS[:3]))
        self.name = self.directory.path.name.rsplit("-", 1)[-1]

    def close(self) -> None:
        self.manager.close()
        self.directory.close()


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Pool]:
    made = Pool(tmp_path)
    yield made
    made.directory.close()


def test_ls(pool: Pool, tmp_path: Path) -> None:
    text = run("ls", "--root", tmp_path)
    assert pool.name in text
    assert "4 of 16" in text
    assert "10 min" in text
    (report,) = json.loads(run("ls", "--root", tmp_path, "--format", "json"))
    assert (report["name"], report["blocks"], report["capacity_blocks"]) == (pool.name, 4, 16)
    assert (report["pids"], report["is_used"], report["idle_s"], report["keep_s"]) == (
        [os.getpid()],
        True,
        0,
        600,
    )
    assert (report["counts"]["stored"], report["counts"]["loaded"]) == (4, 3)
    assert report["facts"] == {"model": "llama", "block_bytes": 4096}
    assert report["bytes"] > 10_000
    assert report["problem"] == ""


def test_counts_of_closed_engines_remain(pool: Pool, tmp_path: Path) -> None:
    pool.close()
    (report,) = json.loads(run("ls", "--root", tmp_path, "--format", "json"))
    assert (report["counts"]["loaded"], report["blocks"], report["pids"]) == (3, 4, [])


def test_ls_without_pools(tmp_path: Path) -> None:
    assert run("ls", "--root", tmp_path) == f"there is no pool in {tmp_path}\n"
    assert json.loads(run("ls", "--root", tmp_path, "--format", "json")) == []
    with pytest.raises(ConfigError, match="not a directory"):
        run("ls", "--root", tmp_path / "nothing")


def test_inspect(pool: Pool, tmp_path: Path) -> None:
    text = run("inspect", pool.name, "--root", tmp_path)
    for word in ("4 of 16", "3 blocks", f"process {os.getpid()}", "10 min after the last use", "llama"):
        assert word in text
    (listed,) = json.loads(run("ls", "--root", tmp_path, "--format", "json"))
    assert json.loads(run("inspect", pool.name, "--root", tmp_path, "--format", "json")) == listed


def test_an_unknown_name(pool: Pool, tmp_path: Path) -> None:
    for action in ("inspect", "rm"):
        with pytest.raises(ConfigError, match=f"allowed: {pool.name}"):
            run(action, "other", "--root", tmp_path)


def test_rm(pool: Pool, tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match=str(os.getpid())):
        run("rm", pool.name, "--yes", "--root", tmp_path)
    assert pool.directory.path.exists()
    pool.close()
    assert "removed" in run("rm", pool.name, "--yes", "--root", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_rm_asks(pool: Pool, tmp_path: Path) -> None:
    pool.close()
    result = CliRunner().invoke(command, ["rm", pool.name, "--root", str(tmp_path)], input="n\n")
    assert result.exit_code == 1
    assert pool.directory.path.exists()


def test_a_damaged_pool(pool: Pool, tmp_path: Path) -> None:
    pool.close()
    (pool.directory.path / STATE).write_bytes(b"rubbish")
    (pool.directory.path / "facts.json").write_bytes(b"rubbish")
    (report,) = json.loads(run("ls", "--root", tmp_path, "--format", "json"))
    assert report["problem"]
    assert report["blocks"] is None
    assert "cannot be used" in run("inspect", pool.name, "--root", tmp_path)
    assert pool.name in run("ls", "--root", tmp_path)
    run("rm", pool.name, "--yes", "--root", tmp_path)


def test_a_problem_names_pool_and_file(pool: Pool, tmp_path: Path) -> None:
    pool.close()
    (pool.directory.path / FACTS).write_text("")
    text = run("ls", "--root", tmp_path)
    assert f"{pool.name} cannot be used: its file facts.json cannot be read (Expecting value" in text
    (pool.directory.path / FACTS).write_text("[]")
    assert "its file facts.json is not a JSON object" in run("inspect", pool.name, "--root", tmp_path)
