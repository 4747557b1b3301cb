"""Tiers behind RAM as users describe them: the same names and one grammar everywhere.

As text ``KIND:PATH:CAPACITY,option=value,...``, or ``KIND:CAPACITY`` for what has no path; as a mapping
``{"type": KIND, "path": PATH, "capacity": CAPACITY, ...}``. What is reached over a network is a URL,
``SCHEME://HOST:PORT/NAME?option=value&...``, or ``{"url": URL, ...}``. Several are a list, or a
text with ``+`` between them, from the fastest to the slowest.

A password never stands in any of these, and what is refused is shown without one.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, ClassVar, TypeAlias, TypeVar
from urllib.parse import parse_qsl

from kvoffload.core.admission import DEFAULT_ADMISSION, AdmissionName
from kvoffload.core.policy import DEFAULT_POLICY, PolicyName
from kvoffload.errors import CombinedConfigError, ConfigError, UnavailableError
from kvoffload.settings.read import MOST_BLOCKS, option_names, parse_capacity, read_options
from kvoffload.settings.registry import Registry
from kvoffload.tiers.contract import SecondaryTier

_Sized = TypeVar("_Sized", bound="SizedTierOptions")
NO_TIERS = "none"
_EXAMPLE = "disk:PATH:CAPACITY"
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9.+-]*)://")
_SECRET = re.compile(r"pass|secret|token|credential|auth", re.IGNORECASE)
_HIDDEN = "***"
_PLACE = ("path", "capacity", "url")
"""Options that stand before all others in a text."""


@dataclass(frozen=True)
class TierOwner:
    """Whose blocks a tier holds.

    Attributes:
        block_bytes: bytes of a block; 0 in a replay without data.
        key_bytes: length of every key.
        fingerprint: says who computed the blocks: blocks of another producer are never served.
        shared_fingerprint: makes the same for tiers that several machines share, from what the user calls the
            weights (an empty text if nothing): equal on all machines that compute equal bytes for equal keys.
            Raises `ConfigError` if that cannot be known.
        replica: which of several engines with equal fingerprints this is; each has a place of its own.
        counts_blocks: capacities are numbers of blocks, as in a replay, instead of sizes.
        tells_paths: the tier is told of the paths of requests (`SecondaryTier.follow`), and is offered all
            blocks of one at its end.
        go_on_without: called with each tier, or part of one, that cannot be opened now; without it that
            raises.
    """

    block_bytes: int
    key_bytes: int
    fingerprint: str
    replica: str = ""
    counts_blocks: bool = False
    tells_paths: bool = True
    go_on_without: Callable[[UnavailableError], None] | None = None
    shared_fingerprint: Callable[[str], str] | None = None

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


class _LabelParser:
    allowed = "1 to 64 letters, digits and . _ -, beginning with a letter"

    def parse(self, field: str, value: object) -> str:
        if not isinstance(value, str) or not re.fullmatch(r"([A-Za-z][\w.-]{0,63})?", value, re.ASCII):
            raise ConfigError(field, value, f"allowed: {self.allowed}")
        return value


Label: TypeAlias = Annotated[str, _LabelParser()]


@dataclass(frozen=True, kw_only=True)
class TierOptions(ABC):
    """What one kind of tier can be told, and how a tier of it is opened.

    A kind is a file in `kinds` with a class derived from this one. Its fields are its options.

    Attributes:
        label: name of this tier in metrics and reports; empty for one that follows from the kind
            (`names_of`).
        name: what users type.
        schemes: of its URLs, if it is reached by URL; the name, or what begins with it: ``valkeys``.
        keeps_blocks: whether it can stand behind an engine, and not only in a replay.
    """

    name: ClassVar[str]
    schemes: ClassVar[tuple[str, ...]] = ()
    keeps_blocks: ClassVar[bool] = True

    label: Label = ""

    @abstractmethod
    def open(self, owner: TierOwner) -> SecondaryTier:
        """The tier, with what it holds from before. Raises `ConfigError`, `UnavailableError`."""

    def in_blocks(self, block_bytes: int | None, unique_blocks: int) -> TierOptions:
        """The same, its capacity, if it has one, as a number of blocks: for replays. Raises `ConfigError`."""
        return self

    @property
    def num_blocks(self) -> int:
        """The capacity, where it is a number of blocks; more than any trace has if it is not ours to say."""
        return MOST_BLOCKS

    @property
    def place(self) -> str:
        """The kind and where the tier is, without options."""
        paths = "|".join(getattr(self, "path", ()))
        return str(getattr(self, "url", f"{self.name}:{paths}" if paths else self.name))

    def __str__(self) -> str:
        """As text that `parse_tier` reads."""
        return f"{getattr(self, 'url', self.name)}{self._said('?', '&')}"

    def _said(self, before: str, between: str) -> str:
        values = {one.name: getattr(self, one.name) for one in fields(self) if one.name not in _PLACE}
        said = [f"{one.name}={values[one.name]}" for one in fields(self)
                if one.name in values and values[one.name] != one.default]  # fmt: skip
        return before + between.join(said) if said else ""


@dataclass(frozen=True, kw_only=True)
class SizedTierOptions(TierOptions):
    """Options of a tier that bounds what it holds, and decides itself what leaves it.

    Attributes:
        capacity: how much it holds.
        policy, admission: which blocks leave it and which may enter, whatever RAM has.
    """

    capacity: Capacity
    policy: PolicyName = DEFAULT_POLICY
    admission: AdmissionName = DEFAULT_ADMISSION

    def in_blocks(self: _Sized, block_bytes: int | None, unique_blocks: int) -> _Sized:
        return replace(self, capacity=str(parse_capacity("tier", self.capacity, block_bytes, unique_blocks)))

    @property
    def num_blocks(self) -> int:
        return int(self.capacity)

    def __str__(self) -> str:
        paths = getattr(self, "path", ())
        return ":".join((self.name, *(["|".join(paths)] if paths else []), self.capacity)) + self._said(
            ",", ","
        )


TIERS: Registry[TierOptions] = Registry("tier", TierOptions, "kvoffload.tiers.kinds")


def parse_tier(field: str, value: object) -> TierOptions:
    """The tier that a text or a mapping describes. Raises `ConfigError`."""
    if isinstance(value, TierOptions):
        return value
    given = _fields_of_text(field, value) if isinstance(value, str) else value
    if not isinstance(given, Mapping):
        raise ConfigError(
            field,
            redacted(value),
            f'allowed: {_EXAMPLE}, or {{"type": "disk", "path": "/data/kv", "capacity": "500GiB"}}',
        )
    if not given.get("type") and isinstance(given.get("url"), str):
        given = {**given, **_fields_of_text(field, given["url"])}
    if not given.get("type"):
        raise ConfigError(f"{field}.type", given.get("type"), f"allowed: {', '.join(TIERS.names())}")
    try:
        kind = TIERS.find(str(given["type"]))
    except ConfigError as problem:
        raise ConfigError(f"{field}.type", redacted(given["type"]), problem.allowed) from None
    options = _with_query(field, {k: v for k, v in given.items() if k != "type"})
    try:
        return read_options(kind, options, field)
    except CombinedConfigError as several:
        found = [
            ConfigError(f"{field}.{one.field}", redacted(one.value), one.allowed) for one in several.problems
        ]
        raise (found[0] if len(found) == 1 else CombinedConfigError(field, found)) from None


def redacted(value: object) -> object:
    """A value that a user gave, without what stands in a URL where a user name and a password could."""
    return re.sub(r"://.*@", f"://{_HIDDEN}@", value) if isinstance(value, str) else value


def parse_tiers(field: str, value: object) -> tuple[TierOptions, ...]:
    """The tiers that a list or a text describes, from the fastest to the slowest. Raises `ConfigError`."""
    if value == NO_TIERS:
        return ()
    if isinstance(value, str):
        # Also in a path there may be a +: what follows it here is a kind, or a bare capacity.
        begins = rf"\+(?=(?:{'|'.join(TIERS.names())})[a-z+]*:|\d[\d.]*[%\w]*(?:[,+]|$))"
        return _distinct(field, [parse_tier(field, text) for text in re.split(begins, value)])
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
    return _distinct(field, found)


def _distinct(field: str, tiers: Sequence[TierOptions]) -> tuple[TierOptions, ...]:
    """These tiers, if none has a label that is another tier's name. Raises `ConfigError`."""
    names = names_of(tiers)
    for number, (tier, name) in enumerate(zip(tiers, names, strict=True)):
        if tier.label and names.count(name) > 1:
            raise ConfigError(f"{field}[{number}].label", name, "another tier has this name: give it another")
    return tuple(tiers)


