"""Checks of a manager's internal invariants, in O(capacity).

Only this module may read private attributes of other modules. Call `audit` after every step of a test. If an
invariant is violated, the `AssertionError` names the structures that disagree, and about which slots or keys.
"""

from __future__ import annotations

import functools
import pickle
from collections import Counter
from collections.abc import Collection, Mapping
from enum import Enum
from typing import Any

import numpy as np

from kvoffload.admission.reuse import ReuseAdmission
from kvoffload.core.manager import OffloadingManager
from kvoffload.core.miss_record import EVICTED, NEVER_SEEN, WAYS, MissRecord
from kvoffload.core.policy import EvictionPolicy
from kvoffload.core.policy_change import Handover
from kvoffload.core.request import Path, RequestContext
from kvoffload.core.resident_order import NEW
from kvoffload.core.slots import FREE, WRITING
from kvoffload.policies.hazard.path_runs import LENGTH, RUN_OF, SPARE, TAIL, PathRuns
from kvoffload.policies.hazard.policy import Hazard
from kvoffload.structures.index import ABSENT, Index
from kvoffload.structures.jit import I32Matrix, kernel
from kvoffload.structures.keylists import KeyLists
from kvoffload.structures.lists import LIST, NEXT, PREV, UNLISTED, Lists
from kvoffload.structures.structs import Struct


def audit(manager: Any) -> None:
    """Check all invariants that hold between two calls of a manager. Changes nothing.

    Also checks the policy: its `order`, and its attributes of the types `Lists`, `KeyLists` and `PathRuns`.

    Raises:
        AssertionError: an invariant is violated; the message names the invariant.
    """
    manager = getattr(manager, "ram_manager", manager)
    _audit_slots(manager)
    _audit_counters(manager)
    _audit_tenants(manager)
    resident = _indexed_slots(manager)
    _audit_index("the manager's index", manager.index, resident)
    _audit_policy(manager.policy, resident, manager)
    _audit_misses(manager.store_mode.cache.misses)
    audit_key_lists("the expected keys", manager.store_mode.cache.expected.keys)
    if isinstance(manager.admission, ReuseAdmission):
        rule = manager.admission
        audit_key_lists("the tracker of reuse", rule._tracker)
        low = {key.hex(): n for key, n in rule.tracked().items() if n < 1}
        assert not low, f"tracked keys were never counted: {low}"


def snapshot(thing: Any, ignore: Collection[str] = ()) -> Any:
    """Return the whole nested state of `thing` as values that can be compared with ``==``.

    Equal snapshots prove that the state has not changed. Arrays are compared byte by byte. If an array, a
    struct or an object occurs several times, the snapshot has its contents once, and a number in the other
    places.

    Args:
        thing: an object of plain values, containers, arrays and objects, without cycles of containers.
        ignore: names of attributes to leave out, at any depth.
    """
    return _snapshot(thing, frozenset(ignore), {})


def _snapshot(thing: Any, ignore: frozenset[str], seen: dict[int, tuple[int, Any]]) -> Any:
    """Return the snapshot of `thing`, which is a part of the state.

    `seen` maps the `id` of each part that was already visited to the part's number and to the part itself.
    As long as `seen` refers to a part, Python gives its `id` to no other object.
    """
    if thing is None or isinstance(thing, (bool, int, str, bytes, Enum, type)):
        return thing
    if isinstance(thing, float):
        return repr(thing)  # so that nan equals itself
    if isinstance(thing, (list, tuple)):
        return [_snapshot(item, ignore, seen) for item in thing]
    if isinstance(thing, (set, frozenset)):
        return sorted(thing)
    if isinstance(thing, bytearray):
        return None  # the memory of a struct, whose fields are compared
    if isinstance(thing, RequestContext):
        # Without the path, to which a refused call may have added keys. Without the owner, which is a cycle.
        return (thing.request_id, Path.over(thing.memory).num_expected)
    if isinstance(thing, (dict, Mapping)):
        return [
            (_snapshot(key, ignore, seen), _snapshot(value, ignore, seen)) for key, value in thing.items()
        ]
    if id(thing) in seen:
        return seen[id(thing)][0]
    seen[id(thing)] = len(seen), thing
    if isinstance(thing, np.ndarray):
        return (thing.dtype.str, thing.shape, thing.tobytes())
    numbers: list[int] = []
    if isinstance(thing, Struct):
        positions, names = _fields_of(type(thing), ignore)  # type: ignore[arg-type]  # a class is hashable
        words = thing._words
        numbers = [words[at] for at in positions]
    else:
        slots = _slots_of(type(thing))  # type: ignore[arg-type]  # a class is hashable
        names = [name for name in (*getattr(thing, "__dict__", ()), *slots) if name not in ignore]
    return (
        type(thing).__qualname__,
        numbers,
        [(name, _snapshot(getattr(thing, name), ignore, seen)) for name in names],
    )


