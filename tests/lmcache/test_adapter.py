"""`KVOffloadAdapter` with LMCache's own factory, objects and check; damage, delays and lost tiers."""

from __future__ import annotations

import asyncio
import json
import select
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lmcache.v1.check.check_mode_test_l2_adapter import run_test_mode
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.l2_adapters import create_l2_adapter
from lmcache.v1.distributed.l2_adapters.config import get_type_name_for_config
from lmcache.v1.distributed.l2_adapters.fault_inject_l2_adapter import FaultInjectL2AdapterConfig
from lmcache.v1.distributed.l2_adapters.plugin_l2_adapter import PluginL2AdapterConfig
from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj
from lmcache.v1.platform import consume_fd

from kvoffload import ConfigError
from kvoffload.integrations.objects import ObjectStore
from support import servers, valkey_server
from support.scripted_tier import ScriptedTier
from support.servers import KINDS, TierServer

MODEL = "meta-llama/Llama-3.1-8B"
SHAPE = torch.Size([2, 4, 16, 100])
PATIENCE_MS = 60_000
Make = Callable[..., Any]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """A function that makes our adapter through LMCache's factory; closes all adapters at the end."""
    made: list[Any] = []

    def adapter(**params: Any) -> Any:
        params.setdefault("tiers", [f"disk:{tmp_path / 'kv'}:128MiB"])
        made.append(create_l2_adapter(plugin(params)))
        return made[-1]

    yield adapter
    for made_adapter in made:
        made_adapter.close()


def plugin(params: dict[str, Any]) -> PluginL2AdapterConfig:
    return PluginL2AdapterConfig.from_dict(
        {
            "module_path": "kvoffload.integrations.lmcache",
            "class_name": "KVOffloadAdapter",
            "adapter_params": {"block": "16KiB", **params},
        }
    )


def key(number: int, **fields: Any) -> ObjectKey:
    values: dict[str, Any] = {
        "chunk_hash": number.to_bytes(32, "big"),
        "model_name": MODEL,
        "kv_rank": 0x01000100,
    }
    return ObjectKey(**{**values, **fields})


def memory(
    number: int | None, dtype: torch.dtype = torch.bfloat16, shape: torch.Size = SHAPE
) -> TensorMemoryObj:
    """Return an LMCache object whose bytes repeat a number."""
    raw = torch.zeros(shape.numel() * dtype.itemsize, dtype=torch.uint8)
    if number is not None:
        raw.copy_(torch.from_numpy(np.random.default_rng(number).integers(0, 256, raw.numel(), np.uint8)))
    meta = MemoryObjMetadata(
        shape=shape, dtype=dtype, address=0, phy_size=raw.numel(), ref_count=1, fmt=MemoryFormat.KV_2LTD,
        shapes=[shape], dtypes=[dtype],
    )  # fmt: skip
    return TensorMemoryObj(raw, meta, parent_allocator=None)


LAYOUTS = {0: MemoryLayoutDesc([SHAPE], [torch.bfloat16])}


def wait(descriptor: int) -> None:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    assert poll.poll(PATIENCE_MS)
    consume_fd(descriptor)


def write(adapter: Any, keys: Sequence[ObjectKey], objects: list[TensorMemoryObj]) -> Any:
    task = adapter.submit_store_task(list(keys), objects)
    ended: dict[int, Any] = {}
    while task not in ended:
        wait(adapter.get_store_event_fd())
        ended.update(adapter.pop_completed_store_tasks())
    return ended[task]


def answer(submit: Callable[[], int], query: Callable[[int], Any], descriptor: int) -> list[int]:
    task = submit()
    while (bitmap := query(task)) is None:
        wait(descriptor)
    assert query(task) is None  # it answers once
    return list(bitmap.get_indices_list())


def look_up(adapter: Any, keys: Sequence[ObjectKey], layouts: Any = LAYOUTS) -> list[int]:
    return answer(
        lambda: adapter.submit_lookup_and_lock_task(list(keys), layouts),
        adapter.query_lookup_and_lock_result,
        adapter.get_lookup_and_lock_event_fd(),
    )


