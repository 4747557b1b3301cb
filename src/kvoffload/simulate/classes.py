"""Classes of machines whose speeds are assumed, not measured: GPUs with a link to RAM.

Peak rates are taken from data sheets, and an engine is assumed to reach the same share of the peak on all
classes. The speeds of real machines differ from the assumed speeds by up to a third. To measure a machine
instead, use `kvoffload calibrate`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from kvoffload.errors import ConfigError
from kvoffload.settings.read import nearest
from kvoffload.simulate.machine import Machine, Quantity


@dataclass(frozen=True)
class MachineClass:
    """Peak rates of a GPU and of its link to RAM.

    Attributes:
        gpu: full name of the GPU.
        flops_per_s: dense bf16 operations per second.
        memory_bytes_per_s: bandwidth of the GPU's memory.
        link: name of the link to RAM.
        link_bytes_per_s: bandwidth of the link, in one direction.
        source: the data sheet with these rates.
    """

    gpu: str
    flops_per_s: float
    memory_bytes_per_s: float
    link: str
    link_bytes_per_s: float
    source: str


_PCIE4, _PCIE5 = ("PCIe 4.0 x16", 31.5e9), ("PCIe 5.0 x16", 63.0e9)
"""PCIe links with 16 lanes: name, and bandwidth of one direction in bytes per second.

Source of the bandwidths: PCI-SIG, 16 and 32 GT/s per lane, 128b/130b encoding.
"""

CLASSES = {
    "a100-pcie4": MachineClass(
        "A100 80 GB SXM", 312e12, 2.04e12, *_PCIE4, "NVIDIA A100 80GB data sheet, 2021"
    ),
    "b200-pcie5": MachineClass("B200 SXM", 2250e12, 8.0e12, *_PCIE5, "NVIDIA DGX B200 data sheet, 2024"),
    "gh200": MachineClass(
        *("GH200 96 GB", 990e12, 4.0e12, "NVLink-C2C", 450e9), "NVIDIA GH200 data sheet, 2023"
    ),
    "h100-pcie5": MachineClass("H100 SXM", 989e12, 3.35e12, *_PCIE5, "NVIDIA H100 data sheet, 2022"),
    "h200-pcie5": MachineClass("H200 SXM", 989e12, 4.8e12, *_PCIE5, "NVIDIA H200 data sheet, 2023"),
    "l4": MachineClass("L4", 121e12, 0.3e12, *_PCIE4, "NVIDIA L4 data sheet, 2023"),
    "l40s-pcie4": MachineClass("L40S", 362e12, 0.864e12, *_PCIE4, "NVIDIA L40S data sheet, 2023"),
    "mi300x-pcie5": MachineClass("MI300X", 1307e12, 5.3e12, *_PCIE5, "AMD Instinct MI300X data sheet, 2023"),
}
"""Machine classes by name."""

DEFAULT_PARAMETERS = 8e9

_PREFILL_SHARE, _DECODE_SHARE, _LINK_SHARE = 0.5, 0.4, 0.8
"""Share of the peak rate that an engine is assumed to reach: of arithmetic, of memory, and of the link."""
_STEP_S, _COPY_LATENCY_S = 0.005, 50e-6
"""Assumed times in seconds: to schedule and launch a step of vLLM; to launch a batch of copies."""
_DISK_READ, _DISK_WRITE, _DISK_LATENCY_S = 6.5e9, 3.5e9, 100e-6
_DISK_SOURCE = "one NVMe SSD, PCIe 4.0 x4: Samsung PM9A3 U.2, announced rates, 2020"
_LAYERS_TIMES_WIDTH, _OF_PARAMETERS, _GROWS_AS = 32 * 4096, 8e9, 0.74
"""Estimate of the cost of attention from a model's number of parameters, for models up to 70B.

