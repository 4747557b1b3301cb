"""Value of hints for `hazard` on recordings, and a check of its promise.

    python bench/policies.py TRACES [CAPACITY ...]        takes minutes; default capacities: 1% 2% 5%

Replays LRU and `hazard` for each recording, capacity and side: on compute, on compute behind a device of the
same size, and as a victim tier of that device. Hints of `hazard`: none; the ends of requests; a label, when a
request begins or ends; a label that is random or always wrong; a queue of waiting requests.

The label is one bit per request: "the next turn of the session comes within 30 s", right 9 times in 10. It is
computed from the rest of the recording: it shows the value of a label of this quality, not that engines have
one. A cell of the tables: the hit ratio; its lead over LRU with the same hints, in points, with the interval
of a paired bootstrap; writes per reference. Exits with 1 if `hazard` is below LRU by more than its promise.
"""

from __future__ import annotations

import json
import lzma
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvoffload.core.hints import Hints
from kvoffload.core.plans import ON_COMPUTE, ON_DEVICE_EVICTION
from kvoffload.policies.hazard.policy import Hazard, promised
from kvoffload.replay.config import ReplayConfig
from kvoffload.replay.replay import Replay
from kvoffload.settings.read import parse_capacity
from kvoffload.sweep.bootstrap import Resamples, window_sums
from kvoffload.traces.format import read_trace
from kvoffload.traces.trace import Trace, TraceHints

RECORDINGS = ("mooncake_conversation/conversation_first60.jsonl", "agentic_coding/agentic_3h.jsonl.xz")
SIDES = {"alone": (ON_COMPUTE, 0), "device 1x": (ON_COMPUTE, 1), "victim, device 1x": (ON_DEVICE_EVICTION, 1)}
TOKENS_PER_S, QUEUE, SOON_MS, RIGHT, SEED = 62.5, 32, 30_000, 0.9, 7


@dataclass(frozen=True)
class Knowing:
    """Hints about requests; `label` is a kind of `Recording.with_labels`."""

    words: str
    ends: bool = False
    label: str = ""
    queue: int = 0


KNOWLEDGE = (
    Knowing("nothing"),
    Knowing("ends", ends=True),
    Knowing("label at once", label="told"),
    Knowing("ends, label", ends=True, label="told"),
    Knowing("ends, label that means nothing", ends=True, label="meaningless"),
    Knowing("ends, label that is always wrong", ends=True, label="wrong"),
    Knowing("queue", queue=QUEUE),
    Knowing("queue, ends, label", ends=True, label="told", queue=QUEUE),
)


class Recording:
    """A trace with one bit per request: the session's next turn comes soon after the request's end."""

    def __init__(self, path: Path) -> None:
        self.trace = read_trace(path)
        self._comes_soon = _comes_soon(path, self.trace)

    def can(self, known: Knowing) -> bool:
        return not known.label or self._comes_soon is not None

    def with_labels(self, kind: str) -> Trace:
        if not kind:
            return self.trace
        dice = random.Random(SEED)
        assert self._comes_soon is not None
        soon = self._comes_soon.tolist()
        bits = {
            "told": [bit if dice.random() < RIGHT else not bit for bit in soon],
            "meaningless": [dice.random() < 0.5 for _ in soon],
            "wrong": [not bit for bit in soon],
        }[kind]
        return replace(
            self.trace, hints=TraceHints.of(Hints("tool_calls" if bit else "stop") for bit in bits)
        )


def _comes_soon(path: Path, trace: Trace) -> npt.NDArray[np.bool_] | None:
    """Compute the bit of each request; None if the recording has no sessions."""
    with lzma.open(path) if path.suffix == ".xz" else path.open("rb") as file:
        lines = [json.loads(line) for line in file]
    if "session" not in lines[0]:
        return None
    following: dict[Any, float] = {}
    next_ms = np.full(len(lines), np.inf)
    for number in range(len(lines) - 1, -1, -1):
        session = lines[number]["session"]
        next_ms[number] = following.get(session, np.inf)
        following[session] = lines[number]["timestamp"]
    ends_ms = trace.timestamps_ms + trace.output_tokens * (1000 / TOKENS_PER_S)
    return next_ms - ends_ms <= SOON_MS


class Cells:
    """Replays of one recording at one capacity and side."""

    def __init__(self, recording: Recording, capacity: str, side: str) -> None:
        trace, (self._store, device) = recording.trace, SIDES[side]
        self._recording = recording
        self._blocks = parse_capacity("capacity", capacity, None, trace.unique_blocks)
        self._device = device * self._blocks
        self._draws = Resamples(window_sums(np.diff(trace.offsets)), seed=SEED)
        self._run = lru_cache(maxsize=None)(self._replay)

    def _replay(self, policy: str, ends: bool, label: str, queue: int) -> tuple[Any, Any]:
        config = ReplayConfig(self._blocks, policy, "all", self._device, self._store)
        config = replace(config, decode_tokens_per_s=TOKENS_PER_S if ends else 0, queue_requests=queue)
        replay = Replay(self._recording.with_labels(label), config)
        report = replay.run()
        return report, window_sums(replay.hits_per_request)

    def compare(self, known: Knowing) -> tuple[float, str]:
        """Return the lead over LRU, and the text of the cell."""
        report, hits = self._run("hazard", known.ends, known.label, known.queue)
        lru, lru_hits = self._run("lru", known.ends, "", known.queue)
        lead, interval = (
            report.prefix_hit_ratio - lru.prefix_hit_ratio,
            self._draws.difference(hits, lru_hits),
        )
        bounds = f" ({interval.low * 100:+.1f} to {interval.high * 100:+.1f})" if interval else ""
        return lead, f"{report.prefix_hit_ratio:.4f}, {lead * 100:+.1f}{bounds}, {report.writes_per_ref:.2f}"

    def of_lru(self) -> str:
        report, _ = self._run("lru", False, "", 0)
        optimum = f"optimum {report.optimum_hit_ratio:.4f}"
        return f"{report.prefix_hit_ratio:.4f}, {optimum}, {report.writes_per_ref:.2f}"


def rows(recording: Recording, capacities: list[str], broken: list[str]) -> Iterator[list[str]]:
    places = [(capacity, side) for side in SIDES for capacity in capacities]
    yield ["told", *(f"{capacity}, {side}" for capacity, side in places)]
    yield ["---"] * (len(places) + 1)
    cells = [Cells(recording, capacity, side) for capacity, side in places]
    yield ["`lru`", *(cell.of_lru() for cell in cells)]
    for known in filter(recording.can, KNOWLEDGE):
        compared = [cell.compare(known) for cell in cells]
        yield [known.words, *(text for _, text in compared)]
        broken += [
            f"{recording.trace.name}, {capacity}, {side}, told {known.words}: {lead * 100:+.2f} points"
            for (capacity, side), (lead, _) in zip(places, compared, strict=True)
            if lead < -promised(Hazard.promise, Hazard.write_cost)
        ]


def main(traces: Path, capacities: list[str]) -> int:
    print(f"ends: {TOKENS_PER_S:g} tokens/s; queue: {QUEUE} requests; seed {SEED}", flush=True)
    broken: list[str] = []
    for name in RECORDINGS:
        recording = Recording(traces / name)
        print(f"\n### {recording.trace.name}\n")
        for row in rows(recording, capacities, broken):
            print(f"| {' | '.join(row)} |", flush=True)
    for line in broken:
        print(f"PROMISE BROKEN: {line}")
    return 1 if broken else 0


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:] or ["1%", "2%", "5%"]))
