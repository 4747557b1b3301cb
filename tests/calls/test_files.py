"""Files of recorded calls: torn tails, damage, limits, full disks, differences, and the command."""

from __future__ import annotations

import errno
import io
import json
import logging
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import IO

import numpy as np
import pytest

from kvoffload.calls import recorder as recorder_module
from kvoffload.calls.file_format import MAGIC, FrameReader
from kvoffload.calls.recorded import RecordedManager
from kvoffload.calls.recorder import CallRecorder
from kvoffload.calls.replay import manager_of
from kvoffload.core.manager import OffloadingManager
from kvoffload.core.plans import LookupResult, PrefixLookup
from kvoffload.core.protection import Protected
from kvoffload.errors import MisuseError, TraceError
from kvoffload.structures.index import words_with_hash
from kvoffload.structures.keys import Keys
from support.naive.choice import first_unprotected
from support.naive.lru import NaiveLRU
from support.recorded_calls import KEYS, live, recorded, replayed
from support.run_cli import kvoffload
from support.timeouts import HANGS_S

RING_WORDS = 1 << 10


def recording(path: Path, requests: int = 30, **options: object) -> Path:
    """Record a manager of 12 blocks."""
    manager = recorded(path, 12, **options)  # type: ignore[arg-type]
    for number in range(requests):
        live(manager, (number * 5) % 14)
    manager.end_recording()
    assert manager.recorder.ended == "closed"
    return manager.recorder.path


def test_every_hash_maps_to_a_distinct_key_of_eight_bytes() -> None:
    from kvoffload.core.request import HASH, RequestContext
    from kvoffload.core.request import Path as RequestPath

    hashes = np.random.default_rng(1).integers(0, 2**64, 100, np.uint64, endpoint=False)
    ctx = RequestContext("r", 8)
    ctx.add(Keys(words_with_hash(hashes), 8))
    assert RequestPath.over(ctx.memory).records[:100, HASH].tolist() == hashes.tolist()


def test_a_new_file_for_each_recorder(tmp_path: Path) -> None:
    paths = [recording(tmp_path / "kv.calls", 2) for _ in range(3)]
    assert [path.name for path in paths] == ["kv.calls", "kv-2.calls", "kv-3.calls"]
    assert [replayed(path).num_calls for path in paths] == [8] * 3


def test_one_recorder_records_one_manager(tmp_path: Path) -> None:
    recorder = CallRecorder(tmp_path / "kv.calls", 1 << 20)
    RecordedManager(12, recorder=recorder)
    manager = RecordedManager(12, recorder=recorder)  # nothing was recorded for the first manager
    live(manager, 0)
    with pytest.raises(MisuseError, match="has recorded another"):
        RecordedManager(12, recorder=recorder)
    manager.end_recording()
    assert replayed(recorder.path).num_calls == 4


