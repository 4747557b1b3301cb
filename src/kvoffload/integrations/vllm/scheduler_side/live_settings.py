"""Settings of a running engine: the user edits a file, and the engine changes its policy and its quotas."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from kvoffload.core.policy import PolicyName
from kvoffload.core.policy_change import PolicyChange
from kvoffload.errors import ConfigError, MisuseError
from kvoffload.integrations.vllm.shared.logs import logger
from kvoffload.integrations.vllm.shared.tenants import TenantOptions, Tenants
from kvoffload.settings.watched import WatchedFile
from kvoffload.tiering.manager import AnyManager

NUM_BLOCKS = 512
"""Blocks that a new policy adopts in a step: less than a millisecond."""


@dataclass(frozen=True)
class LiveOptions:
    """The options that a running engine takes: ``{"policy": "hazard", "tenants": {"a": {"min": "10GiB"}}}``.

    Attributes:
        policy: the policy of RAM; None keeps it.
        tenants: all quotas of tenants; None keeps them.
    """

    policy: PolicyName | None = None
    tenants: Tenants | None = None


class LiveSettings:
    """Applies the settings of a file to a manager, when the file appears and whenever it changes.

    A new policy is prepared in a thread, because its kernels may have to be compiled. Settings that are wrong
    change nothing, and are logged as errors.

    Args:
        path: the file. It need not exist.
        policy: the policy with which the engine has started.
        ram_bytes: size of RAM, for quotas.
        clock: monotonic seconds.

    Thread: the scheduler's.
    """

    def __init__(
        self, path: str, policy: str, ram_bytes: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._path, self._first_policy, self._ram_bytes, self._clock = path, policy, ram_bytes, clock
        self._manager: AnyManager | None = None

    def apply_to(self, manager: AnyManager) -> None:
        """Apply the settings to this manager from now on. The manager has the engine's first policy."""
        self._manager, self._policy = manager, self._first_policy
        self._file = WatchedFile(self._path, LiveOptions, self._clock)
        self._preparation: _Preparation | None = None

    def step(self) -> None:
        """Read the file, if it is time, and continue a change. Called in every step."""
        assert self._manager is not None
        try:
            if (options := self._file.poll()) is not None:
                self._set_tenants(options.tenants)
                self._set_policy(options.policy)
        except ConfigError as error:
            logger.error("kvoffload: %s; nothing is changed", error)
        if self._preparation is not None and self._preparation.is_done:
            self._begin(self._preparation)
        self._manager.advance_policy_change(NUM_BLOCKS)

    def _set_tenants(self, tenants: TenantOptions | None) -> None:
        assert self._manager is not None
        if tenants is not None:
            self._manager.set_tenants(tenants.in_blocks(self._ram_bytes, self._manager.capacity_blocks))
            logger.info("kvoffload: %s: tenants with quotas: %s", self._path, str(tenants) or "none")

    def _set_policy(self, policy: str | None) -> None:
        assert self._manager is not None
        if policy is not None and policy != self._policy:
            logger.info("kvoffload: %s: policy %s replaces %s", self._path, policy, self._policy)
            self._policy, self._preparation = policy, _Preparation(self._manager, policy)

    def _begin(self, preparation: _Preparation) -> None:
        """Begin a change that is prepared, unless the previous change is under way."""
        assert self._manager is not None
        if self._manager.advance_policy_change(0):
            return
        self._preparation = None
        try:
            self._manager.begin_policy_change(preparation.result())
        except (ConfigError, MisuseError) as error:
            logger.error("kvoffload: the policy stays %s: %s", self._manager.policy.name, error)
            self._policy = ""


class _Preparation:
    """A policy that a thread prepares."""

    def __init__(self, manager: AnyManager, policy: str) -> None:
        self._manager, self._policy = manager, policy
        self._change: PolicyChange | None = None
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="kvoffload-policy", daemon=True)
        self._thread.start()

    @property
    def is_done(self) -> bool:
        return not self._thread.is_alive()

    def result(self) -> PolicyChange:
        """Return the change. Raises the exception of the preparation, as `ConfigError`."""
        if self._change is None:
            raise ConfigError("policy", self._policy, f"it cannot be prepared: {self._error}")
        return self._change

    def _run(self) -> None:
        try:
            self._change = self._manager.prepare_policy_change(self._policy)
        except Exception as error:
            self._error = error
