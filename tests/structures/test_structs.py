"""Structs and batches of keys: equal in Python and in kernels; wrong types are rejected."""

from __future__ import annotations

import pickle
import random
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvoffload.core.manager import OffloadingManager
from kvoffload.core.plans import STORES
from kvoffload.core.policy import POLICIES
from kvoffload.core.protection import Protected
from kvoffload.core.request import Path, RequestContext
from kvoffload.core.slots import SlotArray
from kvoffload.core.state import Entering, blank_store
from kvoffload.errors import PolicyError
from kvoffload.policies.lru import LRU
from kvoffload.structures.batches import KeyBatch, key_at, num_keys, word_at
from kvoffload.structures.jit import BoolArray, I32Matrix, U64Array, compiled
from kvoffload.structures.keys import Keys
from kvoffload.structures.structs import Struct
from kvoffload.testing.audit import snapshot


class Inner(Struct):
    """A struct of an array and a number."""

    rows: I32Matrix
    count: int


class Outer(Struct):
    """A struct with a field of each kind."""

    inner: Inner
    words: U64Array
    marks: BoolArray
    number: int
    share: float


def outer() -> Outer:
    inner = Inner(rows=np.arange(6, dtype=np.int32).reshape(3, 2), count=7)
    return Outer(
        inner=inner, words=np.array([5, 6], np.uint64), marks=np.zeros(2, np.bool_), number=-3, share=0.25
    )


def _change(struct: Outer, by: int) -> int:
    struct.number += by
    struct.share /= 2
    struct.inner.count = by
    struct.inner.rows[2, 1] += by
    struct.words[0] += np.uint64(by)
    struct.marks[1] = True
    return struct.number + struct.inner.rows.shape[0] * struct.inner.rows.shape[1]


change = compiled(_change, cache=False)


def test_kernels_and_python_read_and_write_the_same_memory() -> None:
    struct: Any = outer()
    assert change(struct.memory, 10) == 7 + 6
    assert (struct.number, struct.share, struct.inner.count) == (7, 0.125, 10)
    assert struct.inner.rows.tolist() == [[0, 1], [2, 3], [4, 15]]
    assert (struct.words.tolist(), struct.marks.tolist()) == ([15, 6], [False, True])
    struct.number, struct.share = 2**62, -1.5
    assert (struct.number, struct.share) == (2**62, -1.5)


def test_arrays_and_structs_cannot_be_replaced() -> None:
    struct: Any = outer()
    for name in ("inner", "words", "marks"):
        with pytest.raises(AttributeError):
            setattr(struct, name, getattr(struct, name))


def test_kernels_see_an_exchanged_struct() -> None:
    struct, other = outer(), outer()
    before = struct.inner
    struct.exchange("inner", other.inner)
    change(struct.memory, 10)
    assert struct.inner is other.inner
    assert (other.inner.count, other.inner.rows[2, 1]) == (10, 15)
    assert (before.count, before.rows[2, 1]) == (7, 5)
    assert pickle.loads(pickle.dumps(struct)).inner.count == 10


@pytest.mark.parametrize("wrong", [np.zeros(2, np.int64), np.zeros((4, 2), np.uint64)[:, 0]])
def test_an_array_of_another_type_is_rejected(wrong: np.ndarray) -> None:
    with pytest.raises(TypeError, match="words"):
        Outer(**{**outer().contents(), "words": wrong})


def test_copied_memory_is_a_separate_struct() -> None:
    blank = Outer.blank(inner={"rows": (3, 2)}, words=2, marks=2)
    memory, unchanged = bytearray(blank), bytearray(blank)
    change(memory, 4)  # type: ignore[arg-type]
    struct: Any = Outer.over(memory)
    assert (struct.number, struct.inner.count, struct.inner.rows[2, 1], struct.words[0]) == (4, 4, 4, 4)
    assert Outer.array(memory, "words", 1).tolist() == [4]
    assert unchanged == blank
    struct.inner.rows[0, 0] = 9
    assert Outer.over(bytearray(memory)).inner.rows[0, 0] == 9


def test_a_pickled_struct_has_separate_memory() -> None:
    struct: Any = outer()
    copy = pickle.loads(pickle.dumps(struct))
    assert snapshot(copy) == snapshot(struct)
    change(copy.memory, 1)
    assert (struct.number, copy.number) == (-3, -2)


