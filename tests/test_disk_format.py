"""docs/formats.md, its reader in examples/, and our own code say the same of every byte."""

from __future__ import annotations

import random
import re
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from disk_blocks import KEY_BYTES, Disk, block_of, keys_of
from kvoffload.errors import ConfigError
from kvoffload.tiers.disk import format as forms
from kvoffload.tiers.disk.files import aligned
from kvoffload.tiers.disk.layout import ACCESS, GROUP, LOCK_FILE_BYTES, Layout, entry_dtype, header_dtype
from kvoffload.tiers.disk.slab import SLAB_NAME

ROOT = Path(__file__).resolve().parent.parent
READER = ROOT / "examples" / "read_slab.py"


@pytest.mark.parametrize("policy", ["lru", "s3fifo"])
def test_the_reader_in_examples_reads_what_the_tier_wrote(tmp_path: Path, policy: str) -> None:
    read_slab = runpy.run_path(str(READER))["read_slab"]
    disk, chance = Disk(tmp_path, 12, 5000, policy=policy), random.Random(3)
    for step in range(60):
        disk.write(chance.sample(range(40), 4), version=step)
        disk.use(chance.sample(range(40), 3))
        disk.tier.delete(keys_of([chance.randrange(40)]))
    assert disk.tier._journal.num_checkpoints > 0
    here = set(disk.here(range(40)))
    disk.tier.close()
    found = {int(key[3:]): payload for key, _, _, payload in read_slab(tmp_path / SLAB_NAME)}
    assert set(found) == here
    for number, payload in found.items():
        assert payload == block_of(number, disk.versions[number], 5000).tobytes()


def test_the_reader_is_short_and_imports_nothing_of_ours() -> None:
    text = READER.read_text()
    assert len(text.splitlines()) <= 80
    assert "import kvoffload" not in text
    assert "from kvoffload" not in text


def documented(heading: str) -> dict[int, int]:
    """Offsets and lengths in the table under a heading of docs/formats.md."""
    text = (ROOT / "docs" / "formats.md").read_text()
    section = text.split(f"### {heading}\n")[1].split("\n### ")[0]
    return {int(at): int(size) for at, size in re.findall(r"^\| (\d+) \| (\d+) \|", section, re.M)}


@pytest.mark.parametrize(
    ("heading", "dtype"),
    [
        ("Superblock", forms.SUPERBLOCK),
        ("Groups", GROUP),
        ("Checkpoints", forms.HEAD),
        ("Blocks", np.dtype(header_dtype(KEY_BYTES).descr[:-1])),
    ],
)
def test_the_tables_are_those_of_the_code(heading: str, dtype: np.dtype[Any]) -> None:
    assert dtype.fields is not None
    assert documented(heading) == {field[1]: field[0].itemsize for field in dtype.fields.values()}


def test_records_have_no_gaps() -> None:
    for key_bytes in (1, 8, 12, 36, 1024):
        padded = (key_bytes + 7) // 8 * 8
        assert entry_dtype(key_bytes).itemsize == 40 + padded
        assert header_dtype(key_bytes).itemsize == 48 + padded
    assert (GROUP.itemsize, ACCESS.itemsize, forms.HEAD.itemsize, forms.SUPERBLOCK.itemsize) == (
        72,
        8,
        56,
        120,
    )


@given(st.integers(0, 5), st.integers(0, 5), st.integers(0, 5), st.integers(1, 40), st.integers(0, 2**32 - 1))
def test_a_group_comes_back_as_it_went(
    removed: int, added: int, used: int, key_bytes: int, seed: int
) -> None:
    layout, chance = Layout(4096, key_bytes, 100), np.random.default_rng(seed)
    entries = np.frombuffer(chance.bytes(added * layout.entry_bytes), entry_dtype(key_bytes))
    accesses = np.frombuffer(chance.bytes(used * 8), ACCESS)
    slots = chance.integers(0, 100, removed).astype(np.uint32)
    size = (72 + (removed + 1) // 2 * 8 + added * layout.entry_bytes + used * 8 + 4095) // 4096 * 4096
    group = forms.Group(3, 4, forms.LOG, slots, entries, accesses, 17, size)
    memory = aligned(65536)
    encoded = forms.encode_group(layout, 99, group, memory)
    assert len(encoded) == size
    found = forms.decode_group(layout, 99, memory)
    assert found is not None
    for mine, its in zip(group, found, strict=True):
        assert np.array_equal(mine, its)
    assert forms.decode_group(layout, 98, memory) is None, "another slab's"
    body_end = 72 + (removed + 1) // 2 * 8 + added * layout.entry_bytes + used * 8
    at = int(chance.integers(0, body_end))
    memory[at] ^= 1 << int(chance.integers(0, 8))
    assert forms.decode_group(layout, 99, memory) is None


def test_slots_are_numbered_in_32_bits() -> None:
    assert Layout.within(1 << 62, 4096, 8).num_slots == 1 << 30


def test_what_is_named_as_the_least_is_enough() -> None:
    with pytest.raises(ConfigError, match=r"\d+ or more, which one block of 4096 bytes needs") as refused:
        Layout.within(1, 4096, 8)
    least = int(str(refused.value).split("allowed: ")[1].split()[0])
    assert Layout.within(least, 4096, 8).num_slots == 1
    with pytest.raises(ConfigError, match=str(least)):
        Layout.within(least - 1, 4096, 8)


@given(st.integers(1, 1 << 22), st.integers(1, 64), st.integers(0, 1 << 34))
def test_a_layout_fills_what_it_is_given(block_bytes: int, key_bytes: int, capacity_bytes: int) -> None:
    try:
        layout = Layout.within(capacity_bytes, block_bytes, key_bytes)
    except ConfigError:
        assert Layout(block_bytes, key_bytes, 1).file_bytes + LOCK_FILE_BYTES > capacity_bytes
        return
    assert layout.file_bytes + LOCK_FILE_BYTES <= capacity_bytes
    assert Layout(block_bytes, key_bytes, layout.num_slots + 1).file_bytes + LOCK_FILE_BYTES > capacity_bytes
    places = [
        8192,
        layout.checkpoint_offset(0),
        layout.checkpoint_offset(1),
        layout.log_offset,
        layout.slots_offset,
    ]
    assert places == sorted(places)
    assert all(place % 4096 == 0 for place in (*places, layout.slot_bytes))
    groups = -(-layout.num_slots // layout.entries_per_group)
    assert groups * layout.checkpoint_group_bytes + 8192 == layout.checkpoint_bytes
