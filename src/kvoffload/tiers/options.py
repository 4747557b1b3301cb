"""Tiers behind RAM as users describe them: the same names and one grammar everywhere.

As text ``KIND:PATH:CAPACITY,option=value,...``, or ``KIND:CAPACITY`` for what has no path; as a mapping
``{"type": KIND, "path": PATH, "capacity": CAPACITY, ...}``. Several are a list, or a text with ``+`` between
them, from the fastest to the slowest.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, ClassVar, TypeAlias, TypeVar

from kvoffload.config import option_names, parse_capacity, read_options
from kvoffload.core.admission import DEFAULT_ADMISSION, AdmissionName
from kvoffload.core.policy import DEFAULT_POLICY, PolicyName
from kvoffload.errors import CombinedConfigError, ConfigError, UnavailableError
from kvoffload.plugins import Registry
from kvoffload.tiers.base import SecondaryTier

_Options = TypeVar("_Options", bound="TierOptions")
NO_TIERS = "none"
_EXAMPLE = "disk:PATH:CAPACITY"


@dataclass(frozen=True)
class TierOwner:
    """Whose blocks a tier holds.

    Attributes:
        block_bytes: bytes of a block; 0 in a replay without data.
        key_bytes: length of every key.
        fingerprint: says who computed the blocks: blocks of another producer are never served.
        replica: which of several engines with equal fingerprints this is; each has a place of its own.
        counts_blocks: capacities are numbers of blocks, as in a replay, instead of sizes.
        go_on_without: called with each tier, or part of one, that cannot be opened now; without it that
            raises.
    """

    block_bytes: int
    key_bytes: int
    fingerprint: str
    replica: str = ""
    counts_blocks: bool = False
    go_on_without: Callable[[UnavailableError], None] | None = None

    def without(self, error: UnavailableError) -> None:
        """Something cannot be opened now: go on without it, or raise."""
        if self.go_on_without is None:
            raise error
        self.go_on_without(error)


class _CapacityParser:
    allowed = "a size such as 500GiB; in a replay also blocks (5000), or a share of the unique blocks (5%)"

    def parse(self, field: str, value: object) -> str:
        text = "" if isinstance(value, bool) else str(value).strip()
        if not re.fullmatch(r"\d+(\.\d+)?\s*(%|[KMGT]i?B?|PiB|B)?", text, re.IGNORECASE):
            raise ConfigError(field, value, f"allowed: {self.allowed}")
        return text


Capacity: TypeAlias = Annotated[str, _CapacityParser()]


@dataclass(frozen=True, kw_only=True)
class TierOptions(ABC):
    """What one kind of tier can be told, and how a tier of it is opened.

    A kind is a file in `kinds` with a class derived from this one. Its fields are its options.

    Attributes:
        name: what users type.
        keeps_blocks: whether it can stand behind an engine, and not only in a replay.
        capacity: how much it holds.
        policy, admission: which blocks leave it and which may enter, whatever RAM has.
    """

    name: ClassVar[str]
    keeps_blocks: ClassVar[bool] = True

    capacity: Capacity
    policy: PolicyName = DEFAULT_POLICY
    admission: AdmissionName = DEFAULT_ADMISSION

    @abstractmethod
    def open(self, owner: TierOwner) -> SecondaryTier:
        """The tier, with what it holds from before. Raises `ConfigError`, `UnavailableError`."""

    def in_blocks(self: _Options, block_bytes: int | None, unique_blocks: int) -> _Options:
        """The same, its capacity as a number of blocks: for replays. Raises `ConfigError`."""
        return replace(self, capacity=str(parse_capacity("tier", self.capacity, block_bytes, unique_blocks)))

    @property
    def num_blocks(self) -> int:
        """The capacity, where it is a number of blocks."""
        return int(self.capacity)

    def __str__(self) -> str:
        """As text that `parse_tier` reads."""
        paths = getattr(self, "path", ())
        head = ":".join((self.name, *(["|".join(paths)] if paths else []), self.capacity))
        said = [one for one in fields(self) if one.name not in ("path", "capacity")]
        return ",".join((head, *(f"{one.name}={getattr(self, one.name)}" for one in said
                                 if getattr(self, one.name) != one.default)))  # fmt: skip


TIERS: Registry[TierOptions] = Registry("tier", TierOptions, "kvoffload.tiers.kinds")


def parse_tier(field: str, value: object) -> TierOptions:
    """The tier that a text or a mapping describes. Raises `ConfigError`."""
    if isinstance(value, TierOptions):
        return value
    given = _fields_of_text(field, value) if isinstance(value, str) else value
    if not isinstance(given, Mapping):
        raise ConfigError(
            field,
            value,
            f'allowed: {_EXAMPLE}, or {{"type": "disk", "path": "/data/kv", "capacity": "500GiB"}}',
        )
    if not given.get("type"):
        raise ConfigError(f"{field}.type", given.get("type"), f"allowed: {', '.join(TIERS.names())}")
    try:
        kind = TIERS.find(str(given["type"]))
    except ConfigError as problem:
        raise ConfigError(f"{field}.type", given["type"], problem.allowed) from None
    try:
        return read_options(kind, {k: v for k, v in given.items() if k != "type"}, field)
    except CombinedConfigError as several:
        found = [ConfigError(f"{field}.{one.field}", one.value, one.allowed) for one in several.problems]
        raise (found[0] if len(found) == 1 else CombinedConfigError(field, found)) from None


def parse_tiers(field: str, value: object) -> tuple[TierOptions, ...]:
    """The tiers that a list or a text describes, from the fastest to the slowest. Raises `ConfigError`."""
    if value == NO_TIERS:
        return ()
    if isinstance(value, str):
        # Also in a path there may be a +: what follows it here is a kind, or a bare capacity.
        begins = rf"\+(?=(?:{'|'.join(TIERS.names())}):|\d[\d.]*[%\w]*(?:[,+]|$))"
        return tuple(parse_tier(field, text) for text in re.split(begins, value))
    if not isinstance(value, Iterable) or isinstance(value, Mapping):
        raise ConfigError(field, value, "allowed: a list of tiers, from the fastest to the slowest")
    found, problems = list[TierOptions](), list[ConfigError]()
    for number, tier in enumerate(value):
        try:
            found.append(parse_tier(f"{field}[{number}]", tier))
        except CombinedConfigError as several:
            problems += several.problems
        except ConfigError as problem:
            problems.append(problem)
    if problems:
        raise problems[0] if len(problems) == 1 else CombinedConfigError(field, problems)
    return tuple(found)


def open_tiers(options: Iterable[TierOptions], owner: TierOwner) -> list[SecondaryTier]:
    """All of them, or none; without those that cannot be opened now, if the owner goes on without them.

    Raises `ConfigError`.
    """
    opened: list[SecondaryTier] = []
    with ExitStack() as undo:
        for tier in options:
            try:
                opened.append(tier.open(owner))
            except UnavailableError as error:
                owner.without(error)
            else:
                undo.callback(opened[-1].close)
        undo.pop_all()
    return opened


class _TiersParser:
    allowed = f"a list of tiers: {_EXAMPLE}"

    def parse(self, field: str, value: object) -> tuple[TierOptions, ...]:
        return parse_tiers(field, value)


Tiers: TypeAlias = Annotated[tuple[TierOptions, ...], _TiersParser()]


def _fields_of_text(field: str, text: str) -> dict[str, Any]:
    """The mapping that a text stands for. What follows a policy or rule and is no option is its parameter."""
    place, *settings = text.split(",")
    kind, colon, rest = place.partition(":")
    if not colon and kind[:1].isdigit():
        # Where nothing keeps bytes, the kind may be left out.
        kind, rest = "simulated", kind
    path, _, capacity = rest.rpartition(":")
    if not kind or not capacity:
        raise ConfigError(field, text, f"allowed: {_EXAMPLE}")
    found: dict[str, Any] = {"type": kind, "capacity": capacity}
    if path:
        found["path"] = path.split("|")
    known = option_names(TIERS.find(kind)) if kind in TIERS.names() else {}
    last = ""
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not equals or not value:
            raise ConfigError(
                field, text, f"{setting!r} is no option; allowed: {', '.join(known)}, as name=value"
            )
        if name not in known and last in ("policy", "admission"):
            found[last] += f",{setting}"
        elif name in found:
            raise ConfigError(field, text, f"{name} is given twice")
        else:
            found[name], last = value, name
    return found
