"""A real Prometheus scrapes engines of the library: each fault raises its alarm, a sound engine none."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvoffload import Keys, LookupResult, MemoryTier, OffloadingManager, TieredManager, open_tier
from kvoffload.canary.text_metrics import text_metrics
from kvoffload.canary.verdict import Verdict
from kvoffload.metrics import Collector
from kvoffload.metrics.alarms import alarms, rule_file
from kvoffload.metrics.families import LIBRARY_PREFIX
from kvoffload.tiers.contract import TierStats
from support.dashboard import canary_metrics, queries, without_data
from support.disk_blocks import slab_in
from support.prometheus_server import Prometheus, hurried, program, running_prometheus, serving
from support.scripted_tier import ScriptedTier

prometheus_client = pytest.importorskip(
    "prometheus_client", reason="no prometheus_client: pip install 'kvoffload[metrics]'"
)
PATIENCE_S = 120.0
BLOCK_BYTES, KEY_BYTES = 4096, 16
FILLING = 7
"""Every byte of every block."""


class UnreachableTier(ScriptedTier):
    """A tier that reports an unreachable server."""

    def stats(self) -> TierStats:
        return replace(super().stats(), circuit_open=1)


class HungTier(ScriptedTier):
    """A tier whose writes do not end."""

    def stats(self) -> TierStats:
        return replace(super().stats(), in_flight=sum(len(job.keys) for job in self.jobs))


class FailingTier(ScriptedTier):
    """A tier whose writes fail."""

    def end(self, job: Any) -> None:
        job.fail = set(job.keys)
        super().end(job)


class Engine:
    """An engine with its own exporter. `step` is one request of four blocks."""

    def __init__(self, name: str, stack: ExitStack, num_blocks: int = 64, **options: Any) -> None:
        self.ram = MemoryTier(num_blocks, BLOCK_BYTES)
        tiers = options.pop("tiers", None)
        self.manager: Any = (
            OffloadingManager(num_blocks, key_bytes=KEY_BYTES, **options)
            if tiers is None
            else TieredManager(num_blocks, key_bytes=KEY_BYTES, ram=self.ram, tiers=tiers, **options)
        )
        self.name, self._names = name, itertools.count()
        self.metrics = Collector(self.manager, name=name)
        registry = prometheus_client.CollectorRegistry()
        registry.register(self.metrics)
        server, thread = prometheus_client.start_http_server(0, addr="127.0.0.1", registry=registry)
        self.address = f"127.0.0.1:{server.server_port}"
        if tiers is not None:
            stack.callback(self.manager.close, 1.0)
        stack.callback(server.server_close)
        stack.callback(thread.join)
        stack.callback(server.shutdown)

    def step(self, first: int, *, fails: bool = False, num_lookups: int = 4) -> None:
        """Load the ready blocks from `first` on, and store the others."""
        keys = Keys.pack([b"%016d" % number for number in range(first, first + 4)], KEY_BYTES)
        ctx = self.manager.begin_request(f"{self.name}-{next(self._names)}", keys)
        while (hits := self.manager.lookup(keys, ctx)).stopped_by is LookupResult.RETRY:
            time.sleep(0.001)  # the forward pass of other requests
            self.manager.poll()
        num_ready = hits.num_ready
        self.metrics.count("lookup_blocks", num_lookups)
        if num_ready:
            self.manager.complete_load(self.manager.prepare_load(keys[:num_ready], ctx))
        plan = self.manager.prepare_store(keys, ctx)
        if plan is not None:
            self.ram.pool[plan.slots] = FILLING
            self.ram.seal(plan.keys, plan.slots)
            self.manager.complete_store(plan, success=not fails)
        self.manager.finish_request(ctx)
        if isinstance(self.manager, TieredManager):
            self.manager.poll()
        self.metrics.update()


class World:
    """Engines with one fault each, and a sound engine.

    Attributes:
        hits_end: monotonic time after which the engine `fading` has no hits.
    """

    def __init__(self, tmp_path: Path, stack: ExitStack) -> None:
        self._disk = tmp_path / "damaged"

        def disk(path: Path, **extra: Any) -> Any:
            options = {"type": "disk", "path": str(path), "capacity": "8MiB", **extra}
            return open_tier(options, block_bytes=BLOCK_BYTES, key_bytes=KEY_BYTES, fingerprint="test")

        def engine(name: str, *tiers: Any, **options: Any) -> Engine:
            return Engine(name, stack, **options, **({"tiers": tiers} if tiers else {}))

        self.sound = engine("sound", disk(tmp_path / "sound"), num_blocks=16, policy="arc")
        self.damaged = engine("damaged", disk(self._disk), num_blocks=16)
        self.faulty = engine("faulty")
        self.fading = engine("fading")
        self.idle = engine("idle", admission="reuse:2")
        self.slow = engine("slow", ScriptedTier(BLOCK_BYTES, name="busy"), num_blocks=16)
        self.slow.manager.lanes[0].tier.inner.takes = False
        self.thrifty = engine(
            "thrifty", disk(tmp_path / "thrifty", max_write_bytes_per_day=100 * BLOCK_BYTES)
        )
        broken = [
            UnreachableTier(BLOCK_BYTES, name="far", immediate=True),
            HungTier(BLOCK_BYTES, name="hung"),
            FailingTier(BLOCK_BYTES, name="failing", immediate=True),
        ]
        self.broken = engine("broken", *broken)
        self.engines = [value for value in vars(self).values() if isinstance(value, Engine)]
        self.hits_end = time.monotonic() + PATIENCE_S
        self._numbers, self._num_steps = itertools.count(1000), 0

    def new(self) -> int:
        return 4 * next(self._numbers)

    def step(self) -> None:
        """Run one step of every engine."""
        self._num_steps += 1
        number = self._num_steps
        self.sound.step(4 * (number % 16))
        self.damaged.step(4 * (number % 16))
        if number % 32 == 0:
            self.damage()
        self.faulty.step(self.new(), fails=number % 2 == 0)
        for metric in ("verification_failures", "failed_load_blocks", "internal_errors"):
            self.faulty.metrics.count(metric)
        for _ in range(5):
            self.fading.step(0 if time.monotonic() < self.hits_end else self.new())
        self.idle.step(self.new(), num_lookups=1000)
        self.slow.step(self.new())
        self.thrifty.step(self.new())
        self.broken.step(self.new())

    def damage(self) -> None:
        """Change two bytes of every sound block in the slab."""
        slab = slab_in(self._disk)
        content, block = slab.read_bytes(), bytes([FILLING]) * BLOCK_BYTES
        with slab.open("r+b") as file:
            for at in range(0, len(content), BLOCK_BYTES):
                if content[at : at + BLOCK_BYTES] == block:
                    file.seek(at)
                    file.write(b"?!")


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def step_until(world: World, is_done: Callable[[], bool], describe: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not is_done():
        assert time.monotonic() < deadline, describe()
        for _ in range(5):
            world.step()
        time.sleep(0.02)


@pytest.mark.slow
def test_each_fault_raises_its_alarm(tmp_path: Path, stack: ExitStack) -> None:
    program("prometheus")
    world = World(tmp_path, stack)
    now = time.time()
    targets = {engine.name: engine.address for engine in world.engines}
    targets["different"] = stack.enter_context(serving(canary_metrics(Verdict.DIFFERENT, now)))
    targets["failed"] = stack.enter_context(serving(lambda: text_metrics(None, {}, time.time())))
    targets["ended"] = stack.enter_context(serving(canary_metrics(Verdict.WITHIN_NOISE, now - 90_000)))
    rules = hurried(rule_file(LIBRARY_PREFIX))
    prometheus = stack.enter_context(running_prometheus(tmp_path, targets, rules))
    expected, fired = {alarm.name for alarm in alarms(LIBRARY_PREFIX)}, dict[str, dict[str, Any]]()

    def all_fired() -> bool:
        for alert in prometheus.ask("alerts")["alerts"]:
            if alert["state"] == "firing":
                assert alert["labels"]["job"] != "sound", alert
                fired[alert["labels"]["alertname"]] = alert
        return expected <= set(fired)

    world.hits_end = time.monotonic() + 25
    step_until(world, all_fired, lambda: expected - set(fired))
    assert set(fired) == expected
    for alert in fired.values():
        texts = alert["annotations"]
        assert not any(
            mark in text for text in texts.values() for mark in ("{{", "<no value>", "error expanding")
        )
    assert fired["KVOffloadTierStalled"]["labels"]["tier"] == "hung"
    assert fired["KVOffloadTierUnreachable"]["labels"]["tier"] == "far"
    check_queries(world, prometheus)


def check_queries(world: World, prometheus: Prometheus) -> None:
    """Check that every query of the dashboard has data, except for vLLM's own metrics and features."""
    not_here = ("vllm:", "audited_blocks", "what_if", "tenant_")
    expected = {query for query in queries() if any(name in query for name in not_here)}
    step_until(
        world,
        lambda: without_data(prometheus, LIBRARY_PREFIX) <= expected,
        lambda: without_data(prometheus, LIBRARY_PREFIX) - expected,
    )
    assert without_data(prometheus, LIBRARY_PREFIX) == expected
