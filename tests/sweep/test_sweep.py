"""Sweeps: rows equal to replays, independence of jobs and formats, the journal, the command, and clusters."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import io
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import pytest
from rich.console import Console

from kvoffload.cli.sweep_progress import shown
from kvoffload.cli.sweep_tables import tables
from kvoffload.core.hints import Hints
from kvoffload.errors import ConfigError, SweepError, TraceError
from kvoffload.policies.lru import LRU
from kvoffload.replay.config import ReplayConfig
from kvoffload.replay.instances import replay_of
from kvoffload.replay.optimum import optimum
from kvoffload.replay.replay import Replay
from kvoffload.sweep import grid, workers
from kvoffload.sweep import task as tasks
from kvoffload.sweep.bootstrap import Resamples, window_sums
from kvoffload.sweep.cluster import ClusterWorkers
from kvoffload.sweep.grid import Grid, content_digest
from kvoffload.sweep.journal import SweepJournal
from kvoffload.sweep.measuring import Progress, Work
from kvoffload.sweep.outputs import RowsFile
from kvoffload.sweep.sweep import Sweep
from kvoffload.sweep.table import Row, baselines_of
from kvoffload.sweep.task import Failure, Measurement, Task
from kvoffload.text import size
from kvoffload.traces.formats.mooncake import write_trace
from kvoffload.traces.sessions import generate
from kvoffload.traces.sources import load_trace
from kvoffload.traces.trace import TraceHints
from kvoffload.traces.workloads import builtin
from support.run_cli import kvoffload
from support.timeouts import HANGS_S

SMALL = Grid(("lru", "arc"), ("all", "reuse:2"), ("2%", "5%"), ("0", "0.5x"))


@pytest.fixture(scope="module")
def rag(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("sweep") / "small-rag.jsonl.gz"
    write_trace(generate(builtin("rag", sessions=40)), path)
    return str(path)


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[Task]:
    """Record the tasks of this process."""
    done: list[Task] = []

    def counted(task: Task) -> Measurement | Failure:
        done.append(task)
        return tasks.attempt(task)

    monkeypatch.setattr(workers, "attempt", counted)
    return done


def rows_by_place(rows: list[Row]) -> dict[tuple[str, str, str, str], Row]:
    return {(row.policy, row.admission, row.capacity, row.device): row for row in rows}


# ---- rows


@pytest.mark.slow
def test_rows_equal_replays(chat: str) -> None:
    rows = Sweep([chat], SMALL, work=Work(jobs=1)).run().rows
    trace = load_trace(chat)
    refs = window_sums(np.diff(trace.offsets))
    draws = Resamples(refs)
    assert len(rows) == 16
    by_place = rows_by_place(rows)
    for row in rows:
        run = Replay(trace, ReplayConfig(row.capacity_blocks, row.policy, row.admission, row.device_blocks))
        report = run.run()
        assert row.decisions_sha256 == report.decisions_sha256
        for name in ("prefix_hit_ratio", "block_hit_ratio", "writes_per_ref", "blocks_written"):
            assert getattr(row, name) == getattr(report, name)
        assert row.offload_hit_ratio == report.offload_hit_blocks / trace.block_refs
        interval = draws.ratio(window_sums(run.hits_per_request))
        assert (row.ci_low, row.ci_high, row.ci_correlation) == interval
        assert row.ci_low <= row.prefix_hit_ratio <= row.ci_high
        lru = by_place["lru", "all", row.capacity, row.device]
        assert row.baseline == "lru, all"
        assert row.diff_vs_lru == row.prefix_hit_ratio - lru.prefix_hit_ratio
        assert row.writes_vs_lru == row.blocks_written / lru.blocks_written
        if row is lru:
            assert (row.diff_low, row.diff_high, row.gap_closed or 0) == (0, 0, 0)
        else:
            assert row.diff_low <= row.diff_vs_lru <= row.diff_high
        best = optimum(trace, row.capacity_blocks, row.device_blocks, row.store).prefix_hit_blocks
        assert row.optimum_hit_ratio == best / trace.block_refs
        gap = row.optimum_hit_ratio - lru.prefix_hit_ratio
        assert row.gap_closed == pytest.approx(row.diff_vs_lru / gap)


def test_the_order_and_the_sizes(chat: str) -> None:
    unique = load_trace(chat).unique_blocks
    grid = Grid(("arc", "lru"), capacities=("7", "10%"), devices=("0", "3", "50%", "0.5x"))
    rows = Sweep([chat], grid, work=Work(jobs=1)).run().rows
    expected = [
        (device, capacity, policy)
        for device in ("0", "3", "50%", "0.5x")
        for capacity in ("7", "10%")
        for policy in ("arc", "lru")
    ]
    assert [(row.device, row.capacity, row.policy) for row in rows] == expected
    sizes = {(row.device, row.capacity): (row.device_blocks, row.capacity_blocks) for row in rows}
    tenth = unique // 10
    assert sizes["0", "7"] == (0, 7)
    assert sizes["3", "10%"] == (3, tenth)
    assert sizes["50%", "7"] == (unique // 2, 7)
    assert sizes["0.5x", "7"] == (3, 7)
    assert sizes["0.5x", "10%"] == (tenth // 2, tenth)


def test_hits_of_requests_add_up(chat: str) -> None:
    trace = load_trace(chat)
    run = Replay(trace, ReplayConfig(300, device_blocks=50))
    report = run.run()
    assert run.hits_per_request.dtype == np.int32
    assert run.hits_per_request.sum() == report.prefix_hit_blocks
    assert (run.hits_per_request <= np.diff(trace.offsets)).all()


def test_a_mode_that_needs_a_device_is_omitted_without_device(chat: str) -> None:
    axes = Grid(("lru", "arc"), devices=("0", "4"), stores=("on-compute", "on-device-eviction"))
    result = Sweep([chat], axes, work=Work(jobs=1)).run()
    assert result.left_out == {"on-device-eviction needs a device cache": 2}
    assert {(row.store, row.device) for row in result.rows} == {
        ("on-compute", "0"), ("on-compute", "4"), ("on-device-eviction", "4"),
    }  # fmt: skip
    points, _ = axes.points(0, 1000)
    for place, number in baselines_of(points).items():
        point = points[number]
        assert (point.config.policy, point.config.store, point.tiers) == ("lru", *place[-2:])
    with pytest.raises(ConfigError, match="on-device-eviction needs a device cache"):
        Sweep([chat], Grid(("lru",), stores=("on-device-eviction",)), work=Work(jobs=1)).run()


def test_incompatible_rules_and_policies_are_omitted(chat: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reason = ConfigError("admission", "reuse:2", "not with arc")
    together = {("arc", "reuse:2"): reason}
    monkeypatch.setattr(grid, "incompatible", lambda policy, admission: together.get((policy, admission)))
    arguments = ("--policies", "lru,arc", "--admissions", "all,reuse:2", "--capacities", "5%,10%")
    done = kvoffload("sweep", chat, *arguments, "--jobs", "1")
    assert (done.returncode, done.stderr) == (
        0,
        "2 combinations left out: admission: 'reuse:2' is invalid; not with arc\n",
    )
    with pytest.raises(ConfigError, match="not with arc"):
        Grid(("arc",), ("all", "reuse:2"))


def test_without_lru_there_is_no_baseline(chat: str) -> None:
    (row,) = Sweep([chat], Grid(("arc",)), work=Work(jobs=1)).run().rows
    nothing = (row.baseline, row.diff_vs_lru, row.diff_low, row.diff_high, row.gap_closed, row.writes_vs_lru)
    assert nothing == (None,) * 6
    assert row.among_best


def test_without_admission_all_the_baseline_has_the_first_rule(chat: str) -> None:
    rows = Sweep([chat], Grid(("arc", "lru"), ("reuse:3", "reuse:2")), work=Work(jobs=1)).run().rows
    assert {row.baseline for row in rows} == {"lru, reuse:3"}


def test_a_tiny_trace_has_no_intervals(tmp_path: Path) -> None:
    path = tmp_path / "tiny.jsonl"
    line = '{"timestamp": 0, "input_length": 1024, "output_length": 1, "hash_ids": [1, 2]}\n'
    path.write_text(line * 3)
    rows = Sweep([str(path)], Grid(("lru", "arc"), capacities=("2", "1")), work=Work(jobs=1)).run().rows
    assert [row.prefix_hit_ratio for row in rows] == [4 / 6, 4 / 6, 2 / 6, 2 / 6]
    assert all(row.ci_low is row.diff_low is None for row in rows)
    assert all(row.among_best for row in rows), "equal rows are equally good"
    assert all(row.gap_closed is None for row in rows), "there is no gap to close"


# ---- jobs, formats and seeds


@pytest.mark.slow
def test_output_does_not_depend_on_the_number_of_jobs(chat: str, rag: str, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    for jobs in (1, 2):
        output = tmp_path / f"{jobs}.csv"
        rows = Sweep([chat, rag], SMALL, work=Work(jobs=jobs, output=output)).run().rows
        assert sorted(tmp_path.glob(f"{jobs}*")) == [output], "the journal is removed"
        for suffix in ("json", "parquet"):
            RowsFile(tmp_path / f"{jobs}.{suffix}").write(rows)
    for suffix in ("csv", "json", "parquet"):
        assert (tmp_path / f"1.{suffix}").read_bytes() == (tmp_path / f"2.{suffix}").read_bytes(), suffix


def test_all_formats_have_the_same_rows(chat: str, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    axes = Grid(("arc", "lru"), devices=("0", "5"))
    for suffix in ("csv", "json", "parquet"):
        rows = Sweep([chat], axes, work=Work(jobs=1, output=tmp_path / f"out.{suffix}")).run().rows
    expected = [msgspec.structs.asdict(row) for row in rows]
    assert json.loads((tmp_path / "out.json").read_text()) == expected
    table = parquet.read_table(tmp_path / "out.parquet")
    assert table.to_pylist() == expected
    assert str(table.schema.field("optimum_hit_ratio").type) == "double"
    with (tmp_path / "out.csv").open() as file:
        for csv_row, row in zip(csv.DictReader(file), expected, strict=True):
            assert list(csv_row) == list(row)
            for name, value in row.items():
                typed = {bool: lambda text: text == "true", type(None): lambda text: text or None}
                assert typed.get(type(value), type(value))(csv_row[name]) == value


def test_the_seed_changes_only_the_intervals(chat: str) -> None:
    first, again, other = (
        Sweep([chat], Grid(("arc", "lru")), work=Work(jobs=1, seed=seed, resamples=200)).run().rows
        for seed in (1, 1, 2)
    )
    assert first == again
    assert [(row.seed, row.resamples) for row in other] == [(2, 200)] * 2
    assert [row.decisions_sha256 for row in first] == [row.decisions_sha256 for row in other]
    assert [row.ci_low for row in first] != [row.ci_low for row in other]


def test_timings_are_extra(chat: str, tmp_path: Path) -> None:
    output = tmp_path / "timed.json"
    Sweep([chat], Grid(("lru",)), work=Work(jobs=1, output=output), timings=True).run()
    (row,) = json.loads(output.read_text())
    assert row.pop("control_plane_s") > 0
    assert set(row) == set(Row.__struct_fields__)


def test_each_trace_is_read_once(chat: str, rag: str, monkeypatch: pytest.MonkeyPatch) -> None:
    read = []

    def counted(path: str, **options: object) -> object:
        read.append(path)
        return load_trace(path, **options)  # type: ignore[arg-type]

    tasks.whole_trace.cache_clear()
    monkeypatch.setattr(tasks, "load_trace", counted)
    Sweep([chat, rag, chat], SMALL, work=Work(jobs=1)).run()
    assert read == [chat, rag]


def test_equal_sizes_are_replayed_once(chat: str, replays: list[Task]) -> None:
    tenth = str(load_trace(chat).unique_blocks // 10)
    rows = Sweep([chat], Grid(("lru", "arc"), capacities=("10%", tenth)), work=Work(jobs=1)).run().rows
    assert len(replays) == 2
    assert [row.capacity for row in rows] == ["10%", "10%", tenth, tenth]
    assert [row.bytes_written for row in rows] == [None] * 4, "the bytes of a token are unknown"
    assert [row.decisions_sha256 for row in rows[:2]] == [row.decisions_sha256 for row in rows[2:]]


# ---- the journal


@pytest.fixture(scope="module")
def whole(chat: str) -> list[Row]:
    """Run an uninterrupted sweep; returns its rows."""
    return Sweep([chat], SMALL, work=Work(jobs=1)).run().rows


def interrupted(chat: str, output: Path, rows: int) -> None:
    """Run the small sweep until it has `rows` rows."""

    def stop(progress: object) -> None:
        if run.progress.rows_done == rows:
            raise KeyboardInterrupt

    run = Sweep([chat], SMALL, work=Work(jobs=1, output=output))
    with pytest.raises(KeyboardInterrupt):
        run.run(stop)
    assert not output.exists()


def test_an_interrupted_sweep_continues(
    chat: str, whole: list[Row], tmp_path: Path, replays: list[Task]
) -> None:
    output = tmp_path / "out.csv"
    interrupted(chat, output, 6)
    replays.clear()
    result = Sweep([chat], SMALL, work=Work(jobs=1, output=output)).run()
    assert result.from_journal == 6
    assert len(replays) == 16 - 6
    assert result.rows == whole
    RowsFile(tmp_path / "whole.csv").write(whole)
    assert output.read_bytes() == (tmp_path / "whole.csv").read_bytes()
    assert not output.with_name("out.csv.journal").exists()


@pytest.mark.parametrize("damage", ["half a line", "no end of line", "rubbish", "another version"])
def test_a_damaged_journal_loses_only_the_damaged_rows(
    chat: str, whole: list[Row], tmp_path: Path, replays: list[Task], damage: str
) -> None:
    output = tmp_path / "out.json"
    interrupted(chat, output, 6)
    journal = output.with_name("out.json.journal")
    content = journal.read_bytes()
    lost = 1
    if damage == "half a line":
        journal.write_bytes(content[:-20])
    elif damage == "no end of line":
        journal.write_bytes(content[:-1])
    elif damage == "rubbish":
        journal.write_bytes(b"\xff\x00 not json\n" + content + b"\x00" * 100)
        lost = 0
    else:
        first, _, others = content.partition(b"\n")
        journal.write_bytes(first.replace(b'"requests"', b'"inquiries"') + b"\n" + others)
    replays.clear()
    interrupted(chat, output, 9)
    assert len(replays) == 9 - (6 - lost)
    # Rows appended behind the damage are sound.
    result = Sweep([chat], SMALL, work=Work(jobs=1, output=output)).run()
    assert result.from_journal == 9
    assert len(replays) == 16 - (6 - lost)
    assert result.rows == whole


@pytest.mark.slow
def test_the_journal_key_contains_everything_a_row_depends_on(
    chat: str, tmp_path: Path, replays: list[Task], monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "out.csv"
    interrupted(chat, output, 6)
    journal = output.with_name("out.csv.journal").read_bytes()

    def finished_rows(path: str, seed: int = 0, block_tokens: int | None = None) -> int:
        tasks.whole_trace.cache_clear()
        output.with_name("out.csv.journal").write_bytes(journal)
        work = Work(jobs=1, output=output, force=True, seed=seed)
        return Sweep([path], SMALL, work=work, block_tokens=block_tokens).run().from_journal

    renamed = tmp_path / "same-content.jsonl.xz"
    write_trace(load_trace(chat), renamed)
    assert finished_rows(str(renamed)) == 6
    assert finished_rows(chat, seed=5) == 6, "intervals are computed from the kept rows"
    changed = tmp_path / "small-chat.jsonl"
    # The same number of blocks and of uses.
    trace = load_trace(chat)
    write_trace(dataclasses.replace(trace, timestamps_ms=trace.timestamps_ms + 1), changed)
    assert finished_rows(str(changed)) == 0
    hints = TraceHints.of(Hints("stop") for _ in range(trace.requests))
    write_trace(dataclasses.replace(trace, hints=hints), changed)
    assert finished_rows(str(changed)) == 0
    sessions = np.arange(trace.requests, dtype=np.int32) // 2
    write_trace(dataclasses.replace(trace, sessions=sessions), changed)
    assert finished_rows(str(changed)) == 0
    larger_blocks = dataclasses.replace(trace, block_tokens=1024)
    write_trace(larger_blocks, changed)
    assert finished_rows(str(changed), block_tokens=1024) == 0
    monkeypatch.setattr("kvoffload.sweep.task.code_digest", lambda *names: f"other code of {names}")
    assert finished_rows(chat) == 0


def test_rows_of_another_speed_do_not_mix(chat: str, tmp_path: Path, replays: list[Task]) -> None:
    output = tmp_path / "out.csv"
    interrupted(chat, output, 6)
    late = dataclasses.replace(SMALL, common=ReplayConfig(1, decode_tokens_per_s=50))
    replays.clear()
    result = Sweep([chat], late, work=Work(jobs=1, output=output)).run()
    assert (result.from_journal, len(replays)) == (0, 16)
    assert {row.decode_tokens_per_s for row in result.rows} == {50.0}
    assert all(task.config.decode_tokens_per_s == 50 for task in replays)
    row = result.rows[0]
    trace = load_trace(chat)
    config = ReplayConfig(row.capacity_blocks, row.policy, row.admission, decode_tokens_per_s=50)
    assert row.decisions_sha256 == Replay(trace, config).run().decisions_sha256
    assert row.decisions_sha256 != Sweep([chat], SMALL, work=Work(jobs=1)).run().rows[0].decisions_sha256


def test_rows_of_another_queue_do_not_mix(chat: str, tmp_path: Path, replays: list[Task]) -> None:
    output = tmp_path / "out.csv"
    interrupted(chat, output, 6)
    queued = dataclasses.replace(SMALL, common=ReplayConfig(1, queue_requests=8))
    replays.clear()
    result = Sweep([chat], queued, work=Work(jobs=1, output=output)).run()
    assert (result.from_journal, len(replays)) == (0, 16)
    assert {row.queue_requests for row in result.rows} == {8}


def test_a_row_with_a_queue_equals_a_replay(tmp_path: Path) -> None:
    path = tmp_path / "agents.jsonl"
    write_trace(generate(builtin("agent", sessions=5)), path)
    decided = []
    for queue in (0, 8):
        axes = Grid(("lru",), common=ReplayConfig(1, queue_requests=queue))
        (row,) = Sweep([str(path)], axes, work=Work(jobs=1)).run().rows
        config = ReplayConfig(row.capacity_blocks, row.policy, row.admission, queue_requests=queue)
        assert row.decisions_sha256 == Replay(load_trace(str(path)), config).run().decisions_sha256
        decided.append(row.decisions_sha256)
    assert decided[0] != decided[1]


def test_an_assumed_queue_is_reported(chat: str) -> None:
    done = kvoffload("sweep", chat, "--capacities", "5%", "--policies", "lru", "--queue", "8", "--quiet")
    assert "The next 8 requests wait, and are expected: assumed" in done.stdout
    wrong = kvoffload("sweep", chat, "--queue", "-1")
    assert (wrong.returncode, "queue: -1 is invalid" in wrong.stderr) == (2, True)


def test_an_assumed_speed_is_reported(chat: str) -> None:
    axes = ("--policies", "lru", "--capacities", "5%", "--jobs", "1")
    assumption = "Requests end when 50 tokens/s have generated their answers: assumed"
    assert assumption in kvoffload("sweep", chat, *axes, "--decode-tokens-per-s", "50").stdout
    assert "Requests end" not in kvoffload("sweep", chat, *axes).stdout


def test_the_code_of_a_policy_is_part_of_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in (1, 2):
        (tmp_path / f"mine{number}.py").write_text(
            f"from kvoffload.policies.lru import LRU\n\n\nclass Mine(LRU):\n    seed = {number}\n"
        )
    monkeypatch.syspath_prepend(tmp_path)
    digests = {tasks.code_digest(policy) for policy in ("", "mine1:Mine", "mine2:Mine")}
    assert len(digests) == 3


def test_the_code_of_a_rule_is_part_of_the_key(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from kvoffload.admission.reuse import ReuseAdmission\n\n\nclass Mine(ReuseAdmission):\n    pass\n"
    )
    own = ReplayConfig(1, admission=f"{file}:Mine")
    assert tasks.code_digests(own) != tasks.code_digests(ReplayConfig(1, admission="reuse:2"))
    before = tasks.code_digests(own)
    file.write_text(file.read_text() + "    store_threshold = 3\n")
    tasks.code_digest.cache_clear()
    assert tasks.code_digests(own) != before


def test_named_sessions_are_part_of_the_key(chat: str) -> None:
    """Requests are routed by sessions, so hits depend on them."""
    trace = load_trace(chat)
    single_session = dataclasses.replace(trace, sessions=np.zeros(trace.requests, np.int32))
    config = ReplayConfig(100, instances=2)
    hits = {replay_of(of, config).run().prefix_hit_blocks for of in (trace, single_session)}
    assert len(hits) == len({content_digest(of) for of in (trace, single_session)}) == 2


def test_lengths_of_prompts_are_part_of_the_key(chat: str) -> None:
    """A timed replay computes whole prompts."""
    trace = load_trace(chat)
    longer = np.diff(trace.offsets) * trace.block_tokens + 1
    assert content_digest(dataclasses.replace(trace, prompt_tokens=longer)) != content_digest(trace)


def test_one_sweep_at_a_time(chat: str, tmp_path: Path) -> None:
    journal = SweepJournal(tmp_path / "out.csv")
    with pytest.raises(ConfigError, match="another sweep or plan is writing it now"):
        Sweep([chat], SMALL, work=Work(jobs=1, output=tmp_path / "out.csv")).run()
    journal.close()


def test_an_output_is_replaced_only_with_force(chat: str, tmp_path: Path) -> None:
    output = tmp_path / "out.csv"
    output.write_text("precious")
    with pytest.raises(ConfigError, match="--force replaces it"):
        Sweep([chat], SMALL, work=Work(jobs=1, output=output))
    assert output.read_text() == "precious"
    Sweep([chat], SMALL, work=Work(jobs=1, output=output, force=True)).run()
    assert output.read_text().startswith("trace,")


def test_a_trace_that_changes_during_the_sweep_is_refused(chat: str) -> None:
    source = tasks.identified(tasks.TraceSource(chat, 512, False))
    with pytest.raises(TraceError, match="the trace has changed since the sweep began"):
        tasks.load(dataclasses.replace(source, digest="0" * 64))


# ---- the command, in separate processes


GATED_POLICY = """
import pathlib, tempfile, time
from kvoffload.policies.lru import LRU

