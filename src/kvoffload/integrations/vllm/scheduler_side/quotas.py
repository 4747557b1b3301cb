"""Quotas of tenants that follow a file at run time."""

from __future__ import annotations

import logging
import os

from kvoffload.core.tenants import Quota
from kvoffload.errors import ConfigError
from kvoffload.integrations.vllm.shared.tenants import TenantOptions, in_blocks, read_quotas

CHECK_S = 1.0
"""Least time between two looks at the file."""
logger = logging.getLogger("kvoffload.vllm")


class Quotas:
    """The quotas of RAM in blocks.

    Args:
        options: the option ``tenants``.
        ram_bytes, capacity_blocks: size of RAM in bytes and in blocks.

    Thread: the scheduler's. Cost: once a second a system call, if the quotas are in a file.
    """

    def __init__(self, options: TenantOptions, ram_bytes: int, capacity_blocks: int) -> None:
        self._options, self._ram_bytes, self._capacity_blocks = options, ram_bytes, capacity_blocks
        self._next_check_s, self._seen = 0.0, self._signature()
        self.current = in_blocks(options.quotas, ram_bytes, capacity_blocks)

    def changed(self, now_s: float) -> dict[str, Quota] | None:
        """Return new quotas if the file has changed, else None. A wrong file is only logged."""
        if not self._options.file or now_s < self._next_check_s:
            return None
        self._next_check_s = now_s + CHECK_S
        seen, self._seen = self._seen, self._signature()
        if self._seen == seen or self._seen is None:
            return None
        try:
            quotas = read_quotas("tenants", self._options.file)
        except ConfigError as error:
            self.refused(error)
            return None
        return in_blocks(quotas, self._ram_bytes, self._capacity_blocks)

    def refused(self, error: ConfigError) -> None:
        """Log that new quotas were wrong."""
        logger.error("kvoffload: the quotas stay as they are: %s", error)

    def accepted(self, quotas: dict[str, Quota]) -> None:
        """Record and log that new quotas apply."""
        self.current = quotas
        text = ", ".join(f"{name} {quota.min_blocks} to {quota.max_blocks}" for name, quota in quotas.items())
        logger.info("kvoffload: new quotas in blocks: %s", text or "none")

    def _signature(self) -> tuple[int, int, int] | None:
        if not self._options.file:
            return None
        try:
            status = os.stat(self._options.file)
        except OSError:
            return None
        return status.st_mtime_ns, status.st_size, status.st_ino