def read(adapter: Any, keys: Sequence[ObjectKey], objects: list[TensorMemoryObj]) -> list[int]:
    rows_read = answer(
        lambda: adapter.submit_load_task(list(keys), objects),
        adapter.query_load_result,
        adapter.get_load_event_fd(),
    )
    adapter.submit_unlock(list(keys))
    return rows_read


def bytes_of(obj: TensorMemoryObj) -> bytes:
    return bytes(obj.byte_array)


def test_stored_objects_are_loaded(make: Make) -> None:
    adapter = make()
    keys, objects = [key(n) for n in range(8)], [memory(n) for n in range(8)]
    assert (
        len(
            {
                adapter.get_store_event_fd(),
                adapter.get_lookup_and_lock_event_fd(),
                adapter.get_load_event_fd(),
            }
        )
        == 3
    )
    result = write(adapter, keys, objects)
    assert result.is_successful()
    assert result.bytes_transferred() == sum(len(bytes_of(obj)) for obj in objects)
    assert look_up(adapter, [*keys, key(99)]) == list(range(8))
    buffers = [memory(None) for _ in range(9)]
    assert read(adapter, [*keys, key(99)], buffers) == list(range(8))
    assert [bytes_of(obj) for obj in buffers[:8]] == [bytes_of(obj) for obj in objects]
    assert set(bytes_of(buffers[8])) == {0}


def test_lmcaches_own_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {
        "type": "plugin",
        "module_path": "kvoffload.integrations.lmcache",
        "class_name": "KVOffloadAdapter",
    }
    params = {"tiers": [f"disk:{tmp_path / 'kv'}:256MiB"]}
    asyncio.run(
        run_test_mode(MODEL, l2_adapter=[json.dumps({**config, "adapter_params": params})], num_keys=4)
    )
    printed = capsys.readouterr().out
    assert "FAIL" not in printed.upper(), printed
    assert get_type_name_for_config(plugin(params)) == "plugin"


def test_warm_restart(make: Make) -> None:
    first = make()
    assert write(first, [key(1), key(2)], [memory(1), memory(2)]).is_successful()
    first.close()
    second = make()
    assert look_up(second, [key(1), key(2)]) == [0, 1]
    buffers = [memory(None), memory(None)]
    assert read(second, [key(1), key(2)], buffers) == [0, 1]
    assert bytes_of(buffers[1]) == bytes_of(memory(2))


@pytest.mark.parametrize(
    "other",
    [{"kv_rank": 1}, {"model_name": "other"}, {"cache_salt": "tenant"}, {"object_group_id": 1}],
    ids=str,
)
def test_another_key_gets_nothing(make: Make, other: dict[str, Any]) -> None:
    adapter = make()
    assert write(adapter, [key(1)], [memory(1)]).is_successful()
    layouts = {**LAYOUTS, 1: LAYOUTS[0]}
    assert look_up(adapter, [key(1), key(1, **other)], layouts) == [0]
    assert read(adapter, [key(1, **other)], [memory(None)]) == []


@pytest.mark.parametrize(
    ("dtype", "shape"), [(torch.float16, SHAPE), (torch.bfloat16, torch.Size([2, 4, 16, 99]))]
)
def test_another_format_gets_nothing(make: Make, dtype: torch.dtype, shape: torch.Size) -> None:
    adapter = make()
    assert write(adapter, [key(1)], [memory(1)]).is_successful()
    assert look_up(adapter, [key(1)], {0: MemoryLayoutDesc([shape], [dtype])}) == []
    assert read(adapter, [key(1)], [memory(None, dtype, shape)]) == []


def test_another_identity_gets_nothing(make: Make) -> None:
    first = make(identity="weights 1")
    assert write(first, [key(1)], [memory(1)]).is_successful()
    first.close()
    assert look_up(make(identity="weights 2"), [key(1)]) == []


