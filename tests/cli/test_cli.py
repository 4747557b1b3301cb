"""Output and exit codes of the command line.

Commands run in this process, because the import of numba takes two seconds. Tests that need a separate
process are at the end.
"""

from __future__ import annotations

import errno
import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvoffload.cli.main import main
from kvoffload.cli.output import plain_text, terminal_table
from kvoffload.core.policy import POLICIES
from kvoffload.pages.page import Table
from kvoffload.tiering.tiered_manager import TieredManager
from support.run_cli import Done, kvoffload

SMALL = ("--capacity", "200", "--block-bytes", "4KiB", "--quiet")


@pytest.fixture(scope="module")
def trace_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("traces") / "small.jsonl.gz"
    done = kvoffload("trace", "generate", "chat", "--sessions", "60", "--output", path)
    assert done.returncode == 0, done.stderr
    return path


def test_replay_prints_a_table(trace_file: Path) -> None:
    done = kvoffload("replay", trace_file, *SMALL)
    assert done.returncode == 0, done.stderr
    for words in ("offload tier", "computed", "stored", "evicted", "refused",
                  "loaded and verified", "mismatches served", "of the prefill work is saved"):  # fmt: skip
        assert words in done.stdout, words


def test_a_tier_that_never_answers_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TieredManager, "settle", lambda manager, timeout_s: False)
    done = kvoffload("replay", "rag", "--no-data", "--tier", "simulated:20%", "--quiet")
    assert done.returncode == 2
    assert done.stderr == "kvoffload: a tier has not answered for 600 s; is it overloaded or unreachable?\n"


class _Closed(io.StringIO):
    """A pipe without a reader."""

    def write(self, text: str) -> int:
        raise BrokenPipeError


def test_a_closed_pipe_is_no_failed_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["kvoffload", "policies"])
    monkeypatch.setattr(sys, "stdout", _Closed())
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 141


@pytest.mark.parametrize(
    "arguments", [["metrics", "--rules"], ["--help"], ["metrics", "--help"], ["--version"]]
)
def test_the_exit_code_of_a_closed_pipe_is_141(monkeypatch: pytest.MonkeyPatch, arguments: list[str]) -> None:
    """Click ends with code 1 if the error has a number, as the system's error has. 1 means a failed check."""
    reader, writer = os.pipe()
    os.close(reader)
    monkeypatch.setattr(sys, "argv", ["kvoffload", *arguments])
    with open(writer, "wb", buffering=0) as closed:
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(closed, "utf-8", write_through=True))
        with pytest.raises(SystemExit) as end:
            main()
    assert end.value.code == 141


def test_an_interrupt_in_a_callback_is_not_reported_as_another_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """During a compilation Python drops the interrupt, and numba finds that the compilation gave nothing."""

    class Callback:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGINT)

    def compiling(*_: object) -> None:
        callback = Callback()
        del callback  # raises the interrupt, which Python drops
        raise RuntimeError("no compiled object yet")

    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)
    monkeypatch.setattr("kvoffload.cli.pool.pools", compiling)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores SIGINT
    try:
        done = kvoffload("pool", "ls")
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert done.returncode == 130
    assert done.stderr.endswith("kvoffload: interrupted\n")


def test_replay_prints_one_json_object(trace_file: Path) -> None:
    done = kvoffload("replay", trace_file, *SMALL, "--format", "json")
    report = json.loads(done.stdout)
    assert report["trace"] == "small"
    assert report["capacity_blocks"] == 200
    assert report["blocks_verified"] == report["offload_hit_blocks"] > 0
    assert report["mismatches_served"] == 0


def test_reports_are_written_to_files(trace_file: Path, tmp_path: Path) -> None:
    report, table, log = tmp_path / "r.json", tmp_path / "r.txt", tmp_path / "d.txt"
    kvoffload("replay", trace_file, *SMALL, "--format", "json", "--output", report, "--decisions", log)
    done = kvoffload("replay", trace_file, *SMALL, "--output", table)
    assert done.stdout == ""
    assert "offload tier" in table.read_text()
    digest = json.loads(report.read_text())["decisions_sha256"]
    summed = subprocess.run(["sha256sum", log], capture_output=True, text=True, check=True)
    assert summed.stdout.split()[0] == digest


