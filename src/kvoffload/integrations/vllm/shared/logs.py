"""Loggers of kvoffload inside vLLM."""

from __future__ import annotations

import logging

from kvoffload.tiers.rate_limited_log import RateLimitedLog

logger = logging.getLogger("vllm.kvoffload")


def rate_limited_log() -> RateLimitedLog:
    """Return our logger with a rate limit, for failures that may repeat in every step."""
    return RateLimitedLog(logger.name)


class _ToVLLM(logging.Handler):
    """Forwards the library's log records to vLLM's logger, with the prefix ``kvoffload:``."""

    def emit(self, record: logging.LogRecord) -> None:
        forwarded = logging.makeLogRecord(vars(record))
        forwarded.name, forwarded.msg = logger.name, f"kvoffload: {record.msg}"
        if logger.isEnabledFor(forwarded.levelno):
            logger.handle(forwarded)


def join_vllm() -> None:
    """Forward the library's log to vLLM's, unless the user has configured a handler. Idempotent."""
    library = logging.getLogger("kvoffload")
    if not library.handlers:
        library.addHandler(_ToVLLM())
