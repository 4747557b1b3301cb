"""A real vLLM engine with `LMCacheMPConnector`, a real ``lmcache server``, and our disk: equal tokens."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from support import lmcache_server

CHUNK, PROMPTS = 64, 3


def answers(model: Path, url: str, prompts: list[list[int]]) -> list[dict[str, Any]]:
    """Start a new engine; return its answers."""
    program = ["-m", "support.lmcache_engine", str(model), url, json.dumps(prompts)]
    done = lmcache_server.forks().run(program, lmcache_server.environment())
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("ANSWERS "))
    parsed: list[dict[str, Any]] = json.loads(line.removeprefix("ANSWERS "))
    return parsed


@pytest.mark.slow
def test_a_new_engine_and_a_new_server_serve_the_prompts_from_our_disk(tmp_path: Path) -> None:
    model, chance = tmp_path / "model", random.Random(38)
    prompts = [[chance.randrange(2, 1000) for _ in range(3 * CHUNK + 9)] for _ in range(PROMPTS)]
    tier, log = f"disk:{tmp_path / 'kv'}:256MiB", tmp_path / "log"
    expected = answers(model, "-", prompts)
    assert [answer["hit"] for answer in expected] == [0] * PROMPTS
    for hit in (0, 3 * CHUNK):
        with lmcache_server.running(tier, log, "--chunk-size", str(CHUNK)) as server:
            served = answers(model, server.url, prompts)
            assert [answer["hit"] for answer in served] == [hit] * PROMPTS
            assert [answer["tokens"] for answer in served] == [answer["tokens"] for answer in expected]
            assert server.written(0 if hit else 3 * PROMPTS)
            assert server.tier().get("read", 0) == (3 * PROMPTS if hit else 0)
