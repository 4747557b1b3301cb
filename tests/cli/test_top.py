"""``kvoffload top``: rates of a server's engines, and messages without metrics."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from kvoffload.cli import top
from kvoffload.metrics.live_counters import EngineRates, Reading, rates, read
from kvoffload.metrics.scrape import samples
from support.run_cli import kvoffload
from support.valkey_server import free_port

PATIENCE_S = 60.0


def metrics(step: float, engine: str = "0", *, tier: str = "nvme", circuits: int = 0) -> str:
    """Return a scrape after some steps. A step has ten lookups with six hits, two of them in the tier."""
    labels = f'engine="{engine}",model_name="m"'
    values = {
        "vllm:request_success_total": (f'{labels},finished_reason="stop"', 2 * step),
        "vllm:prompt_tokens_total": (labels, 500 * step),
        "vllm:prefix_cache_hits_total": (labels, 100 * step),
        "vllm:kv_offload_load_bytes_total": (labels, 6e6 * step),
        "vllm:kv_offload_store_bytes_total": (labels, 4e6 * step),
        "vllm:kvoffload_lookup_blocks_total": (labels, 10 * step),
        "vllm:kvoffload_hit_blocks_total": (labels, 6 * step),
        "vllm:kvoffload_stored_blocks_total": (labels, 4 * step),
        "vllm:kvoffload_evicted_blocks_total": (labels, 3 * step),
        "vllm:kvoffload_refused_blocks_total": (f'{labels},reason="admission"', 1 * step),
        "vllm:kvoffload_verification_failures_total": (labels, 0),
        "vllm:kvoffload_internal_errors_total": (labels, 0),
        "vllm:kvoffload_capacity_blocks": (labels, 100),
        "vllm:kvoffload_ready_blocks": (labels, 50),
    }
    tiers = {"hits_total": 2 * step, "bytes_read_total": 2e6 * step, "bytes_written_total": 0, "ready": 70,
             "capacity": 100, "in_flight": 3, "circuit_open": circuits, "mismatches_total": 0}  # fmt: skip
    values |= {
        f"vllm:kvoffload_tier_{name}": (f'{labels},tier="{tier}"', value) for name, value in tiers.items()
    }
    return "".join(f"# HELP x y\n{name}{{{series}}} {value}\n" for name, (series, value) in values.items())


def between(before: str, after: str, seconds: float = 2.0) -> list[EngineRates]:
    return rates(read(samples(before), 0.0), read(samples(after), seconds))


def test_rates_are_increases_per_second() -> None:
    (engine,) = between(metrics(10), metrics(20))
    assert (engine.engine, engine.seconds, engine.is_restarted) == ("m 0", 2.0, False)
    assert (engine.requests, engine.lookups, engine.hits, engine.stored) == (10, 50, 30, 20)
    assert engine.ram_hits == 20
    assert engine.hit_ratio == 0.6
    assert engine.refused == {"admission": 5}
    assert engine.misses == {}, "not reported"
    assert (engine.capacity, engine.ready, engine.pinned) == (100, 50, None)
    (tier,) = engine.tiers
    assert (tier.name, tier.hits, tier.bytes_read, tier.in_flight, tier.ready) == ("nvme", 10, 1e7, 3, 70)
    assert tier.write_budget_bytes is None


def tenants(step: float) -> str:
    values = {"a": (700, 4 * step, step), "b c": (40, 0, 2 * step)}
    return "".join(
        f'vllm:kvoffload_tenant_{name}{{engine="0",model_name="m",tenant="{tenant}"}} {value}\n'
        for tenant, row in values.items()
        for name, value in zip(
            ("held_blocks", "loaded_blocks_total", "evicted_blocks_total"), row, strict=True
        )
    )


def test_tenants_have_rates() -> None:
    (engine,) = between(metrics(10) + tenants(10), metrics(20) + tenants(20))
    assert [(row.tenant, row.held, row.loaded, row.evicted) for row in engine.tenants] == [
        ("a", 700, 20, 5),
        ("b c", 40, 0, 10),
    ]
    assert engine.stored == 20


def test_engines_of_a_server_are_separate() -> None:
    first, second = between(metrics(1) + metrics(1, "1"), metrics(2) + metrics(4, "1"), 1.0)
    assert (first.engine, first.lookups, second.engine, second.lookups) == ("m 0", 10, "m 1", 30)


def test_without_lookups_there_is_no_ratio() -> None:
    (engine,) = between(metrics(5), metrics(5))
    assert (engine.lookups, engine.hit_ratio, engine.is_restarted) == (0, None, False)


def test_a_restarted_server_counts_from_zero() -> None:
    (engine,) = between(metrics(100), metrics(4))
    assert engine.is_restarted
    assert engine.lookups == 20, "only lookups after the restart"


def test_a_falling_gauge_is_no_restart() -> None:
    after = metrics(2).replace(
        'ready_blocks{engine="0",model_name="m"} 50', 'ready_blocks{engine="0",model_name="m"} 3'
    )
    assert after != metrics(2)
    (engine,) = between(metrics(1), after)
    assert (engine.is_restarted, engine.ready) == (False, 3)


def test_a_new_engine_has_no_rates_in_its_first_interval() -> None:
    """The first counters cover the engine's whole life, or the scrape before was incomplete."""
    first, second = between(metrics(1), metrics(2) + metrics(2, "1"), 1.0)
    assert (first.lookups, second.lookups, second.hits, second.ram_hits, second.hit_ratio) == (
        10, None, None, None, None)  # fmt: skip
    assert second.refused == {"admission": None}
    assert (second.tiers[0].hits, second.tiers[0].bytes_read, second.tiers[0].ready) == (None, None, 70)
    assert second.ready == 50


