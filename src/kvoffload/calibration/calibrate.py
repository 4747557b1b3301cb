"""A machine, measured: memory, GPU, disk and server, each as far as it is there."""

from __future__ import annotations

import datetime
import os
import platform
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from kvoffload._version import __version__
from kvoffload.calibration.copies import device_copies, memory_copies
from kvoffload.calibration.disk import disk_speed
from kvoffload.calibration.server import LENGTHS, Server, server_speed
from kvoffload.errors import ConfigError
from kvoffload.simulate.machine import Machine, Quantity
from kvoffload.transfer.device import gpu_name


@dataclass(frozen=True)
class Calibration:
    """What is measured, and how much of it.

    Attributes:
        name: of the machine, for reports.
        disk: a directory on the disk; None for none. url: of a server; None for none.
        served_model: the name of a model that the server has; None for its first.
        block_bytes, total_bytes: of a block, and of all blocks of one measurement; repeats: how often.
        step_tokens: that the server computes in a step. lengths: tokens of the prompts that are tried.
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
        if self.repeats < 1:
            raise ConfigError("repeats", self.repeats, "allowed: 1 or more")
        if self.step_tokens < 1:
            raise ConfigError("step_tokens", self.step_tokens, "allowed: 1 or more")
        if self.served_model is not None and self.url is None:
            raise ConfigError("model", self.served_model, "it is that of a server: give --url")


def calibrate(what: Calibration, say: Callable[[str], None] = lambda line: None) -> Machine:
    """Measure this machine. `say` is told what is being done.

    Takes a few seconds for memory and GPU, minutes for a slow disk or server. Raises: `ConfigError` for a
    disk or server that cannot be used, before anything is measured where that can be known.
    """
    server = Server(what.url, what.served_model) if what.url is not None else None
    size, num_blocks = what.block_bytes, what.total_bytes // what.block_bytes
    found: dict[str, Quantity] = {}
    if what.disk is not None:
        say(f"disk {what.disk}")
        found |= disk_speed(what.disk, size, num_blocks, what.repeats)
    say("memory")
    found |= memory_copies(size, num_blocks, what.repeats)
    say("GPU copies")
    found |= device_copies(size, num_blocks, what.repeats)
    if server is not None:
        say(f"server {server.model}")
        found |= server_speed(server, what.lengths, what.repeats, what.step_tokens, say)
    now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    known = Machine(name=what.name, model=server.model if server else "", made=now, facts=machine_facts())
    return msgspec.structs.replace(known, **found)


def machine_facts() -> dict[str, str]:
    """What this machine is, for people who read its numbers later."""
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
