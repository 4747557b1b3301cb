"""Managers with the interface of vLLM's first offloading managers, for engines and tests written against it.

The interface passes keys in every call, and lets the caller plug in the pool that allocates blocks. Each
manager is a thin layer over an `OffloadingManager`. New code should call `OffloadingManager` directly, which
is faster because it creates no Python object for each key.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from kvoffload.admission.reuse import DEFAULT_TRACKER_SIZE, ReuseAdmission
from kvoffload.core.manager import OffloadingManager
from kvoffload.core.plans import LoadPlan, LookupResult, OffloadingEvent, StorePlan
from kvoffload.core.policy import EvictionPolicy
from kvoffload.core.request import RequestContext
from kvoffload.errors import ConfigError, MisuseError
from kvoffload.structures.keys import Keys, OffloadKey

Plan = TypeVar("Plan", LoadPlan, StorePlan)


class LoadStoreSpec(ABC):
    """The location of blocks that a worker reads or writes. Only the pool and the worker interpret it."""

    @staticmethod
    @abstractmethod
    def medium() -> str:
        """Return the name of the medium, which selects a worker."""


class CPULoadStoreSpec(LoadStoreSpec):
    """The location of blocks in host RAM: the number of each block, in the order of the keys."""

    def __init__(self, block_ids: Sequence[int]) -> None:
        self.block_ids = list(block_ids)

    @staticmethod
    def medium() -> str:
        return "CPU"

    def __repr__(self) -> str:
        return f"CPULoadStoreSpec({self.block_ids})"


@dataclass
class PrepareStoreOutput:
    """The keys to store, their location, and the keys of the evicted blocks."""

    keys_to_store: list[OffloadKey]
    store_spec: LoadStoreSpec
    evicted_keys: list[OffloadKey]


class BlockPool(ABC):
    """Interface for an allocator of blocks, which users of the managers can implement."""

    block_size: int
    """Number of tokens in a block, for events."""
    medium: str

    @abstractmethod
    def get_num_free_blocks(self) -> int:
        """Return the number of free blocks. Called once, by the manager's constructor."""

    @abstractmethod
    def allocate_block(self, key: OffloadKey) -> int:
        """Allocate a free block; return its number."""

    @abstractmethod
    def free(self, block_id: int) -> None:
        """Free a block."""

    @abstractmethod
    def get_load_store_spec(self, block_ids: Sequence[int]) -> LoadStoreSpec:
        """Return the location of these blocks, for the worker."""


class CPUBlockPool(BlockPool):
    """A pool of block numbers in host RAM."""

    medium = "CPU"

    def __init__(self, block_size: int, num_blocks: int) -> None:
        self.block_size = block_size
        self._free = list(range(num_blocks - 1, -1, -1))

    def get_num_free_blocks(self) -> int:
        return len(self._free)

    def allocate_block(self, key: OffloadKey) -> int:
        return self._free.pop()

    def free(self, block_id: int) -> None:
        self._free.append(block_id)

    def get_load_store_spec(self, block_ids: Sequence[int]) -> LoadStoreSpec:
        return CPULoadStoreSpec(block_ids)


class AbstractOffloadingManager(ABC):
    """Interface of the managers: seven operations on batches of keys."""

    @abstractmethod
    def lookup(self, keys: Sequence[OffloadKey]) -> int:
        """Return the number of ready blocks before the first block that is not ready."""

    @abstractmethod
    def prepare_load(self, keys: Sequence[OffloadKey]) -> LoadStoreSpec:
        """Protect blocks from eviction and return their location."""

    @abstractmethod
    def touch(self, keys: Sequence[OffloadKey]) -> None:
        """Record a use of blocks. Also called for blocks that the device or another tier served."""

    @abstractmethod
    def complete_load(self, keys: Iterable[OffloadKey]) -> None:
        """Unpin blocks that `prepare_load` has pinned.

        One call may unpin blocks of several `prepare_load` calls, and these may complete in any order.
        """

    @abstractmethod
    def prepare_store(self, keys: Sequence[OffloadKey]) -> PrepareStoreOutput | None:
        """Reserve room for blocks, and evict other blocks if necessary. Returns None if there is no room."""

    @abstractmethod
    def complete_store(self, keys: Iterable[OffloadKey], success: bool = True) -> None:
        """End a store: make the prepared blocks loadable, or forget them if `success` is False."""

    @abstractmethod
    def take_events(self) -> Iterable[OffloadingEvent]:
        """Return the events since the last call: blocks stored and removed."""


