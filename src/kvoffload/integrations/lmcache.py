"""kvoffload inside LMCache: an L2 adapter of type ``plugin`` for LMCache's MP mode.

    --l2-adapter '{"type": "plugin", "module_path": "kvoffload.integrations.lmcache",
                   "class_name": "KVOffloadAdapter", "adapter_params": {"tiers": ["disk:/nvme/kv:500GiB"]}}'

Translates LMCache's keys, memory objects, tasks and event descriptors into calls of an `ObjectStore`.
LMCache's controllers call the adapter from two threads. These threads never wait for a tier; only the
adapter's own threads do. No failure raises an exception in the controllers.
"""

from __future__ import annotations

import hashlib
import json
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import AdapterUsage, L2AdapterInterface
from lmcache.v1.platform import create_event_notifier

from kvoffload._version import __version__
from kvoffload.errors import UnavailableError
from kvoffload.integrations.logs import join, refusals_logged
from kvoffload.integrations.object_options import ObjectOptions, read_object_options
from kvoffload.integrations.objects import KEY_BYTES, OBJECT_KEY_BYTES, Extents, ObjectStore
from kvoffload.settings.read import Duration, Size
from kvoffload.tiers.contract import Mask
from kvoffload.tiers.spec import TierOwner as Owner
from kvoffload.tiers.spec import open_tiers

logger = logging.getLogger("lmcache.kvoffload")
WHERE = "adapter_params"
_KEY_FORMAT = 1
"""Version of the format of keys and objects. Increment it when the keys or the bytes of an object change."""
_LOADERS = 2
_MOST_COUNTED = 1 << 16
"""When LMCache counts this many objects, the adapter checks for the first time which of them were evicted."""
_CHECKED_AT_ONCE = 1 << 10
Format: TypeAlias = tuple[int, str]
"""Format of an object: its number of bytes, and the names of its dtypes."""
Kind: TypeAlias = tuple[str, int, int]
"""Kind of an object: the name of its model, its KV rank, and its object group. Objects of one kind usually
have the same format."""


@dataclass(frozen=True, kw_only=True)
class AdapterOptions(ObjectOptions):
    """Options of `KVOffloadAdapter`.

    Attributes:
        block: size of a block in bytes. An object is stored in one or more blocks.
    """

    block: Size = 1 << 20
    deadline: Duration = 5.0
    staging: Size = 1 << 30


def parse_options(params: Mapping[str, Any]) -> AdapterOptions:
    """Read the options. Raises one `ConfigError` that reports all problems."""
    return read_object_options(AdapterOptions, params, WHERE)


class _Tasks(NamedTuple):
    """The tasks of one type (stores, lookups or loads): their threads, the notifier that signals the end of a
    task, and the results that LMCache has not fetched yet.
    """

    threads: ThreadPoolExecutor
    notifier: Any
    ended: dict[int, Any]


