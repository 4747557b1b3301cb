"""Persistence of a server. After a crash, a persistent server may restore blocks from before a reset."""

from __future__ import annotations

from collections.abc import Mapping

from kvoffload.tiers.shared.exchanges import Persistence, PersistenceQuestion
from kvoffload.tiers.valkey.resp import Answer, Connection, command

QUESTIONS = (
    command(b"INFO", b"persistence"),
    command(b"CONFIG", b"GET", b"save"),
    command(b"CONFIG", b"GET", b"appendonly"),
)


def ask_persistence(connection: Connection, question: PersistenceQuestion) -> None:
    """Ask a server about its persistence, and write the reply into `question`."""
    connection.send(QUESTIONS, question.deadline)
    info_reply, *config_replies = [connection.answer(question.deadline) for _ in QUESTIONS]
    settings = {name: value for reply in config_replies for name, value in pairs_of(reply).items()}
    question.persistence, reasons = persistence_of(facts_of(info_reply), settings)
    question.reasons = [connection.shown(reason) for reason in reasons]


def persistence_of(facts: Mapping[str, str], settings: Mapping[str, str]) -> tuple[Persistence, list[str]]:
    """Return the state of a server's persistence, and the facts that show that it is on, as unescaped text.

    Args:
        facts: reply to ``INFO``; empty if the user lacks the permission.
        settings: reply to ``CONFIG GET``; empty if the user lacks the permission.
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
    """Parse the reply to ``INFO`` into a dictionary, which is empty if the reply is an error."""
    text = answer.decode(errors="replace") if isinstance(answer, bytes) else ""
    lines = [line.partition(":") for line in text.split("\r\n") if ":" in line]
    return {name: value for name, _, value in lines}


def pairs_of(answer: Answer) -> dict[str, str]:
    """Parse the reply to ``CONFIG GET`` into a dictionary, which is empty if the reply is an error."""
    if not isinstance(answer, list):
        return {}
    words = [word.decode(errors="replace") if isinstance(word, bytes) else "" for word in answer]
    return dict(zip(words[::2], words[1::2], strict=False))
