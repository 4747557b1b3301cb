"""Measures a machine: RAM, the GPU if the machine has one, and optionally a disk and the speed of a running
LLM server."""

from __future__ import annotations

import datetime
import os
import platform
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from kvoffload._version import __version__
from kvoffload.calibration.copy_speed import device_copies, memory_copies
from kvoffload.calibration.disk_speed import disk_speed
from kvoffload.calibration.server_speed import LENGTHS, Server, time_server
from kvoffload.errors import ConfigError
from kvoffload.simulate.machine import Machine, Quantity
from kvoffload.transfer.device import gpu_name


@dataclass(frozen=True)
class Calibration:
    """Options of a calibration.

    Attributes:
        name: name of the machine, for reports.
        disk: directory on the disk to measure; None skips the disk.
        url: URL of the server to measure; None skips the server.
        served_model: name of the model on that server; None takes the server's first model.
        block_bytes: bytes of one block.
        total_bytes: number of bytes that one measurement copies.
        repeats: number of measurements of each quantity.
        step_tokens: largest number of tokens that the server computes in one step.
        lengths: prompt lengths to measure, in tokens.
    """

    name: str = "measured"
    disk: Path | None = None
    url: str | None = None
    served_model: str | None = None
    block_bytes: int = 2 << 20
    total_bytes: int = 512 << 20
    repeats: int = 7
    step_tokens: int = 8192
    lengths: tuple[int, ...] = LENGTHS

    def __post_init__(self) -> None:
        if self.block_bytes < 4096 or self.block_bytes % 4096:
            raise ConfigError("block_bytes", self.block_bytes, "allowed: a multiple of 4096")
        if self.total_bytes < 2 * self.block_bytes:
            raise ConfigError("total_bytes", self.total_bytes, "allowed: two blocks or more")
        for field in ("repeats", "step_tokens"):
            if getattr(self, field) < 1:
                raise ConfigError(field, getattr(self, field), "allowed: 1 or more")
        if self.served_model is not None and self.url is None:
            raise ConfigError("model", self.served_model, "it needs the URL of a server: add --url")


def calibrate(options: Calibration, report: Callable[[str], None] = lambda line: None) -> Machine:
    """Measure this machine; `report` receives a line before each step.

    Cost: seconds for RAM and GPU, minutes for a slow disk or server. Raises: `ConfigError` for an unusable
    disk or server, before the first measurement if possible.
    """
    server = Server(options.url, options.served_model) if options.url is not None else None
    size, num_blocks = options.block_bytes, options.total_bytes // options.block_bytes
    quantities: dict[str, Quantity] = {}
    if options.disk is not None:
        report(f"disk {options.disk}")
        quantities |= disk_speed(options.disk, size, num_blocks, options.repeats)
    report("memory")
    quantities |= memory_copies(size, num_blocks, options.repeats)
    report("GPU copies")
    quantities |= device_copies(size, num_blocks, options.repeats)
    if server is not None:
        report(f"server {server.model}")
        times = time_server(server, options.lengths, options.repeats, report)
        quantities |= times.speeds(options.step_tokens)
    now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    machine = Machine(name=options.name, model=server.model if server else "", made=now, facts=_facts())
    return msgspec.structs.replace(machine, **quantities)


def _facts() -> dict[str, str]:
    """Describe the hardware and software of this machine."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    facts = {
        "cpu": _cpu_name() or platform.machine(),
        "cpus": str(os.cpu_count()),
        "memory_bytes": str(memory),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "kvoffload": __version__,
    }
    if name := gpu_name():
        facts["gpu"] = name
    return facts


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