def test_a_new_series_has_no_rate_and_no_ratio() -> None:
    before = "".join(line for line in metrics(100).splitlines(True) if "hit_blocks_total" not in line)
    (engine,) = between(before, metrics(101))
    assert (engine.lookups, engine.hits, engine.ram_hits, engine.hit_ratio) == (5, None, None, None)


def test_a_ratio_is_at_most_1() -> None:
    series = 'hit_blocks_total{engine="0",model_name="m"} '
    after = metrics(2).replace(f"{series}12", f"{series}99")
    assert after != metrics(2)
    (engine,) = between(metrics(1), after)
    assert engine.hit_ratio == 1


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-Inf", "1e308"])
def test_infinite_values_are_unknown(serve: Callable[..., str], value: str) -> None:
    names = ("hit_blocks_total", "hits_total", "load_bytes_total", "bytes_read_total", "ready",
             "ready_blocks", "capacity", "in_flight")  # fmt: skip
    text = "".join(
        f"{line.rpartition(' ')[0]} {value}\n" if any(f"_{name}{{" in line for name in names) else f"{line}\n"
        for line in metrics(2).splitlines()
    )
    assert text.count(value) == 9
    done = kvoffload("top", serve(metrics(1), text), *ONCE)
    assert (done.returncode, done.stderr) == (0, "")
    if value != "1e308":
        row = next(line for line in done.stdout.splitlines() if "nvme" in line)
        assert row.split() == ["nvme", "-", "-", "0", "B", "-", "ok", "-"]


def test_metrics_of_the_librarys_collector_are_read() -> None:
    text = 'kvoffload_hit_blocks_total{manager="chat"} 8\nkvoffload_lookup_blocks_total{manager="chat"} 16\n'
    before = re.sub(r"\d+$", "0", text, flags=re.MULTILINE)
    (engine,) = between(before, text, 1.0)
    assert (engine.engine, engine.hits, engine.hit_ratio, engine.requests) == ("chat", 8, 0.5, None)


def test_metrics_of_the_canary_are_not_an_engine() -> None:
    assert not read(
        samples('kvoffload_canary_result{result="equal"} 1\nvllm:prompt_tokens_total 3\n'), 0.0
    ).engines


# ---- the command


@pytest.fixture
def serve() -> Iterator[Callable[..., str]]:
    """Serve texts one after the other, and then the last text repeatedly; returns the address."""
    servers = []

    def start(*texts: str, status: int = 200) -> str:
        remaining = list(texts)

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                content = (remaining.pop(0) if len(remaining) > 1 else remaining[0]).encode()
                self.send_response(status if self.path == "/metrics" else 404)
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_: Any) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        servers.append(server)
        return f"127.0.0.1:{server.server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


ONCE = ("--once", "--interval", "0.01s")


