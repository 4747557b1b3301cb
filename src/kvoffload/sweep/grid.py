"""What a sweep replays: every combination of policies, admission rules, moments to store and sizes.

Owns the grammar of the axes and the order of the combinations. Replays nothing.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import re
from dataclasses import dataclass

import numpy as np

from kvoffload.core.admission import create_admission
from kvoffload.core.manager import OffloadingManager
from kvoffload.core.plans import ON_COMPUTE, ON_DEVICE_EVICTION, STORES
from kvoffload.core.policy import POLICIES, EvictionPolicy
from kvoffload.errors import ConfigError, Problems
from kvoffload.replay.ends import check_decode_speed
from kvoffload.replay.keys import KEY_BYTES
from kvoffload.replay.queue import check_queue
from kvoffload.replay.replay import ReplayConfig
from kvoffload.replay.routing import SESSION, check_instances, check_routing
from kvoffload.settings.read import parse_capacity
from kvoffload.tiers.spec import NO_TIERS, SizedTierOptions, parse_tiers
from kvoffload.traces.trace import Trace

NEEDS_DEVICE = {ON_DEVICE_EVICTION: "to store on device eviction takes a device cache"}
"""Of these, what makes no sense without a device cache, and why."""

_TIMES = re.compile(r"(\d+)(?:\.(\d+))?x")
_DEVICE_ALLOWED = (
    "allowed: 0 (none), a number of blocks (2000), a share of the unique blocks (25%), a size (4GiB), or a "
    "part of the tier's capacity (0.5x)"
)
ANY_TRACE = 2**30
"""Unique blocks to check sizes with while the trace is not known."""
_A_FEW_BLOCKS = 64


@dataclass(frozen=True)
class Point:
    """One combination on one trace: one row of a sweep.

    Attributes:
        trace: position among the traces of the sweep.
        capacity, device: sizes as the user typed them; the same in blocks beside them.
        tiers: what is behind RAM, as typed; tier_options: the same, in blocks.
        decode_tokens_per_s, queue_requests, instances, routing: as in `ReplayConfig`.
    """

    trace: int
    policy: str
    admission: str
    store: str
    capacity: str
    capacity_blocks: int
    device: str
    device_blocks: int
    tiers: str = NO_TIERS
    tier_options: tuple[SizedTierOptions, ...] = ()
    decode_tokens_per_s: float = 0.0
    queue_requests: int = 0
    instances: int = 1
    routing: str = SESSION

    def config(self) -> ReplayConfig:
        """What is replayed."""
        return ReplayConfig(
            self.capacity_blocks,
            self.policy,
            self.admission,
            self.device_blocks,
            self.store,
            self.tier_options,
            self.decode_tokens_per_s,
            self.queue_requests,
            self.instances,
            self.routing,
        )

    def __str__(self) -> str:
        device = f", device {self.device}" if self.device_blocks else ""
        behind = f", tiers {self.tiers}" if self.tier_options else ""
        return f"{self.policy}, {self.admission}, {self.store}, capacity {self.capacity}{device}{behind}"


@dataclass(frozen=True)
class Grid:
    """The axes of a sweep, as the user typed them. What cannot be is a `ConfigError` at construction.

    Attributes:
        policies: names, or ``module:Class``.
        admissions: ``all``, ``reuse:2``, ...
        capacities: of the tier: ``5000``, ``5%`` (of a trace's unique blocks), ``4GiB``.
        devices: of the LRU device cache in front: as capacities, or ``0`` for none, or ``0.5x``: a part of
            the tier's capacity.
        stores: when to store; of `STORES`.
        tiers: what is behind RAM: ``none``, ``10%``, ``10%,policy=hazard``; several behind one another with
            a ``+``. Tiers keep account of blocks, as in production, and keep none.
        block_bytes: what a size is divided by; None if there are none among the capacities.
        decode_tokens_per_s, queue_requests, instances, routing: no axes: those of all replays
            (`ReplayConfig`).
    """

    policies: tuple[str, ...]
    admissions: tuple[str, ...] = ("all",)
    capacities: tuple[str, ...] = ("5%",)
    devices: tuple[str, ...] = ("0",)
    stores: tuple[str, ...] = (ON_COMPUTE,)
    block_bytes: int | None = None
    tiers: tuple[str, ...] = (NO_TIERS,)
    decode_tokens_per_s: float = 0.0
    queue_requests: int = 0
    instances: int = 1
    routing: str = SESSION

    def __post_init__(self) -> None:
        for axis in ("policies", "admissions", "capacities", "devices", "stores", "tiers"):
            if not getattr(self, axis):
                raise ConfigError(axis, "", "at least one")
        problems = Problems("sweep")
        for policy in self.policies:
            with problems:
                POLICIES.find(policy)
        for admission in self.admissions:
            with problems:
                create_admission(admission, KEY_BYTES, 1)
        for store in self.stores:
            with problems:
                if store not in STORES:
                    raise ConfigError("stores", store, f"allowed: {', '.join(STORES)}")
        with problems:
            check_decode_speed(self.decode_tokens_per_s)
        with problems:
            check_queue(self.queue_requests)
        with problems:
            check_instances(self.instances)
        with problems:
            check_routing(self.routing)
        # Whether it can be understood is known before a trace is read.
        with problems:
            self._sizes(ANY_TRACE)
        problems.check()
        for policy in self.policies:
            self._needs_one([why_not(policy, admission) for admission in self.admissions])
        for admission in self.admissions:
            self._needs_one([why_not(policy, admission) for policy in self.policies])
        for tiers in self.tiers:
            for typed in parse_tiers("tiers", tiers):
                if typed.keeps_blocks:
                    capacity = typed.capacity if isinstance(typed, SizedTierOptions) else "CAPACITY"
                    allowed = f"a sweep has no blocks to keep; allowed: simulated:{capacity}"
                    raise ConfigError("tiers", tiers, allowed)
            for tier in _tier_options(tiers, self.block_bytes, ANY_TRACE):
                if reason := why_not(tier.policy, tier.admission):
                    raise ConfigError("tiers", tiers, reason.args[0])

    def points(self, trace: int, unique_blocks: int) -> tuple[list[Point], list[str]]:
        """Every combination on one trace that makes sense, and for each that makes none the reason.

        In the order of the axes: device, capacity, tiers, store, policy, rule. Raises `ConfigError` for a
        size that is no block of this trace.
        """
        points, left_out = [], []
        for device, capacity, capacity_blocks, device_blocks in self._sizes(unique_blocks):
            for tiers, store, policy, admission in itertools.product(
                self.tiers, self.stores, self.policies, self.admissions
            ):
                impossible = why_not(policy, admission)
                if store in NEEDS_DEVICE and device_blocks == 0:
                    left_out.append(NEEDS_DEVICE[store])
                elif impossible is not None:
                    left_out.append(str(impossible))
                else:
                    points.append(
                        Point(
                            trace,
                            policy,
                            admission,
                            store,
                            capacity,
                            capacity_blocks,
                            device,
                            device_blocks,
                            tiers,
                            _tier_options(tiers, self.block_bytes, unique_blocks),
                            float(self.decode_tokens_per_s),
                            self.queue_requests,
                            self.instances,
                            self.routing,
                        )
                    )
        return points, left_out

    def _needs_one(self, reasons: list[ConfigError | None]) -> None:
        """Refuse what goes together with nothing in this grid."""
        if reasons[0] is not None and all(reasons):
            raise reasons[0]

    def _sizes(self, unique_blocks: int) -> list[tuple[str, str, int, int]]:
        """Device and capacity as typed, capacity and device in blocks."""
        sizes = []
        for device in self.devices:
            for capacity in self.capacities:
                blocks = parse_capacity("capacities", capacity, self.block_bytes, unique_blocks)
                on_device = device_blocks(device, blocks, self.block_bytes, unique_blocks)
                sizes.append((device, capacity, blocks, on_device))
        return sizes


@functools.cache
def why_not(policy: str | type[EvictionPolicy], admission: str) -> ConfigError | None:
    """Why a policy and an admission rule do not go together; None if they do."""
    try:
        OffloadingManager(_A_FEW_BLOCKS, key_bytes=KEY_BYTES, policy=policy, admission=admission)
    except ConfigError as error:
        return error
    except Exception as error:
        # A third party's class that cannot be constructed.
        return ConfigError("policy", policy, f"it cannot be used: {type(error).__name__}: {error}")
    return None


def axis(field: str, text: str) -> tuple[str, ...]:
    """What a list like ``lru,arc`` names, each once, in its order. Raises `ConfigError`.

    What has a ``=`` is a parameter of what stands before it: ``lru,s3fifo,small_share=0.2`` are two.
    """
    values: list[str] = []
    for value in text.split(","):
        if "=" in value and values:
            values[-1] += f",{value.strip()}"
        else:
            values.append(value.strip())
    if "" in values:
        raise ConfigError(field, text, "values with commas between them, none of them empty")
    return tuple(dict.fromkeys(values))


def content_digest(trace: Trace) -> str:
    """SHA-256 of everything in a trace that a replay can see; its name is not in it."""
    digest = hashlib.sha256(f"{trace.block_tokens} {trace.skipped_lines}".encode())
    arrays = (trace.block_ids, trace.refs, trace.offsets, trace.timestamps_ms, trace.output_tokens)
    for array in arrays:
        digest.update(f"\n{array.dtype} {array.shape}\n".encode())
        digest.update(np.ascontiguousarray(array).data)
    if trace.hints is not None:
        digest.update(f"\nhints {trace.hints.different!r}\n".encode())
        digest.update(np.ascontiguousarray(trace.hints.numbers).data)
    return digest.hexdigest()


def _tier_options(text: str, block_bytes: int | None, unique_blocks: int) -> tuple[SizedTierOptions, ...]:
    """What ``none``, ``10%``, ``10%,policy=arc`` or ``1%,admission=reuse:2+50%`` mean."""
    sized = (tier for tier in parse_tiers("tiers", text) if isinstance(tier, SizedTierOptions))
    return tuple(tier.in_blocks(block_bytes, unique_blocks) for tier in sized)


def device_blocks(text: str, capacity_blocks: int, block_bytes: int | None, unique_blocks: int) -> int:
    """Blocks of the device cache in front. Raises `ConfigError`."""
    if text == "0":
        return 0
    if times := _TIMES.fullmatch(text):
        # In exact arithmetic, as `parse_capacity`.
        fraction = times[2] or ""
        blocks: int = int(times[1] + fraction) * capacity_blocks // 10 ** len(fraction)
        if blocks < 1:
            raise ConfigError(
                "device-blocks", text, f"it is no block of a tier of {capacity_blocks:,}; {_DEVICE_ALLOWED}"
            )
        return blocks
    try:
        return parse_capacity("device-blocks", text, block_bytes, unique_blocks)
    except ConfigError as error:
        reason = error.allowed.partition("allowed:")[0]
        raise ConfigError("device-blocks", text, reason + _DEVICE_ALLOWED) from None
