"""Decisions stay what they were: digests of long random scripts, made before kernels went by address.

Everything a manager answers is in a digest: slots, rows, evicted keys, counts, order, events, statistics.
"""

from __future__ import annotations

import hashlib
import json
import random
from pathlib import Path
from typing import Any

import pytest

from kvoffload.core.manager import OffloadingManager
from kvoffload.core.plans import STORES
from kvoffload.core.policy import POLICIES
from kvoffload.errors import MisuseError
from kvoffload.structures.keys import Keys

PINNED = Path(__file__).parent / "data" / "decisions.json"
POLICY_NAMES = (
    "2q",
    "arc",
    "fifo",
    "gdsf",
    "hazard",
    "lfu",
    "lirs",
    "lru",
    "s3fifo",
    "sieve",
    "slru",
    "wtinylfu",
)
NUM_KEYS, NUM_STEPS = 400, 700


class Script:
    """One manager under one random script; `digest` has heard everything."""

    def __init__(
        self, policy: str, admission: str, store: str, key_bytes: int, capacity: int, seed: int
    ) -> None:
        self.chance = random.Random(f"{seed} {key_bytes} {capacity}")
        self.key_bytes, self.digest = key_bytes, hashlib.sha256()
        self.keys = [hashlib.sha512(b"%d" % n).digest()[:key_bytes] for n in range(NUM_KEYS)]
        self.manager = OffloadingManager(
            capacity, key_bytes=key_bytes, policy=policy, admission=admission, store=store, enable_events=True
        )
        self.requests: list[Any] = []
        self.stores: list[Any] = []
        self.loads: list[Any] = []

    def say(self, *facts: object) -> None:
        self.digest.update(repr(facts).encode())

    def chain(self) -> list[bytes]:
        """Some of the keys: mostly a chain from one of a few heads, as prompts have; sometimes long."""
        first = self.chance.choice((0, 0, 0, 40, 40, 80, 150, 220, 300, self.chance.randrange(NUM_KEYS)))
        length = self.chance.choice((1, 1, 2, 3, 5, 8, 13, 20, 33, 70))
        return self.keys[first : first + length]

    def batch(self, keys: list[bytes]) -> list[bytes] | Keys:
        return Keys.pack(keys, self.key_bytes) if self.chance.random() < 0.4 else keys

    def request(self) -> Any:
        while len(self.requests) < 4:
            path = self.chain() if self.chance.random() < 0.3 else ()
            self.requests.append(self.manager.begin_request(f"r{len(self.requests)}", path))
        return self.chance.choice((*self.requests, *self.requests, None))

    def step(self) -> None:
        kind = self.chance.choices(
            ("store", "stored", "load", "loaded", "lookup", "touch", "finish", "misc", "reset"),
            (28, 28, 14, 14, 14, 4, 10, 6, 0.15),
        )[0]
        getattr(self, kind)()
        stats = self.manager.stats()
        self.say(
            kind,
            sorted((k, v) for k, v in vars(stats).items() if k != "policy"),
            sorted(stats.policy.items()),
        )
        for event in self.manager.take_events():
            self.say(list(event.keys), event.removed)

    def store(self) -> None:
        ctx, keys = self.request(), self.batch(self.chain())
        plan = self.manager.prepare_store(keys, ctx, admitted=self.chance.random() < 0.1)
        if plan is None:
            self.say("no room")
            return
        self.say(list(plan.keys), plan.slots.tolist(), plan.missing_rows.tolist(), plan.rows.tolist())
        self.say(list(plan.evicted), plan.num_dropped, plan.num_refused)
        if self.chance.random() < 0.1:
            self.stores += plan.split()
        else:
            self.stores.append(plan)

    def stored(self) -> None:
        if self.stores:
            plan = self.stores.pop(self.chance.randrange(len(self.stores)))
            self.manager.complete_store(plan, self.chance.random() < 0.9)

    def load(self) -> None:
        ctx, keys = self.request(), self.batch(self.chain())
        found = self.manager.lookup(keys, ctx)
        self.say(found)
        if found.num_ready:
            prepare = self.manager.pin if self.chance.random() < 0.1 else None
            try:
                some = keys[: found.num_ready]
                plan = prepare(some) if prepare else self.manager.prepare_load(some, ctx)
            except MisuseError as error:
                self.say(str(error))
                return
            self.say(plan.slots.tolist())
            self.loads.append((plan, prepare is not None))

    def loaded(self) -> None:
        if self.loads:
            plan, pinned = self.loads.pop(self.chance.randrange(len(self.loads)))
            rows = range(len(plan.slots))
            damaged = self.chance.sample(rows, 1) if self.chance.random() < 0.05 else []
            (self.manager.unpin if pinned else self.manager.complete_load)(plan, damaged)

    def lookup(self) -> None:
        ctx, keys = self.request(), self.chain()
        if self.chance.random() < 0.5:
            self.say([self.manager.lookup_key(key, ctx) for key in keys])
        else:
            self.say(self.manager.lookup(self.batch(keys), ctx))
        self.say(self.manager.contains(self.batch(keys), ctx).tolist())

    def touch(self) -> None:
        self.manager.touch(self.batch(self.chain()), self.request())

    def finish(self) -> None:
        if self.requests:
            ctx = self.requests.pop(self.chance.randrange(len(self.requests)))
            self.manager.finish_request(ctx, self.chain() if self.chance.random() < 0.2 else ())

    def misc(self) -> None:
        keys = self.chain()
        if self.chance.random() < 0.3:
            self.say(self.manager.discard(self.batch(keys[:2])))
        self.say(self.manager.slots_of(keys).tolist(), self.manager.ready_slots_of(keys).tolist())
        self.say(self.manager.policy.order())

    def reset(self) -> None:
        self.manager.reset(drop_in_flight=self.chance.random() < 0.3)


def digest(policy: str, store: str) -> str:
    """Of everything that managers of one policy and store mode answer."""
    total = hashlib.sha256()
    for number, (admission, key_bytes, capacity) in enumerate(
        (
            ("all", 16, 60),
            ("all", 36, 150),
            ("reuse:2", 20, 60),
            ("tinylfu", 32, 97),
            ("all", 8, 7),
            ("all", 32, 390),
        )
    ):
        if policy == "arc" and admission != "all":
            admission = "all"
        script = Script(policy, admission, store, key_bytes, capacity, number)
        for _ in range(NUM_STEPS):
            script.step()
        total.update(script.digest.digest())
    return total.hexdigest()


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_decisions_are_what_they_were(policy: str, store: str) -> None:
    assert digest(policy, store) == json.loads(PINNED.read_text())[f"{policy} {store}"]


if __name__ == "__main__":
    assert set(POLICY_NAMES) == set(POLICIES.names())
    PINNED.write_text(
        json.dumps({f"{p} {s}": digest(p, s) for p in POLICY_NAMES for s in STORES}, indent=1) + "\n"
    )
