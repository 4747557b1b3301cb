"""What an admission rule is: the gate in front of a cache."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Annotated, ClassVar, TypeAlias

from kvoffload.plugins import Registry
from kvoffload.structures.jit import BoolArray
from kvoffload.structures.keys import Keys


class Admission(ABC):
    """Decides which of the blocks that are offered may enter. Composes with every policy.

    One instance serves one manager, on the manager's thread. The manager tells it of every block of a
    request once (`count`), when the request touches it, offers it or finishes, and asks `admit` before
    a store.

    Attributes:
        name: what users type.
        good_for: where it is worth trying, in a line.
        paper: where it was published.
        key_bytes: the one length of keys that it understands; None for any.
    """

    name: ClassVar[str]
    good_for: ClassVar[str] = ""
    paper: ClassVar[str] = ""
    key_bytes: int | None = None

    @classmethod
    def for_cache(cls, key_bytes: int, capacity_blocks: int) -> Admission | None:
        """The rule for one cache, with the parameters of the class; None where it would admit every block.

        Args:
            key_bytes: length of the cache's keys.
            capacity_blocks: its slots, for rules whose memory grows with the cache.
        """
        return cls()

    @abstractmethod
    def count(self, keys: Keys) -> None:
        """One request referred to these blocks, resident or not; in prefix order, each once a request."""

    def refresh(self, keys: Keys) -> None:  # noqa: B027  (most rules have nothing to order)
        """A request that was counted in several pieces has finished; `keys` is its whole path.

        For rules that forget: what they remember of the path is in order again, the head last to go.
        """

    @abstractmethod
    def admit(self, keys: Keys) -> BoolArray:
        """Which of the absent blocks `keys` may enter: shape ``(len(keys),)``, bool."""

    def leading(self, keys: Keys) -> int:
        """How many of a prefix's absent blocks, from the first on, may enter.

        A block behind one that was refused could not be reached.
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
"""What is used if the user says nothing."""


def create_admission(
    rule: str | type[Admission] | Admission | None, key_bytes: int, capacity_blocks: int
) -> Admission | None:
    """The rule for one cache: a name with parameters, a class, or a rule, which is passed through.

    None: every block is admitted. Raises `ConfigError`.
    """
    if rule is None or isinstance(rule, Admission):
        return rule
    return ADMISSIONS.find(rule).for_cache(key_bytes, capacity_blocks)
