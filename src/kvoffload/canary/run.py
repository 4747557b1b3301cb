"""A run of the canary. The server answers each prompt by computation, from the device's cache, and from the
tiers.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import msgspec

from kvoffload.canary.answers import Answer, Difference, compare
from kvoffload.canary.prompts import Prompt, filler
from kvoffload.canary.server import Counters, Server
from kvoffload.canary.verdict import Judgement, Verdict, judge
from kvoffload.errors import CanaryError

_FILLING = 1.25
"""Number of filler tokens to send for each token of the device's cache. It is above 1, because the device may
drop new blocks before old blocks."""
_MOST_DIFFERENCES = 10
_MOST_FILLER_TOKENS = 4096

OnPhase = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class CanaryOptions:
    """Options of a run.

    Args:
        seed: seed of the prompts, salts and fillers.
        answer_tokens: number of generated tokens for each prompt.
        concurrency: largest number of concurrent requests, in the phases that send requests concurrently.
        may_reset: True to empty the device's cache with ``POST /reset_prefix_cache``. False to empty it by
            filler prompts.
        device_tokens: size of the device's KV cache in tokens; None to ask the server. Determines the number
            of filler prompts.
        filler_tokens: length of a filler prompt, in tokens.
    """

    seed: int
    answer_tokens: int = 16
    concurrency: int = 4
    may_reset: bool = False
    device_tokens: int | None = None
    filler_tokens: int = _MOST_FILLER_TOKENS


class PhaseReport(msgspec.Struct, frozen=True, kw_only=True):
    """A phase of a run. Numbers of tokens are None if the server lacks the metric.

    Attributes:
        requests: prompts sent, without fillers.
        tier_tokens: prompt tokens loaded from the tiers.
        device_tokens: prompt tokens found in the device's cache.
        differing: number of answers with a token that differs from the reference.
        median, largest: median and largest difference from the reference, in log-probability.
    """

    name: str
    requests: int
    tier_tokens: float | None
    device_tokens: float | None
    differing: int
    median: float
    largest: float


class DifferenceReport(msgspec.Struct, frozen=True, kw_only=True):
    """A difference between an answer from a cache and the computed answer to the same prompt."""

    phase: str
    prompt: str
    position: int
    token: str
    computed_logprob: float | None
    cached_logprob: float | None
    difference: float
    diverges_at: int | None


class CanaryReport(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a run.

    Attributes:
        reasons: reasons for the verdict, one sentence each.
        noise: largest difference between sound answers (see `verdict`), in log-probability.
        threshold: a difference above the threshold is an alarm, in log-probability.
        confidence: see `verdict.Judgement`.
        differences: the largest differences of answers from caches, in descending order.
        tokens_sent: number of prompt tokens sent, including fillers.
    """

    url: str
    model: str
    seed: int
    verdict: str
    reasons: list[str]
    prompts: int
    noise: float
    threshold: float
    confidence: float
    phases: list[PhaseReport]
    differences: list[DifferenceReport]
    tokens_sent: int
    seconds: float


@dataclass(frozen=True)
class _Phase:
    """Answers of one phase, one for each prompt. None for a prompt to which the phase does not apply."""

    name: str
    answers: list[Answer | None]
    counters: Counters


