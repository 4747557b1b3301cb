"""kvoffload's policies for vLLM's own offloading manager, for users who do not replace this manager.

    "kv_connector_extra_config": {"cpu_bytes_to_use": 68719476736, "eviction_policy": "hazard",
                                  "cache_policy_module_path": "kvoffload.integrations.vllm.policies"}

``eviction_policy`` is a policy name of kvoffload, ``module:Class`` or ``path/to/file.py:Class``. The names
``lru`` and ``arc`` mean vLLM's own policies; for kvoffload's, write ``kvoffload-lru`` and ``kvoffload-arc``.
Needs vLLM 0.27 or later, because older versions do not load policies by module path.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

from vllm.v1.kv_offload.cpu.policies.base import CachePolicy

from kvoffload.core.manager import OffloadingManager
from kvoffload.core.plans import LoadPlan, StorePlan
from kvoffload.core.policy import POLICIES
from kvoffload.core.request import RequestContext
from kvoffload.errors import PolicyError
from kvoffload.integrations.vllm.shared.logs import logger

PREFIX = "kvoffload-"
_MAX_ABSENT = 100_000


def __getattr__(name: str) -> Any:
    """Return the policy class for a value of ``eviction_policy``, which vLLM reads as an attribute."""
    if name.startswith("__"):
        raise AttributeError(name)
    policy = name.removeprefix(PREFIX)
    POLICIES.find(policy)
    return type(f"VLLMPolicy({policy})", (VLLMPolicy,), {"policy": policy})


class _Request:
    """kvoffload's record of a vLLM request, with keys that were absent when offered or touched."""

    def __init__(self, owner: VLLMPolicy, ctx: RequestContext) -> None:
        self.owner, self.ctx, self.missed = owner, ctx, set[bytes]()


