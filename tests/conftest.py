"""Fixtures that several test files share."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("kvoffload", deadline=None, print_blob=True)
settings.load_profile("kvoffload")

RECORDINGS = {
    "conversation_first60": "mooncake_conversation/conversation_first60.jsonl",
    "agentic_12h": "agentic_coding/agentic_12h.jsonl.xz",
    "agentic_3h": "agentic_coding/agentic_3h.jsonl.xz",
    "P3": "arc_classic/P3.lis.zst",
    "OLTP": "arc_classic/OLTP.lis.zst",
}


def recordings_root() -> Path:
    """Where recorded traces are: ``$KVOFFLOAD_TRACES``, or ``shared/traces`` beside the checkout."""
    beside = Path(__file__).resolve().parents[2] / "shared" / "traces"
    return Path(os.environ.get("KVOFFLOAD_TRACES", beside))


@pytest.fixture(scope="session")
def recorded_trace_path() -> Callable[[str], Path]:
    """A function from a recording's name to its file; skips the test, with the reason, if it is not there."""

    def find(name: str) -> Path:
        path = recordings_root() / RECORDINGS[name]
        if not path.exists():
            pytest.skip(f"recorded trace {name} is not in {recordings_root()} (set KVOFFLOAD_TRACES)")
        return path

    return find
