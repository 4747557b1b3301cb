"""Managers with tiers behind RAM, one for each engine of a replay.

If engines share RAM, each of them still has its own tiers behind RAM. Knows no requests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from kvoffload.core.manager import OffloadingManager
from kvoffload.core.tenants import Quota
from kvoffload.tiering.tiered_manager import TieredManager
from kvoffload.tiers.contract import Memory, SecondaryTier
from kvoffload.tiers.spec import TierOptions, TierOwner, names_of, open_tiers

SETTLE_S = 600.0
"""Time limit, in seconds, for the tiers' jobs. If a job takes longer, the replay fails with `TierError`."""


def may_be_shared(tier: TierOptions) -> bool:
    """Return True if one tier with these options can serve all engines of a replay.

    Only a simulated tier without ``per_engine`` may be shared, because it simulates a server. All other tiers
    are opened once for each engine. In production, too, each engine has its own directory on a disk, or its
    own connection to a server.
    """
    return not getattr(tier, "per_engine", True)


def replica_name(engine: int, num_engines: int) -> str:
    """Return the name of an engine's directory in a tier on disk; "" if the replay has a single engine."""
    return f"replica-{engine}" if num_engines > 1 else ""


def make_ram_manager(members: Sequence[TieredManager]) -> Callable[..., OffloadingManager]:
    """Return a factory that gives all `TieredManager` objects in `members` the same manager of RAM.

    Pass it to the constructor of the next member. For the first member it creates the manager of RAM; for
    later members it returns the first member's.
    """

    def make(*arguments: Any, **keywords: Any) -> OffloadingManager:
        return members[0].ram_manager if members else OffloadingManager(*arguments, **keywords)

    return make


def open_members(
    tiers: Sequence[TierOptions],
    ram: Memory,
    owner: TierOwner,
    num_engines: int,
    shared: SecondaryTier | None = None,
    quotas: Mapping[str, Mapping[str, Quota]] = MappingProxyType({}),
    **manager: Any,
) -> list[TieredManager]:
    """Open the tiers of each engine that uses this RAM, and create the engine's manager.

    Args:
        ram: the memory of RAM's slots; its number of slots is the capacity of RAM.
        shared: the last tier, if it is already open because engines with other RAM use it, too. None: the
            function opens the last tier.
        quotas: for tiers by name, the quotas of tenants. They are set only for the first engine.
        manager: keyword arguments of `OffloadingManager`.

    The caller must close the managers. Raises the errors of `open_tiers` and
    `TieredManager.set_tier_tenants`; after an error no tier stays open.
    """
    members = list[TieredManager]()
    names = names_of(tiers)
    with ExitStack() as undo:
        if shared is None and num_engines > 1 and may_be_shared(tiers[-1]):
            (shared,) = open_tiers(tiers[-1:], owner)
            undo.callback(shared.close)
        for engine in range(num_engines):
            of_engine = replace(owner, replica=replica_name(engine, num_engines))
            opened = open_tiers(tiers if shared is None else tiers[:-1], of_engine)
            for tier in opened:
                undo.callback(tier.close)
            opened += [] if shared is None else [shared]
            for tier, name in zip(opened, names, strict=True):
                tier.name = name
            member = TieredManager(
                len(ram.pool),
                ram=ram,
                tiers=opened,
                # Time does not matter in a replay: no request gives up, and promotions may use all of RAM.
                deadline_s=SETTLE_S,
                max_in_flight=1.0,
                enable_events=True,
                make_ram_manager=make_ram_manager(members),
                **manager,
            )
            members.append(member)
        for name, of_tier in quotas.items():
            members[0].set_tier_tenants(name, of_tier)
        undo.pop_all()
    return members