HERE = pathlib.Path(__file__).parent


class Gated(LRU):
    '''LRU; in a large cache it waits until somebody opens the gate.'''

    name = "gated"

    def replace(self, *arguments):
        if self.capacity_blocks >= 30 and not (HERE / "open").exists():
            tempfile.mkstemp(prefix="waits-", dir=HERE)
            while not (HERE / "open").exists():
                time.sleep(0.01)
        super().replace(*arguments)
"""


class Held(NamedTuple):
    """A sweep of 8 rows in a separate process. After 6 rows, its two workers wait at a gate."""

    process: subprocess.Popen[str]
    children: list[int]
    arguments: tuple[str, ...]
    output: Path
    journal: Path

    def num_kept(self) -> int:
        return self.journal.read_bytes().count(b"\n") if self.journal.exists() else 0


@pytest.fixture
def held(chat: str, tmp_path: Path) -> Iterator[Held]:
    (tmp_path / "gated.py").write_text(GATED_POLICY)
    policies = f"lru,{tmp_path / 'gated.py'}:Gated"
    arguments = (chat, "--policies", policies, "--capacities", "10,20,30,40")
    output = tmp_path / "out.csv"
    # A test run in the background ignores SIGINT, and so do its children: restore the handler.
    call = (
        "import signal\nfrom kvoffload.cli.main import main\n"
        "if __name__ == '__main__':\n"
        "    signal.signal(signal.SIGINT, signal.default_int_handler)\n    main()"
    )
    # Quiet: a slow machine would print progress.
    command = [sys.executable, "-c", call, "sweep", *arguments, "--output", output, "--jobs", "2", "--quiet"]
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        sweep = Held(process, [], arguments, output, tmp_path / "out.csv.journal")
        deadline = time.monotonic() + HANGS_S
        while sweep.num_kept() < 6 or len([*tmp_path.glob("waits-*")]) < 2:
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.01)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        sweep.children.extend(map(int, children))
        yield sweep
    finally:
        # Also kills its children, which would hold the pipes open.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def wait_for_the_end(processes: list[int]) -> None:
    deadline = time.monotonic() + HANGS_S
    while any(Path(f"/proc/{pid}").exists() for pid in processes):
        assert time.monotonic() < deadline, "child processes are still running"
        time.sleep(0.02)


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="there is no /proc here")
@pytest.mark.slow
def test_kill_9_in_the_middle(held: Held, tmp_path: Path) -> None:
    held.process.kill()
    held.process.wait()
    assert len(held.children) >= 2
    wait_for_the_end(held.children)
    assert held.num_kept() == 6
    assert not held.output.exists()
    (tmp_path / "open").touch()
    done = kvoffload("sweep", *held.arguments, "--output", held.output, "--jobs", "1")
    assert (done.returncode, done.stderr) == (0, "kvoffload: resuming, 6 of 8 done\n")
    whole = tmp_path / "whole.csv"
    assert kvoffload("sweep", *held.arguments, "--output", whole, "--jobs", "1").returncode == 0
    assert held.output.read_bytes() == whole.read_bytes()


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="there is no /proc here")
@pytest.mark.parametrize(
    ("number", "to", "reason"),
    [
        # Terminals and systemd signal every process, `kill` and Kubernetes only one.
        (signal.SIGINT, os.killpg, "interrupted"),
        (signal.SIGTERM, os.killpg, "terminated"),
        (signal.SIGTERM, os.kill, "terminated"),
    ],
)
@pytest.mark.slow
def test_a_signal_keeps_finished_rows(held: Held, number: int, to: Callable[..., None], reason: str) -> None:
    to(held.process.pid, number)
    _, errors = held.process.communicate(timeout=HANGS_S)
    wait_for_the_end(held.children)
    assert held.process.returncode == 128 + number
    assert held.num_kept() == 6
    assert errors == (
        f"kvoffload: {reason}; 6 of 8 rows are kept in {held.journal}: run the same command again to go on\n"
    )


@pytest.mark.slow
def test_a_killed_worker_ends_the_sweep(chat: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "killer.py").write_text(
        "import os, signal\nfrom kvoffload.policies.lru import LRU\n\n\nclass Killer(LRU):\n"
        "    def replace(self, *arguments):\n        os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    earlier = multiprocessing.active_children()  # workers of another test's cluster
    with pytest.raises(SweepError, match="a worker process ended unexpectedly; is there enough memory"):
        Sweep([chat], Grid(("lru", "killer:Killer"), capacities=("5",)), work=Work(jobs=2)).run()
    deadline = time.monotonic() + HANGS_S
    # The pool ends the other workers.
    while any(child not in earlier for child in multiprocessing.active_children()):
        assert time.monotonic() < deadline, "workers are still running"
        time.sleep(0.02)


# ---- the command, in this process


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--policies", "lru,lruu"], "policy: 'lruu' is invalid; allowed: "),
        (["--policies", "kvoffload:BlockwisePolicy"], "policy: 'kvoffload:BlockwisePolicy' "
                                                      "is invalid; BlockwisePolicy does not implement "),
        (["--policies", "lru,,arc"], "policies: 'lru,,arc' is invalid; allowed: values separated by "
                                     "commas, none of them empty"),
        (["--admissions", "all,reuse:x"], "admission: 'reuse:x' is invalid; store_threshold: allowed: a "
                                          "whole number from 1 to 2147483647"),
        (["--stores", "sometimes"], "stores: 'sometimes' is invalid; allowed: "),
        (["--capacities", "5%,0"], "capacities: '0' is invalid; it is less than one block; allowed: a number "
                                   "of blocks (5000), a share of the unique blocks (5%), or a size (4GiB)"),
        (["--capacities", "many"], "capacities: 'many' is invalid; allowed: a number of blocks"),
        (["--capacities", "0.01%"], "capacities: '0.01%' is invalid; it is less than one of the "),
        (["--device-blocks", "2y"], "device-blocks: '2y' is invalid; allowed: 0 (none), a number of "
                                    "blocks (2000), a share of the unique blocks (25%), a size (4GiB), or a "
                                    "multiple of the tier's capacity (0.5x)"),
        (["--capacities", "3", "--device-blocks", "0.25x"],
         "device-blocks: '0.25x' is invalid; it is less than one block, with 3 blocks of RAM; allowed: 0"),
        (["--decode-tokens-per-s", "nan"], "decode-tokens-per-s: nan is invalid; allowed: a"),
        (["--jobs", "0"], "jobs: 0 is invalid; allowed: a whole number, 1 or more"),
        (["--jobs", "2", "--scheduler", "tcp://127.0.0.1:1"], "jobs: 2 is invalid; the scheduler's"),
        (["--resamples", "0"], "resamples: 0 is invalid; allowed: a whole number from 1 to 1000000"),
        (["--resamples", "1000000000000"], "resamples: 1000000000000 is invalid; allowed: a whole number"),
        (["--seed", "-1"], "seed: -1 is invalid; allowed: 0 to 2**64 - 1"),
        (["chat", "agent", "chat"], "traces: 'chat' is invalid; it is given twice"),
        (["-"], "traces: '-' is invalid; allowed: files and names"),
        (["--bytes-per-token", "0"], "bytes-per-token: '0' is invalid; allowed: at least one byte"),
        (["--capacities", "5%,4GiB"],
         "capacities: '4GiB' is invalid; a size needs the bytes of a token"),
        (["--output", "rows.txt"], "output: 'rows.txt' is invalid; allowed: a file that ends in .csv, "
                                   ".json, .parquet"),
        (["--output", "/no/such/dir/x.csv"], "output: '/no/such/dir/x.csv' is invalid; its journal "
                                             "cannot be written (No such file or directory)"),
        (["--output", "/dev/null.csv/x.json"], "output: '/dev/null.csv/x.json' is invalid; its journal"),
    ],
)  # fmt: skip
def test_mistakes_are_one_line(chat: str, replays: list[Task], arguments: list[str], message: str) -> None:
    done = kvoffload("sweep", chat, *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"kvoffload: {message}"), done.stderr
    assert done.stderr.count("\n") == 1
    assert replays == [], "before any work"


def test_a_missing_trace_leaves_no_files(
    tmp_path: Path,
) -> None:
    done = kvoffload("sweep", "/no/such/file", "--output", tmp_path / "x.csv")
    assert done.returncode == 2
    assert "trace: '/no/such/file' is invalid" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("module", "arguments", "message"),
    [
        ("pyarrow", ["--output", "x.parquet"], "output: 'x.parquet' is invalid; Parquet needs pyarrow: "
                                               "pip install 'kvoffload[parquet]'"),
        ("distributed", ["--scheduler", "tcp://127.0.0.1:1"],
         "scheduler: 'tcp://127.0.0.1:1' is invalid; the package distributed is missing: pip "
         "install 'kvoffload[dask]'"),
    ],
)  # fmt: skip
def test_a_missing_extra_is_one_message(
    chat: str,
    monkeypatch: pytest.MonkeyPatch,
    module: str,
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    done = kvoffload("sweep", chat, *arguments)
    assert (done.returncode, done.stderr) == (2, f"kvoffload: {message}\n")


def test_the_tables(chat: str) -> None:
    axes = ("--policies", "lru,arc", "--admissions", "all,reuse:2", "--capacities", "5%,100%")
    done = kvoffload("sweep", chat, *axes, "--device-blocks", "0,20", "--jobs", "1")
    assert done.returncode == 0
    printed = done.stdout
    grid = Grid(("lru", "arc"), ("all", "reuse:2"), ("5%", "100%"), ("0", "20"))
    rows = Sweep([chat], grid, work=Work(jobs=1)).run().rows
    columns = "prefix-hit ratio, writes per reference, share of the gap from lru to the optimum\n"
    for device in ("no device cache", "behind a device cache of 20 blocks"):
        assert f"small-chat, {device}\n{columns}" in printed
    for row in rows:
        mark = "*" if row.among_best else " "
        gap = "" if row.gap_closed is None else f" {row.gap_closed:.0%}".replace("-0%", "0%")
        cell = f"{row.prefix_hit_ratio:.4f}{mark} {row.writes_per_ref:.3f}{gap}"
        assert cell in re.sub(r" +(-?\d+%)", r" \1", printed)
    assert any(row.gap_closed for row in rows)
    assert "-0%" not in printed
    assert any(row.among_best for row in rows)
    assert not all(row.among_best for row in rows)
    assert f"{rows[0].optimum_hit_ratio:.4f}" in printed


def test_writes_are_in_bytes_if_block_bytes_are_known(chat: str) -> None:
    done = kvoffload("sweep", chat, "--capacities", "5%", "--bytes-per-token", "128KiB", "--jobs", "1")
    rows = Sweep([chat], Grid(("lru", "arc"), block_bytes=2**26), work=Work(jobs=1)).run().rows
    assert "\nprefix-hit ratio, bytes written, share of the gap" in done.stdout
    for row in rows:
        assert row.bytes_written == row.blocks_written * 2**26
        assert f"{row.prefix_hit_ratio:.4f}* {size(row.bytes_written)}" in done.stdout


def test_without_lru_no_gap_is_shown(chat: str) -> None:
    done = kvoffload("sweep", chat, "--policies", "arc,slru", "--capacities", "5%", "--jobs", "1")
    assert "\nprefix-hit ratio, writes per reference\n" in done.stdout
    assert "gap" not in done.stdout


def test_a_share_that_rounds_to_nothing_has_no_sign(chat: str) -> None:
    (row,) = Sweep([chat], Grid(("lru",)), work=Work(jobs=1)).run().rows
    console = Console(file=io.StringIO(), width=100)
    console.print(*tables([msgspec.structs.replace(row, gap_closed=-0.002)]))
    assert f"{row.writes_per_ref:.3f} 0%" in console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize("width", [60, 80, 200])
def test_sizes_that_do_not_fit_are_continued_below(
    chat: str, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    typed = [f"{percent}%" for percent in (5, 10, 15, 20, 25, 30, 35)]
    rows = Sweep([chat], Grid(("lru", "arc"), capacities=tuple(typed)), work=Work(jobs=1)).run().rows
    console = Console(file=io.StringIO(), width=width)
    for table in tables(rows, width):
        console.print(table)
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert max(map(len, lines)) <= min(width, 100)
    # Complete, and in the order of the sizes.
    assert [word for line in lines for word in line.split() if word in typed] == typed
    for policy in ("lru", "arc"):
        shown_here = [line for line in lines if line.split()[:1] == [policy]]
        cells = [cell for line in shown_here for cell in re.findall(r"0\.\d{4}[* ] \d\.\d{3} +-?\d+%", line)]
        of_policy = [row for row in rows if row.policy == policy]
        assert [float(cell[:6]) for cell in cells] == [round(row.prefix_hit_ratio, 4) for row in of_policy]
        assert 1 < len(shown_here) < len(typed)


def test_verdicts_are_on_screen_and_in_every_output(chat: str, tmp_path: Path) -> None:
    axes = ("--policies", "lru,arc,slru", "--capacities", "3%,5%", "--jobs", "1")
    result = Sweep([chat], Grid(("lru", "arc", "slru"), capacities=("3%", "5%")), work=Work(jobs=1)).run()
    lines = [verdict.line for verdict in result.verdicts]
    assert [line[:7] for line in lines] == ["at 3%: ", "at 5%: "]
    printed = " ".join(kvoffload("sweep", chat, *axes).stdout.split())
    assert f"small-chat, no device cache, in words {lines[0]} {lines[1]}" in printed
    rows = json.loads(kvoffload("sweep", chat, *axes, "--format", "json").stdout)
    best = [max((row for row in rows if row["capacity"] == typed), key=lambda row: row["prefix_hit_ratio"])
            for typed in ("3%", "5%")]  # fmt: skip
    assert [row["verdict"] for row in best] == lines
    assert [row["verdict"] for row in rows if row not in best] == [None] * 4
    assert kvoffload("sweep", chat, *axes, "--output", tmp_path / "out.csv").returncode == 0
    with (tmp_path / "out.csv").open() as file:
        assert [row["verdict"] for row in csv.DictReader(file) if row["verdict"]] == lines


# ---- progress


class Clock:
    """A clock that the test advances."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def progress_lines(
    steps: list[tuple[float, Progress]], *, quiet: bool = False, is_terminal: bool = False
) -> list[str]:
    """Return the lines that a sweep prints to stderr. `steps`: seconds and progress."""
    clock = Clock()
    console = Console(file=io.StringIO(), width=80, force_terminal=is_terminal, no_color=True)
    with shown(quiet, console, clock) as on_progress:
        clock.now_s += 500  # reading traces
        began_s = clock.now_s
        for seconds, progress in steps:
            clock.now_s = began_s + seconds
            on_progress(progress)
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return [line for line in re.sub(r"\x1b\[[\d?;]*[a-zA-Z]", "", text).splitlines() if line.startswith("kv")]


