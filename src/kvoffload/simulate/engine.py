"""Serving engine in simulated time. Requests wait, load blocks, are computed in steps, and generate answers.

Models the parts of vLLM's scheduler that determine waiting times:

- Requests are served in the order of arrival, but a request whose blocks are being loaded does not delay
  other requests.
- A step computes prompt tokens of one or more requests, up to a limit (`Timing.step_tokens`), and one token
  for each request that generates its answer.
- Only whole blocks can be hits, and the last token of a prompt is always computed. If the trace does not
  record the lengths of prompts (`Trace.prompt_tokens`), prompts are assumed to consist of whole blocks, so
  that a prompt's last block is never a hit.

The model has no speculative decoding, no priorities, and no preemption, because all blocks that a request
will need are reserved when it starts. Knows neither managers (`offload`) nor arrival times (`arrivals`).
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvoffload.errors import ConfigError
from kvoffload.simulate.config import Timing
from kvoffload.simulate.event_queue import Events
from kvoffload.simulate.offload import NoOffload
from kvoffload.simulate.pool import DevicePool, Lease
from kvoffload.simulate.report import LinkReport, TimedTierReport
from kvoffload.traces.trace import Trace

_ASKS_PER_DEADLINE = 40
"""While the engine is idle, a request that waits for a tier looks up this often per `Timing.deadline_s`."""
_ASKS_WHEN_QUIET = 2
"""Replaces `_ASKS_PER_DEADLINE` if no event has occurred for `Timing.deadline_s`, to simulate fewer lookups.

Must be at least 1, because a manager starts a request's deadline anew if more than one deadline passes
between two of its lookups.
"""
_NO_TOKENS = 1e-6
"""An answer counts as complete if less than this fraction of a token is missing.

