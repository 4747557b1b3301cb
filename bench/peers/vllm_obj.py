"""Adapter of vLLM's `obj` secondary tier, with NIXL's OBJ plug-in, to `contract`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from peers.contract import Adapter, Place
from peers.doors import BUCKET, KEY_ID, SECRET, Object, namespace, server
from peers.vllm_fs import VllmFs, key_of, vllm_version

# rclone rejects the default checksums of newer SDKs. The tier reads a job's duration from NIXL's telemetry.
os.environ.setdefault("AWS_REQUEST_CHECKSUM_CALCULATION", "when_required")
os.environ.setdefault("AWS_RESPONSE_CHECKSUM_VALIDATION", "when_required")
os.environ.setdefault("NIXL_TELEMETRY_ENABLE", "y")


class VllmObj(VllmFs):
    """A `Product`: vLLM's `obj` tier."""

    def __init__(self, directory: Path, model: str, block_bytes: int, num_blocks: int) -> None:
        store = {"bucket": BUCKET, "endpoint_override": server(), "region": "us-east-1"}
        store |= {"access_key": KEY_ID, "secret_key": SECRET}
        tier = {"type": "obj", "store_config": store, "prefix": namespace(directory)}
        self._open(tier, model, block_bytes, num_blocks)

    def _object(self, number: int) -> Object:
        """Return the object of a block. rclone treats the two slashes behind the prefix as one."""
        name = str(self._tier._file_mapper.get_file_name(key_of(number)))
        return Object(server(), name.replace("//", "/"))

    def forget(self, numbers: Sequence[int]) -> None:
        """Delete the objects in the server, because the tier never removes sound blocks."""
        for number in numbers:
            self._object(number).delete()

    def places(self, numbers: Sequence[int]) -> dict[int, Place]:
        """Locate existing objects."""
        objects = ((number, self._object(number)) for number in numbers)
        return {number: Place(item, 0, size) for number, item in objects if (size := item.size())}

    def records(self) -> list[Place]:
        return []


ADAPTERS = {
    "vllm-obj": Adapter(f"{vllm_version()}, NIXL {version('nixl')}", '`{"type": "obj"}`, defaults', VllmObj)
}
