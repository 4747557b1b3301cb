"""Scenes: damage to a tier, followed by reads of every block.

A scene opens the product, writes blocks, damages the stored data, and reads every block, in the same life
(`running`) or in a second life (`reopened`). Each life is a separate process, so that a crash is a result.
Each block is a separate request, so that a bad block does not affect others.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from peers.contract import Adapter, Product, content
from peers.damage import DAMAGE, Victims

Row: TypeAlias = dict[str, Any]
Life: TypeAlias = Callable[[], Any]
Isolation: TypeAlias = Callable[[Life], tuple[Any, str]]
"""Runs a life; returns its result, and the reason of an early end or an empty string."""

MODEL, OTHER_MODEL = "meta-llama/Llama-3.1-8B", "Qwen/Qwen2.5-7B"
NUM_BLOCKS, NUM_DAMAGED, BLOCK_BYTES = 32, 16, 65536
WRITE_ATTEMPTS = 3
MODES = ("running", "reopened")
LIFE_TIMEOUT_S = 120
_POISON = 0xA5
OTHER_OPENS, FULL, KILLED = "opened for another model", "full disk", "writer killed (kill -9)"
KINDS = (*DAMAGE, OTHER_OPENS, FULL, KILLED)
OF_FILES = ("bits of journal or config file", "unreadable", FULL, KILLED)
"""Damage to files, disks and writers of files, which servers do not have."""


class ScenesError(Exception):
    """A scene cannot be set up on this machine."""


# ---- lives


def forked(life: Life) -> tuple[Any, str]:
    """Run a life in a child process. Its result must be JSON."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(read_end)
            signal.alarm(LIFE_TIMEOUT_S)
            with os.fdopen(write_end, "w") as out:
                json.dump(inline(life), out)
        finally:
            os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end) as answer:
        text = answer.read()
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        name = signal.Signals(os.WTERMSIG(status)).name
        return None, "hung" if name == "SIGALRM" else f"crashed: {name}"
    result, why = json.loads(text)
    return result, why


def inline(life: Life) -> tuple[Any, str]:
    """Run a life in this process."""
    try:
        return life(), ""
    except Exception as error:
        traceback.print_exc()
        return None, f"raised {type(error).__name__}: {error}"


def write(product: Product, numbers: Sequence[int], model: str, version: int = 1) -> list[int]:
    """Write blocks; returns the blocks that the product reports as stored."""
    for row, number in enumerate(numbers):
        product.pool[row] = content(number, model, version, product.pool.shape[1])
    stored = product.write(numbers, 1)
    return [number for number, ok in zip(numbers, stored, strict=True) if ok]


def ask(product: Product, numbers: Sequence[int], model: str, version: int = 1) -> list[str]:
    """Read each block; returns ``right``, ``wrong`` or ``missed`` for each."""
    product.pool[:] = _POISON
    outcomes = []
    for row, served in enumerate(product.read(numbers, 1)):
        is_right = (product.pool[row] == content(numbers[row], model, version, product.pool.shape[1])).all()
        outcomes.append(("right" if is_right else "wrong") if served else "missed")
    return outcomes


def summary(
    kind: str,
    mode: str,
    asked: Sequence[int],
    damaged: Sequence[int],
    outcomes: Sequence[str] | None,
    why: str,
) -> Row:
    """Count the outcomes of damaged blocks, and the lost other blocks."""
    hit = set(damaged)
    pairs = list(zip(asked, outcomes or [], strict=bool(outcomes)))
    of_damaged = [outcome for number, outcome in pairs if number in hit]
    of_others = [outcome for number, outcome in pairs if number not in hit]
    return {
        "kind": kind,
        "mode": mode,
        "damaged": len(hit),
        "right": of_damaged.count("right"),
        # Of all blocks: damage to a block must not make another block wrong.
        "wrong": of_damaged.count("wrong") + of_others.count("wrong"),
        "missed": of_damaged.count("missed") if outcomes else len(hit),
        "others_lost": of_others.count("missed"),
        "ended": why,
    }


# ---- scenes