def test_one_table_fits_80_columns(serve: Callable[..., str]) -> None:
    name = "owner/a-model-with-a-long-name"
    second = metrics(100, "1", tier="valkey:cache", circuits=1)
    second = second.replace('model_name="m"', f'model_name="{name}"')
    mismatches = f'mismatches_total{{engine="1",model_name="{name}",tier="valkey:cache"}} '
    assert mismatches in second
    second = second.replace(f"{mismatches}0", f"{mismatches}7")
    done = kvoffload("top", serve(metrics(1), metrics(3) + second), *ONCE, columns=80)
    assert done.returncode == 0, done.stderr
    assert all(len(line) <= 80 for line in done.stdout.splitlines())
    assert "###... 50%" in done.stdout
    assert "1 open" in done.stdout
    assert "a-model-wit~ 1: since the start: valkey:cache: 7 damaged" in done.stdout
    assert "m 0: no faults since the start" in done.stdout
    assert "not stored: admission" in done.stdout


def test_tenants_have_a_line(serve: Callable[..., str]) -> None:
    done = kvoffload("top", serve(metrics(1) + tenants(1), metrics(1) + tenants(1)), *ONCE, columns=160)
    assert "tenants: a 700 held, 0 loaded/s, 0 evicted/s; b c 40 held, 0 loaded/s" in done.stdout
    many = "".join(f'vllm:kvoffload_tenant_held_blocks{{engine="0",tenant="{n}"}} {n}\n' for n in range(12))
    done = kvoffload("top", serve(metrics(1) + many.replace("engine=", 'model_name="m",engine=')), *ONCE)
    assert "4 more" in done.stdout
    assert "tenants" not in kvoffload("top", serve(metrics(1)), *ONCE).stdout


def test_a_long_name_of_a_tier_takes_no_digits(serve: Callable[..., str]) -> None:
    name = "valkey:cache-of-the-second-row.example.org:6379"
    many = metrics(1e6, tier=name).replace(" 3\n", " 1234567\n")
    done = kvoffload("top", serve(metrics(1, tier=name), many), *ONCE, columns=80)
    (row,) = [line for line in done.stdout.splitlines() if line.strip().startswith("valkey")]
    assert row.split()[0] == "valkey~rg:6379"
    assert "1,234,567" in row
    assert row.rstrip().endswith("####.. 70%")
    assert all(len(line) <= 80 for line in done.stdout.splitlines())


def test_tiers_of_several_engines_are_under_their_engine(serve: Callable[..., str]) -> None:
    done = kvoffload("top", serve(metrics(1) + metrics(1, "1")), *ONCE, columns=80)
    lines = [line.split() for line in done.stdout.splitlines()]
    heads = [at for at, line in enumerate(lines) if "written/s" in line]
    assert [lines[at][:2] for at in heads] == [["m", "0"], ["m", "1"]]
    assert [lines[at + 2][0] for at in heads] == ["nvme", "nvme"]


@pytest.mark.parametrize("form", [(), ("--format", "json")])
def test_a_failed_scrape_does_not_end_piped_output(serve: Callable[..., str], form: tuple[str, ...]) -> None:
    """The error is printed to stderr, and the next interval to stdout."""
    address = serve(metrics(1), "gone", metrics(2))
    process = subprocess.Popen(
        [sys.executable, "-c", "from kvoffload.cli.main import main; main()",
         "top", address, "--interval", "0.05s", *form],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONUNBUFFERED": "1"},
    )  # fmt: skip
    try:
        assert process.stdout is not None
        assert process.stdout.readline()
    finally:
        process.kill()
        _, errors = process.communicate()
    assert errors.count("not in the Prometheus text format") == 1
    assert "Traceback" not in errors


def test_json_has_every_rate(serve: Callable[..., str]) -> None:
    done = kvoffload("top", serve(metrics(1), metrics(3)), *ONCE, "--format", "json")
    (engine,) = json.loads(done.stdout)
    assert engine["hit_ratio"] == pytest.approx(0.6)
    assert engine["tiers"][0]["name"] == "nvme"


def test_escape_sequences_of_a_server_do_not_reach_the_terminal(serve: Callable[..., str]) -> None:
    hostile = metrics(1, tier="\x1b[2J\x07evil")
    done = kvoffload("top", serve(hostile), *ONCE)
    assert done.returncode == 0
    assert "\x1b" not in done.stdout
    assert "evil" in done.stdout