def names_of(options: Sequence[TierOptions]) -> list[str]:
    """The name of each tier in metrics and reports. It does not depend on their order.

    A tier is called by its label; without one by its kind, if no other tier without a label is of that kind,
    and otherwise by its kind and place.
    """
    kinds = Counter(tier.name for tier in options if not tier.label)
    return [tier.label or (tier.name if kinds[tier.name] == 1 else tier.place) for tier in options]


def open_tiers(options: Iterable[TierOptions], owner: TierOwner) -> list[SecondaryTier]:
    """All of them, or none; without those that cannot be opened now, if the owner goes on without them.

    Raises `ConfigError`.
    """
    opened, given = list[SecondaryTier](), list(options)
    with ExitStack() as undo:
        for tier, name in zip(given, names_of(given), strict=True):
            try:
                opened.append(tier.open(owner))
            except UnavailableError as error:
                owner.without(error)
            else:
                undo.callback(opened[-1].close)
                opened[-1].name = name
        undo.pop_all()
    return opened


class _TiersParser:
    allowed = f"a list of tiers: {_EXAMPLE}"

    def parse(self, field: str, value: object) -> tuple[TierOptions, ...]:
        return parse_tiers(field, value)


Tiers: TypeAlias = Annotated[tuple[TierOptions, ...], _TiersParser()]


