"""Kinds of damage, applied to the stored bytes of a tier."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from peers.contract import FileProduct, Place, Product

Numbers = list[int]


def _flip(place: Place, chance: random.Random) -> None:
    bit = chance.randrange(place.offset * 8, place.end * 8)
    (byte,) = place.medium.read(bit // 8, bit // 8 + 1)
    place.medium.write(bit // 8, bytes([byte ^ 1 << bit % 8]))


class Victims(NamedTuple):
    """Inputs of the damage functions.

    Attributes:
        places: location of every block.
        records: locations of the product's metadata.
        chosen: blocks to damage.
        saved: replacement bytes of each block: an older version, or another model's block.
    """

    product: Product
    places: dict[int, Place]
    records: Sequence[Place]
    chosen: Numbers
    saved: dict[int, bytes]
    chance: random.Random


def payload_bit(victims: Victims) -> Numbers | None:
    for number in victims.chosen:
        _flip(victims.places[number], victims.chance)
    return victims.chosen


def records_bit(victims: Victims) -> Numbers | None:
    if not victims.records:
        return None
    for place in victims.records:
        _flip(place, victims.chance)
    return sorted(victims.places)


def swapped(victims: Victims) -> Numbers | None:
    for number, other_number in zip(victims.chosen[::2], victims.chosen[1::2], strict=True):
        here, there = victims.places[number], victims.places[other_number]
        first, second = here.read(), there.read()
        here.medium.write(here.offset, second)
        there.medium.write(there.offset, first)
    return victims.chosen


def zero_filled(victims: Victims) -> Numbers | None:
    for number in victims.chosen:
        place = victims.places[number]
        place.medium.write(place.offset, bytes(place.end - place.offset))
    return victims.chosen


def truncated(victims: Victims) -> Numbers | None:
    """Truncate each medium in the middle of a block; a shared medium behind half of its chosen blocks."""
    by_medium: dict[Any, list[Place]] = {}
    for number in victims.chosen:
        by_medium.setdefault(victims.places[number].medium, []).append(victims.places[number])
    cuts = {}
    for medium, places in by_medium.items():
        cut_one = sorted(places)[len(places) // 2]
        cuts[medium] = (cut_one.offset + cut_one.end) // 2
        medium.truncate(cuts[medium])
    places_of = victims.places.items()
    return [n for n, place in places_of if place.medium in cuts and place.end > cuts[place.medium]]


def replaced(victims: Victims) -> Numbers | None:
    """Replace blocks with saved bytes: of an older version or of another model."""
    for number in victims.chosen:
        place = victims.places[number]
        place.medium.write(place.offset, victims.saved[number])
    return victims.chosen


def unreadable(victims: Victims) -> Numbers | None:
    assert isinstance(victims.product, FileProduct), "scenes.OF_FILES is for files only"
    victims.product.make_unreadable([victims.places[number] for number in victims.chosen])
    return victims.chosen


DAMAGE: dict[str, Callable[[Victims], Numbers | None]] = {
    "a bit of the payload": payload_bit,
    "bits of journal or config file": records_bit,
    "two blocks swapped": swapped,
    "block zero-filled": zero_filled,
    "truncated in the middle": truncated,
    "an older version in its place": replaced,
    "another model's block in its place": replaced,
    "unreadable": unreadable,
}
"""Functions that return the damaged blocks, or None if the product has nothing of this kind to damage."""