@functools.cache
def _fields_of(cls: type[Struct], ignore: frozenset[str]) -> tuple[list[int], list[str]]:
    """Return the positions of a struct's number fields, and the names of its arrays and nested structs."""
    fields = {name: field for name, field in cls.fields.items() if name not in ignore}
    parts = [name for name, field in fields.items() if not field.is_number]
    return [field.at for field in fields.values() if field.is_number], parts


def state_of(thing: Any) -> bytes | Any:
    """Return the whole state of a policy or an admission rule, as a value that can be compared with ``==``.

    Unlike `snapshot`, this function handles cycles, and objects of other libraries, such as `random.Random`.
    Compare only states of the same object at different times: two objects that behave equally may have
    different states. The `index` of a policy is left out, because it belongs to the manager.
    """
    state = {name: value for name, value in vars(thing).items() if name != "index"}
    try:
        return pickle.dumps(state)
    except (pickle.PicklingError, AttributeError, TypeError):
        return snapshot(state)


def duplicate_slots(manager: OffloadingManager) -> list[int] | None:
    """Return the slots of blocks that the device also has, in the order in which RAM evicts them.

    Returns None if RAM is not a victim tier.
    """
    mode = manager.store_mode
    return mode.cache.duplicates.members(0) if mode.follows_device else None


@functools.cache
def _slots_of(cls: type) -> list[str]:
    """Return the names of the attributes in ``__slots__`` of a class and its bases."""
    names = (name for base in cls.__mro__ for name in vars(base).get("__slots__", ()))
    return [name for name in names if not name.startswith("__")]


def _indexed_slots(manager: OffloadingManager) -> set[int]:
    slots = manager.slots
    return set(np.flatnonzero((slots.ref_cnt >= WRITING) & ~slots.condemned).tolist())


def _audit_slots(manager: OffloadingManager) -> None:
    ref_cnt = manager.slots.ref_cnt
    assert (ref_cnt >= FREE).all(), f"slots in an unknown state: {np.flatnonzero(ref_cnt < FREE)}"
    stack = manager.slots.free()
    twice = [slot for slot, n in Counter(stack).items() if n > 1]
    assert not twice, f"slots are free twice: {twice}"
    marked = set(np.flatnonzero(ref_cnt == FREE).tolist())
    assert set(stack) == marked, f"free stack and slot states disagree about {set(stack) ^ marked}"
    condemned = np.flatnonzero(manager.slots.condemned).tolist()
    idle = {slot for slot in condemned if ref_cnt[slot] in (0, FREE)}
    unused = manager.slots.unused().tolist()
    assert len({*unused}) == len(unused), f"slots are unused twice: {unused}"
    in_use = [slot for slot in unused if slot not in condemned or ref_cnt[slot] != WRITING]
    assert not in_use, f"unused slots that are in use: {in_use}"
    assert not idle, f"unused condemned slots were not freed: {idle}"


def _audit_counters(manager: OffloadingManager) -> None:
    stats, ref_cnt, kept = manager.stats(), manager.slots.ref_cnt, ~manager.slots.condemned
    actual = {
        "free": int((ref_cnt == FREE).sum()),
        "writing": int((kept & (ref_cnt == WRITING)).sum()),
        "ready": int((kept & (ref_cnt >= 0)).sum()),
        "evictable": int((kept & (ref_cnt == 0)).sum()),
        "condemned": int((~kept).sum()) - manager.slots.num_unused,
    }
    counted = {name: getattr(stats, name) for name in actual}
    assert counted == actual, f"counters {counted}, but slots {actual}"
    slots = stats.free + stats.writing + stats.ready + stats.condemned
    assert slots == stats.capacity == manager.usable_blocks, f"{slots} slots of {stats.capacity}"
    total = stats.ready + stats.evicted + stats.discarded
    assert stats.stored == total, f"stored {stats.stored}, but ready + evicted + discarded = {total}"
    counts = {name: value for name, value in vars(stats).items() if isinstance(value, int)}
    assert all(value >= 0 for value in counts.values()), f"negative counters: {counts}"


