"""Changes of the capacity between starts keep as many blocks as fit, hottest first, also after a crash."""

from __future__ import annotations

import errno
import random
from pathlib import Path

import pytest

from kvoffload.errors import UnavailableError
from kvoffload.tiers.disk.files import PAGE_BYTES
from kvoffload.tiers.disk.inspection import opened, verify
from kvoffload.tiers.disk.slab_layout import LOCK_FILE_BYTES, Layout
from kvoffload.tiers.striped import StripedTier
from support.disk_blocks import KEY_BYTES, Disk, Driver, capacity_for, keys_of, slab_in, slab_name
from support.recording_files import KINDS, BufferedFiles, FailingFiles, Recorder, raises, works, write_image
from support.timeouts import HANGS_S

CHANGES = [(60, 200), (60, 75), (200, 60), (200, 20)]


def used_bytes(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.iterdir())


def filled(directory: Path, num_blocks: int, numbers: list[int], **options: object) -> None:
    disk = Disk(directory, num_blocks, **options)
    for number in numbers:
        assert disk.write([number]) == [number]
    assert disk.tier.drain(HANGS_S)
    disk.tier.close()


def read_all(disk: Driver, numbers: list[int]) -> list[int]:
    served = []
    for start in range(0, len(numbers), 50):
        served += disk.read(numbers[start : start + 50])
    return served


def close(disk: Disk) -> None:
    assert disk.tier.drain(HANGS_S)
    disk.audit()
    disk.tier.close()
    assert (disk.wrong, disk.tier.stats().mismatches) == (0, 0)


@pytest.mark.parametrize("num_blocks", [100, 130, 300])
def test_a_larger_capacity_keeps_all(
    tmp_path: Path, num_blocks: int, caplog: pytest.LogCaptureFixture
) -> None:
    numbers = list(range(100))
    filled(tmp_path, 100, numbers)
    disk = Disk(tmp_path, num_blocks)
    disk.versions = dict.fromkeys(numbers, 0)
    assert read_all(disk, numbers) == numbers
    assert disk.tier.stats().capacity == num_blocks
    if num_blocks > 100:
        (message,) = [record.getMessage() for record in caplog.records]
        assert f"from {capacity_for(100, 4096)} to {capacity_for(num_blocks, 4096)} bytes" in message
        assert "100 of 100 blocks are kept" in message
    new = list(range(1000, 1000 + num_blocks - 100))
    for number in new:
        assert disk.write([number]) == [number]
    assert len(disk.here(numbers + new)) == num_blocks
    assert used_bytes(tmp_path) <= capacity_for(num_blocks, 4096)
    close(disk)
    with opened(tmp_path) as (slab, recovered):
        assert verify(slab, recovered) == []
    caplog.clear()
    Disk(tmp_path, num_blocks).tier.close()
    assert caplog.records == [], "logged once"