class KVOffloadAdapter(L2AdapterInterface):
    """An L2 adapter of LMCache that stores objects in tiers of kvoffload.

    The tiers evict by their own policies, so LMCache's eviction by usage is off. LMCache's quotas by
    ``cache_salt`` work. An object is served only if key, size, dtypes and bytes match the stored object. A
    lookup does not lock objects, so an object may be evicted between its lookup and its load. Then the load
    fails.

    Args:
        params: the options, `AdapterOptions`.
        l1_memory_desc: LMCache's L1 memory; not used.

    Raises: `ConfigError` for invalid options. If the directory or server of a tier cannot be used now, the
    adapter logs an error and runs without this tier.
    """

    def __init__(self, params: Mapping[str, Any], l1_memory_desc: object = None) -> None:
        super().__init__()
        join(logger)
        with refusals_logged(logger, "not started"):
            self.options = parse_options(params)
            self._store = _open(self.options)
        self._lock = threading.Lock()
        self._next_task = 0
        self._formats: dict[Kind, tuple[Format, ...]] = {}
        """For each kind of object, the formats of its objects, most recently used first."""
        self._counting = threading.Lock()
        self._counted: dict[Any, Format] = {}
        """Objects that LMCache counts: the adapter has reported them as stored and not yet as deleted."""
        self._next_check = _MOST_COUNTED
        readers = ThreadPoolExecutor(_LOADERS, "kvoffload-load")
        self._stores = _Tasks(ThreadPoolExecutor(1, "kvoffload-store"), create_event_notifier(), {})
        self._lookups = _Tasks(readers, create_event_notifier(), {})
        self._loads = _Tasks(readers, create_event_notifier(), {})
        self._closed = False

    # ---- event descriptors

    def get_store_event_fd(self) -> int:
        """Return the descriptor that signals finished stores."""
        return int(self._stores.notifier.fileno())

    def get_lookup_and_lock_event_fd(self) -> int:
        """Return the descriptor that signals finished lookups."""
        return int(self._lookups.notifier.fileno())

    def get_load_event_fd(self) -> int:
        """Return the descriptor that signals finished loads."""
        return int(self._loads.notifier.fileno())

    # ---- tasks

    def submit_store_task(self, keys: list[Any], objects: list[Any]) -> int:
        """Begin to store objects; return the number of the task."""
        nothing = L2StoreResult(False, 0)
        return self._submit(self._stores, nothing, lambda: self._save(keys, objects))

    def pop_completed_store_tasks(self) -> dict[int, Any]:
        """Return the results of the stores that have ended since the last call, by the number of the task."""
        with self._lock:
            ended = self._stores.ended.copy()
            self._stores.ended.clear()
        return ended

    def submit_lookup_and_lock_task(self, keys: list[Any], group_layout_descs: Mapping[int, Any]) -> int:
        """Begin to look up objects; return the number of the task.

        Args:
            group_layout_descs: for each object group, the size and dtypes of its objects.
        """
        nothing = Bitmap(len(keys))
        return self._submit(self._lookups, nothing, lambda: self._find(keys, group_layout_descs))

    def query_lookup_and_lock_result(self, task_id: int) -> Any:
        """Return the bitmap of the objects that are present.

        Only the first call after the end of the task returns the bitmap; other calls return None.
        """
        with self._lock:
            return self._lookups.ended.pop(task_id, None)

    def submit_unlock(self, keys: list[Any]) -> None:
        """Do nothing: objects are not locked."""

    def submit_load_task(self, keys: list[Any], objects: list[Any]) -> int:
        """Begin to load objects into LMCache's memory; return the number of the task."""
        nothing = Bitmap(len(keys))
        return self._submit(self._loads, nothing, lambda: self._load(keys, objects))

    def query_load_result(self, task_id: int) -> Any:
        """Return the bitmap of the loaded objects.

        Only the first call after the end of the task returns the bitmap; other calls return None.
        """
        with self._lock:
            return self._loads.ended.pop(task_id, None)

    def delete(self, keys: list[Any]) -> None:
        """Delete objects. Finds only objects whose format the adapter has seen in a call since the start.

        The store's key of an object depends on its kind and format. So an object is deleted in all formats
        that were stored, looked up or loaded for its kind; objects in other formats stay. Then reports as
        deleted to LMCache: the objects that were present, and evicted objects that LMCache still counts.
        """
        try:
            with self._counting:
                self._report_deleted(self._delete([*dict.fromkeys(keys)]))
        except Exception:
            logger.exception("kvoffload: internal error in delete; objects may still be served")

    def get_usage(self) -> AdapterUsage:
        """Return the number of bytes in tiers with a capacity, and the bytes that LMCache counts for each
        ``cache_salt``.

        The capacity is reported as unknown, so that LMCache leaves eviction to the policies of the tiers.
        """
        counted = super().get_usage()
        used = sum(stats.ready for stats in self._store.stats()) * self.options.block
        return AdapterUsage(used, 0, counted.bytes_by_cache_salt)

    def report_status(self) -> dict[str, Any]:
        """Return health and counters of the tiers, for LMCache's status page."""
        tiers = {
            tier.name: {name: value for name, value in asdict(stats).items() if value}
            for tier, stats in zip(self._store.tiers, self._store.stats(), strict=True)
        }
        return {
            "is_healthy": bool(tiers) and not self._closed,
            "type": type(self).__name__,
            "tiers": tiers,
            "late_jobs": self._store.num_late,
        }

    def close(self) -> None:
        """End the tasks, make objects durable, and close the tiers. Idempotent."""
        if self._closed:
            return
        self._closed = True
        kinds = (self._stores, self._lookups, self._loads)
        for tasks in kinds:
            tasks.threads.shutdown(wait=True, cancel_futures=True)
        self._store.close()
        for tasks in kinds:
            tasks.notifier.close()

    # ---- work of the threads

    def _submit(self, tasks: _Tasks, nothing: Any, work: Callable[[], Any]) -> int:
        """Run `work` as a task in one of the threads of `tasks`; return the number of the task.

        If `work` raises an exception, or the adapter is closed, the result of the task is `nothing`.
        """
        with self._lock:
            task, self._next_task = self._next_task, self._next_task + 1

        def run() -> None:
            try:
                result = work()
            except Exception:
                logger.exception("kvoffload: internal error in a task; it ends without objects")
                result = nothing
            with self._lock:
                tasks.ended[task] = result
            tasks.notifier.notify()

        try:
            tasks.threads.submit(run)
        except RuntimeError:  # closed
            with self._lock:
                tasks.ended[task] = nothing
        return task

    def _named(self, keys: Sequence[Any], objects: Sequence[Any]) -> tuple[list[Any], list[Any], list[bytes]]:
        """Return the buffer, the format and the digest of each object; remember the formats for `delete`."""
        buffers = [_buffer(obj) for obj in objects]
        forms = [_format(obj, buffer) for obj, buffer in zip(objects, buffers, strict=True)]
        self._learn(keys, forms)
        return buffers, forms, [_digest(key, form) for key, form in zip(keys, forms, strict=True)]

    def _learn(self, keys: Sequence[Any], forms: Sequence[Format | None]) -> None:
        """Remember, for the kind of each object, that the kind has objects of this format."""
        with self._lock:
            for key, form in zip(keys, forms, strict=True):
                known = self._formats.get(_kind(key), ())
                if form is not None and known[:1] != (form,):
                    self._formats[_kind(key)] = (form, *(other for other in known if other != form))

    def _save(self, keys: Sequence[Any], objects: Sequence[Any]) -> Any:
        buffers, forms, names = self._named(keys, objects)
        ok, present, new = (np.zeros(len(keys), np.bool_) for _ in range(3))
        for form, rows in _rows_by(forms):
            digests = [names[row] for row in rows]
            before = self._store.stored(digests, form[0])
            path = self._store.open_path()
            self._store.extend_path(path, digests, form[0])
            ok[rows] = self._store.store(digests, _extents([buffers[row] for row in rows], form[0]), path)
            self._store.finish_path(path)
            present[rows] = self._store.stored(digests, form[0])
            new[rows] = present[rows] & ~before
        self._count({keys[row]: forms[row] for row in np.flatnonzero(present).tolist()})
        return L2StoreResult(bool(ok.all()), sum(forms[row][0] for row in np.flatnonzero(new).tolist()))

    def _delete(self, keys: Sequence[Any]) -> list[Any]:
        """Delete objects in all formats that are known for their kinds.

        Returns the keys of objects that were present, and of objects that LMCache counts.
        """
        named = [
            (key, form)
            for key in keys
            for form in {self._counted.get(key), *self._formats.get(_kind(key), ())}
            if form is not None
        ]
        deleted = {key for key in keys if key in self._counted}
        for form, rows in _rows_by([form for _, form in named]):
            names = [_digest(named[row][0], form) for row in rows]
            is_present = self._store.stored(names, form[0])
            self._store.delete(names, form[0])
            deleted.update(named[row][0] for row, present in zip(rows, is_present, strict=True) if present)
        return [key for key in keys if key in deleted]

    def _count(self, present: Mapping[Any, Format]) -> None:
        """Report the objects of `present` to LMCache as stored, except objects that LMCache already counts.

        If LMCache counts many objects, also report the evicted objects among them as deleted.
        """
        with self._counting:
            new = {key: form for key, form in present.items() if key not in self._counted}
            self._counted.update(new)
            if new:
                self._notify_keys_stored([*new], [size for size, _ in new.values()])
            if len(self._counted) >= self._next_check:
                self._report_deleted(self._evicted())
                self._next_check = max(_MOST_COUNTED, 2 * len(self._counted))

    def _evicted(self) -> list[Any]:
        """Return the objects that LMCache counts but that are in no tier, as far as this process knows."""
        keys, evicted = [*self._counted], list[Any]()
        for form, rows in _rows_by([*self._counted.values()]):
            for start in range(0, len(rows), _CHECKED_AT_ONCE):
                batch = [keys[row] for row in rows[start : start + _CHECKED_AT_ONCE]]
                is_present = self._store.stored([_digest(key, form) for key in batch], form[0])
                evicted += [key for key, present in zip(batch, is_present, strict=True) if not present]
        return evicted

    def _report_deleted(self, keys: list[Any]) -> None:
        """Report objects to LMCache as deleted, with their sizes; 0 as the size of an object that it does not
        count.
        """
        if keys:
            self._notify_keys_deleted(keys, [self._counted.pop(key, (0, ""))[0] for key in keys])

    def _find(self, keys: Sequence[Any], layouts: Mapping[int, Any]) -> Any:
        of_groups = {group: _format_of_layout(layout) for group, layout in layouts.items() if layout.shapes}
        last = {kind: known[0] for kind, known in self._formats.copy().items()}
        forms = [of_groups.get(key.object_group_id) or last.get(_kind(key)) for key in keys]
        self._learn(keys, forms)
        ok = np.zeros(len(keys), np.bool_)
        for form, rows in _rows_by(forms):
            if form is not None:
                ok[rows] = self._store.find([_digest(keys[row], form) for row in rows], form[0])
        return _bitmap(ok)

    def _load(self, keys: Sequence[Any], objects: Sequence[Any]) -> Any:
        buffers, forms, names = self._named(keys, objects)
        ok = np.zeros(len(keys), np.bool_)
        for form, rows in _rows_by(forms):
            digests = [names[row] for row in rows]
            loaded = self._store.load(digests, _extents([buffers[row] for row in rows], form[0]))
            ok[rows] = loaded
            if loaded.any():
                path = self._store.open_path()
                present = [digests[i] for i in np.flatnonzero(loaded).tolist()]
                self._store.extend_path(path, present, form[0])
                self._store.finish_path(path)
        if ok.any():
            self._notify_keys_accessed([keys[row] for row in np.flatnonzero(ok).tolist()])
        return _bitmap(ok)


