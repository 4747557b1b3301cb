"""Kinds of damage to what a tier has written, each applied to the real bytes of the real files."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from typing import NamedTuple

from peers.contract import Place, Product

Numbers = list[int]


def read_bytes(place: Place) -> bytes:
    """All of it."""
    with open(place.path, "rb") as file:
        file.seek(place.offset)
        return file.read(place.end - place.offset)


def write_bytes(path: str, offset: int, memory: bytes) -> None:
    """Overwrite a part of a file. Direct I/O sees it as well: Linux writes back what it goes past."""
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(memory)


def _flip(path: str, first: int, end: int, chance: random.Random) -> None:
    bit = chance.randrange(first * 8, end * 8)
    with open(path, "rb") as file:
        file.seek(bit // 8)
        (byte,) = file.read(1)
    write_bytes(path, bit // 8, bytes([byte ^ 1 << bit % 8]))


class Victims(NamedTuple):
    """What a kind of damage may use.

    Attributes:
        places: of every block.
        records: of what the product keeps about all of them.
        chosen: blocks to damage.
        saved: bytes of each block from before: an older version, or another model's.
    """

    product: Product
    places: dict[int, Place]
    records: Sequence[Place]
    chosen: Numbers
    saved: dict[int, bytes]
    chance: random.Random


def payload_bit(victims: Victims) -> Numbers | None:
    for number in victims.chosen:
        place = victims.places[number]
        _flip(place.path, place.offset, place.end, victims.chance)
    return victims.chosen


def records_bit(victims: Victims) -> Numbers | None:
    if not victims.records:
        return None
    for place in victims.records:
        _flip(place.path, place.offset, place.end, victims.chance)
    return sorted(victims.places)


def swapped(victims: Victims) -> Numbers | None:
    for one, other in zip(victims.chosen[::2], victims.chosen[1::2], strict=True):
        here, there = victims.places[one], victims.places[other]
        first, second = read_bytes(here), read_bytes(there)
        write_bytes(here.path, here.offset, second)
        write_bytes(there.path, there.offset, first)
    return victims.chosen


def zero_filled(victims: Victims) -> Numbers | None:
    for number in victims.chosen:
        place = victims.places[number]
        write_bytes(place.path, place.offset, bytes(place.end - place.offset))
    return victims.chosen


def truncated(victims: Victims) -> Numbers | None:
    """Each file in the middle of a block; where many blocks share one, behind half of the chosen ones."""
    by_path: dict[str, list[Place]] = {}
    for number in victims.chosen:
        by_path.setdefault(victims.places[number].path, []).append(victims.places[number])
    cuts = {}
    for path, places in by_path.items():
        cut_one = sorted(places)[len(places) // 2]
        cuts[path] = (cut_one.offset + cut_one.end) // 2
        os.truncate(path, cuts[path])
    return [n for n, place in victims.places.items() if place.path in cuts and place.end > cuts[place.path]]


def replaced(victims: Victims) -> Numbers | None:
    """By what was saved: for `stale` and `another model's bytes`."""
    for number in victims.chosen:
        place = victims.places[number]
        write_bytes(place.path, place.offset, victims.saved[number])
    return victims.chosen


def unreadable(victims: Victims) -> Numbers | None:
    victims.product.make_unreadable([victims.places[number] for number in victims.chosen])
    return victims.chosen


DAMAGE: dict[str, Callable[[Victims], Numbers | None]] = {
    "a bit of the payload": payload_bit,
    "bits of journal or config file": records_bit,
    "two blocks swapped": swapped,
    "block zero-filled": zero_filled,
    "file or slab truncated": truncated,
    "an older version in its place": replaced,
    "another model's block in its place": replaced,
    "unreadable": unreadable,
}
"""Each answers which blocks it has damaged; None where there is nothing of that kind to damage."""
