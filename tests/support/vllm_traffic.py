"""Drives requests that share prefixes through an engine step by step, with aborts, resets and preemption."""

from __future__ import annotations

import random
import time
from copy import copy
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvoffload.testing.audit import audit

PATIENCE_S = 900.0
"""Time limit of every wait: long enough for a slow machine."""

CERTAIN_MARGIN = 0.01
ANSWER_TOKENS = 16
TOKENS_THAT_PREEMPT = 32
"""Tokens of an answer: one block. The small engine then preempts about a dozen of 60 requests; with 8 tokens
preemption depends on timing."""


def note_position(ctx: Any, key: bytes, position: int) -> None:
    """Record a position, like vLLM's connector since 0.31."""
    if hasattr(ctx, "set_offload_key_position"):
        ctx.set_offload_key_position(key, position)


def touch_path(manager: Any, ctx: Any, keys: list[bytes]) -> None:
    """Touch all keys of a request, like vLLM's connector before 0.31 after each lookup and store."""
    if not hasattr(ctx, "set_offload_key_position"):
        manager.touch(keys, ctx)


def random_prompts(seed: int, count: int, length: int) -> list[list[int]]:
    """Prompts without a common prefix."""
    rng = random.Random(seed)
    return [[rng.randrange(2, 1024) for _ in range(length)] for _ in range(count)]


def conversations(seed: int, documents: int, turns: int) -> list[list[int]]:
    """Prompts that grow turn by turn from a few documents, as agents and chats do."""
    rng = random.Random(seed)
    prompts = []
    for document in random_prompts(seed, documents, 150):
        prompt = document
        for _ in range(turns):
            prompt = prompt + [rng.randrange(2, 1024) for _ in range(rng.randrange(20, 70))]
            prompts.append(prompt)
    return prompts


def certain_answers(
    engine: Any,
    prompts: list[list[int]],
    tokens: int,
    *,
    margin: float = CERTAIN_MARGIN,
    shortest: int = 2,
    least: float = 0.5,
) -> tuple[list[list[int]], list[list[int]]]:
    """Return prompts, and the certain tokens of the engine's answer to each prompt served alone.

    With random weights two tokens may be equally probable to the last digit. The winner then depends on the
    splits of the prompt and on the other requests in its batch, with offloading and without. Answers end
    before the first such token. Prompts with less than `shortest` certain tokens are excluded; at least the
    share `least` of the prompts must remain.

    A token is certain if it leads by `margin` in log-probability. The engine computes in float32:
    another split, batch or processor changes logits of about 10 by 1e-5 (a rounding step is 1e-6, summed up
    over four layers), a thousandth of the margin. In bf16 a rounding step is 0.06, and no margin would leave
    enough tokens.
    """
    certain = []
    for prompt in prompts:
        assert engine.core.reset_prefix_cache()
        (output,) = engine.generate([prompt], tokens, logprobs=2)
        answer = []
        for token, alternatives in zip(output.token_ids, output.logprobs, strict=True):
            first, second, *_ = sorted(
                (token_logprob.logprob for token_logprob in alternatives.values()), reverse=True
            )
            if first - second < margin:
                break
            answer.append(token)
        if len(answer) >= shortest:
            certain.append((prompt, answer))
    assert len(certain) >= least * len(prompts), f"{len(certain)} of {len(prompts)} answers are certain"
    return [prompt for prompt, _ in certain], [answer for _, answer in certain]


class Expected:
    """Certain answers of an engine without offloading, one prompt after the other.

    Attributes:
        prompts: nine whole blocks each, without a common block; answers: all tokens of their answers.
        chats: prompts that grow turn by turn; chat_answers: the certain tokens of their answers.
    """

    def __init__(self, engine: Any) -> None:
        candidates, answers = certain_answers(engine, random_prompts(1, 20, 300), ANSWER_TOKENS)
        whole = [row for row, answer in enumerate(answers) if len(answer) == ANSWER_TOKENS]
        assert len(whole) >= 9, f"{len(whole)} answers are certain to the end"
        self.prompts, self.answers = [candidates[row] for row in whole], [answers[row] for row in whole]
        self.chats, self.chat_answers = certain_answers(engine, conversations(2, documents=8, turns=4), 8)

    def check(self, engine: Any, count: int) -> None:
        """Check the answers to the first `count` prompts, one after the other."""
        answers = [engine.tokens([prompt])[0] for prompt in self.prompts[:count]]
        assert answers == self.answers[:count]


