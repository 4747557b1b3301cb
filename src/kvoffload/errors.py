"""The exceptions of kvoffload. Everything that the *world* does wrong is a result, not one of these."""

from __future__ import annotations

from collections.abc import Sequence


class KVOffloadError(Exception):
    """Base of every error that kvoffload raises on purpose."""


class ConfigError(KVOffloadError, ValueError):
    """The user asked for something impossible; the message names field, value and what is allowed."""

    def __init__(self, field: str, value: object, allowed: str) -> None:
        self.field, self.value, self.allowed = field, value, allowed
        super().__init__(f"{field}: {value!r} is not possible; {allowed}")


class CombinedConfigError(ConfigError):
    """Several impossible things, told at once: one line for each. `problems` has them one by one."""

    def __init__(self, where: str, problems: Sequence[ConfigError]) -> None:
        first = problems[0]
        super().__init__(first.field, first.value, first.allowed)
        self.problems = tuple(problems)
        self.args = ("\n  ".join([f"{where}:", *(str(problem) for problem in problems)]),)


class MisuseError(KVOffloadError, RuntimeError):
    """The caller broke the life-cycle (completed twice, loaded what is absent). Nothing has changed."""


class PolicyError(KVOffloadError, RuntimeError):
    """An eviction policy broke its contract (named a pinned slot, too few victims, a slot twice)."""


class TraceError(KVOffloadError, ValueError):
    """A trace cannot be read; the message names file, line, field and reason."""


class SweepError(KVOffloadError, RuntimeError):
    """A sweep could not be finished; the message names the row or the worker. What is done is kept."""


class TierError(KVOffloadError, RuntimeError):
    """A tier behind RAM does not answer, and who asked cannot go on without it."""
