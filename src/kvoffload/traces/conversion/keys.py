"""Ids of blocks that hide the contents: salted, chained hashes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import TypeAlias

BlockId: TypeAlias = "int | str"

_ID_BYTES = 8
_MAX_SALT_BYTES = 64


class Keys:
    """Ids of 64 bits: BLAKE2b, keyed with a salt, of the previous id and the block's content.

    Equal prefixes have equal ids under one salt. Without the salt an id reveals no prompt and cannot be
    guessed. Ids of a source are hashed with their predecessors too, so that a trace is chained even if the
    source's ids cover only a block's own content.

    Collisions: one trace in 3,700 with 100 million different blocks; a reader then refuses the line.

    Cost: about 1 us a block. Thread: any.
    """

    def __init__(self, salt: bytes) -> None:
        self._salt = blake2b(salt).digest()[:_MAX_SALT_BYTES]

    def after(self, ids: Sequence[BlockId], contents: Iterable[bytes]) -> list[BlockId]:
        """Return `ids`, extended by ids for blocks with these contents."""
        chain, salt = list(ids), self._salt
        parent = _bytes_of(chain[-1]) if chain else b""
        for content in contents:
            parent = blake2b(parent + content, key=salt, digest_size=_ID_BYTES).digest()
            chain.append(int.from_bytes(parent, "little", signed=True))
        return chain

    def of(self, ids: Iterable[BlockId]) -> list[BlockId]:
        """Hash the ids of a source."""
        return self.after((), [str(block_id).encode() for block_id in ids])

    def name(self, text: str) -> str:
        """Hash a name, such as a tenant's."""
        return blake2b(text.encode(), key=self._salt, digest_size=_ID_BYTES).hexdigest() if text else ""


class KeptKeys(Keys):
    """Unchanged ids and names of the source."""

    def of(self, ids: Iterable[BlockId]) -> list[BlockId]:
        """Return the ids unchanged."""
        return list(ids)

    def name(self, text: str) -> str:
        """Return the name unchanged."""
        return text


def _bytes_of(block_id: BlockId) -> bytes:
    assert isinstance(block_id, int), "a chain continues only hashed ids"
    return block_id.to_bytes(_ID_BYTES, "little", signed=True)
