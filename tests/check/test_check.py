"""A server's metrics against the replay of its recording."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from kvoffload.check.check import Prediction, Verdict, check
from kvoffload.check.served import GPU, RAM, TIERS, Served, read_served
from kvoffload.errors import ConfigError
from support.run_cli import Done, kvoffload

LABELS = 'engine="0",model_name="m"'
SCRAPE = f"""\
# TYPE vllm:prompt_tokens_total counter
vllm:prompt_tokens_total{{{LABELS}}} 7500.0
vllm:prompt_tokens_created{{{LABELS}}} 1.79e+09
vllm:prompt_tokens_cached_by_source_total{{{LABELS},source="device"}} 2368.0
vllm:prompt_tokens_cached_by_source_total{{{LABELS},source="host"}} 2176.0
vllm:prompt_tokens_cached_by_source_total{{{LABELS},source="disk"}} 32.0
vllm:prompt_tokens_cached_by_source_total{{{LABELS},source="external_unspecified"}} 64.0
vllm:prefix_cache_hits_total{{{LABELS}}} 2368.0
vllm:external_prefix_cache_hits_total{{{LABELS}}} 2272.0
vllm:request_success_total{{{LABELS},finished_reason="stop"}} 5.0
vllm:request_success_total{{{LABELS},finished_reason="length"}} 20.0
vllm:time_to_first_token_seconds_sum{{{LABELS}}} 5.0
vllm:time_to_first_token_seconds_count{{{LABELS}}} 25.0
vllm:kv_offload_load_bytes_total{{{LABELS}}} 8.912896e+06
vllm:kv_offload_store_bytes_total{{{LABELS}}} 1.0878976e+07
vllm:kvoffload_lookup_blocks_total{{{LABELS}}} 151.0
vllm:kvoffload_capacity_blocks{{{LABELS}}} 40.0
vllm:kvoffload_policy_state{{{LABELS},policy="arc",name="target"}} 3.0
vllm:cache_config_info{{block_size="32",engine="0",num_gpu_blocks="24"}} 1.0
"""
PREDICTED = Prediction(
    requests=25,
    prompt_tokens=7500,
    hit_tokens={GPU: 2368, RAM: 2176, TIERS: 96},
    capacity_blocks=40,
    device_blocks=23,
    block_tokens=32,
    policy="arc",
    instances=1,
    loaded_bytes=8_912_896,
    stored_bytes=10_878_976,
    ttft_mean_s=0.2,
)


def scraped(text: str = SCRAPE) -> Served:
    path = Path("metrics.txt")
    path.write_text(text)
    return read_served("check", str(path))


@pytest.fixture(autouse=True)
def inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_scrape_has_all_totals() -> None:
    served = scraped()
    assert (served.requests, served.prompt_tokens) == (25, 7500)
    assert served.hit_tokens == {GPU: 2368, RAM: 2176, TIERS: 96}
    assert (served.loaded_bytes, served.stored_bytes) == (8_912_896, 10_878_976)
    assert served.ttft_mean_s == 0.2
    assert (served.capacity_blocks, served.device_blocks, served.device_block_tokens) == (40, 23, 32)
    assert served.policies == ("arc",)


def test_a_size_in_odd_digits_is_unknown() -> None:
    assert scraped(SCRAPE.replace('block_size="32"', 'block_size="\u00b2"')).device_block_tokens == 0


def test_engines_add_up_and_older_versions_report_two_places() -> None:
    second = SCRAPE.replace('engine="0"', 'engine="1"')
    both = scraped(SCRAPE + second)
    assert (both.requests, both.capacity_blocks, both.device_blocks) == (50, 80, 23)
    older = "\n".join(line for line in SCRAPE.splitlines() if "by_source" not in line)
    assert scraped(older).hit_tokens == {GPU: 2368, RAM: 2272, TIERS: 0}


def test_equal_totals_are_close() -> None:
    result = check(scraped(), PREDICTED)
    assert result.verdict == Verdict.CLOSE.value
    assert result.settings == []
    assert [row.name for row in result.rows] == [
        "requests", "prompt tokens", "hits on the GPU", "hits in RAM", "hits in tiers", "bytes loaded",
        "bytes stored", "TTFT, mean",
    ]  # fmt: skip
    assert {row.difference for row in result.rows} == {0.0}


@pytest.mark.parametrize(
    ("change", "row", "difference"),
    [
        ({"hit_tokens": {GPU: 2368, RAM: 2176 - 149, TIERS: 96}}, "hits in RAM", -0.0198667),
        ({"hit_tokens": {GPU: 2368 + 151, RAM: 2176, TIERS: 96}}, "hits on the GPU", 0.0201333),
        ({"loaded_bytes": 10_000_000}, "bytes loaded", 0.12197),
        ({"stored_bytes": 0}, "bytes stored", -1.0),
        ({"ttft_mean_s": 0.229}, "TTFT, mean", 0.145),
        ({"ttft_mean_s": 0.231}, "TTFT, mean", 0.155),
    ],
)
def test_differences_within_their_limits_are_close(
    change: dict[str, object], row: str, difference: float
) -> None:
    result = check(scraped(), Prediction(**{**_fields(PREDICTED), **change}))
    rows = {compared.name: compared for compared in result.rows}
    assert rows[row].difference == pytest.approx(difference, rel=1e-3)
    close = abs(difference) <= rows[row].limit
    assert rows[row].is_close == close
    assert result.verdict == (Verdict.CLOSE if close else Verdict.DIFFERENT).value


def _fields(predicted: Prediction) -> dict[str, object]:
    return {name: getattr(predicted, name) for name in predicted.__struct_fields__}


def test_different_numbers_of_requests_are_not_compared() -> None:
    result = check(scraped(), Prediction(**{**_fields(PREDICTED), "requests": 30}))
    assert result.verdict == Verdict.NOT_COMPARABLE.value


def test_different_settings_are_named_with_their_option() -> None:
    changes = {"capacity_blocks": 20, "device_blocks": 100, "policy": "lru"}
    result = check(scraped(), Prediction(**{**_fields(PREDICTED), **changes}))
    assert [re.search(r"--\S+ \S+$", line)[0] for line in result.settings] == [  # type: ignore[index]
        "--capacity 40", "--device-blocks 23", "--policy arc",
    ]  # fmt: skip


def test_a_shared_pool_is_not_added_up_over_engines() -> None:
    both = scraped(SCRAPE + SCRAPE.replace('engine="0"', 'engine="1"'))
    assert check(both, Prediction(**{**_fields(PREDICTED), "instances": 2})).settings == []


def test_totals_from_before_the_recording_are_subtracted() -> None:
    before = scraped(SCRAPE.replace("7500.0", "500.0").replace('"host"} 2176.0', '"host"} 176.0'))
    served = scraped().since(before)
    assert (served.prompt_tokens, served.requests) == (7000, 0)
    assert served.hit_tokens == {GPU: 0, RAM: 2000, TIERS: 0}
    assert (served.capacity_blocks, served.ttft_mean_s) == (40, None)
    with pytest.raises(
        ConfigError, match="prompt_tokens exceed the server's by 7,000: was the server restarted"
    ):
        before.since(scraped())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no metric vllm:prompt_tokens_total"),
        ("<html></html>", "no metric vllm:prompt_tokens_total"),
        ("vllm:prompt_tokens_total 5\n", "no metric vllm:kvoffload_lookup_blocks_total"),
    ],
)
def test_unsupported_servers_are_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        scraped(text)


@pytest.fixture
def server() -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/metrics" else 404)
            self.end_headers()
            self.wfile.write(SCRAPE.encode() if self.path == "/metrics" else b"")

        def log_message(self, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        Thread(target=http.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{http.server_port}"
        http.shutdown()


def recording() -> Path:
    """Write 25 requests of 300 tokens in blocks of 32: five prompts in turn."""
    lines = []
    for number in range(25):
        ids = [1000 * (number % 5) + block for block in range(9)]
        line = {"timestamp": 1000 * number, "input_length": 300, "output_length": 4, "hash_ids": ids}
        lines.append(json.dumps(line))
    path = Path("kv.jsonl")
    path.write_text("\n".join(lines))
    return path


def run(command: str, server: str, *options: str) -> Done:
    return kvoffload(
        command, recording(), "--block-tokens", "32", "--quiet", "--capacity", "40", "--device-blocks", "23",
        "--policy", "arc", "--check", server, *options,
    )  # fmt: skip


def test_replay_and_simulate_print_the_check(server: str) -> None:
    done = run("replay", server, "--no-data")
    assert done.returncode == 1, done.stderr
    assert "The server does not do what the replay predicts." in done.stdout
    assert "hits in RAM" in done.stdout
    assert "TTFT" not in done.stdout
    done = run("simulate", f"{server}/metrics", "--bytes-per-token", "4096", "--format", "json")
    assert done.returncode == 1, done.stderr
    report = json.loads(done.stdout)
    assert {"TTFT, mean", "bytes loaded", "hits in RAM"} <= {row["name"] for row in report["check"]["rows"]}
    assert report["with_offload"]["requests"] == 25


def test_promotions_are_not_counted_as_stores() -> None:
    """Two blocks in turn, with room for one block in RAM: the other block comes from the tier."""
    lines = [
        {"timestamp": 1000 * number, "input_length": 512, "output_length": 1, "hash_ids": [number % 2]}
        for number in range(8)
    ]
    Path("two.jsonl").write_text("\n".join(map(json.dumps, lines)))
    Path("metrics.txt").write_text(
        "vllm:kvoffload_lookup_blocks_total 8\nvllm:prompt_tokens_total 4096\nvllm:request_success_total 8\n"
        'vllm:prompt_tokens_cached_by_source_total{source="disk"} 3072\n'
        "vllm:kv_offload_load_bytes_total 3145728\nvllm:kv_offload_store_bytes_total 1048576\n"
    )
    done = kvoffload(
        "replay", "two.jsonl", "--capacity", "1", "--tier", "simulated:10", "--no-data", "--quiet",
        "--bytes-per-token", "1KiB", "--check", "metrics.txt", "--format", "json",
    )  # fmt: skip
    report = json.loads(done.stdout)["check"]
    assert {row["name"]: row["difference"] for row in report["rows"]}["bytes stored"] == 0
    assert (done.returncode, report["verdict"]) == (0, "close")


@pytest.mark.parametrize("number", ["NaN", "+Inf"])
def test_invalid_numbers_are_skipped(number: str) -> None:
    assert (
        scraped(
            SCRAPE.replace(
                "capacity_blocks{" + LABELS + "} 40.0", "capacity_blocks{" + LABELS + f"}} {number}"
            )
        ).capacity_blocks
        == 0
    )


def test_wrong_options_are_one_line(server: str) -> None:
    for options, message in (
        (("--since", "nowhere"), "since: 'nowhere' is invalid"),
        (("--check", "nowhere.txt"), "check: 'nowhere.txt' is invalid; allowed: http://HOST:PORT, or a file"),
        (("--check", "http://127.0.0.1:1"), "no answer (Connection refused)"),
        (("--check", "127.0.0.1:1"), "no answer (Connection refused)"),
        (("--check", f"{server}/nothing"), "the server answers HTTP 404"),
        (("--check", "http://[bad"), "check: 'http://[bad' is invalid"),
    ):
        done = run("replay", server, "--no-data", *options)
        assert (done.returncode, done.stdout) == (2, ""), done
        assert message in done.stderr
        assert "Traceback" not in done.stderr
    done = kvoffload("replay", "chat", "--since", "metrics.txt")
    assert done.returncode == 2
    assert "since: 'metrics.txt' is invalid; it needs --check" in done.stderr


# ---- a plan


def planned(server: str, *options: str, recorded: Path | None = None) -> Done:
    """Plan for the server of `run`: 23 blocks of 128 KiB on its GPU."""
    Path("prices.toml").write_text(
        '[ram]\nmodule = "1MiB"\nprice = 10\nslots = 4\n[ssd]\nslots = 0\n[server]\nslots = 0\n'
    )
    return kvoffload(
        "plan", recorded or recording(), "--block-tokens", "32", "--bytes-per-token", "4096", "--gpus", "1",
        "--kv-per-gpu", str(23 * 32 * 4096), "--prices", "prices.toml", "--policies", "lru,arc",
        "--stores", "on-compute", "--admissions", "all", "--jobs", "1", "--quiet", "--format", "json",
        "--check", server, *options,
    )  # fmt: skip


def found_by(done: Done) -> dict[str, Any]:
    assert done.stdout, done.stderr
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def test_a_plan_compares_the_present_configuration_like_a_replay(server: str) -> None:
    done = planned(server)
    assert done.returncode == 1, done.stderr
    answer = found_by(done)
    alone = run("replay", server, "--no-data", "--bytes-per-token", "4096", "--format", "json")
    expected = found_by(alone)
    assert answer["check"] == expected["check"]
    assert answer["check"]["settings"] == []
    present = answer["present"]
    assert (present["replicas"], present["ram_blocks"], present["device_blocks"]) == (1, 40, 23)
    assert (present["policy"], present["store"], present["admission"]) == ("arc", "on-compute", "all")
    assert present["saved"] == expected["prefix_hit_ratio"]
    assert present["by_gpus"] + present["by_ram"] == pytest.approx(present["saved"])
    shown = planned(server, "--format", "terminal", "--report", "plan.html")
    assert shown.returncode == 1
    sentence = (
        "Compared is the present set-up: one engine with 23 blocks on the GPUs and 40 in RAM; arc, on-c"
    )
    for text in (shown.stdout, Path("plan.html").read_text()):
        assert sentence in " ".join(text.split())
        assert "hits in RAM" in text
        assert "The server does not do what the replay predicts." in " ".join(text.split())


def test_a_plan_with_a_machine_compares_the_time_to_first_token(server: str) -> None:
    machine = ("--machine", "h100-pcie5")
    rows = {row["name"]: row for row in found_by(planned(server, *machine))["check"]["rows"]}
    done = run("simulate", server, "--bytes-per-token", "4096", "--format", "json", *machine)
    assert rows["TTFT, mean"] in found_by(done)["check"]["rows"]


def test_a_plan_adds_up_engines(server: str) -> None:
    """Two engines serve alternate requests: 13 and 12."""
    Path("metrics.txt").write_text(SCRAPE + SCRAPE.replace('engine="0"', 'engine="1"'))
    machine = ("--machine", "h100-pcie5")
    answer = found_by(
        planned("metrics.txt", "--replicas", "2", "--routing", "round-robin", "--gpus", "2", *machine)
    )
    lines = recording().read_text().splitlines()
    saved, ttft_sum_s = 0, 0.0
    for number in range(2):
        Path(f"{number}.jsonl").write_text("\n".join(lines[number::2]))
        own = kvoffload(
            "replay", f"{number}.jsonl", "--block-tokens", "32", "--quiet", "--capacity", "40",
            "--device-blocks", "23", "--policy", "arc", "--no-data", "--format", "json",
        )  # fmt: skip
        saved += found_by(own)["prefix_hit_blocks"]
        timed = kvoffload(
            "simulate", f"{number}.jsonl", "--block-tokens", "32", "--quiet", "--capacity", "40",
            "--device-blocks", "23", "--policy", "arc", "--bytes-per-token", "4096", "--format", "json",
            *machine,
        )  # fmt: skip
        ttft_sum_s += (13 - number) * found_by(timed)["with_offload"]["ttft_s"]["mean"]
    rows = {row["name"]: row for row in answer["check"]["rows"]}
    assert rows["requests"]["predicted"] == 25
    assert rows["prompt tokens"]["predicted"] == 7500
    in_all = rows["hits on the GPU"]["predicted"] + rows["hits in RAM"]["predicted"]
    assert in_all * 7500 == pytest.approx(32 * saved)
    assert rows["TTFT, mean"]["predicted"] == pytest.approx(ttft_sum_s / 25)
    assert answer["present"]["saved"] == pytest.approx(saved / (25 * 9))
    assert answer["check"]["settings"] == []


def test_a_plan_replays_the_tier_of_the_server() -> None:
    scrape = SCRAPE.replace("capacity_blocks{" + LABELS + "} 40.0", "capacity_blocks{" + LABELS + "} 20.0")
    Path("metrics.txt").write_text(f'{scrape}vllm:kvoffload_tier_capacity{{{LABELS},tier="nvme"}} 40.0\n')
    rules = ("--ssd-policies", "lru", "--ssd-admissions", "all")
    answer = found_by(planned("metrics.txt", *rules))
    same = run("replay", "metrics.txt", "--no-data", "--bytes-per-token", "4096", "--format", "json",
               "--capacity", "20", "--tier", "simulated:40")  # fmt: skip
    assert answer["check"] == found_by(same)["check"]
    assert (answer["present"]["ssd_blocks"], answer["present"]["ssd_admission"]) == (40, "all")
    assert answer["present"]["by_ssds"] > 0


@pytest.mark.parametrize(
    ("scrape", "more", "messages"),
    [
        (SCRAPE, ("--policies", "lru,hazard"), ["policies: 'lru,hazard' is invalid; the server has arc"]),
        (SCRAPE.replace("kvoffload_policy_state", "other"), ("--policies", "arc"),
         ["policies: 'arc' is invalid; the server has a policy without a reported state, such as lru"]),
        (SCRAPE, ("--stores", "on-compute,on-device-eviction", "--admissions", "all,tinylfu"),
         ["stores: 'on-compute,on-device-eviction' is invalid; with --check allowed: one value",
          "admissions: 'all,tinylfu' is invalid"]),
        (SCRAPE, ("--kv-per-gpu", "64MiB"), ["kv-per-gpu: '16,384 tokens' is invalid; the server's engines "
                                             "have 736: with --check allowed: --gpu-tokens 736"]),
        (SCRAPE, ("--load", "2x"), ["load: 2.0 is invalid; with --check allowed: 1"]),
        (SCRAPE, ("--scale", "2"), ["scale: 2.0 is invalid; with --check allowed: 1"]),
        (SCRAPE, ("--replicas", "2", "--gpus", "2"), ["replicas: 2 is invalid; the metrics are of 1"]),
        (SCRAPE.replace("kvoffload_capacity_blocks", "other"), (), ["it does not report the size of its"]),
        (f'{SCRAPE}vllm:kvoffload_tier_ready{{{LABELS},tier="valkey"}} 9\n', (),
         ["tiers of the server: 'valkey' is invalid; a plan has at most one tier behind RAM, with a known",
          "ssd-admissions: 'all,reuse:2' is invalid"]),
    ],
)  # fmt: skip
def test_a_plan_without_a_row_like_the_server_is_refused(
    scrape: str, more: tuple[str, ...], messages: list[str]
) -> None:
    Path("metrics.txt").write_text(scrape)
    done = planned("metrics.txt", *more)
    assert (done.returncode, done.stdout) == (2, "")
    for message in messages:
        assert message in done.stderr


def test_vllms_reserved_block_is_no_difference(server: str) -> None:
    answer = found_by(planned(server, "--kv-per-gpu", str(24 * 32 * 4096)))
    assert answer["present"]["device_blocks"] == 23
