"""Draws docs/images: the cache content by policy, and hits against writes.

The pictures of docs/policies.md are replays of the built-in workload `chat`. Colours show the next use of a
block, taken from the rest of the trace, which no policy knows. Equal input gives equal bytes with one version
of matplotlib (`pip install --group pictures`).

    python bench/pictures.py                    one picture for each policy, and one for the optimum
    python bench/pictures.py --readme           hits-over-ram.svg, from docs/data/sweep.csv
    python bench/pictures.py TRACE CAPACITY     the policies, and hits-and-writes.svg of a recording (2%)
"""

from __future__ import annotations

import csv
import heapq
import io
import itertools
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.lines
import matplotlib.patches
import numpy as np
import numpy.typing as npt
from matplotlib.figure import Figure

from kvoffload.core.policy import POLICIES
from kvoffload.replay.config import ReplayConfig
from kvoffload.replay.optimum import optimum
from kvoffload.replay.replay import Replay
from kvoffload.replay.trace_keys import TraceKeys
from kvoffload.settings.read import parse_capacity
from kvoffload.traces.sources import load_trace
from kvoffload.traces.trace import Trace

DOCS = Path(__file__).resolve().parent.parent / "docs"
IMAGES, SWEEP = DOCS / "images", DOCS / "data" / "sweep.csv"
README_POLICIES = (("lru", "#8b949e"), ("arc", "#54aeff"), ("hazard", "#2da44e"))
WORKLOAD, SHARE = "chat", 0.03
SOON_MINUTES = 3.0
WINDOW_REQUESTS = 200
TOP_RATIO = 0.5

# For light and dark themes: saturated areas, and a grey that is legible on white and on black.
INK, OPTIMUM = "#808891", "#d29922"
KINDS = (
    ("used again soon", "#2da44e"),
    ("used again later", "#54aeff"),
    ("used again, but its prefix is gone", "#bf5af2"),
    ("never used again", "#8b949e66"),
)
SOON, LATER, CUT_OFF, NEVER = range(len(KINDS))
WRITE_COSTS = (-0.5, -0.2, 0, 0.25, 0.5, 1, 2, 3)
GATES = ("all", "reuse:2", "tinylfu")

_DECIMALS = re.compile(r"-?\d+\.\d{2,}")

Counts = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Run:
    """Replay of one policy: sampled cache content, and hits of every request."""

    minutes: npt.NDArray[np.float64]
    content: npt.NDArray[np.float64]
    hits: Counts
    title: str


