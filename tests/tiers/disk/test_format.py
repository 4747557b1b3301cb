"""docs/formats.md, the reader in examples/ and the code agree on every byte."""

from __future__ import annotations

import os
import random
import re
import runpy
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvoffload.errors import ConfigError
from kvoffload.tiers.disk import slab_format as forms
from kvoffload.tiers.disk.files import aligned
from kvoffload.tiers.disk.inspection import inspect, opened, verify
from kvoffload.tiers.disk.slab_layout import ACCESS, GROUP, LOCK_FILE_BYTES, Layout, entry_dtype, header_dtype
from support.disk_blocks import KEY_BYTES, Disk, block_of, keys_of, slab_in
from support.recording_files import write_image
from support.refusals import refusal
from support.timeouts import HANGS_S

ROOT = Path(__file__).resolve().parents[3]
READER = ROOT / "examples" / "read_slab.py"
DAMAGES = int(os.environ.get("KVOFFLOAD_DAMAGES", "4"))


@pytest.mark.parametrize("policy", ["lru", "s3fifo"])
def test_the_reader_in_examples_reads_blocks_of_the_tier(tmp_path: Path, policy: str) -> None:
    read_slab = runpy.run_path(str(READER))["read_slab"]
    disk, chance = Disk(tmp_path, 12, 5000, policy=policy), random.Random(3)
    for step in range(60):
        disk.write(chance.sample(range(40), 4), version=step)
        disk.use(chance.sample(range(40), 3))
        disk.tier.delete(keys_of([chance.randrange(40)]))
    here = set(disk.here(range(40)))
    disk.tier.close()
    assert inspect(tmp_path)[0].epoch > 0, "there was a checkpoint"
    payloads = {int(key[3:]): payload for key, _, _, payload in read_slab(slab_in(tmp_path))}
    assert set(payloads) == here
    for number, payload in payloads.items():
        assert payload == block_of(number, disk.versions[number], 5000).tobytes()


