"""Recordings of an engine's requests, without vLLM: requests are stand-ins."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator
from enum import IntEnum
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest

from kvoffload.core.hints import Hints
from kvoffload.errors import CombinedConfigError, ConfigError, TraceError
from kvoffload.integrations.vllm.scheduler_side import record
from kvoffload.integrations.vllm.scheduler_side.record import MAX_QUEUED, FinishedRequest, Recorder
from kvoffload.integrations.vllm.scheduler_side.recording import Recording, call_recorder, recording
from kvoffload.integrations.vllm.shared.options import RecordOptions, parse_options
from kvoffload.traces.format import read_trace
from support.run_cli import kvoffload


class Reason(IntEnum):
    """A stand-in for vLLM's enum of reasons, whose most frequent member is 0."""

    STOP = 0

    def __str__(self) -> str:
        return "stop"


def request(name: str, tokens: int, *, at: float = 1e9, salt: int = 0, **other: Any) -> Any:
    """Return a stand-in for a finished request of vLLM."""
    return SimpleNamespace(
        **{
            "request_id": name,
            "arrival_time": at,
            "num_prompt_tokens": tokens,
            "num_output_tokens": 5,
            # The generated blocks follow the prompt's blocks.
            "block_hashes": [bytes([salt, number]) * 16 for number in range(tokens // 16 + 3)],
            "priority": 0,
            "cache_salt": None,
            "stop_reason": None,
            "kv_transfer_params": None,
            "get_finished_reason": lambda: Reason.STOP,
            **other,
        }
    )


@pytest.fixture
def recorder(tmp_path: Path) -> Iterator[Recorder]:
    made = Recorder(tmp_path / "kv.jsonl", 1 << 20, 16)
    yield made
    made.close()


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


class Source(NamedTuple):
    """A stand-in for vLLM's ``CacheHitSource``."""

    value: str


def test_a_recording_is_a_trace(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvoffload.integrations.vllm.scheduler_side.recording.time.time", lambda: 1e9 + 7.5)
    lost: list[int] = []
    follower = Recording(recorder, 16, lambda: lost.append(1))
    slow, quick = request("slow", 100), request("quick", 64, at=1e9 + 2)
    for item, on_gpu, served in ((slow, 0, {}), (quick, 16, {Source("host"): 32, Source("disk"): 16})):
        follower.looked_up(item, 0)
        follower.looked_up(item, on_gpu)
        follower.begins(item, lambda served=served: served)
        follower.begins(item, lambda: {Source("host"): 99})  # after a preemption
    aborted = request("aborted", 10, at=1e9 + 1, num_output_tokens=0, get_finished_reason=lambda: None)
    for item in (aborted, quick, slow):
        follower.finished(item)
    recorder.close()
    header, *written = lines(recorder.path)
    assert header == {"kvoffload_trace": 1, "block_tokens": 16, "source": "vllm", "in_order": False}
    assert [line["served_tokens"] for line in written] == [{}, {"gpu": 16, "host": 32, "disk": 16}, {}]
    assert [line["finished"] for line in written] == [1_000_000_007_500] * 3
    assert [line["input_length"] for line in written] == [10, 64, 100]
    trace = read_trace(recorder.path)
    assert trace.block_tokens == 16
    assert (trace.timestamps_ms - trace.timestamps_ms[0]).tolist() == [0, 1000, 2000]
    assert np.diff(trace.offsets).tolist() == [6, 0, 4]
    assert trace.refs[6:].tolist() == trace.refs[:4].tolist(), "equal hashes, equal ids"
    assert [trace.hints_of(i).finish_reason for i in range(3)] == ["stop", "", "stop"]
    assert (lost, follower._served, follower._on_gpu) == ([], {}, {})
    done = kvoffload("replay", recorder.path, "--capacity", "4", "--no-data", "--quiet", "--format", "json")
    assert json.loads(done.stdout)["prefix_hit_blocks"] == 4


def test_a_recording_has_none_of_the_engines_hashes(tmp_path: Path) -> None:
    texts, ids = [], []
    for _ in range(2):
        item = Recorder(tmp_path / "kv.jsonl", 1 << 20, 16)
        follower = Recording(item, 16, lambda: None)
        follower.finished(request("a", 64, salt=7))
        item.close()
        texts.append(item.path.read_text())
        ids.append(lines(item.path)[1]["hash_ids"])
    assert not set(ids[0]) & set(ids[1])
    assert all((bytes([7, 0]) * 16).hex() not in text for text in texts)


def test_facts_of_a_request_are_recorded_without_text_of_its_user(recorder: Recorder) -> None:
    follower = Recording(recorder, 16, lambda: None)
    given = {"kvoffload": {"session_over": True, "time_to_live_s": 60}}
    follower.finished(
        request("a", 32, cache_salt="ACME", priority=2, stop_reason=7, kv_transfer_params=given)
    )
    follower.finished(request("b", 32, cache_salt="ACME", stop_reason="my secret"))
    follower.finished(request("c", 32, priority=1, kv_transfer_params={"kvoffload": {"prio": 1}}))
    recorder.close()
    trace = read_trace(recorder.path)
    first, second, third = map(trace.hints_of, range(3))
    assert (first.finish_reason, first.session_over) == ("stop 7", True)
    assert (first.priority, first.time_to_live_s) == (2, 60)
    assert first.tenant == second.tenant != ""
    assert second.finish_reason == "stop"
    assert (third.priority, third.tenant) == (1, "")
    assert all(text not in recorder.path.read_text() for text in ("ACME", "secret"))


def test_each_start_writes_a_new_file(tmp_path: Path) -> None:
    made = [Recorder(tmp_path / "kv.jsonl", 1 << 20, 16) for _ in range(3)]
    for item in made:
        item.close()
        item.close()
    assert [item.path.name for item in made] == ["kv.jsonl", "kv-2.jsonl", "kv-3.jsonl"]


def finished(number: int = 0) -> FinishedRequest:
    return FinishedRequest(number, number, 16, 1, [bytes(16)], Hints(), {})


def test_a_full_file_ends_the_recording(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("vllm.kvoffload").propagate = True
    item = Recorder(tmp_path / "kv.jsonl", 1000, 16)
    for number in range(100):
        item.add(finished(number))
    item.close()
    assert 500 < item.path.stat().st_size <= 1000
    trace = read_trace(item.path)
    assert trace.requests < 20
    assert trace.timestamps_ms.tolist() == [1000 * n for n in range(trace.requests)]
    assert not item.add(finished())
    assert [record.getMessage() for record in caplog.records if "has ended" in record.getMessage()] == [
        f"kvoffload: recording to {item.path} has ended: the file has reached record_max_bytes "
        f"({item.path.stat().st_size:,} bytes)"
    ]


class Gated:
    """A file whose writes wait until the gate is open."""

    def __init__(self, file: Any, gate: threading.Event) -> None:
        self._file, self._gate = file, gate

    def write(self, data: bytes) -> None:
        self._gate.wait()
        self._file.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def test_a_disk_that_hangs_costs_requests_and_no_time(tmp_path: Path) -> None:
    item, gate = Recorder(tmp_path / "kv.jsonl", 1 << 30, 16), threading.Event()
    item._file = Gated(item._file, gate)  # type: ignore[assignment]
    lost: list[int] = []
    follower = Recording(item, 16, lambda: lost.append(1))
    for number in range(2 * MAX_QUEUED):
        follower.finished(request(str(number), 16, at=1e9 + number))
    kept = 2 * MAX_QUEUED - len(lost)
    assert MAX_QUEUED <= kept <= MAX_QUEUED + 1, "the queue, and the request that the thread is writing"
    gate.set()
    item.close()
    assert read_trace(item.path).requests == kept


@pytest.mark.parametrize("call", ["write", "close"])
def test_a_disk_that_fails_ends_the_recording(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, call: str
) -> None:
    logging.getLogger("vllm.kvoffload").propagate = True
    item = Recorder(tmp_path / "kv.jsonl", 1 << 30, 16)

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    assert item._file is not None
    item._file.close()
    calls = dict.fromkeys(("write", "flush", "close"), lambda *_: None) | {call: fail}
    item._file = SimpleNamespace(**calls)  # type: ignore[assignment]
    assert item.add(finished())
    item.close()
    assert not item.add(finished())
    assert "has ended: No space left on device" in caplog.text


def test_a_request_that_cannot_be_recorded_is_counted(recorder: Recorder) -> None:
    lost: list[int] = []
    follower = Recording(recorder, 16, lambda: lost.append(1))

    def broken() -> dict[Any, int]:
        raise KeyError("x")

    follower.begins(request("fine", 32), broken)
    follower.finished(request("fine", 32))
    follower.finished(request("no hashes", 32, block_hashes=[]))
    follower.finished(request("a gap", 32, block_hashes=[None, b"x"]))
    follower.finished(SimpleNamespace(request_id="strange"))
    recorder.close()
    assert [line["input_length"] for line in lines(recorder.path)[1:]] == [32]
    assert len(lost) == 3


def test_a_bug_of_the_thread_ends_the_recording_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    logging.getLogger("vllm.kvoffload").propagate = True
    item = Recorder(tmp_path / "kv.jsonl", 1 << 30, 16)
    monkeypatch.setattr(record, "encode_line", lambda line: 1 / 0)
    item.add(finished())
    item.close()
    assert "internal error: ZeroDivisionError" in caplog.text
    assert read_only_header(item.path)


def read_only_header(path: Path) -> bool:
    with pytest.raises(TraceError, match="no requests in it"):
        read_trace(path)
    return True


# ---- the option


def options(**given: Any) -> Any:
    return parse_options({"ram": 4096, **given})


def test_the_option(tmp_path: Path) -> None:
    assert options().record is None
    assert options(record="/a/b.jsonl", record_max_bytes="2MiB").record_max_bytes == 2**21
    for wrong in ("b.jsonl", "/a/b.jsonl.gz", "/a"):
        with pytest.raises(CombinedConfigError, match=r"allowed: an absolute path, NAME\.jsonl"):
            options(record=wrong)
    assert recording(options(), 16, lambda: None) is None
    started = recording(options(record=str(tmp_path / "kv.jsonl")), 16, lambda: None)
    assert started is not None
    started.recorder.close()


@pytest.mark.parametrize(
    "given",
    ["/a/b.jsonl,calls", "/a/b.jsonl,calls=true", {"path": "/a/b.jsonl", "calls": True}],
)
def test_the_option_with_calls(given: Any) -> None:
    assert options(record=given).record == RecordOptions("/a/b.jsonl", calls=True)
    assert str(options(record=given).record) == "/a/b.jsonl,calls"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("/a/b.jsonl,call", r"allowed: an absolute path, NAME\.jsonl; with the calls"),
        ({"path": "b.jsonl", "calls": True}, r"record: 'b\.jsonl' is invalid"),
        ({"path": "/a/b.jsonl", "cals": True}, r"record\.cals: .* calls"),
        ({"calls": True}, r"record\.path"),
        (7, "record: 7 is invalid"),
    ],
)
def test_wrong_options_of_a_recording(given: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        options(record=given)


def test_calls_of_a_shared_pool_are_not_recorded() -> None:
    with pytest.raises(ConfigError, match="with shared RAM only without calls"):
        parse_options({"ram": "1GiB,shared=node", "record": "/a/b.jsonl,calls"})
    assert parse_options({"ram": "1GiB,shared=node", "record": "/a/b.jsonl"}).record == RecordOptions(
        "/a/b.jsonl"
    )


def test_calls_go_to_a_second_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("vllm.kvoffload").propagate = True
    assert call_recorder(options()) is None
    assert call_recorder(options(record=str(tmp_path / "kv.jsonl"))) is None
    recorder = call_recorder(options(record=f"{tmp_path}/kv.jsonl,calls"))
    assert recorder is not None
    assert recorder.path == tmp_path / "kv.calls"
    recorder.close({})
    assert call_recorder(options(record=f"{tmp_path}/no/kv.jsonl,calls")) is None
    assert "calls are NOT recorded" in caplog.text


def test_a_place_that_cannot_be_written_costs_the_recording(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    logging.getLogger("vllm.kvoffload").propagate = True
    assert recording(options(record=str(tmp_path / "no" / "kv.jsonl")), 16, lambda: None) is None
    assert "requests are NOT recorded" in caplog.text


def test_the_command_makes_the_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    done = kvoffload("vllm-config", "--ram", "1GiB", "--record", "/a/b.jsonl", "--format", "json")
    flag = json.loads(done.stdout)
    assert flag["kv_connector"] == "KVOffloadConnector", "vLLM's own connector does not see requests"
    assert flag["kv_connector_extra_config"]["record"] == "/a/b.jsonl"
    refused = kvoffload("vllm-config", "--ram", "1GiB", "--record", "b.jsonl")
    assert "record: 'b.jsonl' is invalid; allowed: an absolute path" in refused.stderr
    monkeypatch.setenv("KVOFFLOAD_RECORD", "/c/d.jsonl")
    flag = json.loads(kvoffload("vllm-config", "--ram", "1GiB", "--format", "json").stdout)
    assert flag["kv_connector"] == "KVOffloadConnector"
