"""``kvoffload trace convert``: the trace of each kind of source, and privacy of prompts."""

from __future__ import annotations

import gzip
import json
import os
import tracemalloc
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from threading import Event, Thread
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvoffload.errors import ConfigError, TraceError
from kvoffload.traces.conversion.block_ids import KeptKeys, Keys
from kvoffload.traces.conversion.convert import Converted, convert
from kvoffload.traces.conversion.json_elements import elements
from kvoffload.traces.conversion.source import SOURCES
from kvoffload.traces.conversion.times import seconds_of
from kvoffload.traces.format import read_trace
from kvoffload.traces.formats.mooncake import write_trace
from kvoffload.traces.lines import BadLineError
from kvoffload.traces.sessions import generate
from kvoffload.traces.trace import Trace
from kvoffload.traces.workloads import builtin
from support.run_cli import kvoffload

SENTENCE = "the quick brown fox jumps over the lazy dog and runs away"


def write(path: Path, records: Iterable[object]) -> Path:
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in records))
    return path


def converted(path: Path, out: str = "out.jsonl", **options: Any) -> tuple[Trace, Converted]:
    target = path.with_name(out)
    done = convert(str(path), target, **options)
    return read_trace(target), done


def chains(trace: Trace) -> list[list[int]]:
    """Return the codes of each request; equal lists are equal chains."""
    return [codes.tolist() for codes in np.split(trace.refs, trace.offsets[1:-1])]


def sessions_of(trace: Trace) -> list[int] | None:
    return None if trace.sessions is None else trace.sessions.tolist()


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a tokenizer whose tokens are words, line ends and message markers."""
    tokenizers = pytest.importorskip("tokenizers", reason="the library tokenizers is not installed")
    words = sorted({*SENTENCE.split(), "user", "assistant", "system", "<|im_start|>", "<|im_end|>", "\n"})
    model = tokenizers.models.WordLevel({"?": 0, **{word: 1 + i for i, word in enumerate(words)}}, "?")
    made = tokenizers.Tokenizer(model)
    made.pre_tokenizer = tokenizers.pre_tokenizers.Split(
        tokenizers.Regex(r"<\|im_(start|end)\|>|\n|[^\s<]+"), "removed", invert=True
    )
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    made.save(str(path))
    return path


# ---- ids


def test_a_converted_trace_replays_like_the_original_without_its_ids(tmp_path: Path) -> None:
    original = generate(builtin("agent", sessions=2))
    write_trace(original, tmp_path / "in.jsonl.gz")
    trace, done = converted(tmp_path / "in.jsonl.gz", "out.jsonl.zst")
    assert np.array_equal(trace.refs, original.refs)
    assert np.array_equal(trace.offsets, original.offsets)
    first_ms = int(original.timestamps_ms[0])
    assert np.array_equal(trace.timestamps_ms, original.timestamps_ms - first_ms)
    assert np.array_equal(trace.output_tokens, original.output_tokens)
    assert not set(trace.block_ids.tolist()) & set(original.block_ids.tolist())
    assert (done.requests, done.block_refs) == (original.requests, original.block_refs)
    assert (done.source, done.assumed, done.block_tokens) == ("mooncake", "", 512)


def test_equal_salts_give_equal_ids(tmp_path: Path) -> None:
    path = write(tmp_path / "in.jsonl", [request([1, 2]), request([1, 3])])
    ids = [
        converted(path, keys=keys)[0].block_ids.tolist() for keys in (None, Keys(), Keys(b"a"), Keys(b"a"))
    ]
    assert ids[0] != ids[1] != ids[2]
    assert ids[2] == ids[3]
    assert converted(path, keys=Keys(b"b"))[0].block_ids.tolist() != ids[2]
    assert converted(path, keys=KeptKeys())[0].block_ids.tolist() == [1, 2, 3]


def test_ids_of_contents_become_ids_of_prefixes(tmp_path: Path) -> None:
    """Ids of a source may cover only a block's content; equal blocks after other blocks get other ids."""
    path = write(tmp_path / "in.jsonl", [request([1, 7]), request([2, 7]), request([1, 7, 7])])
    with pytest.raises(TraceError, match="id 7 follows id 2 here"):
        read_trace(path)
    assert chains(converted(path)[0]) == [[0, 1], [2, 3], [0, 1, 4]]


@given(st.lists(st.lists(st.integers(0, 3), max_size=5), min_size=1, max_size=8), st.binary(max_size=80))
def test_only_equal_prefixes_have_equal_ids(prompts: list[list[int]], salt: bytes) -> None:
    keys = Keys(salt)
    prefix_of: dict[object, tuple[int, ...]] = {}
    for prompt in prompts:
        ids = keys.after((), [bytes([block]) for block in prompt])
        assert keys.after(ids[:2], [bytes([block]) for block in prompt[2:]]) == ids
        assert all(-(2**63) <= block_id < 2**63 for block_id in ids)
        for length, block_id in enumerate(ids, 1):
            assert prefix_of.setdefault(block_id, tuple(prompt[:length])) == tuple(prompt[:length])


def test_names_of_tenants_are_hashed(tmp_path: Path) -> None:
    known = {"tenant": "ACME", "finish_reason": "stop", "priority": 3, "time_to_live_s": 5.0}
    path = write(tmp_path / "in.jsonl", [request([1], **known), request([2], **known), request([3])])
    trace, _ = converted(path)
    first, second, third = map(trace.hints_of, range(3))
    assert first == second
    assert (first.finish_reason, first.priority, first.time_to_live_s) == ("stop", 3, 5.0)
    assert first.tenant
    assert first.tenant != "ACME"
    assert third.tenant == ""
    assert b"ACME" not in path.with_name("out.jsonl").read_bytes()
    assert converted(path, keys=KeptKeys())[0].hints_of(0).tenant == "ACME"


def test_names_of_sessions_are_hashed(tmp_path: Path) -> None:
    names = [{"session_id": "ACME 1"}, {"session_id": "ACME 2"}, {}, {"conversation_id": "ACME 1"}]
    path = write(tmp_path / "in.jsonl", [request([n], **name) for n, name in enumerate(names)])
    assert sessions_of(converted(path)[0]) == [0, 1, -1, 0]
    assert b"ACME" not in path.with_name("out.jsonl").read_bytes()
    converted(path, keys=KeptKeys())
    assert b'"session":"ACME 1"' in path.with_name("out.jsonl").read_bytes()


# ---- recordings with ids


def request(ids: list[Any], *, input_length: int | None = None, timestamp: Any = 0, **fields: Any) -> Any:
    length = 512 * len(ids) if input_length is None else input_length
    return {"timestamp": timestamp, "input_length": length, "output_length": 7, "hash_ids": ids, **fields}


