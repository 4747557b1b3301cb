"""examples/lmcache_storage.py and its configuration."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from kvoffload.integrations.lmcache import parse_options
from support.lmcache_server import environment, forks

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def test_objects_are_found_in_a_second_run(tmp_path: Path) -> None:
    program = [str(EXAMPLES / "lmcache_storage.py"), f"disk:{tmp_path}:64MiB"]

    def objects(done: subprocess.CompletedProcess[str]) -> list[str]:
        assert done.returncode == 0, done.stderr
        return [line for line in done.stdout.splitlines() if "objects" in line]

    fresh = [sys.executable, "-W", "ignore", *program]
    first = subprocess.run(fresh, capture_output=True, text=True, env=environment())
    assert objects(first) == ["0 of 8 objects found", "8 objects written"]
    assert objects(forks().run(program, environment())) == ["8 of 8 objects found"]


def test_the_configuration_is_accepted() -> None:
    adapter = json.loads((EXAMPLES / "lmcache_adapter.json").read_text())
    assert parse_options(adapter["adapter_params"]).tiers[0].name == "disk"
