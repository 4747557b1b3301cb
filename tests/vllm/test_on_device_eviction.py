"""The offers of a victim tier, with vLLM's own pool of blocks and without an engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support.vllm_needs import FENCES, lacks

if reason := lacks(*FENCES):
    pytest.skip(reason, allow_module_level=True)

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
    OffloadingConnectorScheduler,
)
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id

from kvoffload.integrations.vllm.scheduler_side.scheduler import NO_REQUEST, OnDeviceEvictionScheduler

TOKENS = 16


class Manager:
    """A stand-in for our manager: records offers, and accepts them if it has room."""

    def __init__(self) -> None:
        self.offered: list[str] = []
        self.kept: list[str] = []
        self.has_room = True

    def store_dropped(self, keys: list[bytes]) -> Any:
        self.offered.append(text(keys))
        return SimpleNamespace(keys_to_store=keys, store_spec="slots") if self.has_room else None

    def withdraw(self, request_id: str) -> None:
        """Do nothing when a request begins."""

    def keep_dropped(self, keys: list[bytes]) -> None:
        self.kept.append(text(keys))


def hash_of(letter: str, group: int = 0) -> Any:
    return make_block_hash_with_group_id(letter.encode() * 32, group)  # type: ignore[arg-type]


def text(keys: list[bytes]) -> str:
    return "".join(chr(key[0]) for key in keys)


class Setting:
    """A pool of blocks, watched by our scheduler side; a step takes 2 blocks."""

    def __init__(self, num_blocks: int = 12, groups: int = 1) -> None:
        self.pool = BlockPool(num_blocks + 1, enable_caching=True, hash_block_size=TOKENS)
        self.manager = Manager()
        self.side: Any = OnDeviceEvictionScheduler.__new__(OnDeviceEvictionScheduler)
        configs = tuple(
            SimpleNamespace(group_idx=group, tokens_per_block=TOKENS, requires_cow_source=group == 1)
            for group in range(groups)
        )
        self.side.__dict__.update(
            config=SimpleNamespace(kv_group_configs=configs, num_workers=2),
            manager=self.manager,
            _jobs={},
            _req_status={},
            _block_id_to_pending_jobs={},
            _job_counter=7,
        )
        self.side.bind(self.pool, step_tokens=2 * TOKENS)

    def run(self, letters: str, group: int = 0) -> list[Any]:
        """Let a request compute these blocks; they stay in use."""
        blocks = self.pool.get_new_blocks(len(letters))
        for letter, block in zip(letters, blocks, strict=True):
            self.pool._insert_block_hash(hash_of(letter, group), block, num_tokens=TOKENS)
        return blocks

    def find(self, blocks: list[Any]) -> None:
        """Begin a request that finds these blocks in the GPU's cache."""
        self.pool.touch(blocks)
        self.side.update_state_after_alloc(SimpleNamespace(request_id="a request"), "its blocks", 0)

    def free(self) -> list[Any]:
        """Return the free blocks in the order in which the pool takes them."""
        blocks: list[Any] = self.pool.free_block_queue.get_all_free_blocks()
        return blocks

    def finish(self, blocks: list[Any]) -> None:
        """End a request: vLLM frees the tail first."""
        self.pool.free_blocks(reversed(blocks))

    def step(self) -> dict[int, Any]:
        """End a step; its offers are in `manager.offered`."""
        self.manager.offered.clear()
        jobs: dict[int, Any] = self.side._build_store_jobs(
            SimpleNamespace(num_scheduled_tokens={}, finished_req_ids=set())
        )
        return jobs


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Number of calls of vLLM's own store path."""
    calls: list[int] = []

    def build(self: Any, output: Any) -> dict[int, Any]:
        calls.append(1)
        return {99: "of a request"}

    monkeypatch.setattr(OffloadingConnectorScheduler, "_build_store_jobs", build)
    monkeypatch.setattr(OffloadingConnectorScheduler, "update_state_after_alloc", lambda *arguments: None)
    return calls


def test_next_blocks_to_be_evicted_are_offered_once_the_warmest_first(at_once: list[int]) -> None:
    setting = Setting(6)
    setting.finish(setting.run("abcdef"))
    (job_id, job), *other_jobs = setting.step().items()
    assert (setting.manager.offered, other_jobs, at_once) == (["ef"], [], [])
    assert (job_id, job.req_id, job.dst_spec) == (7, NO_REQUEST, "slots")
    assert job.src_spec.block_ids.tolist() == [5, 6]
    assert job.src_spec.group_sizes == [2]
    assert setting.side._jobs[7].pending_count == 2
    assert setting.side._block_id_to_pending_jobs == {5: {7}, 6: {7}}
    assert setting.step() == {}
    assert setting.manager.offered == []


def test_the_free_list_is_not_changed() -> None:
    setting = Setting(6)
    setting.finish(setting.run("abcdef"))
    before = [block.block_id for block in setting.pool.free_block_queue.get_all_free_blocks()]
    setting.step()
    assert [block.block_id for block in setting.pool.free_block_queue.get_all_free_blocks()] == before
    assert setting.pool.get_num_free_blocks() == 6


