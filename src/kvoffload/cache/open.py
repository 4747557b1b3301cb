"""`kvoffload.open`: creates manager, RAM and tiers for a process, and checks all options first."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple, TypeAlias

from kvoffload.cache.cache import KVCache
from kvoffload.cache.jobs import Jobs
from kvoffload.cache.key_chain import KEY_BYTES, fingerprint
from kvoffload.cache.kv_layout import KVLayout
from kvoffload.cache.shared_ram import join_pool, shared_memory_tier
from kvoffload.core.admission import DEFAULT_ADMISSION, Admission, create_admission
from kvoffload.core.manager import OffloadingManager
from kvoffload.core.policy import DEFAULT_POLICY, POLICIES, EvictionPolicy
from kvoffload.errors import ConfigError, Problems
from kvoffload.node.node_manager import NodeManager
from kvoffload.node.pool_directory import PoolDirectory
from kvoffload.settings.ram import Ram, RamOptions
from kvoffload.settings.read import Duration, Positive, convert
from kvoffload.structures.index import Index
from kvoffload.tiering.tiered_manager import TieredManager
from kvoffload.tiers.memory import MemoryTier
from kvoffload.tiers.spec import TierOptions, TierOwner, open_tiers, parse_tiers

TierText: TypeAlias = str | Mapping[str, Any]


_GROUPS = "; for groups of layers with block tables of their own open a cache for each group"


def open(
    *,
    model: str,
    layout: KVLayout,
    ram: str | int | Mapping[str, Any] = "1GiB",
    tiers: str | Iterable[TierText] = (),
    policy: str | type[EvictionPolicy] = DEFAULT_POLICY,
    admission: str | Admission = DEFAULT_ADMISSION,
    deadline_s: float = 2.0,
    recompute_tokens_per_s: float | None = None,
) -> KVCache:
    """Open a cache for KV blocks, in RAM and in tiers behind RAM.

    Args:
        model: text that names everything that determines KV, except the tokens: weights with their revision,
            adapters, quantization, rope settings, library versions. Blocks of another model or layout are
            never served.
        layout: the layout of the engine's tensors.
        ram: size of RAM: ``8GiB``, or a number of bytes. For a pool that processes share:
            ``8GiB,shared=node`` or ``{"size": "8GiB", "shared": "node"}``. All processes of this user on this
            machine share the pool if their `model`, `layout`, `policy` and size of RAM are equal
            (docs/node-pool.md). For the suboptions ``keep`` and ``share`` see `RamOptions`.
        tiers: from the fastest to the slowest: ``["disk:/nvme/kv:200GiB", "valkey://cache:6379/team-a"]``.
        policy, admission: policy and admission rule of RAM, as for `OffloadingManager`.
        deadline_s: longest time that a load waits for tiers. Upper limit of a load's `timeout_s`.
        recompute_tokens_per_s: number of prompt tokens that the engine computes in a second. Blocks are read
            from a tier only if the read is faster than computing them. With None, cached blocks are always
            read.

    Raises:
        ConfigError: all problems at once.
        UnavailableError: a tier or the shared pool cannot be used now.
    """
    options = _checked(model, layout, ram, tiers, policy, admission, deadline_s, recompute_tokens_per_s)
    in_ram, tokens_per_s = options.ram, options.recompute_tokens_per_s
    if (blocks := in_ram.size // layout.block_bytes) < 1:
        raise ConfigError("ram", ram, f"allowed: {layout.block_bytes:,} bytes or more, the size of a block")
    producer = fingerprint(model, layout.describe())
    with ExitStack() as undo:
        opened = open_tiers(options.tiers, TierOwner(layout.block_bytes, KEY_BYTES, producer))
        for tier in opened:
            undo.callback(tier.close)
        close_ram = undo.enter_context(ExitStack())
        make_ram_manager: Callable[..., OffloadingManager] = OffloadingManager
        if in_ram.shared:
            pool = join_pool(in_ram, producer, policy)
            close_ram.callback(pool.close)
            memory = shared_memory_tier(pool, blocks, layout.block_bytes)
            make_ram_manager = partial(_join, close_ram, pool, in_ram.share_blocks(blocks))
        else:
            memory = _own_memory(ram, blocks, layout.block_bytes)
        close_ram.callback(memory.close)
        manager = TieredManager(
            blocks,
            ram=memory,
            tiers=opened,
            key_bytes=KEY_BYTES,
            policy=policy,
            admission=admission,
            deadline_s=options.deadline_s,
            explain_misses=True,
            recompute_s_per_block=tokens_per_s and layout.block_tokens / tokens_per_s,
            make_ram_manager=make_ram_manager,
        )
        jobs = Jobs(manager, memory, layout.block_tokens, close_ram.close)
        cache = KVCache(jobs, layout, options.deadline_s)
        undo.pop_all()
    return cache


class _Options(NamedTuple):
    """The checked and converted options of `open`."""

    ram: RamOptions
    tiers: Sequence[TierOptions]
    deadline_s: float
    recompute_tokens_per_s: float | None


def _checked(
    model: str,
    layout: KVLayout,
    ram: str | int | Mapping[str, Any],
    tiers: str | Iterable[TierText],
    policy: str | type[EvictionPolicy],
    admission: str | Admission,
    deadline_s: float,
    recompute_tokens_per_s: float | None,
) -> _Options:
    """Check the arguments of `open`. Raises `ConfigError` with all problems at once."""
    problems = Problems("open")
    with problems:
        if not isinstance(model, str) or not model.strip():
            raise ConfigError("model", model or None, "give a text that names weights, revision and settings")
    with problems:
        if not isinstance(layout, KVLayout):
            raise ConfigError(
                "layout", layout, f"allowed: a KVLayout{_GROUPS if _is_several(layout) else ''}"
            )
    with problems:
        in_ram: RamOptions = convert("ram", ram, Ram)
    with problems:
        tier_options = parse_tiers("tiers", tiers)
    with problems:
        policy_class = POLICIES.find(policy)
    with problems:
        create_admission(admission, KEY_BYTES, 1)
    with problems:
        deadline_s = convert("deadline_s", deadline_s, Duration)
    with problems:
        if recompute_tokens_per_s is not None:
            recompute_tokens_per_s = convert("recompute_tokens_per_s", recompute_tokens_per_s, Positive)
    with problems:
        if not problems.found and in_ram.shared:
            NodeManager.check_policy(policy_class(Index(1, KEY_BYTES)))
    problems.check()
    return _Options(in_ram, tier_options, deadline_s, recompute_tokens_per_s)


def _own_memory(ram: object, num_blocks: int, block_bytes: int) -> MemoryTier:
    try:
        return MemoryTier(num_blocks, block_bytes)
    except ConfigError as problem:
        raise ConfigError("ram", ram, problem.allowed) from None


def _join(
    close_ram: ExitStack, pool: PoolDirectory, share_blocks: int, *arguments: Any, **keywords: Any
) -> NodeManager:
    """Create the manager of shared RAM, and register `manager.close` in the stack `close_ram`."""
    manager = NodeManager(*arguments, directory=pool, share_blocks=share_blocks, **keywords)
    close_ram.callback(manager.close)
    return manager


def _is_several(layout: object) -> bool:
    return isinstance(layout, Iterable) and not isinstance(layout, str)
