"""Settings of a running engine, read from a file that the user edits.

The file sets the policy, the quotas, and the size of RAM. The size is limited to the size that the engine
reserved at its start.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass

from kvoffload.core.plans import ON_DEVICE_EVICTION
from kvoffload.core.policy import PolicyName
from kvoffload.core.policy_change import PolicyChange
from kvoffload.core.quotas import ONE_OWNER
from kvoffload.core.tenants import Quota, check_quotas
from kvoffload.errors import ConfigError
from kvoffload.integrations.vllm.shared.logs import logger
from kvoffload.integrations.vllm.shared.options import VLLMOptions
from kvoffload.integrations.vllm.shared.tenants import TenantOptions, Tenants
from kvoffload.settings.read import Size
from kvoffload.settings.watched import WatchedFile
from kvoffload.tiering.tiered_manager import AnyManager, TieredManager

NUM_BLOCKS = 512
"""Number of blocks that a change of policy or size processes in one step. This takes less than a millisecond.
"""


@dataclass(frozen=True)
class LiveOptions:
    """The options that can change while an engine runs: ``{"policy": "hazard", "ram": "20GiB"}``.

    Attributes:
        policy: the policy of RAM; None to leave it unchanged.
        ram: bytes of RAM to use, at most the size at the engine's start; None to leave it unchanged.
        tenants: the quotas of all tenants; None to leave them unchanged.
    """

    policy: PolicyName | None = None
    ram: Size | None = None
    tenants: Tenants | None = None


class LiveSettings:
    """Applies the settings of a file to a manager, when the file appears and whenever it changes.

    If settings are wrong, an error is logged and nothing changes. A new policy is prepared on another thread,
    because its kernels may have to be compiled. If only this preparation fails, the old policy stays, but the
    quotas and the size of the file are applied.

    Args:
        path: the file. It need not exist.
        options: the options at the engine's start.
        clock: function that returns monotonic seconds.

    Thread: the scheduler's.
    """

    def __init__(self, path: str, options: VLLMOptions, clock: Callable[[], float] = time.monotonic) -> None:
        self._path, self._options, self._clock = path, options, clock
        self._manager: AnyManager | None = None

    def apply_to(self, manager: AnyManager) -> None:
        """Apply the settings to `manager` from now on. The manager must have the policy of `options`."""
        self._manager = manager
        self._policy = self._wanted = self._options.policy
        self._tenants = self._options.tenants or TenantOptions({}, {})
        self._file = WatchedFile(self._path, LiveOptions, self._clock)
        self._prepared_policy = ""
        self._preparation: Future[PolicyChange] | None = None
        self._is_changing = self._is_resizing = False
        self._num_blocks = manager.capacity_blocks

    @property
    def policy(self) -> str:
        """The manager's policy, or the policy to which it is changing."""
        return self._policy

    def step(self) -> bool:
        """Read the file if it is time, and continue a change of policy or size. Call this in every step.

        Returns True in the step that completes a change of policy or size.
        """
        assert self._manager is not None
        try:
            if (options := self._file.poll()) is not None:
                self._apply(self._manager, options)
                self._wanted = options.policy or self._wanted
        except Exception as error:  # a mistake of the user, or a module of the user that raises
            logger.error("kvoffload: %s: %s; nothing is changed", self._path, error)
        has_resized = self._is_resizing and not self._manager.advance_resize(NUM_BLOCKS)
        if has_resized:
            self._is_resizing = False
            logger.info("kvoffload: %s: %d blocks are in use", self._path, self._manager.usable_blocks)
        if self._manager.advance_policy_change(NUM_BLOCKS):
            return has_resized
        has_changed, self._is_changing = self._is_changing, False
        if self._preparation is None and self._wanted != self._policy:
            self._prepared_policy = self._wanted
            self._preparation = _begin_to_prepare(self._manager, self._wanted)
        elif self._preparation is not None and self._preparation.done():
            self._begin(self._manager, self._preparation)
        return has_changed or has_resized

    def _apply(self, manager: AnyManager, options: LiveOptions) -> None:
        """Set the quotas and begin to resize. If this raises a `ConfigError`, nothing has changed."""
        tenants, quotas, num_blocks = options.tenants, None, None
        if tenants is not None:
            if self._options.store == ON_DEVICE_EVICTION and tenants.ram:
                raise ConfigError("tenants", str(tenants), ONE_OWNER)
            for problem in tenants.wrong_tiers(self._options.tiers):
                raise problem
            quotas = tenants.in_blocks(self._options.ram_bytes, manager.capacity_blocks)
        if options.ram is not None:
            num_blocks = self._blocks_of(options.ram, manager.capacity_blocks)
        if quotas is not None and num_blocks is not None:
            check_quotas(quotas, num_blocks)
        before, was_resizing = self._num_blocks, self._is_resizing
        if num_blocks is not None and num_blocks > before:
            self._resize(manager, num_blocks)  # first, because the quotas may need the larger size
        try:
            if tenants is not None and quotas is not None:
                self._set_quotas(manager, tenants, quotas)
        except ConfigError:
            self._resize(manager, before)
            self._is_resizing = was_resizing
            raise
        if num_blocks is not None:
            self._resize(manager, num_blocks)

    def _set_quotas(self, manager: AnyManager, tenants: TenantOptions, quotas: Mapping[str, Quota]) -> None:
        """Set the quotas of RAM and of all tiers. If a tier's quotas are refused, restore all old quotas."""
        ram = manager.ram_manager if isinstance(manager, TieredManager) else manager
        old = ram.tenants
        ram.set_tenants(quotas)
        try:
            tenants.set_tiers(manager, self._options.tiers)
        except ConfigError:
            ram.set_tenants(old)
            self._tenants.set_tiers(manager, self._options.tiers)
            raise
        self._tenants = tenants
        logger.info("kvoffload: %s: tenants with quotas: %s", self._path, str(tenants) or "none")

    def _resize(self, manager: AnyManager, num_blocks: int) -> None:
        if num_blocks != self._num_blocks:
            manager.begin_resize(num_blocks)
            self._num_blocks, self._is_resizing = num_blocks, True

    def _blocks_of(self, ram_bytes: int, capacity_blocks: int) -> int:
        """Convert bytes of RAM to blocks.

        Raises `ConfigError` if the result is 0 or more than `capacity_blocks`.
        """
        most_bytes = self._options.ram_bytes
        num_blocks = ram_bytes * capacity_blocks // most_bytes
        if not 0 < num_blocks <= capacity_blocks:
            why = f"allowed: from one block to the {most_bytes} bytes with which the engine has started"
            raise ConfigError("ram", ram_bytes, why)
        return num_blocks

    def _begin(self, manager: AnyManager, preparation: Future[PolicyChange]) -> None:
        """Begin to change to the prepared policy, unless the user has meanwhile requested another policy."""
        self._preparation = None
        if self._prepared_policy != self._wanted:
            return
        try:
            if (error := preparation.exception()) is not None:
                raise ConfigError("policy", self._wanted, f"it cannot be prepared: {error}")
            manager.begin_policy_change(preparation.result())
        except Exception as error:  # a policy of the user may raise anything
            logger.error("kvoffload: %s: the policy stays %s: %s", self._path, self._policy, error)
            self._wanted = self._policy
        else:
            logger.info("kvoffload: %s: policy %s replaces %s", self._path, self._wanted, self._policy)
            self._policy, self._is_changing = self._wanted, True


def _begin_to_prepare(manager: AnyManager, policy: str) -> Future[PolicyChange]:
    """Prepare a policy on another thread. It is a daemon thread, so that the process can end meanwhile."""
    future = Future[PolicyChange]()

    def run() -> None:
        try:
            future.set_result(manager.prepare_policy_change(policy))
        except Exception as error:
            future.set_exception(error)

    threading.Thread(target=run, name="kvoffload-policy", daemon=True).start()
    return future
