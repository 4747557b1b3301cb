"""Our logger inside vLLM, and how often it may say the same."""

from __future__ import annotations

import logging

logger = logging.getLogger("vllm.kvoffload")


def is_worth_a_line(count: int) -> bool:
    """Whether the `count`-th of a kind of failure is logged: the first, second, fourth, eighth and so on.

    A broken medium fails at each step; the log has to stay readable, and the counters tell the rest.
    """
    return count & (count - 1) == 0
