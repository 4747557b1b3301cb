"""Settings to try: the policy, admission rule or capacity of a shadow.

A list of settings has one of three forms: (1) ``[{"policy": "hazard"}, {"capacity": 2.0}]``, (2) this list as
JSON text, (3) ``policy=hazard;capacity=2``, for the environment and command lines.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeAlias

import msgspec

from kvoffload.core.admission import AdmissionName
from kvoffload.core.policy import PolicyName
from kvoffload.errors import ConfigError, Problems
from kvoffload.settings.read import Factor, option_names, within

MOST_SETTINGS = 8
MOST_CAPACITY = 100.0
MOST_ONE_IN = 1 << 16
OneIn: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=MOST_ONE_IN)]
"""Type of an option for the sampling rate: one block in this many is sampled."""
CURRENT = "current"
"""Label of the shadow with the serving manager's own settings."""


@dataclass(frozen=True)
class WhatIf:
    """Changes of the serving manager's settings.

    Attributes:
        policy: another eviction policy, or None for no change.
        admission: another admission rule, or None for no change.
        capacity: factor by which the capacity of RAM changes, at most `MOST_CAPACITY`; 1 for no change.
    """

    policy: PolicyName | None = None
    admission: AdmissionName | None = None
    capacity: Factor = 1.0

    @property
    def label(self) -> str:
        """The setting as text for metrics and tables, such as ``policy=hazard,capacity=2``."""
        parts = [f"{name}={value}" for name in ("policy", "admission") if (value := getattr(self, name))]
        if self.capacity != 1.0:
            parts.append(f"capacity={self.capacity:g}")
        return ",".join(parts) or CURRENT


class WhatIfParser:
    """Parses a list of settings. Each setting must change something, and no label may occur twice."""

    allowed = (
        f'1 to {MOST_SETTINGS} settings with policy, admission or capacity: [{{"policy": "hazard"}}, '
        '{"capacity": 2}], or as text policy=hazard;capacity=2'
    )

    def parse(self, field: str, value: object) -> tuple[WhatIf, ...]:
        """Return the settings. Raises `ConfigError` with the position and name of each wrong option."""
        given = self._listed(field, value)
        if not 1 <= len(given) <= MOST_SETTINGS:
            raise ConfigError(field, value, f"allowed: {self.allowed}")
        problems, settings = Problems(field), list[WhatIf]()
        for number, item in enumerate(given):
            with problems:
                setting = self._setting(f"{field}[{number}]", item)
                if setting.label in [other.label for other in settings]:
                    why = "a setting with this label is given twice; give it once"
                    raise ConfigError(f"{field}[{number}]", setting.label, why)
                settings.append(setting)
        problems.check()
        return tuple(settings)

    def _listed(self, field: str, value: object) -> Sequence[Any]:
        if isinstance(value, str) and value.strip().startswith(("[", "{")):
            try:
                value = json.loads(value)
            except (json.JSONDecodeError, RecursionError) as error:
                raise ConfigError(
                    field, value, f"it is not JSON ({error}); allowed: {self.allowed}"
                ) from None
        if isinstance(value, str):
            value = value.split(";")
        if isinstance(value, (Mapping, WhatIf)):
            value = [value]
        if not isinstance(value, (list, tuple)):
            raise ConfigError(field, value, f"allowed: {self.allowed}")
        return value

    def _setting(self, field: str, value: object) -> WhatIf:
        if isinstance(value, str):
            value = _named(field, value)
        setting = within(field, WhatIf, value) if isinstance(value, Mapping) else value
        if not isinstance(setting, WhatIf):
            raise ConfigError(field, value, f"allowed: {self.allowed}")
        if setting.capacity > MOST_CAPACITY:
            why = f"allowed: a number more than 0 and up to {MOST_CAPACITY:g}"
            raise ConfigError(f"{field}.capacity", setting.capacity, why)
        if setting.label == CURRENT:
            raise ConfigError(field, value, f"it changes nothing; allowed: {self.allowed}")
        return setting


def _named(field: str, text: str) -> dict[str, str]:
    """Split a text such as ``policy=s3fifo,small_share=0.2,capacity=2`` at the names of options.

    Any other name, such as ``small_share``, is a parameter of the option before it.
    """
    values, name = dict[str, str](), ""
    for part in text.strip().split(","):
        word, equals, value = part.partition("=")
        if word.strip() in option_names(WhatIf) and equals:
            name = word.strip()
            if name in values:
                raise ConfigError(field, text, f"{name} is given twice; give it once")
            values[name] = value.strip()
        elif name:
            values[name] += f",{part}"
        else:
            raise ConfigError(field, text, f"allowed: {WhatIfParser.allowed}")
    return values


WhatIfs: TypeAlias = Annotated[tuple[WhatIf, ...], WhatIfParser()]
"""Type of an option that holds what-if settings."""