The tolerance is needed because times are floating-point numbers, which are rounded.
"""


class Arrivals(Protocol):
    """Source of the requests that arrive at an engine."""

    def begin(self, events: Events, arrive: Callable[[int], None]) -> None: ...
    def ended(self, request: int) -> None: ...


class _Request:
    """A request in the engine.

    Attributes:
        codes: codes of the prompt's blocks (`Trace.refs`).
        tokens: number of prompt tokens.
        computed: number of leading prompt tokens whose KV cache was found, loaded or computed.
        blocks: number of GPU blocks that the request uses so far.
        offered: number of leading blocks that were already offered to RAM.
    """

    __slots__ = ("blocks", "codes", "computed", "ctx", "lease", "number", "offered", "tokens")

    def __init__(self, number: int, codes: list[int], tokens: int, ctx: Any) -> None:
        self.number, self.codes, self.tokens, self.ctx = number, codes, tokens, ctx
        self.lease: Lease | None = None
        self.computed = self.blocks = self.offered = 0


class _Step:
    """A step of the engine.

    Attributes:
        requests: requests whose prompt tokens the step computes.
        budget: number of prompt tokens that may still be added to the step.
        work_s: time to compute the step's prompt tokens, in seconds.
    """

    def __init__(self, budget: int) -> None:
        self.budget, self.work_s = budget, 0.0
        self.requests: list[_Request] = []


class _Generating:
    """Requests that generate answers. All of them generate tokens at the same rate.

    Attributes:
        tokens: number of tokens that a request would have generated if it had been generating since the start
            of the replay. An answer of `n` tokens is complete when `tokens` has grown by `n`.
        tokens_per_s: generation rate of each request, in tokens per second.
    """

    def __init__(self, tokens_per_s: float) -> None:
        self.tokens_per_s, self.tokens, self._at_s = tokens_per_s, 0.0, 0.0
        self._ends: list[tuple[float, int, _Request]] = []

    def __bool__(self) -> bool:
        return bool(self._ends)

    def add(self, request: _Request, num_tokens: int) -> None:
        """Add a request that will generate `num_tokens` more tokens."""
        heapq.heappush(self._ends, (self.tokens + num_tokens, request.number, request))

    def count_step(self, now: float) -> None:
        """Count the one token that each request has generated in the step that ends at the time `now`."""
        self.tokens, self._at_s = self.tokens + 1.0, now

    def advance(self, now: float) -> float:
        """Count the tokens that requests have generated between the last step and the time `now`.

        Returns the seconds for which the engine has generated tokens, which is 0 if there are no requests.
        """
        seconds, self._at_s = now - self._at_s, now
        if not self._ends:
            return 0.0
        self.tokens += seconds * self.tokens_per_s
        return seconds

    def take_ended(self) -> Iterator[_Request]:
        """Remove the requests whose answers are complete, and yield them."""
        # After months of simulated time, rounding errors of times are larger than `_NO_TOKENS`.
        missing = max(_NO_TOKENS, self.tokens_per_s * math.ulp(self._at_s))
        while self._ends and self._ends[0][0] <= self.tokens + missing:
            yield heapq.heappop(self._ends)[2]

    def seconds_to_next_end(self) -> float:
        """Return the time until the next answer is complete, in seconds."""
        return (self._ends[0][0] - self.tokens) / self.tokens_per_s


class Engine:
    """A single run of one engine's requests. Use once: construct, `begin`, run the events, `check_ended`.

    Attributes:
        came_s, began_s, loaded_s, first_token_s: for each request, the times when it arrived, when it
            started, when its blocks were loaded, and when its first token was generated. Times are in seconds
            since the run began.
        device_hits: number of block references found on the device.
        prefill_s, prefill_tokens, most_waiting: as in `TimedOutcome`.
        busy_s: seconds in which the device was busy.
        ended_s: time at which the last request ended.
        links, tiers: reports of links and tiers at the time `ended_s`.

    Cost: O(log n) per request and O(1) per step, plus the cost of `offload` and `pool`.
    """

    def __init__(
        self, trace: Trace, timing: Timing, events: Events, pool: DevicePool, arrivals: Arrivals
    ) -> None:
        self._trace, self._timing, self._events = trace, timing, events
        self._pool, self._arrivals = pool, arrivals
        self._offload = NoOffload()
        self._machine = timing.machine
        self._step_s = self._machine.value("step_s")
        self._offsets: list[int] = trace.offsets.tolist()
        self._prompts: list[int] = _prompt_tokens(trace).tolist()
        self._answers: list[int] = trace.output_tokens.tolist()
        # Requests with loaded blocks, requests that wait for a tier, new requests. Scheduled in this order.
        self._queues = (deque[_Request](), deque[_Request](), deque[_Request]())
        self._prefilling = deque[_Request]()
        self._num_running = 0
        self._woken = self._stepping = False
        self._happened_at = 0.0
        self._step, self._timer = _Step(0), 0
        self._generating = _Generating(self._machine.value("decode_tokens_per_s"))
        self.came_s, self.began_s, self.loaded_s, self.first_token_s = np.zeros((4, trace.requests))
        self.device_hits = self.prefill_tokens = self.most_waiting = self.num_ended = 0
        self.prefill_s = self.busy_s = self.ended_s = 0.0
        self.links, self.tiers = list[LinkReport](), list[TimedTierReport]()

    def begin(self, offload: NoOffload, progress: Callable[[int], None]) -> None:
        """Schedule the first arrivals. Calls `progress` about 200 times with the number of ended requests."""
        self._offload, self._progress = offload, progress
        self._progress_step = max(1, self._trace.requests // 200)
        self._arrivals.begin(self._events, self._arrive)

    def check_ended(self) -> None:
        """Assert that every request has ended. Call this after all events were run."""
        assert self.num_ended == self._trace.requests, f"{self.num_ended} of {self._trace.requests} ended"

    def wake(self) -> None:
        """Record that an event happened, and begin a step unless a step is in progress."""
        self._happened_at = self._events.now
        self._begin_soon()

    def _begin_soon(self) -> None:
        if not self._woken:
            self._woken = True
            self._events.at(self._events.now, self._begin_step)

    # ---- requests

    def _arrive(self, number: int) -> None:
        codes = self._trace.refs[self._offsets[number] : self._offsets[number + 1]].tolist()
        self.came_s[number] = self._events.now
        request = _Request(number, codes, self._prompts[number], self._offload.begin(number))
        self._queues[-1].append(request)
        self.most_waiting = max(self.most_waiting, sum(map(len, self._queues)))
        self.wake()

    def _admit(self, request: _Request, again: deque[_Request]) -> bool:
        """Start a request or, if some of its blocks must be loaded first, begin to load them.

        If a lookup must wait for a tier, the request is appended to `again`. Returns False if the device has
        no room for the request.
        """
        if request.lease is not None:
            self._start(request)
            return True
        # The last token is always computed, because the answer begins with its output.
        most = (request.tokens - 1) // self._trace.block_tokens
        on_device = min(most, self._pool.find(request.codes))
        loads = self._offload.lookup(request.number, request.ctx, on_device, most)
        if loads is None:
            again.append(request)
            return True
        lease = self._pool.lease(
            request.codes[:on_device],
            self._blocks_of(request.tokens, self._answers[request.number]) - on_device,
        )
        if lease is None:
            return False
        request.lease, request.blocks = lease, on_device
        self.device_hits += on_device
        self.began_s[request.number] = self._events.now
        request.computed = (on_device + loads) * self._trace.block_tokens

        def loaded() -> None:
            self.loaded_s[request.number] = self._events.now
            self._pool.know(lease, request.codes[on_device : on_device + loads])
            if loads:
                self._queues[0].append(request)
                self.wake()

        # Pin the blocks to load first, because `_grow` may change the tiers.
        self._offload.load(request.number, request.ctx, on_device, on_device + loads, loaded)
        self._grow(request, on_device + loads)
        if not loads:
            self._start(request)
        return True

    def _start(self, request: _Request) -> None:
        self._num_running += 1
        self._prefilling.append(request)
        self._compute(request)

    def _end(self, request: _Request) -> None:
        assert request.lease is not None
        self._num_running -= 1
        self._store(request)
        self._pool.release(request.lease)
        self._offload.finish(request.number, request.ctx)
        self.num_ended += 1
        if self.num_ended % self._progress_step == 0:
            self._progress(self.num_ended)
        self._arrivals.ended(request.number)
        if self.num_ended == self._trace.requests:
            # Copies and writes in flight end later, and no request waits for them.
            self.ended_s = self._events.now
            self.links, self.tiers = self._offload.links(), self._offload.tiers()

    def _store(self, request: _Request) -> None:
        """Offer a request's computed blocks to RAM, except blocks that were offered before."""
        end = min(len(request.codes), request.computed // self._trace.block_tokens)
        if self._offload.store(request.number, request.ctx, request.offered, end):
            request.offered = end

    # ---- steps

    def _begin_step(self) -> None:
        self._woken = False
        if self._stepping:
            return
        now = self._events.now
        self.busy_s += self._generating.advance(now)
        if self._end_answers():
            self.wake()  # A client with a complete answer may send a request before the step begins.
            return
        self._offload.poll()
        self._step = _Step(self._timing.step_tokens)
        for request in [*self._prefilling]:
            self._compute(request)
        self._admit_waiting()
        self._offload.scheduled()
        if self._step.requests:
            self._stepping = True
            seconds = self._step_s + self._step.work_s
            self.prefill_s += seconds
            if self._generating:
                seconds = max(seconds, 1.0 / self._generating.tokens_per_s)
            self.busy_s += seconds
            self._events.at(now + seconds, self._end_step)
        else:
            self._sleep()

    def _admit_waiting(self) -> None:
        again = deque[_Request]()
        for queue in self._queues:
            while queue and self._step.budget and self._num_running < self._timing.max_running:
                if not self._admit(queue[0], again):
                    self._queues[1].extendleft(reversed(again))
                    return
                queue.popleft()
        self._queues[1].extendleft(reversed(again))

    def _compute(self, request: _Request) -> None:
        """Add the uncomputed part of a request's prompt to the step, as far as the step's budget allows."""
        step = self._step
        num_tokens = min(step.budget, request.tokens - request.computed)
        if not num_tokens:
            return
        start, end = request.computed, request.computed + num_tokens
        step.budget -= num_tokens
        step.work_s += self._machine.prefill_s(start, end)
        self.prefill_tokens += num_tokens
        step.requests.append(request)
        self._grow(request, self._blocks_of(end))
        # The next request of the same step finds the blocks that this step computes, as in vLLM.
        block_tokens = self._trace.block_tokens
        assert request.lease is not None
        self._pool.know(request.lease, request.codes[start // block_tokens : end // block_tokens])
        request.computed = end

    def _end_step(self) -> None:
        now, self._stepping = self._events.now, False
        self._generating.count_step(now)
        for request in self._step.requests:
            self._store(request)
            if request.computed < request.tokens:
                continue
            self._prefilling.remove(request)
            self.first_token_s[request.number] = now
            answer = self._answers[request.number]
            self._grow(request, self._blocks_of(request.tokens, answer))
            self._generating.add(request, max(0, answer - 1))
        self._end_answers()
        self.wake()

    def _end_answers(self) -> bool:
        """End the requests whose answers are complete. Returns True if there was at least one."""
        num_ended = self.num_ended
        for request in self._generating.take_ended():
            self._end(request)
        return self.num_ended > num_ended

    def _sleep(self) -> None:
        """Schedule the time at which an engine that has no step to run wakes up.

        The engine wakes up when the next answer is complete, or when it is time for a waiting request to
        repeat its lookup, whichever comes first.
        """
        now = self._events.now
        until = []
        if self._generating:
            until.append(now + self._generating.seconds_to_next_end())
        if self._queues[1]:
            is_quiet = now - self._happened_at > self._timing.deadline_s
            asks = _ASKS_WHEN_QUIET if is_quiet else _ASKS_PER_DEADLINE
            until.append(now + self._timing.deadline_s / asks)
        if until:
            self._timer += 1
            self._events.at(min(until), lambda timer=self._timer: self._wake_of(timer))  # type: ignore[misc]

    def _wake_of(self, timer: int) -> None:
        if timer == self._timer:
            self._begin_soon()

    # ---- room

    def _grow(self, request: _Request, num_blocks: int) -> None:
        """Give a request blocks from its reservation until it uses `num_blocks` GPU blocks."""
        assert request.lease is not None
        if num_blocks > request.blocks:
            self._offload.dropped(self._pool.take(request.lease, num_blocks - request.blocks))
            request.blocks = num_blocks

    def _blocks_of(self, prompt_tokens: int, answer_tokens: int = 0) -> int:
        return -(-(prompt_tokens + answer_tokens) // self._trace.block_tokens)


def _prompt_tokens(trace: Trace) -> npt.NDArray[np.int64]:
    """Return the length of each prompt in tokens, at least 1.

    If the trace does not record the lengths, a prompt is assumed to fill its blocks.
    """
    tokens = trace.prompt_tokens
    if tokens is None:
        tokens = np.diff(trace.offsets) * trace.block_tokens
    return np.maximum(1, tokens)


def check_room(trace: Trace, device_blocks: int) -> None:
    """Raise `ConfigError` if the longest request, with its answer, does not fit on the device."""
    # Floating-point numbers, because the sum of two absurd lengths overflows int64.
    tokens = _prompt_tokens(trace) + trace.output_tokens.astype(np.float64)
    needed = int(np.ceil(tokens / trace.block_tokens).max(initial=1))
    if device_blocks < needed:
        raise ConfigError(
            "device-blocks",
            device_blocks,
            f"the longest request and its answer need {needed:,} blocks; allowed: {needed} or more",
        )