class Future:
    """Future of the blocks of a trace: the next use, and the preceding block of the prefix."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        of_request = np.repeat(np.arange(trace.requests), np.diff(trace.offsets))
        self._uses = np.sort(trace.refs.astype(np.int64) * trace.requests + of_request)
        self.minutes = (trace.timestamps_ms - trace.timestamps_ms[0]) / 60_000
        self._parent = np.full(trace.unique_blocks, -1, np.int64)
        inner = np.setdiff1d(np.arange(trace.block_refs), trace.offsets[:-1])
        self._parent[trace.refs[inner]] = trace.refs[inner - 1]

    def next_use(self, codes: Counts, request: int) -> Counts:
        """Find the first request after `request` that uses each block; -1 for none."""
        at = np.searchsorted(self._uses, codes * self.trace.requests + request, side="right")
        use = self._uses[np.minimum(at, len(self._uses) - 1)]
        exists = (at < len(self._uses)) & (use // self.trace.requests == codes)
        return np.where(exists, use % self.trace.requests, -1)

    def kinds(self, resident: npt.NDArray[np.bool_], request: int) -> npt.NDArray[np.float64]:
        """Count the resident blocks of each of `KINDS` after `request`."""
        codes = np.flatnonzero(resident)
        following = self.next_use(codes, request)
        kind = np.where(self.minutes[following] - self.minutes[request] <= SOON_MINUTES, SOON, LATER)
        # Codes are in order of first appearance, so a block's parent has a lower code.
        whole = resident.copy()
        for code in codes.tolist():
            parent = self._parent[code]
            whole[code] = parent < 0 or whole[parent]
        kind[~whole[codes]] = CUT_OFF
        kind[following < 0] = NEVER
        return np.bincount(kind, minlength=len(KINDS)).astype(np.float64)


def run_policy(future: Future, policy: str, capacity_blocks: int) -> Run:
    """Replay a policy, and sample the cache content."""
    trace = future.trace
    replay = Replay(trace, ReplayConfig(capacity_blocks, policy))
    every_key = TraceKeys(trace).of_blocks(np.arange(trace.unique_blocks, dtype=np.int32))
    minutes, content = [], []

    def look(requests: int) -> None:
        minutes.append(float(future.minutes[requests - 1]))
        content.append(future.kinds(replay.manager.contains(every_key), requests - 1))

    report = replay.run(look)
    title = f"{policy}: hits {report.prefix_hit_ratio:.3f}, writes {report.writes_per_ref:.2f} per reference"
    hits = replay.hits_per_request.astype(np.int64)
    return Run(np.array(minutes), np.array(content) / capacity_blocks, hits, title)


def run_optimum(future: Future, capacity_blocks: int) -> Run:
    """Replay MIN with bypass in plain Python, and sample the cache content; must equal `replay.optimum`."""
    trace = future.trace
    heap: list[tuple[int, int, int]] = []
    next_of: dict[int, int] = {}
    minutes, content, hits, written = [], [], np.zeros(trace.requests, np.int64), 0
    step = max(1, trace.requests // 200)
    for request in range(trace.requests):
        codes = trace.refs[trace.offsets[request] : trace.offsets[request + 1]].astype(np.int64)
        here = {code for code in codes.tolist() if code in next_of}
        hits[request] = len(here)
        for code in here:
            del next_of[code]
        fresh = []
        for depth, following in enumerate(future.next_use(codes, request).tolist()):
            if following < 0:
                continue
            code = int(codes[depth])
            next_of[code] = following
            heapq.heappush(heap, (-following, -depth, code))
            fresh.append(code)
            while len(next_of) > capacity_blocks:
                when, _, last = heapq.heappop(heap)
                if next_of.get(last) == -when:
                    del next_of[last]
        written += sum(code in next_of and code not in here for code in fresh)
        if (request + 1) % step == 0:
            resident = np.zeros(trace.unique_blocks, np.bool_)
            resident[list(next_of)] = True
            minutes.append(float(future.minutes[request]))
            content.append(future.kinds(resident, request))
    best = optimum(trace, capacity_blocks)
    assert int(hits.sum()) == best.prefix_hit_blocks, "not the optimum"
    refs = trace.block_refs
    title = f"optimum, knowing the future: hits {hits.sum() / refs:.3f}, writes {written / refs:.2f}"
    return Run(np.array(minutes), np.array(content) / capacity_blocks, hits, title)


def sliding(future: Future, hits: Counts) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Compute the prefix-hit ratio of the last `WINDOW_REQUESTS` requests at a hundred times, in minutes."""
    ends = np.linspace(WINDOW_REQUESTS // 2, future.trace.requests, 100).astype(np.int64)
    starts = np.maximum(0, ends - WINDOW_REQUESTS)
    so_far = np.concatenate([[0], np.cumsum(hits)])
    refs = future.trace.offsets[ends] - future.trace.offsets[starts]
    return future.minutes[ends - 1], (so_far[ends] - so_far[starts]) / refs


def draw_run(future: Future, run: Run, lru: Run, best: Run) -> Figure:
    """Draw the cache content above, and hits over time below (optimum dashed, LRU dotted)."""
    figure = Figure(figsize=(7.2, 3.5))
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    thin = slice(None, None, 2)
    above.stackplot(
        run.minutes[thin], run.content[thin].T, colors=[colour for _, colour in KINDS], linewidth=0
    )
    above.set(ylim=(0, 1), ylabel="share of the cache")
    above.set_title(run.title, loc="left", fontsize=11, color=INK, fontweight="bold")
    below.plot(*sliding(future, best.hits), color=OPTIMUM, linestyle="--", linewidth=1.3)
    below.plot(*sliding(future, lru.hits), color=INK, linestyle=":", linewidth=1.6)
    if run is not best and run is not lru:
        below.plot(*sliding(future, run.hits), color=KINDS[SOON][1], linewidth=1.8)
    below.set(ylim=(0, TOP_RATIO), xlim=(0, future.minutes[-1]), xlabel="minutes", ylabel="hits")
    handles: list[Any] = [mpl.patches.Patch(color=colour, label=label) for label, colour in KINDS]
    handles.append(mpl.lines.Line2D([], [], color=OPTIMUM, linestyle="--", label="hits of the optimum"))
    handles.append(mpl.lines.Line2D([], [], color=INK, linestyle=":", label="hits of lru"))
    figure.legend(handles=handles, loc="lower center", ncols=3, frameon=False, fontsize=8, labelcolor=INK)
    for axes in (above, below):
        plain(axes)
    figure.subplots_adjust(left=0.09, right=0.985, top=0.92, bottom=0.25, hspace=0.12)
    return figure


def draw_hits_and_writes(trace: Trace, capacity_blocks: int) -> Figure:
    """Draw every policy with every gate as a dot, and hazard by `write_cost` as a line."""
    figure = Figure(figsize=(7.2, 4.4))
    axes = figure.subplots()

    def measure(policy: str, admission: str) -> tuple[float, float]:
        report = Replay(trace, ReplayConfig(capacity_blocks, policy, admission)).run()
        return report.writes_per_ref, report.prefix_hit_ratio

    dial = np.array([measure(f"hazard,write_cost={cost}", "all") for cost in WRITE_COSTS])
    axes.plot(
        *dial.T, color=KINDS[SOON][1], marker="o", markersize=4, linewidth=1.8, label="hazard, write_cost=F"
    )
    for cost, (writes, hits) in zip(WRITE_COSTS, dial, strict=True):
        axes.annotate(
            f"F={cost:g}",
            (writes, hits),
            (5, 4),
            textcoords="offset points",
            fontsize=7.5,
            color=KINDS[SOON][1],
        )
    for gate, marker, colour in zip(GATES, "osD", ("#54aeff", "#bf5af2", "#f0883e"), strict=True):
        names = [name for name in sorted(POLICIES.names()) if name != "hazard"]
        dots = np.array([measure(name, gate) for name in names])
        axes.scatter(
            dots[:, 0],
            dots[:, 1],
            color=colour,
            marker=marker,
            s=20,
            linewidths=0,
            label=f"other policies, {gate}",
        )
        labels = spread(dots[:, 1], 0.0019)
        for name, (writes, hits), height in zip(names, dots, labels, strict=True):
            is_right = gate != "all"
            axes.annotate(
                name, (writes, hits), (writes * (1.03 if is_right else 0.97), height), fontsize=7,
                color=colour, ha="left" if is_right else "right", va="center",
            )  # fmt: skip
    best = optimum(trace, capacity_blocks)
    top = best.prefix_hit_blocks / trace.block_refs
    axes.set(xscale="log", xlim=(0.05, 1.1), xlabel="blocks written per reference", ylabel="prefix-hit ratio")
    marks = (0.05, 0.1, 0.2, 0.5, 1)
    axes.set_xticks(marks, [f"{mark:g}" for mark in marks])
    axes.minorticks_off()
    axes.margins(y=0.08)
    axes.set_title(
        f"{trace.name}, {capacity_blocks:,} blocks (the optimum: {top:.3f} at "
        f"{best.blocks_written / trace.block_refs:.2f})",
        loc="left", fontsize=10, color=INK, fontweight="bold",
    )  # fmt: skip
    axes.legend(frameon=False, fontsize=8, labelcolor=INK, loc="lower left")
    plain(axes)
    figure.subplots_adjust(left=0.09, right=0.985, top=0.93, bottom=0.11)
    return figure


def draw_hits_over_ram() -> Figure:
    """Draw prefix hits of recorded chat over the size of RAM, for three policies and the optimum.

    Uses rows of docs/data/sweep.csv: recording conversation_first60, no device cache, every block admitted.
    A block is 512 tokens of Llama-3.1-8B, 64 MiB.
    """
    with SWEEP.open(newline="") as file:
        rows = [
            row
            for row in csv.DictReader(file)
            if (row["trace"], row["device"], row["admission"], row["store"], row["tiers"])
            == ("conversation_first60", "0", "all", "on-compute", "none")
        ]
    figure = Figure(figsize=(7.2, 3.0), layout="constrained")
    axes = figure.subplots()
    lines = [(policy, "prefix_hit_ratio", policy, color) for policy, color in README_POLICIES]
    for policy, column, label, color in [*lines, ("lru", "optimum_hit_ratio", "optimum", OPTIMUM)]:
        points = sorted(
            (int(row["capacity_blocks"]), float(row[column])) for row in rows if row["policy"] == policy
        )
        blocks, hits = zip(*points, strict=True)
        is_ours = label in ("hazard", "optimum")
        (line,) = axes.plot(blocks, [100 * hit for hit in hits], marker="o", ms=3.5, color=color, label=label)
        line.set_linewidth(2 if is_ours else 1.4)
        line.set_linestyle("--" if label == "optimum" else "-")
    axes.set_xscale("log")
    axes.set_xticks(blocks, [f"{count * 64 / 1024:,.0f} GiB" for count in blocks])
    axes.minorticks_off()
    axes.set_ylim(0)
    axes.set_xlabel("RAM for KV blocks (Llama-3.1-8B, 128 KiB a token)")
    axes.set_ylabel("% of prompt tokens not computed again")
    plain(axes)
    axes.legend(frameon=False, labelcolor=INK, fontsize=9, loc="lower right", reverse=True)
    return figure


def spread(heights: npt.NDArray[np.float64], least: float) -> Any:
    """Move heights apart that are closer than `least`, so that labels do not overlap."""
    order = np.argsort(heights, kind="stable")
    moved = heights.copy()
    for below, above in itertools.pairwise(order):
        moved[above] = max(moved[above], moved[below] + least)
    moved -= float((moved - heights).mean())
    return moved


def plain(axes: Any) -> None:
    """Draw the axes in grey, without box and background."""
    axes.patch.set_alpha(0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(INK)
    axes.tick_params(colors=INK, labelsize=8)
    axes.xaxis.label.set(color=INK, fontsize=9)
    axes.yaxis.label.set(color=INK, fontsize=9)


def _tenths(number: re.Match[str]) -> str:
    return f"{float(number[0]):.1f}"


def save(figure: Figure, name: str) -> None:
    """Write a picture without date, random names and fonts, rounded to tenths of a point."""
    text = io.StringIO()
    figure.savefig(text, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    short = re.sub(r' d="[^"]*"', lambda path: _DECIMALS.sub(_tenths, path[0]), text.getvalue())
    path = IMAGES / name
    path.write_text("\n".join(line.rstrip() for line in short.splitlines()) + "\n", encoding="utf-8")
    print(f"{path.name}: {path.stat().st_size / 1000:.0f} kB")


def main(arguments: list[str], say: Callable[[str], None] = print) -> None:
    mpl.rcParams.update({"svg.hashsalt": "kvoffload", "svg.fonttype": "none", "font.family": "sans-serif"})
    mpl.rcParams["font.sans-serif"] = ["DejaVu Sans", "Helvetica", "Arial"]
    IMAGES.mkdir(parents=True, exist_ok=True)
    if arguments == ["--readme"]:
        save(draw_hits_over_ram(), "hits-over-ram.svg")
        return
    trace = load_trace(WORKLOAD)
    capacity_blocks = int(trace.unique_blocks * SHARE)
    say(f"{WORKLOAD}, {capacity_blocks} blocks")
    future = Future(trace)
    best = run_optimum(future, capacity_blocks)
    lru = run_policy(future, "lru", capacity_blocks)
    save(draw_run(future, best, lru, best), "optimum.svg")
    for policy in POLICIES.names():
        run = lru if policy == "lru" else run_policy(future, policy, capacity_blocks)
        save(draw_run(future, run, lru, best), f"policy-{policy}.svg")
    if arguments:
        path, capacity = arguments
        recording = load_trace(path)
        blocks = parse_capacity("CAPACITY", capacity, 65_536, recording.unique_blocks)
        save(draw_hits_and_writes(recording, blocks), "hits-and-writes.svg")


if __name__ == "__main__":
    main(sys.argv[1:])
