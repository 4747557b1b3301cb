"""vLLM's offloading manager without a GPU, for comparisons: its decisions with our copies.

``CPUOffloadingSpec`` refuses to make a worker on a CPU. Here kvoffload's worker executes vLLM's
specifications, so that both sides of a comparison copy in the same way.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

from kvoffload.integrations.vllm.shared.pool import SharedPool
from kvoffload.integrations.vllm.spec import copies_for
from kvoffload.integrations.vllm.worker_side.layout import Layout
from kvoffload.integrations.vllm.worker_side.slots_spec import SlotsSpec
from kvoffload.integrations.vllm.worker_side.worker import KVOffloadWorker


class _Worker(KVOffloadWorker):
    """Worker that also stores incomplete chunks."""

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return super().submit_store(job_id, src_spec, SlotsSpec(dst_spec.block_ids))


class NativeOnCPU(CPUOffloadingSpec):  # type: ignore[misc]
    """vLLM's manager and policies with a worker for CPU tensors; for one worker."""

    def get_worker(self, kv_caches: Any) -> KVOffloadWorker:
        """Return our worker with its own pool, of the size that vLLM's manager assumes."""
        layout = Layout.of(kv_caches, self.blocks_per_chunk)
        pool = SharedPool.attach(
            self.config.engine_id,
            member=0,
            num_members=1,
            num_parts=1,
            part_bytes=layout.part_bytes,
            capacity_bytes=self.num_chunks * self.kv_bytes_per_chunk,
        )
        assert pool.num_slots >= self.num_chunks
        copies = copies_for(kv_caches, layout, pool, 0)
        return _Worker(pool, 0, copies, blocks_per_chunk=self.blocks_per_chunk, seal=False)
