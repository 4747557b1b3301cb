"""Nearest prompt and first difference: by hand, and for any two texts against a search in Python."""

from __future__ import annotations

import json
import random
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvoffload.explain.explanation import explain
from kvoffload.explain.misses import PREFIX_DIFFERS, find_misses
from kvoffload.explain.prompts import BlockTokens, Difference, beginnings
from kvoffload.explain.recording import has_tokens, read_with_tokens
from kvoffload.replay.config import ReplayConfig
from support.small_trace import trace_of

BLOCK = 16


def recording(path: Path, *prompts: list[int], **fields: object) -> str:
    """Write prompts as JSON lines, a second apart."""
    lines = [
        json.dumps({"timestamp": second, "prompt_token_ids": tokens, "output_length": 1, **fields})
        for second, tokens in enumerate(prompts)
    ]
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def words(seed: int, count: int) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(100, 30_000) for _ in range(count)]


def differences(path: Path, *prompts: list[int], block_tokens: int = BLOCK) -> dict[int, Difference]:
    trace, tokens = read_with_tokens(recording(path, *prompts), block_tokens=block_tokens)
    return beginnings(trace, tokens).differences


def test_a_date_in_a_template(tmp_path: Path) -> None:
    template = words(1, 4160)
    monday, tuesday = ([*template[:132], *day, *template[132:]] for day in ([7, 8], [7, 9]))
    result = differences(tmp_path / "a.jsonl", monday, tuesday)
    # 4,162 tokens have 260 full blocks, 4,160 tokens.
    assert result == {1: Difference(133, 134, 4160 - 134, 0, [9], [8])}


@pytest.mark.parametrize(("old", "new"), [([5], [6, 7, 8]), ([5, 6, 7], [8]), ([], [9, 9]), ([9, 9], [])])
def test_a_difference_may_move_the_following_text(tmp_path: Path, old: list[int], new: list[int]) -> None:
    template = words(2, 640)
    before, after = ([*template[:40], *text, *template[40:]] for text in (old, new))
    result = differences(tmp_path / "a.jsonl", before, after)[1]
    shift = len(new) - len(old)
    assert (result.start, result.end, result.shift) == (40, 40 + len(new), shift)
    assert (result.ours, result.theirs) == (new[:4], old[:4])
    assert result.equal_after >= 640 - 40 - 2 * BLOCK


def test_a_date_in_the_first_block(tmp_path: Path) -> None:
    template = words(3, 2048)
    prompts = [[*template[:5], day, *template[5:]] for day in range(3)]
    trace, tokens = read_with_tokens(recording(tmp_path / "a.jsonl", *prompts), block_tokens=512)
    compared = beginnings(trace, tokens)
    assert compared.known.tolist() == [0, 0, 0]
    assert compared.nearest.tolist() == [-1, 0, 1]
    assert [misses.start for misses in compared.differences.values()] == [5, 5]
    _, misses = find_misses(trace, ReplayConfig(99), tokens=tokens)
    assert misses.counts() == {PREFIX_DIFFERS: 8, "new_prompt": 4}


def test_other_text_is_a_new_prompt(tmp_path: Path) -> None:
    trace, tokens = read_with_tokens(recording(tmp_path / "a.jsonl", words(4, 600), words(5, 600)))
    assert find_misses(trace, ReplayConfig(99), tokens=tokens)[1].counts() == {"new_prompt": 74}


def test_the_nearest_of_several_prompts_is_chosen(tmp_path: Path) -> None:
    template = words(6, 320)
    near = [*template[:170], 1, *template[171:]]
    distant = [[*template[:160], *words(seed, 160)] for seed in (7, 8, 9)]
    result = differences(tmp_path / "a.jsonl", near, *distant, template)
    assert result[4] == Difference(170, 171, 149, 0, [template[170]], [1])


def test_a_next_turn_is_not_compared(tmp_path: Path) -> None:
    first = words(10, 320)
    trace, tokens = read_with_tokens(recording(tmp_path / "a.jsonl", first, first + words(11, 320)))
    compared = beginnings(trace, tokens)
    assert compared.continues.tolist() == [False, True]
    assert not compared.differences


