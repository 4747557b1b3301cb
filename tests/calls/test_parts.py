"""Recordings in parts: the size limit, damaged and forged states, failed cuts, and the command."""

from __future__ import annotations

import errno
import json
import os
import pickle
import shutil
import zlib
from pathlib import Path
from typing import IO, Any

import pytest

from kvoffload.calls import parts as parts_module
from kvoffload.calls import recorder as recorder_module
from kvoffload.calls.file_format import CONTINUED, MAGIC, FrameReader, frame_checksum
from kvoffload.calls.parts import parts_of
from kvoffload.calls.recorded import RecordedManager
from kvoffload.calls.recorder import CallRecorder
from kvoffload.calls.replay import CallReplay
from kvoffload.calls.series import replay_series
from kvoffload.calls.state import StateError, decode, encode
from kvoffload.errors import TraceError
from support.naive.lru import NaiveLRU
from support.recorded_calls import CutHere, live, recorded, replayed, rotating, take
from support.run_cli import kvoffload
from support.timeouts import HANGS_S

LIMIT = 24_000


@pytest.fixture(autouse=True)
def _paused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pause the threads of recorders: `take` writes and rotates."""
    monkeypatch.setattr(recorder_module, "POLL_S", 1e6)


class Never:
    """A cut that never ends."""

    def __init__(self, part: Path, beginning: Path) -> None:
        self.stopped = False

    def poll(self) -> str | None:
        return None

    def stop(self) -> None:
        self.stopped = True


def serve(manager: RecordedManager, requests: int = 400, first: int = 0) -> None:
    """Serve requests, and write the calls after every twentieth request."""
    for number in range(first, first + requests):
        live(manager, (number * 5) % 14)
        if number % 20 == 19:
            take(manager)


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a recording that exceeds the limit."""
    folder = tmp_path_factory.mktemp("parts")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recorder_module, "POLL_S", 1e6)
        manager = rotating(folder / "kv.calls", 12, LIMIT)
        serve(manager, 2000)
        manager.end_recording()
    assert manager.recorder.ended == "closed"
    return folder


@pytest.fixture
def parts(recording: Path, tmp_path: Path) -> list[Path]:
    """A copy of the recording's remaining parts."""
    for path in recording.iterdir():
        shutil.copy(path, tmp_path)
    return parts_of(tmp_path / "kv.calls")


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records]


def test_the_newest_calls_remain_within_the_limit(parts: list[Path], tmp_path: Path) -> None:
    numbers = [int(path.stem.split(".part")[1]) for path in parts]
    assert numbers[0] > 2, "the first parts are removed"
    assert numbers == list(range(numbers[0], numbers[0] + len(parts)))
    assert sorted(tmp_path.iterdir()) == sorted(parts), "no other file remains"
    sizes = [path.stat().st_size for path in parts]
    assert LIMIT // 2 < sum(sizes) <= LIMIT + 500  # the end mark is written beyond the limit
    assert max(sizes) < LIMIT // 3
    outcomes = [replayed(path) for path in parts]
    assert [outcome.difference for outcome in outcomes] == [None] * len(parts)
    assert [outcome.end for outcome in outcomes] == [CONTINUED] * (len(parts) - 1) + ["closed"]
    total = replay_series(parts)
    assert (total.difference, total.num_parts) == (None, len(parts))
    assert total.num_calls == sum(outcome.num_calls for outcome in outcomes) > 2000


def test_a_later_recording_does_not_mix_with_the_parts(parts: list[Path], tmp_path: Path) -> None:
    assert not (tmp_path / "kv.calls").exists()
    manager = recorded(tmp_path / "kv.calls", 12)
    live(manager, 0)
    manager.end_recording()
    assert manager.recorder.path == tmp_path / "kv-2.calls"
    assert parts_of(tmp_path / "kv.calls") == parts


def test_parts_of_one_part_are_this_part(parts: list[Path], tmp_path: Path) -> None:
    assert parts_of(parts[1]) == [parts[1]]
    (tmp_path / "kv.part3x.calls").touch()
    (tmp_path / "kv-2.part1.calls").touch()
    assert parts_of(tmp_path / "kv.calls") == parts


def frames_of(content: bytes) -> list[int]:
    return [at for at in range(len(content)) if content[at : at + 4] == b"KVOF"]


def test_every_changed_byte_of_a_state_is_found(parts: list[Path]) -> None:
    path = parts[1]
    whole = path.read_bytes()
    start, stop = frames_of(whole)[1:3]
    for at in range(start, stop, 7):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x10]) + whole[at + 1 :])
        with pytest.raises(
            TraceError, match=r"part\d+\.calls: the state at the beginning is incomplete or damaged"
        ):
            FrameReader(path)
    for at in range(start, stop, 97):
        path.write_bytes(whole[:at])
        with pytest.raises(TraceError, match="the state at the beginning is incomplete or damaged"):
            FrameReader(path)