def run_with_output(command: str, trace_file: Path, option: str, file: Path, *extra: str) -> Done:
    """Run a command of `COMMANDS_WITH_OUTPUT` with little work."""
    arguments: dict[str, tuple[str | Path, ...]] = {
        "replay": (trace_file, "--no-data"),
        "simulate": (trace_file, "--bytes-per-token", "64KiB", "--capacity", "200"),
        "explain": (trace_file, "--no-capacities"),
        "metrics": ("--rules",),
        "trace generate": ("chat", "--sessions", "2"),
        "sweep": (trace_file, "--capacities", "50", "--policies", "lru", "--jobs", "1"),
    }
    return kvoffload(*command.split(), *arguments[command], option, file, *extra)


COMMANDS_WITH_OUTPUT = [
    ("replay", "--output", "report.txt"),
    ("replay", "--decisions", "decisions.txt"),
    ("simulate", "--output", "report.txt"),
    ("explain", "--output", "report.txt"),
    ("metrics", "--output", "rules.yml"),
    ("trace generate", "--output", "trace.jsonl"),
    ("sweep", "--output", "rows.csv"),
]


@pytest.mark.parametrize(("command", "option", "name"), COMMANDS_WITH_OUTPUT)
def test_only_force_replaces_a_file(
    trace_file: Path, tmp_path: Path, command: str, option: str, name: str
) -> None:
    file = tmp_path / name
    file.write_text("precious")
    refused = run_with_output(command, trace_file, option, file)
    why = "the file exists; --force replaces it"
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr == f"kvoffload: {option[2:]}: {str(file)!r} is invalid; {why}\n"
    assert file.read_text() == "precious"
    forced = run_with_output(command, trace_file, option, file, "--force")
    assert forced.returncode == 0, forced.stderr
    assert file.read_text() not in ("", "precious")


@pytest.mark.parametrize(("command", "option", "name"), COMMANDS_WITH_OUTPUT)
def test_an_empty_file_is_replaced_without_force(
    trace_file: Path, tmp_path: Path, command: str, option: str, name: str
) -> None:
    """``--output $(mktemp)`` works."""
    file = tmp_path / name
    file.touch()
    done = run_with_output(command, trace_file, option, file)
    assert done.returncode == 0, done.stderr
    assert file.read_text()


def test_a_forced_output_survives_a_command_that_fails(trace_file: Path, tmp_path: Path) -> None:
    """A file is replaced only after the command succeeds, and no temporary file remains."""
    old, new = tmp_path / "old.txt", tmp_path / "new.txt"
    old.write_text("precious")
    for file in (old, new):
        done = kvoffload("explain", trace_file, "--request", "999999", "--output", file, "--force")
        assert (done.returncode, "request: 999999 is invalid" in done.stderr) == (2, True)
    assert (old.read_text(), new.exists()) == ("precious", False)
    done = kvoffload("replay", trace_file, "--output", tmp_path)
    assert (
        done.stderr
        == f"kvoffload: output: {str(tmp_path)!r} is invalid; allowed: a regular file, or a new one\n"
    )


def test_an_assumed_speed_is_reported(trace_file: Path) -> None:
    speed = ("--decode-tokens-per-s", "62.5")
    done = kvoffload("replay", trace_file, *SMALL, *speed)
    assert "Requests end when 62.5 tokens/s have generated their answers: assumed." in done.stdout
    usual, late = (
        json.loads(kvoffload("replay", trace_file, *SMALL, *options, "--format", "json").stdout)
        for options in ((), speed)
    )
    assert (usual["decode_tokens_per_s"], late["decode_tokens_per_s"]) == (0.0, 62.5)
    assert usual["decisions_sha256"] != late["decisions_sha256"]
    assert "Requests end" not in kvoffload("replay", trace_file, *SMALL).stdout


def test_a_narrow_terminal_cuts_nothing_off(trace_file: Path) -> None:
    """Regression: at 40 columns, numbers of the table and ends of sentences were missing."""
    wide, narrow = (kvoffload("replay", trace_file, *SMALL, columns=columns).stdout for columns in (120, 40))
    assert max(map(len, narrow.splitlines())) <= 40
    words = [word.rstrip(";:,") for word in narrow.split()]
    shortened = ("CPU time", "────", "Source of blocks", "Offload tier ")
    for line in wide.splitlines():
        if not any(mark in line for mark in shortened):
            assert {word.rstrip(":,") for word in line.split()} <= set(words), line
    assert "  offload tier (lru, all, 200 blocks)\n    blocks: " in narrow