The cost is proportional to ``layers * hidden size``. This product is assumed to grow as a power of the number
of parameters. The three values are the product for Llama 3.1 8B, the number of parameters of this model, and
the exponent.
"""


def machine_of_class(name: str, parameters: float = DEFAULT_PARAMETERS, gpus: int = 1) -> Machine:
    """Create a machine with `gpus` GPUs of a class, which run a dense model with 16-bit weights.

    The speeds follow from these assumptions:

    - Prefill takes two operations per token and parameter, at half of the peak rate.
    - Attention takes four operations for each pair of a token and an earlier token, per layer and hidden
      dimension, at the same rate.
    - To generate a token, the GPU reads all weights once, at 40% of the memory bandwidth. One such read
      generates a token for every running request.
    - `gpus` GPUs are `gpus` times as fast as one GPU.

    Raises: `ConfigError` for an unknown class.
    """
    if name not in CLASSES:
        raise ConfigError(
            "machine",
            name,
            f"allowed: a file from `kvoffload calibrate`, or a class: {', '.join(CLASSES)}; the model size "
            f"may follow, as in h100-pcie5:70B{nearest(name, CLASSES)}",
        )
    kind = CLASSES[name]
    flops_per_s = gpus * _PREFILL_SHARE * kind.flops_per_s
    times = f", times {gpus} GPUs without loss" if gpus > 1 else ""
    width = _LAYERS_TIMES_WIDTH * (parameters / _OF_PARAMETERS) ** _GROWS_AS
    prefill = f"{_PREFILL_SHARE:.0%} of the peak of {kind.source}, {parameters / 1e9:g}B dense parameters"
    decode = f"{_DECODE_SHARE:.0%} of the memory's rate of {kind.source}, {parameters / 1e9:g}B at 16 bits"
    link = Quantity.assumed(
        gpus * _LINK_SHARE * kind.link_bytes_per_s,
        f"{_LINK_SHARE:.0%} of {kind.link}, {kind.link_bytes_per_s / 1e9:g} GB/s{times}",
    )
    latency_s = Quantity.assumed(_DISK_LATENCY_S, _DISK_SOURCE + ", and a file system")
    return Machine(
        name=name if gpus == 1 else f"{gpus} x {name}",
        model=f"{parameters / 1e9:g}B dense parameters, 16 bits",
        prefill_s_per_token=Quantity.assumed(2 * parameters / flops_per_s, prefill + times),
        # Over a prompt of n tokens, the numbers of earlier tokens add up to n^2 / 2.
        prefill_s_per_token_squared=Quantity.assumed(4 * width / 2 / flops_per_s, prefill + times),
        step_s=Quantity.assumed(_STEP_S, "scheduling and launching a step of vLLM"),
        decode_tokens_per_s=Quantity.assumed(
            gpus * _DECODE_SHARE * kind.memory_bytes_per_s / (2 * parameters), decode + times
        ),
        load_bytes_per_s=link,
        store_bytes_per_s=link,
        copy_latency_s=Quantity.assumed(_COPY_LATENCY_S, "launching a batch of copies"),
        disk_read_bytes_per_s=Quantity.assumed(_DISK_READ, _DISK_SOURCE),
        disk_write_bytes_per_s=Quantity.assumed(_DISK_WRITE, _DISK_SOURCE),
        disk_read_latency_s=latency_s,
        disk_write_latency_s=latency_s,
        facts={"gpu": kind.gpu, "link": kind.link},
    )


_CLASS = re.compile(r"([a-z0-9-]+)(?::(\d+(?:\.\d+)?)\s*B)?", re.IGNORECASE)


def parse_class(text: str, gpus: int = 1) -> Machine:
    """Parse a class, with or without a model size, such as ``h100-pcie5:70B``. Raises `ConfigError`."""
    match = _CLASS.fullmatch(text.strip())
    if match is None or (match[2] is not None and float(match[2]) <= 0):
        return machine_of_class(text)  # raises
    parameters = float(match[2]) * 1e9 if match[2] else DEFAULT_PARAMETERS
    return machine_of_class(match[1].lower(), parameters, gpus)