def steps(seconds_each: float, rows: int = 20) -> list[tuple[float, Progress]]:
    return [
        (number * seconds_each, Progress(number, rows, 100 * number, 100 * rows))
        for number in range(rows + 1)
    ]


def test_without_a_terminal_there_is_a_line_for_each_tenth() -> None:
    assert progress_lines(steps(40)) == [
        f"kvoffload: {rows} of 20 rows, {5 * rows}%, about {remaining} left"
        for rows, remaining in zip(
            range(2, 20, 2),
            ["12 min", "10.7 min", "9.33 min", "8 min", "6.67 min", "5.33 min", "4 min", "2.67 min", "80 s"],
            strict=True,
        )
    ]


def test_lines_are_half_a_minute_apart() -> None:
    lines = progress_lines(steps(4))
    assert [line.split()[1] for line in lines] == ["8", "16"]
    assert progress_lines(steps(1)) == [], "a short sweep prints no progress"


def test_progress_counts_references_not_rows() -> None:
    done_at = [(0, 0), (60, 20), (100, 500), (9000, 1000)]
    uneven = [(seconds, Progress(rows, 3, refs, 1000)) for rows, (seconds, refs) in enumerate(done_at)]
    assert progress_lines(uneven) == ["kvoffload: 2 of 3 rows, 50%, about 100 s left"]


