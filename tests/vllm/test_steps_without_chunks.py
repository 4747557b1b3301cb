"""Steps in which a request completes no chunk: our scheduler side skips work that vLLM's does."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

from support.vllm_needs import CONNECTOR, lacks

if reason := lacks(*CONNECTOR):
    pytest.skip(reason, allow_module_level=True)

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
    GroupOffloadConfig,
    OffloadingConnectorScheduler,
    RequestOffloadState,
    SchedulerOffloadConfig,
)
from vllm.v1.kv_offload.base import ReqContext, RequestOffloadingContext
from vllm.v1.request import RequestStatus

from kvoffload.integrations.vllm.scheduler_side.scheduler import KVOffloadScheduler, RequestState

TOKENS_PER_HASH = 4


def config_of(chance: random.Random) -> SchedulerOffloadConfig:
    """Return a configuration of one or two KV groups, some of them of a draft model."""
    blocks_per_chunk = chance.randint(1, 3)
    groups = []
    for number in range(chance.randint(1, 2)):
        block_hashes = chance.choice([1, 2])
        groups.append(
            GroupOffloadConfig(
                group_idx=number,
                tokens_per_block=TOKENS_PER_HASH * block_hashes,
                tokens_per_chunk=TOKENS_PER_HASH * block_hashes * blocks_per_chunk,
                hashes_per_chunk=block_hashes * blocks_per_chunk,
                kv_event_group_spec=None,  # type: ignore[arg-type]
                sliding_window_size_in_chunks=None,
                kv_cache_spec=None,  # type: ignore[arg-type]
                manager_cls=None,  # type: ignore[arg-type]
                is_eagle_group=chance.random() < 0.3,
            )
        )
    return SchedulerOffloadConfig(
        kv_group_configs=tuple(groups),
        blocks_per_chunk=blocks_per_chunk,
        tokens_per_hash=TOKENS_PER_HASH,
        num_workers=1,
        offload_prompt_only=chance.random() < 0.5,
        supports_partial_tail=False,
    )


class Setting:
    """A request in a scheduler side, twice: with our class of its state, and with vLLM's."""

    def __init__(self, chance: random.Random) -> None:
        self.chance, self.config = chance, config_of(chance)
        self.request = SimpleNamespace(
            request_id="r",
            kv_transfer_params=chance.choice([None, {"max_offload_tokens": 20}]),
            num_prompt_tokens=chance.randint(1, 60),
            num_computed_tokens=0,
            num_tokens=0,
            block_hashes=[],
            status=RequestStatus.RUNNING,
            is_finished=lambda: False,
        )
        self.request.num_tokens = self.request.num_prompt_tokens
        self.ours, self.theirs = (self._state(), self._state())
        self.ours.__class__ = RequestState
        self.side: Any = KVOffloadScheduler.__new__(KVOffloadScheduler)
        self.side.config, self.side._req_status = self.config, {"r": self.ours}

    def _state(self) -> RequestOffloadState:
        request: Any = self.request
        return RequestOffloadState(self.config, request, ReqContext("r"), RequestOffloadingContext())

    def grow(self) -> None:
        """Add an answer's tokens, the hashes of full blocks, and GPU blocks."""
        if self.request.num_computed_tokens >= self.request.num_prompt_tokens:
            self.request.num_tokens += self.chance.randint(0, 3)
        while len(self.request.block_hashes) < self.request.num_tokens // TOKENS_PER_HASH:
            self.request.block_hashes.append(self.chance.randbytes(32))
        for state in (self.ours, self.theirs):
            state.update_offload_keys()
            for group, blocks in zip(self.config.kv_group_configs, state.group_states, strict=True):
                blocks.block_ids = list(range(1, self.request.num_tokens // group.tokens_per_block + 2))

    def has_new_chunk(self, step_tokens: int) -> bool:
        """Return True if vLLM's method would offer a chunk of the request after this step."""
        num_tokens = self.side._calc_num_offloadable_tokens(
            self.ours, self.request.num_computed_tokens + step_tokens
        )
        return any(
            self.ours.storable_chunks(group, state, num_tokens) > state.next_stored_chunk_idx
            for group, state in zip(self.config.kv_group_configs, self.ours.group_states, strict=True)
        )

    def store(self, step_tokens: int) -> None:
        """End a step as vLLM does if the manager takes the offered chunks."""
        self.request.num_computed_tokens += step_tokens
        self.ours.advance_stored_idx(
            self.side._calc_num_offloadable_tokens(self.ours, self.request.num_computed_tokens)
        )


def test_only_requests_without_a_new_chunk_are_skipped() -> None:
    """Random requests, configurations and steps; the manager refuses some offers."""
    seed = random.randrange(2**32)
    print("seed", seed)
    chance = random.Random(seed)
    skipped = offered = 0
    for _ in range(200):
        setting = Setting(chance)
        for _ in range(40):
            setting.grow()
            assert [state.offload_keys for state in setting.ours.group_states] == [
                state.offload_keys for state in setting.theirs.group_states
            ]
            left = setting.request.num_tokens - setting.request.num_computed_tokens
            step_tokens = chance.randint(0, left + 2)  # drafts may exceed the known tokens
            if setting.side._may_offer("r", step_tokens):
                offered += 1
            else:
                skipped += 1
                assert not setting.has_new_chunk(step_tokens)
            if chance.random() < 0.8:
                setting.store(min(step_tokens, left))
            else:
                setting.request.num_computed_tokens += min(step_tokens, left)
    assert skipped > 1000, "most steps complete no chunk"
    assert offered > 1000


def test_vllms_method_sees_the_other_requests_only(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, int]] = []

    def build(self: Any, output: Any) -> dict[int, Any]:
        seen.append(output.num_scheduled_tokens)
        return {3: output.finished_req_ids}

    monkeypatch.setattr(OffloadingConnectorScheduler, "_build_store_jobs", build)
    setting = Setting(random.Random(0))
    monkeypatch.setattr(setting.side, "_may_offer", lambda name, tokens: tokens > 1)
    output = SimpleNamespace(num_scheduled_tokens={"a": 1, "b": 8, "c": 1}, finished_req_ids={"d"})
    assert setting.side._build_store_jobs(output) == {3: {"d"}}
    assert seen == [{"b": 8}]
    assert output.num_scheduled_tokens == {"a": 1, "b": 8, "c": 1}


def test_a_new_request_with_the_id_of_an_aborted_one_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's method reads the step's tokens of the new request when it goes through the finished ids."""

    def build(self: Any, output: Any) -> dict[int, Any]:
        return {output.num_scheduled_tokens[name]: name for name in output.finished_req_ids}

    monkeypatch.setattr(OffloadingConnectorScheduler, "_build_store_jobs", build)
    setting = Setting(random.Random(0))
    output = SimpleNamespace(num_scheduled_tokens={"r": 1}, finished_req_ids={"r"})
    assert not setting.side._may_offer("r", 1)
    assert setting.side._build_store_jobs(output) == {1: "r"}
