"""`kvoffload.open` against a model of a dictionary, over random requests, layouts, damage and restarts."""

from __future__ import annotations

import contextlib
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvoffload
from kvoffload import ConfigError, KVCache, KVLayout, MisuseError, ReuseAdmission
from kvoffload.cache.key_chain import KeyChain, fingerprint
from support.disk_blocks import slab_in
from support.timeouts import HANGS_S
from support.token_engine import (
    BLOCK_TOKENS,
    CONTIGUOUS,
    LAYOUTS,
    NUM_BLOCKS,
    PAGED,
    TokenEngine,
    layout_of,
)

torch = pytest.importorskip("torch")
T = BLOCK_TOKENS


def opened(layout: KVLayout | None = None, blocks: int = 200, **options: Any) -> KVCache:
    layout = layout or layout_of()
    ram = blocks * layout.block_bytes
    return kvoffload.open(model="toy", layout=layout, ram=ram, **{"deadline_s": HANGS_S, **options})


def serve(cache: KVCache, engine: TokenEngine, tokens: list[int], ids: list[int], **request: Any) -> int:
    """Make a request as an engine does, and check every loaded byte; return the tokens present."""
    place = engine.where(ids)
    engine.clear()
    with cache.request(tokens, **request) as current:
        hit = current.load_into(engine.kv, **place)
        engine.check(tokens, place, hit)
        engine.compute(tokens, place, first=hit)
        current.store_from(engine.kv, **place)
    return hit