def test_a_tail_torn_at_any_byte_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last frame can be torn at any byte: the calls before it are replayed."""
    monkeypatch.setattr(recorder_module, "FRAME_WORDS", 200)
    whole = recording(tmp_path / "kv.calls").read_bytes()
    starts = [at for at in range(len(whole)) if whole[at : at + 4] == b"KVOF"]
    assert len(starts) > 4
    last, torn = starts[-2], tmp_path / "torn.calls"
    torn.write_bytes(whole[:last])
    before = replayed(torn)
    assert before.num_calls > 100
    for stop in range(last + 1, starts[-1]):
        torn.write_bytes(whole[:stop])
        outcome = replayed(torn)
        assert (outcome.num_calls, outcome.num_cut) == (before.num_calls, stop - last)
        assert (outcome.difference, outcome.end) == (None, "")
    torn.write_bytes(whole[: starts[-1]])
    assert replayed(torn).num_calls > before.num_calls


def test_a_damaged_frame_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder_module, "FRAME_WORDS", 200)
    path = recording(tmp_path / "kv.calls")
    whole = path.read_bytes()
    starts = [at for at in range(len(whole)) if whole[at : at + 4] == b"KVOF"]
    for at in (starts[2], starts[2] + 5, starts[2] + 20, starts[2] + 40):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        outcome = replayed(path)
        assert outcome.num_cut == len(whole) - starts[2]
        assert outcome.difference is None


class Wrong(OffloadingManager):
    """Manager with a bug: one ready block less from its n-th lookup on."""

    healthy_lookups = 20

    def lookup(self, *arguments: object, **keywords: object) -> PrefixLookup:
        hits = super().lookup(*arguments, **keywords)  # type: ignore[arg-type]
        self.healthy_lookups -= 1
        if self.healthy_lookups >= 0 or not hits.num_ready:
            return hits
        return PrefixLookup(hits.num_ready - 1, LookupResult.MISS)


def test_one_wrong_result_is_the_first_difference(tmp_path: Path) -> None:
    path = recording(tmp_path / "kv.calls")
    outcome = replayed(path, Wrong(12, key_bytes=8))
    assert outcome.difference is not None
    assert outcome.difference.kind == "lookup"
    assert outcome.difference.expected["num_ready"] == outcome.difference.found["num_ready"] + 1
    assert outcome.difference.request > 20
    assert [block["state"] for block in outcome.difference.blocks][:1] == ["ready"]


def test_another_configuration_is_a_difference(tmp_path: Path) -> None:
    path = recording(tmp_path / "kv.calls")
    for manager in (OffloadingManager(11, key_bytes=8), OffloadingManager(12, key_bytes=8, policy="fifo")):
        outcome = replayed(path, manager)
        assert outcome.difference is not None
        assert outcome.difference.kind == "prepare_store"
        assert outcome.difference.expected != outcome.difference.found


def test_the_counters_at_the_end_are_compared(tmp_path: Path) -> None:
    path = recording(tmp_path / "kv.calls")
    with FrameReader(path) as reader:
        manager = manager_of(reader.header)
    manager._state.refused += 1
    outcome = replayed(path, manager)
    assert outcome.difference is not None
    assert outcome.difference.kind == "the counters at the end"


def test_evicted_blocks_are_named(tmp_path: Path) -> None:
    path = recording(tmp_path / "kv.calls", policy=f"{__name__}:Backwards")
    outcome = replayed(path, OffloadingManager(12, key_bytes=32))
    assert outcome.difference is not None
    assert outcome.difference.kind == "prepare_store"
    recorded_keys, found_keys = (
        [bytes.fromhex(key) for key in result["evicted"]]
        for result in (outcome.difference.expected, outcome.difference.found)
    )
    assert recorded_keys != found_keys
    assert {*recorded_keys, *found_keys} <= {*KEYS}


class Backwards(NaiveLRU):
    """Policy that evicts the most recent block."""

    name = "backwards"

    def victim(self, key: bytes, protected: Protected) -> int:
        slot = first_unprotected(self.slots[::-1], protected)
        assert slot is not None
        self.slots.remove(slot)
        return slot


class FullDisk(io.BytesIO):
    """A file on a disk with room for `room` bytes."""

    room = 400

    def write(self, data: bytes) -> int:  # type: ignore[override]
        if self.tell() + len(data) > self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(data)


def many(manager: OffloadingManager, requests: int = 400) -> None:
    chance = np.random.default_rng(3)
    for number in range(requests):
        keys = [KEYS[number % 30], *(chance.bytes(32) for _ in range(8))]
        ctx = manager.begin_request("r", keys)
        plan = manager.prepare_store(keys, ctx)
        assert plan is not None
        manager.complete_store(plan)
        manager.finish_request(ctx)


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_full_disk_ends_the_recording_with_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder_module, "FLUSH_S", 0.0)
    file = FullDisk()

    def create(path: Path) -> IO[bytes]:
        return file

    manager = RecordedManager(12, recorder=CallRecorder(tmp_path / "kv.calls", 1 << 20, create))
    many(manager)
    manager.end_recording()
    assert manager.recorder.ended == "No space left on device"
    (line,) = warnings_of(caplog)
    assert line.endswith("kv.calls has ended: No space left on device")
    many(manager, 3)  # the manager continues


def test_a_writer_that_does_not_keep_up_ends_the_recording(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvoffload.calls.recorded.RING_WORDS", 1 << 10)
    monkeypatch.setattr(recorder_module, "POLL_S", 60.0)
    manager = recorded(tmp_path / "kv.calls", 12)
    many(manager)
    manager.end_recording()
    (line,) = warnings_of(caplog)
    assert "the writer did not keep up" in line
    outcome = replayed(manager.recorder.path)
    assert outcome.difference is None
    assert 10 < outcome.num_calls < 100


def test_a_disk_that_hangs_at_the_end_is_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = threading.Event()

    class Hanging(io.FileIO):
        def write(self, data: bytes) -> int:  # type: ignore[override]
            assert answers.wait(HANGS_S)
            return super().write(data)

    monkeypatch.setattr(recorder_module, "CLOSING_S", 0.01)
    recorder = CallRecorder(tmp_path / "kv.calls", 1 << 20, lambda free: Hanging(free, "xb"))  # type: ignore[arg-type,return-value]
    manager = RecordedManager(12, recorder=recorder)
    live(manager, 0)
    manager.end_recording()
    manager.end_recording()
    (line,) = warnings_of(caplog)
    assert "is still open after 0.01 s: its end may be missing" in line
    answers.set()
    monkeypatch.setattr(recorder_module, "CLOSING_S", HANGS_S)
    manager.end_recording()
    assert replayed(recorder.path).end == "closed"


def test_a_ring_that_wraps_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvoffload.calls.recorded.RING_WORDS", RING_WORDS)
    monkeypatch.setattr(recorder_module, "POLL_S", 60.0)
    manager = recorded(tmp_path / "kv.calls", 12)
    for _ in range(100):
        many(manager, 2)
        manager.recorder._take(manager._log, True)  # in place of the thread, which pauses
    assert manager._log.head > 9 * RING_WORDS
    manager.end_recording()
    outcome = replayed(manager.recorder.path)
    assert (outcome.difference, outcome.end, outcome.num_calls) == (None, "closed", 600)


# ---- the command


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return recording(tmp_path_factory.mktemp("calls") / "kv.calls")


def test_the_command_replays(sound: Path) -> None:
    done, num_calls = kvoffload("replay", sound, "--as-recorded"), replayed(sound).num_calls
    assert (done.returncode, num_calls > 130) == (0, True), done.stderr
    assert f"All decisions of {num_calls} calls are equal." in done.stdout, done.stdout
    report = json.loads(kvoffload("replay", sound, "--as-recorded", "--format", "json").stdout)
    assert (report["equal"], report["difference"], report["end"]) == (True, None, "closed")
    assert report["calls"]["lookup"] == 30
    assert report["configuration"]["capacity_blocks"] == 12


def test_the_command_shows_a_difference(sound: Path, tmp_path: Path) -> None:
    header_at = sound.read_bytes().index(b'"capacity_blocks":12')
    content = bytearray(sound.read_bytes())
    content[header_at : header_at + 20] = b'"capacity_blocks":11'
    changed = tmp_path / "changed.calls"
    changed.write_bytes(_resealed(bytes(content)))
    done = kvoffload("replay", changed, "--as-recorded")
    assert done.returncode == 1, done.stderr
    assert "First difference: call" in done.stdout
    assert "prepare_store of request" in done.stdout
    report = json.loads(kvoffload("replay", changed, "--as-recorded", "--format", "json").stdout)
    assert report["difference"]["kind"] == "prepare_store"
    assert report["difference"]["calls"]


def _resealed(content: bytes) -> bytes:
    """Correct the checksum of the header's frame."""
    from kvoffload.calls.file_format import frame_checksum

    at = len(MAGIC) + 4
    length = int.from_bytes(content[at + 8 : at + 12], "little")
    body = content[at + 32 : at + 32 + length]
    checksum = frame_checksum(content[at : at + 32], body).to_bytes(8, "little")
    return content[: at + 24] + checksum + content[at + 32 :]


