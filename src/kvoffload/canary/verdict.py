"""Verdict of a canary run: compares the differences of answers from the caches with the engine's noise.

Even *sound* answers to the same prompt differ slightly; these differences are the noise. Computed answers are
sound. Answers from the device's cache are sound if they raise no alarm."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

NOISE_FACTOR = 4.0
"""A difference is an alarm if it exceeds this multiple of the largest difference between sound answers."""
LEAST_ALARM = 0.02
"""Smallest threshold of an alarm, in log-probability, because the measured noise may be 0 by chance."""
LEAST_DEVICE_ALARM = 0.5
"""Smallest threshold of an alarm, in log-probability, if no sound answer was rounded like the answers from
the cache (`rounds_alike` of `judge`)."""
_LEAST_SHIFT, _SURE = 0.01, 1 - 1e-6


class Verdict(str, Enum):
    """Result of a run.

    - EQUAL: answers from caches have the tokens of computed answers, and no difference exceeds the noise.
    - WITHIN_NOISE: some tokens differ or a difference exceeds the noise, but there is no alarm.
    - DIFFERENT: the answers from the tiers or from the device's cache raise an alarm (`Judgement.is_alarm`).
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
        is_alarm: True if a difference exceeds `threshold`. Also True for a *shift*, which one wrong layer can
            cause: at least half of the differences exceed both `noise` and 0.01, `confidence` is almost 1,
            and `rounds_alike` is True.
        threshold: limit of a difference, in log-probability.
        noise: largest difference between sound answers, in log-probability.
        largest: largest difference of an answer from the cache, in log-probability.
        confidence: 1 minus the p-value of the differences that exceed `noise`; 0 if there are none.
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
    """Return 1 minus the p-value of an exact permutation test.

    Let k values of `measured` exceed every value of `noise`. The p-value is the probability that the k
    largest values are all in `measured` if the values of both lists are mixed at random. Returns 0 if k is 0
    or `noise` is empty.
    """
    loudest = max(noise, default=0.0)
    above = sum(size > loudest for size in measured)
    if not above or not noise:
        return 0.0
    return 1 - math.comb(len(measured), above) / math.comb(len(measured) + len(noise), above)