def prompts(chance: random.Random) -> list[int]:
    """Generate a prompt that shares its beginning with other prompts."""
    family, length = chance.randrange(3), chance.randrange(1, 60)
    return [family * 1000 + n // 8 * (n > 20) * chance.randrange(2) for n in range(length)]


@settings(max_examples=20)
@given(st.data())
def test_loads_equal_a_dictionary(data: st.DataObject) -> None:
    """RAM has room for all blocks: a prefix is present exactly if a request with its salt has stored it."""
    axes = data.draw(st.sampled_from(LAYOUTS))
    chance = random.Random(data.draw(st.integers(0, 1 << 32)))
    layout = layout_of(axes)
    engine = TokenEngine(layout, torch=data.draw(st.sampled_from([None, torch])))
    stored: set[tuple[str, tuple[int, ...]]] = set()
    with opened(layout, 2000) as cache:
        for _ in range(12):
            tokens, salt = prompts(chance), chance.choice(["", "a"])
            known = 0
            while (salt, tuple(tokens[: known + T])) in stored and known + T <= len(tokens):
                known += T
            hit = serve(cache, engine, tokens, chance.sample(range(NUM_BLOCKS), 16), salt=salt)
            assert hit == min(known, len(tokens) - 1)
            stored.update((salt, tuple(tokens[:end])) for end in range(T, len(tokens) + 1, T))


@pytest.mark.parametrize("policy", ["lru", "hazard"])
def test_small_ram_and_a_disk_serve_right_bytes(tmp_path: Path, policy: str) -> None:
    chance, engine = random.Random(7), TokenEngine(layout_of())
    with opened(blocks=30, tiers=[f"disk:{tmp_path}:16MiB"], policy=policy) as cache:
        hits = sum(serve(cache, engine, prompts(chance), [*range(16)]) for _ in range(80))
        stats = cache.stats()
    assert hits > 500
    assert stats.hit_tokens["disk"] > 0
    assert stats.tiers["disk"].mismatches == 0


def test_a_cache_on_the_same_disk_finds_the_blocks_of_its_predecessor(tmp_path: Path) -> None:
    engine, tokens = TokenEngine(layout_of()), [*range(41)]
    for expected in (0, 40):
        with opened(tiers=[f"disk:{tmp_path}:16MiB"]) as cache:
            assert serve(cache, engine, tokens, [*range(11)]) == expected
    assert cache.stats is not None
    other = TokenEngine(layout_of(), seed=2)
    with kvoffload.open(model="toy 2", layout=layout_of(), tiers=[f"disk:{tmp_path}:16MiB"]) as cache:
        assert serve(cache, other, tokens, [*range(11)]) == 0, "another model"


@pytest.mark.parametrize(
    "other",
    [
        {"dtype": "float16"},
        {"layers": 3},
        {"head_dim": 4},
        {"heads": 4},
        {"block_tokens": 8},
        {"value_dim": 2},
    ],
)
def test_blocks_of_another_layout_are_not_found(other: dict[str, Any]) -> None:
    layout = layout_of(PAGED, **other)
    assert fingerprint("m", layout.describe()) != fingerprint("m", layout_of(PAGED).describe())
    assert fingerprint("m", layout_of(CONTIGUOUS).describe()) != fingerprint("m", layout_of().describe())
    assert json.loads(fingerprint("m", layout.describe()))["model"] == "m"


def test_keys_are_chained_and_salted() -> None:
    chain = KeyChain(2)
    chain.extend([1, 2, 3, 4, 5])
    again = KeyChain(2)
    for token in (1, 2, 3, 4, 5):
        again.extend([token])
    assert chain.keys == again.keys
    assert len(chain.keys) == 2
    for salt, tokens in (("s", [1, 2, 3, 4]), ("", [2, 1, 3, 4]), ("", [0, 2, 3, 4])):
        other = KeyChain(2, salt)
        other.extend(tokens)
        assert not set(other.keys) & set(chain.keys)
    for same in (np.arange(1, 5), torch.arange(1, 5), np.arange(1, 5, dtype=np.uint8)):
        other = KeyChain(2)
        other.extend(same)
        assert other.keys == chain.keys


@pytest.mark.parametrize("tokens", [[[1, 2]], [1.5], ["a"], "ab", [[1], [2, 3]], np.array([True])])
def test_tokens_must_be_integers(tokens: Any) -> None:
    with pytest.raises(ConfigError, match="token_ids"):
        KeyChain(2).extend(tokens)


def test_generated_tokens_are_stored_without_the_last() -> None:
    """The KV of a sampled token is computed in the next step, so a block with this token would be invalid."""
    engine, tokens = TokenEngine(layout_of()), [*range(16)]
    place: dict[str, Any] = {"block_ids": [*range(8)]}
    with opened() as cache:
        with cache.request(tokens[:9]) as request:
            engine.compute(tokens[:15], place)
            assert request.store_from(engine.kv, **place) == 8
            request.extend(tokens[9:16])
            assert request.store_from(engine.kv, **place) == 4
            assert request.num_tokens == 16
        with cache.request([*tokens, 99]) as request:
            assert request.load_into(engine.kv, **place) == 12
            with pytest.raises(ConfigError, match="num_tokens: 18 is invalid; allowed: 0 to 17"):
                request.store_from(engine.kv, **place, num_tokens=18)
            engine.compute(tokens, place)
            assert request.store_from(engine.kv, **place, num_tokens=16) == 4


def test_the_last_token_is_always_left_to_compute() -> None:
    engine = TokenEngine(layout_of())
    with opened() as cache:
        for expected in (0, 7):
            assert serve(cache, engine, [*range(8)], [3, 4]) == expected
        with cache.request(()) as request:
            assert request.load_into(engine.kv, []) == 0


def test_keys_of_the_engine_replace_tokens() -> None:
    engine, keys = TokenEngine(layout_of()), [bytes([n]) * 32 for n in range(4)]
    tokens, place = [*range(16)], {"block_ids": [4, 3, 2, 1]}
    with opened() as cache:
        with cache.request(keys=keys[:2]) as request:
            engine.compute(tokens, place)
            request.extend(keys[2:])
            assert request.store_from(engine.kv, **place) == 16
        engine.clear()
        with cache.request(keys=keys) as request:
            assert request.load_into(engine.kv, **place) == 16
            engine.check(tokens, place, 16)
        with pytest.raises(ConfigError, match=r"keys\[1\]"):
            cache.request(keys=[keys[0], b"short"])
        with pytest.raises(ConfigError, match="keys"):
            cache.request(tokens, keys=keys)


def test_tokens_on_the_device_are_not_loaded_again() -> None:
    engine, tokens, place = TokenEngine(layout_of()), [*range(17)], {"block_ids": [4, 3, 2, 1, 0]}
    with opened() as cache:
        serve(cache, engine, tokens, place["block_ids"])
        engine.clear()
        with cache.request(tokens) as request:
            assert request.load_into(engine.kv, **place, present=9) == 16
            assert not engine.arrays[0][[4, 3]].any(), "8 tokens are in whole blocks on the device"
            assert engine.arrays[0][[2, 1]].all()
            assert request.load_into(engine.kv, **place, present=17) == 16
            with pytest.raises(ConfigError, match="present: 18"):
                request.load_into(engine.kv, **place, present=18)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([0, 24], r"block_ids\[1\]: 24 is invalid; allowed: 0 to 23"),
        ([-1], r"block_ids\[0\]: -1"),
        ([3, 3], "block_ids: .*each block once"),
        ([0.5], "block_ids: 'float64 of shape"),
        (
            [[0, 1], [2, 3]],
            "block_ids: 'int64 of shape .*one dimension of integers, the blocks of all layers",
        ),
        ([[0, 1], [2]], "block_ids: 'object of shape"),
        (None, "block_ids: missing"),
    ],
)
def test_block_ids_that_do_not_fit_are_named(ids: Any, message: str) -> None:
    with opened() as cache, cache.request([*range(9)]) as request:
        for call in (request.load_into, request.store_from):
            with pytest.raises(ConfigError, match=message):
                call(TokenEngine(layout_of()).kv, ids)


