"""The RAM tier returns stored bytes, and only bytes that were stored under the requested key."""

from __future__ import annotations

import importlib.util
import mmap

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvoffload.errors import MisuseError
from kvoffload.structures.keys import Keys
from kvoffload.tiers import memory
from kvoffload.tiers.memory import MemoryTier, available_bytes
from kvoffload.transfer import HostEngine
from support.refusals import refusal

KEY_BYTES = 36


def keys_of(*numbers: int) -> Keys:
    return Keys.pack([number.to_bytes(KEY_BYTES, "big") for number in numbers], KEY_BYTES)


def blocks_of(num_blocks: int, block_bytes: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (num_blocks, block_bytes), np.uint8)


def test_blocks_are_loaded_from_scattered_slots():
    device, out = blocks_of(10, 4096), np.zeros((10, 4096), np.uint8)
    tier = MemoryTier(16, 4096)
    keys, slots, rows = keys_of(1, 2, 3, 4), np.array([15, 0, 3, 4], np.int32), np.array([9, 2, 3, 0])
    tier.write(keys, slots, device, rows)
    assert tier.verify_slots(keys, slots).all()
    sound = tier.read(keys[1:], slots[1:], out, np.array([5, 6, 7]))
    assert sound.dtype == np.bool_
    assert sound.all()
    assert np.array_equal(out[5:8], device[[2, 3, 0]])
    assert not out[[0, 1, 2, 3, 4, 8, 9]].any()


@given(data=st.data())
def test_any_sequence_of_writes_erases_and_reads_equals_a_dict(data):
    """The model maps slots to (key, bytes). Chunks have two blocks, so that batches span several chunks."""
    block_bytes = data.draw(st.sampled_from([1, 63, 64, 200]))
    tier, model, device = MemoryTier(6, block_bytes), {}, blocks_of(6, block_bytes)
    slots_and_keys = st.lists(
        st.tuples(st.integers(0, 5), st.integers(0, 3)), max_size=6, unique_by=lambda pair: pair[0]
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "CHUNK_BYTES", 2 * block_bytes)
        for action in data.draw(st.lists(st.sampled_from(["write", "erase", "read"]), max_size=12)):
            batch = data.draw(slots_and_keys)
            slots, keys = np.array([slot for slot, _ in batch], np.int64), keys_of(*(key for _, key in batch))
            rows = np.arange(len(batch))
            if action == "erase":
                tier.erase(slots)
                for slot, _ in batch:
                    model.pop(slot, None)
            elif action == "write":
                device[:] = blocks_of(6, block_bytes, data.draw(st.integers(0, 100)))
                tier.write(keys, slots, device, rows)
                model.update({slot: (key, device[row].copy()) for row, (slot, key) in enumerate(batch)})
            else:
                out = np.zeros_like(device)
                sound = tier.read(keys, slots, out, rows)
                assert sound.tolist() == [slot in model and model[slot][0] == key for slot, key in batch]
                for row, (slot, _) in enumerate(batch):
                    assert np.array_equal(out[row], model[slot][1] if sound[row] else np.zeros(block_bytes))
    tier.close()


@pytest.mark.skipif(not importlib.util.find_spec("torch"), reason="torch is not installed")
def test_a_tensor_is_stored_and_loaded():
    import torch

    device = torch.randn(6, 2, 16, 8).to(torch.bfloat16)
    original, keys, slots = device.clone(), keys_of(1, 2, 3), np.array([7, 0, 3])
    tier = MemoryTier(8, 512)
    tier.write(keys, slots, device, np.array([5, 1, 2]))
    device.zero_()
    assert tier.read(keys, slots, device, np.array([5, 1, 2])).all()
    assert torch.equal(device[[5, 1, 2]], original[[5, 1, 2]])
    assert not device[[0, 3, 4]].any()


def test_damage_is_found_and_not_copied():
    device, out = blocks_of(4, 1000), np.full((4, 1000), 77, np.uint8)
    tier, keys, rows = MemoryTier(4, 1000), keys_of(1, 2, 3, 4), np.arange(4)
    tier.write(keys, rows, device, rows)
    tier.pool[1, 999] ^= 1
    tier.pool[2] = 0
    assert tier.verify_slots(keys, rows).tolist() == [True, False, False, True]
    assert tier.read(keys, rows, out, rows).tolist() == [True, False, False, True]
    assert np.array_equal(out[[0, 3]], device[[0, 3]])
    assert (out[[1, 2]] == 77).all()