def reset_engine(engine: Any, *, connector: bool = True) -> bool:
    """Preempt all requests, and reset the engine's cache and ours; returns False if a load prevents it."""
    try:
        return bool(engine.core.reset_prefix_cache(reset_running_requests=True, reset_connector=connector))
    except RuntimeError as error:
        if "not supported yet" not in str(error):
            raise
        return False


def answer_across_a_reset(engine: Any, prompt: list[int], tokens: int) -> list[int]:
    """Return the answer to a prompt whose blocks are in RAM; the device's cache is reset after one token.

    vLLM preempts the request and schedules it again in the same step, with a load of its blocks.
    """
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    engine.drain()
    engine.llm.llm_engine.add_request("reset", {"prompt_token_ids": prompt}, sampling)
    answer: list[int] = []
    has_been_reset = False
    while engine.llm.llm_engine.has_unfinished_requests():
        for output in engine.llm.llm_engine.step():
            answer = list(output.outputs[0].token_ids)
        if answer and not has_been_reset:
            has_been_reset = engine.core.reset_prefix_cache(reset_running_requests=True)
            assert has_been_reset
    engine.drain()
    return answer


def streamed(engine: Any, inputs: list[list[int]], tokens: int) -> list[int]:
    """Serve a request with streaming input; returns its tokens: all inputs, and the kept tokens of answers.

    Each input follows the answer to the previous input. vLLM keeps all tokens of an answer except the last.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    llm, requests = engine.llm.llm_engine, engine.core.scheduler.requests
    sampling = SamplingParams(
        temperature=0.0,
        max_tokens=tokens,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.CUMULATIVE,
    )

    def send(prompt: list[int], *, is_last: bool = False) -> None:
        request = llm.input_processor.process_inputs(
            "streamed",
            {"prompt_token_ids": prompt},
            sampling,
            supported_tasks=llm.get_supported_tasks(),
            resumable=not is_last,
        )
        request.external_req_id = "streamed"
        llm.output_processor.add_request(request, None, None, 0)
        # In a server the engine gets a copy. Both sides append to their list.
        request = copy(request)
        request.prompt_token_ids = [*request.prompt_token_ids]
        llm.engine_core.add_request(request)

    deadline = time.monotonic() + PATIENCE_S
    for prompt in inputs:
        send([*prompt])
        while True:
            assert time.monotonic() < deadline, "no answer"
            llm.step()
            if requests["streamed"].status.name == "WAITING_FOR_STREAMING_REQ":
                break
    served = [*requests["streamed"]._all_token_ids]
    send([0], is_last=True)
    engine.drain()
    return served


@dataclass
class Outcome:
    """Results of `drive`.

    Attributes:
        wrong: requests with unexpected tokens, as ``(number of the prompt, tokens)``.
    """

    finished: int = 0
    aborted: int = 0
    resets: int = 0
    preempted: int = 0
    wrong: list[tuple[int, list[int]]] = field(default_factory=list)


def drive(
    engine: Any,
    prompts: list[list[int]],
    expected: list[list[int]],
    seed: int,
    requests: int,
    *,
    tokens: int = 8,
    at_once: int = 6,
    aborts: float = 0.0,
    resets: float = 0.0,
) -> Outcome:
    """Serve random prompts, `at_once` at a time, and compare each answer as far as it is known.

    Args:
        tokens: of each answer.
        aborts: share of the requests to abort, at a random time. None if this vLLM crashes on aborts.
        resets: probability of a reset at each step: the engine's cache, our cache, or both. None if this
            vLLM crashes on resets.
    """
    from vllm import SamplingParams

    from support.vllm_needs import MAY_ABORT, MAY_RESET

    rng, outcome, llm = random.Random(seed), Outcome(), engine.llm.llm_engine
    scheduler, running, sent = engine.core.scheduler, {}, 0
    deadline = time.monotonic() + PATIENCE_S
    preempt = scheduler._preempt_request

    def counted(*args: Any, **kwargs: Any) -> Any:
        outcome.preempted += 1
        return preempt(*args, **kwargs)

    scheduler._preempt_request = counted
    while sent < requests or running:
        assert time.monotonic() < deadline, f"seed {seed}: no end in sight: {running}"
        while sent < requests and len(running) < at_once:
            number, name = rng.randrange(len(prompts)), f"{seed}-{sent}"
            sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
            llm.add_request(name, {"prompt_token_ids": prompts[number]}, sampling)
            running[name] = number
            sent += 1
            if rng.random() < 0.5:
                break
        for output in llm.step():
            if output.finished and output.request_id in running:
                number, answer = running.pop(output.request_id), list(output.outputs[0].token_ids)
                outcome.finished += 1
                if answer[: len(expected[number])] != expected[number]:
                    outcome.wrong.append((number, answer))
        if running and rng.random() < aborts / 20 and MAY_ABORT:
            victim = rng.choice(sorted(running))
            llm.abort_request([victim])
            del running[victim]
            outcome.aborted += 1
        if rng.random() < resets and MAY_RESET:
            outcome.resets += 1
            kind = rng.choice(["device", "ram", "both"])
            if kind == "device":
                reset_engine(engine, connector=False)
            elif kind == "ram" or not reset_engine(engine):
                assert scheduler.reset_connector_cache()
    scheduler._preempt_request = preempt
    engine.drain()
    return outcome


def check_nothing_is_left(engine: Any) -> None:
    """Check, after all requests, that every slot is free or readable, and no pin or request remains."""
    manager = engine.manager
    audit(manager.core)
    stats = manager.core.stats()
    assert (stats.writing, stats.condemned, stats.ready - stats.evictable) == (0, 0, 0), stats
    assert not manager.broken
    assert (len(manager._loads), len(manager._stores)) == (0, 0)
    assert not manager._requests
    assert not engine.worker._jobs


class Recorder:
    """Compares the bytes of blocks at their store and after their load.

    Wraps our worker's copies; blocks are identified by the manager's key of their slot.
    """

    def __init__(self, engine: Any) -> None:
        self.stored: dict[int, bytes] = {}
        self.compared = self.different = 0
        self._engine, self._copies = engine, engine.worker.copies
        engine.worker.copies = self

    def remove(self) -> None:
        self._engine.worker.copies = self._copies

    def store(self, job: int, blocks: Any, slots: Any) -> None:
        self._copies.store(job, blocks, slots)
        self._copies.wait({job})
        self.stored |= self._digests(blocks, slots)

    def load(self, job: int, blocks: Any, slots: Any) -> None:
        self._copies.load(job, blocks, slots)
        self._copies.wait({job})
        for place, digest in self._digests(blocks, slots).items():
            if place in self.stored:
                self.compared += 1
                self.different += digest != self.stored[place]

    def _digests(self, blocks: Any, slots: Any) -> dict[Any, bytes]:
        layout, tensors, digests = self._copies.layout, self._copies.tensors, {}
        for move in layout.moves(blocks, slots.block_ids):
            for block, slot in zip(move.blocks.tolist(), move.slots.tolist(), strict=True):
                parts = [
                    tensors[r.tensor][block, : r.num_bytes].tobytes() for r in layout.regions[move.group]
                ]
                digests[(self._engine.manager.core.index.key_at(slot), move.inner)] = b"".join(parts)
        return digests

    def __getattr__(self, name: str) -> Any:
        return getattr(self._copies, name)


def damage(engine: Any, how: str) -> None:
    """Overwrite every slot of the pool with numbers, because a NaN would persist in the engine.

    The engine's kernels multiply the old contents of a block beyond the end of a sequence by zero.
    """
    slots = engine.manager.pool.slots
    if how == "zeros":
        slots[:] = 0
    elif how == "noise":
        noise = np.random.default_rng(3).standard_normal((len(slots), slots.shape[1] // 4), np.float32)
        slots[:] = noise.view(np.uint8)
    else:
        slots[:] = np.roll(slots, 1, axis=0)