def test_a_snapshot_shows_each_changed_field() -> None:
    struct: Any = outer()
    for owner, name, other in ((struct, "number", 4), (struct, "share", 0.5), (struct.inner, "count", 8)):
        before, value = snapshot(struct), getattr(owner, name)
        setattr(owner, name, other)
        assert snapshot(struct) != before, name
        ignored = snapshot(struct, ignore=[name])
        setattr(owner, name, value)
        assert snapshot(struct, ignore=[name]) == ignored, name
        assert snapshot(struct) == before, name
    for array in (struct.inner.rows, struct.words, struct.marks):
        before = snapshot([struct, array])
        array.flat[1] += 1
        assert snapshot([struct, array]) != before, "an array that occurs twice"
    assert snapshot([struct.words, struct.words]) != snapshot([struct.words, struct.words.copy()])


@pytest.mark.parametrize("wrong", [3, None, "text", b"bytes", [1], object()])
def test_objects_without_memory_are_rejected(wrong: Any) -> None:
    with pytest.raises((TypeError, BufferError)):
        change(wrong, 1)


# ---- batches


def _read(batch: KeyBatch, key_bytes: int, num_words: int, out: U64Array) -> int:
    count = num_keys(batch, num_words)
    for row in range(count):
        address = key_at(batch, row, key_bytes, num_words)
        if address == 0:
            return ~row
        for word in range(num_words):
            out[row * num_words + word] = word_at(address, word, key_bytes)
    return count


read = compiled(_read, cache=False)


@given(st.integers(1, 41), st.integers(0, 9), st.randoms(use_true_random=False))
def test_a_list_is_read_as_packed_keys_are(key_bytes: int, count: int, chance: random.Random) -> None:
    keys = [chance.randbytes(key_bytes) for _ in range(count)]
    packed = Keys.pack(keys, key_bytes)
    num_words = packed.words.shape[1]
    for batch in (keys, packed.words):
        out = np.zeros(count * num_words, np.uint64)
        assert read(batch, key_bytes, num_words, out) == count
        assert np.array_equal(out.reshape(count, num_words), packed.words)


@pytest.mark.parametrize("wrong", [b"short", b"far too long", 5, "textual8", None, bytearray(8)])
def test_an_invalid_key_is_found_and_leaves_no_exception(wrong: Any) -> None:
    assert read([b"12345678", wrong], 8, 1, np.zeros(2, np.uint64)) == ~1
    assert read([b"12345678"], 8, 1, np.zeros(2, np.uint64)) == 1


def test_rows_that_do_not_follow_one_another_are_refused() -> None:
    with pytest.raises((ValueError, BufferError), match="contiguous"):
        read(np.zeros((4, 2), np.uint64)[:, 0], 8, 1, np.zeros(4, np.uint64))


@pytest.mark.parametrize("call", ["lookup", "prepare_store", "touch", "prepare_load", "contains"])
@pytest.mark.parametrize(("wrong", "error"), [(b"123", ValueError), (3, TypeError), ("12345678", TypeError)])
def test_a_batch_with_a_wrong_key_changes_nothing(call: str, wrong: Any, error: type[Exception]) -> None:
    manager = OffloadingManager(40, key_bytes=8)
    ctx = manager.begin_request("r", [b"%8d" % n for n in range(3)])
    before, path = snapshot(manager), list(ctx.keys())
    batch = [b"%8d" % n for n in range(2, 12)]
    with pytest.raises(error, match="key 10 "):
        getattr(manager, call)([*batch, wrong], ctx)
    assert (snapshot(manager), list(ctx.keys())) == (before, path)
    assert ctx.extend([*batch, b"another1"]).tolist() == [2, *range(3, 13)]


def test_any_sequence_and_any_bytes_are_keys() -> None:
    class Named(bytes):
        """A subclass of ``bytes``."""

    manager = OffloadingManager(4, key_bytes=8)
    plan = manager.prepare_store((b"12345678", Named(b"abcdefgh")))  # type: ignore[arg-type]
    assert plan is not None
    assert list(plan.keys) == [b"12345678", b"abcdefgh"]
    manager.complete_store(plan)
    assert manager.lookup(Keys.pack([b"12345678"], 8)[:0]).num_ready == 0
    assert manager.lookup((b"12345678", b"abcdefgh")).num_ready == 2  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="keys of 16 bytes"):
        manager.lookup(Keys.pack([bytes(16)], 16))


@given(st.lists(st.integers(0, 300), max_size=120), st.integers(0, 60))
def test_a_batch_that_does_not_fit_leaves_the_path_as_it_was(numbers: list[int], known: int) -> None:
    """After a rollback the path is enlarged, and a second try gives the result of a large path."""
    ctx, roomy = RequestContext("", 8), RequestContext("", 8, room=1024)
    for batch in ([b"%8d" % n for n in range(known)], [b"%8d" % n for n in numbers]):
        assert ctx.extend(batch).tolist() == roomy.extend(batch).tolist()
    assert list(ctx.keys()) == list(roomy.keys())
    assert np.count_nonzero(Path.over(ctx.memory).index.table) == ctx.length