def _open(options: AdapterOptions) -> ObjectStore:
    def on_unavailable(error: UnavailableError) -> None:
        logger.error("kvoffload: LMCache runs WITHOUT a tier until its next start: %s", error)

    facts = {"engine": "lmcache", "kvoffload": __version__.rsplit(".", 1)[0], "keys": _KEY_FORMAT}
    owner = Owner(
        options.block,
        KEY_BYTES,
        json.dumps({**facts, "identity": options.identity}, sort_keys=True),
        reports_paths=False,
        on_unavailable=on_unavailable,
        shared_fingerprint=lambda name: json.dumps(
            {**facts, "names": [given for given in (name, options.identity) if given]}, sort_keys=True
        ),
    )
    tiers = open_tiers(options.tiers, owner)
    logger.info("kvoffload: %s", ", ".join(map(str, options.tiers)))
    return ObjectStore(
        tiers, block_bytes=options.block, staging_bytes=options.staging, deadline_s=options.deadline
    )


def _kind(key: Any) -> Kind:
    return key.model_name, key.kv_rank, key.object_group_id


def _digest(key: Any, form: Format) -> bytes:
    """Return the store's key of an object: a hash of all fields of LMCache's key, the size and the dtypes."""
    fields = [key.chunk_hash.hex(), key.model_name, key.kv_rank, key.object_group_id, key.cache_salt, *form]
    return hashlib.blake2b(json.dumps(fields).encode(), digest_size=OBJECT_KEY_BYTES).digest()