@pytest.mark.parametrize(
    ("method", "given", "message"),
    [
        ("load_into", {"start": 3}, "start: 3 is invalid; allowed: only with the axis batch"),
        ("store_from", {"start": 3}, "start: 3"),
        ("load_into", {"present": 4.5}, "present: 4.5 is invalid; allowed: 0 to 9"),
        ("store_from", {"num_tokens": 4.5}, "num_tokens: 4.5"),
        ("load_into", {"timeout_s": "3"}, "timeout_s: '3' is invalid; allowed: 0 to 2 seconds"),
        ("load_into", {"timeout_s": 3}, "timeout_s: 3 is invalid; .*the cache's deadline_s"),
        ("load_into", {"timeout_s": -1}, "timeout_s: -1"),
    ],
)
def test_arguments_that_do_not_fit_are_named(method: str, given: dict[str, Any], message: str) -> None:
    with opened(deadline_s=2.0) as cache:
        call = getattr(cache.request([*range(9)]), method)
        with pytest.raises(ConfigError, match=message):
            call(TokenEngine(layout_of()).kv, [0, 1], **given)


def test_a_load_into_read_only_tensors_is_refused() -> None:
    """It is refused also if no block is present; a store from them is possible."""
    engine = TokenEngine(layout_of())
    for array in engine.arrays:
        array.flags.writeable = False
    with opened() as cache, cache.request([*range(9)]) as request:
        with pytest.raises(ConfigError, match="kv: 'read-only'"):
            request.load_into(engine.kv, [0, 1])
        assert request.store_from(engine.kv, [0, 1]) == 8


def test_text_is_converted_to_numbers() -> None:
    with opened(recompute_tokens_per_s="1000", deadline_s="50ms") as cache:
        assert cache.manager.recompute_s_per_block == T / 1000
        assert cache.deadline_s == 0.05


def test_all_wrong_options_are_reported_at_once() -> None:
    with pytest.raises(ConfigError, match=r"(?s)model.*layout.*ram.*tiers.*policy.*admission.*deadline_s.*"):
        kvoffload.open(
            model="",
            layout=None,
            ram="much",
            tiers=["disk:/x"],
            policy="lur",
            admission="reus",
            deadline_s=0,
        )  # type: ignore[arg-type]
    with pytest.raises(
        ConfigError, match=r"(?s)policy: 'lur'.*admission: 8 is invalid; its keys must have 32 bytes"
    ):
        kvoffload.open(model="m", layout=layout_of(), policy="lur", admission=ReuseAdmission(8, 2))
    with pytest.raises(ConfigError, match="ram: 5 is invalid; allowed: 384 bytes or more"):
        kvoffload.open(model="m", layout=layout_of(), ram=5)
    with pytest.raises(TypeError, match="model"):
        kvoffload.open(layout=layout_of())  # type: ignore[call-arg]


