"""Forwarding of the library's log to an engine's logger."""

from __future__ import annotations

import logging


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
    """Forward the library's log to an engine's logger, unless the user has set a handler. Idempotent.

    If the engine's records reach the root logger, the library's own records do not propagate. Otherwise each
    line would be logged twice.
    """
    library = logging.getLogger("kvoffload")
    if not library.handlers:
        library.addHandler(_ToEngine(logger))
        library.propagate = not _reaches_root(logger)


def _reaches_root(logger: logging.Logger) -> bool:
    while logger.parent is not None:
        if not logger.propagate:
            return False
        logger = logger.parent
    return True
