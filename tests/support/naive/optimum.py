"""The optimum with any device before the tier: by looking ahead, and by exhaustive search."""

from __future__ import annotations

from functools import cache
from itertools import combinations

from support.optimum_traces import Requests

Offers = list[tuple[int, list[int]]]
"""For each request: number of leading blocks served by the device, and the blocks offered to the tier."""


def naive_device(requests: Requests, device_blocks: int, store: str) -> Offers:
    """Simulate the device cache with a list, the coldest block first."""
    order: list[int] = []
    offers = []
    for request in requests:
        served = 0
        while served < len(request) and request[served] in order:
            served += 1
        older = [block for block in order if block not in request]
        fit = request[:device_blocks]
        room = device_blocks - len(fit)
        dropped = older[: max(0, len(older) - room)] + request[device_blocks:]
        order = older[max(0, len(older) - room) :] + fit[::-1]
        offers.append((served, request if store == "on-compute" else dropped))
    return offers


def naive_optimum(requests: Requests, capacity: int, offers: Offers) -> int:
    """Count the prefix hits of MIN with bypass, by looking ahead.

    The tier keeps the resident and offered blocks that are needed soonest, except blocks that are offered
    again before they are needed.
    """

    def need(block: int, now: int) -> tuple[int, int] | None:
        for later in range(now + 1, len(requests)):
            served, offered = offers[later]
            if block in requests[later][served:]:
                return later, requests[later].index(block)
            if block in offered:
                return None
        return None

    resident: set[int] = set()
    hits = 0
    for now, (request, (served, offered)) in enumerate(zip(requests, offers, strict=True)):
        hits += served
        needed = request[served:]
        while needed and needed[0] in resident:
            hits += 1
            needed = needed[1:]
        needs = [(need(block, now), block) for block in resident.union(offered)]
        resident = {block for _, block in sorted((n, b) for n, b in needs if n is not None)[:capacity]}
    return hits


def best_of_all(requests: Requests, capacity: int, offers: Offers) -> int:
    """Return the most prefix hits that any choice of resident blocks reaches."""

    @cache
    def best(now: int, resident: frozenset[int]) -> int:
        if now == len(requests):
            return 0
        request, (served, offered) = requests[now], offers[now]
        missing = [position for position in range(served, len(request)) if request[position] not in resident]
        hits = missing[0] if missing else len(request)
        might = resident.union(offered)
        kept = combinations(sorted(might), min(capacity, len(might)))
        return hits + max(best(now + 1, frozenset(blocks)) for blocks in kept)

    return best(0, frozenset())