def test_a_difference_from_a_prompt_with_another_salt_has_a_position(tmp_path: Path) -> None:
    template = words(14, 160)
    prompts = [[*template[:70], day, *template[70:]] for day in (1, 2)]
    lines = [
        {"timestamp": 0, "prompt_token_ids": prompt, "cache_salt": salt}
        for prompt, salt in zip(prompts, "ab", strict=True)
    ]
    (path := tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    trace, tokens = read_with_tokens(str(path))
    report, misses = find_misses(trace, ReplayConfig(99), tokens=tokens)
    assert misses.counts() == {"new_prompt": 10, PREFIX_DIFFERS: 6, "other_tenant": 4}
    (place,) = explain(report, misses, ReplayConfig(99), has_token_ids=True).differing
    assert (place.block, place.token) == (4, 70)


def test_the_comparison_needs_few_bytes_per_block() -> None:
    count = 5000
    trace, ids = trace_of([*range(count)]), np.zeros((count, BLOCK), np.int64)
    tracemalloc.start()
    try:
        beginnings(trace, BlockTokens(ids, np.arange(count)))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # A deque per block needed 950 bytes.
    assert peak < 200 * count


def test_text_behind_a_shared_prompt_is_a_difference_only_if_it_becomes_equal_again(tmp_path: Path) -> None:
    system, template = words(12, 64), words(13, 320)
    chats = [system + words(seed, 160) for seed in range(20, 32)]
    dated = [[*system, day, *template] for day in range(3)]
    trace, tokens = read_with_tokens(recording(tmp_path / "a.jsonl", *chats, *dated))
    counts = find_misses(trace, ReplayConfig(9999), tokens=tokens)[1].counts()
    # The first chat and two of the dated prompts: 385 - 64 tokens in full blocks.
    assert counts == {"new_prompt": 14, "after_shared_prompt": 11 * 10 + 20, PREFIX_DIFFERS: 2 * 20}


@given(
    template=st.lists(st.integers(0, 3), min_size=64, max_size=200),
    at=st.integers(0, 63),
    old=st.lists(st.integers(4, 6), max_size=5),
    new=st.lists(st.integers(4, 6), min_size=1, max_size=5),
)
def test_differences_have_the_right_positions(
    template: list[int], at: int, old: list[int], new: list[int]
) -> None:
    """Few different tokens make many positions look alike."""
    new_prompt, old_prompt = ([*template[:at], *text, *template[at:]] for text in (new, old))
    blocks = [prompt[: len(prompt) // BLOCK * BLOCK] for prompt in (old_prompt, new_prompt)]
    ids: dict[tuple[int, ...], int] = {}
    paths = [
        [ids.setdefault(tuple(prompt[: end + BLOCK]), len(ids)) for end in range(0, len(prompt), BLOCK)]
        for prompt in blocks
    ]
    matrix = np.array([prefix[-BLOCK:] for prefix in ids], np.int64)
    tokens = BlockTokens(matrix, np.arange(len(ids)))
    difference = beginnings(trace_of(*paths), tokens).differences.get(1)
    if difference is None:
        return
    start = next(i for i, pair in enumerate(zip(*blocks, strict=False)) if pair[0] != pair[1])
    assert difference.start == start
    old_prompt, new_prompt = blocks
    equal = range(difference.end, difference.end + difference.equal_after)
    assert all(new_prompt[i] == old_prompt[i - difference.shift] for i in equal)
    if difference.equal_after:
        assert difference.end >= start
        assert difference.end - difference.shift >= start


def test_recordings_with_tokens_are_recognised(tmp_path: Path) -> None:
    tokens = recording(tmp_path / "tokens.jsonl", [1, 2, 3])
    (trace := tmp_path / "trace.jsonl").write_text(
        '{"timestamp": 0, "input_length": 512, "output_length": 1, "hash_ids": [1]}\n'
    )
    (broken := tmp_path / "broken.jsonl").write_text("nothing\n")
    recognised = [has_tokens(str(name)) for name in (tokens, trace, broken, "chat", "-", tmp_path / "absent")]
    assert recognised == [True, False, False, False, False, False]
    assert has_tokens("-", "token_ids,per_minute=60")
