"""``kvoffload trace``, and names of traces."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

from kvoffload.cli.trace import trace as command
from kvoffload.errors import ConfigError, TraceError
from kvoffload.traces.sources import load_trace
from support.run_cli import kvoffload


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(command, arguments)


def test_a_generated_file_is_the_built_in_trace(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl.zst"
    result = invoke("generate", "chat", "--output", str(path))
    assert result.exit_code == 0, result.output
    assert result.output == f"{path}: 1,992 requests, 48,494 block references, 30,871 unique blocks\n"
    read, made = load_trace(path), load_trace("chat")
    assert np.array_equal(read.refs, made.refs)
    assert (read.name, made.name) == ("mine", "chat")


def test_parameters_are_options(tmp_path: Path) -> None:
    path = tmp_path / "few.jsonl"
    options = ["--sessions", "5", "--turns", "1", "--first-tokens", "1000", "0", "--seed", "4"]
    assert invoke("generate", "chat", "--output", str(path), *options).exit_code == 0
    trace = load_trace(path)
    assert trace.requests == 5
    assert set(np.diff(trace.offsets).tolist()) == {3}
    assert "think-time-s MEDIAN SIGMA" in invoke("generate", "--help").output
    assert "seed of the random numbers" in invoke("generate", "--help").output


def test_an_existing_file_is_kept_unless_forced(tmp_path: Path) -> None:
    path = tmp_path / "precious.jsonl"
    path.write_text("precious")
    arguments = ("generate", "rag", "--sessions", "3", "--output", str(path))
    error = invoke(*arguments).exception
    assert isinstance(error, ConfigError)
    assert str(error) == f"output: {str(path)!r} is invalid; the file exists; --force replaces it"
    assert path.read_text() == "precious"
    assert invoke(*arguments, "--force").exit_code == 0
    assert load_trace(path).requests >= 3


def test_a_full_disk_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "precious.jsonl"
    path.write_text("precious")
    lines: list[object] = []

    def encode(line: object) -> bytes:
        lines.append(line)
        if len(lines) == 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        return b"{}"

    monkeypatch.setattr("kvoffload.traces.formats.mooncake.encode_line", encode)
    error = invoke("generate", "rag", "--sessions", "3", "--output", str(path), "--force").exception
    assert str(error).endswith("the file cannot be written (No space left on device)")
    assert path.read_text() == "precious"
    assert [file.name for file in tmp_path.iterdir()] == ["precious.jsonl"]


def test_a_device_is_written_and_not_replaced(tmp_path: Path) -> None:
    assert invoke("generate", "rag", "--sessions", "3", "--output", os.devnull, "--force").exit_code == 0
    assert not Path(os.devnull).is_file()
    link = tmp_path / "link.jsonl"
    link.symlink_to(tmp_path / "target.jsonl")
    assert invoke("generate", "rag", "--sessions", "3", "--output", str(link)).exit_code == 0
    assert link.is_symlink()
    assert load_trace(link).requests >= 3


def test_an_unwritable_path_is_one_error(tmp_path: Path) -> None:
    error = invoke(
        "generate", "rag", "--sessions", "1", "--output", str(tmp_path / "no" / "x.jsonl")
    ).exception
    assert isinstance(error, ConfigError)
    assert str(error).endswith("is invalid; the file cannot be written (No such file or directory)")


@pytest.mark.slow
def test_info_as_json() -> None:
    result = invoke("info", "chat", "--format", "json")
    assert result.exit_code == 0, result.output
    info = json.loads(result.output)
    assert info["trace"] == "chat"
    assert info["block_refs"] == 48_494
    assert list(info["reuse_time_s"]) == ["p10", "p25", "p50", "p75", "p90", "p99"]
    assert [row["capacity_percent"] for row in info["optimum"]] == [1, 2, 5, 10, 20, None]
    assert info["optimum"][-1]["prefix_hit_blocks"] == 48_494 - info["unique_blocks"]
    for row in info["optimum"]:
        assert 0 < row["lru_prefix_hit_ratio"] <= row["prefix_hit_ratio"]
    assert info["optimum"][2]["lru_prefix_hit_ratio"] == pytest.approx(0.1336, abs=0.0001)
    assert info["ceiling"] == info["optimum"][-1]["prefix_hit_ratio"]
    assert sum(period["new_blocks"] for period in info["working_set"]) == info["unique_blocks"]
    assert next(iter(info["resembles"].items())) == ("chat", 1.0)


def test_info_as_text(tmp_path: Path) -> None:
    path = tmp_path / "two.jsonl"
    request = '{"timestamp": 0, "input_length": 1024, "output_length": 5, "hash_ids": [1, 2]}\n'
    path.write_text(request * 2 + "bad\n")
    assert isinstance(invoke("info", str(path)).exception, TraceError)
    output = invoke("info", str(path), "--skip-bad-lines", "--quiet").output
    assert "trace two" in output
    assert "skipped lines" in output
    assert "no limit" in output
    assert "LRU equals the optimum at every size above" in output
    assert "0.5000" in output


def test_an_unknown_trace_is_refused() -> None:
    with pytest.raises(ConfigError) as error:
        load_trace("no-such-trace")
    assert (
        str(error.value)
        == "trace: 'no-such-trace' is invalid; there is no such file; allowed: a file, - (standard "
        "input), or one of: agent, chat, rag"
    )
    with pytest.raises(ConfigError, match="block_tokens: 0 is invalid"):
        load_trace("chat", block_tokens=0)
    with pytest.raises(ConfigError, match="block_tokens: 0 is invalid"):
        load_trace(__file__, block_tokens=0)


def test_a_built_in_trace_has_the_requested_block_size() -> None:
    assert load_trace("rag", block_tokens=256).block_refs == pytest.approx(
        2 * load_trace("rag").block_refs, rel=0.1
    )


def test_a_trace_goes_through_a_pipe() -> None:
    """The target of /dev/stdout is no path then."""
    done = subprocess.run(
        [sys.executable, "-c", "from kvoffload.cli.main import main; main()",
         "trace", "generate", "chat", "--sessions", "3", "--output", "/dev/stdout"],
        capture_output=True, text=True, check=False,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert all("hash_ids" in json.loads(line) for line in done.stdout.splitlines())
    assert done.stderr.startswith("/dev/stdout: ")


def test_a_dash_is_no_output_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = kvoffload("trace", "generate", "chat", "--sessions", "3", "--output", "-")
    assert done.returncode == 2
    assert "output: '-' is invalid; allowed: the path of a file, or /dev/stdout" in done.stderr
    assert not [*tmp_path.iterdir()]
