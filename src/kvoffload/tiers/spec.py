"""Parser of the descriptions of tiers that users write. All commands and settings share one grammar.

A description is a text ``KIND:PATH:CAPACITY,option=value,...``, or ``KIND:CAPACITY`` for a kind without a
path. It may also be a mapping: ``{"type": KIND, "path": PATH, "capacity": CAPACITY, ...}``. A tier on a
network is described by a URL, ``SCHEME://HOST:PORT/NAME?option=value&...``, or by ``{"url": URL, ...}``.
Several tiers are described by a list, or by a text with ``+`` between them, from the fastest to the slowest.

Descriptions must not contain passwords. Error messages mask passwords in descriptions.
"""

from __future__ import annotations

import functools
import itertools
import logging
import re
import sys
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, ClassVar, TypeAlias, TypeVar
from urllib.parse import parse_qsl, quote

from kvoffload.core.admission import DEFAULT_ADMISSION, AdmissionName
from kvoffload.core.policy import DEFAULT_POLICY, PolicyName
from kvoffload.errors import CombinedConfigError, ConfigError, UnavailableError, check_integer
from kvoffload.settings.read import MOST_BLOCKS, option_names, parse_capacity, read_options
from kvoffload.settings.registry import Registry
from kvoffload.tiers.contract import SecondaryTier
from kvoffload.tiers.producer_text import check_producer_text

_Sized = TypeVar("_Sized", bound="SizedTierOptions")
NO_TIERS = "none"
_EXAMPLE = "disk:PATH:CAPACITY"
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9.+-]*)://")
_SECRET = re.compile(r"pass|secret|token|credential|auth", re.IGNORECASE)
_HIDDEN = "***"
_PLACE = ("path", "capacity", "url")
"""Options that a tier's text gives by position, without their names, as in ``disk:PATH:CAPACITY``."""


@dataclass(frozen=True)
class TierOwner:
    """The engine or replay that opens a tier.

    Attributes:
        block_bytes: bytes of a block; 0 in a replay without data.
        key_bytes: length of every key.
        fingerprint: identifies the producer of the blocks; blocks of another producer are never served.
        clock: returns the time in a replayed recording, in seconds. If it is None, tiers use the system's
            time.
        recorded_s: length of the replayed recording in seconds; 0 if the recording has no times.
        shared_fingerprint: returns the fingerprint for tiers that several machines share. Its argument is the
            user's name of the weights, or an empty text. All machines that compute equal bytes for equal keys
            get an equal fingerprint. Raises `ConfigError` if the weights cannot be identified.
        replica: name that distinguishes this engine from engines with equal fingerprints. Each of them has
            its own directory.
        counts_blocks: True if capacities are numbers of blocks, as in a replay, instead of sizes.
        reports_paths: True if the owner reports the paths of its requests (`GroupedTier.extend_path`), and
            offers all blocks of a path when the request finishes.
        on_unavailable: called with the error if a tier, or one of a tier's directories, cannot be opened now.
            If it is None, the error is raised.
    """

    block_bytes: int
    key_bytes: int
    fingerprint: str
    replica: str = ""
    counts_blocks: bool = False
    reports_paths: bool = True
    on_unavailable: Callable[[UnavailableError], None] | None = None
    shared_fingerprint: Callable[[str], str] | None = None
    clock: Callable[[], float] | None = None
    recorded_s: float = 0.0

    def handle_unavailable(self, error: UnavailableError) -> None:
        """Pass the error to `on_unavailable`, or raise it if there is no `on_unavailable`."""
        if self.on_unavailable is None:
            raise error
        self.on_unavailable(error)


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
    """The options of one kind of tier. `open` creates the tier.

    Each kind is a file in `kinds` with a subclass of `TierOptions`. The fields of the subclass are the
    options.

    Attributes:
        label: name of the tier in metrics and reports; if empty, `names_of` derives a name from the kind.
        name: name of the kind, as users type it.
        schemes: for a kind that is reached over a network, its URL schemes, such as ``valkeys``. Each begins
            with `name`.
        keeps_blocks: False for a kind that stores no bytes and is only for replays.
    """

    name: ClassVar[str]
    schemes: ClassVar[tuple[str, ...]] = ()
    keeps_blocks: ClassVar[bool] = True

    label: Label = ""

    @abstractmethod
    def open(self, owner: TierOwner) -> SecondaryTier:
        """Open the tier, with its contents from earlier runs. Raises `ConfigError`, `UnavailableError`."""

    def in_blocks(self, block_bytes: int | None, unique_blocks: int) -> TierOptions:
        """Return the options with the capacity as a number of blocks, for replays.

        Raises: `ConfigError` if the capacity cannot be converted.
        """
        return self

    @property
    def num_blocks(self) -> int:
        """Capacity in blocks. For a tier without a capacity, it is more than any trace has."""
        return MOST_BLOCKS

    @property
    def place(self) -> str:
        """Kind and path, or URL, without options."""
        paths = "|".join(getattr(self, "path", ()))
        return str(getattr(self, "url", f"{self.name}:{paths}" if paths else self.name))

    def __str__(self) -> str:
        """Format the options as text that `parse_tier` reads."""
        encode = functools.partial(quote, safe="/:,")
        return f"{getattr(self, 'url', self.name)}{self._settings('?', '&', encode)}"

    def _settings(self, before: str, between: str, encode: Callable[[str], str] = str) -> str:
        """Format the options that differ from their defaults, each as ``name=value``.

        `between` separates the options. If there are options, `before` precedes them.
        """
        settings = [
            f"{option.name}={encode(str(getattr(self, option.name)))}"
            for option in fields(self)
            if option.name not in _PLACE and getattr(self, option.name) != option.default
        ]
        return before + between.join(settings) if settings else ""


