"""Persistence of a server: whether it saves its contents to a disk.

After a crash such a server restores blocks from before a reset. `tier ping` and the engines ask with the same
commands and judge the answers with the same function.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from kvoffload.tiers.shared.batches import Batch
from kvoffload.tiers.valkey.resp import Answer, Connection, command

QUESTIONS = (
    command(b"INFO", b"persistence"),
    command(b"CONFIG", b"GET", b"save"),
    command(b"CONFIG", b"GET", b"appendonly"),
)


class Persistence(Enum):
    """Whether a server saves."""

    OFF = "no"
    ON = "yes"
    UNKNOWN = "not known"


@dataclass(eq=False, kw_only=True)
class PersistenceQuestion(Batch):
    """Asks a server whether it saves. A user without the right to ask gets no answer, which is no failure.

    Attributes:
        persistence: the answer. reasons: the settings that turn persistence on: ``save "3600 1"``.
    """

    persistence: Persistence = Persistence.UNKNOWN
    reasons: list[str] = field(default_factory=list)

    def run(self, connection: Connection) -> None:
        connection.send(QUESTIONS, self.deadline)
        info, *pairs = [connection.answer(self.deadline) for _ in QUESTIONS]
        settings = {name: value for some in pairs for name, value in pairs_of(some).items()}
        self.persistence, reasons = persistence_of(facts_of(info), settings)
        self.reasons = [connection.shown(reason) for reason in reasons]


def persistence_of(facts: Mapping[str, str], settings: Mapping[str, str]) -> tuple[Persistence, list[str]]:
    """Whether a server saves, and the settings that make it: text of the server, not yet printable.

    Args:
        facts: of ``INFO``. settings: of ``CONFIG GET``. Either is empty if this user may not ask.
    """
    reasons = []
    if settings.get("save"):
        reasons.append(f'save "{settings["save"]}"')
    elif "save" not in settings and facts.get("rdb_saves", "0") != "0":
        reasons.append(f"rdb_saves {facts['rdb_saves']}")
    if facts.get("aof_enabled") == "1" or settings.get("appendonly") == "yes":
        reasons.append("appendonly yes")
    if reasons:
        return Persistence.ON, reasons
    knows_aof = "aof_enabled" in facts or "appendonly" in settings
    return (Persistence.OFF if "save" in settings and knows_aof else Persistence.UNKNOWN), []


def facts_of(answer: Answer) -> dict[str, str]:
    """The fields of ``INFO``; empty if this user may not ask."""
    text = answer.decode(errors="replace") if isinstance(answer, bytes) else ""
    lines = [line.partition(":") for line in text.split("\r\n") if ":" in line]
    return {name: value for name, _, value in lines}


def pairs_of(answer: Answer) -> dict[str, str]:
    """The settings of ``CONFIG GET``; empty if this user may not ask."""
    if not isinstance(answer, list):
        return {}
    words = [word.decode(errors="replace") if isinstance(word, bytes) else "" for word in answer]
    return dict(zip(words[::2], words[1::2], strict=False))
