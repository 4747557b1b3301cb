"""A scheduler with RAM and a disk: no step waits, and a restart finds the blocks again.

docs/start-engine.md explains the calls and shows the output:

    python examples/tiered_engine.py
"""

import tempfile
import time

import numpy as np

from kvoffload import Keys, LookupResult, MemoryTier, TieredManager, open_tier

BLOCK_BYTES, RAM_BLOCKS = 65_536, 16
TIER = f"disk:{tempfile.mkdtemp()}:64MiB"  # yours: disk:/nvme/kv:1TiB, or valkey://cache:6379/team-a
kv_cache = np.zeros((64, BLOCK_BYTES), np.uint8)


class Engine:
    def __init__(self):
        tier = open_tier(TIER, block_bytes=BLOCK_BYTES, fingerprint="my-model bf16 layout-1")
        self.ram = MemoryTier(RAM_BLOCKS, BLOCK_BYTES)
        self.manager = TieredManager(RAM_BLOCKS, key_bytes=32, ram=self.ram, tiers=[tier])
        self.waiting = []

    def add(self, request_id, block_hashes):
        keys = Keys.pack(block_hashes, key_bytes=32)
        self.waiting.append((keys, self.manager.begin_request(request_id, keys)))

    def step(self):
        """Serve each request with its blocks in RAM. Other requests wait, and do not block the engine."""
        self.manager.poll()  # once a step: ends and begins jobs of the tiers
        for keys, ctx in self.waiting.copy():
            hits = self.manager.lookup(keys, ctx)
            if hits.stopped_by is LookupResult.RETRY:  # a tier is read: look up again next step
                continue
            self.waiting.remove((keys, ctx))
            self.serve(keys, ctx, hits.num_ready)

    def serve(self, keys, ctx, num_ready):
        rows = np.arange(len(keys))  # yours: the rows that your engine has allocated
        if num_ready:
            plan = self.manager.prepare_load(keys[:num_ready], ctx)
            sound = self.ram.read(plan.keys, plan.slots, kv_cache, rows[:num_ready])
            self.manager.complete_load(plan, damaged=np.flatnonzero(~sound))
            num_ready = num_ready if sound.all() else int(sound.argmin())
        kv_cache[rows[num_ready:]] = 7  # yours: compute the missing blocks
        plan = self.manager.prepare_store(keys, ctx)
        if plan is not None:
            self.ram.write(plan.keys, plan.slots, kv_cache, rows[plan.rows])
            self.manager.complete_store(plan)  # offers the blocks to the tier, which writes them later
        self.manager.finish_request(ctx)

    def run(self):
        while self.waiting:
            self.step()
            time.sleep(0.001)  # yours: the forward pass

    def close(self):
        self.manager.flush(timeout_s=10)  # writes the blocks of RAM that the tier lacks
        self.manager.close()  # closes the tiers; queued blocks would be lost here


prompt = [bytes([number]) * 32 for number in range(8)]
for life in ("first", "second"):
    engine = Engine()
    engine.add(f"{life} life", prompt)
    engine.run()
    from_ram, from_tier = engine.manager.hit_blocks
    print(f"{life} life: {from_ram} blocks from RAM, {from_tier} from the disk")
    engine.close()
