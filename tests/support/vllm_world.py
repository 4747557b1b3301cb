"""The adapter as vLLM's scheduler uses it, for tests."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvoffload.integrations.vllm.shared.options import parse_options
from kvoffload.integrations.vllm.shared.pool import SharedPool
from kvoffload.node.pool_directory import PoolDirectory
from kvoffload.testing.audit import audit
from kvoffload.tiers.contract import SecondaryTier
from support.vllm_traffic import PATIENCE_S, note_position, touch_path

base = pytest.importorskip("vllm.v1.kv_offload.base")


KVOffloadManager = pytest.importorskip("kvoffload.integrations.vllm.scheduler_side.manager").KVOffloadManager


HIT, MISS, PENDING, RETRY = (base.LookupResult[name] for name in ("HIT", "MISS", "HIT_PENDING", "RETRY"))


def key(number: int, group: int = 0) -> bytes:
    made: bytes = base.make_offload_key(number.to_bytes(32, "little"), group)
    return made


class World:
    """A pool, our manager, and a worker that writes a block's key into its slot and seals it.

    Args:
        node_pool: the pool that this engine shares with other engines.
        sessions, steps_in_flight: see `KVOffloadManager`.
    """

    def __init__(
        self,
        directory: Path,
        capacity: int,
        node_pool: PoolDirectory | None = None,
        sessions: Any = None,
        steps_in_flight: int = 16,
        **options: Any,
    ) -> None:
        sizes = {"num_parts": 1, "part_bytes": 4096, "capacity_bytes": capacity * 4096}
        if node_pool is None:
            self.pool = SharedPool.attach("world", member=0, num_members=1, directory=directory, **sizes)
        else:
            self.pool = SharedPool.attach_shared(node_pool, member=0, **sizes)
        self.manager = KVOffloadManager(
            parse_options({"ram": "1GiB"} | options),
            self.pool,
            enable_events=True,
            node_pool=node_pool,
            sessions=sessions,
            steps_in_flight=steps_in_flight,
        )
        self.resident: set[bytes] = set()
        self.paths: dict[str, list[bytes]] = {}

    def put_behind(self, *tiers: SecondaryTier) -> None:
        """Build the manager again, with these tiers behind its RAM."""
        self.manager._tiers = SimpleNamespace(open=lambda *_: [*tiers], log_unreached=lambda: None)
        self.manager._build(36)

    def request(self, name: str, keys: list[bytes], groups: int = 1) -> Any:
        """Create a request like vLLM's connector, which notes the keys of one group after the other."""
        ctx, self.paths[name] = base.ReqContext(name), keys
        per_group = len(keys) // groups
        for position, block_key in enumerate(keys):
            note_position(ctx, block_key, position % per_group + 1)
        self.manager.on_new_request(ctx)
        return ctx

    def lookup(self, ctx: Any, keys: list[bytes]) -> int | None:
        """Look up keys like vLLM's connector: returns the leading hits, or None to ask again."""
        hits, wait = 0, False
        for block_key in keys:
            state = self.manager.lookup(block_key, ctx)
            if state is MISS:
                break
            wait = wait or state is not HIT
            hits += 1
        touch_path(self.manager, ctx, self.paths.get(ctx.req_id, keys))
        return None if wait else hits

    def hits(self, ctx: Any, keys: list[bytes]) -> int:
        """Look up repeatedly until there is an answer."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            hits = self.lookup(ctx, keys)
            if hits is not None:
                return hits
            self.manager.on_schedule_end(base.ScheduleEndContext([], []))
        raise AssertionError("no answer")

    def store(self, ctx: Any, keys: list[bytes]) -> Any:
        """Offer blocks, and copy the chosen blocks."""
        output = self.manager.prepare_store(keys, ctx)
        if output is not None:
            self.write(output)
            if output.keys_to_store:
                touch_path(self.manager, ctx, self.paths.get(ctx.req_id, keys))
        return output

    def write(self, output: Any) -> None:
        spec = output.store_spec
        for block_key, slot in zip(output.keys_to_store, spec.block_ids.tolist(), strict=True):
            self.pool.part(0)[slot] = np.resize(np.frombuffer(block_key, np.uint8), 4096)
        if spec.digests is not None:
            self.pool.seal(0, spec.block_ids, spec.digests)

    def read(self, spec: Any) -> list[bytes]:
        """Return the keys that the slots hold."""
        return [self.pool.part(0)[slot, :36].tobytes() for slot in spec.block_ids.tolist()]

    def serve(self, name: str, keys: list[bytes]) -> tuple[int, list[bytes]]:
        """Serve a request alone; returns the hits and the stored keys."""
        ctx = self.request(name, keys)
        hits = self.hits(ctx, keys)
        if hits:
            assert self.read(self.manager.prepare_load(keys[:hits], ctx)) == keys[:hits]
            self.manager.complete_load(set(keys[:hits]), ctx)
        output = self.store(ctx, keys[hits:]) if hits < len(keys) else None
        stored = [] if output is None else output.keys_to_store
        self.manager.complete_store(set(stored), ctx)
        self.manager.on_request_finished(ctx)
        return hits, stored

    def check(self) -> None:
        """Audit the manager, and compare the events with its blocks."""
        assert not self.manager.broken
        audit(self.manager.core)
        for event in self.manager.take_events():
            (self.resident.difference_update if event.removed else self.resident.update)(event.keys)
        core = self.manager.core
        ready = {core.index.key_at(slot) for slot in np.flatnonzero(core.slots.ref_cnt >= 0).tolist()}
        assert self.resident == ready

    def close(self) -> None:
        self.manager.shutdown()
