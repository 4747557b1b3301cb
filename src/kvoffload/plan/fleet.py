"""The engines that RAM, SSDs and cache servers are bought for, and what can be bought for them. Knows sizes;
no traces.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from kvoffload.errors import ConfigError, check_integer
from kvoffload.plan.prices import Prices
from kvoffload.replay.routing import SESSION, check_instances, check_routing
from kvoffload.settings.read import MOST_BLOCKS
from kvoffload.simulate.machine import Machine
from kvoffload.traces.load import check_load

_MOST_GPUS = 4096
SERVER_BYTES_PER_BYTE = 1.03
"""Memory that a server takes for a byte of blocks: 1.003 to 1.029, measured (docs/cluster.md, How large)."""


class Purchase(NamedTuple):
    """Modules of RAM and drives for each host, which all get the same, and servers for all of them.

    There are drives or servers, not both.
    """

    modules: int
    drives: int
    servers: int = 0


NOTHING = Purchase(0, 0)


@dataclass(frozen=True)
class Fleet:
    """The engines, their traffic, and what is for sale. What cannot be is a `ConfigError` at construction.

    Attributes:
        gpus, kv_bytes_per_gpu: memory for blocks that is there already.
        block_bytes: of a block of the trace, in all layers and ranks of an engine together.
        replicas: engines; each has its part of the GPUs, the RAM and the SSDs, and shares none of it. Servers
            are of all.
        routing: how requests are divided among them (`replay.routing`).
        load: sessions at a time, over those of the recording (`traces.load`).
        scale: requests of the fleet, over those of the recording: the recording is a sample of sessions. What
            a cache of some size does for all of them, one of that part of the size does for the sample.
        prefill_tokens_per_s: that a GPU computes; 0: not given.
        prices: what is for sale.
        machine: of one engine, all its GPUs together; None: nothing is known of time. The numbers of its
            disk are of one drive.
    """

    gpus: int
    kv_bytes_per_gpu: int
    block_bytes: int
    prices: Prices
    replicas: int = 1
    routing: str = SESSION
    load: float = 1.0
    scale: float = 1.0
    prefill_tokens_per_s: float = 0.0
    machine: Machine | None = None

    def __post_init__(self) -> None:
        check_integer("gpus", self.gpus, _MOST_GPUS)
        check_routing(self.routing)
        check_instances(self.replicas, "replicas")
        check_load(self.load)
        if self.gpus % self.replicas:
            raise ConfigError("replicas", self.replicas, f"allowed: what {self.gpus} GPUs can be divided by")
        if not 0 < self.scale < math.inf:
            raise ConfigError("scale", self.scale, "allowed: a number above 0: requests over those recorded")
        if not 0 <= self.prefill_tokens_per_s < math.inf:
            raise ConfigError("prefill-tokens-per-s", self.prefill_tokens_per_s, "allowed: tokens per second")
        if not 1 <= self.device_blocks <= MOST_BLOCKS:
            why = f"a replica has {self.device_blocks:,} blocks of {self.block_bytes:,} B; allowed: 1 or more"
            raise ConfigError("kv-per-gpu", self.kv_bytes_per_gpu, why)
        if self.machine is not None:
            self.machine.check(has_ram=True, has_disk=self.prices.ssd.slots > 0)

    @property
    def may_share(self) -> bool:
        """Whether there is somebody to share servers with, and there are any."""
        return self.replicas > 1 and self.prices.server.slots > 0

    @property
    def gpus_of_engine(self) -> int:
        """GPUs of each replica."""
        return self.gpus // self.replicas

    @property
    def tokens_per_s(self) -> float:
        """That a GPU computes: as given, else by the machine, without attention to what is before; 0: not
        known."""
        if self.prefill_tokens_per_s or self.machine is None:
            return self.prefill_tokens_per_s
        of_engine_s = self.machine.value("prefill_s_per_token")
        return 1.0 / (of_engine_s * self.gpus_of_engine) if of_engine_s else 0.0

    @property
    def device_blocks(self) -> int:
        """Blocks that the GPUs of a replica hold, of what the recording asks for."""
        return self.blocks(self.gpus * self.kv_bytes_per_gpu)

    @property
    def hosts(self) -> int:
        """Machines."""
        return -(-self.gpus // self.prices.gpus_per_host)

    def blocks(self, size_bytes: int) -> int:
        """The blocks of a replica, of so many bytes for all of them, for what the recording asks for."""
        return int(size_bytes / (self.replicas * self.block_bytes * self.scale))

    def size_bytes(self, blocks: int) -> int:
        """What so many blocks of the recording take, for all that the fleet is asked for."""
        return round(blocks * self.block_bytes * self.scale)

    def ram_bytes(self, purchase: Purchase) -> int:
        """RAM for blocks, all hosts together."""
        return self.hosts * purchase.modules * self.prices.ram.module_bytes

    def ssd_bytes(self, purchase: Purchase) -> int:
        """SSDs for blocks, all hosts together."""
        return self.hosts * purchase.drives * self.prices.ssd.drive_bytes

    def server_bytes(self, purchase: Purchase) -> int:
        """Memory of all servers together."""
        return purchase.servers * self.prices.server.memory_bytes

    def server_blocks(self, purchase: Purchase) -> int:
        """The blocks that all servers hold, of what the recording asks for: those of all replicas."""
        taken = SERVER_BYTES_PER_BYTE * self.block_bytes * self.scale
        return int(self.server_bytes(purchase) / taken)

    def price(self, purchase: Purchase) -> float:
        """Of all hosts and servers together."""
        per_host = purchase.modules * self.prices.ram.price + purchase.drives * self.prices.ssd.price
        return self.hosts * per_host + purchase.servers * self.prices.server.price

    def steps(self, footprint_blocks: int) -> tuple[list[int], list[int]]:
        """How many modules and how many drives a host may get, coarse, in ascending order; no drives first.

        From the fewest that are a block up to what a host can take. Of RAM no more than a replica is asked
        for: what more would do cannot be told from the recording. More drives wear out later.
        """
        ram = [self.blocks(self.ram_bytes(Purchase(n, 0))) for n in range(self.prices.ram.slots + 1)]
        ssd = [self.blocks(self.ssd_bytes(Purchase(0, n))) for n in range(self.prices.ssd.slots + 1)]
        useful = [n for n in range(1, len(ram)) if ram[n] >= 1 and ram[n - 1] < footprint_blocks]
        return _coarse(useful), [0, *_coarse([n for n in range(1, len(ssd)) if ssd[n] >= 1])]

    def server_steps(self, unique_blocks: int) -> list[int]:
        """How many servers the fleet may get, coarse, in ascending order.

        From the fewest that are a block up to what is for sale, and no more than hold all that is asked for.
        """
        held = [self.server_blocks(Purchase(0, 0, n)) for n in range(self.prices.server.slots + 1)]
        return _coarse([n for n in range(1, len(held)) if held[n] >= 1 and held[n - 1] < unique_blocks])


def _coarse(counts: list[int]) -> list[int]:
    """Of counts in a row, the first, each that is twice the one before, and the last."""
    found = counts[:1]
    while found and 2 * found[-1] < counts[-1]:
        found.append(2 * found[-1])
    return sorted({*found, *counts[-1:]})
