"""Confidence intervals: by hand, against a plain twin, and their coverage."""

from __future__ import annotations

import numpy as np
import pytest

from kvoffload.errors import ConfigError
from kvoffload.structures.draws import whole_numbers
from kvoffload.sweep.bootstrap import FEWEST_WINDOWS, Resamples, window_sums


def test_windows_are_equal_runs_and_lose_nothing() -> None:
    values = np.arange(1, 8, dtype=np.int32)
    assert window_sums(values, 3).tolist() == [1 + 2, 3 + 4, 5 + 6 + 7]
    assert window_sums(values, 7).tolist() == values.tolist()
    assert window_sums(values, 99).tolist() == values.tolist(), "never more windows than requests"
    assert window_sums(values[:0], 3).tolist() == []
    sums = window_sums(np.full(1000, 2**30, np.int32), 3)
    assert sums.sum() == 1000 * 2**30, "sums do not overflow"


@pytest.mark.parametrize(("confidence", "ends"), [(0.95, (0.0, 1.0)), (0.2, (0.75, 0.75))])
def test_two_windows_by_hand(confidence: float, ends: tuple[float, float]) -> None:
    """Window A hits 0 of 1, B 3 of 3: the draws AA, AB, BA and BB have the ratios 0, 3/4, 3/4 and 1."""
    draws = Resamples(np.array([1, 3]), fewest_windows=2, confidence=confidence)
    interval = draws.ratio(np.array([0, 3]))
    assert interval is not None
    assert interval[:2] == ends


def test_equals_the_plain_twin() -> None:
    generator = np.random.default_rng(1)
    refs = generator.integers(1, 100, 12)
    hits = generator.integers(0, refs)
    drawn = whole_numbers(50 * 12, 12, seed=9).reshape(50, 12)
    ratios = [sum(hits[w] for w in draw) / sum(refs[w] for w in draw) for draw in drawn]
    interval = Resamples(refs, resamples=50, seed=9).ratio(hits)
    assert interval is not None
    assert interval[:2] == pytest.approx(np.quantile(ratios, (0.025, 0.975)), abs=1e-15)


def test_draws_are_even_and_differ_with_the_seed() -> None:
    drawn = whole_numbers(100_000, 10, seed=0)
    assert np.abs(np.bincount(drawn, minlength=10) - 10_000).max() < 400
    assert (drawn != whole_numbers(100_000, 10, seed=1)).mean() > 0.85


def test_draws_do_not_depend_on_a_library() -> None:
    """The draws begin with the published outputs of splitmix64 for seed 0."""
    published = (0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F, 0xF88BB8A8724C81EC)
    assert whole_numbers(4, 32, seed=0).tolist() == [number >> 59 for number in published]


def test_constant_hits_have_an_empty_interval() -> None:
    refs = np.arange(1, 33)
    interval = Resamples(refs).ratio(refs)
    assert interval == (1.0, 1.0, 0.0)


def test_a_run_does_not_differ_from_itself() -> None:
    generator = np.random.default_rng(2)
    refs = generator.integers(1, 1000, 32)
    hits = generator.integers(0, refs)
    assert Resamples(refs).difference(hits, hits.copy()) == (0.0, 0.0, 0.0)


def test_too_few_windows_have_no_interval() -> None:
    refs = np.full(FEWEST_WINDOWS - 1, 5)
    assert Resamples(refs).ratio(refs) is None
    assert Resamples(np.zeros(20, np.int64)).ratio(np.zeros(20, np.int64)) is None, "no references at all"
    sparse = np.array([0] * 19 + [7])
    assert Resamples(sparse).ratio(sparse) == (1.0, 1.0, 0.0), "draws with only empty windows are ignored"


def test_invalid_arguments_are_refused() -> None:
    for resamples in (0, 10**12, 2.5):
        with pytest.raises(ConfigError, match=f"resamples: {resamples} is invalid; allowed: 1 to 1000000"):
            Resamples(np.ones(20, np.int64), resamples=resamples)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="seed: -1 is invalid"):
        Resamples(np.ones(20, np.int64), seed=-1)
    with pytest.raises(ConfigError, match="one sum for each of 20 windows"):
        Resamples(np.ones(20, np.int64)).ratio(np.ones(21, np.int64))


def _bursty(traces: int, requests: int, generator: np.random.Generator) -> np.ndarray:
    """Draw hits of requests of 10 blocks, 4 on average; good and bad states last 25 requests on average."""
    changes = generator.random((traces, requests)) < 1 / 25
    changes[:, 0] = generator.random(traces) < 0.5
    good = np.cumsum(changes, axis=1) % 2 == 1
    hits = generator.binomial(10, np.where(good, 0.7, 0.1))
    return hits.astype(np.int32)


def test_intervals_have_the_nominal_coverage() -> None:
    """Coverage is 95 %; with requests assumed independent it is about 50 %."""
    traces, requests = 400, 6400
    hits = _bursty(traces, requests, np.random.default_rng(3))
    refs = window_sums(np.full(requests, 10))
    draws = Resamples(refs)
    covered = naive = 0
    for request_hits in hits:
        interval = draws.ratio(window_sums(request_hits))
        assert interval is not None
        covered += interval.low <= 0.4 <= interval.high
        margin = 1.96 * request_hits.std() / requests**0.5
        naive += abs(request_hits.mean() - 4) <= margin
    assert 0.91 <= covered / traces <= 0.98, covered / traces
    assert naive / traces < 0.6, naive / traces


def test_a_paired_difference_excludes_the_common_variation() -> None:
    traces, requests = 400, 6400
    generator = np.random.default_rng(4)
    shared = _bursty(traces, requests, generator)
    better = generator.binomial(1, 0.05, shared.shape)  # 0.005 of the references
    draws = Resamples(window_sums(np.full(requests, 10)))
    covered = detected = detected_unpaired = 0
    for base_hits, gain in zip(shared, better, strict=True):
        base, other = window_sums(base_hits), window_sums(base_hits + gain)
        interval, alone = draws.difference(other, base), draws.ratio(base)
        assert interval is not None
        assert alone is not None
        covered += interval.low <= 0.005 <= interval.high
        detected += interval.low > 0
        detected_unpaired += other.sum() / (10 * requests) > alone.high
    assert 0.91 <= covered / traces <= 0.98, covered / traces
    assert detected == traces
    assert detected_unpaired < 0.2 * traces


def test_dependent_windows_are_reported() -> None:
    generator = np.random.default_rng(5)
    refs = np.full(6400, 10)
    draws = Resamples(window_sums(refs))
    rising = generator.binomial(10, np.linspace(0.1, 0.9, 6400))
    even = generator.binomial(10, 0.5, 6400)
    assert draws.ratio(window_sums(rising)).correlation > 0.7  # type: ignore[union-attr]
    assert abs(draws.ratio(window_sums(even)).correlation) < 0.4  # type: ignore[union-attr]
