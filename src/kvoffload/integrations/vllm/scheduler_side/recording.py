"""Collects facts about vLLM's requests for a `Recorder`: the sources of a prompt's tokens, and the end of the
request.

Only this module reads the fields of vLLM's requests for a recording. No error reaches the engine: if a
request cannot be recorded, it is only counted.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvoffload.calls.recorder import CallRecorder
from kvoffload.core.hints import Hints
from kvoffload.integrations.vllm.scheduler_side.hints import (
    arrival_hints,
    envelope_hints,
    finish_hints,
    user_hints,
)
from kvoffload.integrations.vllm.scheduler_side.record import FinishedRequest, Recorder
from kvoffload.integrations.vllm.shared.logs import logger
from kvoffload.integrations.vllm.shared.options import VLLMOptions

GPU = "gpu"


class Recording:
    """The unfinished requests of an engine, and where the tokens of their prompts came from.

    Args:
        recorder: receives the finished requests.
        count_lost: called for each request that could not be recorded.

    Thread: the scheduler's. Cost: a few microseconds per request, and a few bytes for each of its blocks.
    """

    def __init__(self, recorder: Recorder, block_tokens: int, count_lost: Callable[[], None]) -> None:
        self.recorder = recorder
        self._block_tokens, self._count_lost = block_tokens, count_lost
        self._on_gpu: dict[str, int] = {}
        self._served: dict[str, dict[str, int]] = {}

    def looked_up(self, request: Any, gpu_tokens: int) -> None:
        """Record, at each lookup of a request, how many tokens of the prompt are in the GPU's own cache."""
        self._on_gpu[request.request_id] = gpu_tokens

    def begins(self, request: Any, sources: Callable[[], dict[Any, int]]) -> None:
        """Record, when a request begins, where the tokens of its prompt came from.

        Only the first call for a request counts. A later call means that the request was preempted and begins
        again; then it loads blocks that it has computed itself.

        Args:
            sources: function that returns a mapping: vLLM's ``CacheHitSource`` -> number of prompt tokens
                from this source, without the tokens in the GPU's cache.
        """
        name = request.request_id
        if name in self._served:
            return
        try:
            served = {GPU: self._on_gpu.get(name, 0)}
            served |= {str(source.value): tokens for source, tokens in sources().items()}
        except Exception:
            logger.debug("kvoffload: the sources of a request are unknown", exc_info=True)
            served = {}
        self._served[name] = {source: tokens for source, tokens in served.items() if tokens}

    def finished(self, request: Any) -> None:
        """Pass a finished or aborted request to the recorder."""
        self._on_gpu.pop(request.request_id, None)
        served = self._served.pop(request.request_id, {})
        try:
            if self.recorder.add(self._summary(request, served)):
                return
        except Exception:
            logger.debug("kvoffload: a request could not be recorded", exc_info=True)
        self._count_lost()

    def _summary(self, request: Any, served: dict[str, int]) -> FinishedRequest:
        tokens = int(request.num_prompt_tokens)
        blocks = tokens // self._block_tokens
        hashes = request.block_hashes[:blocks]
        if len(hashes) < blocks or None in hashes:
            raise ValueError(f"{len(hashes)} hashes for {blocks} blocks")
        return FinishedRequest(
            arrival_s=float(request.arrival_time),
            finished_s=time.time(),
            input_tokens=tokens,
            output_tokens=int(request.num_output_tokens),
            hashes=hashes,
            hints=_hints(request),
            served_tokens=served,
        )


def _hints(request: Any) -> Hints:
    """Return all hints of a request, for the recording.

    The finish reason does not contain the stop string, because a stop string is a user's text.
    """
    with suppress(ValueError):  # wrong hints are ignored; the manager has logged them
        given = user_hints(request.kv_transfer_params)
        enveloped, _ = envelope_hints(getattr(request, "kv_hints", None))
        hints = arrival_hints(request).updated(given).updated(enveloped).updated(finish_hints(request))
        if not isinstance(request.stop_reason, str):
            return hints
        return replace(hints, finish_reason=str(request.get_finished_reason()))
    return arrival_hints(request)


def recording(options: VLLMOptions, block_tokens: int, count_lost: Callable[[], None]) -> Recording | None:
    """Start to record requests.

    Returns None if the option ``record`` is not set or the file cannot be created.
    """
    if options.record is None:
        return None
    try:
        recorder = Recorder(Path(options.record.path), options.record_max_bytes, block_tokens)
    except OSError as error:
        logger.error(
            "kvoffload: requests are NOT recorded: %s: %s", options.record.path, error.strerror or error
        )
        return None
    logger.info("kvoffload: requests are recorded to %s, as salted hashes", recorder.path)
    return Recording(recorder, block_tokens, count_lost)


def call_recorder(options: VLLMOptions) -> CallRecorder | None:
    """Start to record the manager's calls.

    Returns None if the option for it is not set or the file cannot be created.
    """
    if options.record is None or not options.record.calls:
        return None
    path = Path(options.record.path).with_suffix(".calls")
    try:
        recorder = CallRecorder(path, options.record_max_bytes)
    except OSError as error:
        logger.error("kvoffload: calls are NOT recorded: %s: %s", path, error.strerror or error)
        return None
    logger.info(
        "kvoffload: calls of the manager are recorded to %s, with unsalted hashes of blocks: a reader who "
        "guesses a prompt can check the guess", recorder.path
    )  # fmt: skip
    return recorder