def test_a_right_checksum_in_the_wrong_slot_is_found():
    tier, keys, rows = MemoryTier(2, 4096), keys_of(1, 2), np.arange(2)
    tier.write(keys, rows, blocks_of(2, 4096), rows)
    tier.pool[:] = tier.pool[::-1].copy()
    tier.checksums[:] = tier.checksums[::-1].copy()
    assert not tier.verify_slots(keys, rows).any()
    # The keys are wrong, not the bytes: under the other key each block is sound.
    assert tier.verify_slots(keys_of(2, 1), rows).all()


def test_equal_bytes_under_another_key_are_not_that_block():
    tier = MemoryTier(1, 64)
    tier.write(keys_of(1), np.array([0]), np.zeros((1, 64), np.uint8), np.array([0]))
    assert not tier.verify_slots(keys_of(2), np.array([0])).any()


def test_a_slot_that_was_never_written_or_erased_is_not_sound():
    tier, zero = MemoryTier(2, 64), np.array([0])
    assert not tier.verify_slots(keys_of(1), zero).any()
    tier.write(keys_of(1), zero, np.zeros((1, 64), np.uint8), zero)
    tier.erase(zero)
    assert not tier.read(keys_of(1), zero, np.zeros((1, 64), np.uint8), zero).any()


def test_the_checksum_is_xxh3_seeded_with_the_digest():
    tier, device, keys = MemoryTier(1, 100), blocks_of(1, 100), keys_of(5)
    tier.write(keys, np.array([0]), device, np.array([0]))
    assert tier.checksums[0] == xxhash.xxh3_64_intdigest(device.tobytes(), int(keys.digests[0]))


def test_without_verification_everything_counts_as_sound():
    tier, keys, rows = MemoryTier(2, 64, verify=False), keys_of(1, 2), np.arange(2)
    assert tier.checksums is None
    device, out = blocks_of(2, 64), np.zeros((2, 64), np.uint8)
    tier.write(keys, rows, device, rows)
    tier.pool[0] = 0
    tier.erase(rows[1:])
    assert tier.read(keys, rows, out, rows).all()
    assert not out[0].any()
    assert np.array_equal(out[1], device[1])


class FailingEngine(HostEngine):
    """An engine whose second store fails."""

    stores = 0

    def store(self, device_rows, pool, slots):
        self.stores += 1
        if self.stores == 2:
            raise RuntimeError("the device is gone")
        return super().store(device_rows, pool, slots)


def test_a_write_that_fails_half_way_leaves_no_sound_slot(monkeypatch):
    monkeypatch.setattr(memory, "CHUNK_BYTES", 64)
    tier, keys, rows, device = MemoryTier(2, 64), keys_of(1, 2), np.arange(2), blocks_of(2, 64)
    tier.write(keys, rows, device, rows)
    with pytest.raises(RuntimeError, match="the device is gone"):
        tier.write(keys, rows, FailingEngine(device), rows)
    assert not tier.verify_slots(keys, rows).any()


def test_a_caller_with_its_own_engine_seals_and_verifies():
    """An engine integration calls: submit, poll, seal; verify, then load."""
    device = blocks_of(3, 64)
    tier, engine, keys, rows = MemoryTier(3, 64), HostEngine(device), keys_of(1, 2, 3), np.arange(3)
    transfer = engine.store(rows, tier.pool, rows)
    assert not tier.verify_slots(keys, rows).any()
    assert transfer.done()
    tier.seal(keys, rows)
    assert tier.verify_slots(keys, rows).all()


def test_the_pool_is_page_aligned_contiguous_and_aligned_by_slot():
    tier = MemoryTier(3, 100)
    assert tier.pool.ctypes.data % mmap.PAGESIZE == 0
    assert tier.slot_stride == 128
    assert tier.pool.shape == (3, 100)
    assert tier.pool.strides == (128, 1)
    assert MemoryTier(3, 4096).pool.flags.c_contiguous


def test_a_pool_larger_than_memory_is_refused(monkeypatch):
    with refusal(r"num_slots \* block_bytes: '1099511627776 \* 65536 = .* avail"):
        MemoryTier(2**40, 2**16)
    assert 2**20 < available_bytes() < 2**63 - 1
    # Also a pool that could be mapped but not filled.
    monkeypatch.setattr(memory, "available_bytes", lambda: 2**20)
    with refusal(r"257 \* 4096 = 1"):
        MemoryTier(257, 4096)
    MemoryTier(256, 4096).close()
    for num_slots, block_bytes, field in ((0, 64, "num_slots"), (1, 0, "block_bytes")):
        with refusal(rf"{field}: 0 is invalid"):
            MemoryTier(num_slots, block_bytes)