def play_damage(
    adapter: Adapter, kind: str, mode: str, directory: Path, seed: int, isolation: Isolation
) -> Row | None:
    """Play one kind of damage; None if the product has nothing of this kind to damage."""
    numbers, stale = list(range(NUM_BLOCKS)), kind == "an older version in its place"
    version = 2 if stale else 1
    # A medium can fail at any time: here in the life that reads.
    at_read = kind == "unreadable"

    def harm(product: Product, saved: dict[int, bytes]) -> Any:
        chance = random.Random(f"{seed} {kind}")
        chosen = sorted(chance.sample(numbers, NUM_DAMAGED))
        places = product.places(numbers)
        if len(places) < NUM_BLOCKS:
            raise ScenesError(f"{NUM_BLOCKS - len(places)} blocks were not written")
        return DAMAGE[kind](Victims(product, places, product.records(), chosen, saved, chance))

    def first_life() -> Any:
        product = adapter.open(directory, MODEL, BLOCK_BYTES, NUM_BLOCKS)
        saved: dict[int, bytes] = {}
        if stale:
            write(product, numbers, MODEL)
            saved = {number: place.read() for number, place in product.places(numbers).items()}
            product.forget(numbers)
        if kind == "another model's block in its place":
            saved = _blocks_of_another(adapter, directory.with_name(directory.name + "-other"), numbers)
        missing = numbers
        for _ in range(WRITE_ATTEMPTS):  # rclone answers 500 to some of the first writes into a folder
            write(product, missing, MODEL, version)
            written = product.places(numbers)
            if not (missing := [number for number in numbers if number not in written]):
                break
        if mode == "running":
            damaged = harm(product, saved)
            outcomes = None if damaged is None else ask(product, numbers, MODEL, version)
            product.close()
        else:
            product.close()
            damaged, outcomes = ([] if at_read else harm(product, saved)), None
        return damaged, outcomes

    def second_life() -> Any:
        product = adapter.open(directory, MODEL, BLOCK_BYTES, NUM_BLOCKS)
        damaged = harm(product, {}) if at_read else []
        outcomes = ask(product, numbers, MODEL, version)
        product.close()
        return damaged, outcomes

    lived, why = isolation(first_life)
    if lived is None:
        return summary(kind, mode, numbers, numbers, None, why)
    damaged, outcomes = lived
    if damaged is None:
        return None
    if mode == "reopened":
        lived, why = isolation(second_life)
        damaged_later, outcomes = lived or ([], None)
        damaged = damaged or damaged_later or numbers
    return summary(kind, mode, numbers, damaged, outcomes, why)


def _blocks_of_another(adapter: Adapter, directory: Path, numbers: list[int]) -> dict[int, bytes]:
    """Write the same keys for another model; returns the stored bytes."""
    directory.mkdir()
    product = adapter.open(directory, OTHER_MODEL, BLOCK_BYTES, NUM_BLOCKS)
    write(product, numbers, OTHER_MODEL)
    saved = {number: place.read() for number, place in product.places(numbers).items()}
    product.close()
    return saved


def play_other_opens(adapter: Adapter, directory: Path, isolation: Isolation) -> Row:
    """Write keys for one model, then read them in a second life for another model."""
    numbers = list(range(NUM_BLOCKS))

    def life(model: str) -> Any:
        product = adapter.open(directory, model, BLOCK_BYTES, NUM_BLOCKS)
        outcomes = write(product, numbers, model) if model == MODEL else ask(product, numbers, model)
        product.close()
        return outcomes

    isolation(lambda: life(MODEL))
    outcomes, why = isolation(lambda: life(OTHER_MODEL))
    return summary(OTHER_OPENS, "reopened", numbers, numbers, outcomes, why)


