"""Admission rules: which blocks may enter a tier. Written ``all``, ``reuse:N`` or ``tinylfu``."""

from __future__ import annotations

from kvoffload.admission.base import Admission
from kvoffload.admission.reuse import ReuseAdmission
from kvoffload.admission.tinylfu import TinyLFUAdmission
from kvoffload.errors import ConfigError

ALLOWED = "allowed: all, reuse:N with N >= 1 (reuse:1 is all), tinylfu"


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
    raise ConfigError("admission", spec, ALLOWED)


__all__ = ["Admission", "ReuseAdmission", "TinyLFUAdmission", "create"]
