"""A minimal engine that stores its KV blocks with kvoffload.

A real engine has attention kernels instead of a hash, and makes the same calls: look up a prefix, load the
ready blocks, compute the missing blocks, offer all blocks, finish.
"""

from __future__ import annotations

import hashlib

import numpy as np

from kvoffload import Keys, MemoryTier, OffloadingManager

BLOCK_TOKENS, BLOCK_BYTES, DEVICE_BLOCKS = 16, 4096, 64


class Engine:
    """An engine that computes prompts block by block, and keeps computed blocks in host RAM.

    Attributes:
        num_computed: number of computed blocks.
    """

    def __init__(self, ram_blocks: int, policy: str = "lru") -> None:
        self.manager = OffloadingManager(ram_blocks, key_bytes=32, policy=policy)
        self.ram = MemoryTier(ram_blocks, BLOCK_BYTES)
        self.kv_cache = np.zeros((DEVICE_BLOCKS, BLOCK_BYTES), np.uint8)
        self.num_computed = 0

    def run(self, name: str, tokens: list[int]) -> bytes:
        """Return the KV cache of a prompt with at most `DEVICE_BLOCKS` full blocks."""
        hashes = block_hashes(tokens)
        keys, count = Keys.pack(hashes, key_bytes=32), len(hashes)
        request = self.manager.begin_request(name, keys)
        num_ready = self.manager.lookup(keys, request).num_ready
        if num_ready:
            plan = self.manager.prepare_load(keys[:num_ready], request)
            sound = self.ram.read(plan.keys, plan.slots, self.kv_cache, np.arange(num_ready))
            self.manager.complete_load(plan, damaged=np.flatnonzero(~sound))
            # A damaged block is a miss: the engine computes it and all following blocks.
            num_ready = num_ready if sound.all() else int(sound.argmin())
        for row in range(num_ready, count):
            self.kv_cache[row] = np.frombuffer(hashes[row] * (BLOCK_BYTES // 32), np.uint8)
        self.num_computed += count - num_ready
        store = self.manager.prepare_store(keys, request)
        if store is not None:
            self.ram.write(store.keys, store.slots, self.kv_cache, store.rows)
            self.manager.complete_store(store)
        self.manager.finish_request(request)
        return self.kv_cache[:count].tobytes()


def block_hashes(tokens: list[int]) -> list[bytes]:
    """Return a hash for each full block, chained with the hashes of all blocks before."""
    hashes, parent = list[bytes](), b""
    for start in range(0, len(tokens) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        block = np.array(tokens[start : start + BLOCK_TOKENS], np.int64).tobytes()
        parent = hashlib.sha256(parent + block).digest()
        hashes.append(parent)
    return hashes


if __name__ == "__main__":
    engine = Engine(ram_blocks=1000)
    conversation = list(range(20 * BLOCK_TOKENS))
    for turn in range(1, 4):
        engine.run(f"turn-{turn}", conversation[: turn * 6 * BLOCK_TOKENS])
        requested = 6 * turn * (turn + 1) // 2
        print(f"turn {turn}: {engine.num_computed} blocks computed of {requested} so far")