def _audit_tenants(manager: OffloadingManager) -> None:
    tenants, slots = manager.store_mode.cache.tenants, manager.slots
    if not manager.store_mode.cache.has_tenants:
        assert not tenants.held.any(), "blocks have owners without quotas"
        return
    for name, counted, blocks in (
        ("held", tenants.held, slots.filled()),
        ("evictable", tenants.evictable, slots.idle()),
    ):
        actual = Counter(tenants.owner[blocks].tolist())
        wrong = {number: n for number, n in enumerate(counted.tolist()) if n != actual[number]}
        assert not wrong, f"{name} blocks of tenants are {wrong}, but the slots say {dict(actual)}"


def _audit_misses(record: MissRecord) -> None:
    for entries in record.table.reshape(-1, WAYS).tolist():
        used = [entry for entry in entries if entry]
        assert entries[: len(used)] == used, f"a set of the record of misses has a hole: {entries}"
        assert len({entry >> 4 for entry in used}) == len(used), f"a block is recorded twice: {entries}"
        events = {entry & 15 for entry in used}
        assert events <= set(range(EVICTED, NEVER_SEEN)), f"the record of misses has the events {events}"


def _audit_index(label: str, index: Index, positions: set[int]) -> None:
    entries = index.table[index.table != 0]
    listed = [int(entry & np.uint64(0xFFFFFFFF)) - 1 for entry in entries]
    twice = [position for position, n in Counter(listed).items() if n > 1]
    assert not twice, f"{label} has positions twice: {twice}"
    assert set(listed) == positions, f"{label} and its owner disagree about {set(listed) ^ positions}"
    for position in listed:
        key = index.key_at(position)
        actual = index.position_of(key)
        assert actual == position, f"{label} finds {key.hex()} at {actual}, not at {position}"


@kernel
def _first_fault(links: I32Matrix, num_positions: int) -> int:
    """Walk every list, and return the first row with a faulty link.

    Returns -1 if all lists are sound, and ``len(links)`` if a row is marked as listed but is in no list.
    """
    num_listed = 0
    for sentinel in range(num_positions, links.shape[0]):
        row, size = sentinel, 0
        while True:
            following = links[row, NEXT]
            if following != sentinel and (
                following < 0
                or following >= num_positions
                or links[following, LIST] != sentinel
                or size == num_positions
            ):
                return row
            if links[following, PREV] != row:
                return row
            if following == sentinel:
                break
            row, size = following, size + 1
        if links[sentinel, LIST] != size:
            return sentinel
        num_listed += size
    for row in range(num_positions):
        num_listed -= links[row, LIST] != UNLISTED
    return -1 if num_listed == 0 else links.shape[0]


def audit_lists(label: str, lists: Lists) -> None:
    """Check that the links and the sizes of these lists agree."""
    row = _first_fault(lists.links, lists.num_positions)
    if row >= 0:
        end = len(lists.links)
        where = "a row records a list, but is in none" if row == end else f"wrong links or sizes at row {row}"
        raise AssertionError(
            f"{label}: {where} of {lists.num_positions} positions and {lists.num_lists} lists"
        )


def audit_key_lists(label: str, key_lists: KeyLists) -> None:
    lists = key_lists.lists
    audit_lists(label, lists)
    *numbers, spare = range(lists.num_lists)
    used = (number for number in numbers if lists.size(number))
    positions = [position for number in used for position in lists.members(number)]
    assert len(positions) + lists.size(spare) == lists.num_positions, f"{label} has lost positions"
    _audit_index(f"the index of {label}", key_lists.index, set(positions))


def _audit_policy(policy: EvictionPolicy, resident: set[int], manager: OffloadingManager) -> None:
    if isinstance(policy, Handover):
        _audit_handover(policy, manager)
    else:
        _audit_one_policy(policy, manager)
    duplicates = set(duplicate_slots(manager) or ())
    if manager.store_mode.follows_device:
        audit_lists("the duplicates", manager.store_mode.cache.duplicates)
        audit_key_lists("the known keys", manager.store_mode.cache.known)
    ready = {slot for slot in resident if manager.slots.ref_cnt[slot] >= 0}
    assert duplicates <= ready, f"duplicates that are absent or not ready: {duplicates - ready}"
    listed = policy.order()
    if listed is None:
        return
    resident = resident - duplicates
    twice = [slot for slot, n in Counter(listed).items() if n > 1]
    assert not twice, f"policy {policy.name} orders slots twice: {twice}"
    differ = set(listed) ^ resident
    assert not differ, f"policy {policy.name} and the manager disagree about the slots {differ}"


