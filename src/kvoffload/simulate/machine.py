"""Speeds of a machine, for timed replays: prefill, decode, copies, disk reads and writes.

Each speed has a source: it was either measured by `kvoffload calibrate` (`calibration`) or assumed
(`classes`). Knows no traces and no managers.
"""

from __future__ import annotations

import math
from pathlib import Path

import msgspec

from kvoffload.errors import ConfigError
from kvoffload.text import as_json

FORMAT = "kvoffload machine 1"


class Quantity(msgspec.Struct, frozen=True):
    """A measured or assumed number, with its spread and source.

    Attributes:
        value: median of the measurements, or the assumed value.
        p10, p90: the 10th and 90th percentile of the measurements. If the number is assumed, both equal
            `value`.
        source: ``measured: ...``, or ``assumed: ...`` with the reason.
    """

    value: float
    p10: float
    p90: float
    source: str

    @classmethod
    def assumed(cls, value: float, why: str) -> Quantity:
        return cls(value, value, value, f"assumed: {why}")


class Machine(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Speeds of one machine with one model. Unknown speeds are None.

    The time to compute the tokens of a prompt from position `a` to `b` is ``prefill_s_per_token * (b - a) +
    prefill_s_per_token_squared * (b * b - a * a)``; the second term is attention. Each step of the engine
    takes `step_s` in addition.

    Attributes:
        name: name of a class or of the measured host.
        model: the LLM to which the prefill and decode speeds apply.
        prefill_s_per_token, prefill_s_per_token_squared, step_s: see above; in seconds.
        decode_tokens_per_s: speed at which each request generates tokens, for any number of requests at the
            same time.
        load_bytes_per_s: speed of copies from RAM to the device.
        store_bytes_per_s: speed of copies from the device to RAM.
        copy_latency_s: time that each copy takes in addition to the time for its bytes.
        disk_read_bytes_per_s, disk_write_bytes_per_s: speeds of the disk behind RAM.
        disk_read_latency_s, disk_write_latency_s: time that a read and a write of this disk takes in addition
            to the time for its bytes.
        memory_copy_bytes_per_s: speed of copies within RAM, which is an upper bound for the speed of copies
            to a device. Replays do not use this value.
        made, facts: date of the measurement (ISO 8601), and facts about the machine. Both are only for human
            readers.
        format: name and version of the file format.
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
        """Return the value of the quantity `name`. Raises `ConfigError` if this machine lacks it."""
        quantity: Quantity | None = getattr(self, name)
        if quantity is None:
            raise ConfigError("machine", self.name, f"it has no {name}: {_HOW_TO_KNOW[name]}")
        return quantity.value

    def prefill_s(self, start: int, end: int) -> float:
        """Compute the time to prefill the prompt tokens from `start` up to, but not including, `end`.

        `step_s` is not included.
        """
        linear, squared = self.value("prefill_s_per_token"), self.value("prefill_s_per_token_squared")
        return linear * (end - start) + squared * (end * end - start * start)

    def break_even_tokens(self, bytes_per_token: float, *, from_disk: bool = False) -> float:
        """Return the prompt length, in tokens, at which loading the KV cache takes as long as computing it.

        Longer prompts are loaded faster. The machine is assumed to be idle. The blocks are loaded from RAM
        or, with `from_disk`, from disk. If loading is slower at every length, the result is infinity.
        """
        fixed = self.value("copy_latency_s")
        per_token = bytes_per_token / self.value("load_bytes_per_s")
        if from_disk:
            fixed += self.value("disk_read_latency_s")
            per_token += bytes_per_token / self.value("disk_read_bytes_per_s")
        # The result is the positive solution n of squared * n^2 + gain * n = fixed.
        gain = self.value("prefill_s_per_token") - per_token
        squared = self.value("prefill_s_per_token_squared")
        if squared <= 0.0:
            return fixed / gain if gain > 0.0 else math.inf
        return (math.sqrt(gain * gain + 4.0 * squared * fixed) - gain) / (2.0 * squared)

    def filled_from(self, other: Machine) -> Machine:
        """Return a copy of this machine in which unknown quantities are taken from `other`."""
        missing = {name: getattr(other, name) for name in _HOW_TO_KNOW if getattr(self, name) is None}
        if not missing:
            return self
        return msgspec.structs.replace(self, **missing, model=self.model or other.model)

    def check(self, *, has_ram: bool, has_disk: bool) -> None:
        """Raise `ConfigError` if this machine lacks a quantity that a timed replay needs."""
        for name in (*_ENGINE, *(_LINK if has_ram else ()), *(_DISK if has_disk else ())):
            self.value(name)

    def to_json(self) -> bytes:
        """Encode the machine as indented JSON, which `read_machine` can read."""
        return as_json(msgspec.structs.replace(self, format=FORMAT))


_ENGINE = ("prefill_s_per_token", "prefill_s_per_token_squared", "step_s", "decode_tokens_per_s")
_LINK = ("load_bytes_per_s", "store_bytes_per_s", "copy_latency_s")
_DISK = ("disk_read_bytes_per_s", "disk_write_bytes_per_s", "disk_read_latency_s", "disk_write_latency_s")
_HOW_TO_KNOW = {
    **dict.fromkeys(
        _ENGINE, "calibrate with --url of a server, or take it from a class: calibrate --rest-from CLASS"
    ),
    **dict.fromkeys(
        _LINK, "calibrate on a machine with a GPU, or take it from a class: calibrate --rest-from CLASS"
    ),
    **dict.fromkeys(_DISK, "calibrate with --disk, or take it from a class: calibrate --rest-from CLASS"),
    "memory_copy_bytes_per_s": "calibrate",
}
"""For each quantity, an instruction for users how to obtain it, for error messages."""

QUANTITIES = tuple(_HOW_TO_KNOW)
"""Names of the attributes of `Machine` that are quantities."""


def read_machine(path: Path) -> Machine:
    """Read a machine from a file that `kvoffload calibrate` wrote. Raises `ConfigError` if that fails."""
    try:
        machine = msgspec.json.decode(path.read_bytes(), type=Machine)
    except OSError as error:
        raise ConfigError("machine", str(path), f"it cannot be read ({error.strerror})") from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ConfigError(
            "machine", str(path), f"it is not a file of `kvoffload calibrate` ({error})"
        ) from None
    if machine.format != FORMAT:
        raise ConfigError("machine", str(path), f"its format is {machine.format!r}; allowed: {FORMAT!r}")
    for name in _HOW_TO_KNOW:
        quantity: Quantity | None = getattr(machine, name)
        if quantity is None:
            continue
        is_rate = name.endswith("_per_s")
        if not 0 <= quantity.value < math.inf or (is_rate and quantity.value == 0):
            allowed = "a number more than 0" if is_rate else "seconds, 0 or more"
            raise ConfigError(f"machine.{name}", quantity.value, f"allowed: {allowed}")
    return machine