class Canary:
    """Runs the check of one server.

    Args:
        on_phase: called when a phase begins.

    Cost: seven requests for each prompt, and enough filler prompts to fill the device's cache twice.
    """

    def __init__(
        self,
        server: Server,
        prompts: Sequence[Prompt],
        options: CanaryOptions,
        on_phase: OnPhase = lambda name: None,
    ) -> None:
        self._server, self._prompts, self._options, self._on_phase = server, prompts, options, on_phase
        self._rng = random.Random(options.seed)
        # Salts differ between runs with one seed, too. Otherwise a warm tier would answer the cold phase.
        self._run = f"canary-{options.seed}-{time.time_ns():x}"

    def run(self) -> CanaryReport:
        """Run all phases. Raises `CanaryError` if the server stops answering."""
        begun, sent = time.monotonic(), self._server.tokens_sent
        singles = [f"{self._run}-{number}" for number in range(len(self._prompts))]
        families = [f"{self._run}-{prompt.family}" for prompt in self._prompts]
        reference = self._phase("computed", [f"{salt}-a" for salt in singles])
        again = self._phase("computed again", [f"{salt}-b" for salt in singles])
        batch = self._phase("computed in batches", [f"{salt}-c" for salt in singles], concurrent=True)
        for phase in (reference, again, batch):
            _check_computed(phase.answers, self._prompts)
        device = self._device_phase(families)
        self._empty_device()
        alone = self._phase("from the tiers", families)
        self._empty_device()
        together = self._phase("from the tiers, concurrent", families, concurrent=True)
        phases = _Phases(reference, (again, batch), device, (alone, together), self._prompts)
        judgement, verdict, reasons = phases.judge()
        return CanaryReport(
            url=self._server.url,
            model=self._server.model,
            seed=self._options.seed,
            verdict=verdict.value,
            reasons=reasons,
            prompts=len(self._prompts),
            noise=judgement.noise,
            threshold=judgement.threshold,
            confidence=judgement.confidence,
            phases=phases.reports(),
            differences=phases.largest_differences(),
            tokens_sent=self._server.tokens_sent - sent,
            seconds=time.monotonic() - begun,
        )

    def _phase(self, name: str, salts: Sequence[str], *, concurrent: bool = False) -> _Phase:
        self._on_phase(name)
        before = self._server.counters()
        if concurrent:
            with ThreadPoolExecutor(self._options.concurrency) as threads:
                answers = list[Answer | None](threads.map(self._ask, self._prompts, salts))
        else:
            # In this thread, because Ctrl-C would wait for the answer to a request of another thread.
            answers = [*map(self._ask, self._prompts, salts)]
        return _Phase(name, answers, self._server.counters().since(before))

    def _device_phase(self, salts: Sequence[str]) -> _Phase:
        """Send each prompt twice in a row; returns the second answers.

        The result has None for a prompt whose second answer did not come from the device's cache alone.
        """
        name = "from the device"
        self._on_phase(name)
        answers: list[Answer | None] = []
        total, from_tiers = Counters(0.0, 0.0, 0.0), set[str]()
        for prompt, salt in zip(self._prompts, salts, strict=True):
            begun = self._server.counters()
            self._ask(prompt, salt)
            stored = self._server.counters()
            answer = self._ask(prompt, salt)
            ended = self._server.counters()
            total = total.plus(ended.since(stored))
            # A small device may have dropped blocks of the family. It then loads them from the tiers.
            if ended.since(begun).used_tiers:
                from_tiers.add(prompt.family)
            is_device = ended.since(stored).device_tokens and prompt.family not in from_tiers
            answers.append(answer if is_device else None)
        return _Phase(name, answers, total)

    def _ask(self, prompt: Prompt, salt: str) -> Answer:
        return self._server.complete(prompt, answer_tokens=self._options.answer_tokens, salt=salt)

    def _empty_device(self) -> None:
        self._on_phase("emptying the device's cache")
        if self._options.may_reset:
            if self._server.reset_device_cache():
                return
            raise CanaryError(
                f"{self._server.url} refuses POST /reset_prefix_cache; start it with VLLM_SERVER_DEV_MODE=1, "
                "or leave out --may-reset to use filler prompts"
            )
        tokens = self._options.device_tokens or self._server.device_tokens()[1]
        if not tokens:
            raise CanaryError(
                "the server does not report the size of its KV cache; give --device-tokens, or --may-reset"
            )
        missing, length = tokens * _FILLING, self._options.filler_tokens
        prompts = []
        while missing > 0:
            prompts.append(filler(self._rng, length, self._rng.choice(self._prompts)))
            missing -= length
        with ThreadPoolExecutor(self._options.concurrency) as threads:
            salt = f"{self._run}-filler-{self._rng.random()}"
            for _ in threads.map(
                lambda prompt: self._server.complete(prompt, answer_tokens=1, salt=salt), prompts
            ):
                pass


def _check_computed(answers: Sequence[Answer | None], prompts: Sequence[Prompt]) -> None:
    """Raise `CanaryError` if computed answers cannot serve as a reference, because of NaN or missing
    log-probabilities.
    """
    for answer, prompt in zip(answers, prompts, strict=True):
        if answer is not None and answer.has_nan:
            raise CanaryError(
                f"the computed answer to prompt {prompt.name} has log-probabilities that are not numbers "
                "(NaN), so nothing can be compared: check the model"
            )
    if not any(answer.has_logprobs for answer in answers if answer is not None):
        raise CanaryError("the computed answers have no log-probabilities, so nothing can be compared")