def _audit_parts(thing: Any, owner: str) -> None:
    """Check the lists, key lists and path runs among the attributes of `thing`, and in nested structs."""
    parts = thing.contents() if isinstance(thing, Struct) else vars(thing)
    for name, value in parts.items():
        label = f"{name} of {owner}"
        if isinstance(value, Lists):
            audit_lists(label, value)
        elif isinstance(value, KeyLists):
            audit_key_lists(label, value)
        elif isinstance(value, PathRuns):
            _audit_runs(label, value)
        elif isinstance(value, Struct) and name != "index":
            _audit_parts(value, label)


def _audit_runs(label: str, runs: PathRuns) -> None:
    audit_lists(label, runs.order)
    members = runs.members()
    numbers = [int(runs.runs[run[0], RUN_OF]) for run in members]
    assert len(set(numbers)) == len(numbers), f"{label}: one run in two places: {members}"
    for number, run in zip(numbers, members, strict=True):
        length, tail = int(runs.runs[number, LENGTH]), int(runs.runs[number, TAIL])
        assert (length, tail) == (len(run), run[-1]), f"{label}: run {run} has length {length}, tail {tail}"
    height = int(runs.runs[-1, SPARE])
    unused = set(runs.runs[:height, SPARE].tolist())
    assert len(unused) == height, f"{label}: a run is listed as unused twice"
    assert unused.isdisjoint(numbers), f"{label}: a run in use is listed as unused"
    assert height + len(numbers) == len(runs.runs) - 1, f"{label}: runs were lost"


def _audit_arc(policy: Any, manager: OffloadingManager) -> None:
    c = manager.capacity_blocks
    t1, t2, b1, b2 = policy.lists()
    target = policy.stats()["target_t1_blocks"]
    sizes = f"|T1|, |T2|, |B1|, |B2| = {len(t1)}, {len(t2)}, {len(b1)}, {len(b2)}, c = {c}"
    assert len(t1) + len(b1) <= c, f"|T1| + |B1| > c: {sizes}"
    assert len(t1) + len(t2) + len(b1) + len(b2) <= 2 * c, f"more than 2c: {sizes}"
    assert len(b1) + len(b2) <= c, f"more than c ghosts: {sizes}"
    assert 0 <= target <= c, f"the target {target} is not in 0..{c}"
    ghosts = b1 + b2
    twice = [key.hex() for key, n in Counter(ghosts).items() if n > 1]
    assert not twice, f"ghosts are listed twice: {twice}"
    both = [key.hex() for key in ghosts if manager.index.position_of(key) != ABSENT]
    assert not both, f"keys are resident and ghosts: {both}"


def _audit_one_policy(policy: EvictionPolicy, manager: OffloadingManager) -> None:
    _audit_parts(policy, policy.name)
    if "target_t1_blocks" in policy.stats():  # ARC, or a twin in the tests
        _audit_arc(policy, manager)
    if isinstance(policy, Hazard):
        _audit_hazard(policy)


def _audit_handover(policy: Handover, manager: OffloadingManager) -> None:
    _audit_parts(policy, policy.name)
    for each in (policy.old, policy.new):
        _audit_one_policy(each, manager)
    taken = policy.state.taken
    old, new = ({*(each.order() or ())} for each in (policy.old, policy.new))
    noted = {*np.flatnonzero(taken.where == NEW).tolist()}
    assert new == noted, f"the new policy orders {new}; noted: {noted}"
    assert new <= old, f"the new policy orders blocks that have left: {new - old}"
    recent = {*taken.recent.members(0)}
    assert recent <= old, f"recent blocks that have left: {recent - old}"


def _audit_hazard(policy: Hazard) -> None:
    order, lists = policy.order() or [], policy.state.lists
    classified = np.flatnonzero(lists.links[: lists.num_positions, LIST] != UNLISTED).tolist()
    assert sorted(order) == classified, f"order and classes disagree: {order}, {classified}"
    assert (policy.state.entered == ABSENT).all(), "rows of a batch were not cleared"
