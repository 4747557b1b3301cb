"""Blocks that vLLM has cached but not computed, because it preempted their request in the same step."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from support.vllm_needs import CONNECTOR, lacks

if reason := lacks(*CONNECTOR):
    pytest.skip(reason, allow_module_level=True)

import torch
from vllm import SamplingParams
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import (
    get_request_block_hasher,
    init_none_hash,
    make_block_hash_with_group_id,
)
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

from kvoffload.integrations.vllm.scheduler_side.uncomputed import Uncomputed
from support.vllm_engine import write_llama

# vLLM's warnings are not ours.
pytestmark = pytest.mark.filterwarnings("ignore")

TOKENS = 16
HASHES = [bytes([number]) * 32 for number in range(8)]


class Setting:
    """A pool with the blocks of a request, in two KV groups: blocks of 16 and of 32 tokens."""

    def __init__(self) -> None:
        self.pool = BlockPool(32, enable_caching=True, hash_block_size=TOKENS)
        self.side = Uncomputed(self.pool, {0: 16, 1: 32}, TOKENS, step_tokens=64)
        self.request = SimpleNamespace(block_hashes=HASHES, num_computed_tokens=0, num_tokens=128)
        self.statuses = {"r": SimpleNamespace(req=self.request)}

    def cache(self, group: int, *numbers: int) -> None:
        """Cache blocks like vLLM; a block's number is the number of its last hash."""
        for number, block in zip(numbers, self.pool.get_new_blocks(len(numbers)), strict=True):
            key = make_block_hash_with_group_id(HASHES[number], group)  # type: ignore[arg-type]
            self.pool._insert_block_hash(key, block, num_tokens=TOKENS)

    def cached(self, group: int) -> list[int]:
        return [n for n, key in enumerate(HASHES) if self.pool.get_cached_block(key, [group])]  # type: ignore[arg-type]

    def step(self, *, scheduled: int = 0, preempted: bool = False, finished: bool = False) -> None:
        output = SimpleNamespace(
            num_scheduled_tokens={"r": scheduled} if scheduled else {},
            preempted_req_ids={"r"} if preempted else set(),
            finished_req_ids={"r"} if finished else set(),
        )
        self.side.end_step(output, self.statuses)


def test_blocks_of_a_step_that_does_not_run_leave_the_cache() -> None:
    setting = Setting()
    setting.cache(0, 0, 1, 2)
    setting.cache(1, 1)
    setting.step(scheduled=55)
    setting.cache(0, 3, 4, 5, 5)
    setting.cache(1, 3, 5)
    setting.step(preempted=True)
    assert (setting.cached(0), setting.cached(1)) == ([0, 1, 2], [1])


def test_a_request_that_was_preempted_before_the_step_loses_nothing() -> None:
    setting = Setting()
    setting.cache(0, 0, 1, 2, 7)
    setting.step(scheduled=48)
    setting.step(preempted=True)
    assert setting.cached(0) == [0, 1, 2, 7], "a block beyond the step's tokens belongs to another request"
    setting.step(scheduled=16, preempted=True)
    setting.step(finished=True)
    setting.step(preempted=True)
    assert setting.cached(0) == [0, 1, 2, 7]


def test_rejected_draft_tokens_are_not_computed() -> None:
    setting = Setting()
    setting.request.num_computed_tokens, setting.request.num_tokens = 47, 48
    setting.cache(0, 0, 1, 2)
    setting.step(scheduled=20)
    setting.cache(0, 3)
    setting.step(preempted=True)
    assert setting.cached(0) == [0, 1, 2]


def scheduler(directory: Path, store: str, policy: str) -> Any:
    """Return vLLM's scheduler with our connector, for 14 blocks, without an engine."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import generate_scheduler_kv_cache_config, get_kv_cache_configs
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    config = EngineArgs(
        model=str(write_llama(directory / "llama")),
        skip_tokenizer_init=True,
        dtype="float32",
        block_size=TOKENS,
        max_model_len=224,
        max_num_batched_tokens=64,
        scheduling_policy=policy,  # type: ignore[arg-type]
        num_gpu_blocks_override=15,
        async_scheduling=False,
        kv_transfer_config={  # type: ignore[arg-type]
            "kv_connector": "KVOffloadConnector",
            "kv_connector_module_path": "kvoffload.integrations.vllm.connector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"ram": "1MiB", "store": store},
        },
    ).create_engine_config()
    config.cache_config.kv_cache_layout = "LBHNC"
    config.scheduler_config.long_prefill_token_threshold = 32
    config.scheduler_config.long_prefill_token_threshold_adaptive = False
    spec = FullAttentionSpec(block_size=TOKENS, num_kv_heads=1, head_size=64, dtype=torch.float32)
    cache = generate_scheduler_kv_cache_config(get_kv_cache_configs(config, [{"layer.0": spec}], [2**24]))
    config.cache_config.num_gpu_blocks = cache.num_blocks
    init_none_hash(sha256)
    return Scheduler(
        vllm_config=config,
        kv_cache_config=cache,
        structured_output_manager=MagicMock(),
        block_size=TOKENS,
        hash_block_size=TOKENS,
        log_stats=True,
    )


@pytest.mark.slow
@pytest.mark.parametrize("store", ["on-device-eviction", "on-compute"])
def test_a_step_that_withdraws_a_request_leaves_no_uncomputed_block(tmp_path: Path, store: str) -> None:
    """`high` needs a block in the step that gives the last two blocks to `low`."""
    from vllm.utils.hashing import sha256

    side = scheduler(tmp_path, store, "priority")
    hasher = get_request_block_hasher(TOKENS, sha256)
    low, high = (
        Request(
            name, tokens, SamplingParams(max_tokens=99, ignore_eos=True), None,
            priority=priority, block_hasher=hasher,
        )
        for name, tokens, priority in (("low", [*range(1, 201)], 9), ("high", [*range(301, 331)], 0))
    )  # fmt: skip
    pool, num_computed, stored = side.kv_cache_manager.block_pool, 0, set[bytes]()
    side.add_request(low)
    for number in range(8):
        output = side.schedule()
        if number == 0:
            side.add_request(high)
        jobs = side.connector.connector_scheduler._jobs.values()
        stored |= {key for job in jobs for key in job.keys}
        if output.preempted_req_ids:
            break
        num_computed = low.num_computed_tokens
        names = list(output.num_scheduled_tokens)
        requests = [side.requests[name] for name in names]
        tokens = [[7] if request.num_computed_tokens >= request.num_tokens else [] for request in requests]
        side.update_from_output(
            output,
            ModelRunnerOutput(
                req_ids=names,
                req_id_to_index={name: row for row, name in enumerate(names)},
                sampled_token_ids=tokens,
                logprobs=None,
                prompt_logprobs_dict={},
                pooler_output=[],
            ),
        )
    assert output.preempted_req_ids == {"low"}
    assert num_computed == 160
    keys = [bytes(make_block_hash_with_group_id(block_hash, 0)) for block_hash in low.block_hashes]
    assert [key in stored for key in keys] == [True] * 10 + [False] * 2
    cached = [bool(pool.get_cached_block(block_hash, [0])) for block_hash in low.block_hashes]
    assert cached == [True] * 10 + [False] * 2
    side.connector.shutdown()