def test_both_names_are_bound_on_a_shared_tier(make: Make, tmp_path: Path) -> None:
    directory = tmp_path / "valkey"
    directory.mkdir()
    with valkey_server.running(directory) as server:
        url = f"valkey://127.0.0.1:{server.port}/team"

        def adapter(identity: str, name: str) -> Any:
            return make(identity=identity, tiers=[f"{url}?identity={name}" if name else url])

        assert write(adapter("a", "c"), [key(1)], [memory(1)]).is_successful()
        pairs = [("a", "c"), ("a", "d"), ("b", "c"), ("a", ""), ("", "c")]
        assert [look_up(adapter(*pair), [key(1)]) for pair in pairs] == [[0], [], [], [], []]


@pytest.mark.parametrize("learn", [look_up, lambda adapter, keys: read(adapter, keys, [memory(None)])])
def test_objects_of_an_earlier_process_are_deleted(make: Make, learn: Callable[..., Any]) -> None:
    first = make()
    assert write(first, [key(1), key(2)], [memory(1), memory(2)]).is_successful()
    first.close()
    second = make()
    assert learn(second, [key(2)]) == [0]
    second.delete([key(1)])
    assert look_up(second, [key(1), key(2)]) == [1]


def test_objects_of_several_sizes_are_deleted_after_a_restart(make: Make) -> None:
    """Regression: only objects of the size that was used last were deleted."""
    small = torch.Size([2, 1000])
    layouts = [LAYOUTS, {0: MemoryLayoutDesc([small], [torch.bfloat16])}]
    first = make()
    assert write(first, [key(1), key(2)], [memory(1), memory(2)]).is_successful()
    assert write(first, [key(3), key(4)], [memory(n, shape=small) for n in (3, 4)]).is_successful()
    first.close()
    second = make()
    keys = [key(n) for n in range(1, 5)]
    assert [look_up(second, keys, layout) for layout in layouts] == [[0, 1], [2, 3]]
    second.delete([key(1), key(3)])
    assert [look_up(second, keys, layout) for layout in layouts] == [[1], [3]]


def test_objects_of_several_sizes_in_a_task(make: Make) -> None:
    adapter = make()
    shapes = [torch.Size([2, n * 1000]) for n in (1, 40, 3, 40)]
    objects = [memory(n, shape=shape) for n, shape in enumerate(shapes)]
    keys = [key(n, object_group_id=n) for n in range(4)]
    assert write(adapter, keys, objects).is_successful()
    layouts = {n: MemoryLayoutDesc([shape], [torch.bfloat16]) for n, shape in enumerate(shapes)}
    assert look_up(adapter, keys, layouts) == [0, 1, 2, 3]
    buffers = [memory(None, shape=shape) for shape in shapes]
    assert read(adapter, keys, buffers) == [0, 1, 2, 3]
    assert [bytes_of(obj) for obj in buffers] == [bytes_of(obj) for obj in objects]


def test_deleted_objects_and_usage(make: Make) -> None:
    adapter = make()
    salted = [key(n, cache_salt="tenant") for n in range(3)]
    assert write(adapter, salted, [memory(n) for n in range(3)]).is_successful()
    size = len(bytes_of(memory(0)))
    usage = adapter.get_usage()
    assert usage.bytes_by_cache_salt == {"tenant": 3 * size}
    assert usage.total_bytes_used >= 3 * size
    assert usage.usage_fraction == -1.0
    assert not adapter.supports_global_eviction
    adapter.delete(salted[:2])
    assert look_up(adapter, salted) == [2]
    assert adapter.get_usage().bytes_by_cache_salt == {"tenant": size}
    status = adapter.report_status()
    assert status["is_healthy"]
    assert status["tiers"]["disk"]["written"] > 0