@pytest.mark.parametrize("is_terminal", [False, True])
def test_a_continued_sweep_is_reported(is_terminal: bool) -> None:
    begun = [(0.0, Progress(20, 48, 0, 2800)), (1.0, Progress(21, 48, 100, 2800))]
    assert progress_lines(begun, is_terminal=is_terminal) == ["kvoffload: resuming, 20 of 48 done"]
    assert progress_lines(steps(1), is_terminal=is_terminal) == []


def test_quiet_is_quiet() -> None:
    assert progress_lines([(0.0, Progress(20, 48, 0, 2800)), *steps(40)], quiet=True) == []


def test_more_hits_than_the_optimum_are_an_error(
    chat: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def boasting(task: Task) -> Measurement | Failure:
        outcome = tasks.attempt(task)
        assert isinstance(outcome, Measurement)
        if task.config.policy != "arc":
            return outcome
        report = msgspec.structs.replace(outcome.report, prefix_hit_ratio=0.97)
        return msgspec.structs.replace(outcome, report=report)

    monkeypatch.setattr(workers, "attempt", boasting)
    output = tmp_path / "out.csv"
    done = kvoffload("sweep", chat, "--capacities", "5%", "--jobs", "1", "--output", output)
    errors = done.stderr.splitlines()
    assert done.returncode == 1
    assert len(errors) == 2
    assert errors[0].startswith(
        "kvoffload: better than the optimum: small-chat: arc, all, on-compute, capacity 5%: "
        "prefix-hit ratio 0.97, but an optimal policy reaches 0."
    )
    assert "a cache without limit" in errors[1]
    assert output.exists(), "the rows are kept for inspection"


class Failing(LRU):
    """Fails at the first eviction."""

    name = "failing"

    def replace(self, *arguments: object) -> None:
        raise ZeroDivisionError("of all things")


def test_a_failing_policy_is_named_and_other_rows_are_kept(chat: str, tmp_path: Path) -> None:
    output = tmp_path / "out.csv"
    policies = f"lru,{__name__}:Failing"
    done = kvoffload("sweep", chat, "--policies", policies, "--capacities", "5%", "--jobs", "1",
                     "--output", output)  # fmt: skip
    assert done.returncode == 1
    line = Failing.replace.__code__.co_firstlineno + 1
    assert done.stderr == (
        f"kvoffload: small-chat: {__name__}:Failing, all, on-compute, capacity 5%: policy Failing: replace "
        f"raised ZeroDivisionError: of all things (test_sweep.py, line {line}); 1 of 2 rows are kept in "
        f"{output}.journal: run the same command again to go on\n"
    )
    with pytest.raises(SweepError, match="ZeroDivisionError"):
        Sweep([chat], Grid((f"{__name__}:Failing",)), work=Work(jobs=1)).run()


# ---- on a cluster


@pytest.mark.slow
def test_a_cluster_computes_the_same_rows(chat: str, rag: str, tmp_path: Path, scheduler: str) -> None:
    outputs = [tmp_path / "cluster.csv", tmp_path / "here.csv"]
    Sweep([chat, rag], SMALL, work=Work(scheduler=scheduler, output=outputs[0])).run()
    Sweep([chat, rag], SMALL, work=Work(jobs=1, output=outputs[1])).run()
    assert outputs[0].read_bytes() == outputs[1].read_bytes()


@pytest.mark.slow
def test_a_cluster_needs_no_local_files(
    chat: str, tmp_path: Path, scheduler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here.jsonl").write_bytes(Path(chat).read_bytes())
    (row,) = Sweep(["here.jsonl"], Grid(("lru",)), work=Work(scheduler=scheduler)).run().rows
    assert row.requests == load_trace(chat).requests


@pytest.mark.slow
def test_a_cluster_with_other_code_is_refused(
    scheduler: str,
) -> None:
    with pytest.raises(ConfigError, match=r"its workers need kvoffload .*: other code"):
        ClusterWorkers(scheduler, digest="of other code")


@pytest.mark.slow
def test_a_policy_that_fails_on_a_cluster(chat: str, scheduler: str) -> None:
    """A local policy cannot be imported on the cluster, or fails there (`-m pytest` adds the directory)."""
    with pytest.raises(SweepError, match=r"Failing.*(ZeroDivisionError|No module named)"):
        Sweep([chat], Grid((f"{__name__}:Failing",)), work=Work(scheduler=scheduler)).run()


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:1", "nonsense", "http://127.0.0.1:1"])
def test_a_scheduler_that_does_not_answer(address: str) -> None:
    pytest.importorskip("distributed", reason="Dask (distributed) is not installed")
    with pytest.raises(ConfigError, match=f"scheduler: '{address}' is invalid; no Dask scheduler"):
        ClusterWorkers(address, timeout_s=0.5)


def test_every_column_is_explained() -> None:
    text = (Path(__file__).resolve().parents[2] / "docs" / "sweep.md").read_text()
    assert [name for name in Row.__struct_fields__ if f"`{name}`" not in text] == []


def test_a_policy_whose_constructor_fails_is_refused(chat: str, replays: list[Task], tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    lines = ["from kvoffload.policies.lru import LRU", "class Mine(LRU):", "    name = 'mine'"]
    file.write_text("\n".join([*lines, "    def __init__(self, index, more): pass"]))
    done = kvoffload("sweep", chat, "--policies", f"{file}:Mine")
    message = f"kvoffload: policy: '{file}:Mine' is invalid; its constructor fails: TypeError: "
    assert (done.returncode, done.stderr[: len(message)], replays) == (2, message, [])
