"""The canary against a fake server: verdicts, evidence, exit codes and output."""

from __future__ import annotations

import errno
import json
import math
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from kvoffload.canary.answers import Answer
from kvoffload.canary.prompts import Prompt
from kvoffload.canary.server import Counters, Pace, Server
from kvoffload.cli import canary as command
from kvoffload.errors import CanaryError
from support.fake_openai import FakeServer, fake_server
from support.run_cli import kvoffload

SMALL = ("--num-prompts", "12", "--answer-tokens", "3", "--chunk-tokens", "64", "--seed", "7", "--quiet")


def run(fake: FakeServer, *options: str) -> tuple[int, dict[str, Any]]:
    done = kvoffload("canary", fake.url, *SMALL, "--format", "json", *options)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


@pytest.mark.parametrize("emptying", [(), ("--may-reset",)])
def test_equal_answers_are_equal(emptying: tuple[str, ...]) -> None:
    with fake_server() as fake:
        code, report = run(fake, *emptying)
    assert (code, report["verdict"]) == (0, "equal")
    assert report["seed"] == 7
    assert [phase["requests"] for phase in report["phases"]] == [12] * 6
    assert [bool(phase["tier_tokens"]) for phase in report["phases"]] == [False] * 4 + [True] * 2
    assert report["differences"] == []


def test_a_fault_of_the_tiers_is_an_alarm() -> None:
    with fake_server(tier_fault=0.3, noise=0.01) as fake:
        code, report = run(fake)
    assert (code, report["verdict"]) == (1, "different")
    assert report["confidence"] > 0.999
    worst = report["differences"][0]
    assert worst["phase"].startswith("from the tiers")
    assert worst["position"] == 0
    assert worst["computed_logprob"] - worst["cached_logprob"] == pytest.approx(0.3, abs=0.02)


def test_nan_from_the_tiers_is_an_alarm() -> None:
    """Damaged KV usually gives NaN, which no comparison with a number would notice."""
    with fake_server(tier_fault=math.nan) as fake:
        code, report = run(fake)
    assert (code, report["verdict"]) == (1, "different")
    assert report["differences"][0]["cached_logprob"] is None


def test_a_small_shift_of_all_answers_is_an_alarm() -> None:
    """A wrong layer moves every answer slightly, and none beyond four times the noise."""
    with fake_server(tier_fault=0.022, noise=0.009) as fake:
        code, report = run(fake, "--num-prompts", "24")
    assert report["differences"][0]["difference"] < report["threshold"]
    assert (code, report["verdict"]) == (1, "different")
    assert report["confidence"] > 1 - 1e-6


def test_a_fault_of_the_device_is_named() -> None:
    with fake_server(device_fault=0.9) as fake:
        code, report = run(fake)
    assert (code, report["verdict"]) == (1, "different")
    assert "device" in report["reasons"][0]


def test_noise_is_no_alarm() -> None:
    with fake_server(noise=0.2) as fake:
        verdicts = [run(fake, "--seed", str(seed))[1]["verdict"] for seed in range(1, 9)]
    assert set(verdicts) <= {"equal", "within-noise"}


def test_noise_that_changes_tokens_is_no_alarm() -> None:
    """Tokens differ by a log-probability of 1, so that almost every answer has a different token."""
    with fake_server(noise=2.0) as fake:
        code, report = run(fake)
    assert (code, report["verdict"]) == (0, "within-noise")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"has_tier": False}, "no prompt token came from the tiers"),
        ({"has_metrics": False}, "--tier-hits-metric"),
    ],
)
def test_without_evidence_there_is_no_verdict(options: dict[str, bool], reason: str) -> None:
    with fake_server(**options) as fake:
        code, report = run(fake, "--device-tokens", "2000")
    assert (code, report["verdict"]) == (3, "not-shown")
    assert reason in report["reasons"][0]


def test_a_fault_is_found_although_the_salt_is_ignored() -> None:
    with fake_server(knows_salt=False, tier_fault=1.0, device_tokens=16) as fake:
        code, report = run(fake)
    assert (code, report["verdict"]) == (1, "different")
    assert any("cache_salt" in reason for reason in report["reasons"])


def test_a_server_without_tokenizer_receives_text() -> None:
    with fake_server(has_tokenize=False) as fake:
        assert run(fake)[0] == 0