def test_a_table_as_a_list() -> None:
    headings = ("", "RAM#", "use, or why infeasible")
    rows = [("*", "64 GiB", "lru, on-compute"), ("", "1 TiB", ""), ("", "2 TiB", "too large " * 3)]
    shown = plain_text(terminal_table(Table("", headings, rows)), 30)
    assert shown.decode().splitlines() == [
        "  * RAM 64 GiB",
        "    use, or why infeasible:",
        "    lru, on-compute",
        "  RAM 1 TiB",
        "  RAM 2 TiB",
        "    use, or why infeasible:",
        "    too large too large too",
        "    large",
        "",
    ]
    numbers = Table("title", ("capacity#", "ratio#"), [("1%", "0.05" * 10)])
    assert plain_text(terminal_table(numbers), 40).decode().splitlines()[:2] == ["title", "  capacity 1%"]


def test_bytes_of_a_token_below_1_kib_give_one_warning(trace_file: Path) -> None:
    options = (*SMALL, "--no-data", "--bytes-per-token")
    warning = "kvoffload: bytes-per-token: 128 B is less than 1 KiB, and models have more: is it 128KiB?\n"
    assert kvoffload("replay", trace_file, *options, "128").stderr == warning
    assert kvoffload("replay", trace_file, *options, "1KiB").stderr == ""
    swept = kvoffload("sweep", trace_file, "--policies", "lru", "--capacities", "64MiB", *options[-1:], "128")
    assert swept.stderr.count(warning) == 1


def test_injected_damage_is_in_the_report(trace_file: Path) -> None:
    arguments = ("--capacity", "100%", "--inject", "bitflip:0.05", "--seed", "3", "--format", "json")
    done = kvoffload("replay", trace_file, "--block-bytes", "4KiB", *arguments)
    report = json.loads(done.stdout)
    assert report["damage_injected"] >= report["mismatches_caught"] > 0
    assert report["mismatches_served"] == 0
    assert done.returncode == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["/no/such/file"],
         "trace: '/no/such/file' is invalid; there is no such file; allowed: a file, - "
                           "(standard input), or one of: agent, chat, rag"),
        (["--policy", "lruu"], f"policy: 'lruu' is invalid; allowed: {', '.join(POLICIES.names())}, "
                                "module:Class, or path/to/file.py:Class (did you mean lru?)"),
        (["--policy", "nomodule:LRU"], "policy: 'nomodule:LRU' is invalid; it cannot be imported: "
                                       "No module named 'nomodule'"),
        (["--policy", "json:loads"], "policy: 'json:loads' is invalid; it must be a subclass of "
                                     "EvictionPolicy"),
        (["--admission", "reuse:0"], "admission: 'reuse:0' is invalid; store_threshold: allowed: a "
                                     "whole number from 1 to 2147483647"),
        (["--policy", "s3fifo,small_share=2"], "policy: 's3fifo,small_share=2' is invalid; "
                                               "small_share: allowed: a number above 0 and below 1"),
        (["--policy", "s3fifo,share=2"], "policy: 's3fifo,share=2' is invalid; 'share' is unknown or "
                                         "given twice; allowed: small_share=0.1, patience=8192"),
        (["--capacity", "0"], "capacity: '0' is invalid; it is less than one block; allowed: a number of "
                              "blocks (5000), a share of the unique blocks (5%), or a size (4GiB)"),
        (["--capacity", "10B", "--bytes-per-token", "128KiB"],
         "capacity: '10B' is invalid; it is less than one block (67,108,864 B); allowed: a number of "
         "blocks (5000), a share of the unique blocks (5%), or a size (4GiB)"),
        (["--capacity", "4GiB"],
         "capacity: '4GiB' is invalid; a size needs the bytes of a token: give --model config.json, or "
         "--bytes-per-token 128KiB (Llama 3.1 8B); allowed: a number of blocks (5000), a share of the unique "
         "blocks (5%), or a size (4GiB)"),
        (["--capacity", "200%"], "capacity: '200%' is invalid; allowed: up to 100%"),
        (["--capacity", "99999999999999999999"],
         "capacity: '99999999999999999999' is invalid; it is 99,999,999,999,999,999,999 blocks; "
         "allowed: up to 1,073,741,824"),
        (["--device-blocks", "64GiB"],
         "device-blocks: '64GiB' is invalid; a size needs the bytes of a token: give --model "
         "config.json, or --bytes-per-token 128KiB (Llama 3.1 8B); allowed: 0 (none), a number of blocks "
         "(2000), a share of the unique blocks (25%), a size (4GiB), or a multiple of the tier's capacity "
         "(0.5x)"),
        (["--model", "qwen/qwen3-9b"],
         "model: 'qwen/qwen3-9b' is invalid; allowed: a config.json, a directory with one, or a model "
         "in the Hugging Face cache or of: meta-llama/llama-3.1-8b, meta-llama/llama-3.1-70b, "
         "meta-llama/llama-3.3-70b, mistralai/mistral-7b-v0.3, qwen/qwen2.5-7b, qwen/qwen2.5-72b, "
         "qwen/qwen3-8b, qwen/qwen3-32b (did you mean qwen/qwen3-8b?)"),
        (["--block-bytes", "12"], "block-bytes: 12 is invalid; allowed: a multiple of 8 bytes"),
        (["--inject", "bitflip:2"], "inject: 'bitflip:2' is invalid; allowed: KIND:PROBABILITY with KIND"
                                    " bitflip, swap, zero, torn and PROBABILITY 0 to 1"),
        (["--inject", "zero:1", "--no-data"], "inject: 'zero:1' is invalid; it needs bytes to damage: "
                                              "leave out --no-data"),
        (["--decode-tokens-per-s", "-1"],
         "decode-tokens-per-s: -1 is invalid; allowed: a number above 0"),
        (["--decode-tokens-per-s", "0"],
         "decode-tokens-per-s: 0 is invalid; allowed: a number above 0"),
        (["--no-data", "--output", "/no/such/dir/x"], "output: '/no/such/dir/x' is invalid; the file "
                                                      "cannot be written (No such file or directory)"),
    ],
)  # fmt: skip
def test_mistakes_are_one_line_and_exit_code_2(arguments: list[str], message: str) -> None:
    done = kvoffload("replay", *arguments)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"kvoffload: {message}\n")


