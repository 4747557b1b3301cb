"""Follows requests through vLLM's connector, for a `Recorder`: who served what of a prompt, and its end.

Owns what is asked of vLLM's requests. Lets no error reach the engine: a request that cannot be recorded is
counted.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvoffload.core.hints import Hints
from kvoffload.integrations.vllm.scheduler_side.hints import known_at_arrival, known_at_end, told_by_user
from kvoffload.integrations.vllm.scheduler_side.record import Ended, Recorder
from kvoffload.integrations.vllm.shared.logs import logger
from kvoffload.integrations.vllm.shared.options import VLLMOptions

GPU = "gpu"


class Recording:
    """The requests of one engine.

    Args:
        recorder: gets them when they have ended.
        count_lost: called for each request that is not recorded.

    Attributes:
        recorder: the same.

    Thread: the scheduler's. Cost: a few microseconds a request, and a reference for each block.
    """

    def __init__(self, recorder: Recorder, block_tokens: int, count_lost: Callable[[], None]) -> None:
        self.recorder = recorder
        self._block_tokens, self._count_lost = block_tokens, count_lost
        self._on_gpu: dict[str, int] = {}
        self._served: dict[str, dict[str, int]] = {}

    def asked(self, request: Any, gpu_tokens: int) -> None:
        """The engine asks what lies beyond what its GPU has of a request."""
        self._on_gpu[request.request_id] = gpu_tokens

    def begins(self, request: Any, sources: Callable[[], dict[Any, int]]) -> None:
        """A request gets its blocks. Only the first time counts: after a preemption its own blocks serve it.

        Args:
            sources: who has how many of the tokens beyond the GPU's, in vLLM's words.
        """
        name = request.request_id
        if name in self._served:
            return
        try:
            served = {GPU: self._on_gpu.get(name, 0)}
            served |= {str(source.value): tokens for source, tokens in sources().items()}
        except Exception:
            logger.debug("kvoffload: sources of a request are not known", exc_info=True)
            served = {}
        self._served[name] = {source: tokens for source, tokens in served.items() if tokens}

    def ended(self, request: Any) -> None:
        """A request has ended, however it did."""
        self._on_gpu.pop(request.request_id, None)
        served = self._served.pop(request.request_id, {})
        try:
            if self.recorder.add(self._as_ended(request, served)):
                return
        except Exception:
            logger.debug("kvoffload: a request could not be recorded", exc_info=True)
        self._count_lost()

    def _as_ended(self, request: Any, served: dict[str, int]) -> Ended:
        tokens = int(request.num_prompt_tokens)
        blocks = tokens // self._block_tokens
        hashes = request.block_hashes[:blocks]
        if len(hashes) < blocks or None in hashes:
            raise ValueError(f"{len(hashes)} hashes for {blocks} blocks")
        return Ended(
            arrival_s=float(request.arrival_time),
            ended_s=time.time(),
            input_tokens=tokens,
            output_tokens=int(request.num_output_tokens),
            hashes=hashes,
            hints=_hints(request),
            served_tokens=served,
        )


def _hints(request: Any) -> Hints:
    """What was known of it. A string at which it stopped is a user's text, and is left out."""
    with suppress(ValueError):  # What a user says wrongly is nothing; the engine has told them.
        told = told_by_user(request.kv_transfer_params)
        said = known_at_arrival(request).updated(told).updated(known_at_end(request))
        if not isinstance(request.stop_reason, str):
            return said
        return replace(said, finish_reason=str(request.get_finished_reason()))
    return known_at_arrival(request)


def recording(options: VLLMOptions, block_tokens: int, count_lost: Callable[[], None]) -> Recording | None:
    """What `options` want; None if nothing, or if no file can be made: the engine goes on without."""
    if options.record is None:
        return None
    try:
        recorder = Recorder(Path(options.record), options.record_max_bytes, block_tokens)
    except OSError as error:
        logger.error("kvoffload: requests are NOT recorded: %s: %s", options.record, error.strerror or error)
        return None
    logger.info("kvoffload: requests are recorded to %s, as salted hashes", recorder.path)
    return Recording(recorder, block_tokens, count_lost)