def test_groups_of_layers_are_refused_and_take_a_cache_each(tmp_path: Path) -> None:
    """Groups have separate block tables: only the smallest hit of all groups is usable."""
    layouts = [layout_of(layers=2), layout_of(layers=1, head_dim=5)]
    with pytest.raises(ConfigError, match=r"layout: .*open a cache for each group"):
        kvoffload.open(model="m", layout=layouts)  # type: ignore[arg-type]
    tokens = [*range(33)]
    for expected in (0, 32):
        with contextlib.ExitStack() as stack:
            hits = []
            for number, layout in enumerate(layouts):
                options: dict[str, Any] = {"tiers": [f"disk:{tmp_path / str(number)}:16MiB"]}
                cache = stack.enter_context(opened(layout, **options))
                hits.append(serve(cache, TokenEngine(layout), tokens, [*range(number, 9 + number)]))
        assert min(hits) == expected


def test_a_tier_that_cannot_be_opened_leaves_nothing_open(tmp_path: Path) -> None:
    """The first tier is closed again, so that another cache can open it."""
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError):
        opened(tiers=[f"disk:{tmp_path / 'a'}:16MiB", f"disk:{tmp_path / 'file'}:16MiB"])
    opened(tiers=[f"disk:{tmp_path / 'a'}:16MiB"]).close()


# ---- damage


def test_a_damaged_block_of_ram_ends_the_prefix() -> None:
    engine, tokens = TokenEngine(layout_of()), [*range(33)]
    with opened() as cache:
        serve(cache, engine, tokens, [*range(9)])
        cache._jobs.ram.pool[2] ^= 1
        assert serve(cache, engine, tokens, [*range(9)]) == 8
        assert serve(cache, engine, tokens, [*range(9)]) == 32, "the block was computed and stored again"


def test_a_damaged_block_of_ram_comes_from_the_disk(tmp_path: Path) -> None:
    engine, tokens = TokenEngine(layout_of()), [*range(33)]
    with opened(tiers=[f"disk:{tmp_path}:16MiB"]) as cache:
        serve(cache, engine, tokens, [*range(9)])
        assert cache.flush()
        cache._jobs.ram.pool[2] ^= 1
        cache._jobs.ram.pool[5] ^= 1
        assert serve(cache, engine, tokens, [*range(9)]) == 32
        assert cache.stats().hit_tokens["disk"] == 8