def with_state(path: Path, state: bytes) -> None:
    """Replace the state at the beginning of a part, with a correct checksum."""
    content = path.read_bytes()
    start, stop = frames_of(content)[1:3]
    head = content[start : start + 8] + len(state).to_bytes(4, "little") + content[start + 12 : start + 24]
    checksum = frame_checksum(head + bytes(8), state).to_bytes(8, "little")
    path.write_bytes(content[:start] + head + checksum + state + content[stop:])


def test_a_different_state_is_a_difference(parts: list[Path]) -> None:
    path = parts[1]
    with FrameReader(path) as reader:
        assert reader.state is not None
        state = decode(reader.state)
    with_state(path, encode(state))
    assert replayed(path).difference is None, "the same state in another encoding"
    links = state["manager"].policy.state.order.links
    links[[0, 1]] = links[[1, 0]]
    with_state(path, encode(state))
    assert replayed(path).difference is not None


def test_a_state_without_the_running_requests_is_refused(parts: list[Path]) -> None:
    path = parts[1]
    with FrameReader(path) as reader:
        assert reader.state is not None
        state = decode(reader.state)
    del state["_requests"]
    with_state(path, encode(state))
    with pytest.raises(
        TraceError, match=r"the state at the beginning, written by kvoffload .* cannot be read"
    ):
        replayed(path)


