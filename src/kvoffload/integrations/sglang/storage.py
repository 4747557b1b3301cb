"""`KVOffloadStorage`: the third level of SGLang's KV cache (HiCache), kept in tiers of kvoffload.

    --hicache-storage-backend dynamic --hicache-storage-backend-extra-config '{"backend_name": "kvoffload",
        "module_path": "kvoffload.integrations.sglang", "class_name": "KVOffloadStorage", "interface_v1": 1,
        "hicache_storage_pass_prefix_keys": true, "tiers": ["disk:/nvme/kv:500GiB"]}'

Translates SGLang's pages, keys and host pools into objects (`kvoffload.integrations.objects`). SGLang calls
the storage from its threads for queries, reads and writes. Each call waits for the tiers until its deadline.
Neither a failing tier nor an internal error raises an exception in SGLang.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from sglang.srt.mem_cache.hicache_storage import (
    STORAGE_BATCH_SIZE,
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)

from kvoffload.errors import ConfigError, UnavailableError
from kvoffload.integrations.containment import contained
from kvoffload.integrations.logs import join, refusals_logged
from kvoffload.integrations.objects import KEY_BYTES, OBJECT_KEY_BYTES, Extents, ObjectPath, ObjectStore
from kvoffload.integrations.sglang.options import divided, parse_options
from kvoffload.integrations.sglang.pages import HostPages, best_block_bytes
from kvoffload.integrations.sglang.producer import Producer, find_producer
from kvoffload.integrations.sglang.ranks import check_ranks, directory_of, num_ranks, shard_of
from kvoffload.text import size
from kvoffload.tiers.contract import Mask, SecondaryTier
from kvoffload.tiers.spec import SizedTierOptions, TierOptions, TierOwner, open_tiers

logger = logging.getLogger("sglang.kvoffload")


class KVOffloadStorage(HiCacheStorage):
    """A HiCache storage backend with tiers of kvoffload. Supports the interfaces v1 and v2.

    The tiers are opened when SGLang has registered its host pools, and closed when SGLang detaches the
    backend.

    Raises: `ConfigError` from the constructor for invalid options, and from `on_host_pools_registered` if the
    engine's pages cannot be identified. If the directory or server of a tier cannot be used now, the storage
    logs an error and runs without this tier.
    """

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: Mapping[str, Any] | None = None) -> None:
        join(logger)
        self._config = storage_config
        with refusals_logged(logger, "not attached"):
            self.options = parse_options(storage_config.extra_config)
            check_ranks(storage_config, self.options.tiers)
        self.broken = False
        self.registered_pools: dict[str, Any] = {}
        self.store: ObjectStore | None = None
        self._pages: dict[str, HostPages] = {}
        self._salts: dict[str, bytes] = {}
        self._paths: dict[str, tuple[ObjectPath, list[str]]] = {}
        self._moved: dict[str, list[tuple[int, float]]] = {"prefetch": [], "backup": []}

    # ---- life

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Register SGLang's host pool of KV pages."""
        super().register_mem_pool_host(mem_pool_host)
        self._register(PoolName.KV.value, mem_pool_host)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Register a further host pool, before or after the tiers are opened."""
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        self._register(_name(host_pool_name), host_pool)

    def _register(self, name: str, pool: Any) -> None:
        if getattr(pool, "kv_buffer", pool) is None and name == PoolName.KV.value:
            return  # a logical pool; its pages are in the other pools
        pages = self._pages[name] = HostPages(name, pool)
        self._salts[name] = hashlib.sha256(
            f"{pages.description} {shard_of(self._config, name)}".encode()
        ).digest()

    def on_host_pools_registered(self) -> None:
        """Open the tiers."""
        with refusals_logged(logger, "not attached"):
            self.store = self._open()

    def close(self) -> None:
        """Make pages durable and close the tiers. Called when SGLang detaches the backend or ends."""
        store, self.store = self.store, None
        if store is not None:
            store.close()

    @contained(False, when_broken=lambda storage: True)
    def clear(self) -> bool:
        """Forget all pages in all tiers. In a shared tier they are forgotten for all machines.

        Returns False if a tier has not confirmed this. Also works after an internal error, because otherwise
        a later process could find the pages.
        """
        self._paths.clear()
        confirmed = self.store is not None and self.store.clear()
        if not confirmed:
            logger.error(
                "kvoffload: a tier did not confirm the reset; old pages may be served after a restart"
            )
        return confirmed

    @contained(None)
    def get_stats(self) -> Any:
        """Return the size, in pages, and the speed, in GB/s, of each transfer since the last call, for
        SGLang's metrics.
        """
        from sglang.srt.observability.metrics_collector import StorageMetrics

        metrics = StorageMetrics()
        for name in self._moved:
            moved, self._moved[name] = self._moved[name], []
            getattr(metrics, f"{name}_pgs").extend(count for count, _ in moved)
            getattr(metrics, f"{name}_bandwidth").extend(speed for _, speed in moved)
        return metrics

    # ---- interface v1

    @contained(lambda keys, extra_info=None: 0)
    def batch_exists(self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None) -> int:
        """Return the number of pages before the first page that is in no tier."""
        return _leading(self._find(PoolName.KV.value, keys))

    @contained(lambda keys, host_indices, extra_info=None: [False] * len(keys))
    def batch_get_v1(
        self, keys: list[str], host_indices: Any, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Read pages into the host pool; return True for each page that was found and is not damaged."""
        return self._get(PoolName.KV.value, keys, host_indices, _prefix(extra_info))

    @contained(lambda keys, host_indices, extra_info=None: [False] * len(keys))
    def batch_set_v1(
        self, keys: list[str], host_indices: Any, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Write pages from the host pool. Returns True for each page that needs no retry.

        A page needs no retry if a tier has it or if a tier's admission rule or policy has refused it.
        """
        return self._set(PoolName.KV.value, keys, host_indices, _prefix(extra_info))

    # ---- interface v2, for models with several pools

    @contained(lambda keys, pool_transfers=None, extra_info=None: PoolTransferResult.empty())
    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        """Return the number of leading pages that can be restored from all pools.

        Each pool has its own hit policy: some need all leading pages, others only the last pages.
        """
        kv_pages = len(keys)
        if PoolName.KV.value in self._pages:
            kv_pages = _leading(self._find(PoolName.KV.value, keys))
        hits: dict[str, int] = {PoolName.KV: kv_pages} if kv_pages else {}
        restorable = set(range(1, kv_pages + 1))
        for transfer in pool_transfers or []:
            if not restorable:
                break
            if transfer.hit_policy == PoolHitPolicy.BLOCK_GROUPS:
                hits[transfer.name] = self._pages_of_groups(transfer)
                continue
            has = self._find(_name(transfer.name), keys[:kv_pages])
            if transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES:
                window = max(1, len(transfer.keys or ()))
                usable = {end for end in restorable if has[max(0, end - window) : end].all()}
            else:
                usable = set(range(1, _leading(has) + 1))
            if usable:
                hits[transfer.name] = max(usable)
            restorable &= usable
        return PoolTransferResult(max(restorable, default=0), hits, sorted(restorable))

    @contained(lambda transfers, extra_info=None: _nothing(transfers))
    def batch_get_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """Read pages of several pools into host memory. Returns results as `batch_get_v1`, for each pool by
        name.
        """
        return self._of_pools(self._get, transfers, extra_info)

    @contained(lambda transfers, extra_info=None: _nothing(transfers))
    def batch_set_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """Write pages of several pools from host memory. Returns results as `batch_set_v1`, for each pool by
        name.
        """
        return self._of_pools(self._set, transfers, extra_info)

    # ---- the first interface: flat tensors

    def exists(self, key: str) -> bool:
        """Return True if a tier has the page."""
        return self.batch_exists([key]) == 1

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
        """Read a page into a flat tensor. Return None if the page is missing."""
        return self.batch_get([key], [target_location])[0]

    @contained(lambda keys, target_locations=None, target_sizes=None: [None] * len(keys))
    def batch_get(self, keys: list[str], target_locations: Any = None, target_sizes: Any = None) -> list[Any]:
        """Read pages into flat tensors of the size of a page. Returns the tensors; None for missing pages."""
        targets = list(target_locations or [None] * len(keys))
        page_bytes = self._pages[PoolName.KV.value].page_bytes
        if any(target is None or target.numel() * target.element_size() != page_bytes for target in targets):
            return [None] * len(keys)
        memory = Extents.of_buffers([target.data_ptr() for target in targets], page_bytes)
        ok = self._load(PoolName.KV.value, keys, memory, None)
        return [target if is_there else None for target, is_there in zip(targets, ok.tolist(), strict=True)]

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        """Write a page from a flat tensor. Returns True if the page needs no retry (see `batch_set_v1`)."""
        return self.batch_set([key], [value])

    @contained(lambda keys, values=None, target_locations=None, target_sizes=None: False)
    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        """Write one page from each flat tensor. Returns True if no page needs a retry."""
        tensors = [value.contiguous() for value in values or []]
        page_bytes = self._pages[PoolName.KV.value].page_bytes
        if len(tensors) != len(keys) or any(t.numel() * t.element_size() != page_bytes for t in tensors):
            return False
        memory = Extents.of_buffers([tensor.data_ptr() for tensor in tensors], page_bytes)
        return bool(self._save(PoolName.KV.value, keys, memory, None).all())

    # ---- objects

    def stop_after_error(self, method: str) -> None:
        """Log an internal error. From now on every call returns a miss."""
        self.broken = True
        logger.exception("kvoffload: internal error in %s; the storage is no longer used", method)

    def _find(self, name: str, keys: Sequence[str]) -> Mask:
        if self.store is None or name not in self._pages:
            return np.zeros(len(keys), np.bool_)
        return self.store.find(self._keys(name, keys), self._pages[name].page_bytes)

    def _of_pools(
        self,
        move: Callable[[str, Sequence[str], Any, list[str] | None], list[bool]],
        transfers: Sequence[PoolTransfer],
        extra_info: HiCacheStorageExtraInfo | None,
    ) -> dict[str, list[bool]]:
        return {
            transfer.name: move(
                _name(transfer.name), transfer.keys or [], transfer.host_indices, _prefix(extra_info)
            )
            for transfer in transfers
        }

    def _movable(self, name: str, keys: Sequence[str], indices: Any) -> HostPages | None:
        """Return the pool of these pages; None if they cannot be transferred, for example without tiers."""
        pages = self._pages.get(name)
        if pages is None or self.store is None or not keys or not pages.has_indices_for(keys, indices):
            return None
        return pages

    def _get(self, name: str, keys: Sequence[str], indices: Any, prefix: list[str] | None) -> list[bool]:
        if (pages := self._movable(name, keys, indices)) is None:
            return [False] * len(keys)
        memory, finish = pages.loaded(indices)
        ok = self._load(name, keys, memory, prefix)
        finish(ok)
        return ok.tolist()

    def _set(self, name: str, keys: Sequence[str], indices: Any, prefix: list[str] | None) -> list[bool]:
        if (pages := self._movable(name, keys, indices)) is None:
            return [False] * len(keys)
        memory, _alive = pages.stored(indices)
        return self._save(name, keys, memory, prefix).tolist()

    def _load(self, name: str, keys: Sequence[str], memory: Extents, prefix: list[str] | None) -> Mask:
        if (store := self.store) is None:
            return np.zeros(len(keys), np.bool_)
        began = time.monotonic()
        ok = store.load(self._keys(name, keys), memory)
        self._count("prefetch", ok, memory, began)
        used = _leading(ok)
        if used:
            path = self._path(store, f"load {name}", name, keys[:used], prefix)
            if used < STORAGE_BATCH_SIZE:
                self._finish(store, f"load {name}", path)
        return ok

    def _save(self, name: str, keys: Sequence[str], memory: Extents, prefix: list[str] | None) -> Mask:
        if (store := self.store) is None:
            return np.zeros(len(keys), np.bool_)
        began = time.monotonic()
        path = self._path(store, f"store {name}", name, keys, prefix)
        ok = store.store(self._keys(name, keys), memory, path)
        self._count("backup", ok, memory, began)
        if len(keys) < STORAGE_BATCH_SIZE or not ok.all():
            self._finish(store, f"store {name}", path)
        return ok

    def _path(
        self, store: ObjectStore, kind: str, name: str, keys: Sequence[str], prefix: list[str] | None
    ) -> ObjectPath:
        """Return the path that consists of `prefix` and `keys`.

        SGLang passes the pages of one operation in several batches. If `prefix` is the path of the previous
        batch, `keys` are appended to this path, so that the policies count each page of the operation only
        once.
        """
        before, page_bytes = prefix or [], self._pages[name].page_bytes
        path, chain = self._paths.get(kind, (None, before))
        if path is not None and chain != before:
            self._finish(store, kind, path)
            path = None
        if path is None:
            path = store.open_path()
            if before:
                store.extend_path(path, self._keys(name, before), page_bytes)
        store.extend_path(path, self._keys(name, keys), page_bytes)
        self._paths[kind] = path, [*before, *keys]
        return path

    def _finish(self, store: ObjectStore, kind: str, path: ObjectPath) -> None:
        self._paths.pop(kind, None)
        store.finish_path(path)

    def _keys(self, name: str, keys: Sequence[str]) -> list[bytes]:
        salt = self._salts[name]
        return [
            hashlib.blake2b(key.encode(), digest_size=OBJECT_KEY_BYTES, key=salt).digest() for key in keys
        ]

    def _pages_of_groups(self, transfer: PoolTransfer) -> int:
        """Count the leading pages of a pool with the hit policy `BLOCK_GROUPS`.

        A page counts only if all pages of its group are in the tiers.
        """
        if not transfer.group_pages or not transfer.keys:
            return 0
        return (
            _leading(self._find(_name(transfer.name), transfer.keys))
            // transfer.group_pages
            * transfer.block_pages
        )

    def _count(self, direction: str, ok: Mask, memory: Extents, began: float) -> None:
        if self._config.enable_storage_metrics and (count := int(np.count_nonzero(ok))):
            seconds = max(time.monotonic() - began, 1e-9)
            self._moved[direction].append((count, count * memory.object_bytes / seconds / 1e9))

    # ---- tiers

    def _open(self) -> ObjectStore:
        if not self._pages:
            raise ConfigError("host pools", None, "allowed: SGLang's host pool with KV pages")
        sizes = [pages.page_bytes for pages in self._pages.values()]
        extents = next(iter(self._pages.values())).sizes
        block_bytes = best_block_bytes(sizes, extents)
        producer = find_producer(self._config, self._pages, self.options.identity)
        for tier in self.options.tiers:
            # A shared tier identifies the weights in `shared_fingerprint`.
            if isinstance(tier, SizedTierOptions) and not _is_named(tier, producer):
                producer.check_weights()
        owner = _owner(self._config, producer, block_bytes)
        ranks = num_ranks(self._config)
        tiers: list[SecondaryTier] = open_tiers(
            [divided(tier, ranks) for tier in self.options.tiers if _is_usable(tier, producer)], owner
        )
        logger.info(
            "kvoffload: %s, pages of %s, blocks of %s%s",
            ", ".join(map(str, self.options.tiers)),
            ", ".join(f"{size(pages.page_bytes)} ({name})" for name, pages in self._pages.items()),
            size(block_bytes),
            ""
            if ranks == 1
            else f"; each of {ranks} ranks has its own directories and an equal part of a capacity",
        )
        return ObjectStore(
            tiers,
            block_bytes=block_bytes,
            staging_bytes=self.options.staging,
            deadline_s=self.options.deadline,
            zero_copy=self.options.allows_zero_copy,
        )


def _owner(config: HiCacheStorageConfig, producer: Producer, block_bytes: int) -> TierOwner:
    def on_unavailable(error: UnavailableError) -> None:
        logger.error("kvoffload: SGLang runs WITHOUT a tier until the backend is attached again: %s", error)

    return TierOwner(
        block_bytes,
        KEY_BYTES,
        producer.fingerprint(),
        directory_of(config),
        # SGLang writes the nodes of its tree one by one, so few groups of pages would be complete.
        reports_paths=False,
        on_unavailable=on_unavailable,
        shared_fingerprint=producer.shared_fingerprint,
    )


def _is_usable(tier: TierOptions, producer: Producer) -> bool:
    if producer.loads_adapters and not _is_named(tier, producer):
        logger.error(
            "kvoffload: SGLang runs WITHOUT the tier %s: with enable_lora nothing binds the contents of "
            "adapters. To use the tier nevertheless, give identity=NAME, and change the name with them", tier
        )  # fmt: skip
        return False
    return True


def _is_named(tier: TierOptions, producer: Producer) -> bool:
    return bool(getattr(tier, "salt", "") or getattr(tier, "identity", "") or producer.identity)


def _name(name: Any) -> str:
    return str(getattr(name, "value", name))


def _prefix(extra_info: HiCacheStorageExtraInfo | None) -> list[str] | None:
    return None if extra_info is None else extra_info.prefix_keys


def _leading(mask: Mask) -> int:
    return len(mask) if mask.all() else int(np.argmin(mask))


def _nothing(transfers: Sequence[PoolTransfer]) -> dict[str, list[bool]]:
    return {transfer.name: [False] * len(transfer.keys or []) for transfer in transfers}