class PooledOffloadingManager(AbstractOffloadingManager):
    """An `OffloadingManager` whose calls take keys, and whose blocks a `BlockPool` allocates.

    Args:
        pool: the allocator, used by this manager only.
        policy: the eviction policy, as for `OffloadingManager`.
        store_threshold: number of requests that must refer to a block before it is admitted; 1 admits every
            block.
        max_tracker_size: number of keys whose references are counted, for `store_threshold`.
        key_bytes: length of every key.
        enable_events: True to record events for `take_events`.
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        policy: str | type[EvictionPolicy] = "lru",
        store_threshold: int = 1,
        max_tracker_size: int = DEFAULT_TRACKER_SIZE,
        key_bytes: int = 32,
        enable_events: bool = False,
    ) -> None:
        if store_threshold < 1:
            raise ConfigError("store_threshold", store_threshold, "allowed: 1 or more; 1 admits every block")
        gated = store_threshold > 1
        self.pool = pool
        self.manager = OffloadingManager(
            pool.get_num_free_blocks(),
            key_bytes=key_bytes,
            policy=policy,
            admission=ReuseAdmission(key_bytes, store_threshold, max_tracker_size) if gated else None,
            enable_events=enable_events,
            medium=pool.medium,
            block_size=pool.block_size,
        )
        self._blocks: dict[int, int] = {}
        self._loads: defaultdict[OffloadKey, list[LoadPlan]] = defaultdict(list)
        self._stores: defaultdict[OffloadKey, list[StorePlan]] = defaultdict(list)

    def begin_request(self, request_id: str) -> RequestContext:
        """Begin a request; return its context. A call without a context counts as a separate request."""
        return self.manager.begin_request(request_id)

    def finish_request(self, ctx: RequestContext) -> None:
        """End a request. The policy then counts the uses of the request: one use of each block."""
        self.manager.finish_request(ctx)

    def lookup(self, keys: Sequence[OffloadKey], ctx: RequestContext | None = None) -> int:
        return self.manager.lookup(keys, ctx).num_ready

    def lookup_key(self, key: OffloadKey, ctx: RequestContext | None = None) -> LookupResult:
        """Return the state of one block: `HIT`, `HIT_PENDING` (in flight) or `MISS`."""
        return self.manager.lookup_key(key, ctx)

    def prepare_load(self, keys: Sequence[OffloadKey], ctx: RequestContext | None = None) -> LoadStoreSpec:
        plan = self.manager.prepare_load(keys, ctx)
        for block_plan in plan.split():
            self._loads[block_plan.keys[0]].append(block_plan)
        return self.pool.get_load_store_spec([self._blocks[slot] for slot in plan.slots.tolist()])

    def touch(self, keys: Sequence[OffloadKey], ctx: RequestContext | None = None) -> None:
        self.manager.touch(keys, ctx)

    def complete_load(self, keys: Iterable[OffloadKey]) -> None:
        for key in keys:
            self.manager.complete_load(_pop_plan(self._loads, key, "complete_load"))

    def prepare_store(
        self, keys: Sequence[OffloadKey], ctx: RequestContext | None = None
    ) -> PrepareStoreOutput | None:
        plan = self.manager.prepare_store(keys, ctx)
        if plan is None:
            return None
        slots = plan.slots.tolist()
        for slot in slots[len(slots) - len(plan.evicted) :]:
            self.pool.free(self._blocks[slot])
        for block_plan, slot in zip(plan.split(), slots, strict=True):
            self._stores[block_plan.keys[0]].append(block_plan)
            self._blocks[slot] = self.pool.allocate_block(block_plan.keys[0])
        spec = self.pool.get_load_store_spec([self._blocks[slot] for slot in slots])
        return PrepareStoreOutput(list(plan.keys), spec, list(plan.evicted))

    def complete_store(self, keys: Iterable[OffloadKey], success: bool = True) -> None:
        for key in keys:
            plan = _pop_plan(self._stores, key, "complete_store")
            self.manager.complete_store(plan, success)
            if not success:
                self.pool.free(self._blocks.pop(int(plan.slots[0])))

    def take_events(self) -> list[OffloadingEvent]:
        return self.manager.take_events()


class LRUOffloadingManager(PooledOffloadingManager):
    """A manager with the policy ``lru``, for any `BlockPool`."""

    def __init__(self, pool: BlockPool, enable_events: bool = False, key_bytes: int = 32) -> None:
        super().__init__(pool, policy="lru", enable_events=enable_events, key_bytes=key_bytes)


class ARCOffloadingManager(PooledOffloadingManager):
    """A manager with the policy ``arc``, for any `BlockPool`."""

    def __init__(self, pool: BlockPool, enable_events: bool = False, key_bytes: int = 32) -> None:
        super().__init__(pool, policy="arc", enable_events=enable_events, key_bytes=key_bytes)


class CPUOffloadingManager(PooledOffloadingManager):
    """A manager of blocks in host RAM with a policy chosen by name and a built-in reuse filter."""

    def __init__(
        self,
        num_blocks: int,
        cache_policy: str | type[EvictionPolicy] = "lru",
        enable_events: bool = False,
        store_threshold: int = 1,
        max_tracker_size: int = DEFAULT_TRACKER_SIZE,
        block_size: int = 0,
        key_bytes: int = 32,
    ) -> None:
        super().__init__(
            CPUBlockPool(block_size, num_blocks),
            policy=cache_policy,
            store_threshold=store_threshold,
            max_tracker_size=max_tracker_size,
            key_bytes=key_bytes,
            enable_events=enable_events,
        )


class FilterReusedOffloadingManager(AbstractOffloadingManager):
    """A wrapper that makes any manager admit a block only after several lookups (a reuse filter).

    `lookup` counts references to each block; `prepare_store` admits the blocks with enough references.

    The wrapper cannot see requests, so every lookup counts as a reference. The filter inside kvoffload's own
    managers (`store_threshold`, or ``admission="reuse:N"``) counts a block only once per request.
    """

    def __init__(
        self,
        backing: AbstractOffloadingManager,
        store_threshold: int = 2,
        max_tracker_size: int = DEFAULT_TRACKER_SIZE,
        key_bytes: int = 32,
    ) -> None:
        self._backing, self._key_bytes = backing, key_bytes
        self._gate = ReuseAdmission(key_bytes, store_threshold, max_tracker_size)

    def lookup(self, keys: Sequence[OffloadKey]) -> int:
        self._gate.count(Keys.pack(list(dict.fromkeys(keys)), self._key_bytes))
        return self._backing.lookup(keys)

    def prepare_load(self, keys: Sequence[OffloadKey]) -> LoadStoreSpec:
        return self._backing.prepare_load(keys)

    def touch(self, keys: Sequence[OffloadKey]) -> None:
        self._backing.touch(keys)

    def complete_load(self, keys: Iterable[OffloadKey]) -> None:
        self._backing.complete_load(keys)

    def prepare_store(self, keys: Sequence[OffloadKey]) -> PrepareStoreOutput | None:
        return self._backing.prepare_store(keys[: self._gate.leading(Keys.pack(keys, self._key_bytes))])

    def complete_store(self, keys: Iterable[OffloadKey], success: bool = True) -> None:
        self._backing.complete_store(keys, success)

    def take_events(self) -> Iterable[OffloadingEvent]:
        return self._backing.take_events()


def _pop_plan(plans: defaultdict[OffloadKey, list[Plan]], key: OffloadKey, call: str) -> Plan:
    if not plans.get(key):
        raise MisuseError(f"{call} of a block that was not prepared: key {key.hex()}")
    plan = plans[key].pop()
    if not plans[key]:
        del plans[key]
    return plan
