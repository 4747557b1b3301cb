"""Grid of a sweep: all combinations of policies, admission rules, store modes and sizes.

Defines how users type the values of the axes, and the order of the combinations. Replays nothing.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import re
from dataclasses import dataclass, replace

import numpy as np

from kvoffload.core.admission import create_admission
from kvoffload.core.manager import OffloadingManager
from kvoffload.core.plans import ON_COMPUTE, ON_DEVICE_EVICTION, STORES
from kvoffload.core.policy import POLICIES, EvictionPolicy
from kvoffload.errors import ConfigError, Problems
from kvoffload.replay.config import NEEDS_INSTANCES, ONE_DEVICE, ReplayConfig
from kvoffload.replay.trace_keys import KEY_BYTES
from kvoffload.settings.read import ANY_TRACE, parse_capacity
from kvoffload.tiers.spec import NO_TIERS, SizedTierOptions, parse_tiers
from kvoffload.traces.trace import Trace

_WITHOUT_DEVICE = f"{ON_DEVICE_EVICTION} needs a device cache"
_TIMES = re.compile(r"(\d{1,30})(?:\.(\d{1,30}))?x")
_DEVICE_ALLOWED = (
    "allowed: 0 (none), a number of blocks (2000), a share of the unique blocks (25%), a size (4GiB), or a "
    "multiple of the tier's capacity (0.5x)"
)
_A_FEW_BLOCKS = 64
_DEFAULTS = ReplayConfig(1)


@dataclass(frozen=True)
class Point:
    """Combination of a sweep: the configuration of a replay, with the sizes that the user typed.

    Attributes:
        trace: index of the trace among the sweep's traces.
        config: configuration of the replay, with sizes in blocks.
        capacity, device, tiers: sizes of RAM, device cache and tiers as the user typed them.
    """

    trace: int
    config: ReplayConfig
    capacity: str
    device: str
    tiers: str = NO_TIERS

    def __str__(self) -> str:
        config = self.config
        device = f", device {self.device}" if config.device_blocks else ""
        tiers = f", tiers {self.tiers}" if config.tiers else ""
        sizes = f"capacity {self.capacity}{device}{tiers}"
        pool = ", shared RAM" if config.shared_ram else ""
        return f"{config.policy}, {config.admission}, {config.store}, {sizes}{pool}"


@dataclass(frozen=True)
class Grid:
    """Axes of a sweep: for each option, the values to combine, as the user typed them.

    Attributes:
        policies: names of policies, or ``module:Class``.
        admissions: names of admission rules, such as ``all`` or ``reuse:2``.
        capacities: capacities of RAM, such as ``5000`` blocks, ``5%`` of a trace's unique blocks, or
            ``4GiB``.
        devices: capacities of the LRU device cache, written like capacities of RAM or as a multiple of RAM's
            capacity, such as ``0.5x``. ``0``: no device cache.
        stores: store modes (`STORES`).
        tiers: simulated tiers behind RAM: ``none``, ``10%``, ``10%,policy=hazard``, ``1%+10%`` (two levels).
        block_bytes: bytes of a block, needed for sizes such as ``4GiB``; None if unknown.
        common: configuration for all replays. Only its assumptions (decode speed, queue, instances, routing)
            are used; its caches are replaced by values of the axes.
        shared_ram: values of `ReplayConfig.shared_ram` to try. False: each instance has its own RAM. True:
            all instances share one pool.

    Raises: `ConfigError` if values are wrong or incompatible; the error lists all wrong values.
    """

    policies: tuple[str, ...]
    admissions: tuple[str, ...] = ("all",)
    capacities: tuple[str, ...] = ("5%",)
    devices: tuple[str, ...] = ("0",)
    stores: tuple[str, ...] = (ON_COMPUTE,)
    block_bytes: int | None = None
    tiers: tuple[str, ...] = (NO_TIERS,)
    common: ReplayConfig = _DEFAULTS
    shared_ram: tuple[bool, ...] = (False,)

    def __post_init__(self) -> None:
        for axis in ("policies", "admissions", "capacities", "devices", "stores", "tiers", "shared_ram"):
            if not getattr(self, axis):
                raise ConfigError(axis, "", "allowed: one value or more")
        problems = Problems("sweep")
        if True in self.shared_ram and self.common.instances == 1:
            problems.add("shared-ram", True, NEEDS_INSTANCES)
        for policy in self.policies:
            with problems:
                policy_class(policy)
        for admission in self.admissions:
            with problems:
                create_admission(admission, KEY_BYTES, 1)
        for store in self.stores:
            if store not in STORES:
                problems.add("stores", store, f"allowed: {', '.join(STORES)}")
        # Sizes are parsed here for errors only; a trace is needed to convert them to blocks.
        with problems:
            self._sizes(ANY_TRACE)
        problems.check()
        for policy in self.policies:
            _require_one([incompatible(policy, admission) for admission in self.admissions])
        for admission in self.admissions:
            _require_one([incompatible(policy, admission) for policy in self.policies])
        for tiers in self.tiers:
            self._check_tiers(tiers)

    def points(self, trace: int, unique_blocks: int) -> tuple[list[Point], list[str]]:
        """Return the combinations to replay for one trace, and a reason for each one that is left out.

        Args:
            trace: index of the trace among the sweep's traces.
            unique_blocks: number of unique blocks in the trace.

        Points are ordered by device, capacity, tiers, shared RAM, store, policy and admission rule, which
        varies fastest. Raises `ConfigError` if a size is smaller than one block of this trace.
        """
        points, left_out = [], []
        for device, capacity, capacity_blocks, device_blocks in self._sizes(unique_blocks):
            for tiers, is_shared, store, policy, admission in itertools.product(
                self.tiers, self.shared_ram, self.stores, self.policies, self.admissions
            ):
                reason = incompatible(policy, admission)
                options = _tier_options(tiers, self.block_bytes, unique_blocks)
                if is_shared and store != ON_COMPUTE:
                    left_out.append(ONE_DEVICE)
                elif store == ON_DEVICE_EVICTION and device_blocks == 0:
                    left_out.append(_WITHOUT_DEVICE)
                elif reason is not None:
                    left_out.append(str(reason))
                else:
                    config = replace(
                        self.common,
                        capacity_blocks=capacity_blocks,
                        policy=policy,
                        admission=admission,
                        device_blocks=device_blocks,
                        store=store,
                        tiers=options,
                        shared_ram=is_shared,
                    )
                    points.append(Point(trace, config, capacity, device, tiers))
        return points, left_out

    def _check_tiers(self, tiers: str) -> None:
        for typed in parse_tiers("tiers", tiers):
            if typed.keeps_blocks:
                capacity = typed.capacity if isinstance(typed, SizedTierOptions) else "CAPACITY"
                allowed = f"a sweep replays without bytes; allowed: simulated:{capacity}"
                raise ConfigError("tiers", tiers, allowed)
        for tier in _tier_options(tiers, self.block_bytes, ANY_TRACE):
            if reason := incompatible(tier.policy, tier.admission):
                raise ConfigError("tiers", tiers, reason.args[0])

    def _sizes(self, unique_blocks: int) -> list[tuple[str, str, int, int]]:
        """Return all pairs of a device size and a RAM size.

        Each is a tuple: device as typed, RAM as typed, RAM in blocks, device in blocks.
        """
        sizes = []
        for device in self.devices:
            for capacity in self.capacities:
                blocks = parse_capacity("capacities", capacity, self.block_bytes, unique_blocks)
                on_device = device_blocks(device, blocks, self.block_bytes, unique_blocks)
                sizes.append((device, capacity, blocks, on_device))
        return sizes


@functools.cache
def policy_class(policy: str) -> type[EvictionPolicy]:
    """Return the class of a policy, which is found only once per process. Raises `ConfigError` if unknown."""
    return POLICIES.find(policy)


@functools.cache
def incompatible(policy: str, admission: str) -> ConfigError | None:
    """Return an error if a manager cannot have this policy with this admission rule, otherwise None."""
    try:
        cls = policy_class(policy)
        OffloadingManager(_A_FEW_BLOCKS, key_bytes=KEY_BYTES, policy=cls, admission=admission)
    except ConfigError as error:
        return error
    except Exception as error:
        # A third party's class that cannot be constructed.
        return ConfigError("policy", policy, f"its constructor fails: {type(error).__name__}: {error}")
    return None


def _require_one(reasons: list[ConfigError | None]) -> None:
    """Check that a value of one axis is compatible with at least one value of another axis.

    `reasons` has an entry for each value of the other axis: the error if both are incompatible, otherwise
    None. If no entry is None, raises the first error.
    """
    if reasons[0] is not None and all(reasons):
        raise reasons[0]


def axis(field: str, text: str) -> tuple[str, ...]:
    """Parse the values of an axis, separated by commas: ``lru,arc``. Duplicates are dropped.

    An item with ``=`` is a parameter of the value before it, so ``lru,s3fifo,small_share=0.2`` has two
    values. Raises: `ConfigError` for an empty item.
    """
    values: list[str] = []
    for value in text.split(","):
        if "=" in value and values:
            values[-1] += f",{value.strip()}"
        else:
            values.append(value.strip())
    if "" in values:
        raise ConfigError(field, text, "allowed: values separated by commas, none of them empty")
    return tuple(dict.fromkeys(values))


def content_digest(trace: Trace) -> str:
    """Compute the SHA-256 of everything in a trace that affects a replay, which excludes its name."""
    digest = hashlib.sha256(f"{trace.block_tokens} {trace.skipped_lines}".encode())
    arrays = (trace.block_ids, trace.refs, trace.offsets, trace.timestamps_ms, trace.output_tokens)
    for values in arrays:
        digest.update(f"\n{values.dtype} {values.shape}\n".encode())
        digest.update(np.ascontiguousarray(values).data)
    if trace.hints is not None:
        digest.update(f"\nhints {trace.hints.different!r}\n".encode())
        digest.update(np.ascontiguousarray(trace.hints.numbers).data)
    # The routing follows sessions, and a timed replay computes whole prompts.
    for name, array in (("sessions", trace.sessions), ("prompts", trace.prompt_tokens)):
        if array is not None:
            digest.update(f"\n{name}\n".encode())
            digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


def _tier_options(text: str, block_bytes: int | None, unique_blocks: int) -> tuple[SizedTierOptions, ...]:
    """Parse tiers such as ``none``, ``10%,policy=arc`` or ``1%,admission=reuse:2+50%``.

    The result has capacities in blocks. Tiers whose options have no capacity are left out.
    """
    sized = (tier for tier in parse_tiers("tiers", text) if isinstance(tier, SizedTierOptions))
    return tuple(tier.in_blocks(block_bytes, unique_blocks) for tier in sized)


def device_blocks(text: str, capacity_blocks: int, block_bytes: int | None, unique_blocks: int) -> int:
    """Parse the size of the device cache; returns it in blocks. Raises `ConfigError` if it is not allowed."""
    if text == "0":
        return 0
    if times := _TIMES.fullmatch(text):
        # Exact arithmetic, as in `parse_capacity`.
        fraction = times[2] or ""
        blocks: int = int(times[1] + fraction) * capacity_blocks // 10 ** len(fraction)
        if blocks < 1:
            raise ConfigError(
                "device-blocks",
                text,
                f"it is less than one block, with {capacity_blocks:,} blocks of RAM; {_DEVICE_ALLOWED}",
            )
        return blocks
    try:
        return parse_capacity("device-blocks", text, block_bytes, unique_blocks)
    except ConfigError as error:
        reason = error.allowed.partition("allowed:")[0]
        raise ConfigError("device-blocks", text, reason + _DEVICE_ALLOWED) from None
