"""Our loggers inside vLLM."""

from __future__ import annotations

import logging

from kvoffload.tiers.rate_limited_log import RateLimitedLog

logger = logging.getLogger("vllm.kvoffload")


def rate_limited_log() -> RateLimitedLog:
    """Our logger with a rate limit, for failures that may repeat at every step."""
    return RateLimitedLog(logger.name)