class Runs:
    """An object that calls a function when it is read."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize(
    "call",
    [
        (os.system, "false"),
        (eval, "1"),
        (getattr, 1, "real"),
        (pickle.loads, b"N."),
        (zlib.crc32, b""),
        (open, os.devnull),
        (CallRecorder, Path("x"), 1),
        (kvoffload, "policies"),
    ],
)
def test_a_state_cannot_call_other_code(call: tuple[Any, ...]) -> None:
    with pytest.raises(StateError, match="a state has no "):
        decode(encode({"manager": Runs(*call)}))


def test_a_part_without_a_state_needs_the_part_before(tmp_path: Path) -> None:
    """After a kill during a cut, the newest part has no state, and the part before is still there."""
    manager = rotating(tmp_path / "kv.calls", 12, LIMIT, start_cut=Never)  # type: ignore[arg-type]
    serve(manager, 600)
    manager.end_recording()
    first, second = parts_of(tmp_path / "kv.calls")
    with pytest.raises(TraceError, match="it has no state at the beginning"):
        replayed(second)
    total = replay_series([first, second])
    assert (total.difference, total.end, total.num_parts) == (None, "closed", 2)
    content = first.read_bytes()
    first.write_bytes(content[: frames_of(content)[-2]])
    with pytest.raises(TraceError, match="it has no state at the beginning"):
        replay_series([first, second])


def test_a_damaged_part_does_not_hinder_the_next(parts: list[Path]) -> None:
    content = parts[0].read_bytes()
    parts[0].write_bytes(content[: frames_of(content)[-3]])
    total = replay_series(parts)
    assert (total.difference, total.end) == (None, "closed")
    assert total.warnings == [f"{parts[0].name} has no end: its last calls are missing"]


def test_a_cut_that_takes_too_long_ends_the_recording_at_the_limit(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    manager = rotating(tmp_path / "kv.calls", 12, LIMIT, start_cut=Never)  # type: ignore[arg-type]
    serve(manager, 2000)
    (line,) = warnings_of(caplog)
    assert "has ended: it has reached its limit" in line
    manager.end_recording()
    parts = parts_of(tmp_path / "kv.calls")
    assert sum(path.stat().st_size for path in parts) <= LIMIT + 500
    assert replay_series(parts).difference is None


@pytest.mark.parametrize(
    ("problem", "line"),
    [
        ("the replay differs", "cannot be rotated: the replay differs"),
        ("", "cannot be rotated: the state at the beginning of a part takes"),
    ],
)
def test_a_cut_that_fails_ends_the_rotation(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, problem: str, line: str
) -> None:
    class Fails(CutHere):
        def __init__(self, part: Path, beginning: Path) -> None:
            super().__init__(part, beginning)
            self.problem = problem

    if not problem:
        monkeypatch.setattr(parts_module, "STATE_SHARE", 1000)
    manager = rotating(tmp_path / "kv.calls", 12, LIMIT, start_cut=Fails)
    serve(manager, 2000)
    manager.end_recording()
    lines = warnings_of(caplog)
    assert len(lines) == 2, lines
    assert line in lines[0]
    assert "has ended: it has reached its limit" in lines[1]
    assert [path.name for path in parts_of(tmp_path / "kv.calls")] == ["kv.calls", "kv.part2.calls"]
    assert replay_series(parts_of(tmp_path / "kv.calls")).difference is None
    assert not list(tmp_path.glob("*.new"))


def test_a_cut_that_cannot_start_ends_the_rotation(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def cannot(part: Path, beginning: Path) -> CutHere:
        raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

    manager = rotating(tmp_path / "kv.calls", 12, LIMIT, start_cut=cannot)
    serve(manager, 600)
    (line,) = warnings_of(caplog)
    assert "cannot be rotated: Resource temporarily unavailable" in line
    assert manager.recorder.ended is None
    manager.end_recording()
    assert replay_series(parts_of(tmp_path / "kv.calls")).end == "closed"


def test_a_disk_that_is_full_at_a_rotation_ends_the_recording_with_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def create(path: Path) -> IO[bytes]:
        if "part" in path.name:
            raise OSError(errno.ENOSPC, "No space left on device")
        return path.open("xb")

    manager = RecordedManager(12, recorder=CallRecorder(tmp_path / "kv.calls", LIMIT, create, CutHere))
    serve(manager)
    (line,) = warnings_of(caplog)
    assert line.endswith("has ended: No space left on device")
    manager.end_recording()
    assert replayed(tmp_path / "kv.calls").difference is None


def test_a_policy_in_python_is_not_rotated(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    manager = rotating(tmp_path / "kv.calls", 12, LIMIT, policy=NaiveLRU)
    serve(manager, 2000)
    manager.end_recording()
    (line,) = warnings_of(caplog)
    assert "has ended: it has reached its limit" in line
    (path,) = tmp_path.iterdir()
    assert LIMIT // 2 < path.stat().st_size < LIMIT + 500
    outcome = replayed(path)
    assert (outcome.difference, outcome.num_calls > 500) == (None, True)
    assert outcome.end.startswith("it has reached its limit")


def test_the_cut_of_a_damaged_part_fails(parts: list[Path], tmp_path: Path) -> None:
    path = parts[1]
    content = path.read_bytes()
    path.write_bytes(content[: frames_of(content)[-2]])
    assert CutHere(path, tmp_path / "new").poll() == f"{path} is damaged"
    assert not (tmp_path / "new").exists()


def test_a_version_3_file_is_read(tmp_path: Path) -> None:
    manager = recorded(tmp_path / "kv.calls", 12)
    live(manager, 0)
    manager.end_recording()
    content = (tmp_path / "kv.calls").read_bytes()
    header = content.index(b',"part":1,"has_state":false')
    length = int.from_bytes(content[len(MAGIC) + 12 : len(MAGIC) + 16], "little")
    body = content[44:header] + content[header + 27 : 44 + length]
    head = content[12:20] + len(body).to_bytes(4, "little") + content[24:36]
    checksum = frame_checksum(head + bytes(8), body).to_bytes(8, "little")
    old = MAGIC + (3).to_bytes(4, "little") + head + checksum + body + content[44 + length :]
    (tmp_path / "old.calls").write_bytes(old)
    assert replayed(tmp_path / "old.calls").end == "closed"


@pytest.mark.slow
def test_a_process_cuts_and_the_command_replays(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The test runs the steps of the recorder's thread, and waits for each cut."""
    manager = RecordedManager(12, recorder=CallRecorder(tmp_path / "kv.calls", LIMIT))
    for number in range(900):
        live(manager, (number * 5) % 14)
        if number % 20 == 19:
            take(manager)
            if (cut := manager.recorder._parts._cut) is not None:
                cut._process.wait(HANGS_S)  # type: ignore[attr-defined]
                take(manager)
                assert manager.recorder._parts._cut is None
    manager.end_recording()
    assert (manager.recorder.ended, warnings_of(caplog)) == ("closed", [])
    parts = parts_of(tmp_path / "kv.calls")
    assert len(parts) > 2
    assert sorted(tmp_path.iterdir()) == sorted(parts)
    done = kvoffload("replay", tmp_path / "kv.calls", "--as-recorded")
    assert done.returncode == 0, done.stderr
    report = json.loads(kvoffload("replay", parts[-1], "--as-recorded", "--format", "json").stdout)
    assert (report["equal"], report["num_parts"], report["end"]) == (True, 1, "closed")
    assert report["first_part"] == int(parts[-1].stem.split(".part")[1])
    with FrameReader(parts[-1]) as reader:
        assert CallReplay(reader).run().difference is None
    content = bytearray(parts[-1].read_bytes())
    content[frames_of(bytes(content))[1] + 40] ^= 1
    parts[-1].write_bytes(content)
    done = kvoffload("replay", tmp_path / "kv.calls", "--as-recorded")
    assert done.returncode == 2
    assert "the state at the beginning is incomplete or damaged" in done.stderr