def play_full(adapter: Adapter, directory: Path, isolation: Isolation) -> Row:
    """Fill the file system while the product runs, except for a quarter of the bytes to write."""
    numbers = list(range(NUM_BLOCKS))
    size = 2 * NUM_BLOCKS * BLOCK_BYTES + (16 << 20)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(directory)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        raise ScenesError("mounting a small tmpfs is not allowed here")
    inside = directory / "tier"
    inside.mkdir()

    def first_life() -> Any:
        product = adapter.open(inside, MODEL, BLOCK_BYTES, NUM_BLOCKS)
        free = os.statvfs(directory).f_bavail * os.statvfs(directory).f_frsize
        (directory / "filler").write_bytes(bytes(free - NUM_BLOCKS * BLOCK_BYTES // 4))
        stored = write(product, numbers, MODEL)
        product.close()
        return stored

    def second_life() -> Any:
        product = adapter.open(inside, MODEL, BLOCK_BYTES, NUM_BLOCKS)
        outcomes = ask(product, numbers, MODEL)
        product.close()
        return outcomes

    try:
        stored, why = isolation(first_life)
        outcomes, later = isolation(second_life)
        row = summary(FULL, "reopened", numbers, numbers, outcomes, why or later)
        row["acknowledged_and_lost"] = _lost(stored, numbers, outcomes)
        return row
    finally:
        subprocess.run(["umount", str(directory)], check=True)


def play_killed(adapter: Adapter, directory: Path, seed: int, rounds: int) -> Row:
    """Kill a writer at a random time in a random batch, then read every block in the next life."""
    chance, total = random.Random(f"{seed} killed"), None
    for number in range(rounds):
        place = directory / str(number)
        place.mkdir()
        row = _kill_once(adapter, place, chance)
        if total is None:
            total = row
        else:
            for name in ("damaged", "right", "wrong", "missed", "acknowledged_and_lost", "left_behind"):
                total[name] += row[name]
            total["ended"] = total["ended"] or row["ended"]
        shutil.rmtree(place)
    assert total is not None
    return total


def _kill_once(adapter: Adapter, directory: Path, chance: random.Random) -> Row:
    batch, batches, block_bytes = 4, 8, 16 * BLOCK_BYTES
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read_end)
        signal.alarm(LIFE_TIMEOUT_S)
        with os.fdopen(write_end, "w", buffering=1) as out:
            product = adapter.open(directory, MODEL, block_bytes, batch * batches)
            for start in range(0, batch * batches, batch):
                print(json.dumps({"begun": start + batch}), file=out)
                print(json.dumps({"stored": write(product, range(start, start + batch), MODEL)}), file=out)
        os._exit(0)
    os.close(write_end)
    begun, last = 0, batch * chance.randint(1, batches)
    stored: list[int] = []
    with os.fdopen(read_end) as events:
        for line in events:
            event = json.loads(line)
            stored += event.get("stored", [])
            begun = event.get("begun", begun)
            if begun == last:
                break
        # About the duration of a batch. Later acknowledgements are lost, as in any crash.
        time.sleep(chance.uniform(0, 0.03))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    numbers = list(range(begun))

    def second_life() -> Any:
        product = adapter.open(directory, MODEL, block_bytes, batch * batches)
        outcomes = ask(product, numbers, MODEL)
        product.close()
        return outcomes

    outcomes, why = forked(second_life)
    row = summary(KILLED, "reopened", numbers, numbers, outcomes, why)
    row["acknowledged_and_lost"] = _lost(stored, numbers, outcomes)
    row["left_behind"] = sum(path.suffix in (".tmp", ".new") for path in directory.rglob("*"))
    return row


def _lost(stored: Sequence[int] | None, numbers: Sequence[int], outcomes: Sequence[str] | None) -> int:
    """Count the blocks that the product reported as stored and then did not serve."""
    served = {n for n, outcome in zip(numbers, outcomes or [], strict=False) if outcome == "right"}
    return len(set(stored or []) - served)


def play(
    adapter: Adapter,
    kind: str,
    directory: Path,
    seed: int,
    *,
    rounds: int = 10,
    isolation: Isolation = forked,
) -> list[Row]:
    """Play one kind in all modes; a row that could not be played has the reason as `skipped`."""
    rows: list[Row] = []
    modes = MODES if kind in DAMAGE else ("reopened",)
    for mode in modes:
        if kind == "bits of journal or config file" and mode == "running":
            continue  # a tier reads its journal only when it opens
        if kind in DAMAGE and mode == "reopened" and not adapter.keeps:
            continue
        place = directory / mode
        place.mkdir(parents=True)
        try:
            if kind == OTHER_OPENS:
                row: Row | None = play_other_opens(adapter, place, isolation)
            elif kind == FULL:
                row = play_full(adapter, place, isolation)
            elif kind == KILLED:
                row = play_killed(adapter, place, seed, rounds)
            else:
                row = play_damage(adapter, kind, mode, place, seed, isolation)
        except ScenesError as error:
            row = {"kind": kind, "mode": mode, "skipped": str(error)}
        if row is None:
            row = {"kind": kind, "mode": mode, "skipped": "has none"}
        rows.append(row)
    shutil.rmtree(directory, ignore_errors=not rows)
    return rows
