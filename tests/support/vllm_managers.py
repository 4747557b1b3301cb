"""vLLM's manager and ours behind one interface."""

from __future__ import annotations

import random
from typing import Any

import pytest

from kvoffload import OffloadingManager
from support.vllm_traffic import note_position, touch_path

vllm_base = pytest.importorskip("vllm.v1.kv_offload.base")


vllm_manager = pytest.importorskip("vllm.v1.kv_offload.cpu.manager")


KEY_BYTES = 36


def key(number: int) -> bytes:
    """Make a key like vLLM: a 32-byte block hash and the group index."""
    made: bytes = vllm_base.make_offload_key(number.to_bytes(32, "little"), 0)
    return made


class Theirs:
    """vLLM's manager behind the calls that drive both managers."""

    def __init__(self, capacity: int, policy: str, threshold: int = 1) -> None:
        self.manager: Any = vllm_manager.CPUOffloadingManager(capacity, policy, store_threshold=threshold)
        self.evicted: list[bytes] = []

    def serve(self, request: str, keys: list[bytes]) -> tuple[int, list[bytes]]:
        ctx = self.begin(request, keys)
        hits = self.hits(keys, ctx)
        touch_path(self.manager, ctx, keys)
        self.manager.prepare_load(keys[:hits], ctx)
        self.manager.complete_load(keys[:hits], ctx)
        output = self.manager.prepare_store(keys, ctx)
        stored = [] if output is None else output.keys_to_store
        if output is not None:
            self.evicted += output.evicted_keys
            if stored:
                touch_path(self.manager, ctx, keys)
            self.manager.complete_store(stored, ctx)
        self.manager.on_request_finished(ctx)
        return hits, stored

    def begin(self, request: str, keys: list[bytes]) -> Any:
        ctx = vllm_base.ReqContext(request)
        for position, block_key in enumerate(keys):
            note_position(ctx, block_key, position)
        self.manager.on_new_request(ctx)
        return ctx

    def hits(self, keys: list[bytes], ctx: Any) -> int:
        for count, block_key in enumerate(keys):
            if self.manager.lookup(block_key, ctx) is not vllm_base.LookupResult.HIT:
                return count
        return len(keys)

    def holds(self, block_key: bytes) -> bool:
        return self.manager._policy.get(block_key) is not None


class Ours:
    """Our manager behind the same calls."""

    def __init__(self, capacity: int, policy: str, threshold: int = 1) -> None:
        self.manager = OffloadingManager(
            capacity, key_bytes=KEY_BYTES, policy=policy, admission=f"reuse:{threshold}"
        )
        self.evicted: list[bytes] = []

    def serve(self, request: str, keys: list[bytes]) -> tuple[int, list[bytes]]:
        ctx = self.manager.begin_request(request, keys)
        hits = self.manager.lookup(keys, ctx).num_ready
        self.manager.complete_load(self.manager.prepare_load(keys[:hits], ctx))
        plan = self.manager.prepare_store(keys, ctx)
        if plan is not None:
            self.evicted += list(plan.evicted)
            self.manager.complete_store(plan)
        self.manager.finish_request(ctx)
        return hits, [] if plan is None else list(plan.keys)

    def holds(self, block_key: bytes) -> bool:
        return self.manager.lookup([block_key]).num_ready == 1


def random_paths(seed: int, count: int, longest: int) -> list[list[bytes]]:
    """Generate requests that share prefixes, as walks down a random tree of chained block hashes."""
    rng = random.Random(seed)
    children: dict[int, list[int]] = {0: []}
    paths = []
    for _ in range(count):
        node, path = 0, []
        for _ in range(rng.randint(1, longest)):
            if children[node] and rng.random() < 0.7:
                node = rng.choice(children[node])
            else:
                children[node].append(len(children))
                node = len(children)
                children[node] = []
            path.append(key(node))
        paths.append(path)
    return paths