def test_refused_objects_count_for_no_quota(make: Make, tmp_path: Path) -> None:
    """The admission rule refuses the first store of an object."""
    adapter = make(tiers=[f"disk:{tmp_path / 'kv'}:64MiB,admission=reuse:2"])
    salted, objects = [key(n, cache_salt="tenant") for n in range(3)], [memory(n) for n in range(3)]
    for used, count in (({}, 0), ({"tenant": 3 * len(bytes_of(objects[0]))}, 3)):
        result = write(adapter, salted, objects)
        assert result.is_successful(), "LMCache need not repeat the store"
        assert result.bytes_transferred() == count * len(bytes_of(objects[0]))
        assert adapter.get_usage().bytes_by_cache_salt == used
        assert len(look_up(adapter, salted)) == count


def test_listeners_learn_of_objects(make: Make) -> None:
    events: list[tuple[str, int]] = []

    class Listener:
        def on_l2_keys_stored(self, keys: Any, sizes: Any) -> None:
            events.append(("stored", len(keys)))

        def on_l2_keys_accessed(self, keys: Any) -> None:
            events.append(("accessed", len(keys)))

        def on_l2_keys_deleted(self, keys: Any) -> None:
            events.append(("deleted", len(keys)))

    adapter = make()
    adapter.register_listener(Listener())
    write(adapter, [key(1), key(2)], [memory(1), memory(2)])
    read(adapter, [key(1), key(3)], [memory(None), memory(None)])
    adapter.delete([key(1)])
    assert events == [("stored", 2), ("accessed", 1), ("deleted", 1)]


class Recorder:
    """A listener that records the objects and sizes of each event."""

    def __init__(self) -> None:
        self.stored: list[tuple[ObjectKey, int]] = []
        self.deleted: list[ObjectKey] = []

    def on_l2_keys_stored(self, keys: Any, sizes: Any) -> None:
        self.stored += zip(keys, sizes, strict=True)

    def on_l2_keys_accessed(self, keys: Any) -> None:
        pass

    def on_l2_keys_deleted(self, keys: Any) -> None:
        self.deleted += keys


def test_a_layout_without_shapes_is_no_hint(make: Make) -> None:
    """LMCache calls the layouts an advisory hint, and its own tests pass empty layouts."""
    adapter = make()
    assert write(adapter, [key(1)], [memory(1)]).is_successful()
    assert look_up(adapter, [key(1), key(2)], {0: MemoryLayoutDesc([], [])}) == [0]
    assert look_up(adapter, [key(1), key(2)]) == [0]


def test_a_repeated_store_is_counted_once(make: Make) -> None:
    adapter, recorder = make(), Recorder()
    adapter.register_listener(recorder)
    size = len(bytes_of(memory(1)))
    for transferred in (size, 0):
        assert write(adapter, [key(1)], [memory(1)]).bytes_transferred() == transferred
    assert write(adapter, [key(1), key(2)], [memory(1), memory(2)]).bytes_transferred() == size
    assert recorder.stored == [(key(1), size), (key(2), size)]
    assert adapter.get_usage().bytes_by_cache_salt == {"": 2 * size}


def test_only_objects_that_were_there_are_reported_as_deleted(make: Make) -> None:
    adapter, recorder = make(), Recorder()
    adapter.register_listener(recorder)
    assert write(adapter, [key(1), key(2)], [memory(1), memory(2)]).is_successful()
    for _ in range(2):
        adapter.delete([key(1), key(1), key(3)])
    assert recorder.deleted == [key(1)]
    assert adapter.get_usage().bytes_by_cache_salt == {"": len(bytes_of(memory(2)))}


def test_deleting_an_object_of_an_earlier_process_takes_nothing_from_the_quota(make: Make) -> None:
    first = make()
    assert write(first, [key(1)], [memory(1)]).is_successful()
    first.close()
    adapter, recorder = make(), Recorder()
    adapter.register_listener(recorder)
    assert write(adapter, [key(2)], [memory(2)]).is_successful()
    adapter.delete([key(1)])
    assert recorder.deleted == [key(1)]
    assert look_up(adapter, [key(1), key(2)]) == [1]
    assert adapter.get_usage().bytes_by_cache_salt == {"": len(bytes_of(memory(2)))}


