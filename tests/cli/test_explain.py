"""``kvoffload explain``: sums of the JSON, tables, one request, recordings of servers, invalid input."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvoffload.explain.capacity import larger_hits
from kvoffload.explain.explanation import explain
from kvoffload.explain.misses import HOPELESS, MEANINGS, NUMBERS, find_misses
from kvoffload.explain.words import ADVICE
from kvoffload.replay.config import ReplayConfig
from kvoffload.replay.replay import Replay
from kvoffload.traces.sources import load_trace
from support.run_cli import Done, kvoffload

CACHES = ("--capacity", "5%", "--policy", "hazard", "--admission", "reuse:2", "--tier", "simulated:10%")


def explained(*arguments: str | Path) -> dict[str, Any]:
    done = kvoffload("explain", *arguments, "--format", "json", "--quiet")
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    return report


@pytest.mark.parametrize("caches", [(), CACHES, ("--device-blocks", "5%", "--store", "on-device-eviction")])
def test_reasons_add_up_and_decisions_equal_a_replay(chat: str, caches: tuple[str, ...]) -> None:
    report = explained(chat, *caches)
    replayed = json.loads(kvoffload("replay", chat, *caches, "--no-data", "--format", "json").stdout)
    assert report["decisions_sha256"] == replayed["decisions_sha256"]
    assert report["hits"] == replayed["prefix_hit_blocks"]
    assert report["misses"] == replayed["block_refs"] - replayed["prefix_hit_blocks"]
    assert sum(report["reasons"].values()) == report["misses"]
    assert report["meanings"].keys() == report["reasons"].keys()
    assert len(report["runs"]) == 20
    order = [(run["reason"] in HOPELESS, -run["blocks"]) for run in report["runs"]]
    assert order == sorted(order)


def test_all_runs_add_up_to_the_reasons(chat: str) -> None:
    report = explained(chat, "--top", "100000", "--no-capacities")
    sums: dict[str, int] = {}
    for run in report["runs"]:
        sums[run["reason"]] = sums.get(run["reason"], 0) + run["blocks"]
    assert sums == report["reasons"]
    assert len(report["runs"]) == report["num_runs"]
    places = report["differing"]
    assert len(places) == report["num_differing"]
    assert sum(place["blocks"] for place in places) == sum(
        report["reasons"].get(reason, 0) for reason in ("prefix_differs", "after_shared_prompt")
    )
    assert report["capacities"] is None


def test_larger_capacities_hit_more_with_lru(chat: str) -> None:
    report = explained(chat)
    rows = report["capacities"]
    assert [row["factor"] for row in rows] == [1.1, 1.3, 1.5, 2, 3, 5, 10]
    for key in ("evicted_hits", "hits"):
        assert [row[key] for row in rows] == sorted(row[key] for row in rows)
    assert 0 < rows[-1]["evicted_hits"] <= report["reasons"]["evicted"]
    assert rows[-1]["hits"] > report["hits"]


def blocks_one_by_one(path: Path, *blocks: int) -> Path:
    lines = [
        {"timestamp": at, "input_length": 512, "output_length": 1, "hash_ids": [block]}
        for at, block in enumerate(blocks)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_hits_that_a_larger_capacity_loses_are_shown(tmp_path: Path) -> None:
    path = blocks_one_by_one(tmp_path / "fifo.jsonl", 1, 2, 3, 4, 1, 2, 5, 1, 2, 3, 4, 5)
    report = explained(path, "--capacity", "3", "--policy", "fifo", "--request", "4")
    assert (report["hits"], report["reasons"]) == (3, {"new_prompt": 5, "evicted": 4})
    rows = [(row["factor"], row["evicted_hits"], row["hits"]) for row in report["capacities"]]
    # Capacities of 4 blocks, 5 blocks, and more than all blocks.
    assert rows[:3] == [(1.1, 2, 2), (1.3, 2, 2), (1.5, 4, 7)]
    assert report["runs"][0]["kept_with"] == 1.1
    done = kvoffload("explain", path, "--capacity", "3", "--policy", "fifo", "--quiet")
    words = " ".join(done.stdout.split())
    assert "1 times 0 0.0% 3 25.0%" in words
    assert "1.1 times 2 50.0% 2 16.7%" in words


def test_hits_of_evicted_blocks_equal_replays_with_larger_capacities(chat: str) -> None:
    """S3-FIFO is not monotone: 10 times the capacity loses some hits of 5 times the capacity."""
    trace = load_trace(chat)
    config = ReplayConfig(trace.unique_blocks // 20, "s3fifo")
    report, misses = find_misses(trace, config)
    misses = replace(misses, larger_hits=larger_hits(trace, config))
    rows = explain(report, misses, config).capacities
    assert rows is not None
    is_evicted = misses.reasons == NUMBERS["evicted"]
    depth = np.arange(trace.block_refs) - np.repeat(trace.offsets[:-1], np.diff(trace.offsets))
    for factor, row in ((5, rows[5]), (10, rows[6])):
        larger = Replay(trace, replace(config, capacity_blocks=config.capacity_blocks * factor))
        larger.run()
        is_hit = depth < np.repeat(larger.hits_per_request, np.diff(trace.offsets))
        assert (row.factor, row.evicted_hits) == (factor, np.count_nonzero(is_evicted & is_hit))
        assert row.hits == larger.hits_per_request.sum()


def test_one_request(chat: str) -> None:
    every = explained(chat, "--top", "100000")["runs"]
    request = every[7]["request"]
    report = explained(chat, "--request", str(request))
    own = sorted((run for run in every if run["request"] == request), key=lambda run: run["first_block"])
    assert report["runs"] == own
    done = kvoffload("explain", chat, "--request", "100000", "--quiet")
    assert done.returncode == 2
    assert re.search(r"request: 100000 is invalid; allowed: 0 to [\d,]+", done.stderr)


@pytest.mark.parametrize("columns", [50, 80, 120])
def test_tables_fit_the_terminal_without_losses(chat: str, columns: int) -> None:
    done = kvoffload("explain", chat, *CACHES, "--top", "3", columns=columns)
    assert done.returncode == 0, done.stderr
    assert max(map(len, done.stdout.splitlines())) <= columns
    text = " ".join(done.stdout.split())
    report = explained(chat, *CACHES, "--top", "3")
    for reason, blocks in report["reasons"].items():
        assert reason in text
        assert f"{blocks:,}" in text
    assert f"{report['misses']:,}" in text


def test_every_reason_has_advice() -> None:
    replayed = MEANINGS.keys() - {"in_flight", "failed_store", "reset"}
    assert ADVICE.keys() == replayed


def token_ids(path: Path) -> Path:
    template = [7 + number % 1000 for number in range(300)]
    prompts = [[*template[:20], day, *template[20:]] for day in (2000, 2001, 2001, 2002)]
    lines = [{"timestamp": at, "prompt_token_ids": prompt} for at, prompt in enumerate(prompts)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_a_recording_with_token_ids(tmp_path: Path) -> None:
    path = token_ids(tmp_path / "requests.jsonl")
    report = explained(path, "--capacity", "100")
    assert (report["trace"], report["block_tokens"], report["has_token_ids"]) == ("requests", 16, True)
    assert report["reasons"] == {"prefix_differs": 34, "new_prompt": 18}
    (place,) = report["differing"]
    assert (place["token"], place["requests"], place["block"]) == (20, 2, 1)
    assert place["difference"]["theirs"] == [2000]
    assert report["equal_tokens"] == place["equal_tokens"] == 2 * (18 * 16 - 21)
    done = kvoffload("explain", path, "--capacity", "100", "--quiet")
    assert "token 20 differs from request 0 (2001 instead of 2000); the following 267 tokens are" in " ".join(
        done.stdout.split()
    )


def test_another_salt_has_the_same_tokens(tmp_path: Path) -> None:
    prompt = [*range(100, 164)]
    lines = [
        {"prompt_token_ids": prompt, "cache_salt": "a"},
        {"prompt_token_ids": prompt, "cache_salt": "b"},
        {"prompt_token_ids": prompt},
        {"prompt_token_ids": [*prompt, *range(16)], "cache_salt": "b"},
    ]
    timed = [json.dumps({"timestamp": at, **line}) for at, line in enumerate(lines)]
    (path := tmp_path / "salted.jsonl").write_text("\n".join(timed))
    report = explained(path, "--capacity", "99")
    assert report["reasons"] == {"other_tenant": 8, "new_prompt": 4, "continues": 1}
    assert report["hits"] == 4


def test_a_continued_prompt_with_another_salt_has_no_difference(tmp_path: Path) -> None:
    first, added = [*range(1000, 1064)], [*range(5000, 5032)]
    lines = [
        {"timestamp": 0, "prompt_token_ids": first, "cache_salt": "a"},
        {"timestamp": 1, "prompt_token_ids": first + added, "cache_salt": "b"},
    ]
    (path := tmp_path / "salted.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    report = explained(path, "--capacity", "99")
    assert report["reasons"] == {"new_prompt": 4, "other_tenant": 4, "continues": 2}
    assert (report["differing"], report["equal_tokens"]) == ([], 0)


def test_token_ids_without_times_need_a_pace(tmp_path: Path) -> None:
    (path := tmp_path / "a.jsonl").write_text(json.dumps({"token_ids": [*range(40)]}) + "\n")
    done = kvoffload("explain", path, "--capacity", "9")
    assert done.returncode == 2
    assert "per_minute" in done.stderr
    for kind in ("token_ids,per_minute=60", "token_ids:60"):
        assert explained(path, "--capacity", "9", "--from", kind)["misses"] == 2


def test_a_recording_of_a_server_is_compared_with_the_replay(tmp_path: Path) -> None:
    lines = [
        {"timestamp": 0, "hash_ids": [1, 2], "served_tokens": {}},
        {"timestamp": 5, "hash_ids": [1, 2], "served_tokens": {"gpu": 16}},
        {"timestamp": 9, "hash_ids": [1, 2], "served_tokens": {"gpu": 16, "host": 16}},
    ]
    header = {"kvoffload_trace": 1, "block_tokens": 16, "source": "vllm"}
    requests = [header, *({**line, "input_length": 32, "output_length": 1} for line in lines)]
    (path := tmp_path / "kv.jsonl").write_text("".join(json.dumps(line) + "\n" for line in requests))
    assert explained(path, "--capacity", "9")["served"] == {
        "tokens": {"gpu": 32, "host": 16},
        "replayed_tokens": 64,
        "requests_with_less": 1,
        "tokens_less": 16,
        "requests_with_more": 0,
        "tokens_more": 0,
    }
    done = kvoffload("explain", path, "--capacity", "9")
    assert "The recorded server had 48 tokens cached (gpu 32, host 16), the replay 64." in " ".join(
        done.stdout.split()
    )
    assert explained(path, "--capacity", "1")["served"]["requests_with_more"] == 1


def test_a_turn_that_differs_from_its_session_is_counted(tmp_path: Path) -> None:
    lines = [
        {"hash_ids": [1, 2, 3], "session": "a"},
        {"hash_ids": [1, 9, 8], "session": "a"},
        {"hash_ids": [1, 7], "session": "b"},
    ]
    written = [
        {"timestamp": at, "input_length": 512 * len(line["hash_ids"]), "output_length": 1, **line}
        for at, line in enumerate(lines)
    ]
    (path := tmp_path / "turns.jsonl").write_text("\n".join(json.dumps(line) for line in written))
    report = explained(path, "--capacity", "9")
    (place,) = report["differing"]
    assert (place["block"], place["requests"], place["in_session"]) == (1, 2, 1)
    done = kvoffload("explain", path, "--capacity", "9")
    assert "request 1 differs from 0; 1 differs from its own session" in " ".join(done.stdout.split())


def test_tiers_are_simulated_and_write_nothing(chat: str, tmp_path: Path) -> None:
    disk = explained(chat, "--tier", f"disk:{tmp_path / 'kv'}:10%,policy=arc")
    simulated = explained(chat, "--tier", "simulated:10%,policy=arc")
    assert not [*tmp_path.iterdir()]
    assert disk["decisions_sha256"] == simulated["decisions_sha256"]
    assert (disk["tiers"], simulated["tiers"]) == (["disk"], ["simulated"])


def test_evicted_blocks_name_the_slowest_tier(tmp_path: Path) -> None:
    path = blocks_one_by_one(tmp_path / "two.jsonl", *range(1, 9), 1)
    options = ("--capacity", "1", "--tier", "simulated:2", "--tier", "simulated:4")
    report = explained(path, *options, "--request", "8")
    assert report["evicted"]["slowest"] == {"simulated 2": 1}
    assert report["runs"][0]["slowest"] == "simulated 2"
    words = " ".join(kvoffload("explain", path, *options, "--quiet").stdout.split())
    assert "The slowest place that held them: simulated 2 1." in words
    assert "; also from simulated 2" in words


def test_a_single_miss_is_singular(tmp_path: Path) -> None:
    header = {"kvoffload_trace": 1, "block_tokens": 16, "source": "vllm"}
    line = {
        "timestamp": 0,
        "input_length": 16,
        "output_length": 1,
        "hash_ids": [1],
        "served_tokens": {"gpu": 16},
    }
    (path := tmp_path / "kv.jsonl").write_text(json.dumps(header) + "\n" + json.dumps(line) + "\n")
    words = " ".join(kvoffload("explain", path, "--capacity", "1", "--quiet").stdout.split())
    assert "1 of 1 block reference is a miss (100.0%), in 1 request, with 1 block of RAM" in words
    assert "The server had fewer in 0 requests (0 tokens) and more in 1 request (16 tokens)." in words


def test_equal_tokens_are_counted_for_all_differences(tmp_path: Path) -> None:
    path = token_ids(tmp_path / "requests.jsonl")
    words = " ".join(kvoffload("explain", path, "--capacity", "9", "--top", "1", "--quiet").stdout.split())
    assert (
        "534 tokens behind the differences of all requests are equal to those of an earlier prompt: prompts "
        "that change only at the end could hit them, if they are still stored."
    ) in words


def refused(done: Done, *texts: str) -> None:
    assert done.returncode == 2
    for text in texts:
        assert text in done.stderr


def test_options_of_a_comparison_with_a_server_belong_to_replay(chat: str) -> None:
    for flag in ("--check", "--since"):
        refused(kvoffload("explain", chat, flag, "metrics.txt"), f"No such option '{flag}'")


def test_options_that_the_recording_does_not_support_are_refused(chat: str, tmp_path: Path) -> None:
    recording = token_ids(tmp_path / "requests.jsonl")
    done = kvoffload("explain", chat, "--tokenizer", tmp_path / "tokenizer.json", "--from", "kv_events")
    refused(done, "tokenizer.json' is invalid; TRACE has block ids", "from: 'kv_events' is invalid")
    done = kvoffload("explain", recording, "--capacity", "9", "--time-unit", "ms")
    refused(done, "time-unit: 'ms' is invalid", "token ids or text")


def test_invalid_input_is_one_message(chat: str, tmp_path: Path) -> None:
    wrong = ("--tier", "valkey://host/team", "--capacity", "many", "--report", tmp_path / "page.txt")
    refused(kvoffload("explain", chat, *wrong), "simulated:CAPACITY", "capacity: 'many'", "ends in .html")
    limited = f"disk:{tmp_path}:9,max_write_bytes_per_day=1GiB"
    refused(kvoffload("explain", chat, "--tier", limited), "max_write_blocks_per_day=N")
    refused(kvoffload("explain", tmp_path / "absent"), "there is no such file")
    refused(kvoffload("explain", chat, "--top", "0"), "top: 0")
