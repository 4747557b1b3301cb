"""Reading and writing trace files, and the exact error messages."""

from __future__ import annotations

import dataclasses
import gzip
import io
import json
import lzma
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from kvoffload.calls.file_format import is_recording
from kvoffload.core.hints import NO_HINTS, Hints
from kvoffload.errors import ConfigError, TraceError
from kvoffload.explain.recording import has_tokens
from kvoffload.traces import formats
from kvoffload.traces.conversion.source import kind_of
from kvoffload.traces.format import read_trace
from kvoffload.traces.formats.mooncake import write_trace
from kvoffload.traces.sessions import generate
from kvoffload.traces.sources import block_tokens_of, load_trace
from kvoffload.traces.trace import Trace, TraceHints
from kvoffload.traces.workloads import BUILTIN, builtin
from support.run_cli import kvoffload

SUFFIXES = ["", ".gz", ".xz", ".zst"]


def line(ids: list[object], *, input_length: object = None, timestamp: object = 0, **fields: object) -> str:
    length = 512 * len(ids) if input_length is None else input_length
    request = {"timestamp": timestamp, "input_length": length, "output_length": 7, "hash_ids": ids}
    return json.dumps({**request, **fields})


@pytest.fixture
def chat(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that writes lines into chat.jsonl."""

    def write(*lines: str | bytes) -> Path:
        path = tmp_path / "chat.jsonl"
        path.write_bytes(b"".join((x if isinstance(x, bytes) else x.encode()) + b"\n" for x in lines))
        return path

    return write


def chains(trace: Trace) -> list[list[int]]:
    """Return the ids of each request."""
    return [ids.tolist() for ids in np.split(trace.block_ids[trace.refs], trace.offsets[1:-1])]


def assert_equal(actual: Trace, expected: Trace) -> None:
    for name in ("refs", "offsets", "timestamps_ms", "output_tokens"):
        left, right = getattr(actual, name), getattr(expected, name)
        assert left.dtype == right.dtype, name
        assert np.array_equal(left, right), name


def test_reads_the_full_blocks_in_file_order(chat: Callable[..., Path]) -> None:
    path = chat(
        line([70, 80, 90], input_length=3 * 512 - 1, timestamp=0, session=4),
        line([70, -5], timestamp=1000),
        line([1], input_length=511, timestamp=3000),
        "",
        "  ",
    )
    trace = read_trace(path)
    assert chains(trace) == [[70, 80], [70, -5], []]
    assert trace.name == "chat"
    assert trace.block_ids.tolist() == [70, 80, -5]
    assert trace.refs.tolist() == [0, 1, 0, 2]
    assert trace.offsets.tolist() == [0, 2, 4, 4]
    assert trace.timestamps_ms.tolist() == [0, 1000, 3000]
    assert trace.output_tokens.tolist() == [7, 7, 7]
    assert trace.skipped_lines == 0
    assert [a.dtype for a in (trace.block_ids, trace.refs, trace.offsets)] == [np.int64, np.int32, np.int64]


def test_ids_may_use_all_64_bits(chat: Callable[..., Path]) -> None:
    assert chains(read_trace(chat(line([2**63 - 1, -(2**63)])))) == [[2**63 - 1, -(2**63)]]


def test_block_tokens_determine_the_number_of_full_blocks(chat: Callable[..., Path]) -> None:
    assert chains(read_trace(chat(line([1, 2, 3], input_length=149)), block_tokens=50)) == [[1, 2]]


BAD_LINES = {
    "not json": ("{", "invalid JSON (Input data was truncated)"),
    "two objects": (line([1]) + " x", "invalid JSON (JSON is malformed: trailing characters (byte 76))"),
    "array": ("[]", "line: expected object, got array"),
    "missing": ('{"timestamp": 1}', "field input_length: missing"),
    "negative": (line([1], timestamp=-1), "field timestamp: expected int >= 0"),
    "text for a time": (line([1], timestamp="1.5"), "field timestamp: expected int | float, got str"),
    "null": (line([1], input_length="x"), "field input_length: expected int, got str"),
    "huge": (line([1], timestamp=2**63), "field timestamp: expected int <= 9007199254740992"),
    "ids no list": ('{"timestamp":0,"input_length":1,"output_length":0,"hash_ids":5}',
                    "field hash_ids: expected array, got int"),
    "id of wrong type": (line([1, 2, 3, 4.5]), "field hash_ids[3]: expected int | str, got float"),
    "too few ids": (line([1, 2], input_length=1536),
                    "field hash_ids: 2 ids, but input_length 1536 has 3 blocks of 512 tokens"),
    "too many ids": (line(list(range(64)), input_length=1024),
                     "field hash_ids: 64 ids, but input_length 1024 has 2 blocks of 512 tokens"),
    "not utf-8": (b'{"\xff": 1}', "not UTF-8 (byte 2)"),
    "id twice": (line([1, 2, 1]), "field hash_ids[2]: id 1 occurs twice in this request"),
    "other parent": (line([9, 11]),
                     "field hash_ids[1]: id 11 follows id 9 here, but follows id 10 in line 1"),
    "no parent": (line([11]), "field hash_ids[0]: id 11 comes first here, but follows id 10 in line 1"),
    "reason no text": (line([1], finish_reason=3), "field finish_reason: expected str | null, got int"),
    "over no bool": (line([1], session_over="yes"), "field session_over: expected bool | null, got str"),
    "priority no int": (line([1], priority=1.5), "field priority: expected int | null, got float"),
    "priority a bool": (line([1], priority=True), "field priority: expected int | null, got bool"),
    "priority too large": (line([1], priority=2**63), "field priority: expected int <= 9223372036854775807"),
    "negative life": (line([1], time_to_live_s=-1.0), "field time_to_live_s: expected float >= 0.0"),
    "life no number": (line([1], time_to_live_s="1 h"),
                       "field time_to_live_s: expected float | null, got str"),
    "tenant no text": (line([1], tenant=["a"]), "field tenant: expected str | null, got array"),
    "new parent": (line([9, 10]), "field hash_ids[1]: id 10 follows id 9 here, but comes first in line 1"),
}  # fmt: skip


@pytest.mark.parametrize(("bad", "reason"), BAD_LINES.values(), ids=BAD_LINES)
def test_an_invalid_line_is_named_or_skipped(
    chat: Callable[..., Path], bad: str | bytes, reason: str
) -> None:
    path = chat(line([10, 11]), "", bad, line([10, 12]))
    with pytest.raises(TraceError) as error:
        read_trace(path)
    assert str(error.value) == f"{path}:3: {reason}"
    trace = read_trace(path, skip_bad_lines=True)
    assert chains(trace) == [[10, 11], [10, 12]]
    assert trace.skipped_lines == 1


@pytest.mark.parametrize("block_id", ["00ff", "ü", 2**64 - 1])
@pytest.mark.parametrize("late", [0, 1])
def test_an_error_shows_ids_as_in_the_file(chat: Callable[..., Path], block_id: int | str, late: int) -> None:
    """It showed the reader's numbers of ids that are not 64-bit numbers: ``id -1 follows id -3``."""
    path = chat(line(["a", block_id], timestamp=late), line(["b", block_id]))
    first, second = ("b", "a") if late else ("a", "b")
    shown = json.dumps(block_id, ensure_ascii=False)
    message = f'field hash_ids[1]: id {shown} follows id "{second}" here, but follows id "{first}" in line '
    with pytest.raises(TraceError) as error:
        read_trace(path)
    assert message in str(error.value)
    with pytest.raises(TraceError, match=r'id "twice" occurs twice in this request$'):
        read_trace(chat(line(["twice", "twice"])))


def test_a_skipped_line_defines_no_chain(chat: Callable[..., Path]) -> None:
    broken, good = line([5, 2, 3], timestamp=1), line([6, 3], timestamp=2)
    trace = read_trace(chat(line([1, 2]), broken, good, "nonsense"), skip_bad_lines=True)
    assert chains(trace) == [[1, 2], [6, 3]]
    assert trace.timestamps_ms.tolist() == [0, 2]
    assert trace.skipped_lines == 2


@pytest.mark.parametrize("block_tokens", [16, 64, 2048])
def test_another_block_size_is_refused_with_a_fitting_size(
    chat: Callable[..., Path], block_tokens: int
) -> None:
    lengths = (40 * block_tokens - 3, 41 * block_tokens, 99 * block_tokens + 1)
    lines = [line(list(range(-(-length // block_tokens))), input_length=length) for length in lengths]
    path = chat(*lines)
    with pytest.raises(TraceError, match=rf":1: .*; --block-tokens {block_tokens} would fit$"):
        read_trace(path)
    assert read_trace(path, block_tokens=block_tokens).block_refs == 39 + 41 + 99


WIDE = [2**64 - 1, 2**63, 2**127 + 5, "00ff", "0xdeadbeef", "", "ü"]


def test_ids_of_any_kind_are_distinct(chat: Callable[..., Path]) -> None:
    trace = read_trace(chat(line([1, *WIDE]), line([1, *WIDE[:3], "else"]), line([2])))
    assert chains(trace) == [[1, -1, -2, -3, -4, -5, -6, -7], [1, -1, -2, -3, -8], [2]]


def test_numbered_and_negative_ids_do_not_collide(chat: Callable[..., Path]) -> None:
    path = chat(line([5, 2**63]), line([6, -1]))
    for skip in (False, True):
        with pytest.raises(TraceError, match="negative ids mixed with ids that are not 64-bit numbers"):
            read_trace(path, skip_bad_lines=skip)


def test_times_with_a_fraction_are_seconds(chat: Callable[..., Path]) -> None:
    trace = read_trace(chat(line([1], timestamp=0.0), line([2], timestamp=61.1144), line([3], timestamp=62)))
    assert trace.timestamps_ms.tolist() == [0, 61_114, 62_000], "all of them"


def test_a_byte_order_mark_is_ignored(chat: Callable[..., Path]) -> None:
    assert chains(read_trace(chat(b"\xef\xbb\xbf" + line([1]).encode(), line([2])))) == [[1], [2]]


@pytest.mark.parametrize("suffix", [".gz", ".xz", ".zst"])
def test_compression_is_detected_by_the_first_bytes(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / "renamed.jsonl"
    path.write_bytes(COMPRESS[suffix](line([4, 5]).encode()))
    assert chains(read_trace(path)) == [[4, 5]]


@pytest.mark.parametrize("compress", [bytes, gzip.compress])
def test_standard_input_is_a_trace(
    monkeypatch: pytest.MonkeyPatch, compress: Callable[[bytes], bytes]
) -> None:
    content = io.BufferedReader(io.BytesIO(compress(line([4, 5]).encode())))  # type: ignore[arg-type]
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=content))
    trace = load_trace("-")
    assert (trace.name, chains(trace)) == ("stdin", [[4, 5]])


@pytest.fixture
def pipe() -> Iterator[str]:
    """The path of a pipe with a trace, such as ``<(zcat FILE)``."""
    read, write = os.pipe()
    os.write(write, (line([4, 5]) + "\n").encode())
    os.close(write)
    yield f"/dev/fd/{read}"
    os.close(read)


def test_a_pipe_is_read_once(pipe: str) -> None:
    """Any look into the file before reading would consume lines of the pipe."""
    assert not is_recording(Path(pipe))
    assert not has_tokens(pipe)
    with pytest.raises(ConfigError, match="from: missing; the format of a pipe cannot be detected"):
        kind_of(Path(pipe))
    assert block_tokens_of(pipe) == 512
    assert chains(load_trace(pipe)) == [[4, 5]]


@pytest.mark.parametrize("command", ["sweep", "plan"])
def test_a_pipe_is_refused_by_commands_whose_processes_read_the_trace(pipe: str, command: str) -> None:
    options = ("--gpus", "1") if command == "plan" else ()
    done = kvoffload(command, pipe, *options)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"{pipe!r} is invalid; allowed: " in done.stderr
    assert f"each process of a {command} reads" in done.stderr


def test_a_missing_file_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"no such file; allowed: .*agent, chat, rag \(did you mean chat\?"):
        load_trace("chta")


UNREADABLE = {
    "missing.jsonl": (None, "no such file or directory"),
    "empty.jsonl": (b"", "no requests in it"),
    "blank.jsonl": (b"\n\n", "no requests in it"),
    "empty.jsonl.gz": (b"", "no requests in it"),
    "empty.jsonl.zst": (b"", "no requests in it"),
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_an_unreadable_file_is_one_error(tmp_path: Path, name: str) -> None:
    content, reason = UNREADABLE[name]
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(TraceError) as error:
        read_trace(tmp_path / name)
    assert str(error.value) == f"{tmp_path / name}: {reason}"


def test_a_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="is a directory"):
        read_trace(tmp_path)


def test_a_file_without_a_valid_line_is_an_error_even_when_skipping(chat: Callable[..., Path]) -> None:
    path = chat("{", "}")
    with pytest.raises(TraceError) as error:
        read_trace(path, skip_bad_lines=True)
    assert str(error.value) == f"{path}: no requests in it (2 bad lines)"


COMPRESS = {".gz": gzip.compress, ".xz": lzma.compress, ".zst": zstandard.ZstdCompressor().compress}


@pytest.mark.parametrize("suffix", COMPRESS)
@pytest.mark.parametrize("skip", [False, True])
def test_a_truncated_file_is_an_error(tmp_path: Path, suffix: str, skip: bool) -> None:
    whole = COMPRESS[suffix](b"".join(line([i, -i - 1]).encode() + b"\n" for i in range(5000)))
    path = tmp_path / f"cut.jsonl{suffix}"
    for length in (len(whole) - 3, len(whole) // 2, 9):
        path.write_bytes(whole[:length])
        with pytest.raises(TraceError, match=r"cut\.jsonl\.\w+: damaged or truncated after line \d+ \("):
            read_trace(path, skip_bad_lines=skip)


@pytest.mark.parametrize("suffix", COMPRESS)
def test_a_file_of_another_kind_is_an_error(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"plain.jsonl{suffix}"
    path.write_text(line([1]) + "\n")
    with pytest.raises(TraceError, match="damaged or truncated after line 0"):
        read_trace(path)


def test_consecutive_zstd_frames_are_one_file(tmp_path: Path) -> None:
    path = tmp_path / "two.jsonl.zst"
    path.write_bytes(b"".join(COMPRESS[".zst"](line([i]).encode() + b"\n") for i in (1, 2)))
    assert chains(read_trace(path)) == [[1], [2]]


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_written_trace_is_read_back_and_its_bytes_repeat(tmp_path: Path, suffix: str) -> None:
    trace = generate(builtin("agent", sessions=2))
    first, second = tmp_path / f"agent.jsonl{suffix}", tmp_path / f"again.jsonl{suffix}"
    write_trace(trace, first)
    write_trace(trace, second)
    assert first.read_bytes() == second.read_bytes()
    if suffix == ".gz":
        assert first.read_bytes()[3:8] == bytes(5), "neither a name nor a time in the header"
    again = read_trace(first)
    assert again.name == "agent"
    assert np.array_equal(again.block_ids, trace.block_ids)
    assert_equal(again, trace)


def test_hints_are_read(chat: Callable[..., Path]) -> None:
    known = {
        "finish_reason": "stop",
        "session_over": True,
        "priority": -3,
        "time_to_live_s": 60,
        "tenant": "a",
    }
    nothing = dict.fromkeys(known)
    trace = read_trace(
        chat(line([1], **known), line([1, 2], session=7), line([3], **nothing), line([1], **known))
    )
    hints = Hints("stop", True, -3, 60.0, "a")
    assert trace.hints is not None
    assert trace.hints.different == (hints, NO_HINTS)
    assert trace.hints.numbers.dtype == np.int32
    assert trace.hints.numbers.tolist() == [0, 1, 1, 0]
    assert [trace.hints_of(request) for request in range(4)] == [hints, NO_HINTS, NO_HINTS, hints]


def test_a_file_without_hints_has_none(chat: Callable[..., Path], tmp_path: Path) -> None:
    trace = read_trace(
        chat(line([1], session=3), line([1], finish_reason="", session_over=False, priority=0))
    )
    assert trace.hints is None
    assert trace.hints_of(1) is NO_HINTS
    write_trace(trace, tmp_path / "again.jsonl")
    assert (tmp_path / "again.jsonl").read_text() == (
        '{"timestamp":0,"input_length":512,"output_length":7,"hash_ids":[1]}\n' * 2
    )


def test_tokens_outside_full_blocks_are_counted_and_written_back(
    chat: Callable[..., Path], tmp_path: Path
) -> None:
    lines = [line([1, 2], input_length=1000, timestamp=5), "{", line([], input_length=24), line([3])]
    trace = read_trace(chat(*lines), skip_bad_lines=True)
    assert trace.prompt_tokens is not None
    assert trace.prompt_tokens.tolist() == [24, 512, 1000]
    assert trace.share_outside_blocks == 1 - 1024 / 1536
    assert trace.of_requests(np.array([1])).share_outside_blocks == 0.0
    write_trace(trace, tmp_path / "again.jsonl")
    again = read_trace(tmp_path / "again.jsonl")
    assert again.prompt_tokens is not None
    assert again.prompt_tokens.tolist() == [24, 512, 1000]


def test_a_file_of_full_blocks_has_no_prompt_lengths(chat: Callable[..., Path]) -> None:
    """Such as conversions of KV events and generated workloads, whose sources have no token counts."""
    trace = read_trace(chat(line([1, 2]), line([1])))
    assert (trace.prompt_tokens, trace.share_outside_blocks) == (None, None)


NAMES = {
    "a session": (["session", "session", "session"], [5, "5", 6], [0, 0, 1]),
    "any field": (["session_id", "conversation_id", "chat_id"], ["a", "a", "b"], [0, 0, 1]),
    "none in one": (["session", "other", "session"], ["a", "a", "a"], [0, -1, 0]),
    "no name": (["session", "session", "session"], [None, "", True], None),
    "names of requests": (["chat_id", "chat_id", "chat_id"], [1, 2, 3], None),
    "no names of sessions": (["session", "session", "session"], [{"id": 1}, 1.5, [1]], None),
}


@pytest.mark.parametrize(("fields", "values", "sessions"), NAMES.values(), ids=NAMES)
def test_named_sessions(
    chat: Callable[..., Path],
    tmp_path: Path,
    fields: list[str],
    values: list[object],
    sessions: list[int] | None,
) -> None:
    lines = [line([n], **{field: value}) for n, (field, value) in enumerate(zip(fields, values, strict=True))]
    trace = read_trace(chat(*lines))
    assert (None if trace.sessions is None else trace.sessions.tolist()) == sessions
    write_trace(trace, tmp_path / "again.jsonl")
    again = read_trace(tmp_path / "again.jsonl").sessions
    assert (None if again is None else again.tolist()) == sessions


def test_a_chat_and_its_descendants_are_one_session(chat: Callable[..., Path]) -> None:
    """Chats of Qwen-Bailian: 3 continues 1, 4 continues 3; 6 continues a chat before the recording."""
    chats = [(1, -1), (2, -1), (3, 1), (4, 3), (6, 5), (7, 5)]
    lines = [line([n], timestamp=n, chat_id=own, parent_chat_id=up) for n, (own, up) in enumerate(chats)]
    trace = read_trace(chat(*lines))
    assert trace.sessions is not None
    assert trace.sessions.tolist() == [0, 1, 0, 0, 2, 2]
    assert trace.of_requests(np.array([3, 4])).sessions.tolist() == [0, 2]  # type: ignore[union-attr]


def test_sessions_are_sorted_with_their_requests(chat: Callable[..., Path]) -> None:
    late = line([3], timestamp=9, session="b")
    lines = [late, "{", line([1], session="a"), line([2], timestamp=5, session="b"), line([1, 1])]
    trace = read_trace(chat(*lines), skip_bad_lines=True)
    assert trace.sessions is not None
    assert trace.timestamps_ms.tolist() == [0, 5, 9]
    assert trace.sessions.tolist() == [0, 1, 1]


def test_hints_of_skipped_lines_are_skipped(chat: Callable[..., Path]) -> None:
    lines = [line([1, 2], tenant="a"), "{", line([9, 2], tenant="b"), line([1], tenant="c"), line([4])]
    trace = read_trace(chat(*lines), skip_bad_lines=True)
    assert trace.hints is not None
    assert trace.hints.different == (Hints(tenant="a"), Hints(tenant="c"), NO_HINTS)
    assert trace.hints.numbers.tolist() == [0, 1, 2]


@given(
    st.lists(
        st.builds(
            Hints,
            st.text(max_size=3),
            st.booleans(),
            st.integers(-(2**63), 2**63 - 1),
            st.none() | st.floats(0, allow_infinity=False),
            st.text(max_size=3),
        ),
        min_size=1,
        max_size=6,
    )
)
def test_written_hints_are_read_back(tmp_path_factory: pytest.TempPathFactory, hints: list[Hints]) -> None:
    trace = generate(builtin("chat", sessions=6))
    written = [hints[i % len(hints)] for i in range(trace.requests)]
    trace = dataclasses.replace(trace, hints=TraceHints.of(written))
    path = tmp_path_factory.mktemp("hints") / "trace.jsonl"
    write_trace(trace, path)
    again = read_trace(path)
    assert_equal(again, trace)
    assert [again.hints_of(i) for i in range(trace.requests)] == written
    assert (again.hints is None) == all(hint == NO_HINTS for hint in written)


@given(
    st.sampled_from(sorted(BUILTIN)),
    st.integers(1, 6),
    st.sampled_from([16, 512, 3000]),
    st.integers(0, 999_999_999),
)
def test_any_generated_trace_is_chained(
    tmp_path_factory: pytest.TempPathFactory, name: str, sessions: int, block_tokens: int, seed: int
) -> None:
    trace = generate(builtin(name, sessions=sessions, block_tokens=block_tokens, seed=seed))
    path = tmp_path_factory.mktemp("generated") / "trace.jsonl"
    write_trace(trace, path)
    assert_equal(read_trace(path, block_tokens=block_tokens), trace)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_progress_grows_to_one(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"chat.jsonl{suffix}"
    write_trace(generate(builtin("chat")), path)
    shares: list[float] = []
    read_trace(path, progress=shares.append)
    assert shares == sorted(shares)
    assert len(shares) > 5
    assert shares[0] >= 0
    assert shares[-1] == 1.0


@pytest.mark.trace
@pytest.mark.parametrize(
    ("name", "requests", "block_refs", "unique_blocks"),
    [
        ("made_up", 561, 27_560, 6_238),
        ("conversation_first60", 6_848, 164_481, 105_145),
        ("agentic_12h", 26_087, 4_601_044, 186_550),
        ("agentic_3h", 26_087, 4_601_044, 186_550),
    ],
)
def test_recorded_traces(
    recorded_trace_path: Callable[[str], Path],
    name: str,
    requests: int,
    block_refs: int,
    unique_blocks: int,
) -> None:
    trace = read_trace(recorded_trace_path(name))
    assert (trace.name, trace.requests) == (name, requests)
    assert (trace.block_refs, trace.unique_blocks) == (block_refs, unique_blocks)


def test_a_new_module_adds_a_format(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new format needs one file only."""
    (tmp_path / "lengths.py").write_text(
        "from kvoffload.traces.format import TraceFormat\n"
        "from kvoffload.traces.formats.mooncake import Mooncake\n\n"
        "class Lengths(Mooncake):\n"
        "    name = 'lengths'\n"
        "    suffixes = ('.len',)\n\n"
        "    def read(self, path, **options):\n"
        "        copy = path.with_suffix('.jsonl')\n"
        "        rows = enumerate(path.read_text().split())\n"
        '        copy.write_text(\'\\n\'.join(\'{"timestamp": %d, "input_length": %d, "output_length": 1,\'\n'
        "                                  '\"hash_ids\": [%d]}' % (i, 512, int(n)) for i, n in rows))\n"
        "        return super().read(copy, **options)\n"
    )
    monkeypatch.setattr(formats, "__path__", [*formats.__path__, str(tmp_path)])
    file = tmp_path / "made.len"
    file.write_text("7 8 7")
    assert read_trace(file).block_ids.tolist() == [7, 8]
    assert load_trace(file).requests == 3
    monkeypatch.delitem(sys.modules, "kvoffload.traces.formats.lengths")
    (tmp_path / "lengths.py").unlink()
    with pytest.raises(TraceError):
        read_trace(file)


def header(block_tokens: object, **fields: object) -> str:
    return json.dumps({"kvoffload_trace": 1, "block_tokens": block_tokens, **fields})


def test_the_header_has_the_block_size(chat: Callable[..., Path]) -> None:
    path = chat("", header(16), line([1, 2], input_length=40), line([1], input_length=16))
    trace = read_trace(path)
    assert (trace.block_tokens, chains(trace)) == (16, [[1, 2], [1]])
    assert read_trace(path, block_tokens=16).block_tokens == 16
    with pytest.raises(TraceError, match=r":2: field block_tokens: 16, but --block-tokens is 512$"):
        read_trace(path, block_tokens=512)


def test_the_assumption_is_part_of_the_name(chat: Callable[..., Path]) -> None:
    lines = header(16, source="lengths", assumed="no reuse"), line([1], input_length=16)
    assert read_trace(chat(*lines)).name == "chat (assumed: no reuse)"
    other = (
        header(16, assumed="turns"),
        line([2], input_length=16),
        header(16),
        "bad",
        line([3, 2], input_length=32),
    )
    joined = read_trace(chat(*lines, *lines[:1], *other), skip_bad_lines=True)
    assert joined.name == "chat (assumed: no reuse, turns)", "also after skipped lines"
    assert (chains(joined), joined.skipped_lines) == ([[1], [2]], 2)


WRONG_HEADERS = {
    "another size": ([header(16), line([1], input_length=16), header(32)], 3,
                     "field block_tokens: 32, but 16 in earlier lines"),
    "too late": ([line([1]), header(16)], 2, "field block_tokens: 16, but 512 in earlier lines"),
    "no size": (['{"kvoffload_trace": 1}'], 1, "field block_tokens: missing"),
    "nothing": ([header(0)], 1, "field block_tokens: expected int >= 1"),
    "a later version": ([header(16).replace("1,", "2,", 1)], 1,
                        "field kvoffload_trace: invalid enum value 2"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG_HEADERS)
def test_an_invalid_header_is_named(chat: Callable[..., Path], name: str) -> None:
    lines, number, reason = WRONG_HEADERS[name]
    path = chat(*lines)
    with pytest.raises(TraceError) as error:
        read_trace(path)
    assert str(error.value) == f"{path}:{number}: {reason}"


def test_unordered_lines_are_sorted_by_time(chat: Callable[..., Path]) -> None:
    lines = [
        line([1, 2], timestamp=3000, tenant="b"),
        line([1], timestamp=1000, tenant="a"),
        line([7, 2], timestamp=2500),
        line([4], timestamp=1000, tenant="c"),
    ]
    header_line = json.dumps({"kvoffload_trace": 1, "block_tokens": 512, "in_order": False})
    trace = read_trace(chat(header_line, *lines[:2], lines[3]))
    assert chains(trace) == [[1], [4], [1, 2]]
    assert trace.refs.tolist() == [0, 1, 0, 2], "codes follow the first appearance in time"
    assert trace.timestamps_ms.tolist() == [1000, 1000, 3000]
    assert [trace.hints_of(request).tenant for request in range(3)] == ["a", "c", "b"]
    path = chat(header_line, *lines)
    with pytest.raises(TraceError, match=r":2: field hash_ids\[1\]: id 2 follows id 1 here, .* 7 in line 4$"):
        read_trace(path)
    trace = read_trace(path, skip_bad_lines=True)
    assert (chains(trace), trace.skipped_lines) == ([[1], [4], [7, 2]], 1), "the earlier header applies"


def test_an_endless_line_is_refused_before_it_fills_the_memory(
    chat: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvoffload.traces.lines.LONGEST_LINE", 1 << 20)
    path = chat(line([1]), "x" * (1 << 21))
    with pytest.raises(TraceError, match=f"^{path}:2: longer than 1 MiB; not a trace$"):
        read_trace(path)
    assert read_trace(chat(line([1]), " " * ((1 << 20) - 1))).requests == 1


def test_whole_seconds_are_not_read_as_milliseconds(chat: Callable[..., Path]) -> None:
    """Regression: a recording of five minutes lasted 0.3 s, and a plan bought nothing."""
    path = str(chat(*(line([number], timestamp=number) for number in range(300))))
    with pytest.raises(TraceError, match="300 requests in 299 ms are 1,003 a second; give --time-unit s if"):
        load_trace(path)
    assert load_trace(path, time_unit="s").timestamps_ms[-1] == 299_000
    assert load_trace(path, time_unit="ms").timestamps_ms[-1] == 299
    few = chat(*(line([number], timestamp=number) for number in range(99)))
    assert load_trace(few).timestamps_ms[-1] == 98, "too few requests to estimate a rate"
    fractions = chat(line([1], timestamp=0.5), line([2], timestamp=3.5))
    with pytest.raises(ConfigError, match=r"time-unit: 'ms' is invalid; the times of .* are in s"):
        load_trace(fractions, time_unit="ms")
    header_line = json.dumps({"kvoffload_trace": 1, "block_tokens": 512})
    sure = chat(header_line, *(line([number], timestamp=number) for number in range(300)))
    assert load_trace(sure).timestamps_ms[-1] == 299
    with pytest.raises(ConfigError, match="are in ms"):
        load_trace(sure, time_unit="s")


def _in_seconds(trace: Trace, path: Path) -> Path:
    """Write a trace without a header, with times in whole seconds."""
    write_trace(dataclasses.replace(trace, timestamps_ms=trace.timestamps_ms // 1000), path)
    return path


def test_seconds_are_recognised_by_answers_that_would_be_too_fast(tmp_path: Path) -> None:
    """Regression: with few requests per second, a log of 45 minutes lasted 2.7 s; a plan bought nothing."""
    chat = generate(builtin("chat", sessions=400, sessions_per_minute=9))
    path = _in_seconds(chat, tmp_path / "log.jsonl")
    why = r"read as ms, conversations go on so soon that answers are generated at [\d,]+ tokens a second"
    with pytest.raises(TraceError, match=rf"{why} \(median of [\d,]+ turns\); give --time-unit s if"):
        load_trace(path)
    assert load_trace(path, time_unit="ms").duration_s < 60
    read = load_trace(path, time_unit="s")
    assert read.duration_s == pytest.approx(chat.duration_s, abs=1)
    assert not read.warnings


@pytest.mark.parametrize("name", BUILTIN)
def test_the_times_of_a_workload_are_plausible(name: str, tmp_path: Path) -> None:
    for per_minute in (10, 600):
        path = tmp_path / f"{per_minute}.jsonl"
        write_trace(generate(builtin(name, sessions=40, sessions_per_minute=per_minute)), path)
        assert load_trace(path).time_unit == ""


@pytest.mark.parametrize(
    "name", ["made_up", "conversation_first60", pytest.param("agentic_3h", marks=pytest.mark.slow)]
)
def test_the_times_of_recordings_are_plausible(
    name: str, recorded_trace_path: Callable[[str], Path], tmp_path: Path
) -> None:
    whole = load_trace(recorded_trace_path(name))
    assert whole.warnings == []
    # The stretches are short enough for the check by answers.
    for first in range(0, whole.requests - 1000, whole.requests // 3):
        stretch = whole.of_requests(np.arange(first, first + 1000))
        write_trace(stretch, tmp_path / "part.jsonl")
        assert load_trace(tmp_path / "part.jsonl").warnings == []
        with pytest.raises(TraceError, match="give --time-unit s if"):
            load_trace(_in_seconds(stretch, tmp_path / "seconds.jsonl"))


def test_many_requests_in_less_than_a_minute_are_reported_if_ms_are_assumed(
    chat: Callable[..., Path],
) -> None:
    requests = [line([number], timestamp=4 * number) for number in range(600)]
    (warning,) = load_trace(chat(*requests)).warnings
    assert warning.startswith("the times of chat are read as ms, so its 600 requests arrive within 2.4 s")
    assert not load_trace(chat(*requests[:99])).warnings
    assert not load_trace(chat(*requests), time_unit="ms").warnings
    header = {"kvoffload_trace": 1, "block_tokens": 512}
    assert not load_trace(chat(json.dumps(header), *requests)).warnings
    assumed = load_trace(chat(json.dumps(header | {"assumed_ms": True}), *requests))
    assert assumed.time_unit == ""
    assert assumed.warnings


def test_unannounced_lines_out_of_order_are_sorted_with_a_warning(
    chat: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    """Regression: concatenated logs of two servers were replayed in the order of the file."""
    path = chat(*(line([number], timestamp=time) for number, time in enumerate((10, 30, 50, 20, 40, 60))))
    trace = read_trace(path)
    assert trace.timestamps_ms.tolist() == [10, 20, 30, 40, 50, 60]
    assert chains(trace) == [[0], [3], [1], [4], [2], [5]]
    (record,) = caplog.records
    assert record.getMessage() == (
        f"{path}: 2 of 6 requests are earlier than a request before them; sorted by time"
    )
    caplog.clear()
    read_trace(chat(*(line([number], timestamp=7) for number in range(3))))
    assert not caplog.records


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_another_block_size_is_written_and_read(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"small.jsonl{suffix}"
    trace = generate(builtin("chat", sessions=3, block_tokens=48))
    write_trace(trace, path)
    assert_equal(read_trace(path), trace)
    assert read_trace(path).block_tokens == block_tokens_of(path) == 48
    assert block_tokens_of(path, 16) == 16, "the given value; reading with it is refused"


def test_block_tokens_without_a_header(chat: Callable[..., Path]) -> None:
    assert block_tokens_of(chat(line([1]))) == block_tokens_of(chat("")) == block_tokens_of("rag") == 512
    assert block_tokens_of("-") == 512
    with pytest.raises(ConfigError, match="no such file"):
        block_tokens_of("no-such")
    with pytest.raises(TraceError, match=r":1: field block_tokens: missing"):
        block_tokens_of(chat('{"kvoffload_trace": 1}'))