def _fields_of_text(field: str, text: str) -> dict[str, Any]:
    """The mapping that a text stands for. What follows a policy or rule and is no option is its parameter."""
    if match := _SCHEME.match(text):
        return {"type": _kind_of_scheme(field, match[1], text), "url": text}
    place, *settings = text.split(",")
    kind, colon, rest = place.partition(":")
    if not colon and kind[:1].isdigit():
        # Where nothing keeps bytes, the kind may be left out.
        kind, rest = "simulated", kind
    path, _, capacity = rest.rpartition(":")
    if not kind or not capacity:
        raise ConfigError(
            field, text, f"allowed: {_EXAMPLE}, or, where no bytes are kept, simulated:CAPACITY"
        )
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


def _kind_of_scheme(field: str, scheme: str, text: str) -> str:
    """The kind whose URLs begin so. Cost: imports one kind."""
    for name in TIERS.names():
        if scheme.startswith(name) and scheme in TIERS.find(name).schemes:
            return name
    schemes = [known for name in TIERS.names() for known in TIERS.find(name).schemes]
    allowed = [f"{known}://" for known in schemes] + [_EXAMPLE]
    raise ConfigError(f"{field}.type", redacted(text), f"allowed: {', '.join(allowed)}")


def _with_query(field: str, given: dict[str, Any]) -> dict[str, Any]:
    """The options in a URL's query beside those that stand alone; the URL is without it then."""
    found = dict(given)
    if isinstance(given.get("url"), str):
        found["url"], _, query = given["url"].partition("?")
        pairs = parse_qsl(query, keep_blank_values=True)
        if len(pairs) < len([part for part in query.split("&") if part]):
            raise ConfigError(
                f"{field}.url", redacted(given["url"]), "options are name=value, with & between"
            )
        for name, value in pairs:
            if name in found:
                raise ConfigError(f"{field}.{name}", _shown(name, value), f"{name} is given twice")
            found[name] = value
    for name, value in found.items():
        if _shown(str(name), value) is _HIDDEN:
            why = "a secret stands in the environment or in a file, never among options, which are logged"
            raise ConfigError(f"{field}.{name}", _HIDDEN, why)
    return found


def _shown(name: str, value: object) -> object:
    """The value of an option as an error may show it. The name of a file with a secret is none."""
    return _HIDDEN if _SECRET.search(name) and not name.endswith("_file") else value
