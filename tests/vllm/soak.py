"""Real engines under stress for as long as SOAK_SECONDS says (600), with options drawn at random.

    make soak SOAK_SECONDS=3600 SEED=17

Every answer is compared with that of an engine without offloading; after each round nothing may be left in
flight, and the manager is audited. Where blocks are verified, the pool is damaged between rounds. The seed is
printed, and says it all again, as far as time does not decide.
"""

from __future__ import annotations

import os
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from traffic import PATIENCE_S, certain_answers, check_nothing_is_left, conversations, damage, drive

from conftest import HYBRID, LLAMA, Engine, write_llama
from kvoffload.core.policy import POLICIES

ROUNDS_PER_ENGINE, REQUESTS_PER_ROUND = 4, 60


def soak(seconds: float, seed: int) -> bool:
    """Whether everything was right until the time was up."""
    rng = random.Random(seed)
    chats = conversations(seed, documents=8, turns=4)
    with tempfile.TemporaryDirectory() as directory:
        models = {
            name: write_llama(Path(directory) / name, config)
            for name, config in (("llama", LLAMA), ("hybrid", HYBRID))
        }
        expected = {name: answers(model, chats) for name, model in models.items()}
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            name = rng.choice(sorted(models))
            options: dict[str, Any] = {
                "ram": rng.choice(["4MiB", "6MiB", "12MiB"]),
                "policy": rng.choice(POLICIES.names()),
                "admission": rng.choice(["all", "all", "reuse:2", "tinylfu"]),
                "verify": rng.choice(["always", "tiers"]),
                "blocks_per_chunk": rng.choice([1, 1, 3]),
                "prompt_only": rng.choice([True, False]),
            }
            if rng.random() < 0.3:
                # One directory a model: an engine finds what one before it has left.
                tier = {"type": "disk", "path": f"{directory}/{name}-disk", "capacity": "16MiB"}
                options["tiers"] = [tier | {"policy": rng.choice(POLICIES.names())}]
            connector = rng.random() < 0.4
            if connector and options["blocks_per_chunk"] == 1 and rng.random() < 0.7:
                options["store"] = "on-device-eviction"
            engine = Engine(models[name], options, connector=connector, num_gpu_blocks_override=blocks(name))
            for _ in range(ROUNDS_PER_ENGINE):
                started = rng.randrange(10**9)
                print(f"seed {seed}: {name} {options}, round {started}", end=": ", flush=True)
                outcome = drive(
                    engine, *expected[name], started, REQUESTS_PER_ROUND, aborts=0.1, resets=0.003
                )
                if "tiers" in options:
                    assert engine.manager.core.settle(PATIENCE_S), "a disk does not end its jobs"
                check_nothing_is_left(engine)
                print(outcome, engine.manager.core.stats(), flush=True)
                if outcome.wrong:
                    return False
                if options["verify"] == "always":
                    damage(engine, rng.choice(["zeros", "noise", "other slots"]))
            engine.close()
    return True


def blocks(name: str) -> int:
    """Blocks of the engine: room for about two requests."""
    return 44 if name == "hybrid" else 24


def answers(model: Path, chats: list[list[int]]) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts, and what an engine without offloading says to them."""
    engine: Any = Engine(model, None, num_gpu_blocks_override=blocks(model.name))
    found = certain_answers(engine, chats, 8)
    engine.close()
    return found


if __name__ == "__main__":
    chosen = int(os.environ.get("SEED") or random.SystemRandom().randrange(10**6))
    print(f"seed {chosen}", flush=True)
    sys.exit(0 if soak(float(os.environ.get("SOAK_SECONDS") or 600), chosen) else 1)
