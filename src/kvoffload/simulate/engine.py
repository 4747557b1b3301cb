"""A serving engine over time: requests wait, get room in the device, load, are computed in steps, generate.

What vLLM's scheduler does, as far as it decides how long requests wait: first come, first served; a step
computes up to so many tokens of prompts, of several requests if they fit, and a token of each request that
generates; a request whose blocks are being loaded waits aside and lets others pass; the last block of a
prompt is always computed. Not modelled: preemption (room is kept), speculation, priorities.

Knows nothing of managers (`offload`) nor of how requests come (`arrivals`).
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from kvoffload.errors import ConfigError
from kvoffload.simulate.config import Timing
from kvoffload.simulate.events import Events
from kvoffload.simulate.offload import NoOffload
from kvoffload.simulate.pool import DevicePool, Lease
from kvoffload.simulate.report import LinkReport, TimedTierReport
from kvoffload.traces.trace import Trace

_ASKS_PER_DEADLINE = 40
"""How often a request that waits for a tier asks again while the engine has no other step to make."""
_ASKS_WHEN_QUIET = 2
"""The same once nothing has happened for a whole deadline: all that give up by themselves have done so. A
pause longer than the deadline would begin a new wait."""
_NO_TOKENS = 1e-6
"""Tokens that a request need not have generated to have ended: time is a floating-point number."""


class Arrivals(Protocol):
    """How requests come."""

    def begin(self, events: Events, arrive: Callable[[int], None]) -> None: ...
    def ended(self, request: int) -> None: ...


class _Request:
    """One request, from when it comes until it ends. `computed` counts tokens, `offered` blocks."""

    __slots__ = ("blocks", "codes", "computed", "ctx", "lease", "number", "offered", "tokens")

    def __init__(self, number: int, codes: list[int], block_tokens: int, ctx: Any) -> None:
        self.number, self.codes, self.ctx = number, codes, ctx
        self.tokens = max(1, len(codes) * block_tokens)
        self.lease: Lease | None = None
        self.computed = self.blocks = self.offered = 0


class Engine:
    """Runs a trace once.

    Args:
        arrivals: how requests come.

    Attributes:
        came_s, began_s, loaded_s, first_token_s: of each request; seconds since the run began.
        device_hits, prefill_s, prefill_tokens, busy_s, most_waiting: as in `TimedOutcome`.
        ended_s: when the last request ended; links, tiers: what they had done by then.

    Cost: O(log n) a request and O(1) a step, besides what `offload` and the pool do with its blocks.
    """

    def __init__(
        self, trace: Trace, timing: Timing, events: Events, pool: DevicePool, arrivals: Arrivals
    ) -> None:
        self._trace, self._timing, self._events = trace, timing, events
        self._pool, self._arrivals = pool, arrivals
        self._offload = NoOffload()
        machine = timing.machine
        self._linear, self._squared = (
            machine.value("prefill_s_per_token"),
            machine.value("prefill_s_per_token_squared"),
        )
        self._step_s, self._tokens_per_s = machine.value("step_s"), machine.value("decode_tokens_per_s")
        self._offsets: list[int] = trace.offsets.tolist()
        self._answers: list[int] = trace.output_tokens.tolist()
        # In the order in which they are looked at: loaded, asked before, new.
        self._queues = (deque[_Request](), deque[_Request](), deque[_Request]())
        self._prefilling = deque[_Request]()
        self._num_running = 0
        self._woken = self._stepping = False
        self._happened_at = 0.0
        # What a step computes: requests, tokens left of its budget, and how long it takes.
        self._step: list[_Request] = []
        self._budget, self._work_s = 0, 0.0
        # Those that generate, by how many tokens each will have generated since the run began when it ends.
        self._generating: list[tuple[float, int, _Request]] = []
        self._generated, self._generated_at, self._timer = 0.0, 0.0, 0
        self.came_s, self.began_s, self.loaded_s, self.first_token_s = np.zeros((4, trace.requests))
        self.device_hits = self.prefill_tokens = self.most_waiting = self.num_ended = 0
        self.prefill_s = self.busy_s = self.ended_s = 0.0
        self.links, self.tiers = list[LinkReport](), list[TimedTierReport]()

    def run(self, offload: NoOffload, progress: Callable[[int], None]) -> None:
        """Serve every request. `progress` is told how many have ended, about 200 times."""
        self._offload, self._progress = offload, progress
        self._progress_step = max(1, self._trace.requests // 200)
        self._arrivals.begin(self._events, self._arrive)
        self._events.run()
        assert self.num_ended == self._trace.requests, f"{self.num_ended} of {self._trace.requests} ended"

    def wake(self) -> None:
        """Something has changed: if no step is under way, begin one."""
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
        request = _Request(number, codes, self._trace.block_tokens, self._offload.begin(number))
        self._queues[-1].append(request)
        self.most_waiting = max(self.most_waiting, sum(map(len, self._queues)))
        self.wake()

    def _admit(self, request: _Request, again: deque[_Request]) -> bool:
        """Begin a request, or have it load or ask again; False if there is no room for it."""
        if request.lease is not None:
            self._start(request)
            return True
        # The last block is computed in any case: the first token needs it.
        most = max(0, len(request.codes) - 1)
        on_device = min(most, self._pool.find(request.codes))
        loads = self._offload.lookup(request.number, request.ctx, on_device, most)
        if loads is None:
            again.append(request)
            return True
        lease = self._pool.lease(
            request.codes[:on_device], self._blocks_of(request.tokens) - on_device + self._answer(request)
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

        # What is loaded is pinned first: to make room for it may change what is behind the device.
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
            # What is still being copied or written ends later, and nobody waits for it.
            self.ended_s = self._events.now
            self.links, self.tiers = self._offload.links(), self._offload.tiers()

    def _store(self, request: _Request) -> None:
        """Offer what is computed and was not yet offered."""
        end = min(len(request.codes), request.computed // self._trace.block_tokens)
        if self._offload.store(request.number, request.ctx, request.offered, end):
            request.offered = end

    # ---- steps

    def _begin_step(self) -> None:
        self._woken = False
        if self._stepping:
            return
        now = self._events.now
        if self._generated_meanwhile():
            self.wake()  # clients that got their answers may send more before the step begins
            return
        self._offload.poll()
        self._step, self._budget, self._work_s = [], self._timing.step_tokens, 0.0
        for request in [*self._prefilling]:
            self._compute(request)
        self._admit_waiting()
        self._offload.scheduled()
        if self._step:
            self._stepping = True
            seconds = self._step_s + self._work_s
            self.prefill_s += seconds
            if self._generating:
                seconds = max(seconds, 1.0 / self._tokens_per_s)
            self.busy_s += seconds
            self._events.at(now + seconds, self._end_step)
        else:
            self._sleep()

    def _admit_waiting(self) -> None:
        again = deque[_Request]()
        for queue in self._queues:
            while queue and self._budget and self._num_running < self._timing.max_running:
                if not self._admit(queue[0], again):
                    self._queues[1].extendleft(reversed(again))
                    return
                queue.popleft()
        self._queues[1].extendleft(reversed(again))

    def _compute(self, request: _Request) -> None:
        """Have the step compute as much of a prompt as it has tokens left."""
        num_tokens = min(self._budget, request.tokens - request.computed)
        if not num_tokens:
            return
        start, end = request.computed, request.computed + num_tokens
        self._budget -= num_tokens
        self._work_s += self._linear * num_tokens + self._squared * (end * end - start * start)
        self.prefill_tokens += num_tokens
        self._step.append(request)
        self._grow(request, self._blocks_of(end))
        # What one step computes can be found by the next request of the same step, as in vLLM.
        block_tokens = self._trace.block_tokens
        assert request.lease is not None
        self._pool.know(request.lease, request.codes[start // block_tokens : end // block_tokens])
        request.computed = end

    def _end_step(self) -> None:
        now, self._stepping = self._events.now, False
        self._generated += 1.0
        self._generated_at = now
        for request in self._step:
            self._store(request)
            if request.computed < request.tokens:
                continue
            self._prefilling.remove(request)
            self.first_token_s[request.number] = now
            self._grow(request, request.blocks + self._answer(request))
            more = max(0, self._answers[request.number] - 1)
            heapq.heappush(self._generating, (self._generated + more, request.number, request))
        self._end_answers()
        self.wake()

    def _generated_meanwhile(self) -> bool:
        """Since the last step those that generate went on; whether answers have ended."""
        seconds = self._events.now - self._generated_at
        self._generated_at = self._events.now
        if self._generating:
            self.busy_s += seconds
            self._generated += seconds * self._tokens_per_s
        return self._end_answers()

    def _end_answers(self) -> bool:
        num_ended = self.num_ended
        while self._generating and self._generating[0][0] <= self._generated + _NO_TOKENS:
            self._end(heapq.heappop(self._generating)[2])
        return self.num_ended > num_ended

    def _sleep(self) -> None:
        """Nothing to compute: until the next answer ends, or until it is time to ask again."""
        now = self._events.now
        until = []
        if self._generating:
            until.append(now + (self._generating[0][0] - self._generated) / self._tokens_per_s)
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
        """Give it more of the blocks that it has reserved, up to so many in all."""
        assert request.lease is not None
        if num_blocks > request.blocks:
            self._offload.dropped(self._pool.take(request.lease, num_blocks - request.blocks))
            request.blocks = num_blocks

    def _blocks_of(self, tokens: int) -> int:
        return -(-tokens // self._trace.block_tokens)

    def _answer(self, request: _Request) -> int:
        """Blocks that its answer takes."""
        return self._blocks_of(self._answers[request.number])


def check_room(trace: Trace, device_blocks: int) -> None:
    """Raise a `ConfigError` if a request does not fit the device, alone."""
    prompts = np.maximum(1, np.diff(trace.offsets))
    needed = int((prompts + -(-trace.output_tokens // trace.block_tokens)).max(initial=1))
    if device_blocks < needed:
        raise ConfigError(
            "device-blocks",
            device_blocks,
            f"the longest request takes {needed:,} blocks of the device, with its answer; allowed: so many "
            "or more",
        )
