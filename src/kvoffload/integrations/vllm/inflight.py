"""Plans of transfers under way, found again by what vLLM says when they end: a request and a set of keys."""

from __future__ import annotations

from collections.abc import Collection
from typing import Generic, TypeVar

from kvoffload.types import LoadPlan, StorePlan

P = TypeVar("P", LoadPlan, StorePlan)


class InFlight(Generic[P]):
    """Plans by request. A transfer may end after its request has finished, and in pieces."""

    def __init__(self) -> None:
        self._plans: dict[str, list[P]] = {}

    def add(self, plan: P) -> None:
        """Remember a plan until all of it has been taken."""
        if len(plan.keys):
            self._plans.setdefault(plan.request_id, []).append(plan)

    def take(self, request_id: str, keys: Collection[bytes]) -> list[P]:
        """Plans for these keys and no others; a plan that covers more is split. Unknown keys give nothing."""
        wanted = set(keys)
        taken: list[P] = []
        left: list[P] = []
        for plan in self._plans.pop(request_id, ()):
            # One plan's keys are named once: a second load of the same block has a plan of its own.
            found = [key in wanted for key in plan.keys]
            if all(found):
                taken.append(plan)
                wanted.difference_update(plan.keys)
            elif any(found):
                for piece, named in zip(plan.split(), found, strict=True):
                    (taken if named else left).append(piece)
                wanted.difference_update(*(piece.keys for piece in taken))
            else:
                left.append(plan)
        if left:
            self._plans[request_id] = left
        return taken

    def clear(self) -> None:
        """Forget all plans; nobody will ask for them."""
        self._plans.clear()

    def __len__(self) -> int:
        return sum(len(plan.keys) for plans in self._plans.values() for plan in plans)