def _buffer(obj: Any) -> Any:
    """Return an array of the bytes of a memory object, without a copy."""
    return np.frombuffer(obj.byte_array, np.uint8)


def _format(obj: Any, buffer: Any) -> Format:
    meta = obj.meta if hasattr(obj, "meta") else obj.metadata
    dtypes = getattr(meta, "dtypes", None) or [meta.dtype]
    return len(buffer), " ".join(map(str, dtypes))


def _format_of_layout(layout: Any) -> Format:
    pairs = list(zip(layout.shapes, layout.dtypes, strict=True))
    return sum(shape.numel() * dtype.itemsize for shape, dtype in pairs), " ".join(str(d) for _, d in pairs)


def _rows_by(forms: Sequence[Format | None]) -> list[tuple[Any, list[int]]]:
    rows: dict[Format | None, list[int]] = {}
    for row, form in enumerate(forms):
        rows.setdefault(form, []).append(row)
    return list(rows.items())


def _extents(buffers: Sequence[Any], size: int) -> Extents:
    return Extents.of_buffers([buffer.ctypes.data for buffer in buffers], size)


def _bitmap(mask: Mask) -> Any:
    bitmap = Bitmap(len(mask))
    for row in np.flatnonzero(mask).tolist():
        bitmap.set(row)
    return bitmap
