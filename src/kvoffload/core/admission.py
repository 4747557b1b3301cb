"""What an admission rule is. It counts keys and decides which may enter; it knows no slots."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Annotated, ClassVar, TypeAlias

from kvoffload.settings.registry import Registry
from kvoffload.structures.jit import BoolArray
from kvoffload.structures.keys import Keys


class Admission(ABC):
    """Decides which of the offered blocks may enter. Composes with every policy.

    One instance serves one manager, on the manager's thread. The manager reports every block of a request
    once (`count`), when the request touches it, offers it or finishes, and calls `admit` before a store.

    Attributes:
        name: what users type.
        good_for: where it is worth trying, in one line.
        paper: where it was published.
        key_bytes: the one length of keys that it accepts; None for any.
    """

    name: ClassVar[str]
    good_for: ClassVar[str] = ""
    paper: ClassVar[str] = ""
    key_bytes: int | None = None

    @classmethod
    def for_cache(cls, key_bytes: int, capacity_blocks: int) -> Admission | None:
        """The rule for one cache, with the parameters of the class; None if it would admit every block.

        Args:
            key_bytes: length of the cache's keys.
            capacity_blocks: number of its slots, for rules whose memory grows with the cache.
        """
        return cls()

    @abstractmethod
    def count(self, keys: Keys) -> None:
        """One request refers to these blocks, resident or not; in prefix order, each once a request."""

    def refresh(self, keys: Keys) -> None:  # noqa: B027  (most rules have nothing to order)
        """A request that was counted in several parts has finished; `keys` is its whole path.

        For rules that forget: they put what they remember of the path in order again, so that its head is
        forgotten last.
        """

    @abstractmethod
    def admit(self, keys: Keys) -> BoolArray:
        """Which of the absent blocks `keys` may enter: shape ``(len(keys),)``, bool."""

    def leading(self, keys: Keys) -> int:
        """How many of a prefix's absent blocks, from the first on, may enter.

        A block after a refused one could not be reached.
        """
        allowed = self.admit(keys)
        return len(allowed) if allowed.all() else int(allowed.argmin())

    @abstractmethod
    def reset(self) -> None:
        """Forget everything that was counted."""


ADMISSIONS: Registry[Admission] = Registry("admission", Admission, "kvoffload.admission")

AdmissionName: TypeAlias = Annotated[str, ADMISSIONS]
"""What users type for an admission rule."""

DEFAULT_ADMISSION = "all"
"""The rule if the user names none."""


def create_admission(
    rule: str | type[Admission] | Admission | None, key_bytes: int, capacity_blocks: int
) -> Admission | None:
    """The rule for one cache, from a name with parameters, a class, or a rule, which is returned as it is.

    Returns None if every block is admitted. Raises `ConfigError`.
    """
    if rule is None or isinstance(rule, Admission):
        return rule
    return ADMISSIONS.find(rule).for_cache(key_bytes, capacity_blocks)
