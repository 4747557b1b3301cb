"""Calibration with known fits, small memory and disks, and a server in this process."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from kvoffload.calibration.calibrate import Calibration, calibrate
from kvoffload.calibration.copy_speed import device_copies, memory_copies
from kvoffload.calibration.disk_speed import disk_speed
from kvoffload.calibration.fit import fit_prefill
from kvoffload.calibration.samples import quantity_of, rate_and_latency
from kvoffload.calibration.server_speed import Server, ServerTimes, time_server
from kvoffload.errors import ConfigError
from kvoffload.simulate.machine import read_machine
from kvoffload.tiers.disk.files import Files
from support.run_cli import kvoffload

PAGE = 4096

# ---- fits and samples

costs = st.sampled_from([0.0, 0.5, 2.0])


@given(costs, costs, costs)
def test_a_fit_recovers_the_costs_behind_the_times(step: float, linear: float, squared: float) -> None:
    tokens = [10, 50, 100, 150, 300, 420]
    seconds = [step * -(-n // 100) + linear * n + squared * n * n for n in tokens]
    if not any((step, linear, squared)):
        return
    assert fit_prefill(tokens, seconds, 100) == pytest.approx((step, linear, squared), abs=1e-6)


def test_costs_are_not_negative_and_outliers_hardly_change_short_prompts() -> None:
    # A curve that bends down: the best fit has a fixed cost and no quadratic cost.
    tokens, seconds = [100, 200, 400, 800], [1.0, 1.5, 2.2, 3.0]
    step, linear, squared = fit_prefill(tokens, seconds, 10**6)
    assert min(step, linear, squared) >= 0
    assert squared == 0
    assert step > 0.5
    # An outlier of ten times the length hardly changes the cost of a short prompt.
    slow = fit_prefill([*tokens, 8000], [0.1, 0.2, 0.4, 0.8, 12.0], 10**6)
    assert slow[0] + slow[1] * 100 + slow[2] * 10**4 == pytest.approx(0.1, rel=0.2)


def test_one_length_gives_one_cost() -> None:
    assert fit_prefill([100, 100], [1.0, 1.0], 50) == pytest.approx((0.0, 0.01, 0.0))


def test_samples_give_median_and_percentiles() -> None:
    quantity = quantity_of([1.0, 2.0, 9.0], "copies")
    assert (quantity.value, quantity.source) == (2.0, "measured: copies, 3 times")
    assert 1.0 <= quantity.p10 <= 2.0 <= quantity.p90 <= 9.0


def test_latency_is_the_time_of_a_block_minus_its_transfer_time() -> None:
    rate, latency = rate_and_latency([10.0, 10.0], 1000, [3.0, 5.0, 4.0], 100, "a link")
    assert rate.value == 100.0
    assert latency.value == 3.0
    assert rate_and_latency([10.0], 1000, [0.5], 100, "")[1].value == 0.0


# ---- memory, device, disk


def test_memory_is_measured_and_a_gpu_if_there_is_one() -> None:
    assert memory_copies(PAGE, 8, 2)["memory_copy_bytes_per_s"].value > 0
    assert set(device_copies(PAGE, 8, 2)) in (
        set(),
        {"load_bytes_per_s", "store_bytes_per_s", "copy_latency_s"},
    )


def test_measuring_a_disk_leaves_its_directory_unchanged(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    speeds = disk_speed(tmp_path, PAGE, 4, 2)
    assert set(speeds) == {
        f"disk_{verb}_{name}" for verb in ("read", "write") for name in ("bytes_per_s", "latency_s")
    }
    assert all(speeds[f"disk_{verb}_bytes_per_s"].value > 0 for verb in ("read", "write"))
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_directory_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    for directory in (tmp_path / "not there", file):
        with pytest.raises(ConfigError, match=r"disk: .* a writable directory"):
            disk_speed(directory, PAGE, 4, 1)
    read_only = tmp_path / "read-only"
    read_only.mkdir(mode=0o500)
    if not os.access(read_only, os.W_OK):  # root may write anywhere
        with pytest.raises(ConfigError, match=r"disk: .* a writable directory"):
            disk_speed(read_only, PAGE, 4, 1)


class _FullDisk(Files):
    def allocate(self, fd: int, num_bytes: int) -> None:
        raise OSError(28, "No space left on device")


def test_a_full_disk_is_refused_and_left_unchanged(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No space left"):
        disk_speed(tmp_path, PAGE, 4, 1, _FullDisk())
    assert not list(tmp_path.iterdir())


# ---- a server


class _Handler(BaseHTTPRequestHandler):
    """Stand-in for vLLM: answers at once and records request bodies in `server.bodies`."""

    server: Any

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        self.server.keys.append(self.headers.get("Authorization"))
        self._answer({"data": self.server.models})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.bodies.append(body)
        if self.server.refuses:
            self._answer({"error": self.server.refuses}, 400)
            return
        self.send_response(200)
        self.end_headers()
        for _ in range(self.server.num_events):
            self.wfile.write(b'data: {"choices": [{"text": "x"}]}\n\n')
            self.wfile.flush()
        self.wfile.write(b"data: [DONE]\n\n")

    def _answer(self, content: Any, status: int = 200) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(content).encode())


@pytest.fixture
def server() -> Iterator[Any]:
    made: Any = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    made.models = [{"id": "tiny", "max_model_len": 4096}, {"id": "other", "max_model_len": 64}]
    made.bodies, made.keys, made.refuses, made.num_events = [], [], "", 5
    made.url = f"http://127.0.0.1:{made.server_port}"
    thread = threading.Thread(target=made.serve_forever, daemon=True)
    thread.start()
    yield made
    made.shutdown()
    made.server_close()
    thread.join()


def test_prompts_of_all_usable_lengths_are_new_and_streamed(server: Any) -> None:
    times = time_server(Server(f"{server.url}/v1"), (64, 128, 256, 8192), 3)
    assert times.model == "tiny"
    assert [sorted(order) for order, _ in times.rounds] == [[64, 128, 256]] * 3
    assert min(seconds for _, of_round in times.rounds for seconds in of_round) > 0
    assert len(times.decode_rates) == 9
    lengths = sorted(len(body["prompt"]) for body in server.bodies)
    assert lengths == sorted([64, *[64, 128, 256] * 3])  # one to warm up; 8,192 exceeds the model's limit
    assert all(body["stream"] and body["model"] == "tiny" for body in server.bodies)
    assert len({tuple(body["prompt"][:16]) for body in server.bodies}) == len(server.bodies)


def test_speeds_are_fitted_to_all_rounds_and_bounded_by_single_rounds() -> None:
    lengths = [100, 200, 400]
    rounds = [(lengths, [0.01 + slope * length for length in lengths]) for slope in (0.001, 0.002, 0.003)]
    speeds = ServerTimes("tiny", rounds, [10.0, 20.0, 30.0]).speeds(1000)
    assert set(speeds) == {
        *("step_s", "prefill_s_per_token", "prefill_s_per_token_squared"),
        "decode_tokens_per_s",
    }
    per_token = speeds["prefill_s_per_token"]
    assert per_token.p10 < per_token.value < per_token.p90
    assert 0.001 < per_token.value < 0.003
    assert speeds["decode_tokens_per_s"].value == 20.0
    assert all(quantity.source.startswith("measured: tiny") for quantity in speeds.values())


def test_a_server_whose_time_does_not_grow_with_the_prompt_is_refused() -> None:
    """Otherwise prefill would cost nothing, and a plan would never load a block."""
    times = ServerTimes("tiny", [([64, 128, 256], [0.012, 0.011, 0.010])], [10.0])
    with pytest.raises(
        ConfigError, match=r"12 ms after 64 tokens and 10 ms after 256; allowed: an idle server"
    ):
        times.speeds(1000)


def test_the_api_key_is_sent_and_never_shown(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-very-secret")
    assert "secret" not in repr(vars(Server(server.url)))
    assert server.keys == ["Bearer sk-very-secret"]
    server.refuses = "no"
    with pytest.raises(ConfigError) as error:
        Server(server.url).ask([1, 2])
    assert "secret" not in str(error.value)
    with pytest.raises(ConfigError) as error:
        Server(server.url.replace("//", "//me:hidden@").replace("http", "ftp"))
    assert "hidden" not in str(error.value)


def test_an_unusable_server_is_refused_with_the_reason(server: Any) -> None:
    with pytest.raises(ConfigError, match="allowed: http://HOST:PORT"):
        Server("localhost:8000")
    with pytest.raises(ConfigError, match="allowed: http://HOST:PORT"):
        Server("http://localhost:port")
    with pytest.raises(ConfigError, match=r"model: 'gpt' is invalid; allowed: tiny, other"):
        Server(server.url, "gpt")
    with pytest.raises(ConfigError, match="a model that takes 3 or more of these prompt lengths"):
        time_server(Server(server.url, "other"), (64, 128, 256), 1)
    server.refuses = "prompts must be text"
    with pytest.raises(
        ConfigError, match=r"url: .* /v1/completions answers HTTP 400: .*prompts must be text"
    ):
        Server(server.url).ask([1])
    server.refuses, server.num_events = "", 0
    with pytest.raises(ConfigError, match="had no token"):
        Server(server.url).ask([1])
    server.num_events = 1
    with pytest.raises(ConfigError, match="it sent all tokens at once"):
        time_server(Server(server.url), (64, 128, 256), 1)
    server.models = []
    with pytest.raises(ConfigError, match="/v1/models lists no model"):
        Server(server.url)
    server.models = ["tiny"]
    with pytest.raises(ConfigError, match="/v1/models lists no model"):
        Server(server.url)
    url = server.url
    server.shutdown()
    server.server_close()
    with pytest.raises(ConfigError, match="/v1/models does not answer: Connection refused"):
        Server(url)


# ---- the command


SMALL = ("--block-bytes", "4KiB", "--total-bytes", "64KiB", "--repeats", "2", "--quiet")


def test_the_command_writes_a_machine_that_simulate_accepts(
    tmp_path: Path, server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fake server takes equally long for all prompts, so the test adds time by length."""
    ask = Server.ask
    monkeypatch.setattr(
        Server, "ask", lambda self, tokens: replace(ask(self, tokens), first_s=1e-3 + 1e-5 * len(tokens))
    )
    out = tmp_path / "machine.json"
    done = kvoffload(
        *("calibrate", "--out", str(out), "--disk", str(tmp_path), "--url", server.url),
        *("--rest-from", "l4", "--name", "this", *SMALL),
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    machine = read_machine(out)
    assert (machine.name, machine.model) == ("this", "tiny")
    assert machine.disk_read_bytes_per_s is not None
    assert machine.disk_read_bytes_per_s.source.startswith("measured: the disk tier reads blocks of 4,096")
    assert machine.load_bytes_per_s is not None
    assert machine.facts["kvoffload"]
    assert machine.made.endswith("+00:00")
    assert "disk_write_latency_s" in done.stdout
    machine.check(has_ram=True, has_disk=True)


def test_quantities_without_a_measurement_stay_unknown(tmp_path: Path) -> None:
    out = tmp_path / "machine.json"
    assert kvoffload("calibrate", "--out", str(out), *SMALL).returncode == 0
    assert read_machine(out).prefill_s_per_token is None
    kept = out.read_bytes()
    refused = kvoffload("calibrate", "--out", str(out), "--repeats", "0")
    assert "the file exists; --force replaces it" in refused.stderr
    assert "repeats: 0 is invalid" in refused.stderr
    assert out.read_bytes() == kept
    assert kvoffload("calibrate", "--out", str(out), "--force", *SMALL).returncode == 0
    assert out.read_bytes() != kept
    done = kvoffload("simulate", "chat", "--bytes-per-token", "1KiB", "--device-blocks", "2000",
                     "--machine", str(out), "--quiet")  # fmt: skip
    assert done.returncode == 2
    assert "it has no prefill_s_per_token: calibrate with --url of a server" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--url", "http://127.0.0.1:1"), "url: 'http://127.0.0.1:1' is invalid"),
        (("--disk", "/not/there"), "disk: '/not/there' is invalid"),
        (("--model", "x"), "model: 'x' is invalid; it needs the URL of a server"),
        (("--rest-from", "h100"), "machine: 'h100' is invalid"),
        (("--block-bytes", "1000"), "block_bytes: 1000 is invalid"),
        (("--repeats", "0"), "repeats: 0 is invalid"),
        (("--out", "/not/there/machine.json"), "out: '/not/there/machine.json' is invalid"),
    ],
)
def test_an_invalid_option_is_a_one_line_error(arguments: tuple[str, ...], words: str) -> None:
    small = SMALL if arguments[0] not in SMALL else ("--quiet",)
    done = kvoffload("calibrate", *small, *arguments)
    assert done.returncode == 2
    assert words in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_memory_is_measured_without_any_option() -> None:
    machine = calibrate(Calibration(block_bytes=PAGE, total_bytes=4 * PAGE, repeats=1))
    assert machine.memory_copy_bytes_per_s is not None
    assert machine.disk_read_bytes_per_s is None