@pytest.mark.parametrize(
    ("text", "status", "why"),
    [
        ("<html>", 200, "the answer is not in the Prometheus text format"),
        ("vllm:prompt_tokens_total 3\n", 200, "start vLLM with the flag that `kvoffload vllm-config` prints"),
        ("", 500, "the server answers HTTP 500"),
    ],
)
def test_an_answer_without_our_metrics_is_one_message(
    serve: Callable[..., str], text: str, status: int, why: str
) -> None:
    done = kvoffload("top", serve(text, status=status), "--once")
    assert (done.returncode, done.stdout) == (2, "")
    assert why in done.stderr
    assert "Traceback" not in done.stderr


def test_no_server_is_one_message() -> None:
    done = kvoffload("top", f"http://127.0.0.1:{free_port()}", "--once")
    assert done.returncode == 2
    assert "no answer (Connection refused)" in done.stderr


def test_a_server_that_dies_between_scrapes_is_one_message(serve: Callable[..., str]) -> None:
    done = kvoffload("top", serve(metrics(1), "gone"), *ONCE)
    assert done.returncode == 2
    assert "not in the Prometheus text format" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "field"),
    [(("ftp://x",), "url"), (("http://",), "url"), (("x:99999",), "url"), (("--interval", "0s"), "interval")],
)
def test_wrong_options_are_refused(arguments: tuple[str, ...], field: str) -> None:
    done = kvoffload("top", *arguments)
    assert done.returncode == 2
    assert f"{field}: " in done.stderr
    assert "allowed" in done.stderr


@pytest.mark.parametrize("address", ["{}", "http://{}", "http://{}/", "http://{}/v1", "http://{}/metrics"])
def test_incomplete_addresses_are_completed(serve: Callable[..., str], address: str) -> None:
    done = kvoffload("top", address.format(serve(metrics(1))), *ONCE, "--format", "json")
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(("leave", "code"), [("q", 0), ("ctrl-c", 130)])
def test_the_live_view_ends_cleanly(serve: Callable[..., str], tmp_path: Path, leave: str, code: int) -> None:
    """Runs in a separate terminal of 80 columns. A failed scrape is shown, and repeated."""
    address = serve(metrics(1), metrics(2), "gone", metrics(3))
    main, terminal = pty.openpty()
    settings = termios.tcgetattr(terminal)
    command = [sys.executable, "-c", "from kvoffload.cli.main import main; main()"]
    process = subprocess.Popen(
        [*command, "top", address, "--interval", "0.05s"],
        stdin=terminal, stdout=terminal, stderr=subprocess.STDOUT, start_new_session=True,
        env=os.environ | {"TERM": "xterm", "COLUMNS": "80", "LINES": "30",
                          "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )  # fmt: skip
    shown, until = b"", time.monotonic() + PATIENCE_S
    wanted = [b"no faults since the start", b"cannot be used now"]
    try:
        while any(text not in shown for text in wanted):
            assert time.monotonic() < until, shown
            if select.select([main], [], [], 0.1)[0]:
                shown += os.read(main, 65536)
        if leave == "q":
            os.write(main, b"q")
        else:
            process.send_signal(signal.SIGINT)
        while process.poll() is None:
            assert time.monotonic() < until
            if select.select([main], [], [], 0.1)[0]:
                shown += os.read(main, 65536)
        assert process.returncode == code
        assert termios.tcgetattr(terminal) == settings, "the terminal's settings are restored"
    finally:
        process.kill()
        process.wait()
        os.close(main)
        os.close(terminal)


def test_an_interrupt_in_a_finalizer_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    class Response:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGINT)

    num_scrapes = 0

    def scrape(url: str) -> Reading:
        nonlocal num_scrapes
        num_scrapes += 1
        assert num_scrapes == 1
        response = Response()
        del response  # raises the interrupt, which Python ignores here
        return read(samples(metrics(2)), 1.0)

    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)
    monkeypatch.setattr(top, "scrape", scrape)
    with pytest.raises(KeyboardInterrupt):
        top.watch("url", read(samples(metrics(1)), 0.0), 0.0)
    assert num_scrapes == 1
