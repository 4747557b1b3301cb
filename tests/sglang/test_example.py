"""examples/sglang_storage.py and its configuration, which a server takes as a file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController

from kvoffload.integrations.sglang.options import parse_options
from support.sglang_pools import forks

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def test_pages_are_found_in_a_second_run(tmp_path: Path) -> None:
    program = [str(EXAMPLES / "sglang_storage.py"), f"disk:{tmp_path}:64MiB"]
    fresh = [sys.executable, "-W", "ignore", *program]
    first = subprocess.run(fresh, capture_output=True, text=True, env=environment())
    assert first.stdout == "0 of 8 pages found\n8 pages written\n", first.stderr
    second = forks().run(program, environment())
    assert second.stdout == "8 of 8 pages found\n8 pages read\n", second.stderr
    assert first.returncode == second.returncode == 0


@pytest.mark.parametrize("form", ["{}", "@{}"])
def test_sglang_reads_the_configuration(form: str) -> None:
    """Both forms: text, and a file behind ``@``."""
    path = EXAMPLES / "sglang_hicache.json"
    given = "@" + str(path) if form.startswith("@") else path.read_text()
    extra, *_ = HybridCacheController.parse_storage_backend_extra_config(given)
    assert extra["tiers"] == json.loads(path.read_text())["tiers"]
    assert parse_options(extra).tiers[0].name == "disk"


def environment() -> dict[str, str]:
    paths = [path for path in sys.path if path.endswith("src")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")])}