@pytest.mark.parametrize("num_blocks", [90, 50, 10])
def test_a_smaller_capacity_keeps_the_hottest(tmp_path: Path, num_blocks: int) -> None:
    numbers = list(range(100))
    chance = random.Random(num_blocks)
    chance.shuffle(numbers)
    filled(tmp_path, 100, numbers)
    disk = Disk(tmp_path, 100)
    hot = chance.sample(numbers, num_blocks // 2)
    disk.use(hot)
    disk.versions = dict.fromkeys(numbers, 0)
    close(disk)
    disk = Disk(tmp_path, num_blocks)
    disk.versions = dict.fromkeys(numbers, 0)
    capacity = disk.tier.stats().capacity
    assert num_blocks - 2 <= capacity <= num_blocks
    recent = [number for number in numbers if number not in hot][-(capacity - len(hot)) :]
    assert set(read_all(disk, disk.here(numbers))) == {*hot, *recent}
    assert used_bytes(tmp_path) <= capacity_for(num_blocks, 4096)
    close(disk)
    with opened(tmp_path) as (slab, recovered):
        assert verify(slab, recovered) == []


def test_a_capacity_too_small_for_the_journal_replaces_the_slab(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Disk(tmp_path, 20_000, 512).tier.close()
    disk = Disk(tmp_path, 2, 512)
    assert "its journal does not fit, so the slab is replaced" in caplog.text
    assert disk.write([1]) == [1]
    assert used_bytes(tmp_path) <= capacity_for(2, 512)
    close(disk)


@pytest.mark.parametrize("number", [errno.ENOMEM, errno.ESTALE])
def test_a_smaller_capacity_forgets_no_block_that_the_system_refuses_to_read(
    tmp_path: Path, number: int
) -> None:
    numbers = list(range(100))
    filled(tmp_path, 100, numbers)
    with opened(tmp_path) as (slab, _):
        slots_offset = slab.layout.slots_offset
    files = FailingFiles()
    files.fail = raises(number, "read", above=slots_offset)
    disk = Disk(tmp_path, 100)
    disk.use(numbers[-30:])
    close(disk)
    with pytest.raises(UnavailableError, match="the system refuses to read some blocks"):
        Disk(tmp_path, 50, files=files)
    files.fail = works
    disk = Disk(tmp_path, 50, files=files)
    disk.versions = dict.fromkeys(numbers, 0)
    assert len(read_all(disk, numbers[-48:])) == 48
    close(disk)


@pytest.mark.parametrize("num_lives", [5, pytest.param(25, marks=pytest.mark.slow)])
def test_any_sequence_of_capacities(tmp_path: Path, num_lives: int) -> None:
    chance, versions = random.Random(5), dict[int, int]()
    for life in range(num_lives):
        disk = Disk(tmp_path, num_blocks := chance.choice([5, 20, 60, 61, 120, 200, 600]))
        disk.versions = versions
        here = disk.here(range(3000))
        assert read_all(disk, here) == here
        assert disk.tier.stats().restored == len(here)
        for number in range(life * 100, life * 100 + chance.randint(0, 100)):
            assert disk.write([number], version=life) == [number]
        assert used_bytes(tmp_path) <= capacity_for(num_blocks, 4096)
        close(disk)


def test_a_larger_capacity_on_a_full_disk_stays_as_it_was(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    numbers = list(range(60))
    filled(tmp_path, 60, numbers)
    files = FailingFiles()
    files.fail = raises(errno.ENOSPC, "allocate")
    for _ in range(2):
        disk = Disk(tmp_path, 600, files=files)
        disk.versions = dict.fromkeys(numbers, 0)
        assert read_all(disk, numbers) == numbers
        assert disk.tier.stats().capacity == 60
        close(disk)
    assert "the old capacity stays until the next start" in caplog.text
    disk = Disk(tmp_path, 600)
    disk.versions = dict.fromkeys(numbers, 0)
    assert read_all(disk, numbers) == numbers
    assert disk.tier.stats().capacity == 600
    close(disk)


def test_disks_side_by_side_change_their_capacity(tmp_path: Path) -> None:
    """Keys keep their disks, also when a disk is added and shares shrink."""

    def several(names: str, num_blocks: int) -> Driver:
        return Driver(StripedTier([Disk(tmp_path / name, num_blocks).tier for name in names]))

    numbers = list(range(100))
    driver = several("ab", 100)
    for start in range(0, 100, 20):
        assert len(driver.write(numbers[start : start + 20])) == 20
    driver.tier.close()
    for num_blocks in (150, 90, 300):
        driver = several("ab", num_blocks)
        driver.versions = dict.fromkeys(numbers, 0)
        assert sorted(read_all(driver, numbers)) == numbers
        assert driver.wrong == 0
        driver.tier.close()
    three = several("abc", 60)
    three.versions = dict.fromkeys(numbers, 0)
    kept = read_all(three, numbers)
    assert 40 <= len(kept) <= 90, "two thirds of the blocks keep their disk, if they fit"
    assert three.wrong == 0
    three.tier.close()


def test_slabs_of_other_producers_shrink_for_a_change_of_capacity(tmp_path: Path) -> None:
    filled(tmp_path, 100, list(range(50)), fingerprint="other")
    filled(tmp_path, 100, list(range(40)))
    for num_blocks in (140, 110, 200):
        disk = Disk(tmp_path, num_blocks)
        disk.versions = dict.fromkeys(range(40), 0)
        assert len(disk.read(list(range(40)))) == 40
        assert used_bytes(tmp_path) <= capacity_for(num_blocks, 4096)
        close(disk)
    disk = Disk(tmp_path, 200, fingerprint="other")
    disk.versions = dict.fromkeys(range(50), 0)
    kept = disk.here(range(50))
    assert disk.read(kept) == kept
    assert 15 <= len(kept) <= 50
    close(disk)


@pytest.mark.parametrize(
    ("before", "after"),
    [(8, 24), (24, 8), *(pytest.param(*sizes, marks=pytest.mark.slow) for sizes in CHANGES)],
)
def test_a_crash_at_every_write_and_sync_of_a_change(tmp_path: Path, before: int, after: int) -> None:
    chance = random.Random(before * after)
    numbers = list(range(before))
    chance.shuffle(numbers)
    filled(tmp_path / "life", before, numbers)
    # A slab that was larger keeps its longer journal.
    kept = set(numbers[-before if after > before else min(-1, -after + 12) :])
    base, recorder = slab_in(tmp_path / "life").read_bytes(), Recorder()
    disk = Disk(tmp_path / "life", after, files=recorder)
    position_end = recorder.position
    disk.versions = dict.fromkeys(numbers, 0)
    assert set(read_all(disk, disk.here(numbers))) >= kept
    close(disk)
    base = padded(base, recorder)
    for position in range(position_end + 1):
        for kind in ("all", KINDS[1 + position % (len(KINDS) - 1)]):
            image = recorder.image(position, chance, kind, base)
            write_image(tmp_path / "crash", slab_name(), image)
            place = f"position {position} of {position_end}, {kind}"
            with opened(tmp_path / "crash", BufferedFiles()) as (slab, recovered):
                assert (recovered.damaged, verify(slab, recovered)) == (0, []), place
                names = {int(key[3:]) for key in recovered.contents.keys(recovered.contents.slots())}
                assert names >= kept, place
            if position % 5 == 0 and kind != "all":
                survivor = Disk(tmp_path / "crash", capacity := chance.choice([before, after, 100]))
                survivor.versions = dict.fromkeys(numbers, 0)
                here = survivor.here(numbers)
                assert read_all(survivor, here) == here, place
                fits = survivor.tier.stats().capacity
                assert set(here) >= set([number for number in numbers if number in kept][-fits:]), place
                assert used_bytes(tmp_path / "crash") <= capacity_for(capacity, 4096), place
                survivor.tier.delete(keys_of(here[:3]))
                assert len(survivor.write([9001, 9002, 9003])) == 3
                close(survivor)


def cut_growth(directory: Path, num_blocks: int) -> None:
    """Begin a growth and fail after the journal has moved behind the slots."""

    files, superblocks = FailingFiles(), list[int]()

    def cut(operation: str, offset: int) -> None:
        # After the two superblocks that name the moved journal.
        if operation == "write" and offset <= PAGE_BYTES:
            superblocks.append(offset)
        elif operation == "read" and len(superblocks) == 2:
            raise OSError(errno.EIO, "cut")

    files.fail = cut
    with pytest.raises(UnavailableError):
        Disk(directory, num_blocks, files=files)
    with opened(directory) as (slab, _):
        assert slab.layout.is_moving


@pytest.mark.parametrize("num_blocks", [60, 201, 500])
def test_an_interrupted_growth_continues_to_any_larger_capacity(tmp_path: Path, num_blocks: int) -> None:
    numbers = list(range(60))
    filled(tmp_path, 60, numbers)
    cut_growth(tmp_path, 200)
    disk = Disk(tmp_path, num_blocks)
    disk.versions = dict.fromkeys(numbers, 0)
    fits = disk.tier.stats().capacity
    assert num_blocks - 2 <= fits <= num_blocks
    assert set(numbers[-fits:]) <= set(read_all(disk, disk.here(numbers)))
    assert used_bytes(tmp_path) <= capacity_for(num_blocks, 4096)
    close(disk)


@pytest.mark.parametrize("num_blocks", [700, 20])
def test_a_second_interrupted_growth_continues_to_any_smaller_capacity(
    tmp_path: Path, num_blocks: int
) -> None:
    filled(tmp_path, 60, list(range(60)))
    numbers = list(range(1000, 1200))
    random.Random(num_blocks).shuffle(numbers)
    filled(tmp_path, 200, numbers)
    cut_growth(tmp_path, 800)
    disk = Disk(tmp_path, num_blocks)
    disk.versions = dict.fromkeys(numbers, 0)
    fits = disk.tier.stats().capacity
    assert fits >= min(num_blocks, 200) - 2
    assert set(numbers[-fits:]) <= set(read_all(disk, disk.here(numbers)))
    assert used_bytes(tmp_path) <= capacity_for(num_blocks, 4096)
    close(disk)


@pytest.mark.slow
@pytest.mark.parametrize("resumed", [60, 200, 500])
def test_a_second_crash_at_every_write_and_sync_of_the_resumption(tmp_path: Path, resumed: int) -> None:
    chance, numbers = random.Random(resumed), list(range(60))
    filled(tmp_path / "life", 60, numbers)
    # A slab that was larger keeps its longer journal.
    kept = set(numbers[12:] if resumed == 60 else numbers)
    base, first = slab_in(tmp_path / "life").read_bytes(), Recorder()
    close(Disk(tmp_path / "life", 200, files=first))
    once, twice = tmp_path / "once", tmp_path / "twice"
    for position in range(first.position + 1):
        image = first.image(position, chance, chance.choice(KINDS), padded(base, first))
        write_image(once, slab_name(), image)
        second = Recorder()
        close(Disk(once, resumed, files=second))
        # Every position where the superblocks differ; elsewhere every fifth, with a different first position.
        start, step = (0, 1) if image[:4096] != image[4096:8192] else (position % 5, 5)
        image = padded(image, second)
        for next_position in range(start, second.position + 1, step):
            kind = chance.choice(("all", "zeros", "prefix", "torn"))
            write_image(twice, slab_name(), second.image(next_position, chance, kind, image))
            place = f"positions {position} and {next_position} of {second.position}, {kind}"
            with opened(twice, BufferedFiles()) as (slab, recovered):
                assert (recovered.damaged, verify(slab, recovered)) == (0, []), place
                names = {int(key[3:]) for key in recovered.contents.keys(recovered.contents.slots())}
                assert names >= kept, place


def padded(base: bytes, recorder: Recorder) -> bytes:
    """Pad the content before a record to the length that the record needs."""
    size = max([len(base), *(write.offset + len(write.data) for write in recorder.writes)])
    return base + bytes(size - len(base))


def test_a_layout_for_another_capacity_has_as_many_slots_as_fit() -> None:
    for block_bytes in (512, 4096, 131_072):
        layout = Layout.holding(block_bytes, KEY_BYTES, 500)
        for num_blocks in (501, 700, 5000, 100_000):
            capacity = Layout.holding(block_bytes, KEY_BYTES, num_blocks).file_bytes + LOCK_FILE_BYTES
            grown = layout.with_capacity(capacity)
            assert grown is not None
            assert grown.file_bytes + LOCK_FILE_BYTES <= capacity
            if num_blocks > 501:
                assert grown.num_blocks >= num_blocks * 0.99 - 2
            assert grown.max_entries >= grown.num_usable
            assert grown.journal_end <= grown.slots_offset
            assert grown.with_capacity(capacity) == grown
            small = grown.with_capacity(layout.file_bytes + LOCK_FILE_BYTES)
            assert small is None or small.file_bytes <= layout.file_bytes


@pytest.mark.parametrize("num_new", [1, 40])
def test_another_producer_takes_the_coldest_blocks_and_a_margin(tmp_path: Path, num_new: int) -> None:
    numbers, chance = list(range(200)), random.Random(num_new)
    chance.shuffle(numbers)
    filled(tmp_path, 200, numbers)
    disk = Disk(tmp_path, 200)
    hot = chance.sample(numbers, 60)
    disk.use(hot)
    close(disk)
    other = Disk(tmp_path, 200, fingerprint="other")
    for number in range(num_new):
        assert other.write([number]) == [number]
    journal = other.layout.slots_offset // 4096
    assert used_bytes(tmp_path) <= capacity_for(200, 4096)
    close(other)
    disk = Disk(tmp_path, 200)
    disk.versions = dict.fromkeys(numbers, 0)
    kept = disk.here(numbers)
    assert set(hot) <= set(kept)
    margin = disk.layout.num_usable // 16
    assert 200 - len(kept) <= journal + num_new + 2 * margin
    assert sorted(read_all(disk, kept)) == sorted(kept)
    close(disk)
