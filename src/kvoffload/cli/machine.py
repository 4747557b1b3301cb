"""The option ``--machine``: a file from ``kvoffload calibrate``, or a GPU class."""

from __future__ import annotations

from pathlib import Path

from kvoffload.settings.paths import expanded
from kvoffload.simulate.classes import CLASSES, parse_class
from kvoffload.simulate.machine import Machine, read_machine

DEFAULT_MACHINE = "h100-pcie5"
MACHINE_HELP = (
    "a file from `kvoffload calibrate`, or a GPU class and a model size: h100-pcie5:70B. "
    f"Classes: {', '.join(CLASSES)}."
)


def find_machine(text: str, gpus: int = 1) -> Machine:
    """Read the file `text`, or create a machine of the GPU class `text` with `gpus` GPUs.

    Raises `ConfigError` if `text` is neither a machine's file nor a GPU class.
    """
    path = Path(expanded("machine", text))
    return read_machine(path) if path.exists() or path.suffix == ".json" else parse_class(text, gpus)
