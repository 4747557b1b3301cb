"""Loggers of kvoffload inside vLLM."""

from __future__ import annotations

import logging

from kvoffload.integrations.logs import join
from kvoffload.tiers.rate_limited_log import RateLimitedLog

logger = logging.getLogger("vllm.kvoffload")


def rate_limited_log() -> RateLimitedLog:
    """Return our logger with a rate limit, for failures that may repeat in every step."""
    return RateLimitedLog(logger.name)


def join_vllm() -> None:
    """Forward the library's log to vLLM's, unless the user has configured a handler. Idempotent."""
    join(logger)