def test_another_version_of_the_package_is_a_warning(sound: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.calls"
    content = sound.read_bytes().replace(b'"kvoffload":"0.1.0"', b'"kvoffload":"9.9.9"')
    other.write_bytes(_resealed(content))
    done = kvoffload("replay", other, "--as-recorded")
    assert done.returncode == 0
    assert "recorded by kvoffload 9.9.9, replayed by 0.1.0: decisions may differ" in done.stdout


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: b"{}\n", "not a recording of calls"),
        (
            lambda content: content[:8] + b"\x07" + content[9:],
            "format version 7; this kvoffload reads versions 3 and 4",
        ),
        (lambda content: content[:60], "the header is incomplete or damaged"),
        (
            lambda content: _resealed(content.replace(b'"policy":"lru"', b'"policy":"n:X"')),
            "policy: 'n:X' is invalid; it cannot be imported",
        ),
    ],
)
def test_files_that_cannot_be_replayed(sound: Path, tmp_path: Path, change, message: str) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "wrong.calls"
    path.write_bytes(change(sound.read_bytes()))
    done = kvoffload("replay", path, "--as-recorded")
    assert (done.returncode, message in done.stderr) == (2, True), done.stderr


def test_options_that_contradict_the_recording_are_refused(sound: Path, tmp_path: Path) -> None:
    done = kvoffload("replay", sound, "--as-recorded", "--policy", "arc", "--capacity", "7")
    assert done.returncode == 2
    assert "policy: 'arc' is invalid; --as-recorded replays the recorded configuration" in done.stderr
    assert "capacity: '7'" in done.stderr
    assert kvoffload("replay", tmp_path / "none.calls", "--as-recorded").returncode == 2


def test_a_recording_is_no_trace(sound: Path) -> None:
    done = kvoffload("replay", sound)
    assert done.returncode == 2
    assert "it is a recording of calls: add --as-recorded" in done.stderr


def test_calls_before_a_kill_are_replayed(tmp_path: Path) -> None:
    """The records of the last second may be lost; the file is sound."""
    program = f"""
import os, signal, sys, time
from pathlib import Path
from kvoffload.calls import recorder
from support.recorded_calls import live, recorded
recorder.FLUSH_S = 0.0
manager = recorded(Path({str(tmp_path / "kv.calls")!r}), 12)
number = 0
while manager.recorder.path.stat().st_size < 20_000:  # several frames: a kill cuts the last one
    live(manager, number * 5 % 14)
    number += 1
os.kill(os.getpid(), signal.SIGKILL)
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert done.returncode == -signal.SIGKILL, done.stderr
    outcome = replayed(tmp_path / "kv.calls")
    assert (outcome.difference, outcome.end, outcome.num_calls > 0) == (None, "", True)


def test_a_trace_error_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "kv.calls").write_bytes(b"")
    with pytest.raises(TraceError, match=r"kv\.calls: not a recording"):
        FrameReader(tmp_path / "kv.calls")
