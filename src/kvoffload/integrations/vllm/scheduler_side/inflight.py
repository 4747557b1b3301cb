"""Plans of transfers under way, found by what vLLM passes when they end: a request and a set of keys."""

from __future__ import annotations

from collections.abc import Collection
from typing import Generic, TypeVar

from kvoffload.core.plans import LoadPlan, StorePlan

P = TypeVar("P", LoadPlan, StorePlan)


class InFlight(Generic[P]):
    """Plans by request. A transfer may end after its request has finished, and in parts."""

    def __init__(self) -> None:
        self._plans: dict[str, list[tuple[P, set[bytes]]]] = {}

    def add(self, plan: P, keys: Collection[bytes]) -> None:
        """Keep a plan for these keys until all of it has been taken."""
        if len(plan):
            self._plans.setdefault(plan.request_id, []).append((plan, set(keys)))

    def take(self, request_id: str, keys: Collection[bytes]) -> list[P]:
        """Plans for exactly these keys; a plan that covers more is split. Unknown keys are ignored."""
        wanted = set(keys)
        taken: list[P] = []
        left: list[tuple[P, set[bytes]]] = []
        for plan, its_keys in self._plans.pop(request_id, ()):
            # A key is taken from one plan only: a second load of the same block has a plan of its own.
            if its_keys <= wanted:
                taken.append(plan)
                wanted -= its_keys
            elif its_keys.isdisjoint(wanted):
                left.append((plan, its_keys))
            else:
                for piece in plan.split():
                    (key,) = piece.keys
                    if key in wanted:
                        taken.append(piece)
                    else:
                        left.append((piece, {key}))
                wanted -= its_keys
        if left:
            self._plans[request_id] = left
        return taken

    def clear(self) -> None:
        """Forget all plans; none will be taken."""
        self._plans.clear()

    def __len__(self) -> int:
        return sum(len(plan) for plans in self._plans.values() for plan, _ in plans)
