"""Our loggers inside vLLM."""

from __future__ import annotations

import logging

from kvoffload.tiers.rate_limited_log import RateLimitedLog

logger = logging.getLogger("vllm.kvoffload")


def rate_limited_log() -> RateLimitedLog:
    """Our logger with a rate limit, for failures that may repeat at every step."""
    return RateLimitedLog(logger.name)


class _ToVLLM(logging.Handler):
    """Hands on what the library says: with time, process and level, and with our name in the line."""

    def emit(self, record: logging.LogRecord) -> None:
        said = logging.makeLogRecord(vars(record))
        said.name, said.msg = logger.name, f"kvoffload: {record.msg}"
        if logger.isEnabledFor(said.levelno):
            logger.handle(said)


def join_vllm() -> None:
    """From now on the library's lines are vLLM's, unless the user has said where they go. Idempotent."""
    library = logging.getLogger("kvoffload")
    if not library.handlers:
        library.addHandler(_ToVLLM())
