"""Random mixed traffic from a seed, for tests that `hazard` is never much worse than LRU."""

from __future__ import annotations

import random

from kvoffload.traces.sessions import generate
from kvoffload.traces.trace import Trace
from kvoffload.traces.workloads import LogNormal, Workload

REFERENCES = 110_000


def mixed(seed: int) -> Trace:
    """Generate traffic of mixed sessions from a seed."""
    draw = random.Random(seed)

    def around(low: float, high: float, sigma: float) -> LogNormal:
        return LogNormal(round(low * (high / low) ** draw.random()), round(draw.uniform(0, sigma), 2))

    def traffic(sessions: int) -> Trace:
        return generate(Workload(sessions=sessions, **parameters))  # type: ignore[arg-type]

    parameters = {
        "name": f"mixed-{seed}",
        "sessions_per_minute": 10 ** draw.uniform(0, 2),
        "turns": round(draw.uniform(1.5, 25), 1),
        "turns_shape": draw.choice([2, 3, 1000]),
        "think_time_s": around(5, 600, 1.8),
        "shared_prompts": draw.choice([1, 4, 30]),
        "shared_prompt_tokens": draw.choice([0, 512, 4096]),
        "first_tokens": around(300, 20_000, 1.5),
        "turn_tokens": around(50, 4000, 1.3),
        "answer_tokens": around(50, 1500, 1.0),
        "fork_share": draw.choice([0, 0.1]),
        "seed": seed,
    }
    if draw.random() < 0.5:
        parameters["documents"] = draw.choice([20, 200, 2000])
        parameters["documents_per_session"] = draw.choice([1, 3])
        parameters["document_tokens"] = around(1000, 10_000, 0.8)
    if draw.random() < 0.3:
        parameters["sub_agent_share"], parameters["sub_agent_turns"] = 0.1, 5
        parameters["context_limit_tokens"], parameters["summary_tokens"] = 32_000, LogNormal(2000, 0.5)
    # Estimate the necessary number of sessions from a sample of 20.
    sessions = max(20, round(20 * REFERENCES / max(1, traffic(20).block_refs)))
    too_few, too_many = 0, 1 << 20
    for _ in range(20):
        trace = traffic(sessions)
        if 100_000 <= trace.block_refs <= 200_000:
            return trace
        if trace.block_refs < 100_000:
            too_few = sessions
        else:
            too_many = sessions
        sessions = round(sessions * 140_000 / trace.block_refs)
        if not too_few < sessions < too_many:
            sessions = (too_few + too_many) // 2
    raise AssertionError(f"seed {seed}: no number of sessions gives 100,000 to 200,000 references")
