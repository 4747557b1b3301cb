"""Machines as commands name them: a file of ``kvoffload calibrate``, or a class of GPUs."""

from __future__ import annotations

from pathlib import Path

from kvoffload.simulate.classes import CLASSES, parse_class
from kvoffload.simulate.machine import Machine, read_machine

DEFAULT_MACHINE = "h100-pcie5"
MACHINE_HELP = (
    "a file of `kvoffload calibrate`, or a class of GPUs and the parameters of a model: h100-pcie5:70B. "
    f"Classes: {', '.join(CLASSES)}."
)


def find_machine(text: str, gpus: int = 1) -> Machine:
    """Return the machine of a file as it is, or of a class with `gpus` GPUs. Raises `ConfigError`."""
    path = Path(text)
    return read_machine(path) if path.exists() or path.suffix == ".json" else parse_class(text, gpus)
