"""Request contexts: a manager's record of a running inference request.

Owns the request's *path*: all keys that the request has looked up, loaded, touched or offered, in order of
first appearance, with a record for each key. Because of the path, a retried request counts as one use of each
block, a store does not evict the request's own blocks, and each key is hashed and looked up only once.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from kvoffload.core.hints import NO_HINTS, Hints
from kvoffload.structures.batches import WRONG_KEY, KeyBatch, is_key_at, key_at, num_keys, pack_key
from kvoffload.structures.index import (
    ABSENT,
    Index,
    bucket_of,
    copy_key,
    fill_bucket,
    hash_row,
    position_in,
    remove,
)
from kvoffload.structures.jit import BoolArray, I32Array, U64Matrix, inline, kernel
from kvoffload.structures.keys import Keys, words_per_key, wrong_key
from kvoffload.structures.structs import Struct

HASH, HINT, FLAGS = 0, 1, 2
"""Columns of `Path.records`. `HINT` is the slot in which the block was last found, with the slot's
version: ``version << 32 | slot + 1``, or 0 if unknown. When a block leaves a slot, the slot's version
changes, so that old hints are recognized as invalid."""

ACCESSED = 1
SCRATCH = 2
SMALLEST_ROOM = 16

AGAIN = -(1 << 60)
"""Results of kernels below `AGAIN` are errors: `FULL` means that the path is too small for the batch,
`WRONG` that a key is invalid. A kernel that returns an error has changed nothing. The caller calls
`make_room`, which enlarges the path or raises an exception, and then calls the kernel again."""
FULL, WRONG = AGAIN - 1, AGAIN - 2


class Used(Struct):
    """The resident blocks that a request uses: the argument of a policy's `access`.

    Only the first `count` elements of `slots` and `reused` are valid.
    """

    slots: I32Array
    reused: BoolArray
    count: int


class Path(Struct):
    """The state of a request in one piece of memory, for kernels.

    Attributes:
        index: the request's keys. The position of a key is its rank in the order of first appearance.
        records: shape ``(room, 3)``, uint64: hash, slot hint and flags of each key.
        positions: int32: path positions of the current batch.
        used: the blocks that the current batch uses.
        found: int32. For a policy's `observe` and `finished`: the slot of each block, or ABSENT. After
            `misses.count_misses`: the code of each counted block.
        length: number of keys on the path.
        observed: number of leading keys that a compiled policy has observed.
        on_device: number of leading blocks that the device holds. The request's first lookup begins at this
            position.
        was_asked: 1 after the first lookup.
        label: identifier that `hints.Labels` assigned to the request's hints.
        num_expected: number of leading keys that are expected while the request waits in the engine's queue.
        foreseen: number of expected keys that were reported to the policy.
        number: identifier of the request in the recording of calls; 0 before its first recorded call.
        recorded: number of leading keys that are already in the recording of calls; `log.ENDED` after the end
            of the request.
        tenant: identifier of the request's tenant (`tenants.TenantNumbers`); 0 without quotas.
        is_quiet: 1 if the policy does not observe the request (`tenants.may_learn`).
        cut: 1 + position of the first block that the policy refused, the last time it refused blocks. 0 if it
            has refused none, and in a victim tier. While the block at this position is absent, all later
            blocks are refused, too, because no request could reach them.
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
    number: int
    recorded: int
    tenant: int
    is_quiet: int
    cut: int


def used_blocks(slots: I32Array, reused: BoolArray | None = None) -> Any:
    """Create the memory of a `Used` with these blocks."""
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
_NUMBER = 8 * Path.fields["number"].at
_TENANT = 8 * Path.fields["tenant"].at
_IS_QUIET = 8 * Path.fields["is_quiet"].at
_NUMBERS = [field.at for field in Path.fields.values() if field.is_number]
_INDEX, _USED = Path.fields["index"].at, Path.fields["used"].at


