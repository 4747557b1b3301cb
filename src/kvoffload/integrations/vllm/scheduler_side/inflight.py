"""Plans of transfers in flight.

When a transfer ends, vLLM reports only the request and the keys. This module finds the plan for them.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Generic, TypeVar

from kvoffload.core.plans import LoadPlan, StorePlan

P = TypeVar("P", LoadPlan, StorePlan)


class InFlight(Generic[P]):
    """Plans of transfers in flight, by request.

    A transfer may end after its request has finished. A plan may have several transfers, which end at
    different times.
    """

    def __init__(self) -> None:
        self._plans: dict[str, list[tuple[P, set[bytes]]]] = {}

    def add(self, plan: P, keys: Collection[bytes], request_id: str | None = None) -> None:
        """Record a plan until `take` has removed all its keys.

        Args:
            request_id: the request that vLLM reports with the keys; None: the plan's own request.
        """
        if len(plan):
            request_id = plan.request_id if request_id is None else request_id
            self._plans.setdefault(request_id, []).append((plan, set(keys)))

    def take(self, request_id: str, keys: Collection[bytes]) -> list[P]:
        """Remove and return the plans of these keys. If a plan also has other keys, split it.

        Keys without a plan are ignored.
        """
        wanted = set(keys)
        taken: list[P] = []
        remaining: list[tuple[P, set[bytes]]] = []
        for plan, plan_keys in self._plans.pop(request_id, ()):
            # Take a key from one plan only: a second load of the same block has a second plan.
            if plan_keys <= wanted:
                taken.append(plan)
                wanted -= plan_keys
            elif plan_keys.isdisjoint(wanted):
                remaining.append((plan, plan_keys))
            else:
                for piece in plan.split():
                    (key,) = piece.keys
                    if key in wanted:
                        taken.append(piece)
                    else:
                        remaining.append((piece, {key}))
                wanted -= plan_keys
        if remaining:
            self._plans[request_id] = remaining
        return taken

    def drain(self) -> list[P]:
        """Remove and return all plans."""
        plans = [plan for of_request in self._plans.values() for plan, _ in of_request]
        self._plans.clear()
        return plans

    def __len__(self) -> int:
        return sum(len(plan) for plans in self._plans.values() for plan, _ in plans)
