"""What a manager knows of one inference request while it runs.

Owns the request's *path*: the keys that it has asked for, loaded, touched or offered, in the order of their
first appearance, and a record of each. Because of the path a request accesses each block once, however often
it is retried, its own blocks are protected while it stores, and each key is hashed once and looked up in the
manager's index once.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from kvoffload.core.hints import NO_HINTS, Hints
from kvoffload.structures.batches import WRONG_KEY, KeyBatch, is_key_at, key_at, num_keys, pack_key
from kvoffload.structures.index import ABSENT, Index, bucket_of, fill_bucket, hash_row, position_in, remove
from kvoffload.structures.jit import BoolArray, I32Array, U64Matrix, inline, kernel
from kvoffload.structures.keys import Keys, words_per_key, wrong_key
from kvoffload.structures.structs import Struct

HASH, HINT, FLAGS = 0, 1, 2
"""Columns of `records`. The hint says where the block was last found: ``version << 32 | slot + 1``, or 0. It
is valid until the slot's version changes: a block may leave and come back while a request runs."""

ACCESSED = 1
SCRATCH = 2
SMALLEST_ROOM = 16

AGAIN = -(1 << 60)
"""Below it: the batch does not fit on the path, or has a wrong key. Nothing has changed; see `make_room`."""
FULL, WRONG = AGAIN - 1, AGAIN - 2


class Used(Struct):
    """The resident blocks that a request uses, for a policy's `access`: `count` rows of both arrays."""

    slots: I32Array
    reused: BoolArray
    count: int


class Path(Struct):
    """A request in kernels, in one piece of memory that is copied from a blank one.

    Attributes:
        index: the request's keys; positions count in the order of first appearance.
        records: shape ``(room, 3)``, uint64: what is known of each key.
        positions: int32: where the keys of the batch at hand are on the path.
        used: for the blocks that the batch at hand uses.
        length: number of keys on the path; observed: of its leading part, which a compiled policy has
        observed. found: int32: where the blocks are that it has not yet observed, or ABSENT.
        on_device: number of blocks at its head that the device has: those before the first lookup; was_asked:
            1 after that.
        label: what the engine knows of the request (`hints.Labels`).
        num_expected: the request waits in the engine's queue, and so many blocks at its head are expected;
        foreseen: of these the policy has been told.
    """

    index: Index
    records: U64Matrix
    positions: I32Array
    used: Used
    found: I32Array
    length: int
    observed: int
    on_device: int
    was_asked: int
    label: int
    num_expected: int
    foreseen: int


def used_blocks(slots: I32Array, reused: BoolArray | None = None) -> Any:
    """Memory of a `Used` that has these blocks."""
    memory = bytearray(_blank_used((len(slots) - 1).bit_length()))
    used = Used.over(memory)
    used.slots[: len(slots)], used.count = slots, len(slots)
    if reused is not None:
        used.reused[: len(slots)] = reused
    return memory


@lru_cache(maxsize=64)
def _blank_used(bits: int) -> bytes:
    return Used.blank(slots=1 << bits, reused=1 << bits)


_LENGTH = 8 * Path.fields["length"].at
_LABEL = 8 * Path.fields["label"].at
_INDEX, _USED = Path.fields["index"].at, Path.fields["used"].at


class RequestContext:
    """One inference request, from `begin_request` to `finish_request`.

    Belongs to the manager that made it, and to its thread. Memory: about 80 bytes a block of the request,
    until it finishes.

    Attributes:
        memory: its `Path`, for the manager's kernels; room: how many keys fit before it grows.
        unpacked_keys: single keys that were looked up and are not yet on the path.
        observed: length of the leading part of the path that policy and admission rule have observed;
            num_observations: in how many parts they observed it.
        hints: what the engine knows of it.
        owner: the manager. The records of one manager are wrong in another.
    """

    __slots__ = (
        "finished",
        "hints",
        "key_bytes",
        "memory",
        "num_observations",
        "observed",
        "owner",
        "request_id",
        "room",
        "unpacked_keys",
    )

    def __init__(
        self, request_id: str, key_bytes: int, owner: object = None, room: int = SMALLEST_ROOM
    ) -> None:
        self.request_id, self.key_bytes, self.owner = request_id, key_bytes, owner
        self.finished = False
        self.hints = NO_HINTS
        self.observed = self.num_observations = 0
        self.room = room
        self.memory: Any = bytearray(_blank_path(room, key_bytes))
        self.unpacked_keys: list[bytes] = []

    def __repr__(self) -> str:
        return f"RequestContext({self.request_id!r}, {self.length} blocks{', finished' * self.finished})"

    def tell(self, hints: Hints, label: int) -> None:
        """What the engine has come to know of it, and its number."""
        self.hints = hints
        self.memory[_LABEL : _LABEL + 8] = label.to_bytes(8, "little")

    @property
    def length(self) -> int:
        """Number of keys on the path."""
        return int.from_bytes(self.memory[_LENGTH : _LENGTH + 8], "little")

    def flush(self) -> None:
        """Add the keys that were looked up one by one to the path."""
        if self.unpacked_keys:
            asked, self.unpacked_keys = self.unpacked_keys, []
            self.see(asked)

    def extend(self, keys: Sequence[bytes]) -> I32Array:
        """Add `keys` to the path; returns the position of each on it (a view, until the next call for the
        request). Cost: O(keys). Raises `ValueError` that names the first key of a wrong length.
        """
        self.see(keys)
        return self.positions(len(keys))

    def see(self, keys: Sequence[bytes]) -> None:
        """As `extend`, for those who do not ask where the keys are."""
        self.flush()
        batch = batch_of(keys, self.key_bytes)
        while (problem := _see(self.memory, batch)) < AGAIN:
            self.make_room(keys, problem)

    def positions(self, count: int) -> I32Array:
        """The positions of the last batch (a view)."""
        return Path.array(self.memory, "positions", count)

    def used(self, count: int) -> tuple[I32Array, BoolArray]:
        """The blocks that the last batch uses, as for a policy's `access` (views)."""
        start = memoryview(self.memory).cast("q")[_USED]
        return (
            Used.array(self.memory, "slots", count, start),
            Used.array(self.memory, "reused", count, start),
        )

    def keys(self) -> Keys:
        """The path: every key of the request, in the order of first appearance (a view)."""
        start = memoryview(self.memory).cast("q")[_INDEX]
        return Keys(Index.array(self.memory, "keys", self.length, start), self.key_bytes)

    def make_room(self, keys: Sequence[bytes], problem: int) -> None:
        """After `see` has said `FULL`, enlarge the path for the batch; after `WRONG`, raise what is wrong
        with its first wrong key: `ValueError`, or `TypeError` for what is no ``bytes``."""
        if problem == WRONG and (error := wrong_key(keys, self.key_bytes)):
            raise error
        self.room = room_for(max(2 * self.room, self.length + len(keys)))
        larger: Any = bytearray(_blank_path(self.room, self.key_bytes))
        _enlarge(self.memory, larger)
        self.memory = larger