def test_all_mistakes_of_a_command_are_reported_together() -> None:
    wrong = {"--policy": "lri", "--capacity": "5x", "--admission": "reuze", "--tiers": "tape:3:4",
             "--inject": "foo", "--model": "x", "--block-bytes": "12", "--device-blocks": "2y"}  # fmt: skip
    done = kvoffload("replay", "nosuch", *(word for pair in wrong.items() for word in pair))
    assert done.returncode == 2
    assert done.stderr.startswith("kvoffload: replay:\n")
    for name in ("trace", *(name.removeprefix("--") for name in wrong)):
        assert f"\n  {name}" in done.stderr, name
    done = kvoffload("sweep", "chat", "--policies", "lri,acr", "--admissions", "reuze", "--capacities", "x")
    assert done.stderr.count("\n  ") == 4


def test_more_memory_than_the_machine_has_is_refused(trace_file: Path) -> None:
    done = kvoffload("replay", trace_file, "--capacity", "100%", "--block-bytes", "1TiB")
    assert done.returncode == 2
    assert "are available; use a smaller" in done.stderr
    assert "--no-data" in done.stderr


def test_an_invalid_line_is_named_or_skipped(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    good = '{"timestamp": 0, "input_length": 1024, "output_length": 1, "hash_ids": [1, 2]}\n'
    path.write_text(good + '{"timestamp": 0, "input_length": "x"}\n' + good)
    done = kvoffload("replay", path, "--no-data", "--capacity", "2")
    assert done.returncode == 2
    assert "bad.jsonl:2" in done.stderr
    assert "input_length" in done.stderr
    done = kvoffload("replay", path, "--no-data", "--capacity", "2", "--skip-bad-lines", "--format", "json")
    report = json.loads(done.stdout)
    assert (report["requests"], report["skipped_lines"]) == (2, 1)


def test_a_trace_without_a_full_block_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "short.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 100, "output_length": 1, "hash_ids": [1]}\n')
    done = kvoffload("replay", path, "--no-data")
    assert done.returncode == 2
    assert "at least one block (512 tokens)" in done.stderr


@pytest.fixture
def blocks_of_16(tmp_path: Path) -> Path:
    """Write a trace of 40 requests with 30 blocks each; the header sets 16 tokens per block."""
    lines = ['{"kvoffload_trace":1,"block_tokens":16,"assumed":"no reuse"}']
    for i in range(40):
        ids = [0, *(1000 * (i % 20) + j for j in range(1, 30))]
        lines.append(json.dumps({"timestamp": i, "input_length": 480, "output_length": 1, "hash_ids": ids}))
    path = tmp_path / "small.jsonl"
    path.write_text("\n".join(lines))
    return path


def test_implausible_sizes_give_a_warning(blocks_of_16: Path) -> None:
    """The 40 requests have 20 x 29 + 1 blocks of 16 KiB."""
    options = "--bytes-per-token", "1KiB", "--no-data", "--quiet"
    done = kvoffload("replay", blocks_of_16, "--capacity", "1GiB", *options, "--tiers", "simulated:8MiB")
    assert done.returncode == 0
    assert done.stderr.splitlines() == [
        "kvoffload: capacity: 1GiB is 65,536 blocks, but small (assumed: no reuse) has only 581 different "
        "blocks: RAM is never full",
        "kvoffload: tiers: simulated:8MiB is smaller than the RAM of 1GiB before it, and saves little",
    ]
    done = kvoffload("replay", blocks_of_16, "--capacity", "100%", *options, "--tiers", "simulated:16MiB")
    assert (done.returncode, done.stderr) == (0, "")


def test_sizes_are_divided_by_the_blocks_of_the_header(blocks_of_16: Path) -> None:
    options = "--capacity", "4MiB", "--bytes-per-token", "1KiB", "--no-data", "--quiet"
    done = kvoffload("replay", blocks_of_16, *options, "--format", "json")
    assert done.stderr == ""
    report = json.loads(done.stdout)
    assert (report["capacity_blocks"], report["tokens"]) == (256, 40 * 480)
    assert "small (assumed: no reuse)" in kvoffload("replay", blocks_of_16, *options).stdout
    refused = kvoffload("replay", blocks_of_16, *options, "--block-tokens", "32")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr.endswith("small.jsonl:1: field block_tokens: 16, but --block-tokens is 32\n")
    swept = ("sweep", blocks_of_16, "--policies", "lru", "--capacities", "4MiB", "--bytes-per-token", "1KiB",
             "--jobs", "1", "--quiet")  # fmt: skip
    (row,) = json.loads(kvoffload(*swept, "--format", "json").stdout)
    assert (row["trace"], row["capacity_blocks"]) == ("small (assumed: no reuse)", 256)
    both = kvoffload(*swept, "chat")
    assert both.stderr == (
        f"kvoffload: traces: 'chat' is invalid; its blocks have 512 tokens, the blocks of {blocks_of_16} 16: "
        "use a sweep for each block size, or capacities in blocks\n"
    )


@pytest.mark.parametrize("option", ["--output", "--decisions"])
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full here")
def test_a_full_disk_is_one_clear_line(trace_file: Path, option: str) -> None:
    done = kvoffload("replay", trace_file, *SMALL, option, "/dev/full")
    field = option.removeprefix("--")
    assert done.returncode == 2
    assert done.stderr == (
        f"kvoffload: {field}: '/dev/full' is invalid; the file cannot be written (No space left on device)\n"
    )


def test_only_failures_of_the_log_are_reported_as_such(
    trace_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: any `OSError` of the replay was reported as a failure of ``--decisions``."""

    def failing(*_: object) -> None:
        raise PermissionError(errno.EACCES, "the trace's own problem")

    monkeypatch.setattr("kvoffload.replay.replay.Replay.run", failing)
    with pytest.raises(PermissionError, match="the trace's own problem"):
        kvoffload("replay", trace_file, *SMALL, "--decisions", tmp_path / "decisions.txt")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full here")
def test_a_full_standard_output_is_one_clear_line() -> None:
    with open("/dev/full", "w") as full:
        command = [Path(sys.executable).with_name("kvoffload"), "policies"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 2
    assert done.stderr == "kvoffload: the output cannot be written (No space left on device)\n"


def test_a_name_in_capitals_is_corrected() -> None:
    assert "(did you mean lru?)" in kvoffload("replay", "chat", "--policy", "LRU").stderr


def test_help_names_the_commands() -> None:
    done = kvoffload("--help")
    assert done.returncode == 0
    assert "replay" in done.stdout
    assert "trace" in done.stdout


def test_unknown_option_is_exit_code_2() -> None:
    assert kvoffload("replay", "--bogus").returncode == 2
    assert kvoffload("bogus").returncode == 2


# ---- in a separate process


def in_a_process(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run the installed command."""
    command = [Path(sys.executable).with_name("kvoffload"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.slow
def test_a_replay(trace_file: Path) -> None:
    done = in_a_process("replay", trace_file, *SMALL)
    assert (done.returncode, done.stderr) == (0, "")
    assert "of the prefill work is saved" in done.stdout


def test_a_mistake_has_no_traceback() -> None:
    done = in_a_process("replay", "/no/such/file")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("kvoffload: trace: '/no/such/file' is invalid; ")
    assert done.stderr.count("\n") == 1


@pytest.mark.slow
def test_warm_needs_nothing_optional() -> None:
    code = (
        "import sys; sys.modules |= dict.fromkeys(('torch', 'distributed', 'dask', 'pyarrow', 'vllm'));"
        "from kvoffload.cli.main import main; sys.argv = ['kvoffload', 'warm']; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "kernels are ready" in done.stdout
