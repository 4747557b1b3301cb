"""Admission rules: which blocks may enter a tier: ``all``, ``reuse:N``, ``bypass:F`` or ``tinylfu``."""

from __future__ import annotations

from typing import NamedTuple

from kvoffload.admission.bypass import BypassAdmission
from kvoffload.admission.reuse import ReuseAdmission
from kvoffload.admission.tinylfu import TinyLFUAdmission
from kvoffload.core.admission import Admission
from kvoffload.errors import ConfigError

DEFAULT = "all"
"""What is used if nobody says otherwise."""


class Description(NamedTuple):
    """An admission rule as lists show it.

    Attributes:
        form: what users type.
        summary: what it is, in a line.
        good_for, paper: as in `Admission`.
    """

    form: str
    summary: str
    good_for: str
    paper: str


def _described(form: str, rule: type[Admission]) -> Description:
    return Description(form, (rule.__doc__ or "").partition("\n")[0], rule.good_for, rule.paper)


RULES = (
    Description(
        "all", "Admit every block: no gate, no cost.", "tiers whose writes are cheap; the default", ""
    ),
    _described("bypass:F", BypassAdmission),
    _described("reuse:N", ReuseAdmission),
    _described("tinylfu", TinyLFUAdmission),
)
"""Every rule that `create` knows."""

ALLOWED = (
    "allowed: all, reuse:N with N >= 1 (reuse:1 is all), bypass, bypass:F with F from -1 to 1000, tinylfu"
)


def create(spec: str | Admission | None, key_bytes: int, capacity_blocks: int) -> Admission | None:
    """The rule that `spec` describes; None for ``all``: no gate, no cost.

    Args:
        spec: what the user typed, or a rule.
        key_bytes: length of the manager's keys.
        capacity_blocks: slots of the manager, for rules whose memory grows with the cache.

    Raises `ConfigError` for what cannot be understood.
    """
    if spec is None or isinstance(spec, Admission):
        return spec
    if not isinstance(spec, str):
        raise ConfigError("admission", spec, ALLOWED)
    name, _, argument = spec.partition(":")
    if name == "all" and not argument:
        return None
    if spec == "tinylfu":
        return TinyLFUAdmission(capacity_blocks)
    if name == "reuse":
        try:
            store_threshold = int(argument)
        except ValueError:
            raise ConfigError("admission", spec, ALLOWED) from None
        if store_threshold == 1:
            return None
        if store_threshold >= 2:
            return ReuseAdmission(key_bytes, store_threshold)
    if name == "bypass":
        try:
            return BypassAdmission(float(argument or 0))
        except ValueError:
            raise ConfigError("admission", spec, ALLOWED) from None
    raise ConfigError("admission", spec, ALLOWED)


__all__ = [
    "DEFAULT",
    "RULES",
    "Admission",
    "BypassAdmission",
    "Description",
    "ReuseAdmission",
    "TinyLFUAdmission",
    "create",
]