def test_mooncake_with_ids_of_any_kind(tmp_path: Path) -> None:
    kinds = [2**64 - 1, -5, "0xff", "text"]
    path = write(
        tmp_path / "in.jsonl", [request(kinds, input_length=1600), request(kinds[:2], timestamp=1500)]
    )
    trace, _ = converted(path)
    assert chains(trace) == [[0, 1, 2], [0, 1]], (
        "negative and wide ids are distinct, and only full blocks are kept"
    )
    assert trace.timestamps_ms.tolist() == [0, 1500]
    line = json.loads(path.with_name("out.jsonl").read_text().splitlines()[1])
    assert (line["input_length"], len(line["hash_ids"])) == (1600, 3)


def test_a_kvoffload_trace_keeps_its_block_size(tmp_path: Path) -> None:
    write_trace(generate(builtin("chat", sessions=3, block_tokens=64)), tmp_path / "in.jsonl")
    assert converted(tmp_path / "in.jsonl")[0].block_tokens == 64
    with pytest.raises(ConfigError, match=r"block-tokens: 32 is invalid; the header of .* has 64"):
        converted(tmp_path / "in.jsonl", block_tokens=32)


def test_the_header_of_a_recording_is_kept(tmp_path: Path) -> None:
    header = {"kvoffload_trace": 1, "block_tokens": 16, "assumed": "none-shared", "in_order": False}
    lines = [
        header,
        request([1, 2], input_length=32, timestamp=900),
        request([3], input_length=16, timestamp=100),
    ]
    path = write(tmp_path / "in.jsonl", lines)
    trace, _ = converted(path, "o.jsonl")
    assert (trace.name, trace.assumed) == ("o (assumed: none-shared)", "none-shared")
    assert trace.timestamps_ms.tolist() == [100, 900]
    assert chains(trace) == [[0], [1, 2]]
    write(path, [*lines, {**header, "assumed": "gap-2s"}])
    with pytest.raises(TraceError, match=":4: field assumed: 'gap-2s', but 'none-shared' before"):
        converted(path, "o.none-shared.jsonl")
    write(path, [request([1]), {**header, "assumed": "", "in_order": True}])
    with pytest.raises(TraceError, match=":2: field block_tokens: 16, but 512 before; give --block-tokens"):
        converted(path)


BAILIAN = [
    {"chat_id": 55, "parent_chat_id": -1, "timestamp": 61.114, "input_length": 40, "output_length": 12,
     "type": "text", "turn": 1, "hash_ids": [10, 11, 12]},
    {"chat_id": 159, "parent_chat_id": 55, "timestamp": 70, "input_length": 64, "output_length": 3,
     "type": "text", "turn": 2, "hash_ids": [10, 11, 13, 14]},
]  # fmt: skip


def test_bailian(tmp_path: Path) -> None:
    path = write(tmp_path / "in.jsonl", BAILIAN)
    trace, done = converted(path)
    assert (done.source, trace.block_tokens, done.assumed) == ("bailian", 16, "")
    assert chains(trace) == [[0, 1], [0, 1, 2, 3]]
    assert trace.timestamps_ms.tolist() == [0, 8886]
    assert trace.output_tokens.tolist() == [12, 3]
    assert converted(path, keys=KeptKeys())[0].block_ids.tolist() == [10, 11, 13, 14]
    assert sessions_of(trace) == [0, 0]
    assert sessions_of(read_trace(path, block_tokens=16)) == [0, 0], "also without a conversion"


def test_tokens_that_a_server_had_cached_survive(tmp_path: Path) -> None:
    """`explain` compares them with the replay, also in a converted recording."""
    served = [{"gpu": 16}, {}, {"host": 16, "gpu": 16}]
    lines = [request([1, 2], input_length=40, served_tokens=tokens) for tokens in served]
    trace, _ = converted(write(tmp_path / "in.jsonl", lines), block_tokens=16)
    write_trace(trace, tmp_path / "again.jsonl")
    for loaded in (trace, read_trace(tmp_path / "again.jsonl")):
        assert loaded.served_tokens is not None
        assert {name: tokens.tolist() for name, tokens in loaded.served_tokens.items()} == {
            "gpu": [16, 0, 16], "host": [0, 0, 16]
        }  # fmt: skip


def test_a_wrong_block_size_is_refused_with_a_fitting_size(tmp_path: Path) -> None:
    long = request(list(range(200)), input_length=3200)
    path = write(tmp_path / "in.jsonl", [long, request([1, 2], input_length=32)])
    with pytest.raises(
        TraceError, match=r"in.jsonl:1: field hash_ids: 200 ids, .* --block-tokens 16 would fit$"
    ):
        converted(path)
    assert not (tmp_path / "out.jsonl").exists()
    assert converted(path, block_tokens=16)[0].block_refs == 202


def test_times_in_mixed_units_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "in.jsonl", [request([1], timestamp=0.5), request([2], timestamp=3)])
    with pytest.raises(TraceError, match=":2: field timestamp: 3: some times are seconds, some are ms"):
        converted(path)
    assert sorted(tmp_path.iterdir()) == [path], "the partial output is deleted"
    path = write(tmp_path / "in.jsonl", [request([1], timestamp=0.5), request([2], timestamp=3.0)])
    assert converted(path)[0].timestamps_ms.tolist() == [0, 2500]


def test_whole_seconds_are_converted_if_specified(tmp_path: Path) -> None:
    path = write(tmp_path / "in.jsonl", [request([t], timestamp=t) for t in (5, 7)])
    trace, done = converted(path)
    assert trace.timestamps_ms.tolist() == [0, 2]
    assert trace.time_unit == "", "a conversion does not make an assumption a fact"
    assert "times are in ms, because the recording does not state their unit" in done.remarks[0]
    again, done = converted(path.with_name("out.jsonl"), "again.jsonl")
    assert again.time_unit == ""
    assert done.remarks
    trace, done = converted(path, source="mooncake,time_unit=s")
    assert trace.timestamps_ms.tolist() == [0, 2000]
    assert (trace.time_unit, done.remarks) == ("ms", ())
    with pytest.raises(ConfigError, match="time_unit: 'h' is invalid; allowed: s, ms"):
        converted(path, source="mooncake,time_unit=h")


