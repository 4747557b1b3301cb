"""Generation of traces from a `Workload`.

The same workload gives the same trace on every machine. Random numbers come from `random.Random.random`,
whose sequence Python guarantees. Floats use only ``+ - * /``, which IEEE 754 defines exactly. libm and
numpy's generators are not used, because their results differ between versions.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from random import Random
from typing import TypeAlias

import numpy as np

from kvoffload.traces.trace import Trace
from kvoffload.traces.workloads import LogNormal, Workload

_Segment: TypeAlias = "int | tuple[str, int]"
"""Identity of a text. It is a unique number for a text that occurs once, and a pair (kind, number) for a
shared text.
"""

_EMPTY = 0


@dataclass(frozen=True)
class _Context:
    """A context, that is, a sequence of texts: ids of its full blocks, length in tokens, and identity.

    Contexts of equal texts have equal identities.
    """

    blocks: tuple[int, ...] = ()
    tokens: int = 0
    identity: int = _EMPTY


@dataclass(frozen=True)
class _Request:
    time_ms: int
    lap: int
    session: int
    blocks: tuple[int, ...]
    output_tokens: int


def generate(workload: Workload) -> Trace:
    """Generate all sessions and merge their requests by time.

    To keep the request rate even from start to end, time wraps around: a request that would arrive after the
    end of the trace moves to the start, as if its session had begun before the trace. Therefore the number of
    requests does not depend on `sessions_per_minute`.

    Cost: about 0.7 s per million block references.
    """
    server = _Server(workload)
    requests = [request for session in range(workload.sessions) for request in server.play(session)]
    # The sort is stable, so requests of the same session and millisecond keep their order.
    requests.sort(key=lambda request: (request.time_ms, request.session))
    codes: dict[tuple[int, int], int] = {}
    refs = [
        codes.setdefault((block, 0 if block in server.shared_blocks else request.lap), len(codes))
        for request in requests
        for block in request.blocks
    ]
    return Trace(
        name=workload.name,
        block_tokens=workload.block_tokens,
        block_ids=np.arange(len(codes), dtype=np.int64),
        refs=np.array(refs, np.int32),
        offsets=np.array([0, *accumulate(len(request.blocks) for request in requests)], np.int64),
        timestamps_ms=np.array([request.time_ms for request in requests], np.int64),
        output_tokens=np.array([request.output_tokens for request in requests], np.int64),
    )


class _Server:
    """The state that all sessions share: random numbers, shared texts, and an id for each prefix."""

    def __init__(self, workload: Workload) -> None:
        self.shared_blocks: set[int] = set()
        self._workload = workload
        self._window_ms = 1 + int(60_000 * workload.sessions / workload.sessions_per_minute)
        self._random = Random(workload.seed).random
        self._identities: dict[tuple[int, _Segment], int] = {}
        self._blocks: dict[tuple[int, _Segment, int], int] = {}
        self._unique_segments = 0
        self._prompt_shares = _zipf(workload.shared_prompts)
        self._document_shares = _zipf(workload.documents)
        self._document_tokens = [self._draw(workload.document_tokens) for _ in range(workload.documents)]

    def play(self, session: int) -> list[_Request]:
        """Generate the requests of one session and its sub-agents."""
        workload = self._workload
        start_ms = int(self._random() * self._window_ms)
        prompt = self._choose(self._prompt_shares)
        context = self._opening(prompt)
        for _ in range(workload.documents_per_session):
            document = self._choose(self._document_shares)
            context = self._append(context, ("document", document), self._document_tokens[document])
        requests: list[_Request] = []
        self._converse(session, requests, start_ms, prompt, context)
        return requests

    def _converse(
        self,
        session: int,
        requests: list[_Request],
        time_ms: int,
        prompt: int,
        context: _Context,
        *,
        is_sub_agent: bool = False,
    ) -> int:
        """Append the requests of a conversation and its sub-agents to `requests`.

        Returns the time in ms when the conversation ends.
        """
        workload = self._workload
        mean_turns = workload.sub_agent_turns if is_sub_agent else workload.turns
        prompts: list[_Context] = []
        message = workload.first_tokens
        while True:
            if prompts and self._random() < workload.fork_share:
                context = prompts[int(self._random() * len(prompts))]
            context = self._write(context, prompt, self._draw(message))
            prompts.append(context)
            answer_tokens = self._draw(workload.answer_tokens)
            lap, time_in_lap_ms = divmod(time_ms, self._window_ms)
            requests.append(_Request(time_in_lap_ms, lap, session, context.blocks, answer_tokens))
            time_ms += self._draw(workload.think_time_s, unit=1000)
            if not self._continues(len(prompts), mean_turns):
                return time_ms
            context = self._write(context, prompt, answer_tokens)
            message = workload.turn_tokens
            if not is_sub_agent and self._random() < workload.sub_agent_share:
                task = self._choose(self._prompt_shares)
                opening = self._opening(task)
                time_ms = self._converse(session, requests, time_ms, task, opening, is_sub_agent=True)

    def _continues(self, turns: int, mean_turns: float) -> bool:
        """Decide at random if another turn follows. The distribution of turns is beta-geometric."""
        a, b = (mean_turns - 1) * (self._workload.turns_shape - 1), self._workload.turns_shape
        return self._random() * (a + b + turns - 1) < a + turns - 1

    def _opening(self, prompt: int) -> _Context:
        return self._append(_Context(), ("prompt", prompt), self._workload.shared_prompt_tokens)

    def _write(self, context: _Context, prompt: int, tokens: int) -> _Context:
        """Append a new text, which occurs nowhere else and has `tokens` tokens, to a context.

        If the context would become too long, it is first replaced by the shared prompt with the number
        `prompt`, and a summary.
        """
        workload = self._workload
        if context.tokens + tokens > workload.context_limit_tokens:
            context = self._append_once(self._opening(prompt), self._draw(workload.summary_tokens))
        # A text that does not fit even then is truncated.
        free_tokens = max(0, workload.context_limit_tokens - context.tokens)
        return self._append_once(context, min(tokens, free_tokens))

    def _append_once(self, context: _Context, tokens: int) -> _Context:
        self._unique_segments += 1
        return self._append(context, self._unique_segments, tokens)

    def _append(self, context: _Context, segment: _Segment, tokens: int) -> _Context:
        """Append the text `segment`, which has `tokens` tokens. Equal arguments give equal contexts."""
        before, total = context.identity, context.tokens + tokens
        completed = range(len(context.blocks), total // self._workload.block_tokens)
        blocks = [self._blocks.setdefault((before, segment, i), len(self._blocks)) for i in completed]
        if isinstance(segment, tuple):
            self.shared_blocks.update(blocks)
        identity = self._identities.setdefault((before, segment), len(self._identities) + 1)
        return _Context((*context.blocks, *blocks), total, identity)

    def _choose(self, shares: list[float]) -> int:
        return bisect_right(shares, self._random() * shares[-1])

    def _draw(self, quantity: LogNormal, unit: int = 1) -> int:
        return draw(self._random, quantity, unit)


def draw(random: Callable[[], float], quantity: LogNormal, unit: int = 1) -> int:
    """Draw a value of `quantity`; return it times `unit`, rounded, at least 1. Equal on every machine."""
    # The sum of twelve uniform numbers is nearly normal up to three sigma and needs no logarithm. A loop,
    # because `sum` rounds differently since Python 3.12.
    normal = -6.0
    for _ in range(12):
        normal += random()
    return max(1, int(quantity.median * unit * _exp(quantity.sigma * normal) + 0.5))


def _exp(x: float) -> float:
    """Compute ``e**x`` as ``(1 + x/4096)**4096``, for ``abs(x) < 24``.

    The result is equal on every machine. It is 0.1 % too low for ``x = 3``.
    """
    power = 1 + x / 4096
    for _ in range(12):
        power *= power
    return power


def _zipf(count: int) -> list[float]:
    """Return the cumulative sums of the weights 1, 1/2, 1/3, ..."""
    return list(accumulate(1 / rank for rank in range(1, count + 1)))
