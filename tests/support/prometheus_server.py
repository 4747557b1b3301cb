"""Prometheus for tests: its programs, and a server that scrapes and evaluates rules often."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from support.valkey_server import free_port

_PATIENCE_S = 120.0


def program(name: str) -> str:
    """Return the path of ``prometheus`` or ``promtool``. Without it, skip the test; in CI, fail it."""
    path = shutil.which(name)
    if path is None:
        reason = f"no {name}: apt-get install --no-install-recommends prometheus"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    return path


def promtool(*arguments: str | Path) -> None:
    """Run promtool; its output is the message of a failure."""
    done = subprocess.run([program("promtool"), *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


class Prometheus:
    """A running Prometheus server."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"

    def ask(self, path: str, **parameters: str | float) -> Any:
        """Return the data of an answer of the HTTP API; an error of the query fails the test."""
        url = f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=_PATIENCE_S) as response:
                return json.loads(response.read())["data"]
        except urllib.error.HTTPError as error:
            pytest.fail(f"{path} {parameters}: {error.read().decode()}")

    def query(self, query: str) -> list[dict[str, Any]]:
        """Return the samples of a query at this moment."""
        samples: list[dict[str, Any]] = self.ask("query", query=query)["result"]
        return samples

    def firing(self) -> dict[str, dict[str, Any]]:
        """Return the alerts that fire, by name."""
        alerts = self.ask("alerts")["alerts"]
        return {alert["labels"]["alertname"]: alert for alert in alerts if alert["state"] == "firing"}


_HURRIED = {
    r"\[10m\]": "[6s]",
    r"\[(15m|30m|1h)\]": "[8s]",
    r"\[1d\]": "[20s]",
    r"\[2d:5m\]": "[20s:1s]",
    r"\[6h\]": "[20s]",
    r"(?<=offset )(30m|1h)": "8s",
    r"(?<=offset )1d": "15s",
    r"(?<=for: )\w+": "1s",
}


def hurried(rules: str) -> str:
    """Return rules whose periods are seconds, for tests that do not wait for hours."""
    for period, short in _HURRIED.items():
        rules = re.sub(period, short, rules)
    return rules


@contextmanager
def serving(text: str | Callable[[], str]) -> Iterator[str]:
    """Serve `text`, or the return value of `text()` at each scrape, as ``/metrics``; yields ``host:port``."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            with suppress(OSError):  # Prometheus has aborted this scrape
                self.wfile.write((text if isinstance(text, str) else text()).encode())

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


@contextmanager
def running_prometheus(
    directory: Path, targets: dict[str, str], rules: str, interval: str = "1s"
) -> Iterator[Prometheus]:
    """Run a Prometheus that scrapes these targets.

    Args:
        targets: ``host:port`` by job.
        rules: the rule file, evaluated as often as the targets are scraped.
    """
    port = free_port()
    (directory / "rules.yml").write_text(rules)
    jobs = [{"job_name": job, "static_configs": [{"targets": [at]}]} for job, at in targets.items()]
    config = {
        "global": {"scrape_interval": interval, "scrape_timeout": interval, "evaluation_interval": interval},
        "rule_files": ["rules.yml"],
        "scrape_configs": jobs,
    }
    (directory / "prometheus.yml").write_text(json.dumps(config))
    command = [
        program("prometheus"),
        f"--config.file={directory / 'prometheus.yml'}",
        f"--storage.tsdb.path={directory / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with (directory / "prometheus.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    server, deadline = Prometheus(port), time.monotonic() + _PATIENCE_S
    try:
        while not _is_ready(server.url):
            assert process.poll() is None, (directory / "prometheus.log").read_text()
            assert time.monotonic() < deadline, (directory / "prometheus.log").read_text()
            time.sleep(0.1)
        yield server
    finally:
        process.terminate()
        process.wait(_PATIENCE_S)


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/-/ready", timeout=_PATIENCE_S):
            return True
    except OSError:
        return False
