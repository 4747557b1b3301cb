"""Settings of a running engine: the user edits a file, and the engine changes its policy and its quotas."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from kvoffload.core.plans import ON_DEVICE_EVICTION
from kvoffload.core.policy import PolicyName
from kvoffload.core.policy_change import PolicyChange
from kvoffload.errors import ConfigError
from kvoffload.integrations.vllm.shared.logs import logger
from kvoffload.integrations.vllm.shared.tenants import ONE_OWNER, TenantOptions, Tenants
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
        policy, store: the policy and the store mode with which the engine has started.
        ram_bytes: size of RAM, for quotas.
        clock: monotonic seconds.

    Thread: the scheduler's.
    """

    def __init__(
        self,
        path: str,
        policy: str,
        store: str,
        ram_bytes: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._path, self._first_policy, self._store = path, policy, store
        self._ram_bytes, self._clock = ram_bytes, clock
        self._manager: AnyManager | None = None

    def apply_to(self, manager: AnyManager) -> None:
        """Apply the settings to this manager from now on. The manager has the engine's first policy."""
        self._manager = manager
        self._policy = self._wanted = self._first_policy
        self._file = WatchedFile(self._path, LiveOptions, self._clock)
        self._preparation: _Preparation | None = None
        self._changing_to = ""

    def step(self) -> str:
        """Read the file, if it is time, and continue a change. Called in every step.

        Returns the new policy in the step in which a change is complete; otherwise an empty text.
        """
        assert self._manager is not None
        try:
            if (options := self._file.poll()) is not None:
                self._set_tenants(self._manager, options.tenants)
                self._wanted = options.policy or self._wanted
        except Exception as error:  # a mistake of the user, or a module of the user that raises
            logger.error("kvoffload: %s: %s; nothing is changed", self._path, error)
        if self._manager.advance_policy_change(NUM_BLOCKS):
            return ""
        policy, self._changing_to = self._changing_to, ""
        if self._preparation is None and self._wanted != self._policy:
            self._preparation = _Preparation(self._manager, self._wanted)
        elif self._preparation is not None and self._preparation.is_done:
            self._begin(self._manager, self._preparation)
        return policy

    def _set_tenants(self, manager: AnyManager, tenants: TenantOptions | None) -> None:
        if tenants is None:
            return
        if self._store == ON_DEVICE_EVICTION and tenants.quotas:
            raise ConfigError("tenants", str(tenants), ONE_OWNER)
        manager.set_tenants(tenants.in_blocks(self._ram_bytes, manager.capacity_blocks))
        logger.info("kvoffload: %s: tenants with quotas: %s", self._path, str(tenants) or "none")

    def _begin(self, manager: AnyManager, preparation: _Preparation) -> None:
        """Begin a change that is prepared, unless the user wants another policy by now."""
        self._preparation = None
        if preparation.policy != self._wanted:
            return
        try:
            manager.begin_policy_change(preparation.result())
        except Exception as error:  # a policy of the user may raise anything
            logger.error("kvoffload: %s: the policy stays %s: %s", self._path, self._policy, error)
            self._wanted = self._policy
        else:
            logger.info("kvoffload: %s: policy %s replaces %s", self._path, self._wanted, self._policy)
            self._policy = self._changing_to = self._wanted


class _Preparation:
    """A policy that a thread prepares. `policy`: its name."""

    def __init__(self, manager: AnyManager, policy: str) -> None:
        self._manager, self.policy = manager, policy
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
            raise ConfigError("policy", self.policy, f"it cannot be prepared: {self._error}")
        return self._change

    def _run(self) -> None:
        try:
            self._change = self._manager.prepare_policy_change(self.policy)
        except Exception as error:
            self._error = error
