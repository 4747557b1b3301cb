"""Explains the misses of a replay in plain Python: from its decision log, with dictionaries."""

from __future__ import annotations

from collections import OrderedDict, defaultdict

Reasons = list[list[str]]


class NaiveDevice:
    """An LRU device cache, as `replay.device_cache` describes it."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.blocks: OrderedDict[int, None] = OrderedDict()
        """Coldest first."""

    def serve(self, path: list[int]) -> None:
        for block in path:
            self.blocks.pop(block, None)
        fits = path[: self.num_blocks]
        while len(self.blocks) > self.num_blocks - len(fits):
            self.blocks.popitem(last=False)
        for block in reversed(fits):
            self.blocks[block] = None


def explain_naively(requests: list[list[int]], log: str, *, device_blocks: int, has_rule: bool) -> Reasons:
    """Return the reason of each missing block of each request, without tiers behind RAM.

    Args:
        requests: the block ids of each request.
        log: the decision log.
        has_rule: True if an admission rule refuses blocks, False if the policy does.
    """
    lines = defaultdict[int, list[list[str]]](list)
    for line in log.splitlines():
        request, *words = line.split()
        lines[int(request)].append(words)
    last, device, in_ram = dict[int, str](), NaiveDevice(device_blocks), set[int]()
    reasons: Reasons = []
    for request, path in enumerate(requests):
        before, hits, later = split_at_hit(lines[request])
        for kind, *blocks in before:
            apply(kind, [int(block) for block in blocks], last, in_ram, has_rule)
        reasons.append(reasons_of(requests, request, hits, last, in_ram | set(device.blocks)))
        for kind, *blocks in later:
            if kind == "full":
                absent = [block for block in path if block not in in_ram]
                last.update(dict.fromkeys(absent[: int(blocks[0])], "no_room"))
                last.update(dict.fromkeys(absent[int(blocks[0]) :], "not_admitted"))
            elif kind != "admit":
                apply(kind, [int(block) for block in blocks], last, in_ram, has_rule)
        device.serve(path)
    return reasons


def split_at_hit(lines: list[list[str]]) -> tuple[list[list[str]], int, list[list[str]]]:
    (at,) = (number for number, words in enumerate(lines) if words[0] == "hit")
    return lines[:at], int(lines[at][1]) + int(lines[at][2]), lines[at + 1 :]


def apply(kind: str, blocks: list[int], last: dict[int, str], in_ram: set[int], has_rule: bool) -> None:
    if kind == "store":
        in_ram.update(blocks)
        last.update(dict.fromkeys(blocks, "stored"))
        return
    in_ram.difference_update(blocks)
    refused = "not_admitted" if has_rule else "refused"
    names = {"evict": "evicted", "damaged": "damaged", "refuse": refused, "drop": "no_room"}
    last.update(dict.fromkeys(blocks, names[kind]))


def reasons_of(
    requests: list[list[int]], number: int, hits: int, last: dict[int, str], here: set[int]
) -> list[str]:
    requested_before = {block for other in requests[:number] for block in other}
    reasons = []
    for block in requests[number][hits:]:
        if block in here:
            reasons.append("behind_a_gap")
        elif block in requested_before:
            reasons.append(last.get(block, "not_offered"))
        else:
            reasons.append(first_use(requests, number))
    return reasons


def first_use(requests: list[list[int]], number: int) -> str:
    earlier, path = requests[:number], requests[number]
    known = max((common(path, other) for other in earlier), default=0)
    if known == 0:
        return "new_prompt"
    followers = {other[known] for other in requests if known < len(other) and common(path, other) >= known}
    is_shared = len(followers) > 8
    origin = next(other for other in earlier if common(path, other) == known)
    if len(origin) == known and not is_shared:
        return "continues"
    if not any(common(path, other) == known < len(other) for other in earlier):
        return "continues"
    return "after_shared_prompt" if is_shared else "prefix_differs"


def common(path: list[int], other: list[int]) -> int:
    length = 0
    for block, other_block in zip(path, other, strict=False):
        if block != other_block:
            break
        length += 1
    return length
