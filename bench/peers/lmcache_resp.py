"""Adapter of LMCache's `resp`, its client of Redis and Valkey servers, to `contract`."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from lmcache.v1.distributed.l2_adapters.native_connector_l2_adapter import _object_key_to_string
from lmcache.v1.distributed.l2_adapters.resp_l2_adapter import RESPL2AdapterConfig

from peers.contract import Adapter, Place
from peers.doors import Values, ask, namespace, server
from peers.lmcache_fs import OFF, LmcacheFs


class LmcacheResp(LmcacheFs):
    """A `Product`: `resp`. Its keys contain the scene and the model."""

    def __init__(self, directory: Path, model: str, block_bytes: int, num_blocks: int) -> None:
        config = RESPL2AdapterConfig.from_dict({"host": "127.0.0.1", "port": int(server())})
        self._open(config, f"{namespace(directory)}/{model}", block_bytes, num_blocks)

    def forget(self, numbers: Sequence[int]) -> None:
        """Delete the values in the server, because the client cannot delete."""
        for value in self._values(numbers):
            ask(value.port, b"DEL", *value.names)

    def places(self, numbers: Sequence[int]) -> dict[int, Place]:
        """Locate existing values."""
        values = zip(numbers, self._values(numbers), strict=True)
        return {number: Place(value, 0, size) for number, value in values if (size := value.size())}

    def _values(self, numbers: Sequence[int]) -> list[Values]:
        port = int(server())
        return [Values(port, (_object_key_to_string(self._key(number)).encode(),)) for number in numbers]


ADAPTERS = {
    "lmcache-resp": Adapter(
        version("lmcache"), f'`{{"type": "resp"}}`, defaults: 8 workers; {OFF}', LmcacheResp
    )
}
