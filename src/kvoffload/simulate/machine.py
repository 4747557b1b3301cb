"""A machine as a timed replay sees it: how fast it computes prompts, copies blocks, reads and writes a disk.

Every number says where it comes from: `kvoffload calibrate` measures them (`calibration`), `classes` assumes
them. Knows no traces and no managers.
"""

from __future__ import annotations

import math
from pathlib import Path

import msgspec

from kvoffload.errors import ConfigError

FORMAT = "kvoffload machine 1"


class Quantity(msgspec.Struct, frozen=True):
    """A number, how much it varied, and where it comes from.

    Attributes:
        value: the median of what was measured, or what is assumed.
        p10, p90: of what was measured; both are `value` where nothing was.
        source: ``measured: ...``, or ``assumed: ...`` with the reason.
    """

    value: float
    p10: float
    p90: float
    source: str

    @classmethod
    def assumed(cls, value: float, why: str) -> Quantity:
        """A number that nobody measured here."""
        return cls(value, value, value, f"assumed: {why}")


class Machine(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One machine with one model. What is None is not known; a timed replay says what it lacks (`check`).

    Computing the tokens of a prompt from position `a` to `b` takes ``prefill_s_per_token * (b - a) +
    prefill_s_per_token_squared * (b * b - a * a)``, and each step of the engine `step_s` besides: what every
    token costs, attention to the tokens before it, and what a step costs whatever is in it.

    Attributes:
        name: a class, or the host that was measured.
        model: which model the speeds of prefill and decode are about.
        prefill_s_per_token, prefill_s_per_token_squared, step_s: seconds, as above.
        decode_tokens_per_s: of one request, while others generate too.
        load_bytes_per_s: from RAM to the device; store_bytes_per_s: from the device to RAM.
        copy_latency_s: what each of those copies takes besides, whatever its size.
        disk_read_bytes_per_s, disk_write_bytes_per_s, disk_read_latency_s, disk_write_latency_s: of the disk
            behind RAM, in the same way.
        memory_copy_bytes_per_s: from RAM to RAM: no copy to a device can be faster. For people.
        made: when it was measured, ISO 8601; facts: about the machine, for people.
        format: what this is; for files.
    """

    name: str
    model: str = ""
    prefill_s_per_token: Quantity | None = None
    prefill_s_per_token_squared: Quantity | None = None
    step_s: Quantity | None = None
    decode_tokens_per_s: Quantity | None = None
    load_bytes_per_s: Quantity | None = None
    store_bytes_per_s: Quantity | None = None
    copy_latency_s: Quantity | None = None
    disk_read_bytes_per_s: Quantity | None = None
    disk_write_bytes_per_s: Quantity | None = None
    disk_read_latency_s: Quantity | None = None
    disk_write_latency_s: Quantity | None = None
    memory_copy_bytes_per_s: Quantity | None = None
    made: str = ""
    facts: dict[str, str] = {}
    format: str = FORMAT

    def value(self, name: str) -> float:
        """The number of this field. Raises `ConfigError` if the machine does not have it."""
        found: Quantity | None = getattr(self, name)
        if found is None:
            raise ConfigError("machine", self.name, f"it has no {name}: {_HOW_TO_KNOW[name]}")
        return found.value

    def prefill_s(self, start: int, end: int) -> float:
        """How long computing the tokens of a prompt from `start` to `end` takes, besides `step_s`."""
        linear, squared = self.value("prefill_s_per_token"), self.value("prefill_s_per_token_squared")
        return linear * (end - start) + squared * (end * end - start * start)

    def break_even_tokens(self, bytes_per_token: float, *, from_disk: bool = False) -> float:
        """From which length on loading the head of a prompt takes no longer than computing it; infinite if
        never. Nobody else uses the machine."""
        fixed = self.value("copy_latency_s")
        per_token = bytes_per_token / self.value("load_bytes_per_s")
        if from_disk:
            fixed += self.value("disk_read_latency_s")
            per_token += bytes_per_token / self.value("disk_read_bytes_per_s")
        # Where squared * n^2 + gain * n = fixed.
        gain = self.value("prefill_s_per_token") - per_token
        squared = self.value("prefill_s_per_token_squared")
        if squared <= 0.0:
            return fixed / gain if gain > 0.0 else math.inf
        return (math.sqrt(gain * gain + 4.0 * squared * fixed) - gain) / (2.0 * squared)

    def filled_from(self, other: Machine) -> Machine:
        """The same, with what is not known taken from another one."""
        missing = {name: getattr(other, name) for name in _HOW_TO_KNOW if getattr(self, name) is None}
        if not missing:
            return self
        return msgspec.structs.replace(self, **missing, model=self.model or other.model)

    def check(self, *, has_ram: bool, has_disk: bool) -> None:
        """Raise a `ConfigError` for the first thing that a replay with these tiers needs and it lacks."""
        for name in (*_ENGINE, *(_LINK if has_ram else ()), *(_DISK if has_disk else ())):
            self.value(name)

    def to_json(self) -> bytes:
        """One JSON object, indented: what `read_machine` reads."""
        encoded = msgspec.json.encode(msgspec.structs.replace(self, format=FORMAT))
        return msgspec.json.format(encoded, indent=2) + b"\n"


_ENGINE = ("prefill_s_per_token", "prefill_s_per_token_squared", "step_s", "decode_tokens_per_s")
_LINK = ("load_bytes_per_s", "store_bytes_per_s", "copy_latency_s")
_DISK = ("disk_read_bytes_per_s", "disk_write_bytes_per_s", "disk_read_latency_s", "disk_write_latency_s")
_HOW_TO_KNOW = {
    **dict.fromkeys(
        _ENGINE, "calibrate with --url of a server, or take it from a class: calibrate --rest-from CLASS"
    ),
    **dict.fromkeys(
        _LINK, "calibrate where there is a GPU, or take it from a class: calibrate --rest-from CLASS"
    ),
    **dict.fromkeys(_DISK, "calibrate with --disk, or take it from a class: calibrate --rest-from CLASS"),
    "memory_copy_bytes_per_s": "calibrate",
}
"""Every quantity, and how one comes to know it."""

QUANTITIES = tuple(_HOW_TO_KNOW)
"""What a machine is described by."""


def read_machine(path: Path) -> Machine:
    """The machine that `kvoffload calibrate` has written. Raises `ConfigError`."""
    try:
        machine = msgspec.json.decode(path.read_bytes(), type=Machine)
    except OSError as error:
        raise ConfigError("machine", str(path), f"it cannot be read ({error.strerror})") from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ConfigError(
            "machine", str(path), f"it is no machine of `kvoffload calibrate` ({error})"
        ) from None
    if machine.format != FORMAT:
        raise ConfigError("machine", str(path), f"its format is {machine.format!r}; allowed: {FORMAT!r}")
    for name in _HOW_TO_KNOW:
        found: Quantity | None = getattr(machine, name)
        is_rate = name.endswith("_per_s")
        if found is not None and not (0 < found.value < math.inf if is_rate else 0 <= found.value < math.inf):
            allowed = "a number more than 0" if is_rate else "seconds, 0 or more"
            raise ConfigError(f"machine.{name}", found.value, f"allowed: {allowed}")
    return machine