@dataclass(frozen=True, kw_only=True)
class SizedTierOptions(TierOptions):
    """Options of a tier that has a capacity and evicts blocks itself.

    Attributes:
        capacity: limit of the tier's contents.
        policy, admission: eviction policy and admission rule of this tier, independent of RAM's.
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
        return ":".join((self.name, *(["|".join(paths)] if paths else []), self.capacity)) + self._settings(
            ",", ","
        )


TIERS: Registry[TierOptions] = Registry("tier", TierOptions, "kvoffload.tiers.kinds")


def parse_tier(field: str, value: object) -> TierOptions:
    """Parse the description of a tier, a text or a mapping. Raises `ConfigError`."""
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
        problems = [
            ConfigError(f"{field}.{problem.field}", redacted(problem.value), problem.allowed)
            for problem in several.problems
        ]
        raise (problems[0] if len(problems) == 1 else CombinedConfigError(field, problems)) from None


def redacted(value: object) -> object:
    """Replace secrets in a description by ``***``: values of secret options, and login data in URLs.

    Also finds the user name and password in a URL that lacks its ``//``.
    """
    if isinstance(value, str):
        return re.sub(r"(?<=://).*@|[^/\s]*@", f"{_HIDDEN}@", value)
    if isinstance(value, Mapping):
        return {name: redacted(_shown(str(name), inner)) for name, inner in value.items()}
    return [redacted(inner) for inner in value] if isinstance(value, (list, tuple)) else value


def parse_tiers(field: str, value: object) -> tuple[TierOptions, ...]:
    """Parse the descriptions of tiers, a list or a text, fastest tier first. Raises `ConfigError`."""
    if value == NO_TIERS:
        return ()
    if isinstance(value, str):
        # A path may contain a +, so only a + before a kind or a bare capacity separates tiers.
        separator = rf"\+(?=(?:{'|'.join(TIERS.names())})[a-z+]*:|\d[\d.]*[%\w]*(?:[,+]|$))"
        return _distinct(field, [parse_tier(field, text) for text in re.split(separator, value)])
    if not isinstance(value, Iterable) or isinstance(value, Mapping):
        raise ConfigError(field, redacted(value), "allowed: a list of tiers, from the fastest to the slowest")
    parsed, problems = list[TierOptions](), list[ConfigError]()
    for number, tier in enumerate(value):
        try:
            parsed.append(parse_tier(f"{field}[{number}]", tier))
        except CombinedConfigError as several:
            problems += several.problems
        except ConfigError as problem:
            problems.append(problem)
    if problems:
        raise problems[0] if len(problems) == 1 else CombinedConfigError(field, problems)
    return _distinct(field, parsed)


def _distinct(field: str, tiers: Sequence[TierOptions]) -> tuple[TierOptions, ...]:
    """Return the tiers. Raises `ConfigError` if the label of a tier is also the name of another tier."""
    names = names_of(tiers)
    for number, (tier, name) in enumerate(zip(tiers, names, strict=True)):
        if tier.label and names.count(name) > 1:
            raise ConfigError(
                f"{field}[{number}].label", name, "another tier has this name; give the tier another label"
            )
    return tuple(tiers)


def names_of(options: Sequence[TierOptions]) -> list[str]:
    """Return the name of each tier in metrics and reports.

    The name of a tier is its label or, if it has none, its kind. If several tiers of one kind have no label,
    each is named after its place (`TierOptions.place`), so that the names do not depend on the order of the
    tiers. Only tiers with equal places, such as simulated tiers, are numbered.
    """
    unnamed = [tier for tier in options if not tier.label]
    kinds, places = Counter(tier.name for tier in unnamed), Counter(tier.place for tier in unnamed)
    numbers = {place: itertools.count(1) for place, count in places.items() if count > 1}

    def name_of(tier: TierOptions) -> str:
        if tier.label or kinds[tier.name] == 1:
            return tier.label or tier.name
        return f"{tier.place} {next(numbers[tier.place])}" if tier.place in numbers else tier.place

    return [name_of(tier) for tier in options]


def open_tiers(options: Iterable[TierOptions], owner: TierOwner) -> list[SecondaryTier]:
    """Open all tiers. Unavailable tiers are left out if the owner has `on_unavailable`.

    Raises: `ConfigError`, `UnavailableError`. The tiers that have been opened are then closed.
    """
    opened, given = list[SecondaryTier](), list(options)
    with ExitStack() as undo:
        for tier, name in zip(given, names_of(given), strict=True):
            try:
                opened.append(tier.open(owner))
            except UnavailableError as error:
                owner.handle_unavailable(error)
            else:
                undo.callback(opened[-1].close)
                opened[-1].name = name
        undo.pop_all()
    return opened


def open_tier(
    description: str | Mapping[str, Any],
    *,
    block_bytes: int,
    fingerprint: str,
    key_bytes: int = 32,
    must_answer: bool = True,
) -> SecondaryTier:
    """Open a tier that a text describes, as on the command line: a disk, a server, a cluster or a bucket.

    Pass the tier to a `TieredManager`, which closes it. ``disk:/nvme/kv:1TiB`` opens a `DiskTier`; with
    several paths it opens a `StripedTier`. ``valkey://cache:6379/team-a``, ``valkey+cluster://...`` and
    ``s3://bucket/prefix`` open tiers that machines share. Options are appended to the text, as in
    ``...:1TiB,policy=arc`` or ``...team-a?ttl=7d&timeout=1s``.

    Args:
        description: the text, or a mapping: ``{"url": "valkey://cache:6379/team-a", "ttl": "7d"}``.
        block_bytes: bytes of a block.
        fingerprint: identifies the producer: model, dtype, layout, parallel shape. Blocks of another
            producer are never served. For a shared tier, two machines must have equal fingerprints if and
            only if they compute equal bytes for equal keys.
        key_bytes: length of every key.
        must_answer: False to open a shared tier even if its server does not reply yet. The tier is empty
            until the server replies.

    Raises:
        ConfigError: an option is invalid, or the server refuses the login.
        UnavailableError: the directory or server cannot be used now.

    Cost: waits up to 5 s for a server. If `must_answer` is False, waits up to 1 s (3 s for a bucket).
    """
    check_producer_text("fingerprint", fingerprint)
    options = parse_tier("tier", description)
    owner = TierOwner(
        check_integer("block_bytes", block_bytes, sys.maxsize),
        check_integer("key_bytes", key_bytes, sys.maxsize),
        fingerprint,
        on_unavailable=None if must_answer else _log_unavailable,
    )
    tier = options.open(owner)
    (tier.name,) = names_of([options])
    return tier


def _log_unavailable(error: UnavailableError) -> None:
    logging.getLogger("kvoffload.tiering").error("%s", error)


class _TiersParser:
    allowed = f"a list of tiers: {_EXAMPLE}"

    def parse(self, field: str, value: object) -> tuple[TierOptions, ...]:
        return parse_tiers(field, value)


Tiers: TypeAlias = Annotated[tuple[TierOptions, ...], _TiersParser()]


def _fields_of_text(field: str, text: str) -> dict[str, Any]:
    """Parse the text of a tier into a mapping.

    If a setting after ``policy=`` or ``admission=`` is no option of the tier, it is passed to the policy or
    the admission rule as a parameter.
    """
    if match := _SCHEME.match(text):
        return {"type": _kind_of_scheme(field, match[1], text), "url": text}
    place, *settings = text.split(",")
    kind, colon, location = place.partition(":")
    if colon and any(kind.startswith(name) and kind in TIERS.find(name).schemes for name in TIERS.names()):
        raise ConfigError(field, f"{kind}:{_HIDDEN}", f"a tier on a network is a URL; allowed: {kind}://...")
    if not colon and kind[:1].isdigit():
        # The kind of a simulated tier may be omitted.
        kind, location = "simulated", kind
    path, _, capacity = location.rpartition(":")
    if not kind or not capacity:
        raise ConfigError(
            field, redacted(text), f"allowed: {_EXAMPLE}, or simulated:CAPACITY in a replay without data"
        )
    if kind == "disk" and not path and "/" in capacity:
        raise ConfigError(
            field, redacted(text), f"its capacity is missing; allowed: {_EXAMPLE}, such as {text}:1TiB"
        )
    given: dict[str, Any] = {"type": kind, "capacity": capacity}
    if path:
        given["path"] = path.split("|")
    known = option_names(TIERS.find(kind)) if kind in TIERS.names() else {}
    last = ""
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not equals or not value:
            raise ConfigError(
                field, redacted(text), f"{setting!r} is no option; allowed: {', '.join(known)}, as name=value"
            )
        if name not in known and last in ("policy", "admission"):
            given[last] += f",{setting}"
        elif name in given:
            raise ConfigError(field, redacted(text), f"{name} is given twice")
        else:
            given[name], last = value, name
    return given


def _kind_of_scheme(field: str, scheme: str, text: str) -> str:
    """Return the name of the kind with this URL scheme. Cost: imports one kind."""
    for name in TIERS.names():
        if scheme.startswith(name) and scheme in TIERS.find(name).schemes:
            return name
    schemes = [known for name in TIERS.names() for known in TIERS.find(name).schemes]
    allowed = [f"{known}://" for known in schemes] + [_EXAMPLE]
    raise ConfigError(f"{field}.type", redacted(text), f"allowed: {', '.join(allowed)}")


def _with_query(field: str, given: dict[str, Any]) -> dict[str, Any]:
    """Return `given` with the options from the query of its ``url``. Refuses secrets and repeated options."""
    options = dict(given)
    if isinstance(given.get("url"), str):
        options["url"], _, query = given["url"].partition("?")
        pairs = parse_qsl(query, keep_blank_values=True)
        if len(pairs) < len([setting for setting in query.split("&") if setting]):
            raise ConfigError(
                f"{field}.url", redacted(given["url"]), "options are name=value, with & between"
            )
        for name, value in pairs:
            if name in options:
                raise ConfigError(f"{field}.{name}", _shown(name, value), f"{name} is given twice")
            options[name] = value
    for name, value in options.items():
        if _shown(str(name), value) is _HIDDEN:
            why = "a secret belongs in the environment or in a file: options are logged"
            raise ConfigError(f"{field}.{name}", _HIDDEN, why)
    return options


def _shown(name: str, value: object) -> object:
    """Return the value, or ``***`` if the option's name suggests a secret. A file's name is no secret."""
    return _HIDDEN if _SECRET.search(name) and not name.endswith("_file") else value