class VLLMPolicy(CachePolicy):
    """Adapter that lets vLLM's offloading manager use a policy of kvoffload.

    vLLM's manager first asks for victims and later inserts the new blocks, one by one. kvoffload's policies
    choose victims and insert new blocks in one batch. Therefore this class keeps a copy of the states of
    vLLM's blocks in an `OffloadingManager`. The first call for a batch makes a plan in this manager; the
    following calls read the plan.

    Differences from kvoffload inside vLLM (`KVOffloadSpec`):

    - vLLM stores either all blocks of an offer or none.
    - The admission rule is vLLM's.
    - A policy cannot refuse a block.

    As with `KVOffloadSpec`, a request never evicts blocks on its own path. When the request finishes, its
    whole path counts as used, including blocks that the device served. vLLM's own policies see only blocks
    that were loaded or offered.

    Thread: the scheduler's. Cost: the calls of `OffloadingManager`, plus a call of vLLM for each block.
    """

    policy: ClassVar[str] = "lru"

    def __init__(self, cache_capacity: int) -> None:
        super().__init__(cache_capacity)
        self.chunks: dict[bytes, Any] = {}
        self._evictable: set[bytes] = set()
        self._manager: OffloadingManager | None = None
        self._current: _Request | None = None
        self._absent: dict[bytes, None] = {}
        self._storing: dict[bytes, StorePlan] = {}
        self._expected: set[bytes] = set()
        self._loading: dict[bytes, LoadPlan] = {}

    # ---- called by vLLM's manager

    def get(self, key: bytes) -> Any:
        chunk = self.chunks.get(key)
        if chunk is None:
            # vLLM looks up every offered block before a store, so lookups show the order of the blocks.
            if len(self._absent) >= _MAX_ABSENT:
                self._absent.clear()
            self._absent.pop(key, None)
            self._absent[key] = None
        return chunk

    def on_store_miss(self, keys: Iterable[bytes], req_context: Any) -> None:
        missed = list(keys)
        self._current = self._request(req_context, missed)
        self._current.missed.update(missed)

    def evict(self, n: int, protected: set[bytes]) -> list[tuple[bytes, Any]] | None:
        if n == 0:
            return []
        self._forget_expected()
        entering = [key for key in self._absent if key in protected and key not in self.chunks]
        wanted = n + self.cache_capacity - len(self.chunks)
        if len(entering) != wanted and self._current is not None:
            entering = [key for key in entering if key in self._current.missed]
        if len(entering) != wanted:
            logger.warning(
                "kvoffload: vLLM wants room for %d blocks and offered %d; nothing is stored",
                wanted,
                len(entering),
            )
            return None
        manager = self._manager_for(entering[0])
        ctx = self._context(entering[0]) or manager.begin_request("", list(protected))
        path = ctx.keys()
        own = sum(key in self._evictable for key in path)
        if n > len(self._evictable) - own:
            return None
        try:
            evicted = self._reserve(entering, ctx)
        except PolicyError as error:
            logger.error("kvoffload: the policy has failed, and nothing more is stored: %s", error)
            return None
        self._evictable.difference_update(evicted)
        return [(key, self.chunks.pop(key)) for key in evicted]

    def insert(self, key: bytes, chunk: Any, req_context: Any = None) -> None:
        if key not in self._expected:
            self._forget_expected()
            ctx = self._context(key)
            entering = [key]
            if ctx is not None and self._current is not None:
                missed = self._current.missed
                absent = [k for k in self._absent if k in missed and k not in self.chunks]
                # Blocks of earlier offers come first. They get no slot, because vLLM has evicted nothing.
                entering = absent[len(self.chunks) - self.cache_capacity :]
            self._reserve(entering if key in entering else [key], ctx)
        self._expected.discard(key)
        self.chunks[key] = chunk

    def mark_evictable(self, key: bytes) -> None:
        manager = self._manager_for(key)
        if key in self._storing:
            manager.complete_store(self._storing.pop(key))
        else:
            manager.complete_load(self._loading.pop(key))
        self._evictable.add(key)

    def mark_non_evictable(self, key: bytes) -> None:
        self._loading[key] = self._manager_for(key).prepare_load([key])
        self._evictable.discard(key)

    def remove(self, key: bytes) -> None:
        del self.chunks[key]
        self._manager_for(key).complete_store(self._storing.pop(key), success=False)

    def touch(self, keys: Iterable[bytes], req_context: Any = None) -> None:
        touched = list(keys)
        if touched:
            self._current = self._request(req_context, touched)
            self._current.missed.update(key for key in touched if key not in self.chunks)
            self._manager_for(touched[0]).touch(touched, self._current.ctx)

    def on_request_finished(
        self,
        key_groups: Sequence[Sequence[bytes]],
        insertion_only_keys: set[bytes],
        reused_keys: set[bytes],
        req_context: Any,
    ) -> None:
        keys = [key for group in key_groups for key in group]
        if not keys and self._manager is None:
            return
        request = self._request(req_context, keys)
        if not request.ctx.finished:
            self._manager_for(b"").finish_request(request.ctx)

    def clear(self) -> None:
        self.chunks.clear()
        self._absent.clear()
        self._evictable.clear()
        self._storing.clear()
        self._loading.clear()
        self._expected.clear()
        self._current = None
        if self._manager is not None:
            self._manager.reset(drop_in_flight=True)

    # ---- inside

    def _manager_for(self, key: bytes) -> OffloadingManager:
        """Return the `OffloadingManager`. The first call creates it, for keys of the length of `key`."""
        if self._manager is None:
            self._manager = OffloadingManager(self.cache_capacity, key_bytes=len(key), policy=self.policy)
        return self._manager

    def _request(self, req_context: Any, keys: list[bytes]) -> _Request:
        """Return kvoffload's record of a request. Its path has the keys that vLLM has recorded so far."""
        request: _Request | None = req_context.get_state(_Request)
        # If vLLM records no positions, only the keys of this call are known.
        positions = getattr(req_context, "_offload_key_positions", None) or dict.fromkeys(keys, 0)
        if request is None or request.owner is not self:
            path = sorted(positions, key=positions.__getitem__)
            ctx = self._manager_for(path[0] if path else b"").begin_request(req_context.req_id, path)
            request = _Request(self, ctx)
            req_context.set_state(request)
        elif len(positions) > request.ctx.length and not request.ctx.finished:
            request.ctx.extend(sorted(positions, key=positions.__getitem__))
        return request

    def _context(self, key: bytes) -> RequestContext | None:
        """Return the context of the request that vLLM passed last.

        Returns None if this request has finished, or if `key` is not among the keys that it missed.
        """
        if self._current is None or key not in self._current.missed or self._current.ctx.finished:
            return None
        return self._current.ctx

    def _reserve(self, entering: list[bytes], ctx: RequestContext | None) -> list[bytes]:
        """Reserve slots for blocks that vLLM will insert one by one. Returns the keys of evicted blocks."""
        # `admitted`, because single blocks cannot be refused in vLLM's interface.
        plan = self._manager_for(entering[0]).prepare_store(entering, ctx, admitted=True)
        assert plan is not None, f"no room for {entering[0].hex()}"
        evicted = list(plan.evicted)
        self._expected = set(plan.keys)
        self._storing.update(zip(list(plan.keys), plan.split(), strict=True))
        self._absent.clear()
        return evicted

    def _forget_expected(self) -> None:
        """Free the slots that were reserved for blocks which vLLM then did not insert."""
        for key in self._expected:
            self._manager_for(key).complete_store(self._storing.pop(key), success=False)
        self._expected.clear()