@pytest.mark.parametrize("refusing", ["admission=reuse:2", "small"])
def test_flush_returns_true_if_a_tier_refuses_or_evicts_blocks(
    tmp_path: Path, refusing: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Each block is offered once, and closing reports no queued block."""
    engine, num_prompts = TokenEngine(layout_of()), 60
    tier = f"disk:{tmp_path}:" + ("400KiB" if refusing == "small" else f"16MiB,{refusing}")
    with opened(tiers=[tier]) as cache:
        for family in range(num_prompts):
            serve(cache, engine, [family * 100 + n for n in range(9)], [0, 1, 2])
        assert cache.flush(HANGS_S)
        stats = cache.stats().tiers["disk"]
        assert stats.capacity < 2 * num_prompts or refusing != "small", "the tier is smaller than RAM"
    assert (stats.evicted > 0) == (refusing == "small")
    assert (stats.refused > 0) == (refusing != "small")
    assert not [text for text in caplog.messages if "queued" in text]


@pytest.mark.parametrize("seed", range(4))
def test_damage_on_the_disk_serves_no_wrong_byte(tmp_path: Path, seed: int) -> None:
    """Bits are flipped and rows exchanged while the cache is open, and between two processes."""
    chance, engine = random.Random(seed), TokenEngine(layout_of())
    texts = [[family * 500 + n for n in range(61)] for family in range(6)]
    with opened(tiers=[f"disk:{tmp_path}:16MiB"]) as cache:
        for tokens in texts:
            serve(cache, engine, tokens, [*range(16)])
    slab = slab_in(tmp_path)
    data = bytearray(slab.read_bytes())
    stored = TokenEngine(layout_of())
    stored.compute(texts[0], {"block_ids": [*range(16)]})
    first = data.find(stored.arrays[0][0].tobytes())
    second = data.find(stored.arrays[0][1].tobytes())
    assert min(first, second) > 0
    width = layout_of().block_bytes
    data[first : first + width], data[second : second + width] = (
        data[second : second + width],
        data[first : first + width],
    )
    for _ in range(200):
        at = chance.randrange(first, len(data))
        data[at] ^= 1 << chance.randrange(8)
    slab.write_bytes(data)
    with opened(tiers=[f"disk:{tmp_path}:16MiB"]) as cache:
        hits = [serve(cache, engine, tokens, [*range(16)]) for tokens in texts]
    assert hits[0] == 0, "its first block was exchanged for another"


# ---- misuse


def test_a_finished_request_and_a_closed_cache_refuse_calls() -> None:
    engine = TokenEngine(layout_of())
    cache = opened()
    with cache.request([*range(9)]) as request:
        request.finish()
        with pytest.raises(MisuseError, match="finished"):
            request.load_into(engine.kv, [0, 1])
    with cache.request([*range(9)]) as request:
        cache.close()
        cache.close()
        with pytest.raises(MisuseError, match="closed"):
            request.store_from(engine.kv, [0, 1])
    with pytest.raises(MisuseError, match="closed"):
        cache.stats()


@pytest.mark.parametrize("is_stored", [True, False])
def test_appended_blocks_are_used_if_they_are_stored_or_loaded(is_stored: bool) -> None:
    """`finish` alone reports no use of blocks that were appended after the last load or store."""
    engine, tokens = TokenEngine(layout_of()), [*range(4 * T)]
    with opened(blocks=6) as cache:
        serve(cache, engine, tokens, [*range(4)])
        serve(cache, engine, [*range(100, 100 + 2 * T)], [0, 1])
        engine.clear()
        with cache.request(tokens[: 2 * T]) as request:
            request.load_into(engine.kv, [*range(4)])
            request.extend(tokens[2 * T :])
            if is_stored:
                place = engine.where([*range(4)])
                engine.compute(tokens, place)
                assert request.store_from(engine.kv, **place, num_tokens=4 * T) == 0, "RAM has all blocks"
        serve(cache, engine, [*range(200, 200 + 2 * T)], [0, 1])
        with cache.request(tokens) as request:
            assert request.load_into(engine.kv, [*range(4)]) == (4 * T - 1 if is_stored else 2 * T)


def test_an_exception_in_the_block_finishes_the_request() -> None:
    engine = TokenEngine(layout_of())
    with opened() as cache:
        with contextlib.suppress(ZeroDivisionError), cache.request([*range(9)]) as request:
            request.load_into(engine.kv, [0, 1])
            raise ZeroDivisionError
        assert not cache.manager.waits, "no request is left open"
        assert serve(cache, engine, [*range(9)], [0, 1, 2]) == 0


def test_a_failed_copy_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, tokens = TokenEngine(layout_of()), [*range(9)]
    with opened() as cache:
        for name, method in (("store", "store_from"), ("load", "load_into")):
            with monkeypatch.context() as patch, cache.request(tokens) as request:
                patch.setattr(f"kvoffload.transfer.parts.HostParts.{name}", _fails)
                with pytest.raises(OSError, match="out of order"):
                    getattr(request, method)(engine.kv, [0, 1])
            slots = cache.manager.slots
            assert slots.num_writing == 0
            assert not (slots.ref_cnt > 0).any()
            assert serve(cache, engine, tokens, [0, 1, 2]) == (0 if name == "store" else 8)


def test_a_reset_forgets_all(tmp_path: Path) -> None:
    engine, tokens = TokenEngine(layout_of()), [*range(9)]
    with opened(tiers=[f"disk:{tmp_path}:16MiB"]) as cache:
        serve(cache, engine, tokens, [0, 1, 2])
        cache.reset()
        assert serve(cache, engine, tokens, [0, 1, 2]) == 0


def test_a_request_from_before_a_reset_stores_nothing() -> None:
    """The request's KV may belong to the weights before the reset."""
    engine, tokens = TokenEngine(layout_of()), [*range(9)]
    engine.compute(tokens, engine.where([0, 1, 2]))
    with opened() as cache:
        begun = cache.request(tokens)
        loaded = cache.request([*range(9)])
        assert loaded.load_into(engine.kv, [3, 4, 5]) == 0
        cache.reset()
        assert begun.store_from(engine.kv, [0, 1, 2]) == 0
        assert loaded.store_from(engine.kv, [0, 1, 2]) == 0
        with begun, loaded, cache.request(tokens) as later:
            assert later.load_into(engine.kv, [0, 1, 2]) == 0
            assert later.store_from(engine.kv, [0, 1, 2]) == 8


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"salt": None}, "salt: missing; allowed: a text or bytes"),
        ({"salt": 5}, "salt: 5 is invalid"),
        ({"hints": {"priority": 1}}, "hints: {'priority': 1} is invalid; allowed: kvoffload.Hints"),
        ({"hints": None}, "hints: missing"),
        ({"token_ids": None}, "token_ids: 'object"),
        ({"token_ids": [2**63]}, "token_ids: 9223372036854775808 is invalid; allowed: up to"),
        ({"token_ids": [1], "keys": []}, "keys: 'given'"),
        ({"token_ids": (), "keys": 5}, "keys: 5 is invalid"),
        ({"token_ids": (), "keys": [b"short"]}, r"keys\[0\]: b'short'"),
    ],
)
def test_invalid_arguments_of_a_request_are_named(given: dict[str, Any], message: str) -> None:
    with opened() as cache, pytest.raises(ConfigError, match=message):
        cache.request(**{"token_ids": [*range(9)], **given})