def test_an_evicted_object_can_be_deleted(make: Make) -> None:
    """LMCache chooses objects by its own records: without a report, a quota would stay exceeded."""
    adapter, recorder = make(), Recorder()
    adapter.register_listener(recorder)
    assert write(adapter, [key(1)], [memory(1)]).is_successful()
    assert adapter._store.clear()
    adapter.delete([key(1)])
    assert recorder.deleted == [key(1)]
    assert adapter.get_usage().bytes_by_cache_salt == {}


def test_evicted_objects_are_not_counted_without_limit(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvoffload.integrations.lmcache._MOST_COUNTED", 4)
    adapter, recorder = make(), Recorder()
    adapter.register_listener(recorder)
    for n in range(3):
        assert write(adapter, [key(n)], [memory(n)]).is_successful()
    assert adapter._store.clear()
    assert recorder.deleted == []
    assert write(adapter, [key(3)], [memory(3)]).is_successful()
    assert recorder.deleted == [key(0), key(1), key(2)]
    assert adapter.get_usage().bytes_by_cache_salt == {"": len(bytes_of(memory(3)))}


def test_two_controllers_at_once(make: Make) -> None:
    """The store controller and the prefetch controller are threads; each sees its own tasks."""
    adapter, errors = make(), list[BaseException]()

    def stores() -> None:
        try:
            for n in range(0, 60, 4):
                write(adapter, [key(n + i) for i in range(4)], [memory(n + i) for i in range(4)])
        except BaseException as error:
            errors.append(error)

    def loads() -> None:
        try:
            for n in range(0, 60, 4):
                keys, buffers = [key(n + i) for i in range(4)], [memory(None) for _ in range(4)]
                look_up(adapter, keys)
                for row in read(adapter, keys, buffers):
                    assert bytes_of(buffers[row]) == bytes_of(memory(n + row))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for work in (stores, loads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors
    assert len(look_up(adapter, [key(n) for n in range(60)])) == 60


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"tiers": []}, r"tiers: \[\] is invalid"),
        ({"tiers": ["disk:/nvme/kv"]}, "its capacity is missing"),
        ({"tiers": ["simulated:100"]}, "a tier that stores bytes"),
        ({"path": "/nvme"}, "path"),
        ({"block": "none"}, "block: 'none' is invalid"),
    ],
)
def test_a_wrong_option_is_one_clear_error(make: Make, params: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(**params)


def test_damage_is_a_miss(make: Make, tmp_path: Path) -> None:
    adapter = make()
    objects = [memory(n) for n in range(4)]
    assert write(adapter, [key(n) for n in range(4)], objects).is_successful()
    (slab,) = (tmp_path / "kv").glob("*.slab")
    at = slab.read_bytes().index(bytes_of(objects[2])[:16384])
    with slab.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 1]))
    buffers = [memory(None) for _ in range(4)]
    assert read(adapter, [key(n) for n in range(4)], buffers) == [0, 1, 3]
    assert look_up(adapter, [key(n) for n in range(4)]) == [0, 1, 3]


def test_lmcaches_fault_injection(tmp_path: Path) -> None:
    """LMCache drops the third of five loads; the others are complete, and all can be read afterwards."""
    plain = {
        "type": "plugin",
        "module_path": "kvoffload.integrations.lmcache",
        "class_name": "KVOffloadAdapter",
        "adapter_params": {"tiers": [f"disk:{tmp_path / 'kv'}:64MiB"], "block": "16KiB"},
    }
    adapter = create_l2_adapter(FaultInjectL2AdapterConfig.from_dict({"inner": plain, "gap_indices": [2]}))
    keys, objects = [key(number) for number in range(5)], [memory(number) for number in range(5)]
    assert write(adapter, keys, objects).is_successful()
    for _ in range(2):
        assert look_up(adapter, keys) == [0, 1, 2, 3, 4]
        buffers = [memory(None) for _ in keys]
        assert read(adapter, keys, buffers) == [0, 1, 3, 4]
        for row in (0, 1, 3, 4):
            assert bytes_of(buffers[row]) == bytes_of(objects[row])
    buffer = memory(None)
    assert read(adapter, keys[2:3], [buffer]) == [0]
    assert bytes_of(buffer) == bytes_of(objects[2])
    adapter.close()


