"""What RAM, SSDs and cache servers cost and can do: the defaults, which are assumptions, and a file that
replaces them.

The one place where numbers of hardware stand. Knows no traces.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec

from kvoffload.errors import ConfigError, Problems
from kvoffload.settings.read import parse_size

_Positive = Annotated[float, msgspec.Meta(gt=0)]
_NotNegative = Annotated[float, msgspec.Meta(ge=0)]
_Count = Annotated[int, msgspec.Meta(ge=1, le=1024)]
_NoneOrMore = Annotated[int, msgspec.Meta(ge=0, le=1024)]


class _Part(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A part of a file of prices. Sizes are texts, as on the command line."""

    def _size(self, name: str) -> int:
        return parse_size(name, getattr(self, name))


class Ram(_Part, frozen=True, kw_only=True):
    """What RAM is bought in. `slots`: modules that a host can take for blocks, besides its own."""

    module: str = "64GiB"
    price: _NotNegative = 640.0
    slots: _Count = 16

    @property
    def module_bytes(self) -> int:
        """Of one module."""
        return self._size("module")


class Ssd(_Part, frozen=True, kw_only=True):
    """What SSDs are bought in. `slots`: drives that a host can take; 0: none are for sale.

    `writes_per_day` (times its capacity) for `life_years` is what a drive is made for; it is to last so long.
    """

    drive: str = "3.84TB"
    price: _NotNegative = 600.0
    slots: _NoneOrMore = 4
    read_per_s: str = "6.5GB"
    write_per_s: str = "3.5GB"
    writes_per_day: _Positive = 1.0
    life_years: _Positive = 5.0

    @property
    def drive_bytes(self) -> int:
        """Of one drive."""
        return self._size("drive")

    @property
    def read_bytes_per_s(self) -> int:
        """Of one drive."""
        return self._size("read_per_s")

    @property
    def write_bytes_per_s(self) -> int:
        """Of one drive."""
        return self._size("write_per_s")


class Server(_Part, frozen=True, kw_only=True):
    """Machines whose RAM all engines share, in a Valkey cluster. `slots`: for the whole fleet; 0: none.

    `memory` is what holds values: ``maxmemory``. `link_per_s` is the network of a server, `host_link_per_s`
    that of a host of engines, each in each direction.
    """

    memory: str = "460GiB"
    price: _NotNegative = 8000.0
    slots: _NoneOrMore = 8
    link_per_s: str = "12.5GB"
    host_link_per_s: str = "25GB"

    @property
    def memory_bytes(self) -> int:
        """Of one server."""
        return self._size("memory")

    @property
    def link_bytes_per_s(self) -> int:
        """Of one server."""
        return self._size("link_per_s")

    @property
    def host_link_bytes_per_s(self) -> int:
        """Of one host."""
        return self._size("host_link_per_s")


class Prices(_Part, frozen=True, kw_only=True):
    """Prices, and what is bought for them.

    Attributes:
        currency, source, date: of the prices; what answers say of them.
        gpus_per_host: how many GPUs share a host's RAM and SSDs.
        link_per_s: between a GPU and its host, in each direction.
    """

    currency: str = "USD"
    source: str = "assumed by kvoffload, not a quotation: replace them by yours"
    date: str = "2026-11"
    gpus_per_host: _Count = 8
    link_per_s: str = "50GB"
    ram: Ram = Ram()
    ssd: Ssd = Ssd()
    server: Server = Server()

    @property
    def link_bytes_per_s(self) -> int:
        """Of one GPU."""
        return self._size("link_per_s")


MEANING = {
    "currency": "of all prices",
    "source": "where the prices are from",
    "date": "when they were true",
    "gpus_per_host": "GPUs that share the RAM and SSDs of a host",
    "link_per_s": "a GPU and its host, each direction; PCIe 5.0 x16 has 63 GB/s on paper",
    "ram.module": "RAM is bought in such modules, equally for all hosts",
    "ram.price": "of a module",
    "ram.slots": "modules that a host can take for blocks",
    "ssd.drive": "SSDs are bought in such drives, equally for all hosts",
    "ssd.price": "of a drive",
    "ssd.slots": "drives that a host can take; 0: no SSDs",
    "ssd.read_per_s": "of a drive; PCIe 4.0 x4, as the Samsung PM9A3 was announced",
    "ssd.write_per_s": "of a drive; the same",
    "ssd.writes_per_day": "that a drive is rated for, in capacities of its own",
    "ssd.life_years": "for which it is rated so, and which it is to last",
    "server.memory": "maxmemory of a Valkey server that all engines share: 512 GiB, less a tenth",
    "server.price": "of such a machine: eight modules of RAM (5,120), and the rest of it",
    "server.slots": "servers for the whole fleet; 0: none",
    "server.link_per_s": "of a server, each direction; 100 Gbit/s on paper",
    "server.host_link_per_s": "between a host and the servers, each direction; 200 Gbit/s on paper",
}
"""What each number means, for the file that people edit and for answers."""


def flattened(prices: Prices) -> dict[str, object]:
    """Name -> value, as in `MEANING`."""
    found: dict[str, object] = {}
    for name, value in msgspec.to_builtins(prices).items():
        inner = value.items() if isinstance(value, dict) else ()
        found |= {f"{name}.{one}": its for one, its in inner} or {name: value}
    return found


def as_toml(prices: Prices) -> str:
    """The file that `read_prices` reads, with what each line means."""
    lines, section = ["# Prices and hardware for kvoffload plan --prices FILE"], ""
    for name, value in flattened(prices).items():
        part, _, short = name.rpartition(".")
        if part != section:
            lines += ["", f"[{part}]"]
            section = part
        lines.append(f"{f'{short} = {msgspec.json.encode(value).decode()}':<32} # {MEANING[name]}")
    return "\n".join(lines) + "\n"


def read_prices(path: Path | None) -> Prices:
    """The prices in a TOML or JSON file, and the defaults for what it leaves out; None: the defaults.

    Raises `ConfigError` that names the field.
    """
    prices = Prices()
    if path is not None:
        decode = msgspec.json.decode if path.suffix == ".json" else msgspec.toml.decode
        try:
            prices = decode(path.read_bytes(), type=Prices)
        except OSError as error:
            raise ConfigError("prices", str(path), f"it cannot be read ({error.strerror})") from None
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            why = f"{error}; kvoffload plan --show-prices prints one that can be edited"
            raise ConfigError("prices", str(path), why) from None
    problems = Problems("prices")
    for part, names in (
        (prices, ("link_per_s",)),
        (prices.ram, ("module",)),
        (prices.ssd, ("drive", "read_per_s", "write_per_s")),
        (prices.server, ("memory", "link_per_s", "host_link_per_s")),
    ):
        for sized in names:
            with problems:
                if part._size(sized) < 1:
                    raise ConfigError(sized, getattr(part, sized), "allowed: at least one byte")
    problems.check()
    return prices