class RequestContext:
    """The context of an inference request, from `begin_request` to `finish_request`.

    Belongs to one manager and its thread. Memory: about 80 bytes for each block, until the request finishes.

    Attributes:
        memory: a `Path`, for the manager's kernels.
        room: number of keys for which the path has room. It grows when more keys come.
        unpacked_keys: keys that were looked up one at a time and are not yet on the path.
        observed: number of leading keys that were reported to a policy in Python and to the admission rule.
        num_observations: number of calls that reported these `observed` keys.
        hints: labels from the engine.
        owner: the manager. Slot hints are valid only in this manager.
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

    def set_hints(self, hints: Hints, label: int) -> None:
        """Set the request's hints, and the identifier `label` of these hints."""
        self.hints = hints
        self.memory[_LABEL : _LABEL + 8] = label.to_bytes(8, "little")

    def set_number(self, number: int) -> None:
        """Set the identifier of the request in the recording of calls."""
        self.memory[_NUMBER : _NUMBER + 8] = number.to_bytes(8, "little", signed=True)

    def set_tenant(self, number: int) -> None:
        """Set the request's tenant, by its identifier."""
        self.memory[_TENANT : _TENANT + 8] = number.to_bytes(8, "little")

    @property
    def tenant(self) -> int:
        """Identifier of the request's tenant."""
        return int.from_bytes(self.memory[_TENANT : _TENANT + 8], "little")

    @property
    def is_quiet(self) -> bool:
        """True if the policy does not observe the request."""
        return self.memory[_IS_QUIET] != 0

    @property
    def length(self) -> int:
        return int.from_bytes(self.memory[_LENGTH : _LENGTH + 8], "little")

    def flush(self) -> None:
        """Add the keys that were looked up one at a time (`unpacked_keys`) to the path."""
        if self.unpacked_keys:
            keys, self.unpacked_keys = self.unpacked_keys, []
            self.add(keys)

    def extend(self, keys: Sequence[bytes]) -> I32Array:
        """Add `keys` to the path; return the position of each key.

        The result is a view, valid until the next call that concerns this request. Cost: O(keys).

        Raises: `ValueError` if a key has a wrong length; the message names the first such key. `TypeError` if
        a key is not ``bytes``.
        """
        self.add(keys)
        return self.positions(len(keys))

    def add(self, keys: Sequence[bytes]) -> None:
        """Add `keys` to the path. Raises the same errors as `extend`."""
        self.flush()
        batch = batch_of(keys, self.key_bytes)
        while (problem := _add_batch(self.memory, batch)) < AGAIN:
            self.make_room(keys, problem)

    def positions(self, count: int) -> I32Array:
        """Return the path positions of the last batch (a view)."""
        return Path.array(self.memory, "positions", count)

    def found(self, count: int) -> I32Array:
        """Return the first `count` entries of ``Path.found`` (a view)."""
        return Path.array(self.memory, "found", count)

    def used(self, count: int) -> tuple[I32Array, BoolArray]:
        """Return the blocks that the last batch uses, as the arguments `slots` and `reused` of a policy's
        `access` (two views).
        """
        start = memoryview(self.memory).cast("q")[_USED]
        return (
            Used.array(self.memory, "slots", count, start),
            Used.array(self.memory, "reused", count, start),
        )

    def keys(self) -> Keys:
        """Return the path: every key of the request, in order of first appearance (a view)."""
        start = memoryview(self.memory).cast("q")[_INDEX]
        return Keys(Index.array(self.memory, "keys", self.length, start), self.key_bytes)

    def make_room(self, keys: Sequence[bytes], problem: int) -> None:
        """Handle an error of a kernel: enlarge the path after `FULL`, or raise the error of the first invalid
        key.

        Raises: `ValueError` for a key of a wrong length, `TypeError` for a key that is not ``bytes``.
        """
        if problem == WRONG and (error := wrong_key(keys, self.key_bytes)):
            raise error
        self.room = room_for(max(2 * self.room, self.length + len(keys)))
        larger: Any = bytearray(_blank_path(self.room, self.key_bytes))
        words, larger_words = memoryview(self.memory).cast("q"), memoryview(larger).cast("q")
        for at in _NUMBERS:
            larger_words[at] = words[at]
        _enlarge(self.memory, larger)
        self.memory = larger


def batch_of(keys: Sequence[bytes], key_bytes: int) -> Any:
    """Convert `keys` to a kernel's `KeyBatch`.

    Raises: `ValueError` if `keys` is a `Keys` whose keys do not have `key_bytes` bytes.
    """
    if type(keys) is list:
        return keys
    if isinstance(keys, Keys):
        if keys.key_bytes != key_bytes:
            raise ValueError(f"keys of {keys.key_bytes} bytes; all keys here have {key_bytes}")
        return keys.words
    return list(keys)


def room_for(count: int) -> int:
    """Round `count` up to a power of two, at least `SMALLEST_ROOM`, so that few blank paths are cached."""
    return max(SMALLEST_ROOM, 1 << (count - 1).bit_length())


@lru_cache(maxsize=64)
def _blank_path(room: int, key_bytes: int) -> bytes:
    # One spare row: a new key is packed there before its bucket is known.
    index = {"table": 2 * room + 1, "keys": (room + 1, words_per_key(key_bytes))}
    blank = bytearray(
        Path.blank(
            index=index, records=(room, 3), positions=room, found=room, used={"slots": room, "reused": room}
        )
    )
    Path.over(blank).index.key_bytes = key_bytes
    return bytes(blank)


@inline
def place_of(path: Path, length: int, row: int) -> int:
    """Return the path position of the key that is stored in row `row` of the path's index.

    A key that is not yet on the path is added at position `length`. Returns ABSENT if there is no room for
    it.
    """
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
def add_batch(path: Path, batch: KeyBatch) -> int:
    """Add the new keys of a batch to the path, and write the position of each key to ``path.positions``.

    Returns the number of keys, or `FULL` or `WRONG`.
    """
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
        # The batches of a request repeat each other: most keys follow the previous key on the path.
        position = following
        if following >= length or not is_key_at(address, key_bytes, keys, following):
            pack_key(address, key_bytes, keys, length)
            position = place_of(path, length, length)
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
def _add_batch(path: Path, batch: KeyBatch) -> int:
    return add_batch(path, batch)


@kernel
def _enlarge(path: Path, larger: Path) -> None:
    """Copy the keys and records of a path to a larger, empty path."""
    keys = path.index.keys
    for position in range(path.length):
        copy_key(larger.index.keys, position, keys, position)
        place_of(larger, position, position)
        for column in range(path.records.shape[1]):
            larger.records[position, column] = path.records[position, column]
