"""Block ids that hide the contents of the blocks: salted, chained hashes."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import TypeAlias

BlockId: TypeAlias = "int | str"

_ID_BYTES = 8
_MAX_SALT_BYTES = 64


class Keys:
    """Computes the 64-bit ids of blocks, so that an id identifies a whole prefix but reveals no prompt.

    A block's id is the BLAKE2b hash of the id before it and of the block's content, keyed with a salt. With
    the same salt, equal prefixes have equal ids; without the salt, an id cannot be guessed. If the source
    already has ids, the block's id in the source takes the place of the content. Therefore an id of the trace
    identifies a whole prefix, even if the source's id identifies only the content of one block.

    In a trace with 100 million different blocks, two blocks have the same id with a probability of 1/3,700.
    The reader of the trace then rejects the later line, because the same id follows different blocks.

    Args:
        salt: None for a random salt.

    Cost: about 1 us per block. Thread: any.
    """

    def __init__(self, salt: bytes | None = None) -> None:
        salt = secrets.token_bytes(32) if salt is None else salt
        self._salt = blake2b(salt).digest()[:_MAX_SALT_BYTES]

    def after(self, ids: Sequence[BlockId], contents: Iterable[bytes]) -> list[BlockId]:
        """Return `ids` followed by the ids of blocks with these contents."""
        chain, salt = list(ids), self._salt
        parent = _bytes_of(chain[-1]) if chain else b""
        for content in contents:
            parent = blake2b(parent + content, key=salt, digest_size=_ID_BYTES).digest()
            chain.append(int.from_bytes(parent, "little", signed=True))
        return chain

    def root(self, cache_salt: str) -> list[BlockId]:
        """Return a list with an id, derived from `cache_salt`, that precedes the prompt's first block.

        If `cache_salt` is empty, the list is empty.
        """
        return Keys.after(self, (), [cache_salt.encode()]) if cache_salt else []

    def of(self, ids: Iterable[BlockId]) -> list[BlockId]:
        """Return the hashed ids of a prompt's blocks, given the blocks' `ids` in the source, in order."""
        return self.after((), [str(block_id).encode() for block_id in ids])

    def name(self, text: str) -> str:
        """Hash a name, such as a tenant's."""
        return blake2b(text.encode(), key=self._salt, digest_size=_ID_BYTES).hexdigest() if text else ""


class KeptKeys(Keys):
    """Returns the ids and names of the source unchanged."""

    def of(self, ids: Iterable[BlockId]) -> list[BlockId]:
        return list(ids)

    def name(self, text: str) -> str:
        return text


def _bytes_of(block_id: BlockId) -> bytes:
    assert isinstance(block_id, int), "a chain continues only hashed ids"
    return block_id.to_bytes(_ID_BYTES, "little", signed=True)
