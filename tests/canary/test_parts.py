"""Parts of the canary: comparison of answers, verdicts and generated prompts."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvoffload.canary.answers import Answer, compare
from kvoffload.canary.prompts import Prompt, PromptSizes, filler, generated
from kvoffload.canary.server import Pace
from kvoffload.canary.verdict import judge
from kvoffload.errors import ConfigError

SIZES = PromptSizes(block_tokens=16, chunk_tokens=(64,), longest=300)


def answer(*rows: dict[str, float]) -> Answer:
    return Answer([max(row, key=row.__getitem__) for row in rows], rows)


def test_positions_after_the_first_other_token_are_not_compared() -> None:
    first = answer({"a": -0.1, "b": -2.0}, {"c": -0.1, "d": -3.0}, {"e": -0.1})
    second = answer({"a": -0.2, "b": -2.0}, {"c": -1.1, "d": -0.5}, {"e": -9.0})
    difference = compare(first, second)
    assert (difference.diverges_at, difference.position, difference.token) == (1, 1, "d")
    assert difference.size == pytest.approx(2.5)


def test_an_unlisted_token_counts_as_the_least_likely_listed_token() -> None:
    difference = compare(answer({"a": -0.1, "b": -3.0}), answer({"a": -0.1, "c": -1.0}))
    assert (difference.token, difference.size) == ("c", pytest.approx(2.0))
    assert difference.logprobs == (None, -1.0)


def test_a_shorter_answer_differs() -> None:
    assert compare(answer({"a": -0.1}, {"b": -0.1}), answer({"a": -0.1})).diverges_at == 1


def test_a_probability_of_zero_is_no_infinite_difference() -> None:
    assert compare(answer({"a": -0.1, "b": -9999.0}), answer({"a": -0.1, "b": -200.0})).size == 0.0


def test_confidence_equals_the_exact_permutation_test() -> None:
    """In 1 of 6 orders of 2 + 2 differences, both of the largest are measured differences."""
    assert judge([0.1, 0.2], [0.3, 0.4]).confidence == pytest.approx(1 - 1 / 6)
    assert judge([0.1, 0.5], [0.3, 0.4]).confidence == 0.0
    assert judge([], [0.3]).confidence == 0.0


@given(st.lists(st.floats(0, 1), min_size=1), st.lists(st.floats(0, 1), min_size=1))
def test_no_alarm_while_no_difference_exceeds_the_noise(noise: list[float], measured: list[float]) -> None:
    quiet = [min(size, max(noise)) for size in measured]
    assert not judge(noise, quiet).is_alarm


def test_a_small_shift_of_most_answers_is_an_alarm_only_if_they_round_alike() -> None:
    noise, shifted = [0.001] * 20, [0.015] * 20
    assert judge(noise, shifted).is_alarm
    assert judge(noise, shifted).threshold == 0.02
    assert not judge(noise, shifted[:9] + noise[:11]).is_alarm, "fewer than half"
    assert not judge(noise, shifted, rounds_alike=False).is_alarm
    assert judge(noise, shifted, rounds_alike=False).threshold == 0.5


def test_lengths_are_around_the_boundaries_of_blocks_and_chunks() -> None:
    lengths = SIZES.lengths()
    assert {31, 32, 33, 63, 64, 65, 127, 128, 129, 280} <= set(lengths)
    assert max(lengths) <= 300
    assert PromptSizes(block_tokens=16, chunk_tokens=(64,), longest=10).lengths() == [10]


def tokens_of(text: str) -> list[int]:
    return [ord(character) for character in text]


@pytest.mark.parametrize("token_ids", [None, range(10, 1000)])
def test_prompts_share_a_prefix_only_within_a_family(token_ids: range | None) -> None:
    prompts = generated(3, 24, SIZES, tokenize=tokens_of, token_ids=token_ids)
    assert len(prompts) == 24
    assert prompts == generated(3, 24, SIZES, tokenize=tokens_of, token_ids=token_ids)
    assert prompts != generated(4, 24, SIZES, tokenize=tokens_of, token_ids=token_ids)
    families: dict[str, list[Any]] = {}
    for prompt in prompts:
        assert len(prompt.content) == int(prompt.name.rsplit("-", 1)[1])
        families.setdefault(prompt.family, []).append(prompt.content)
    assert sorted(len(contents) for contents in families.values()) == [1] * 12 + [3] * 4
    for contents in families.values():
        half = min(map(len, contents)) // 3
        assert len({content[:half] for content in contents}) == 1
    assert len({contents[0][:24] for contents in families.values()}) == len(families)


def test_a_tokenizer_without_english_words_is_refused() -> None:
    with pytest.raises(ConfigError, match="--token-ids"):
        generated(1, 4, SIZES, tokenize=lambda text: [0] * len(text))


@pytest.mark.parametrize("content", ["some words of text", (5, 6, 7)])
def test_a_filler_has_the_tokens_of_a_prompt(content: Any) -> None:
    made = filler(random.Random(1), 20, Prompt("p", content, "p")).content
    pieces = made.split() if isinstance(made, str) else made
    assert len(pieces) == 20
    assert set(pieces) <= set(content.split() if isinstance(content, str) else content)


def test_the_pace_limits_tokens_per_second(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    clock = SimpleNamespace(monotonic=lambda: 5.0, sleep=waits.append)
    monkeypatch.setattr("kvoffload.canary.server.time", clock)
    pace = Pace(10.0)
    for _ in range(3):
        pace.wait(100)
    assert waits == [0.0, 10.0, 20.0]
