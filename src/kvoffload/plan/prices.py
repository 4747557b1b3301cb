"""Prices and limits of RAM, SSDs and cache servers. A file can replace the assumed defaults.

Every hardware number of a plan is here. Knows no traces.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec

from kvoffload.errors import ConfigError, Problems
from kvoffload.settings.read import parse_size

_Positive = Annotated[float, msgspec.Meta(gt=0, le=1e15)]
_NotNegative = Annotated[float, msgspec.Meta(ge=0, le=1e15)]
_Count = Annotated[int, msgspec.Meta(ge=1, le=1024)]
_NoneOrMore = Annotated[int, msgspec.Meta(ge=0, le=1024)]


class _Part(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A section of the price file. Sizes are strings, as on the command line."""

    def _size(self, name: str) -> int:
        return parse_size(name, getattr(self, name))


class Ram(_Part, frozen=True, kw_only=True):
    """RAM modules for blocks. `slots`: largest number of modules per host, without the host's own RAM."""

    module: str = "64GiB"
    price: _NotNegative = 640.0
    slots: _Count = 16

    @property
    def module_bytes(self) -> int:
        return self._size("module")


class Ssd(_Part, frozen=True, kw_only=True):
    """SSD drives. `slots`: largest number of drives per host; 0 means no SSDs.

    A drive is rated for a daily write volume of `writes_per_day` times its capacity, during `life_years`
    years. A purchase must not exceed this rating.
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
        return self._size("drive")

    @property
    def read_bytes_per_s(self) -> int:
        return self._size("read_per_s")

    @property
    def write_bytes_per_s(self) -> int:
        return self._size("write_per_s")


class Server(_Part, frozen=True, kw_only=True):
    """Servers of a Valkey cluster that all engines share.

    Attributes:
        memory: ``maxmemory`` of a server.
        link_per_s: network bandwidth of a server, in each direction.
        host_link_per_s: network bandwidth of an engine's host, in each direction.
        slots: largest number of servers for the fleet; 0: no servers.
    """

    memory: str = "460GiB"
    price: _NotNegative = 8000.0
    slots: _NoneOrMore = 8
    link_per_s: str = "12.5GB"
    host_link_per_s: str = "25GB"

    @property
    def memory_bytes(self) -> int:
        return self._size("memory")

    @property
    def link_bytes_per_s(self) -> int:
        return self._size("link_per_s")

    @property
    def host_link_bytes_per_s(self) -> int:
        return self._size("host_link_per_s")


class Prices(_Part, frozen=True, kw_only=True):
    """Prices and hardware.

    Attributes:
        currency, source, date: currency and origin of the prices. Answers show all three.
        gpu_hour: price of an hour of one GPU. 0: unknown, so that no payback is computed.
        gpus_per_host: GPUs that share a host's RAM and SSDs.
        link_per_s: bandwidth between a GPU and its host, in each direction.
    """

    currency: str = "USD"
    source: str = "assumed by kvoffload, not a quotation: replace them by yours"
    date: str = "2026-11"
    gpu_hour: _NotNegative = 2.5
    gpus_per_host: _Count = 8
    link_per_s: str = "50GB"
    ram: Ram = Ram()
    ssd: Ssd = Ssd()
    server: Server = Server()

    @property
    def link_bytes_per_s(self) -> int:
        return self._size("link_per_s")


MEANING = {
    "currency": "currency of all prices",
    "source": "source of the prices",
    "date": "date of the prices",
    "gpu_hour": "price of an hour of one GPU, rented; 0: no payback is computed",
    "gpus_per_host": "GPUs that share the RAM and SSDs of a host",
    "link_per_s": "GPU to host, each direction; PCIe 5.0 x16 has a nominal 63 GB/s",
    "ram.module": "size of a RAM module; every host gets the same number",
    "ram.price": "price of a module",
    "ram.slots": "most modules for blocks per host",
    "ssd.drive": "capacity of a drive; every host gets the same number",
    "ssd.price": "price of a drive",
    "ssd.slots": "most drives per host; 0: no SSDs",
    "ssd.read_per_s": "read bandwidth of a drive; PCIe 4.0 x4, data sheet of the Samsung PM9A3",
    "ssd.write_per_s": "write bandwidth of a drive; the same data sheet",
    "ssd.writes_per_day": "rated drive writes per day",
    "ssd.life_years": "years of the rating; a drive must last this long",
    "server.memory": "maxmemory of a shared Valkey server: 512 GiB less 10%",
    "server.price": "price of such a machine: eight RAM modules (5,120) and the rest",
    "server.slots": "most servers for the fleet; 0: none",
    "server.link_per_s": "network of a server, each direction; nominal 100 Gbit/s",
    "server.host_link_per_s": "network of a host, each direction; nominal 200 Gbit/s",
}
"""Description of each number, for the price file and for answers."""


def flattened(prices: Prices) -> dict[str, object]:
    """Flatten prices to a dict with the keys of `MEANING`."""
    values: dict[str, object] = {}
    for name, value in msgspec.to_builtins(prices).items():
        inner = value.items() if isinstance(value, dict) else ()
        values |= {f"{name}.{field}": number for field, number in inner} or {name: value}
    return values


def as_toml(prices: Prices) -> str:
    """Format prices as a TOML file for `read_prices`, with a comment on each line."""
    lines, section = ["# Prices and hardware for kvoffload plan --prices FILE"], ""
    for name, value in flattened(prices).items():
        header, _, short = name.rpartition(".")
        if header != section:
            lines += ["", f"[{header}]"]
            section = header
        lines.append(f"{f'{short} = {msgspec.json.encode(value).decode()}':<32} # {MEANING[name]}")
    return "\n".join(lines) + "\n"


def read_prices(path: Path | None) -> Prices:
    """Read prices from a TOML or JSON file.

    Missing fields get their defaults. If `path` is None, all fields have their defaults.

    Raises `ConfigError` with the name of the field.
    """
    prices = Prices()
    if path is not None:
        decode = msgspec.json.decode if path.suffix == ".json" else msgspec.toml.decode
        try:
            prices = decode(path.read_bytes(), type=Prices)
        except OSError as error:
            raise ConfigError("prices", str(path), f"it cannot be read ({error.strerror})") from None
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            why = f"{error}; kvoffload plan --show-prices prints a file to edit"
            raise ConfigError("prices", str(path), why) from None
    problems = Problems("prices")
    for prefix, section, names in (
        ("", prices, ("link_per_s",)),
        ("ram.", prices.ram, ("module",)),
        ("ssd.", prices.ssd, ("drive", "read_per_s", "write_per_s")),
        ("server.", prices.server, ("memory", "link_per_s", "host_link_per_s")),
    ):
        for name in names:
            field, value = prefix + name, getattr(section, name)
            with problems:
                if parse_size(field, value) < 1:
                    raise ConfigError(field, value, "allowed: at least one byte")
    problems.check()
    return prices
