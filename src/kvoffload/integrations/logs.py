"""Messages in an engine's log: the library's log records, and errors about refused options."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

from kvoffload.errors import ConfigError


class _ToEngine(logging.Handler):
    """Forwards the library's log records to an engine's logger, with the prefix ``kvoffload:``."""

    def __init__(self, logger: logging.Logger) -> None:
        super().__init__()
        self._logger = logger

    def emit(self, record: logging.LogRecord) -> None:
        forwarded = logging.makeLogRecord(vars(record))
        forwarded.name, forwarded.msg = self._logger.name, f"kvoffload: {record.msg}"
        if self._logger.isEnabledFor(forwarded.levelno):
            self._logger.handle(forwarded)


def join(logger: logging.Logger) -> None:
    """Forward kvoffload's log records to an engine's logger, unless the user has set a handler. Idempotent.

    If the records of the engine's logger also reach the root logger, kvoffload's own records no longer do, so
    that no line is logged twice.
    """
    library = logging.getLogger("kvoffload")
    if not library.handlers:
        library.addHandler(_ToEngine(logger))
        library.propagate = not _reaches_root(logger)


@contextlib.contextmanager
def refusals_logged(logger: logging.Logger, outcome: str) -> Iterator[None]:
    """Log each problem of a `ConfigError` that leaves the context, because the engine may not show its
    message.

    Args:
        outcome: beginning of each line, such as ``not started``.
    """
    try:
        yield
    except ConfigError as error:
        for line in str(error).splitlines():
            logger.error("kvoffload: %s: %s", outcome, line.strip())
        raise


def _reaches_root(logger: logging.Logger) -> bool:
    while logger.parent is not None:
        if not logger.propagate:
            return False
        logger = logger.parent
    return True
