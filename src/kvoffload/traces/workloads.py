"""Parameters of generated workloads, and built-in presets that resemble recordings.

`traces.sessions` generates the requests. docs/workloads.md compares the presets with recordings.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

from kvoffload.errors import ConfigError


class LogNormal(NamedTuple):
    """A log-normal distribution. Two thirds of its values are within a factor ``e**sigma`` of the median."""

    median: float
    sigma: float


_ONE_TOKEN = LogNormal(1, 0)
_AT_LEAST_ONE = {"sessions", "turns", "shared_prompts", "sub_agent_turns", "block_tokens"}


@dataclass(frozen=True)
class Workload:
    """Behaviour of the users of an LLM server. Equal parameters give equal traces on every machine.

    A *session* is a conversation. Its first request consists of a shared prompt, documents (if any) and a
    first message. Each further request (turn) appends the last answer and a new message. Sessions begin at
    uniformly random times within ``sessions / sessions_per_minute`` minutes, and run to their end.

    Attributes:
        name: name of the trace, for reports.
        sessions: number of conversations, without sub-agents.
        sessions_per_minute: the load. With twice this number, the same sessions begin in half the time.
        turns: mean number of requests of a session, without sub-agents.
        turns_shape: shape of the distribution of turns, a number above 1. With 2, a few sessions are very
            long. With 1000, the probability that a session ends is nearly the same after each turn. The
            larger the number is, the less the lengths of sessions differ.
        think_time_s: time from a request to the session's next request. It includes the time for the answer,
            for tools and for the user.
        shared_prompts: number of system prompts; the i-th is chosen with a probability proportional to 1/i.
        shared_prompt_tokens: length of a shared prompt.
        first_tokens: length of the first message.
        turn_tokens: length of a later message, including tool output.
        answer_tokens: length of an answer.
        documents: number of documents; the i-th is chosen with a probability proportional to 1/i.
        documents_per_session: number of documents between the shared prompt and the first message.
        document_tokens: length of a document.
        fork_share: share of turns that return to an earlier turn (edit, retry) and drop later turns.
        sub_agent_share: share of turns that wait for a sub-agent. A sub-agent is a separate session with its
            own shared prompt.
        sub_agent_turns: mean number of requests of a sub-agent.
        context_limit_tokens: length of the longest context. A longer context is *compacted*, that is,
            replaced by the shared prompt and a summary.
        summary_tokens: length of a summary.
        block_tokens: tokens in one block.
        seed: seed of the random numbers.
    """

    name: str
    sessions: int
    sessions_per_minute: float
    turns: float
    turns_shape: float
    think_time_s: LogNormal
    shared_prompts: int
    shared_prompt_tokens: int
    first_tokens: LogNormal
    turn_tokens: LogNormal
    answer_tokens: LogNormal
    documents: int = 0
    documents_per_session: int = 0
    document_tokens: LogNormal = _ONE_TOKEN
    fork_share: float = 0.0
    sub_agent_share: float = 0.0
    sub_agent_turns: float = 1.0
    context_limit_tokens: int = 128_000
    summary_tokens: LogNormal = _ONE_TOKEN
    block_tokens: int = 512
    seed: int = 0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, LogNormal):
                if not (0 < value.median < 1e9 and 0 <= value.sigma <= 4):
                    raise ConfigError(field.name, tuple(value), "allowed: median above 0, sigma from 0 to 4")
            elif field.name.endswith("_share") and not 0 <= value <= 0.5:
                raise ConfigError(field.name, value, "allowed: 0 to 0.5")
            elif field.name in _AT_LEAST_ONE and not 1 <= value < 1e9:
                raise ConfigError(field.name, value, "allowed: at least 1 and below 1e9")
            elif not isinstance(value, str) and not 0 <= value < 1e9:
                raise ConfigError(field.name, value, "allowed: at least 0 and below 1e9")
        if self.sessions_per_minute == 0:
            raise ConfigError("sessions_per_minute", 0, "allowed: above 0")
        if self.turns_shape <= 1:
            raise ConfigError("turns_shape", self.turns_shape, "allowed: above 1")
        if self.documents_per_session > self.documents:
            raise ConfigError(
                "documents_per_session", self.documents_per_session, "allowed: at most `documents`"
            )


_CHAT = Workload(
    name="chat",
    sessions=1_300,
    sessions_per_minute=37,
    turns=1.55,
    turns_shape=4,
    think_time_s=LogNormal(140, 1.0),
    shared_prompts=1,
    shared_prompt_tokens=850,
    first_tokens=LogNormal(5_500, 1.15),
    turn_tokens=LogNormal(180, 2.0),
    answer_tokens=LogNormal(280, 0.7),
    summary_tokens=LogNormal(4_000, 0.5),
)

_AGENT = Workload(
    name="agent",
    sessions=40,
    sessions_per_minute=0.22,
    turns=55,
    turns_shape=1000,
    think_time_s=LogNormal(14, 1.6),
    shared_prompts=6,
    shared_prompt_tokens=6_000,
    first_tokens=LogNormal(2_000, 1.5),
    turn_tokens=LogNormal(250, 1.5),
    answer_tokens=LogNormal(100, 0.8),
    fork_share=0.02,
    sub_agent_share=0.02,
    sub_agent_turns=8,
    context_limit_tokens=60_000,
    summary_tokens=LogNormal(16_000, 0.5),
)

_RAG = Workload(
    name="rag",
    sessions=2_000,
    sessions_per_minute=60,
    turns=1.25,
    turns_shape=1000,
    think_time_s=LogNormal(45, 1.0),
    shared_prompts=4,
    shared_prompt_tokens=1_600,
    first_tokens=LogNormal(120, 0.8),
    turn_tokens=LogNormal(80, 0.8),
    answer_tokens=LogNormal(250, 0.6),
    documents=600,
    documents_per_session=2,
    document_tokens=LogNormal(4_000, 0.7),
    summary_tokens=LogNormal(4_000, 0.5),
)

BUILTIN = {workload.name: workload for workload in (_AGENT, _CHAT, _RAG)}
"""The presets by name, sorted."""


def builtin(name: str, **overrides: Any) -> Workload:
    """Return the preset `name`, with some parameters replaced. Raises `ConfigError` for unknown names."""
    if name not in BUILTIN:
        raise ConfigError("workload", name, f"allowed: {', '.join(BUILTIN)}")
    known = [field.name for field in fields(Workload) if field.name != "name"]
    for key in overrides:
        if key not in known:
            raise ConfigError("workload parameter", key, f"allowed: {', '.join(known)}")
    return replace(BUILTIN[name], **overrides)
