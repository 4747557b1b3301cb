"""Verdict of a canary run: compares the differences of answers from the caches with the engine's noise.

Noise is the differences between *sound* answers to the same prompt. Sound answers are computed, or come from
the device's cache and raised no alarm."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

NOISE_FACTOR = 4.0
"""A difference is an alarm if it exceeds this multiple of the noise: of the largest difference between sound
answers."""
LEAST_ALARM = 0.02
"""Smallest threshold of an alarm, in log-probability. If the noise of a run is 0, it may still be larger in
the next run."""
LEAST_DEVICE_ALARM = 0.5
"""Smallest threshold, in log-probability, if no sound answer was rounded in the same way as the answers from
the cache."""
_LEAST_SHIFT, _SURE = 0.01, 1 - 1e-6


class Verdict(str, Enum):
    """Result of a run.

    - EQUAL: the tokens of all answers are equal, and no difference exceeds the noise.
    - WITHIN_NOISE: some token or log-probability differs, but not more than between sound answers.
    - DIFFERENT: an answer from a cache differs by more than the noise.
    - NOT_SHOWN: the server reports no hits in its tiers, so nothing is known about the tiers.
    """

    EQUAL = "equal"
    WITHIN_NOISE = "within-noise"
    DIFFERENT = "different"
    NOT_SHOWN = "not-shown"


@dataclass(frozen=True)
class Judgement:
    """Judgement of answers from a cache: their differences from the reference are compared with the noise.

    Attributes:
        is_alarm: True if a difference exceeds `threshold`, or if most answers have a small shift. A shift is
            an alarm if `rounds_alike` is True, at least half of the differences exceed all noise, and
            `confidence` is almost 1.
        threshold: limit of a difference, in log-probability.
        noise: largest difference between sound answers, in log-probability.
        largest: largest difference of an answer from the cache, in log-probability.
        confidence: 1 minus the probability that as many differences of cached answers exceed all noise by
            chance. It is 0 if none exceeds all noise.
    """

    is_alarm: bool
    threshold: float
    noise: float
    largest: float
    confidence: float


def judge(noise: Sequence[float], measured: Sequence[float], *, rounds_alike: bool = True) -> Judgement:
    """Judge the differences of answers from a cache.

    Args:
        noise: differences between sound answers to the same prompts.
        measured: differences of answers from the cache.
        rounds_alike: True if some sound answers were rounded in the same way as the answers from the cache.
            If False, the threshold is at least `LEAST_DEVICE_ALARM`, and a shift is no alarm.
    """
    loudest, largest = max(noise, default=0.0), max(measured, default=0.0)
    threshold = max(LEAST_ALARM if rounds_alike else LEAST_DEVICE_ALARM, NOISE_FACTOR * loudest)
    confidence = _confidence(noise, measured)
    # A small shift of most answers, for example by one wrong layer, is an alarm.
    shifted = sum(size > max(loudest, _LEAST_SHIFT) for size in measured)
    is_shift = confidence > _SURE and 2 * shifted >= len(measured) and rounds_alike
    return Judgement(largest > threshold or is_shift, threshold, loudest, largest, confidence)


def _confidence(noise: Sequence[float], measured: Sequence[float]) -> float:
    """Return 1 minus the probability that the k largest differences are all in `measured` by chance.

    k is the number of measured differences that exceed all noise. Returns 0 if k is 0 or if `noise` is empty.
    Source: exact permutation test.
    """
    loudest = max(noise, default=0.0)
    above = sum(size > loudest for size in measured)
    if not above or not noise:
        return 0.0
    return 1 - math.comb(len(measured), above) / math.comb(len(measured) + len(noise), above)
