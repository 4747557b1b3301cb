"""Older interfaces, by key: all of `kvoffload.integrations.by_key`."""

from __future__ import annotations

import pytest

from kvoffload import ConfigError, LookupResult, MisuseError, OffloadingManager
from kvoffload.core.policy import POLICIES
from kvoffload.integrations.by_key import (
    AbstractOffloadingManager,
    ARCOffloadingManager,
    BlockPool,
    CPUBlockPool,
    CPULoadStoreSpec,
    CPUOffloadingManager,
    FilterReusedOffloadingManager,
    LoadStoreSpec,
    LRUOffloadingManager,
    PrepareStoreOutput,
)
from kvoffload.testing.audit import audit
from support.naive.lru import NaiveLRU


def key(number: int) -> bytes:
    return number.to_bytes(32, "little")


def keys(*numbers: int) -> list[bytes]:
    return [key(number) for number in numbers]


def store(manager: AbstractOffloadingManager, *numbers: int) -> PrepareStoreOutput:
    output = manager.prepare_store(keys(*numbers))
    assert output is not None
    manager.complete_store(output.keys_to_store)
    return output


@pytest.mark.parametrize("manager_class", [LRUOffloadingManager, ARCOffloadingManager])
def test_abstract_manager_primitives(manager_class: type[LRUOffloadingManager]) -> None:
    manager: AbstractOffloadingManager = manager_class(CPUBlockPool(16, 3), enable_events=True)
    assert manager.lookup(keys(1, 2, 3)) == 0
    output = manager.prepare_store(keys(1, 2, 3))
    assert isinstance(output, PrepareStoreOutput)
    assert output.keys_to_store == keys(1, 2, 3)
    assert output.evicted_keys == []
    assert isinstance(output.store_spec, CPULoadStoreSpec)
    assert output.store_spec.block_ids == [0, 1, 2]
    assert output.store_spec.medium() == "CPU"
    assert manager.lookup(keys(1, 2, 3)) == 0, "in flight is not ready"
    manager.complete_store(reversed(keys(1, 2, 3)))  # in any order
    assert manager.lookup(keys(1, 2, 3, 4)) == 3
    spec = manager.prepare_load(keys(1, 2))
    assert isinstance(spec, CPULoadStoreSpec)
    assert spec.block_ids == [0, 1]
    assert manager.prepare_store(keys(4, 5, 6)).keys_to_store == keys(4), "1 and 2 are protected"  # type: ignore[union-attr]
    manager.complete_store(keys(4))
    manager.complete_load({key(1), key(2)})  # unordered
    manager.touch(keys(1, 2))
    events = list(manager.take_events())
    assert [(event.removed, list(event.keys)) for event in events] == [
        (False, keys(3)), (False, keys(2)), (False, keys(1)), (True, keys(3)), (False, keys(4)),
    ]  # fmt: skip
    assert {(event.block_size, event.medium) for event in events} == {(16, "CPU")}
    assert list(manager.take_events()) == []


def test_touch_changes_the_victim() -> None:
    manager = LRUOffloadingManager(CPUBlockPool(16, 2))
    store(manager, 1)
    store(manager, 2)
    manager.touch(keys(1))
    assert store(manager, 3).evicted_keys == keys(2)


def test_failed_store_frees_its_block() -> None:
    pool = CPUBlockPool(16, 2)
    manager = LRUOffloadingManager(pool)
    manager.prepare_store(keys(1, 2))
    manager.complete_store(keys(1), success=False)
    manager.complete_store(keys(2))
    assert manager.lookup(keys(2)) == 1
    assert manager.lookup(keys(1)) == 0
    assert pool.get_num_free_blocks() == 1
    assert store(manager, 3).evicted_keys == []
    audit(manager.manager)


class NamedPool(BlockPool):
    """A pool of another medium: pages of files, allocated by key."""

    block_size = 4
    medium = "PAGES"

    def __init__(self) -> None:
        self.used: dict[int, bytes] = {}

    def get_num_free_blocks(self) -> int:
        return 3 - len(self.used)

    def allocate_block(self, key: bytes) -> int:
        block = next(number for number in (700, 800, 900) if number not in self.used)
        self.used[block] = key
        return block

    def free(self, block_id: int) -> None:
        del self.used[block_id]

    def get_load_store_spec(self, block_ids: list[int]) -> LoadStoreSpec:  # type: ignore[override]
        return PagesSpec([self.used[block] for block in block_ids])


class PagesSpec(LoadStoreSpec):
    def __init__(self, pages: list[bytes]) -> None:
        self.pages = pages

    @staticmethod
    def medium() -> str:
        return "PAGES"