@pytest.mark.parametrize(
    ("place", "limit", "usage"),
    [
        ("/sys/fs/cgroup", "memory.max", "memory.current"),
        ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ],
)
def test_the_limit_of_a_container_bounds_available_memory(monkeypatch, place, limit, usage):
    limit, usage = f"{place}/{limit}", f"{place}/{usage}"
    files = {limit: "123456\n", "/proc/meminfo": "MemTotal: 9000 kB\nMemAvailable:  8000 kB\n"}

    class Read:
        def __init__(self, path):
            self.path = path

        def read_text(self):
            if self.path not in files:
                raise FileNotFoundError(self.path)
            return files[self.path]

    monkeypatch.setattr(memory, "Path", Read)
    assert available_bytes() == 123_456
    files[usage] = "100000\n"
    files[f"{place}/memory.stat"] = "anon 60000\nfile 40000\ninactive_file 30000\nactive_file 9000\n"
    assert available_bytes() == 123_456 - 61_000, "processes of the container use the rest"
    files[usage] = "200000\n"
    assert available_bytes() == 0
    files[limit] = "max\n"
    assert available_bytes() == 8_000 * 1024


@pytest.mark.parametrize("error", [OSError, OverflowError, ValueError])
def test_a_failed_mapping_is_a_config_error(monkeypatch, error):
    """Another process may have taken the memory, or the number may be too large."""

    def refuse(fileno, length):
        raise error("no")

    monkeypatch.setattr(memory.mmap, "mmap", refuse)
    with refusal(r"2 \* 64 = 128"):
        MemoryTier(2, 64)


def test_misuse_is_named_and_changes_nothing():
    tier, keys, rows, device = MemoryTier(2, 64), keys_of(1, 2), np.arange(2), blocks_of(2, 64)
    tier.write(keys, rows, device, rows)
    with pytest.raises(IndexError, match=r"slots\[1\] is 2; there are 2"):
        tier.write(keys, np.array([0, 2]), device, rows)
    with pytest.raises(IndexError, match=r"source_rows\[0\] is -1; there are 2"):
        tier.write(keys, rows, device, np.array([-1, 0]))
    with pytest.raises(ValueError, match="2 keys but 1 slots"):
        tier.write(keys, np.array([0]), device, rows)
    with pytest.raises(ValueError, match="2 slots but 1 dest_rows"):
        tier.read(keys, rows, device, np.array([0]))
    with pytest.raises(ValueError, match="device has blocks of 32 bytes, this tier of 64"):
        tier.read(keys, rows, np.zeros((2, 32), np.uint8), rows)
    assert tier.verify_slots(keys, rows).all()


def test_use_after_close_is_misuse():
    tier, keys, rows, device = MemoryTier(2, 64), keys_of(1, 2), np.arange(2), blocks_of(2, 64)
    view = tier.pool
    tier.close()
    tier.close()
    for call in (
        lambda: tier.pool,
        lambda: tier.write(keys, rows, device, rows),
        lambda: tier.read(keys, rows, device, rows),
        lambda: tier.verify_slots(keys, rows),
        lambda: tier.seal(keys, rows),
        lambda: tier.erase(rows),
    ):
        with pytest.raises(MisuseError, match="this memory tier of 2 slots is closed"):
            call()
    # A view kept by a caller is still valid memory.
    view[:] = 1


@given(st.lists(st.binary(min_size=12, max_size=12), unique=True, max_size=20))
def test_digests_differ_and_depend_only_on_keys(keys):
    digests = Keys.pack(keys, 12).digests
    assert len(set(digests.tolist())) == len(keys)
    assert digests.tolist() == [int(Keys.pack([key], 12).digests[0]) for key in keys]


def test_keys_that_differ_only_in_their_padding_have_different_digests():
    assert Keys.pack([b"a"], 1).digests != Keys.pack([b"a\0"], 2).digests


@pytest.mark.parametrize("option", ["num_slots", "block_bytes"])
@pytest.mark.parametrize("value", [0, True, 2.5, "7", None])
def test_sizes_must_be_whole_numbers(option: str, value: object) -> None:
    with refusal(f"^{option}: "):
        MemoryTier(**{"num_slots": 4, "block_bytes": 8, option: value})