def batch_of(keys: Sequence[bytes], key_bytes: int) -> Any:
    """`keys` as kernels take them. Raises `ValueError` for packed keys of another length."""
    if type(keys) is list:
        return keys
    if isinstance(keys, Keys):
        if keys.key_bytes != key_bytes:
            raise ValueError(f"keys of {keys.key_bytes} bytes; all keys here have {key_bytes}")
        return keys.words
    return list(keys)


def room_for(count: int) -> int:
    """The next power of two, so that few different sizes of memory are made."""
    return max(SMALLEST_ROOM, 1 << (count - 1).bit_length())


@lru_cache(maxsize=64)
def _blank_path(room: int, key_bytes: int) -> bytes:
    # A row more than there are keys: a new key is packed there before its place is known.
    index = {"table": 2 * room + 1, "keys": (room + 1, words_per_key(key_bytes))}
    blank = bytearray(
        Path.blank(
            index=index, records=(room, 3), positions=room, found=room, used={"slots": room, "reused": room}
        )
    )
    Path.over(blank).index.key_bytes = key_bytes
    return bytes(blank)


@inline
def _place_of(path: Path, length: int, row: int) -> int:
    """Position of the key ``keys[row]`` of the path's index; `length` if it is new, and then it is put there.
    ABSENT if there is no room for it."""
    index, records = path.index, path.records
    h = hash_row(index.keys, row)
    bucket = bucket_of(index, index.keys, row, h)
    position = position_in(index.table[bucket])
    if position == ABSENT and length < records.shape[0]:
        position = length
        fill_bucket(index, bucket, index.keys, row, h, position)
        records[position, HASH] = h
    return position


@inline
def see(path: Path, batch: KeyBatch) -> int:
    """Fill in the position of each key on the path, where new keys are added; returns how many keys there
    are, or `FULL` or `WRONG`."""
    index, positions = path.index, path.positions
    keys, key_bytes = index.keys, index.key_bytes
    num_words = keys.shape[1]
    count = num_keys(batch, num_words)
    length = path.length
    problem = FULL if count > positions.shape[0] else 0
    following = 0
    for row in range(0 if problem else count):
        address = key_at(batch, row, key_bytes, num_words)
        if address == WRONG_KEY:
            problem = WRONG
            break
        # Batches of one request repeat each other: most keys follow their predecessor on the path.
        position = following
        if following >= length or not is_key_at(address, key_bytes, keys, following):
            pack_key(address, key_bytes, keys, length)
            position = _place_of(path, length, length)
            if position == ABSENT:
                problem = FULL
                break
            length = max(length, position + 1)
        positions[row] = position
        following = position + 1
    if problem:
        for position in range(length - 1, path.length - 1, -1):
            remove(index, position)
        return problem
    path.length = length
    return count


@kernel
def _see(path: Path, batch: KeyBatch) -> int:
    return see(path, batch)


@kernel
def _enlarge(path: Path, larger: Path) -> None:
    """Copy a path into memory with more room."""
    keys = path.index.keys
    for position in range(path.length):
        for word in range(keys.shape[1]):
            larger.index.keys[position, word] = keys[position, word]
        _place_of(larger, position, position)
        for column in range(path.records.shape[1]):
            larger.records[position, column] = path.records[position, column]
    larger.length, larger.observed = path.length, path.observed
    larger.on_device, larger.was_asked, larger.label = path.on_device, path.was_asked, path.label
    larger.num_expected, larger.foreseen = path.num_expected, path.foreseen
