"""Real engines under stress for SOAK_SECONDS (600), with random options.

    make soak SOAK_SECONDS=3600 SEED=17

Compares every answer with the answer of an engine without offloading. After each round nothing may be in
flight, and the manager is audited. If blocks are verified, the pool is damaged between rounds. Three engines
in five have a Valkey server behind RAM, which is killed every 20 s and starts empty 5 s later. Engines of one
model with different configurations (`CHANGES`) share one disk and one server. Last, copies run in random
orders on an engine that zeroes new blocks (`copy_orders`). The printed seed reproduces everything that does
not depend on time.
"""

from __future__ import annotations

import os
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from kvoffload.core.policy import POLICIES
from kvoffload.tiering.tiered_manager import TieredManager
from support.valkey_server import Server, running
from support.vllm_engine import HYBRID, LLAMA, Engine, write_llama
from support.vllm_traffic import (
    PATIENCE_S,
    certain_answers,
    check_nothing_is_left,
    conversations,
    damage,
    drive,
)

ROUNDS_PER_ENGINE, REQUESTS_PER_ROUND = 4, 60
KILLED_EVERY_S = 20.0
CHANGES: dict[str, dict[str, Any]] = {
    "plain": {},
    "rope": {"hf_overrides": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}},
    "norm": {"hf_overrides": {"rms_norm_eps": 0.1}},
}
"""Settings that change the KV of equal weights, tokens and keys."""
COPY_ORDERS = 6
"""Random orders of copies, besides the two extremes."""


def soak(seconds: float, seed: int) -> bool:
    """Run for `seconds`; returns True if every answer was right."""
    rng, totals = random.Random(seed), Counter[str]()
    chats = conversations(seed, documents=8, turns=4)
    with tempfile.TemporaryDirectory() as directory, running(Path(directory)) as valkey:
        os.environ["XDG_CACHE_HOME"] = f"{directory}/cache"
        models = {
            name: write_llama(Path(directory) / name, config)
            for name, config in (("llama", LLAMA), ("hybrid", HYBRID))
        }
        expected = {
            (name, change): answers(model, chats, settings)
            for name, model in models.items()
            for change, settings in CHANGES.items()
        }
        until = time.monotonic() + seconds
        with killed_again_and_again(valkey, totals):
            while time.monotonic() < until:
                name, change = rng.choice(sorted(models)), rng.choice(sorted(CHANGES))
                options, connector = drawn(rng, f"{directory}/{name}-disk", valkey.url)
                settings = {"num_gpu_blocks_override": blocks(name), **CHANGES[change]}
                engine = Engine(models[name], options, connector=connector, **settings)
                totals["engines"] += 1
                totals[f"engines, {change}"] += 1
                for _ in range(ROUNDS_PER_ENGINE):
                    started = rng.randrange(10**9)
                    print(f"seed {seed}: {name} {change} {options}, round {started}", end=": ", flush=True)
                    if not is_right(engine, expected[name, change], started, totals):
                        return False
                    if options["verify"] == "always":
                        damage(engine, rng.choice(["zeros", "noise", "other slots"]))
                count_tiers(engine.manager.core, totals)
                engine.close()
        print(f"seed {seed}, all of it:", dict(totals), flush=True)
        # Imported late: it imports torch, before which conftest sets the number of threads.
        from support.vllm_copy_orders import soak as soak_copy_orders

        victim = {
            "ram": "6MiB",
            "store": "on-device-eviction",
            "tiers": [on_disk(f"{directory}/orders", "lru")],
        }
        start = partial(Engine, models["llama"], victim, connector=True, num_gpu_blocks_override=48)
        wrong = soak_copy_orders(start, expected["llama", "plain"], seed, COPY_ORDERS)
    print(f"seed {seed}, {COPY_ORDERS + 2} orders of copies, wrong:", wrong, flush=True)
    return not wrong