# ---- addresses that the manager's kernels hold


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("policy", POLICIES.names())
def test_addresses_are_constant(policy: str, store: str) -> None:
    """They stay constant after a reset, because kernels would keep the memory of a replaced array."""
    manager: Any = OffloadingManager(8, key_bytes=8, policy=policy, store=store)

    def addresses(struct: Struct) -> list[Any]:
        return [
            addresses(field) if isinstance(field, Struct) else field.ctypes.data
            for field in struct.contents().values()
            if isinstance(field, (Struct, np.ndarray))
        ]

    def all_of_them() -> list[Any]:
        state = manager.store_mode.cache
        return [addresses(state), addresses(manager.policy.state), state.policy, manager.policy.state.address]

    before = all_of_them()
    for number in range(30):
        plan = manager.prepare_store([b"%8d" % n for n in range(number, number + 5)])
        manager.complete_store(plan, success=number % 3 != 0)
        if number % 10 == 9:
            manager.reset()
    assert all_of_them() == before


# ---- policies that are compiled, and classes derived from them


def test_python_methods_of_a_subclass_are_called() -> None:
    calls = []

    class Watched(LRU):
        """LRU that records its calls of `replace`."""

        def access(self, slots: SlotArray, reused: BoolArray) -> None:
            calls.append("access")
            super().access(slots, reused)

        def replace(self, keys: Keys, slots: SlotArray, num_free: int, protected: Protected) -> None:
            calls.append("replace")
            super().replace(keys, slots, num_free, protected)

    class Listening(LRU):
        """LRU that records all its calls."""

        def observe(self, path: Keys, slots: SlotArray, start: int, on_device: int) -> None:
            calls.append("observe")

    for policy, expected in ((Watched, ["replace", "access"]), (Listening, ["observe"])):
        calls.clear()
        manager = OffloadingManager(2, key_bytes=8, policy=policy)
        ctx = manager.begin_request("r")
        plan = manager.prepare_store([b"%8d" % n for n in range(3)], ctx)
        assert plan is not None
        manager.complete_store(plan)
        manager.finish_request(ctx)
        assert calls == expected
        assert manager.policy.order() == [1, 0]


def test_a_compiled_policy_with_a_wrong_victim_is_detected() -> None:
    manager: Any = OffloadingManager(2, key_bytes=8)
    for key in (b"aaaaaaaa", b"bbbbbbbb"):
        manager.complete_store(manager.prepare_store([key]))
    # The order has lost both blocks: there is no victim.
    manager.policy.remove(np.array([0, 1], np.int32))
    before = snapshot(manager, ignore=["policy"])
    with pytest.raises(PolicyError, match="named slot -2 as the victim for key 6363"):
        manager.prepare_store([b"cccccccc"])
    assert snapshot(manager, ignore=["policy"]) == before


@pytest.mark.parametrize("count", [0, 1, 2, 3, 8, 9, 1000])
def test_memory_of_a_plan_fits_its_blocks(count: int) -> None:
    blank = Entering.over(blank_store(count, 20))
    assert len(blank.rows) == len(blank.slots) >= count
    assert blank.keys.shape == blank.evicted.shape == (len(blank.rows), 3)


def test_a_policy_may_replace_its_state_in_a_reset() -> None:
    """Kernels then have the address of the new state."""

    class Renewed(LRU):
        """LRU whose reset creates a new state."""

        def reset(self) -> None:
            self.state = LRU(self.index).state

    manager: Any = OffloadingManager(3, key_bytes=8, policy=Renewed)
    for _ in range(3):
        for number in range(5):
            manager.complete_store(manager.prepare_store([b"%8d" % number]))
        assert manager.store_mode.cache.policy == manager.policy.state.address
        assert sorted(manager.policy.order()) == [0, 1, 2]
        manager.reset()


# ---- compiling


MAKERS = {
    "kvoffload.core.manager": "OffloadingManager(8, policy='hazard', admission='reuse:2')",
    "kvoffload.tiers.memory": "MemoryTier(8, 64)",
    "kvoffload.transfer.engine": "HostEngine(numpy.zeros((4, 64), 'u1'))",
}


@pytest.mark.parametrize(
    "module",
    [
        pytest.param(name, marks=() if name == "kvoffload.core.manager" else pytest.mark.slow)
        for name in MAKERS
    ],
)
@pytest.mark.slow
def test_no_kernel_is_compiled_inside_a_request(module: str) -> None:
    code = (
        f"import numpy; from {module} import *; {MAKERS[module]}; "
        "from kvoffload.structures import jit; print([one.__name__ for one in jit._WAITING])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