class _Phases:
    """Answers of all phases, compared with the answers of the reference phase."""

    def __init__(
        self,
        reference: _Phase,
        computed: Sequence[_Phase],
        device: _Phase,
        tiers: Sequence[_Phase],
        prompts: Sequence[Prompt],
    ) -> None:
        # A server that ignores the salt answers "computed" prompts from its tiers.
        self._computed = [phase for phase in computed if not phase.counters.used_tiers]
        self._tiers = [*(phase for phase in computed if phase.counters.used_tiers), *tiers]
        self._reference, self._device, self._prompts = reference, device, prompts
        self._differences: dict[str, list[Difference | None]] = {
            phase.name: [
                compare(expected, answer) if expected is not None and answer is not None else None
                for expected, answer in zip(reference.answers, phase.answers, strict=True)
            ]
            for phase in (*computed, device, *tiers)
        }

    def judge(self) -> tuple[Judgement, Verdict, list[str]]:
        """Return the judgement of the answers from the tiers, the verdict of the run, and the reasons for the
        verdict.
        """
        noise = [size for phase in self._computed for size in self._sizes(phase)]
        on_device = judge(noise, self._sizes(self._device), rounds_alike=False)
        if not on_device.is_alarm:
            # The prompt is split at the same place for answers from the device and from tiers, so both round
            # in the same way.
            noise += self._sizes(self._device)
        measured = [size for phase in self._tiers for size in self._sizes(phase)]
        judgement = judge(noise, measured, rounds_alike=bool(noise))
        reasons = self._doubts(bool(noise))
        if on_device.is_alarm:
            reasons.insert(0, self._alarm("the device's own cache", on_device))
        if judgement.is_alarm and self._have_hits():
            reasons.insert(0, self._alarm("the tiers", judgement))
            return judgement, Verdict.DIFFERENT, reasons
        if on_device.is_alarm:
            return judgement, Verdict.DIFFERENT, reasons
        if not self._have_hits():
            return judgement, Verdict.NOT_SHOWN, [self._no_hits(), *reasons]
        differing = sum(self._differing(phase) for phase in (self._device, *self._tiers))
        if differing or judgement.largest > judgement.noise:
            reasons.insert(0, f"no difference exceeds {judgement.threshold:.3g} in log-probability")
            return judgement, Verdict.WITHIN_NOISE, reasons
        return judgement, Verdict.EQUAL, ["all answers have the same tokens", *reasons]

    def reports(self) -> list[PhaseReport]:
        """Return a report of each phase, in order."""
        return [
            PhaseReport(
                name=phase.name,
                requests=sum(answer is not None for answer in phase.answers),
                tier_tokens=phase.counters.tier_tokens,
                device_tokens=phase.counters.device_tokens,
                differing=self._differing(phase),
                median=statistics.median(self._sizes(phase) or [0.0]),
                largest=max(self._sizes(phase), default=0.0),
            )
            for phase in (self._reference, *self._computed, self._device, *self._tiers)
        ]

    def largest_differences(self) -> list[DifferenceReport]:
        """Return the largest differences of answers from caches, in descending order."""
        rows = [
            DifferenceReport(
                phase=phase.name,
                prompt=prompt.name,
                position=difference.position,
                token=difference.token,
                computed_logprob=difference.logprobs[0],
                cached_logprob=difference.logprobs[1],
                difference=difference.size,
                diverges_at=difference.diverges_at,
            )
            for phase in (self._device, *self._tiers)
            for prompt, difference in zip(self._prompts, self._differences[phase.name], strict=True)
            if difference is not None and (difference.size > 0 or difference.diverges_at is not None)
        ]
        return sorted(rows, key=lambda row: -row.difference)[:_MOST_DIFFERENCES]

    def _sizes(self, phase: _Phase) -> list[float]:
        return [row.size for row in self._rows(phase)]

    def _differing(self, phase: _Phase) -> int:
        return sum(row.diverges_at is not None for row in self._rows(phase))

    def _rows(self, phase: _Phase) -> list[Difference]:
        return [row for row in self._differences.get(phase.name, ()) if row is not None]

    def _have_hits(self) -> bool:
        return any(phase.counters.tier_tokens for phase in self._tiers)

    def _no_hits(self) -> str:
        if all(phase.counters.tier_tokens is None for phase in self._tiers):
            return "the server has no metric of tokens from tiers; name one with --tier-hits-metric"
        return (
            "no prompt token came from the tiers: they may be off, too small, or not have stored the prompts"
        )

    def _alarm(self, place: str, judgement: Judgement) -> str:
        return (
            f"answers from {place} differ by up to {judgement.largest:.3g} in log-probability; sound answers "
            f"differ by at most {judgement.noise:.3g}"
        )

    def _doubts(self, has_noise: bool) -> list[str]:
        doubts = []
        if any(phase.name.startswith("computed") for phase in self._tiers):
            doubts.append(
                "the tiers seem to ignore cache_salt: the reference is the first answer to each prompt"
            )
            if self._reference.counters.tier_tokens:
                doubts.append(
                    "tokens from the tiers arrived during the first answers, too: if an earlier run had the "
                    "same prompts, the reference was not computed; give another --seed"
                )
        if not has_noise:
            doubts.append("noise was not measured, because no prompt was computed twice")
        elif not self._sizes(self._device):
            doubts.append("no answer came from the device's cache alone, so its rounding was not measured")
        return doubts