def on_disk(path: str, policy: str) -> dict[str, Any]:
    """Options of a disk that is smaller than the traffic."""
    return {"type": "disk", "path": path, "capacity": "16MiB", "policy": policy}


def drawn(rng: random.Random, disk: str, valkey: str) -> tuple[dict[str, Any], bool]:
    """Draw the options of an engine, and the choice of our connector.

    The disk has blocks of previous engines, and Valkey has blocks since its last kill.
    """
    options: dict[str, Any] = {
        "ram": rng.choice(["4MiB", "6MiB", "12MiB"]),
        "policy": rng.choice(POLICIES.names()),
        "admission": rng.choice(["all", "all", "reuse:2", "tinylfu"]),
        "verify": rng.choice(["always", "tiers"]),
        "blocks_per_chunk": rng.choice([1, 1, 3]),
        "prompt_only": rng.choice([True, False]),
    }
    own = on_disk(disk, rng.choice(POLICIES.names()))
    shared = {"url": f"{valkey}/soak", "ttl": rng.choice(["30s", "1h"]), "probe_timeout": "200ms"}
    tiers = rng.choice([[], [own], [shared], [shared], [own, shared]])
    if tiers:
        options["tiers"] = tiers
    connector = rng.random() < 0.4
    if connector and options["blocks_per_chunk"] == 1 and rng.random() < 0.7:
        options["store"] = "on-device-eviction"
    return options, connector


@contextmanager
def killed_again_and_again(server: Server, totals: Counter[str]) -> Iterator[None]:
    """Kill the server every 20 s until the context ends; it starts again 5 s later, empty."""
    is_over = threading.Event()

    def kill() -> None:
        while not is_over.wait(0.75 * KILLED_EVERY_S):
            server.stop()
            totals["kills of Valkey"] += 1
            is_over.wait(0.25 * KILLED_EVERY_S)
            server.start()

    with ThreadPoolExecutor(1) as pool:
        killing = pool.submit(kill)
        try:
            yield
        finally:
            is_over.set()
        killing.result()


def is_right(engine: Engine, expected: Any, seed: int, totals: Counter[str]) -> bool:
    """Run a round of requests, check that nothing is in flight; returns True if all answers were right."""
    outcome = drive(engine, *expected, seed, REQUESTS_PER_ROUND, aborts=0.1, resets=0.003)
    if isinstance(core := engine.manager.core, TieredManager):
        assert core.settle(PATIENCE_S), "a tier does not end its jobs"
    check_nothing_is_left(engine)
    print(outcome, core.stats(), flush=True)
    totals.update(
        {"answers": outcome.finished, "wrong answers": len(outcome.wrong), "aborted": outcome.aborted}
    )
    return not outcome.wrong


def count_tiers(core: Any, totals: Counter[str]) -> None:
    """Add up hits, writes and failures of each tier of an engine."""
    if not isinstance(core, TieredManager):
        return
    for name, hits, stats in zip(core.tier_names, core.hit_blocks[1:], core.tier_stats(), strict=True):
        met = {"written": stats.written, "failed": stats.failed, "late": stats.timeouts, "stale": stats.stale}
        for event, number in {"engines": 1, "hits": hits, "damaged": stats.mismatches, **met}.items():
            totals[f"{name}: {event}"] += number


def blocks(name: str) -> int:
    """Blocks of the engine: room for about two requests."""
    return 44 if name == "hybrid" else 24


def answers(
    model: Path, chats: list[list[int]], settings: dict[str, Any]
) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts, and the answers of an engine without offloading and with these settings."""
    engine: Any = Engine(model, None, num_gpu_blocks_override=blocks(model.name), **settings)
    certain = certain_answers(engine, chats, 8)
    engine.close()
    return certain


if __name__ == "__main__":
    chosen = int(os.environ.get("SEED") or random.SystemRandom().randrange(10**6))
    print(f"seed {chosen}", flush=True)
    sys.exit(0 if soak(float(os.environ.get("SOAK_SECONDS") or 600), chosen) else 1)
