"""The fleet of engines, and the possible purchases for it. Knows sizes and prices, but no traces."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, NamedTuple

import msgspec

from kvoffload.errors import ConfigError
from kvoffload.plan.prices import Prices
from kvoffload.replay.routing import SESSION, Instances, Routing
from kvoffload.settings.read import MOST_BLOCKS, NotNegative, Positive, check_fields
from kvoffload.simulate.machine import Machine

_MOST_GPUS = 4096
SERVER_BYTES_PER_BYTE = 1.03
"""Bytes of server memory for each byte of blocks. Measured: 1.003 to 1.029 (docs/cluster.md, How large)."""


class Purchase(NamedTuple):
    """A purchase: RAM modules and SSD drives for each host, and servers for the whole fleet.

    All hosts get the same modules and drives. A purchase cannot have both drives and servers.
    """

    modules: int
    drives: int
    servers: int = 0


NOTHING = Purchase(0, 0)


@dataclass(frozen=True)
class Fleet:
    """Engines, their traffic and the prices.

    Attributes:
        gpus: number of GPUs.
        kv_bytes_per_gpu: bytes of GPU memory for blocks, on each GPU.
        block_bytes: bytes of a trace block, summed over an engine's layers and ranks.
        replicas: number of engines. GPUs, RAM and SSDs are divided equally; servers are shared.
        routing: rule that assigns requests to engines (`replay.routing`).
        load: concurrent sessions, as a multiple of the concurrent sessions in the recording (`traces.load`).
        scale: requests of the fleet, as a multiple of the requests in the recording, which is a sample of the
            fleet's sessions. Replays of the recording divide cache sizes by the scale.
        prefill_tokens_per_s: prefill speed of a GPU; 0 if not given.
        prices: prices and hardware.
        machine: speeds of one engine (all its GPUs) and of one drive; None: no timed replays.
        shared_ram: also consider one RAM pool for all engines of a host.
        gpu_blocks: number of blocks on the GPUs of an engine, from the engine's log; 0: computed from
            `kv_bytes_per_gpu`.

    Raises: `ConfigError` if a value is out of range, or if the GPUs cannot be divided in this way.
    """

    gpus: Annotated[int, msgspec.Meta(ge=1, le=_MOST_GPUS)]
    kv_bytes_per_gpu: int
    block_bytes: int
    prices: Prices
    replicas: Instances = 1
    routing: Routing = SESSION
    load: Positive = 1.0
    scale: Positive = 1.0
    prefill_tokens_per_s: NotNegative = field(default=0.0, metadata={"option": "prefill-tokens-per-s"})
    machine: Machine | None = None
    shared_ram: bool = False
    gpu_blocks: int = 0

    def __post_init__(self) -> None:
        check_fields(self, "plan")
        if self.shared_ram and (self.replicas % self.hosts or self.replicas == self.hosts):
            why = (
                f"it needs equally many engines in each host, 2 or more: {self.replicas} replicas are on "
                f"{self.hosts} hosts (gpus_per_host in the price file)"
            )
            raise ConfigError("shared-ram", self.shared_ram, why)
        if self.gpus % self.replicas:
            raise ConfigError(
                "replicas", self.replicas, f"allowed: a divisor of {self.gpus}, the number of GPUs"
            )
        if not 1 <= self.device_blocks <= MOST_BLOCKS:
            why = f"a replica has {self.device_blocks:,} blocks; allowed: 1 to {MOST_BLOCKS:,}"
            if self.gpu_blocks:
                raise ConfigError("gpu-tokens", f"{self.gpu_blocks} blocks", why)
            raise ConfigError(
                "kv-per-gpu", self.kv_bytes_per_gpu, f"a block has {self.block_bytes:,} B, and {why}"
            )
        if self.machine is not None:
            self.machine.check(has_ram=True, has_disk=self.prices.ssd.slots > 0)

    @property
    def may_share(self) -> bool:
        """True if there are several replicas and servers for sale, so that replicas may share servers."""
        return self.replicas > 1 and self.prices.server.slots > 0

    @property
    def engines_of_host(self) -> int:
        """Number of engines of a host; with shared RAM, they share a pool."""
        return self.replicas // self.hosts

    @property
    def gpus_of_engine(self) -> int:
        return self.gpus // self.replicas

    @property
    def tokens_per_s(self) -> float:
        """Prefill tokens per second of a GPU; 0 if unknown.

        If no speed is given, this is the speed of the machine, without the cost of attention.
        """
        if self.prefill_tokens_per_s or self.machine is None:
            return self.prefill_tokens_per_s
        of_engine_s = self.machine.value("prefill_s_per_token")
        return 1.0 / (of_engine_s * self.gpus_of_engine) if of_engine_s else 0.0

    @property
    def device_blocks(self) -> int:
        """Number of blocks on the GPUs of a replica, divided by the scale."""
        if self.gpu_blocks:
            return int(self.gpu_blocks / self.scale)
        return self.blocks(self.gpus * self.kv_bytes_per_gpu)

    @property
    def hosts(self) -> int:
        return -(-self.gpus // self.prices.gpus_per_host)

    def blocks(self, size_bytes: int) -> int:
        """Convert bytes of the whole fleet to blocks of one replica, divided by the scale."""
        return int(size_bytes / (self.replicas * self.block_bytes * self.scale))

    def size_bytes(self, blocks: int) -> int:
        """Convert blocks of the recording to bytes of the fleet."""
        return round(blocks * self.block_bytes * self.scale)

    def ram_bytes(self, purchase: Purchase) -> int:
        """Bytes of RAM for blocks, on all hosts."""
        return self.hosts * purchase.modules * self.prices.ram.module_bytes

    def ssd_bytes(self, purchase: Purchase) -> int:
        """Bytes of SSD capacity, on all hosts."""
        return self.hosts * purchase.drives * self.prices.ssd.drive_bytes

    def server_bytes(self, purchase: Purchase) -> int:
        """Bytes of memory of all servers."""
        return purchase.servers * self.prices.server.memory_bytes

    def server_blocks(self, purchase: Purchase) -> int:
        """Number of blocks on all servers, divided by the scale."""
        return int(self.server_bytes(purchase) / (SERVER_BYTES_PER_BYTE * self.block_bytes * self.scale))

    def price(self, purchase: Purchase) -> float:
        """Price of a purchase: all hosts and all servers."""
        per_host = purchase.modules * self.prices.ram.price + purchase.drives * self.prices.ssd.price
        return self.hosts * per_host + purchase.servers * self.prices.server.price

    def holds_blocks(self, purchase: Purchase) -> bool:
        """Return True if each bought part has room for a block: RAM and SSDs of each replica, the servers.

        Replays divide sizes by `scale`, so a part must hold `scale` blocks. At a scale below 1, it must still
        hold one block, because timed replays do not divide sizes.
        """
        block = self.block_bytes * max(1.0, self.scale)
        bought = (
            (purchase.modules, self.ram_bytes(purchase), self.replicas * block),
            (purchase.drives, self.ssd_bytes(purchase), self.replicas * block),
            (purchase.servers, self.server_bytes(purchase), SERVER_BYTES_PER_BYTE * block),
        )
        return all(num_bytes >= least_bytes for count, num_bytes, least_bytes in bought if count)

    def steps(self, footprint_blocks: int) -> tuple[list[int], list[int]]:
        """List the numbers of modules and the numbers of drives per host to try, each in doubling steps.

        The smallest number of each list has room for one block per replica; 0 drives are tried, too. The
        largest number fills the slots of the host. If fewer modules hold all blocks of the recording, the
        list of modules ends there, because the recording cannot show a benefit of more RAM. The list of
        drives does not end early, because more drives wear out later.
        """
        ram = [self.blocks(self.ram_bytes(Purchase(n, 0))) for n in range(self.prices.ram.slots + 1)]
        modules = [n for n in range(1, len(ram)) if ram[n - 1] < footprint_blocks]
        useful = [n for n in modules if self.holds_blocks(Purchase(n, 0))]
        drives = [n for n in range(1, self.prices.ssd.slots + 1) if self.holds_blocks(Purchase(0, n))]
        return _coarse(useful), [0, *_coarse(drives)]

    def server_steps(self, unique_blocks: int) -> list[int]:
        """List the numbers of servers to try, in doubling steps. Stops when all blocks fit."""
        held = [self.server_blocks(Purchase(0, 0, n)) for n in range(self.prices.server.slots + 1)]
        counts = [n for n in range(1, len(held)) if held[n - 1] < unique_blocks]
        return _coarse([n for n in counts if self.holds_blocks(Purchase(0, 0, n))])


def _coarse(counts: list[int]) -> list[int]:
    """Return the first count, its doublings below the last count, and the last count."""
    kept = counts[:1]
    while kept and 2 * kept[-1] < counts[-1]:
        kept.append(2 * kept[-1])
    return sorted({*kept, *counts[-1:]})