def test_prompts_of_the_user(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "one two three"}\n\n{"prompt": [5, 6, 7], "family": "a"}\n')
    with fake_server() as fake:
        code, report = run(fake, "--prompts", str(path))
    assert (code, report["prompts"]) == (0, 2)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "prompts: '{path}:1' is invalid"),
        ('{"prompt": []}', "prompts: '{path}:1' is invalid"),
        ('{"prompt": ["a"]}', "prompts: '{path}:1' is invalid"),
        ("", "a file with at least one prompt"),
    ],
)
def test_an_invalid_file_of_prompts_is_refused(line: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(line)
    with fake_server() as fake:
        done = kvoffload("canary", fake.url, "--prompts", str(path))
    assert done.returncode == 2
    assert message.replace("{path}", str(path)) in done.stderr


@pytest.mark.parametrize(
    ("server", "options", "message"),
    [
        ({}, ("--model", "absent"), "model: 'absent' is invalid; allowed: fake, other"),
        ({"noise": math.nan}, (), "(NaN), so nothing can be compared: check the model"),
        ({"device_tokens": 0}, (), "give --device-tokens, or --may-reset"),
        (
            {},
            ("--model", "other", "--answer-tokens", "9000"),
            "answer-tokens: 9000 is invalid; allowed: below 8192",
        ),
        ({"has_logprobs": False}, (), "has no log-probabilities"),
        ({"failing": 503}, (), "HTTP 503"),
        ({"api_key": "k"}, (), "HTTP 401"),
        ({"may_reset": False}, ("--may-reset",), "VLLM_SERVER_DEV_MODE=1"),
        ({"has_metrics": False}, (), "give --device-tokens, or --may-reset"),
        ({}, ("--answer-tokens", "600"), "answer-tokens: 600 is invalid; allowed: below 512"),
        ({}, ("--token-ids", "5:6"), "token-ids: '5:6' is invalid"),
        ({}, ("--token-ids", "\u00b2:99"), "token-ids: '\u00b2:99' is invalid"),
        ({}, ("--chunk-tokens", "x"), "chunk-tokens: 'x' is invalid"),
        ({}, ("--chunk-tokens", "256,\u00b2"), "chunk-tokens: '\u00b2' is invalid"),
        ({}, ("--chunk-tokens", "256,0"), "chunk-tokens: '0' is invalid"),
        (
            {},
            ("--token-ids", "5:99", "--prompts", "x"),
            "token-ids: '5:99' is invalid; allowed: --prompts or --token-ids, not both",
        ),
        ({}, ("--prometheus", "/"), "prometheus: '/' is invalid; allowed: a regular file, or a new one"),
    ],
)
def test_an_unusable_server_is_a_one_line_error(
    server: dict[str, Any], options: tuple[str, ...], message: str
) -> None:
    with fake_server(**server) as fake:
        done = kvoffload("canary", fake.url, *SMALL, *options)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_a_server_that_dies_during_a_reply_is_a_one_line_error() -> None:
    with fake_server(dies_in_reply=True) as fake:
        done = kvoffload("canary", fake.url, *SMALL)
    assert done.returncode == 2
    assert "does not answer" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_key_is_taken_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    with fake_server(api_key="secret") as fake:
        code, report = run(fake)
    assert code == 0
    assert "secret" not in json.dumps(report)


def test_every_sent_token_counts_towards_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    limits, sent = list[float | None](), list[int]()

    class Counting(Pace):
        def __init__(self, max_tokens_per_s: float | None) -> None:
            limits.append(max_tokens_per_s)

        def wait(self, num_tokens: int) -> None:
            sent.append(num_tokens)

    monkeypatch.setattr(command, "Pace", Counting)
    with fake_server() as fake:
        code, report = run(fake, "--max-tokens-per-s", "1e6")
    assert code == 0
    assert limits == [1e6]
    assert sum(sent) == report["tokens_sent"] > 0


def test_the_caches_of_all_engines_are_emptied() -> None:
    sent = []
    for num_engines in (1, 4):
        with fake_server(num_engines=num_engines) as fake:
            code, report = run(fake)
        assert code == 0
        sent.append(report["tokens_sent"])
    assert sent[0] == sent[1]


def test_a_restart_of_the_server_is_noticed() -> None:
    before, after = Counters(700.0, 5.0, None), Counters(20.0, 8.0, None)
    with pytest.raises(CanaryError, match="the server was restarted, or several servers answer"):
        after.since(before)


def test_a_failed_run_and_a_closed_pipe_leave_their_result_in_the_metrics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A timer starts the canary. The file must not keep the result of an earlier run."""
    path = tmp_path / "canary.prom"
    with fake_server(tier_fault=0.5) as fake:
        url = fake.url
        monkeypatch.setattr(command, "_show", closed_pipe)
        assert kvoffload("canary", url, *SMALL, "--prometheus", str(path)).returncode == 141
        assert 'kvoffload_canary_result{result="different"} 1' in path.read_text()
        fake.failing = 503
        assert kvoffload("canary", url, *SMALL, "--prometheus", str(path)).returncode == 2
        assert 'kvoffload_canary_result{result="failed"} 1' in path.read_text()
        path.unlink()
    assert kvoffload("canary", url, *SMALL, "--prometheus", str(path)).returncode == 2
    assert 'kvoffload_canary_result{result="failed"} 1' in path.read_text()


def closed_pipe(*_: object) -> None:
    raise BrokenPipeError


def test_watching_continues_although_the_metrics_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, waits = tmp_path / "later" / "canary.prom", []

    def sleep(seconds: float) -> None:
        if seconds < 1:
            return  # the pace of requests
        waits.append(seconds)
        if len(waits) == 2:
            raise KeyboardInterrupt
        path.parent.mkdir()

    monkeypatch.setattr(command.time, "sleep", sleep)
    with fake_server() as fake:
        done = kvoffload("canary", fake.url, *SMALL, "--watch", "10m", "--prometheus", str(path))
    assert done.returncode == 130
    assert "the file cannot be written (No such file or directory)" in done.stderr
    assert 'kvoffload_canary_runs_total{result="equal"} 2' in path.read_text()


def test_an_interrupt_does_not_wait_for_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only requests of the main thread are interrupted at once."""
    threads = []

    def interrupted(self: Server, prompt: Prompt, **_: object) -> Answer:
        threads.append(threading.current_thread())
        raise KeyboardInterrupt

    monkeypatch.setattr(Server, "complete", interrupted)
    with fake_server() as fake:
        done = kvoffload("canary", fake.url, *SMALL)
    assert done.returncode == 130
    assert threads == [threading.main_thread()]


def test_the_text_report_names_verdict_and_hits() -> None:
    with fake_server(tier_fault=0.5) as fake:
        done = kvoffload("canary", fake.url, *SMALL)
    assert done.stdout.startswith("different: answers from the tiers differ by up to 0.5")
    assert "from the tiers, concurrent" in done.stdout


def test_watching_writes_metrics_and_continues_after_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, waits = tmp_path / "canary.prom", []

    def sleep(seconds: float) -> None:
        if seconds < 1:
            return  # the pace of requests
        waits.append(seconds)
        fake.failing = 503 if len(waits) == 1 else 0
        if len(waits) == 1:
            assert 'kvoffload_canary_result{result="equal"} 1' in path.read_text()
        elif len(waits) == 2:
            assert 'kvoffload_canary_result{result="failed"} 1' in path.read_text()
        else:
            raise KeyboardInterrupt

    monkeypatch.setattr(command.time, "sleep", sleep)
    with fake_server() as fake:
        done = kvoffload("canary", fake.url, *SMALL, "--watch", "10m", "--prometheus", str(path))
    assert done.returncode == 130
    text = path.read_text()
    assert 'kvoffload_canary_runs_total{result="equal"} 2' in text
    assert 'kvoffload_canary_runs_total{result="failed"} 1' in text
    assert [path.name for path in tmp_path.iterdir()] == ["canary.prom"]


def test_a_full_disk_leaves_no_incomplete_metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(source: object, target: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "replace", full)
    with fake_server() as fake:
        done = kvoffload("canary", fake.url, *SMALL, "--prometheus", str(tmp_path / "canary.prom"))
    assert done.returncode == 2
    assert "prometheus: " in done.stderr
    assert "the file cannot be written (No space left on device)" in done.stderr
    assert not [*tmp_path.iterdir()]