@pytest.mark.parametrize("out", ["out.jsonl", "out.jsonl.zst"])
def test_requests_out_of_order_keep_their_times_and_are_sorted(
    tmp_path: Path, out: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Regression: all earlier requests got the first request's time."""
    times = 1000, 400, 1700, 1600
    path = write(tmp_path / "in.jsonl", [request([t], timestamp=t) for t in times])
    done = convert(str(path), tmp_path / out, keys=Keys(b"s"))
    trace = read_trace(tmp_path / out)
    assert trace.timestamps_ms.tolist() == [0, 600, 1200, 1300]
    assert done.unordered_requests == 2
    assert not caplog.records, "the header announces it"
    assert sorted(tmp_path.iterdir()) == sorted([path, tmp_path / out])


# ---- tables of lengths

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,100,28
2023-11-16 18:17:04.0319600,30,10
2023-11-16 18:17:33.9799600,140,4
2023-11-16 18:27:00.0000000,90,1
"""
BURST = """Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type
5,s1,1,ChatGPT,40,8,48,Conversation log
9,s2,1,GPT-4,40,8,48,Conversation log
45.5,s1,2,ChatGPT,64,8,72,Conversation log
60,s1,2,ChatGPT,32,8,40,Conversation log
70,s1,2,ChatGPT,48,8,40,Conversation log
80,s2,1,GPT-4,48,8,48,Conversation log
"""


@pytest.mark.parametrize("table", [AZURE, BURST])
def test_lengths_need_an_assumption(tmp_path: Path, table: str) -> None:
    path = tmp_path / "in.csv"
    path.write_text(table)
    with pytest.raises(ConfigError) as error:
        converted(path)
    assert str(error.value) == (
        "from: 'lengths' is invalid; lengths do not show shared prefixes: choose an assumption; "
        "allowed: lengths:none (nothing is shared), lengths:continued (a prompt continues the "
        "longest context that fits), lengths:sessions (by the column of session ids)"
    )
    assert sorted(tmp_path.iterdir()) == [path], "no partial output"


def test_assumptions_are_in_the_header_and_in_every_report(tmp_path: Path) -> None:
    """Regression: the assumption had to be in the file name."""
    path, page = tmp_path / "out.jsonl.gz", tmp_path / "plan.html"
    (tmp_path / "in.csv").write_text(AZURE)
    assert converted(tmp_path / "in.csv", path.name, source="lengths:continued")[1].assumed
    assert b'"assumed":"continued-within-600s"' in gzip.decompress(path.read_bytes())
    sized = ("--bytes-per-token", "1KiB", "--gpus", "1", "--kv-per-gpu", "64KiB", "--jobs", "1", "--quiet")
    for command in (("trace", "info", path), ("replay", path, "--no-data", "--capacity", "9"),
                    ("plan", path, *sized, "--report", page)):  # fmt: skip
        assert "out (assumed: continued-within-600s)" in kvoffload(*command).stdout, command
    assert page.read_text().count("continued-within-600s") > 2
    shown = kvoffload("replay", path, "--no-data", "--capacity", "9", "--format", "json").stdout
    assert json.loads(shown)["assumed"] == "continued-within-600s"
    listed = json.loads(kvoffload("plan", path, *sized, "--format", "json").stdout)["assumptions"]
    assert listed[0]["name"] == "conversion"
    assert listed[0]["value"] == "continued-within-600s"


def test_azure_without_reuse(tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_text(AZURE)
    trace, done = converted(
        tmp_path / "in.csv", "a.none-shared.jsonl", source="lengths:none", block_tokens=16
    )
    assert trace.name == "a (assumed: none-shared)"
    assert trace.timestamps_ms.tolist() == [0, 52, 30_000, 596_020]
    assert np.diff(trace.offsets).tolist() == [6, 1, 8, 5]
    assert trace.unique_blocks == trace.block_refs == done.block_refs == 20
    assert trace.output_tokens.tolist() == [28, 10, 4, 1]


def test_tokens_outside_whole_blocks_survive_conversion(tmp_path: Path) -> None:
    """Prompts of 100, 30, 140 and 90 tokens are 6, 1, 8 and 5 blocks of 16: 40 of 360 tokens are outside."""
    (tmp_path / "in.csv").write_text(AZURE)
    converted(tmp_path / "in.csv", "a.none-shared.jsonl", source="lengths:none")
    path = tmp_path / "a.none-shared.jsonl"
    share, sentence = 40 / 360, "11.1% of prompt tokens are in no whole block"
    sized = ("--bytes-per-token", "1KiB", "--gpus", "1", "--kv-per-gpu", "64KiB", "--jobs", "1", "--quiet")
    for command in (("trace", "info", path), ("replay", path, "--no-data", "--capacity", "9"),
                    ("plan", path, *sized)):  # fmt: skip
        assert sentence in kvoffload(*command).stdout, command
        info = json.loads(kvoffload(*command, "--format", "json").stdout)
        assert info["share_outside_blocks"] == pytest.approx(share), command
    again, _ = converted(path, "b.none-shared.jsonl")
    assert again.share_outside_blocks == pytest.approx(share)
    events = converted(write(tmp_path / "in.jsonl", EVENTS), "k.gap-2s.jsonl")[0]
    assert events.share_outside_blocks is None
    assert "whole block" not in kvoffload("trace", "info", tmp_path / "k.gap-2s.jsonl").stdout


def test_azure_with_continued_contexts(tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_text(AZURE)
    out = "a.continued-within-600s.jsonl"
    trace, _ = converted(tmp_path / "in.csv", out, source="lengths:continued", block_tokens=16)
    # 140 continues 128, not 40; 90 then continues 40, which was idle for 566 s.
    assert chains(trace) == [[*range(6)], [6], [*range(6), 7, 8], [6, 9, 10, 11, 12]]
    out = "a.continued-within-500s.jsonl"
    trace, _ = converted(tmp_path / "in.csv", out, source="lengths:continued,within_s=500", block_tokens=16)
    assert chains(trace)[3] == [9, 10, 11, 12, 13]


def test_burst_by_its_sessions(tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_text(BURST)
    out = "b.sessions-within-600s.jsonl"
    trace, _ = converted(tmp_path / "in.csv", out, source="lengths:sessions", block_tokens=16)
    # The fourth request is shorter than the previous context, and starts a new one; the fifth continues it.
    # The last is as long as its context: it repeats the answered prompt.
    assert chains(trace) == [[0, 1], [2, 3], [0, 1, 4, 5], [6, 7], [6, 7, 8], [2, 3, 9]]
    assert trace.timestamps_ms.tolist() == [0, 4000, 40_500, 55_000, 65_000, 75_000]
    assert sessions_of(trace) == [0, 1, 0, 0, 0, 1]
    (tmp_path / "in.csv").write_text(AZURE)
    with pytest.raises(ConfigError, match="the table has no column of session ids"):
        converted(tmp_path / "in.csv", out, source="lengths:sessions")


def test_requests_without_a_session_id_are_no_conversation(tmp_path: Path) -> None:
    rows = "timestamp,session_id,prompt_tokens,completion_tokens\n0,,32,16\n1,,64,16\n2,a,32,16\n3,a,64,16\n"
    (tmp_path / "in.csv").write_text(rows)
    trace, _ = converted(tmp_path / "in.csv", "b.jsonl", source="lengths:sessions", block_tokens=16)
    assert chains(trace) == [[0, 1], [2, 3, 4, 5], [6, 7], [6, 7, 8, 9]]
    assert sessions_of(trace) == [-1, -1, 0, 0]


BAD_ROWS = {
    "short": ("5,s1", "column input: missing"),
    "no number": ("5,s1,1,x,many,8,9,l", "column input: 'many' is not a number of tokens"),
    "negative": ("5,s1,1,x,4,-8,9,l", "column output: '-8' is not a number of tokens"),
    "no time": ("noon,s1,1,x,4,8,9,l", "field timestamp: 'noon' is neither seconds nor ISO 8601"),
}


@pytest.mark.parametrize(("row", "reason"), BAD_ROWS.values(), ids=BAD_ROWS)
def test_an_invalid_row_is_named_or_skipped(tmp_path: Path, row: str, reason: str) -> None:
    (tmp_path / "in.csv").write_text(BURST + row + "\n")
    out = "b.none-shared.jsonl"
    with pytest.raises(TraceError) as error:
        converted(tmp_path / "in.csv", out, source="lengths:none")
    assert str(error.value) == f"{tmp_path / 'in.csv'}:8: {reason}"
    _, done = converted(tmp_path / "in.csv", out, source="lengths:none", skip_bad_lines=True)
    assert (done.requests, done.skipped_lines) == (6, 1)


def test_a_skipped_row_continues_no_context(tmp_path: Path) -> None:
    rows = "timestamp,prompt_tokens,completion_tokens,session_id\n0,32,16,a\n1,48,16\n2,48,16,a\n"
    (tmp_path / "in.csv").write_text(rows)
    trace, done = converted(
        tmp_path / "in.csv", "b.jsonl", source="lengths:continued", block_tokens=16, skip_bad_lines=True
    )
    assert done.skipped_lines == 1
    assert chains(trace) == [[0, 1], [0, 1, 2]]


def test_a_table_without_a_required_column_is_refused(tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_text("ContextTokens,GeneratedTokens\n1,2\n")
    with pytest.raises(TraceError, match=r":1: column time: missing; allowed: timestamp, "):
        converted(tmp_path / "in.csv", "b.none-shared.jsonl", source="lengths:none")


def test_a_line_before_the_head_of_a_table_is_skipped(tmp_path: Path) -> None:
    """The line has a name of a column, so that a reader that keeps the column would take it for the head."""
    options: dict[str, Any] = {"source": "lengths:none", "skip_bad_lines": True}
    (tmp_path / "in.csv").write_text("timestamp,of arrival\ntimestamp,prompt_tokens,output_tokens\n0,640,1\n")
    _, done = converted(tmp_path / "in.csv", "b.none-shared.jsonl", **options)
    assert (done.requests, done.skipped_lines) == (1, 1)
    (tmp_path / "in.csv").write_text("timestamp,output_tokens\n0,1\n")
    with pytest.raises(TraceError, match=r"no requests in it \(2 bad lines\)"):
        converted(tmp_path / "in.csv", "b.none-shared.jsonl", **options)


# ---- text


def sharegpt(number: int) -> Any:
    messages = [("human", f"{SENTENCE} {number}"), ("gpt", SENTENCE), ("human", "fox"), ("gpt", "dog")]
    return {"id": str(number), "conversations": [{"from": role, "value": text} for role, text in messages]}


@pytest.mark.parametrize("form", ["array", "pretty", "lines"])
def test_sharegpt(tmp_path: Path, tokenizer: Path, form: str) -> None:
    records = [sharegpt(n) for n in range(5)]
    path = tmp_path / "in.json"
    if form == "lines":
        write(path, records)
    else:
        path.write_text(json.dumps(records, indent=2 if form == "pretty" else None))
    options: Any = {"tokenizer": tokenizer, "block_tokens": 4, "keys": Keys(b"x")}
    out = tmp_path / "o.paced-60-per-minute.jsonl"
    trace, done = converted(path, out.name, source="text,per_minute=60", **options)
    assert done.requests == 10
    assert trace.name == "o (assumed: paced-60-per-minute)"
    # <|im_start|> user \n, 13 words, <|im_end|> \n, <|im_start|> assistant \n: 21; then 12 words and 2,
    # <|im_start|> user \n fox <|im_end|> \n, <|im_start|> assistant \n: 44.
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert sorted({line["input_length"] for line in lines[1:]}) == [21, 44]
    assert sorted(np.diff(trace.offsets).tolist()) == [5] * 5 + [11] * 5
    # Numbers are unknown words, so all five conversations have the same tokens.
    assert trace.unique_blocks == 11
    assert sorted(trace.output_tokens.tolist()) == [3] * 5 + [14] * 5
    times = trace.timestamps_ms.tolist()
    assert times == sorted(times)
    assert times[0] == 0
    # Equal texts remain five conversations.
    assert trace.sessions is not None
    assert np.bincount(trace.sessions).tolist() == [2] * 5
    assert "Sessions are named by the recording." in kvoffload("trace", "info", out).stdout


def test_turns_arrive_after_a_think_time(tmp_path: Path, tokenizer: Path) -> None:
    path = write(tmp_path / "in.jsonl", [sharegpt(n) for n in range(100)])
    trace, _ = converted(
        path, "o.paced-600-per-minute.jsonl", source="text:600", tokenizer=tokenizer, block_tokens=64
    )
    # 100 conversations begin within 10 seconds; the median time to the next turn is 140 s.
    firsts, seconds = (trace.timestamps_ms[trace.output_tokens == n] / 1000 for n in (14, 3))
    assert firsts.max() < 10
    assert 100 < np.median(seconds) < 200


def test_text_without_times_needs_a_rate(tmp_path: Path, tokenizer: Path) -> None:
    path = write(tmp_path / "in.jsonl", [sharegpt(0)])
    with pytest.raises(ConfigError, match=r"give the number of conversations per minute: text,per_min"):
        converted(path, tokenizer=tokenizer)
    with pytest.raises(ConfigError, match=r"tokenizer: missing; .* give its tokenizer.json"):
        converted(path, source="text:60")
    for wrong, why in (("no", "there is no such file"), ("in.jsonl", "it is not a tokenizer.json")):
        with pytest.raises(ConfigError, match=why):
            converted(path, source="text:60", tokenizer=tmp_path / wrong)


def test_a_log_of_requests(tmp_path: Path, tokenizer: Path) -> None:
    user = {"role": "user", "content": SENTENCE}
    records = [
        {"timestamp": "2026-01-01T00:00:00Z", "body": {"messages": [user]},
         "usage": {"completion_tokens": 9}},
        {"timestamp": "2026-01-01T00:00:01.5Z", "body": json.dumps({"prompt": SENTENCE}),
         "completion": "fox"},
        {"created": 1767225603, "messages": [user, {"role": "assistant", "content": "dog"}],
         "finish_reason": "stop"},
        {"time": 1767225604000, "messages": [user, {"role": "assistant", "content": "dog"},
                                             {"role": "user", "content": [{"type": "text", "text": "fox"}]}]},
    ]  # fmt: skip
    trace, done = converted(write(tmp_path / "in.jsonl", records), tokenizer=tokenizer, block_tokens=4)
    assert (done.source, done.assumed) == ("text", "")
    assert trace.timestamps_ms.tolist() == [0, 1500, 3000, 4000]
    assert trace.output_tokens.tolist() == [9, 1, 3, 0]
    assert chains(trace)[0] == chains(trace)[2]
    assert chains(trace)[3][:5] == chains(trace)[0][:5]
    assert not set(chains(trace)[1]) & set(chains(trace)[0])
    assert [trace.hints_of(i).finish_reason for i in range(4)] == ["", "", "stop", ""]
    assert b"fox" not in (tmp_path / "out.jsonl").read_bytes()
    assert trace.sessions is None
    assert "Sessions are inferred from shared prefixes, unambiguously for 50.0% of the requests." in (
        kvoffload("trace", "info", tmp_path / "out.jsonl").stdout
    )
    records[1]["session_id"] = 7
    records[0]["body"]["session_id"] = "7"
    trace, _ = converted(write(tmp_path / "in.jsonl", records), tokenizer=tokenizer, block_tokens=4)
    assert sessions_of(trace) == [0, 0, -1, -1]


BAD_TEXTS = {
    "nothing": ({"messages": []}, "field messages: not a list of messages"),
    "no role": ({"messages": [{"content": "x"}]}, "field messages[0].role: missing"),
    "a picture": ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
                  "field messages[0].content: items of type image_url cannot be tokenized"),
    "no object": ("[1]", "line: expected object, got array"),
    "no text": ({"id": 5}, "field messages: missing"),
    "suddenly a time": ({"timestamp": 5, "prompt": "x"}, "field timestamp: earlier records have no time"),
}  # fmt: skip


@pytest.mark.parametrize(("bad", "reason"), BAD_TEXTS.values(), ids=BAD_TEXTS)
def test_invalid_text_is_named_or_skipped(tmp_path: Path, tokenizer: Path, bad: Any, reason: str) -> None:
    path = write(tmp_path / "in.jsonl", [{"prompt": SENTENCE}, bad, {"prompt": SENTENCE}])
    options: Any = {"source": "text:60", "tokenizer": tokenizer}
    with pytest.raises(TraceError) as error:
        converted(path, "o.paced-60-per-minute.jsonl", **options)
    assert str(error.value) == f"{path}:2: {reason}"
    _, done = converted(path, "o.paced-60-per-minute.jsonl", skip_bad_lines=True, **options)
    assert (done.requests, done.skipped_lines) == (2, 1)


def test_token_ids(tmp_path: Path) -> None:
    records = [
        {"timestamp": 1.0, "prompt_token_ids": [*range(70)], "output_length": 5},
        {"timestamp": 2.0, "prompt_token_ids": [*range(64), 9, 9, 9], "output_token_ids": [1, 2]},
        {"timestamp": 3.0, "prompt_token_ids": [7, *range(1, 70)]},
    ]
    path = write(tmp_path / "in.jsonl", records)
    trace, done = converted(path, block_tokens=32)
    assert done.source == "token_ids"
    assert trace.sessions is None
    named = [{**record, "session": n // 2} for n, record in enumerate(records)]
    assert sessions_of(converted(write(path, named), block_tokens=16)[0]) == [0, 0, 1]
    assert chains(trace) == [[0, 1], [0, 1], [2, 3]]
    assert trace.output_tokens.tolist() == [5, 2, 0]
    assert trace.timestamps_ms.tolist() == [0, 1000, 2000]
    bad = write(tmp_path / "bad.jsonl", [records[0], {"timestamp": 1, "output_length": 3}])
    with pytest.raises(TraceError, match=":2: field prompt_token_ids: missing"):
        converted(bad)
    bad = write(tmp_path / "bad.jsonl", [records[0], {"prompt_token_ids": [1]}])
    with pytest.raises(TraceError, match=":2: field timestamp: missing"):
        converted(bad)


@given(st.lists(st.dictionaries(st.text(max_size=9), st.text(max_size=40)), max_size=9), st.booleans())
def test_elements_of_an_array_are_found_in_any_layout(
    tmp_path_factory: pytest.TempPathFactory, values: list[dict[str, str]], pretty: bool
) -> None:
    path = tmp_path_factory.mktemp("array") / "in.json"
    path.write_text(json.dumps(values, indent=1 if pretty else None, ensure_ascii=False), "utf-8")
    assert [json.loads(text) for _, text in elements(path)] == values


def test_a_large_array_is_read_in_little_memory(tmp_path: Path) -> None:
    path = tmp_path / "in.json.gz"
    with gzip.open(path, "wt") as file:
        file.write("[" + ",\n".join(json.dumps({"text": "x" * 10_000, "n": n}) for n in range(1_000)) + "]")
    tracemalloc.start()
    try:
        assert sum(1 for _ in elements(path)) == 1_000
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 3_000_000, "less than 3 MB for 10 million characters"


def test_invalid_json_is_not_read_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "in.json"
    path.write_text('[{"a": 1}, {"text": "' + "x" * 2_000_000)
    shares = [0.0]
    with pytest.raises(TraceError, match="element 2: invalid JSON"):
        list(elements(path, shares.append, largest=100_000))
    assert shares[-1] < 0.2


@pytest.mark.parametrize("text", ['[{"a": 1}, {"a": ', '[{"a": 1}, x]', '[{"a": 1}'])
def test_an_array_that_is_cut_off_is_an_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "in.json").write_text(text)
    with pytest.raises(TraceError, match=r"element 2: invalid JSON \("):
        list(elements(tmp_path / "in.json"))


TIMES = {
    "2023-11-16 18:17:03.9799600": 1700158623.97996,
    "2024-05-10 00:00:00.009930+00:00": 1715299200.00993,
    "2026-01-01T01:00:00+0100": 1767225600.0,
    "2026-01-01T00:00:00Z": 1767225600.0,
    "12.5": 12.5,
    1767225600123: 1767225600.123,
    1767225600: 1767225600.0,
    0: 0.0,
}


@pytest.mark.parametrize("value", TIMES)
def test_valid_times(value: object) -> None:
    assert seconds_of("t", value) == pytest.approx(TIMES[value], abs=1e-6)  # type: ignore[index]


# The last three numbers are microseconds, nanoseconds, and too large for a float.
NO_TIMES = [
    *("noon", "2026-13-01 00:00:00", -1, True, float("nan"), "inf", [], None),
    *(1767225600123456, "1767225600123456789", 10**400),
]


@pytest.mark.parametrize("value", NO_TIMES)
def test_invalid_times(value: object) -> None:
    with pytest.raises(BadLineError, match="field t: "):
        seconds_of("t", value)


# ---- KV events


def stored(hashes: list[Any], parent: Any, **fields: Any) -> dict[str, Any]:
    return {"type": "BlockStored", "block_hashes": hashes, "parent_block_hash": parent,
            "token_ids": [0] * 16 * len(hashes), "block_size": 16, "lora_id": None, **fields}  # fmt: skip


def removed(*hashes: Any) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": list(hashes), "medium": "GPU"}


EVENTS = [
    [100.0, [stored(["a", "b"], None), stored(["x"], None)], 0],
    # The second part of the first prompt, and two generated blocks.
    [100.5, [stored(["c", "d"], "b")], 0],
    [101.0, [stored(["e"], "d"), stored(["q"], None, medium="CPU"), stored(["r"], None, group_idx=1)], 0],
    [101.9, [stored(["f"], "e")], 0],
    # Another prompt that begins with a and b; then the next turn of the first prompt, nine seconds later.
    [102.0, [stored(["g"], "b")], 0],
    [111.0, [stored(["h", "i"], "f")], 0],
    [120.0, [removed("i", "h", "f"), {"type": "AllBlocksCleared"}], 0],
    [130.0, [stored(["j"], "unknown")], None],
]


def test_kv_events(tmp_path: Path) -> None:
    path = write(tmp_path / "in.jsonl", EVENTS)
    trace, done = converted(path, "k.gap-2s.jsonl")
    assert (done.source, trace.block_tokens, done.assumed) == ("kv_events", 16, "gap-2s")
    assert trace.timestamps_ms.tolist() == [0, 0, 2000, 11_000, 30_000]
    a_to_d = [0, 1, 2, 3]
    assert chains(trace) == [a_to_d, [4], [0, 1, 5], [*a_to_d, 6, 7, 8, 9], [10, 11]]
    assert trace.output_tokens.tolist() == [32, 0, 0, 0, 0]
    assert any("1 requests continue blocks from before" in remark for remark in done.remarks)
    assert any("the engine had more reuse" in remark for remark in done.remarks)


def test_removed_blocks_are_forgotten(tmp_path: Path) -> None:
    """Memory is bounded by the cache; no request continues a removed block until it is stored again."""
    records = [
        [1.0, [stored(["a", "b", "c"], None)]],
        [5.0, [removed("c", "b")]],
        [9.0, [stored(["d"], "b")]],
        [15.0, [stored(["b"], "a")]],
        [20.0, [stored(["e"], "b")]],
    ]
    trace, done = converted(write(tmp_path / "in.jsonl", records), "k.gap-2s.jsonl")
    assert np.diff(trace.offsets).tolist() == [3, 2, 2, 3]
    assert chains(trace)[0][:2] == chains(trace)[3][:2]
    assert any("1 requests continue blocks from before" in remark for remark in done.remarks)


def test_equal_prompts_at_once_are_two_requests_and_hide_no_later_request(tmp_path: Path) -> None:
    """The second prompt computes and stores its last block again, while the first may still grow."""
    records = [
        [1.0, [stored(["a", "b"], None)]],
        [1.5, [stored(["b"], "a")]],
        [2.0, [stored(["c"], "b")]],
        [9.0, [stored(["d"], None)]],
    ]
    trace, _ = converted(write(tmp_path / "in.jsonl", records), "k.gap-2s.jsonl")
    assert chains(trace) == [[0, 1], [0, 1], [2]]
    assert (trace.timestamps_ms.tolist(), trace.output_tokens.tolist()) == ([0, 500, 8000], [0, 16, 0])


def test_kv_events_in_the_older_form_and_as_objects(tmp_path: Path) -> None:
    arrays = [["BlockStored", [1, 2], None, [0] * 32, 16, None, "GPU"], ["BlockRemoved", [2], "GPU"],
              ["AllBlocksCleared"]]  # fmt: skip
    records = [[1.0, arrays], {"ts": 9.0, "events": [stored([1], None)], "data_parallel_rank": 1}]
    trace, _ = converted(write(tmp_path / "in.jsonl", records), "k.gap-2s.jsonl")
    assert chains(trace) == [[0, 1], [0]]


BAD_EVENTS = {
    "no batch": ({"events": []}, "line: not a batch of KV events: [seconds, [event, ...]]"),
    "no event": ([1.0, [5]], "field events: an element is not an event"),
    "no hash": ([1.0, [{"type": "BlockStored"}]], "field events: a block has no hash"),
    "own parent": ([1.0, [stored([9], 9)]],
                   "field events: block 9 is its own ancestor"),
    "twice": ([1.0, [stored([9, 9], None)]],
              "field events: a block is stored twice"),
    "cycle": ([99.0, [stored([8], 9), stored([9], 8)]],
              "field events: block 9 is its own ancestor"),
    "another size": ([1.0, [{**stored([1], None), "block_size": 32}]],
                     "field block_size: 32, not 16; --block-tokens 32 would fit"),
}  # fmt: skip


@pytest.mark.parametrize(("bad", "reason"), BAD_EVENTS.values(), ids=BAD_EVENTS)
def test_invalid_kv_events_are_named_or_skipped(tmp_path: Path, bad: Any, reason: str) -> None:
    path = write(tmp_path / "in.jsonl", [EVENTS[0], bad])
    with pytest.raises(TraceError) as error:
        converted(path, "k.gap-2s.jsonl")
    assert str(error.value) == f"{path}:2: {reason}"
    assert converted(path, "k.gap-2s.jsonl", skip_bad_lines=True)[1].skipped_lines == 1


@pytest.mark.parametrize(
    "bad",
    [
        pytest.param(
            [stored(["z"], None), stored(["g"], "b"), stored([8], 9), stored([9], 8)], id="last event"
        ),
        pytest.param(
            [removed("b"), {"type": "AllBlocksCleared"}, stored([8], 9), stored([9], 8)], id="removed"
        ),
        pytest.param([stored(["c", "a"], "b")], id="own request"),
        pytest.param([stored(["c"], "b"), stored(["d", "a"], "c")], id="own request, continued"),
    ],
)
def test_a_bad_batch_of_kv_events_changes_nothing(tmp_path: Path, bad: list[Any]) -> None:
    """Regression: the events before the bad event were applied, and the batch ended older requests."""
    rest = [[101.0, [stored(["c", "d"], "b")], 0], [101.5, [stored(["e"], "d")], 0]]
    without, _ = converted(write(tmp_path / "good.jsonl", [EVENTS[0], *rest]), "good.gap-2s.jsonl")
    path = write(tmp_path / "in.jsonl", [EVENTS[0], [999.0, bad, 0], [101.0, bad, 0], *rest])
    trace, done = converted(path, "k.gap-2s.jsonl", skip_bad_lines=True)
    assert done.skipped_lines == 2
    assert chains(trace) == chains(without)
    assert trace.timestamps_ms.tolist() == without.timestamps_ms.tolist()
    assert trace.output_tokens.tolist() == without.output_tokens.tolist()
    assert not any("before the recording" in remark for remark in done.remarks)


def test_a_cycle_of_kv_events_over_several_batches_is_a_bad_line(tmp_path: Path) -> None:
    """Regression: the conversion never ended if a block got another parent."""
    records = [
        [1.0, [stored(["a", "b", "c"], None)]],
        [1.1, [stored(["b"], "z")]],
        [1.2, [stored(["z"], "c")]],
        [1.3, [stored(["x"], "c")]],
    ]
    with pytest.raises(TraceError, match=r":4: field events: block c is its own ancestor"):
        converted(write(tmp_path / "in.jsonl", records), "k.gap-2s.jsonl")


@pytest.fixture
def publisher() -> Iterator[Callable[[list[tuple[int, Any]]], str]]:
    """A publisher of numbered batches, like vLLM's. A tuple of bytes is sent as a message of these parts."""
    zmq = pytest.importorskip("zmq", reason="the library pyzmq is not installed")
    over, threads = Event(), []
    context = zmq.Context()

    def publish(batches: list[tuple[int, Any]]) -> str:
        socket = context.socket(zmq.XPUB)
        socket.setsockopt(zmq.LINGER, 0)
        port = socket.bind_to_random_port("tcp://127.0.0.1")

        def send() -> None:
            with socket:
                # XPUB receives a message for each subscriber, so nothing is sent too early.
                while not socket.poll(100):
                    if over.is_set():
                        return
                socket.recv()
                for sequence, batch in batches:
                    if not isinstance(batch, tuple):
                        batch = (b"", sequence.to_bytes(8, "big"), msgspec.msgpack.encode(batch))
                    socket.send_multipart(batch)
                over.wait()

        threads.append(Thread(target=send))
        threads[-1].start()
        return f"tcp://127.0.0.1:{port}"

    yield publish
    over.set()
    for thread in threads:
        thread.join()
    context.term()


def test_kv_events_live(publisher: Callable[[list[tuple[int, Any]]], str]) -> None:
    from kvoffload.traces.conversion.event_stream import batches

    sent = [(0, [1.0, [stored([b"\xff\x00"], None)]]), (3, [2.0, [stored([5], None)]])]
    lost = [0]
    reader = batches(publisher(sent), lost)
    received = [json.loads(text) for _, text in islice(reader, 2)]
    reader.close()  # type: ignore[attr-defined]
    assert received[0][1][0]["block_hashes"] == ["ff00"]
    assert received[1] == [2.0, [stored([5], None)]]
    assert lost == [2]


SECOND = (1).to_bytes(8, "big")


@pytest.mark.parametrize(
    "message", [(b"status",), (b"", SECOND), (b"", SECOND, b"\xc1"), (b"", SECOND, b"\xd4\x05\x00")]
)
def test_a_message_of_another_publisher_is_a_bad_line(
    tmp_path: Path, publisher: Callable[[list[tuple[int, Any]]], str], message: tuple[bytes, ...]
) -> None:
    """A message has three parts. The payload is MessagePack without extensions."""
    address = publisher([(0, [1.0, [stored([5], None)]]), (1, message)])
    with pytest.raises(TraceError) as error:
        convert(address, tmp_path / "k.gap-2s.jsonl")
    assert str(error.value) == f"{address}:2: line: not a batch of KV events: [seconds, [event, ...]]"


def test_a_live_recording_ends_with_ctrl_c(
    tmp_path: Path, publisher: Callable[[list[tuple[int, Any]]], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C ends between two batches and keeps earlier requests."""
    import os
    import signal

    from kvoffload.traces.conversion.sources.kv_events import KVEvents

    read, address = KVEvents.read, publisher([(n, [float(n), [stored([n], None)]]) for n in range(3)])

    def interrupting(self: KVEvents, record: bytes) -> Any:
        if json.loads(record)[0] == 2.0:
            os.kill(os.getpid(), signal.SIGINT)
        return read(self, record)

    monkeypatch.setattr(KVEvents, "read", interrupting)
    done = kvoffload("trace", "convert", address, tmp_path / "k.gap-2s.jsonl", "--quiet")
    assert done.returncode == 0, done.stderr
    assert read_trace(tmp_path / "k.gap-2s.jsonl").requests == 3


# ---- the command


def test_the_command(tmp_path: Path) -> None:
    path, out = write(tmp_path / "in.jsonl", BAILIAN), tmp_path / "out.jsonl"
    done = kvoffload("trace", "convert", path, out)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{out}: 2 requests, 6 block references of 16 tokens, from bailian\n"
    refused = kvoffload("trace", "convert", path, out)
    assert refused.returncode == 2
    assert "the file exists; --force replaces it" in refused.stderr
    assert kvoffload("trace", "convert", path, out, "--force").returncode == 0
    (tmp_path / "in.csv").write_text(AZURE + "x\n")
    options = ("--from", "lengths:none", "--skip-bad-lines")
    done = kvoffload("trace", "convert", tmp_path / "in.csv", tmp_path / "b.none-shared.jsonl", *options)
    assert done.stderr == (
        "kvoffload: assumed: none-shared; reports of this trace mention it\nkvoffload: 1 bad lines left out\n"
    )
    shown = kvoffload("trace", "info", tmp_path / "b.none-shared.jsonl")
    assert "(assumed: none-shared)" in shown.stdout


def test_only_a_regular_file_is_replaced(tmp_path: Path) -> None:
    """Regression: root replaced the device /dev/null."""
    source, out = write(tmp_path / "in.jsonl", BAILIAN), tmp_path / "out.jsonl"
    os.mkfifo(out)
    for place in (out, tmp_path):
        done = kvoffload("trace", "convert", source, place, "--force")
        assert (done.returncode, done.stdout) == (2, "")
        assert f"out: '{place}' is invalid; allowed: a regular file, or a new one" in done.stderr
    assert out.is_fifo()


def test_the_help_names_every_kind() -> None:
    shown = kvoffload("trace", "convert", "--help").stdout
    assert all(name in shown for name in SOURCES.names())
    assert SOURCES.names() == ["bailian", "kv_events", "lengths", "mooncake", "text", "token_ids"]


KINDS = "bailian, kv_events, lengths, mooncake, text, token_ids"
MISTAKES = {
    "no file": (["no-such"],
                "source: 'no-such' is invalid; there is no such file; allowed: a file, -, or "
                "tcp://host:port"),
    "stdin": (["-"],
              f"from: missing; the format of standard input cannot be detected; allowed: {KINDS}"),
    "no kind": (["-", "--from", "bailan"],
                f"from: 'bailan' is invalid; allowed: {KINDS}, module:Class, or path/to/file.py:Class "
                "(did you mean bailian?)"),
    "no ids": (["-", "--from", "text", "--keep-ids"],
               "keep-ids: True is invalid; text has no block ids to keep"),
    "two wishes": (["-", "--salt", "x", "--keep-ids"],
                   "salt: 'x' is invalid; leave out --salt or --keep-ids"),
    "no such reuse": (["-", "--from", "lengths:maybe"],
                      "from: 'lengths:maybe' is invalid; reuse: allowed: none, continued, sessions"),
    "no gap": (["-", "--from", "kv_events:0"],
               "from: 'kv_events:0' is invalid; gap_s: allowed: a number above 0"),
}  # fmt: skip


@pytest.mark.parametrize(("arguments", "message"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes_are_one_line(tmp_path: Path, arguments: list[str], message: str) -> None:
    source, *options = arguments
    done = kvoffload("trace", "convert", source, tmp_path / "out.jsonl", *options)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"kvoffload: {message}\n")


COMPLETE = {
    "all of them": (["in.json"],
                    ["tokenizer: missing", "from: 'text' is invalid; the file has no", "out: missing"],
                    "in.json in.jsonl.zst --from text,per_minute=60 --tokenizer tokenizer.json"),
    "what was given stays": (["in.json", "o.jsonl", "--from", "text:30", "--salt", "secret", "--quiet"],
                             ["tokenizer: missing"],
                             "in.json o.jsonl --from text:30 --tokenizer tokenizer.json --salt TEXT --quiet"),
    "a wrong tokenizer": (["in.json", "o.jsonl", "--tokenizer", "nope", "--block-tokens", "32"],
                          ["from: 'text' is invalid", "tokenizer: 'nope' is invalid; there is no such file"],
                          "in.json o.jsonl --from text,per_minute=60 --tokenizer tokenizer.json "
                          "--block-tokens 32"),
    "a rate of 0": (["ids.jsonl", "o.jsonl", "--from", "token_ids:0", "--skip-bad-lines", "--force"],
                    ["from: 'token_ids' is invalid"],
                    "ids.jsonl o.jsonl --from token_ids,per_minute=60 --skip-bad-lines --force"),
    "lengths": (["azure.csv"], ["from: 'lengths' is invalid; lengths do not show", "out: missing"],
                "azure.csv azure.jsonl.zst --from lengths,reuse=none"),
    "lengths with sessions": (["burst.csv", "o.jsonl", "--from", "lengths,within_s=30"],
                              ["from: 'lengths' is invalid"],
                              "burst.csv o.jsonl --from lengths,within_s=30,reuse=sessions"),
    "standard input": (["-", "--from", "text"], ["tokenizer: missing", "out: missing"],
                       "- trace.jsonl.zst --from text --tokenizer tokenizer.json"),
    "only the output": (["good.jsonl"], ["out: missing; give a file for the trace"],
                        "good.jsonl good.trace.jsonl.zst"),
}  # fmt: skip


@pytest.mark.parametrize(("arguments", "problems", "command"), COMPLETE.values(), ids=COMPLETE)
def test_all_missing_options_are_reported_with_the_complete_command(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    problems: list[str],
    command: str,
) -> None:
    """Regression: ShareGPT needed three attempts."""
    pytest.importorskip("tokenizers", reason="the library tokenizers is not installed")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in.json").write_text(json.dumps([sharegpt(0)]))
    write(tmp_path / "ids.jsonl", [{"prompt_token_ids": [1, 2]}])
    write(tmp_path / "good.jsonl", [request([1])])
    (tmp_path / "good.jsonl.zst").touch()
    (tmp_path / "azure.csv").write_text(AZURE)
    (tmp_path / "burst.csv").write_text(BURST)
    before = sorted(tmp_path.iterdir())
    done = kvoffload("trace", "convert", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    *lines, last = done.stderr.splitlines()
    assert last == f"complete command: kvoffload trace convert {command}"
    assert len(lines) == len(problems) + (len(problems) > 1)
    for line, problem in zip(lines[-len(problems) :], problems, strict=True):
        assert problem in line
    assert "secret" not in done.stderr
    assert sorted(tmp_path.iterdir()) == before


def test_the_complete_command_converts(
    tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in.json").write_text(json.dumps([sharegpt(0)]))
    (tmp_path / "tokenizer.json").write_bytes(tokenizer.read_bytes())
    command = kvoffload("trace", "convert", "in.json").stderr.partition("complete command: kvoffload ")[2]
    done = kvoffload(*command.split())
    assert (done.returncode, done.stderr) == (
        0, "kvoffload: assumed: paced-60-per-minute; reports of this trace mention it\n"
    )  # fmt: skip
    assert read_trace(tmp_path / "in.jsonl.zst").name == "in (assumed: paced-60-per-minute)"


def test_an_invalid_address_is_a_one_line_error(tmp_path: Path) -> None:
    pytest.importorskip("zmq", reason="the library pyzmq is not installed")
    done = kvoffload("trace", "convert", "tcp://nowhere", tmp_path / "k.gap-2s.jsonl")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("kvoffload: source: 'tcp://nowhere' is invalid; allowed: tcp://host:port (")


OWN = """
from kvoffload.traces.conversion.source import Request, Source

class Words(Source):
    name = "words"
    tokens_each: int = 3

    @classmethod
    def recognises(cls, names):
        return False

    def read(self, record):
        words = record.decode().split()
        blocks = len(words) * self.tokens_each // self.given.block_size.tokens
        yield Request(0.0, len(words) * self.tokens_each, 0, self.given.keys.of(words[:blocks]))
"""


def test_a_user_defined_source_is_one_file(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    path = write(tmp_path / "in.txt", ["a b c", "a b d e"])
    kind = f"{tmp_path / 'own.py'}:Words,tokens_each=4"
    trace, done = converted(path, source=kind, block_tokens=4)
    assert done.source == "words"
    assert chains(trace) == [[0, 1, 2], [0, 1, 3, 4]]


def test_unrecognised_and_empty_recordings_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "in.jsonl", [{"user": 1, "query": "x"}])
    with pytest.raises(
        ConfigError, match=r"the format of in\.jsonl is not recognised: the first record has query, user;"
    ):
        converted(path)
    with pytest.raises(ConfigError, match="the first record has no fields"):
        converted(write(path, [" "]))
    with pytest.raises(TraceError, match=r"in\.jsonl: no requests in it"):
        converted(write(path, [" "]), source="mooncake")
    with pytest.raises(ConfigError, match=r"out: .* the file cannot be written \(No such file"):
        convert(str(write(path, [request([1])])), tmp_path / "no" / "out.jsonl")


def test_a_recording_is_converted_in_constant_memory(tmp_path: Path) -> None:
    """If each request kept its 24 KB, 200 requests would keep 4.8 MB."""
    path = tmp_path / "in.jsonl"
    with path.open("w") as file:
        for n in range(200):
            file.write(json.dumps(request([n * 1000 + j for j in range(400)], timestamp=n)) + "\n")
    tracemalloc.start()
    try:
        convert(str(path), tmp_path / "out.jsonl")
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 1_500_000


@pytest.mark.trace
def test_a_recorded_trace_is_unchanged_by_conversion(
    tmp_path: Path, recorded_trace_path: Callable[[str], Path]
) -> None:
    path = recorded_trace_path("conversation_first60")
    original = read_trace(path)
    convert(str(path), tmp_path / "out.jsonl")
    trace = read_trace(tmp_path / "out.jsonl")
    assert np.array_equal(trace.refs, original.refs)
    assert np.array_equal(trace.offsets, original.offsets)


@pytest.mark.parametrize(
    "line",
    [
        "INFO 11-26 03:00:09 [loggers.py:111] Engine 000: Avg prompt throughput: 1,204",
        "(APIServer pid=7) INFO 11-26 03:00:00 [x.py:1] Starting",
    ],
)
def test_a_log_of_vllm_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "vllm.log"
    path.write_text(line + "\n")
    with pytest.raises(
        ConfigError, match=r"vllm\.log: it is a server's text log, which lacks the prompts. Record"
    ):
        converted(path)