@pytest.mark.parametrize("manager_class", [LRUOffloadingManager, ARCOffloadingManager])
def test_pluggable_block_pool(manager_class: type[LRUOffloadingManager]) -> None:
    pool = NamedPool()
    manager = manager_class(pool, enable_events=True)
    for start in range(0, 30, 3):
        store(manager, start, start + 1, start + 2)
        assert set(pool.used.values()) == set(keys(start, start + 1, start + 2))
        spec = manager.prepare_load(keys(start, start + 2))
        assert isinstance(spec, PagesSpec)
        assert spec.pages == keys(start, start + 2)
        manager.complete_load(keys(start, start + 2))
    assert {event.medium for event in manager.take_events()} == {"PAGES"}


@pytest.mark.parametrize("policy", [*POLICIES.names(), "support.naive.lru:NaiveLRU", NaiveLRU])
def test_cpu_manager_with_cache_policy_by_name(policy: str) -> None:
    manager = CPUOffloadingManager(4, cache_policy=policy, enable_events=True)
    for number in range(20):
        store(manager, number, number + 100)
    assert manager.lookup(keys(19, 119)) == 2
    audit(manager.manager)
    allowed = ", ".join(POLICIES.names())
    with pytest.raises(ConfigError, match=f"policy: 'mru' is invalid; allowed: {allowed}"):
        CPUOffloadingManager(4, cache_policy="mru")


def test_reuse_filter_as_decorator() -> None:
    manager = FilterReusedOffloadingManager(
        LRUOffloadingManager(CPUBlockPool(16, 9), True), store_threshold=2
    )
    manager.lookup(keys(1, 2))
    assert store(manager, 1, 2).keys_to_store == []
    manager.lookup(keys(1, 2, 3))
    assert store(manager, 1, 2, 3).keys_to_store == keys(1, 2)
    assert manager.lookup(keys(1, 2, 3)) == 2
    manager.prepare_load(keys(1))
    manager.complete_load(keys(1))
    manager.touch(keys(1))
    assert [list(event.keys) for event in manager.take_events()] == [keys(1), keys(2)]


@pytest.mark.parametrize("threshold", [-1, 0, 1])
def test_reuse_filter_refuses_invalid_values(threshold: int) -> None:
    with pytest.raises(ConfigError, match="store_threshold"):
        FilterReusedOffloadingManager(LRUOffloadingManager(CPUBlockPool(16, 9)), store_threshold=threshold)
    if threshold < 1:
        with pytest.raises(ConfigError, match="store_threshold"):
            CPUOffloadingManager(9, store_threshold=threshold)
    with pytest.raises(ConfigError, match="max_tracker_size"):
        CPUOffloadingManager(9, store_threshold=2, max_tracker_size=0)


def test_reuse_filter_built_in_and_off_by_default() -> None:
    assert CPUOffloadingManager(9).manager.admission is None
    assert store(CPUOffloadingManager(9), 1).keys_to_store == keys(1)
    gated = CPUOffloadingManager(9, store_threshold=2)
    for expected in ([], keys(1, 2)):
        ctx = gated.begin_request("r")
        output = gated.prepare_store(keys(1, 2), ctx)
        assert output is not None
        assert output.keys_to_store == expected
        gated.finish_request(ctx)


def test_counting_at_the_end_of_a_request() -> None:
    manager = OffloadingManager(9, admission="reuse:2")
    ctx = manager.begin_request("asks often")
    for _ in range(5):
        manager.lookup(keys(1), ctx)
    assert manager.admission is not None
    assert manager.admission.leading(manager.pack(keys(1))) == 0
    manager.finish_request(ctx)
    assert manager.admission.tracked() == {key(1): 1}  # type: ignore[attr-defined]


def test_lookup_answers_a_length_and_per_key_a_state() -> None:
    manager = CPUOffloadingManager(9)
    store(manager, 1, 2)
    manager.prepare_store(keys(1, 2, 3))
    ctx = manager.begin_request("r")
    assert manager.lookup(keys(1, 2, 3, 4), ctx) == 2
    assert [manager.lookup_key(key(number), ctx) for number in (1, 2, 3, 4)] == [
        LookupResult.HIT, LookupResult.HIT, LookupResult.HIT_PENDING, LookupResult.MISS,
    ]  # fmt: skip
    manager.finish_request(ctx)


@pytest.mark.parametrize("call", ["complete_load", "complete_store"])
def test_misuse_names_the_key(call: str) -> None:
    manager = CPUOffloadingManager(2)
    with pytest.raises(MisuseError, match=f"{call} of a block that was not prepared: key {key(7).hex()}"):
        getattr(manager, call)(keys(7))
