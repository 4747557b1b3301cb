"""The two halves of LMCache's connector for vLLM with a real ``lmcache server`` and our adapter.

`LMCacheMPConnector` of vLLM calls these two adapters and does nothing else with KV. The KV tensors are on the
CPU, in vLLM's layout. The scheduler's half looks requests up; the worker's half stores and retrieves blocks.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import zmq
from lmcache.integration.vllm.vllm_multi_process_adapter import (
    LMCacheMPSchedulerAdapter,
    LMCacheMPWorkerAdapter,
    LoadStoreOp,
    ParallelStrategy,
)
from lmcache.v1.multiprocess.group_view import EngineGroupInfo

from kvoffload.tiers.waiting import wait_until
from support import lmcache_server
from support.timeouts import HANGS_S

BLOCK, CHUNK, BLOCKS, LAYERS = 16, 256, 128, 2
PER_CHUNK = CHUNK // BLOCK
PROMPT = list(range(1000, 1000 + 3 * CHUNK + 5))
STRATEGY = ParallelStrategy(False, vllm_world_size=1, vllm_worker_id=0, tp_size=1, pp_size=1, n_servers=1)


class Engine:
    """Both halves of the connector, and the KV tensors of an engine with random contents."""

    def __init__(self, url: str, context: zmq.Context[zmq.Socket[bytes]], seed: int) -> None:
        self.scheduler = LMCacheMPSchedulerAdapter([url], context, "a model", BLOCK, STRATEGY)
        self.worker = LMCacheMPWorkerAdapter(url, context, "a model", BLOCK, STRATEGY)
        random = torch.Generator().manual_seed(seed)
        shape = (2, BLOCKS, BLOCK, 2, 64)
        self.kv = {
            f"layer.{number}": torch.randn(shape, generator=random).to(torch.bfloat16)
            for number in range(LAYERS)
        }
        self.worker.register_kv_caches(
            self.kv, [EngineGroupInfo(0, tuple(range(LAYERS)), BLOCK)], layout_hints={"kv_layout": "NHD"}
        )

    def close(self) -> None:
        self.worker.shutdown()
        self.scheduler.shutdown()

    def hit(self, tokens: list[int], salt: str = "") -> tuple[str, int]:
        """Look up a new request; returns its name and the number of tokens that are present."""
        request, counts = str(uuid.uuid4()), list[int]()
        self.scheduler.maybe_submit_lookup_request(request, tokens, cache_salt=salt)

        def answered() -> bool:
            if (count := self.scheduler.check_lookup_result(request)) is not None:
                counts.append(count)
            return bool(counts)

        assert wait_until(answered, HANGS_S)
        assert self.scheduler.is_healthy
        return request, counts[0]

    def store(self, request: str, tokens: list[int], blocks: list[int]) -> None:
        self.worker.submit_store_request(request, self._operation(tokens, blocks), self._event())
        stored = set[str]()
        assert wait_until(lambda: request in stored | self._finished(0, request, stored), HANGS_S)

    def load(self, request: str, tokens: list[int], blocks: list[int]) -> None:
        self.worker.submit_retrieve_request(request, self._operation(tokens, blocks), self._event())
        loaded = set[str]()
        assert wait_until(lambda: request in loaded | self._finished(1, request, loaded), HANGS_S)
        assert self.worker.get_block_ids_with_load_errors() == set()

    def end(self, request: str) -> None:
        self.scheduler.cleanup_lookup_result(request)
        self.scheduler.end_session(request)

    def contents(self, blocks: list[int]) -> torch.Tensor:
        return torch.stack([tensor[:, blocks] for tensor in self.kv.values()])

    def _event(self) -> object:
        return self.worker.create_recorded_event()

    def _finished(self, which: int, request: str, ended: set[str]) -> set[str]:
        ended |= self.worker.get_finished({request})[which] or set()
        return ended

    @staticmethod
    def _operation(tokens: list[int], blocks: list[int]) -> LoadStoreOp:
        return LoadStoreOp(tokens, [blocks], 0, len(blocks) * BLOCK)


@contextmanager
def engine(url: str, seed: int) -> Iterator[Engine]:
    context = zmq.Context[zmq.Socket[bytes]]()
    made = Engine(url, context, seed)
    try:
        yield made
    finally:
        made.close()
        context.destroy(linger=0)


def test_kv_is_loaded_after_a_restart_of_server_and_engine(tmp_path: Path) -> None:
    tier, log = f"disk:{tmp_path / 'kv'}:256MiB", tmp_path / "log"
    written = list(range(5, 5 + 3 * PER_CHUNK))
    with lmcache_server.running(tier, log) as server, engine(server.url, seed=1) as first:
        request, count = first.hit(PROMPT)
        assert count == 0
        first.store(request, PROMPT, written)
        first.end(request)
        expected = first.contents(written)
        assert server.written(3)

    with lmcache_server.running(tier, log) as server, engine(server.url, seed=2) as second:
        assert second.hit(PROMPT, salt="another tenant")[1] == 0
        request, count = second.hit(PROMPT[: 2 * CHUNK] + [7] * CHUNK)
        assert count == 2 * CHUNK, "two chunks are equal"
        second.end(request)
        request, count = second.hit(PROMPT)
        assert count == 3 * CHUNK
        other = list(range(60, 60 + 3 * PER_CHUNK))
        untouched = [number for number in range(BLOCKS) if number not in other]
        before = second.contents(untouched)
        assert not torch.equal(second.contents(other), expected)
        second.load(request, PROMPT, other)
        assert torch.equal(second.contents(other), expected)
        assert torch.equal(second.contents(untouched), before), "no other block has changed"
        assert server.tier()["read"] >= 3