def test_a_block_that_was_used_again_is_offered_again() -> None:
    setting = Setting(6)
    blocks = setting.run("abcdef")
    setting.finish(blocks)
    setting.step()
    setting.find([blocks[5]])
    setting.step()
    assert setting.manager.offered == ["d"]
    setting.finish([blocks[5]])
    for _ in range(4):
        setting.pool.get_new_blocks(1)
        setting.step()
    assert setting.manager.offered == ["f"]


@given(data=st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_window_is_followed_whatever_happens_to_the_free_list(data: Any) -> None:
    """Every block in the window was offered, once for each stay in the window."""
    setting, names = Setting(24), iter(range(10**6))
    setting.side.window.largest = data.draw(st.integers(2, 24))
    running: list[list[Any]] = []
    offered: dict[int, Any] = {}
    window: set[int] = set()
    store = setting.manager.store_dropped

    def store_dropped(keys: list[bytes]) -> Any:
        for block in setting.free():
            if not has_room and block.block_hash in keys:
                offered.pop(block.block_id, None)  # it left the window and came back: a new stay
            elif block.block_hash in keys:
                stays = block.block_id in window and offered.get(block.block_id) is block.block_hash
                assert not stays, "it has been offered"
                offered[block.block_id] = block.block_hash
        return store(keys) if has_room else None

    setting.manager.store_dropped = store_dropped  # type: ignore[method-assign]
    for _ in range(data.draw(st.integers(1, 40))):
        has_room = data.draw(st.integers(0, 9)) > 0
        for _ in range(data.draw(st.integers(0, 3))):
            free = setting.free()
            action = data.draw(st.sampled_from(["run", "decode", "finish", "find"]))
            if action in ("run", "decode") and free:
                blocks = setting.pool.get_new_blocks(data.draw(st.integers(1, min(6, len(free)))))
                if action == "run":
                    for block in blocks:
                        setting.pool._insert_block_hash(
                            make_block_hash_with_group_id(next(names).to_bytes(32, "big"), 0),  # type: ignore[arg-type]
                            block,
                            num_tokens=TOKENS,
                        )
                running.append(blocks)
            elif action == "finish" and running:
                setting.finish(running.pop(data.draw(st.integers(0, len(running) - 1))))
            elif action == "find":
                cached = [block for block in free if block.block_hash is not None]
                begin = data.draw(st.integers(0, len(cached)))
                result = cached[begin : begin + data.draw(st.integers(0, 4))]
                if result:
                    setting.find(result)
                    running.append(result)
        in_list = {block.block_id: block.block_hash for block in setting.free()}
        offered = {number: key for number, key in offered.items() if in_list.get(number) is key}
        window &= in_list.keys()
        setting.step()
        in_window = setting.free()[: setting.side.window.size]
        window = {block.block_id for block in in_window}
        if has_room:
            for block in in_window:
                if block.block_hash is not None:
                    assert offered.get(block.block_id) is block.block_hash


def test_blocks_without_a_hash_and_of_other_groups_are_left_out() -> None:
    setting = Setting(6, groups=2)
    setting.finish(setting.run("a") + setting.pool.get_new_blocks(1))
    setting.finish(setting.run("bc", group=1) + setting.run("d", group=5))
    setting.side.window.size = 6
    setting.step()
    assert setting.manager.offered == ["a"]


def test_without_room_the_offer_is_made_again() -> None:
    setting = Setting(4)
    setting.finish(setting.run("abcd"))
    setting.manager.has_room = False
    assert setting.step() == {}
    setting.manager.has_room = True
    assert len(setting.step()) == 1
    assert setting.manager.offered == ["cd"]


def test_blocks_dropped_without_an_offer_are_reported() -> None:
    setting = Setting(8)
    setting.finish(setting.run("abcdefgh"))
    setting.step()
    setting.pool.get_new_blocks(4)
    setting.step()
    assert setting.manager.kept == ["ef"], "g and h had been offered"
    assert setting.side.window.size == 4
    assert setting.manager.offered == ["abcd"]


def test_the_window_follows_the_largest_step_and_fades() -> None:
    setting = Setting(40)
    setting.finish(setting.run("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMN"))
    setting.pool.get_new_blocks(8)
    setting.step()
    assert setting.side.window.size == 12
    for letter in "opqrstuv":
        setting.finish(setting.run(letter))
        setting.step()
    assert setting.side.window.size == 11
    setting.pool.get_new_blocks(26)
    setting.step()
    assert setting.side.window.size == 20, "half of the pool"


def test_few_free_blocks_fall_back_to_storing_at_once(at_once: list[int]) -> None:
    setting = Setting(4)
    blocks = setting.run("abcd")
    assert setting.step() == {99: "of a request"}
    setting.finish(blocks[3:])
    assert set(setting.step()) == {99, 7}
    setting.finish(blocks[2:3])
    assert 99 not in setting.step()
    assert len(at_once) == 2


def test_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OffloadingConnectorScheduler, "reset_cache", lambda self: None)
    setting = Setting(4)
    setting.finish(setting.run("abcd"))
    setting.step()
    setting.side.reset_cache()
    setting.step()
    assert setting.manager.offered == ["cd"]