def test_salts_and_keys_of_every_form() -> None:
    with opened() as cache:
        odd, other = cache.request([1] * T, salt="\ud800"), cache.request([1] * T, salt="\udfff")
        assert odd._chain.keys != other._chain.keys
        keys = [bytes([number]) * 32 for number in range(3)]
        request = cache.request(keys=iter(keys[:2]))
        request.extend(iter(keys[2:]))
        assert (request._chain.keys, request.num_tokens) == (keys, 3 * T)


@pytest.mark.parametrize("wrong", [None, "5", float("nan"), -1, True, 10**400])
def test_invalid_time_limits_are_named(wrong: Any) -> None:
    with opened() as cache:
        for call, field in (("flush", "timeout_s"), ("reset", "timeout_s"), ("close", "flush_s")):
            with pytest.raises(ConfigError, match=f"{field}: .*allowed: seconds, 0 or more"):
                getattr(cache, call)(wrong)
        assert cache.flush(float("inf"))
        assert cache.flush(np.float32(0.5))


def test_present_tokens_behind_the_given_blocks() -> None:
    """A collector of metrics counts no looked-up block."""
    counted: list[int] = []

    class Counts:
        def count(self, metric: str, number: int = 1) -> None:
            counted.append(number)

        def update(self) -> None:
            pass

    with opened() as cache, cache.request([*range(3 * T)]) as request:
        cache.observe(Counts())
        assert request.load_into(TokenEngine(layout_of()).kv, [0], present=2 * T) == 2 * T
    assert counted == [0]


def test_too_much_ram_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"ram: '1000PiB' is invalid; this machine has"):
        kvoffload.open(model="toy", layout=layout_of(), ram="1000PiB")


def _fails(*_: Any) -> Any:
    raise OSError("out of order")