def test_a_hanging_tier_costs_the_deadline(make: Make) -> None:
    adapter = make()
    healthy, hanging = adapter._store, ScriptedTier(16384)
    adapter._store = ObjectStore([hanging], block_bytes=16384, staging_bytes=1 << 24, deadline_s=0.05)
    assert not write(adapter, [key(1)], [memory(1)]).is_successful()
    for job in list(hanging.jobs):
        hanging.end(job)
    assert look_up(adapter, [key(1)]) == [0]
    buffer = memory(None)
    assert read(adapter, [key(1)], [buffer]) == []
    for job in list(hanging.jobs):
        hanging.end(job)
    assert set(bytes_of(buffer)) == {0}
    adapter._store = healthy


def test_an_internal_error_is_a_miss(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    adapter = make()
    adapter._store.store = adapter._store.load = adapter._store.find = adapter._store.delete = None
    assert not write(adapter, [key(1)], [memory(1)]).is_successful()
    assert look_up(adapter, [key(1)]) == []
    assert read(adapter, [key(1)], [memory(None)]) == []
    adapter.delete([key(1)])
    assert "internal error in delete" in caplog.text


def test_after_close_everything_is_a_miss(make: Make) -> None:
    adapter = make()
    adapter.close()
    adapter.close()
    task = adapter.submit_store_task([key(1)], [memory(1)])
    assert not adapter.pop_completed_store_tasks()[task].is_successful()
    task = adapter.submit_load_task([key(1)], [memory(None)])
    assert list(adapter.query_load_result(task).get_indices_list()) == []


def test_a_disk_that_cannot_be_used_now(make: Make) -> None:
    adapter = make(tiers=["disk:/proc/kv:64MiB"])
    assert not write(adapter, [key(1)], [memory(1)]).is_successful()
    assert look_up(adapter, [key(1)]) == []
    assert not adapter.report_status()["is_healthy"]


@pytest.fixture(params=KINDS)
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[TierServer]:
    with servers.running(request.param, tmp_path / "server") as running:
        yield running


def test_adapters_share_a_server_that_goes_away(make: Make, server: TierServer) -> None:
    adapter, other = (make(tiers=[server.url], deadline="3s") for _ in range(2))
    assert write(adapter, [key(1)], [memory(1)]).is_successful()
    buffer = memory(None)
    assert look_up(other, [key(1), key(2)]) == [0]
    assert read(other, [key(1)], [buffer]) == [0]
    assert bytes_of(buffer) == bytes_of(memory(1))
    server.server.stop()
    assert read(adapter, [key(1)], [memory(None)]) == []
    assert look_up(adapter, [key(3)]) == []
    assert not write(adapter, [key(2)], [memory(2)]).is_successful()
    assert adapter.report_status()["is_healthy"]


def test_objects_in_a_server_outlive_the_adapter_until_a_reset(make: Make, server: TierServer) -> None:
    """LMCache has no call for a reset; another user of the tier may reset it."""
    first = make(tiers=[server.url], deadline="60s")
    objects = [memory(number) for number in range(4)]
    assert write(first, [key(number) for number in range(4)], objects).is_successful()
    first.close()
    second = make(tiers=[server.url], deadline="60s")
    keys = [key(number) for number in range(4)]
    buffers = [memory(None) for _ in keys]
    assert look_up(second, keys) == [0, 1, 2, 3]
    assert read(second, keys, buffers) == [0, 1, 2, 3]
    assert [bytes_of(buffer) for buffer in buffers] == [bytes_of(obj) for obj in objects]
    assert second._store.clear()
    third = make(tiers=[server.url], deadline="60s")
    assert look_up(third, keys) == []
    assert read(third, keys, [memory(None) for _ in keys]) == []
    assert write(third, keys[:1], objects[:1]).is_successful()
    assert look_up(second, keys) == [0]
    assert read(second, keys, [memory(None) for _ in keys]) == [0]
