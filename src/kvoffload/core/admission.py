"""The interface of an admission rule. A rule counts keys and admits blocks; it does not know slots."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Annotated, ClassVar, TypeAlias

from kvoffload.errors import ConfigError
from kvoffload.settings.registry import Registry
from kvoffload.structures.jit import BoolArray
from kvoffload.structures.keys import Keys


class Admission(ABC):
    """A rule that admits or refuses offered blocks. Every rule works with every policy.

    One instance serves one manager, on the manager's thread. The manager calls `count` once for each block of
    a request: when the request first touches or offers the block, or when the request finishes. The manager
    calls `admit` before a store.

    Attributes:
        name: the name in options.
        good_for: the workloads that profit, in one line.
        paper: the publication.
        key_bytes: the only accepted key length, in bytes; None if every length is accepted.
    """

    name: ClassVar[str]
    good_for: ClassVar[str] = ""
    paper: ClassVar[str] = ""
    key_bytes: int | None = None

    @classmethod
    def for_cache(cls, key_bytes: int, capacity_blocks: int) -> Admission | None:
        """Create the rule for one cache, with the parameters of the class.

        Returns None if the rule would admit every block.

        Args:
            key_bytes: key length of the cache.
            capacity_blocks: number of slots, for rules whose memory grows with the cache.
        """
        return cls()

    @abstractmethod
    def count(self, keys: Keys) -> None:
        """Count one request's reference to each of these blocks. The blocks may be absent.

        `keys` are in prefix order. A request counts each block only once.
        """

    def missed(self, keys: Keys) -> None:  # noqa: B027  (most rules count all uses alike)
        """Record that a request needs these blocks and that no faster tier has them.

        Called before `count`, possibly more than once for a block. Called only for rules of tiers behind RAM.
        """

    def refresh(self, keys: Keys) -> None:  # noqa: B027  (most rules have nothing to order)
        """Make the head of a finished request's path the most recent of the remembered keys.

        Called only if the path `keys` was passed to `count` in several parts. Then a rule that forgets old
        keys would forget the head of the path first, although the tail of a path is useless without its head.
        """

    @abstractmethod
    def admit(self, keys: Keys) -> BoolArray:
        """Return a mask of the absent blocks `keys`: True if the block may enter.

        Shape ``(len(keys),)``, bool.
        """

    def leading(self, keys: Keys) -> int:
        """Return the number of leading blocks of `keys` that may enter.

        Used for blocks of one prefix, because no request can reach a block after a refused block.
        """
        allowed = self.admit(keys)
        return len(allowed) if allowed.all() else int(allowed.argmin())

    def settle(  # noqa: B027  (most rules know no budget)
        self, offered: Keys, num_written: int, num_earned: float, budget_blocks: float
    ) -> None:
        """Record the result of an offer to a tier. Called only if the tier has a write budget.

        Args:
            offered: the offered blocks that were absent.
            num_written: number of these blocks that the tier writes.
            num_earned: number of blocks that the budget has allowed since the last call.
            budget_blocks: number of blocks that the budget allows in a day; in a replay, in the whole
                recording.
        """

    @abstractmethod
    def reset(self) -> None:
        """Forget all counts."""


ADMISSIONS: Registry[Admission] = Registry("admission", Admission, "kvoffload.admission")

AdmissionName: TypeAlias = Annotated[str, ADMISSIONS]
"""Type of an option for an admission rule."""

DEFAULT_ADMISSION = "all"


def create_admission(
    rule: str | type[Admission] | Admission | None, key_bytes: int, capacity_blocks: int
) -> Admission | None:
    """Create the rule for one cache from a name with parameters, or from a class.

    Returns an instance unchanged. Returns None if the rule would admit every block. Raises `ConfigError` for
    an unknown name, and for a rule whose keys have another length.
    """
    if rule is not None and not isinstance(rule, Admission):
        rule = ADMISSIONS.find(rule).for_cache(key_bytes, capacity_blocks)
    if rule is not None and rule.key_bytes not in (None, key_bytes):
        raise ConfigError("admission", rule.key_bytes, f"its keys must have {key_bytes} bytes")
    return rule