def test_the_reader_is_short_and_does_not_import_kvoffload() -> None:
    text = READER.read_text()
    assert len(text.splitlines()) <= 90
    assert "import kvoffload" not in text
    assert "from kvoffload" not in text


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, DAMAGES))]
)
def test_the_reader_agrees_with_the_tier_on_a_damaged_slab(tmp_path: Path, seed: int) -> None:
    """The example reader handles flipped, zeroed, outdated and moved pages like the tier."""
    read_slab = runpy.run_path(str(READER))["read_slab"]
    chance = random.Random(seed)
    earlier = live_and_close(tmp_path, chance)
    later = live_and_close(tmp_path, chance)
    layout = Layout.holding(5000, KEY_BYTES, 12)
    for _ in range(20):
        damaged = bytearray(later)
        for _ in range(chance.randrange(1, 6)):
            at, size = chance.randrange(2, layout.slots_offset // 4096) * 4096, 4096
            kind = chance.choice(["flip", "zero", "earlier", "copy", "place"])
            if kind == "flip":
                damaged[at + chance.randrange(size)] ^= 1 << chance.randrange(8)
            elif kind == "zero":
                damaged[at : at + size] = bytes(size)
            elif kind == "earlier":
                damaged[at : at + size] = earlier[at : at + size]
            elif kind == "copy":
                other = chance.randrange(2, layout.slots_offset // 4096) * 4096
                damaged[at : at + size] = later[other : other + size]
            else:
                place = chance.randrange(2)
                for head in (0, layout.checkpoint_bytes - 4096):
                    begin = layout.checkpoint_offset(place) + head
                    damaged[begin : begin + 4096] = bytes(4096)
        slab_in(tmp_path).write_bytes(bytes(damaged))
        with opened(tmp_path) as (slab, recovered):
            bad = {problem.slot for problem in verify(slab, recovered)}
            contents = recovered.contents
            expected = {
                (contents.keys(np.array([slot]))[0], slot, int(contents.generation[slot]))
                for slot in contents.slots().tolist()
                if slot not in bad
            }
        blocks = {(key, slot, generation) for key, slot, generation, _ in read_slab(slab_in(tmp_path))}
        assert blocks == expected, f"seed {seed}"


def live_and_close(directory: Path, chance: random.Random) -> bytes:
    """Return the bytes of a slab after writes with checkpoints."""
    disk = Disk(directory, 12, 5000)
    for step in range(30):
        disk.write(chance.sample(range(40), 4), version=step)
        disk.use(chance.sample(range(40), 3))
        disk.tier.delete(keys_of([chance.randrange(40)]))
    disk.tier.close()
    return slab_in(directory).read_bytes()


# ---- sound checksums over impossible values

NOT_POSSIBLE = [0, 4097, 2**63]
MORE_NOT_POSSIBLE = [1, 4095, 70_000, 2**31, 2**32 - 1, 2**40, 2**60, 2**64 - 1]
ABSURD = pytest.mark.parametrize(
    "values", [NOT_POSSIBLE, pytest.param(MORE_NOT_POSSIBLE, marks=pytest.mark.slow)], ids=["few", "more"]
)


def absurd(field: np.dtype[Any], value: int) -> int:
    return value % (1 << 8 * field.itemsize)


def opens_or_is_refused(directory: Path) -> None:
    """Open, inspect and verify a slab; only `ConfigError` is allowed."""
    reports = inspect(directory)
    assert len(reports) == 1
    try:
        with opened(directory) as (slab, recovered):
            verify(slab, recovered)
    except ConfigError:
        assert reports[0].problem
    try:
        disk = Disk(directory, 12, 5000)
    except ConfigError:
        return
    disk.versions = dict.fromkeys(range(8), 0)
    disk.read(range(8))
    assert disk.wrong == 0
    disk.write([20, 21])
    disk.tier.drain(HANGS_S)
    disk.tier.close()


@pytest.fixture(scope="module")
def sound_slab(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, bytes]:
    directory = tmp_path_factory.mktemp("sound")
    disk = Disk(directory, 12, 5000)
    disk.write(range(8))
    disk.tier.close()
    return slab_in(directory).name, slab_in(directory).read_bytes()


def put(directory: Path, sound: tuple[str, bytes], at: Iterable[int], page: bytes) -> None:
    image = bytearray(sound[1])
    for offset in at:
        image[offset : offset + len(page)] = page
    write_image(directory, sound[0], bytes(image))


@ABSURD
@pytest.mark.parametrize(
    "name", [n for n in forms.SUPERBLOCK.names or () if n not in ("magic", "checksum", "fingerprint")]
)
def test_absurd_superblocks(
    tmp_path: Path, sound_slab: tuple[str, bytes], name: str, values: list[int]
) -> None:
    for number, value in enumerate(values):
        page, fields = superblock_of(sound_slab)
        fields[name] = absurd(forms.SUPERBLOCK[name], value)
        put(tmp_path / str(number), sound_slab, (0, 4096), bytes(forms.seal_page(page, fields)))
        opens_or_is_refused(tmp_path / str(number))


def superblock_of(sound: tuple[str, bytes]) -> tuple[Any, Any]:
    page = np.frombuffer(sound[1][:4096], np.uint8).copy()
    fields = page[: forms.SUPERBLOCK.itemsize].view(forms.SUPERBLOCK)
    fields["checksum"] = 0
    return page, fields


@pytest.mark.parametrize(("num_slots", "pages"), [(1, 16), (256, 1020), (257, 1024), (5000, 1024)])
def test_the_log_has_16_to_1024_pages_if_slots_are_large(num_slots: int, pages: int) -> None:
    layout = Layout(2**20 - 4096, KEY_BYTES, num_slots)
    assert layout.log_bytes == pages * 4096


@pytest.mark.parametrize("num_slots", [2**20, 2**30, 2**31, 2**40])
def test_a_superblock_with_too_many_slots_and_matching_sizes_is_refused(
    tmp_path: Path, sound_slab: tuple[str, bytes], num_slots: int
) -> None:
    layout = Layout(5000, KEY_BYTES, num_slots)
    page, fields = superblock_of(sound_slab)
    fields["num_slots"] = num_slots
    for name in ("checkpoint_bytes", "checkpoint_group_bytes", "log_bytes"):
        fields[name] = getattr(layout, name)
    put(tmp_path / "slab", sound_slab, (0, 4096), bytes(forms.seal_page(page, fields)))
    (report,) = inspect(tmp_path / "slab")
    assert report.problem
    opens_or_is_refused(tmp_path / "slab")


@ABSURD
@pytest.mark.parametrize("name", [n for n in forms.HEAD.names or () if n not in ("magic", "checksum")])
def test_absurd_heads(tmp_path: Path, sound_slab: tuple[str, bytes], name: str, values: list[int]) -> None:
    layout = Layout.holding(5000, KEY_BYTES, 12)
    at = layout.checkpoint_offset(0), layout.checkpoint_offset(0) + layout.checkpoint_bytes - 4096
    for number, value in enumerate(values):
        page = np.frombuffer(sound_slab[1][at[0] :][:4096], np.uint8).copy()
        fields = page[: forms.HEAD.itemsize].view(forms.HEAD)
        fields["checksum"], fields[name] = 0, absurd(forms.HEAD[name], value)
        put(tmp_path / str(number), sound_slab, at, bytes(forms.seal_page(page, fields)))
        opens_or_is_refused(tmp_path / str(number))


ENTRY_FIELDS = [f"entry {name}" for name in ("slot", "uses", "generation", "stamp", "written_at_s")]


@ABSURD
@pytest.mark.parametrize(
    "name", [n for n in GROUP.names or () if n not in ("magic", "checksum")] + ENTRY_FIELDS
)
def test_absurd_groups(tmp_path: Path, sound_slab: tuple[str, bytes], name: str, values: list[int]) -> None:
    layout, dtype = Layout.holding(5000, KEY_BYTES, 12), entry_dtype(KEY_BYTES)
    for number, value in enumerate(values):
        group = np.frombuffer(sound_slab[1][layout.log_offset :][:4096], np.uint8).copy()
        header = group[: GROUP.itemsize].view(GROUP)
        end = GROUP.itemsize + int(header["body_bytes"][0])
        header["checksum"] = 0
        if name.startswith("entry"):
            field = name.split()[1]
            entries = group[GROUP.itemsize :][: 8 * dtype.itemsize].view(dtype)
            assert entries["generation"].all(), "the first eight entries, behind no removal"
            entries[field][3] = absurd(dtype[field], value)
        else:
            header[name] = absurd(GROUP[name], value)
        header["checksum"] = forms.chained_checksum(group[: GROUP.itemsize], group[GROUP.itemsize : end])
        put(tmp_path / str(number), sound_slab, [layout.log_offset], bytes(group))
        opens_or_is_refused(tmp_path / str(number))


def documented(heading: str) -> dict[int, int]:
    """Return offsets and lengths of the table under a heading of docs/formats.md."""
    text = (ROOT / "docs" / "formats.md").read_text()
    section = re.split(r"\n##", text.split(f"### {heading}\n")[1])[0]
    return {int(at): int(size) for at, size in re.findall(r"^(\d+) +(\d+) ", section, re.M)}


@pytest.mark.parametrize(
    ("heading", "dtype"),
    [
        ("Superblock", forms.SUPERBLOCK),
        ("Groups", GROUP),
        ("Entries", np.dtype(entry_dtype(KEY_BYTES).descr[:-1])),
        ("Checkpoints", forms.HEAD),
        ("Blocks", np.dtype(header_dtype(KEY_BYTES).descr[:-1])),
    ],
)
def test_tables_agree_with_the_code(heading: str, dtype: np.dtype[Any]) -> None:
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
        64,
        160,
    )


@given(st.integers(0, 5), st.integers(0, 5), st.integers(0, 5), st.integers(1, 40), st.integers(0, 2**32 - 1))
def test_a_decoded_group_equals_the_encoded_group(
    removed: int, added: int, used: int, key_bytes: int, seed: int
) -> None:
    layout, chance = Layout(4096, key_bytes, 100), np.random.default_rng(seed)
    entries = np.frombuffer(chance.bytes(added * layout.entry_bytes), entry_dtype(key_bytes)).copy()
    entries["generation"] >>= np.uint64(2)
    accesses = np.frombuffer(chance.bytes(used * 8), ACCESS)
    slots = chance.integers(0, 100, removed).astype(np.uint32)
    size = (72 + (removed + 1) // 2 * 8 + added * layout.entry_bytes + used * 8 + 4095) // 4096 * 4096
    group = forms.Group(3, 4, forms.LOG, slots, entries, accesses, 17, size)
    memory = aligned(65536)
    encoded = forms.encode_group(layout, 99, group, memory)
    assert len(encoded) == size
    decoded = forms.decode_group(layout, 99, memory)
    assert decoded is not None
    for before, after in zip(group, decoded, strict=True):
        assert np.array_equal(before, after)
    assert forms.decode_group(layout, 98, memory) is None, "another slab's"
    body_end = 72 + (removed + 1) // 2 * 8 + added * layout.entry_bytes + used * 8
    at = int(chance.integers(0, body_end))
    memory[at] ^= 1 << int(chance.integers(0, 8))
    assert forms.decode_group(layout, 99, memory) is None


def test_slots_are_numbered_in_32_bits() -> None:
    assert Layout.within(1 << 62, 4096, 8).num_slots == 1 << 30


def test_smallest_named_capacity_suffices() -> None:
    with refusal(r"\d+ or more, the size of a directory with one block") as refused:
        Layout.within(1, 4096, 8)
    least = int(str(refused.value).split("allowed: ")[1].split()[0])
    assert Layout.within(least, 4096, 8).num_slots == 1
    with refusal(str(least)):
        Layout.within(least - 1, 4096, 8)


@given(st.integers(1, 1 << 22), st.integers(1, 64), st.integers(0, 1 << 34))
def test_a_layout_fills_its_capacity(block_bytes: int, key_bytes: int, capacity_bytes: int) -> None:
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
