"""Our loggers inside vLLM."""

from __future__ import annotations

import logging

from kvoffload.tiers.rate_limited_log import RateLimitedLog

logger = logging.getLogger("vllm.kvoffload")


def rate_limited_log() -> RateLimitedLog:
    """The same logger, for failures that may repeat at every step: a rate limit of its own each."""
    return RateLimitedLog(logger.name)
