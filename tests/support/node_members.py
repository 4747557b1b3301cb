"""Several members of one pool in one process, behind the interface of one manager."""

from __future__ import annotations

import itertools
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kvoffload.core.plans import LoadPlan, ManagerStats, OffloadingEvent, StorePlan
from kvoffload.core.request import RequestContext
from kvoffload.errors import MisuseError
from kvoffload.node.node_manager import NodeManager
from kvoffload.node.pool_directory import SHARED_MEMORY, PoolDirectory


@dataclass
class _Hidden:
    """Parts that `testing.audit.snapshot` must not walk into."""

    root: Path
    names: Iterator[int] = field(default_factory=itertools.count)
    managers: list[NodeManager] = field(default_factory=list)
    directories: list[PoolDirectory] = field(default_factory=list)
    shares: list[int] = field(default_factory=list)
    turn: int = 0
    clock_s: float = 0.0


_HIDDEN: dict[int, _Hidden] = {}


class Members:
    """A manager that passes each request to one of `num_members` members of a pool, in turn.

    Calls without a request go to any member. Callers see no difference from one manager.

    Args:
        shares: share of each member in blocks; a new member takes the share of the dead one. None: no shares.
    """

    def __init__(
        self, num_members: int, capacity_blocks: int, *, shares: Sequence[int] | None = None, **manager: Any
    ) -> None:
        root = Path(tempfile.mkdtemp(prefix="kvoffload-test-", dir=SHARED_MEMORY))
        hidden = _HIDDEN[id(self)] = _Hidden(root)
        self.capacity_blocks = self.usable_blocks = capacity_blocks
        self._arguments = manager
        for number in range(num_members):
            self._join(shares[number] if shares else 0)
        first = hidden.managers[0]
        self.key_bytes, self.medium, self.block_size = first.key_bytes, first.medium, first.block_size
        self.admission = first.admission
        first.contains([])  # reads the shares of the members that have joined since
        self._show()

    def _show(self) -> None:
        """Show the state through a living member; all members have the same."""
        first = self.managers[0]
        self.index, self.slots, self.policy, self.store_mode = (
            first.index, first.slots, first.policy, first.store_mode
        )  # fmt: skip

    @property
    def managers(self) -> list[NodeManager]:
        return _HIDDEN[id(self)].managers

    def _join(self, share: int) -> NodeManager:
        hidden = _HIDDEN[id(self)]
        name = f"engine-{next(hidden.names)}"
        directory = PoolDirectory.join({"test": 1}, name, keep_s=60.0, root=hidden.root, has_keeper=False)
        manager = NodeManager(
            self.capacity_blocks,
            directory=directory,
            share_blocks=share,
            clock=lambda: hidden.clock_s,
            **self._arguments,
        )
        hidden.shares.append(share)
        hidden.directories.append(directory)
        hidden.managers.append(manager)
        manager.take_events()  # events of the present contents, which the other members have already had
        return manager

    def shares(self) -> dict[int, int]:
        """Return the share of each member by its number in the pool."""
        hidden = _HIDDEN[id(self)]
        numbers = [directory.number for directory in hidden.directories]
        return dict(zip(numbers, hidden.shares, strict=True))

    def number_of(self, manager: NodeManager | None) -> int:
        """Return the number of a member; None: of the member that gets the next call without a request."""
        if manager is None:
            manager = self.managers[(_HIDDEN[id(self)].turn + 1) % len(self.managers)]
        return _HIDDEN[id(self)].directories[self.managers.index(manager)].number

    def _next(self) -> NodeManager:
        hidden = _HIDDEN[id(self)]
        hidden.turn += 1
        return self.managers[hidden.turn % len(self.managers)]

    def _of(self, ctx: RequestContext | None) -> NodeManager:
        return self._next() if ctx is None else ctx.owner  # type: ignore[return-value]

    # ---- the calls of a manager

    def begin_request(self, *arguments: Any, **keywords: Any) -> RequestContext:
        return self._next().begin_request(*arguments, **keywords)

    def finish_request(self, ctx: RequestContext, *arguments: Any, **keywords: Any) -> None:
        self._of(ctx).finish_request(ctx, *arguments, **keywords)

    def expect(self, ctx: RequestContext) -> None:
        self._of(ctx).expect(ctx)

    def withdraw(self, ctx: RequestContext) -> None:
        self._of(ctx).withdraw(ctx)

    def __getattr__(self, name: str) -> Any:
        if name not in {"touch", "lookup", "contains", "lookup_key", "prepare_load", "prepare_store", "pin"}:
            raise AttributeError(name)

        def call(keys: Any, ctx: RequestContext | None = None, **keywords: Any) -> Any:
            arguments = () if name == "pin" else (ctx,)
            return getattr(self._of(ctx), name)(keys, *arguments, **keywords)

        return call

    def discard(self, keys: Any) -> int:
        return self._next().discard(keys)

    def complete_store(self, plan: StorePlan, success: bool = True) -> None:
        if self._is_of_living(plan):
            plan.request.owner.complete_store(plan, success)  # type: ignore[attr-defined]

    def complete_load(self, plan: LoadPlan, damaged: Any = ()) -> None:
        if self._is_of_living(plan):
            plan.request.owner.complete_load(plan, damaged)  # type: ignore[attr-defined]

    def unpin(self, plan: LoadPlan, damaged: Any = ()) -> None:
        if self._is_of_living(plan):
            plan.request.owner.unpin(plan, damaged)  # type: ignore[attr-defined]

    def reset(self, *, drop_in_flight: bool = False) -> None:
        if drop_in_flight:
            for manager in self.managers:
                manager.reset(drop_in_flight=True)
        else:
            self._next().reset()

    def stats(self) -> ManagerStats:
        """Return the statistics of a member without `tenants`, which differ from member to member."""
        return replace(self._next().stats(), tenants={})

    def take_events(self) -> list[OffloadingEvent]:
        """Return the events of the first member; all members must have received the same."""
        first_events, *other_events = ([*manager.take_events()] for manager in self.managers)
        for events in other_events:
            assert [(e.removed, list(e.keys)) for e in events] == [
                (e.removed, list(e.keys)) for e in first_events
            ]
        return first_events

    # ---- deaths

    def kill(self, number: int) -> NodeManager:
        """Let a member end without leaving; a new member joins, and a living member buries the dead one."""
        hidden = _HIDDEN[id(self)]
        self.managers[0].take_events()
        dead = hidden.managers.pop(number)
        hidden.directories.pop(number).close()
        newcomer = self._join(hidden.shares.pop(number))
        self._show()
        for manager in self.managers:
            if manager is not newcomer:
                manager.take_events()
        self.look_around()
        return dead

    @property
    def root(self) -> Path:
        return _HIDDEN[id(self)].root

    def look_around(self) -> None:
        """Let time pass, so that the first member notices deaths."""
        _HIDDEN[id(self)].clock_s += 1.0
        for _ in range(20):
            self.managers[0].contains([])

    def leave(self, number: int) -> None:
        """Let a member end in an orderly way."""
        hidden = _HIDDEN[id(self)]
        hidden.managers.pop(number).close()
        hidden.directories.pop(number).close()
        hidden.shares.pop(number)

    def close(self) -> None:
        hidden = _HIDDEN.pop(id(self))
        for manager, directory in zip(hidden.managers, hidden.directories, strict=True):
            manager.close()
            directory.close()
        shutil.rmtree(hidden.root)

    def _is_of_living(self, plan: StorePlan | LoadPlan) -> bool:
        """Return False for a plan of a dead member, which cannot be completed."""
        if plan.request.owner in self.managers:
            return True
        if plan.completed:
            raise MisuseError("the plan of a dead member is completed")
        plan.completed = True
        return False
