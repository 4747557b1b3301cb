"""The twin of Hazard."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import islice

from kvoffload.core.policy import EvictionPolicy
from kvoffload.core.protection import Protected
from kvoffload.core.slots import SlotArray
from kvoffload.core.state import REFUSED
from kvoffload.errors import PolicyError
from kvoffload.policies.hazard import history, lifetimes
from kvoffload.policies.hazard import policy as hazard
from kvoffload.policies.hazard.age_buckets import NUM_AGES, age_bounds
from kvoffload.policies.hazard.policy import Hazard
from kvoffload.structures.index import Index
from kvoffload.structures.jit import BoolArray
from kvoffload.structures.keys import Keys
from kvoffload.testing.naive.choice import first_unprotected
from kvoffload.testing.naive.shadow import NaiveShadow, hash_of

NUM_CLASSES, NUM_GAP_CLASSES = history.NUM_CLASSES, history.NUM_GAP_CLASSES


@dataclass
class Known:
    """What the history has of a key; a gap below 0 is not known."""

    count: int
    gap: float
    last: int


@dataclass
class Sampled:
    """A key of the life table: its class, its last use, and the bucket of ages that it has lived to see."""

    block_class: int
    last: int
    age: int = 0


@dataclass
class Block:
    """A block in the order: its class, its last use, and the run that it was put in order with."""

    block_class: int
    last: int
    run: int = -1


class NaiveHazard(EvictionPolicy):
    """Twin of `policies.hazard.Hazard`, its `History` and its `Lifetimes`: dicts and lists.

    Sums and products are taken in the same order, so that two worths are equal here if they are there.

    Attributes:
        blocks: slot to block; `lru`: slots, the coldest first; `classes`: the same for each class.
        history: key to what is known of it, the most recent first.
        sample: key to its line in the life table, the oldest first.
        shadow: the twin of the shadow LRU.
    """

    name = "naive-hazard"
    refuses = True
    history_capacity = Hazard.history_capacity
    sample_capacity = Hazard.sample_capacity
    half_life = Hazard.half_life
    duel_window = Hazard.duel_window
    warm_up = Hazard.warm_up

    def __init__(self, index: Index) -> None:
        super().__init__(index)
        self.bounds: list[int] = age_bounds().tolist()
        self.gap_unit = max(1, self.capacity_blocks // 4)
        self.sampled_one_in = 4
        while self.sample_capacity * self.sampled_one_in < 3 * self.capacity_blocks:
            self.sampled_one_in *= 2
        self.reset()

    def reset(self) -> None:
        self.blocks: dict[int, Block] = {}
        self.lru: list[int] = []
        self.classes: list[list[int]] = [[] for _ in range(NUM_CLASSES)]
        self.history: dict[bytes, Known] = {}
        self.sample: dict[bytes, Sampled] = {}
        self.reused = [[0.0] * NUM_AGES for _ in range(NUM_CLASSES)]
        self.exposed = [[0.0] * NUM_AGES for _ in range(NUM_CLASSES)]
        self.shadow = NaiveShadow(self.capacity_blocks)
        self.oldest_victim = 0
        self.now = self.references = self.next_duel = self.num_runs = 0
        self.is_victim_tier = False
        self.lead, self.lru_windows, self.next_lru_windows = 0.0, 0, 1
        self.evaluated = 0
        self._evaluate()

    # ---- what a request teaches

    def observe(self, path: Keys, slots: SlotArray, start: int) -> None:
        self.now = self.references
        keys = list(path)
        classes = self._remember(keys, start)
        self._live_on(keys[start:], classes)
        held = []
        for slot, block_class in [*zip(slots.tolist(), classes, strict=True)][::-1]:
            block = self.blocks.get(slot)
            if block is not None:
                self.classes[block.block_class].remove(slot)
                self.classes[block_class].append(slot)
                block.block_class, block.last = block_class, self.now
            held.append(block is not None)
        self.shadow.observe(keys[start:], held[::-1], self.is_victim_tier)
        self.references += len(slots)
        if self.references >= self.next_duel:
            self._end_duel_window()

    def _end_duel_window(self) -> None:
        shadow = self.shadow
        self.lead = 0.5 * self.lead + 0.5 * (shadow.shadow_hits - shadow.own_hits) / max(1, shadow.sampled)
        shadow.sampled = shadow.own_hits = shadow.shadow_hits = 0
        window = max(min(self.duel_window, 20 * self.capacity_blocks), self.capacity_blocks)
        self.next_duel = self.references + window
        if self.lru_windows > 0:
            self.lru_windows -= 1
            self.lead = 0.0
        elif self.lead > hazard._TOLERATED_LEAD:
            self.lru_windows = self.next_lru_windows
            self.next_lru_windows = min(2 * self.next_lru_windows, hazard._MAX_LRU_WINDOWS)
        elif self.lead < 0 and self.next_lru_windows > 1:
            self.next_lru_windows -= 1

    @property
    def is_lru(self) -> bool:
        """Whether LRU decides at the moment."""
        oldest = self.oldest_victim
        return oldest == 0 or self.references < self.warm_up * oldest or self.lru_windows > 0

    # ---- the history

    def _remember(self, path: list[bytes], start: int) -> list[int]:
        """The request uses the blocks of `path` from `start` on; the class of each."""
        max_keys = max(self.history_capacity, 2 * self.capacity_blocks)
        keys = path[start : start + max_keys]
        known = self.history
        new = [row for row, key in enumerate(keys) if key not in known]
        leading = new[0] if new else len(keys)
        inherited = -1.0
        if leading > 0:
            inherited = self._gap_now(known[keys[leading - 1]])
        elif start > 0 and path[start - 1] in known:
            inherited = known[path[start - 1]].gap
        used = {}
        for key in keys:
            if key in known:
                used[key] = Known(known[key].count + 1, self._gap_now(known[key]), self.now)
            else:
                used[key] = Known(1, inherited, self.now)
        self.history = dict(islice({**used, **known, **used}.items(), max_keys))
        classes = [_class_of(known.count, known.gap) for known in used.values()]
        return classes + [_class_of(1, inherited)] * (len(path) - start - len(keys))

    def _gap_now(self, known: Known) -> float:
        """The moving average of the gaps of a key that is used now."""
        octaves = _octaves(self.now - known.last + self.gap_unit) - _octaves(self.gap_unit)
        if known.gap < 0.0 or known.count < 2:
            return octaves
        return 0.5 * known.gap + 0.5 * octaves

    # ---- the life table

    def _live_on(self, keys: list[bytes], classes: list[int]) -> None:
        for line in self.sample.values():
            while line.age < NUM_AGES - 1 and line.last + self.bounds[line.age + 1] <= self.now:
                line.age += 1
                self.exposed[line.block_class][line.age] += 1.0
        for key, block_class in [*zip(keys, classes, strict=True)][::-1]:
            if hash_of(key) % self.sampled_one_in:
                continue
            known = self.sample.pop(key, None)
            if known is not None:
                self.reused[known.block_class][known.age] += 1.0
            elif len(self.sample) == self.sample_capacity:
                del self.sample[next(iter(self.sample))]
            self.sample[key] = Sampled(block_class, self.now)
            self.exposed[block_class][0] += 1.0
        if self.now >= self.next_evaluation:
            self._evaluate()

    def _evaluate(self) -> None:
        """Evaluate the life table: the chance of a reuse in each class and bucket of ages."""
        half_life = max(self.half_life, 4 * self.capacity_blocks)
        faded = math.pow(0.5, (self.now - self.evaluated) / half_life)
        self.reused = [[count * faded for count in row] for row in self.reused]
        self.exposed = [[count * faded for count in row] for row in self.exposed]
        self.chances = [[0.0] * NUM_AGES for _ in range(NUM_CLASSES)]
        self.worths: dict[tuple[int, int], float] = {}
        prior = lifetimes._PRIOR_WEIGHT
        for age in range(NUM_AGES):
            all_reused, all_exposed = 0.5, 1.5
            for each in range(NUM_CLASSES):
                all_reused += self.reused[each][age]
                all_exposed += self.exposed[each][age]
            for group in range(0, NUM_CLASSES, NUM_GAP_CLASSES):
                members = range(group, group + NUM_GAP_CLASSES)
                group_reused, group_exposed = prior * (all_reused / all_exposed), prior
                for each in members:
                    group_reused += self.reused[each][age]
                    group_exposed += self.exposed[each][age]
                for each in members:
                    likely = self.reused[each][age] + prior * (group_reused / group_exposed)
                    self.chances[each][age] = min(likely / (self.exposed[each][age] + prior), 1.0)
        self.evaluated = self.now
        self.next_evaluation = self.now + min(max(self.now // 8, 64), 16384)

    def worth(self, block_class: int, age: int) -> float:
        """The Gittins index of a class at the start of a bucket: the best, over all times to stop."""
        if (block_class, age) not in self.worths:
            alive, hits, slot_time = 1.0, 0.0, 0.0
            best_hits, best_time = 0.0, 1.0
            for until in range(age, NUM_AGES):
                reuse = self.chances[block_class][until]
                hits += alive * reuse
                slot_time += alive * (1.0 - 0.5 * reuse) * (self.bounds[until + 1] - self.bounds[until])
                alive *= 1.0 - reuse
                if hits * best_time > best_hits * slot_time:
                    best_hits, best_time = hits, slot_time
                if alive < 1e-6:
                    break
            self.worths[block_class, age] = best_hits / best_time
        return self.worths[block_class, age]

    def worth_of(self, block: Block) -> float:
        """The worth of a block now: linear between the starts of two buckets."""
        age = self.now - block.last
        bucket = max(b for b in range(NUM_AGES) if self.bounds[b] <= age)
        if bucket == NUM_AGES - 1:
            return self.worth(block.block_class, bucket)
        part = (age - self.bounds[bucket]) / (self.bounds[bucket + 1] - self.bounds[bucket])
        here, there = self.worth(block.block_class, bucket), self.worth(block.block_class, bucket + 1)
        return here * (1.0 - part) + there * part

    # ---- the order

    def access(self, slots: SlotArray, reused: BoolArray) -> None:
        run, run_time = -1, -1
        for slot in reversed(slots.tolist()):
            block = self._drop(slot)
            if run < 0 or (self.is_victim_tier and block.last != run_time):
                run, run_time = self._new_run(), block.last
            self._enter(slot, Block(block.block_class, block.last, run))

    def replace(self, keys: Keys, slots: SlotArray, num_free: int, protected: Protected) -> None:
        self.is_victim_tier = not protected.one_prefix
        arriving = [self._arrival(key) for key in keys]
        if self.is_victim_tier:
            self.shadow.store(list(keys))
        if self.is_lru:
            waiting = self._replace_as_lru(arriving, slots, num_free, protected)
        elif protected.one_prefix or protected.admitted:
            waiting = self._replace_prefix(arriving, slots, num_free, protected)
        else:
            waiting = self._replace_one_by_one(arriving, slots, num_free, protected)
        for row in reversed(waiting):
            self._enter_in_run(int(slots[row]), arriving[row])

    def _replace_as_lru(
        self, arriving: list[Block], slots: SlotArray, num_free: int, protected: Protected
    ) -> list[int]:
        rows = range(num_free, len(arriving))
        for row in rows if protected.one_prefix or protected.admitted else reversed(rows):
            slot = self._coldest(self.lru, protected)
            self.oldest_victim = max(self.oldest_victim, self.now - self.blocks[slot].last)
            self._drop(slot)
            slots[row] = slot
        return self._first_rows(len(arriving))

    def _replace_prefix(
        self, arriving: list[Block], slots: SlotArray, num_free: int, protected: Protected
    ) -> list[int]:
        """Each block asks for room, the head first; after the first refusal all are refused."""
        for row in range(num_free, len(arriving)):
            victim = self._victim(arriving[row], protected)
            if victim is None:
                slots[row:] = REFUSED
                return self._first_rows(row)
            self._drop(victim)
            slots[row] = victim
        return self._first_rows(len(arriving))

    def _replace_one_by_one(
        self, arriving: list[Block], slots: SlotArray, num_free: int, protected: Protected
    ) -> list[int]:
        """Each block asks for room, the tail first, and may leave again for one that comes after it."""
        entered: dict[int, int] = {}
        self._first_rows(0)
        for row in reversed(range(num_free, len(arriving))):
            victim = self._victim(arriving[row], protected)
            if victim is None:
                slots[row] = REFUSED
                continue
            self._drop(victim)
            if victim in entered:
                slots[entered[victim]] = REFUSED
            slots[row] = victim
            entered[victim] = row
            self._enter_in_run(victim, arriving[row])
        return [*range(num_free)]

    def _victim(self, arrival: Block, protected: Protected) -> int | None:
        """The victim for a new block; None if no block is worth less."""
        candidates = []
        for members in self.classes:
            slot = first_unprotected(members, protected)
            if slot is not None:
                candidates.append((self.worth_of(self.blocks[slot]), self.blocks[slot].last, slot))
        if not candidates:
            raise PolicyError("no block may leave")
        worth, last, victim = min(candidates, key=lambda candidate: candidate[:2])
        write_cost = self.write_cost
        if write_cost is None:
            write_cost = 0.0 if protected.one_prefix else hazard._VICTIM_WRITE_COST
        own = self.worth_of(arrival)
        if not protected.admitted and (
            own < worth * (1.0 + write_cost) or (own == worth and arrival.last < last)
        ):
            return None
        run = self.blocks[victim].run
        deepest = next(slot for slot in self.lru if self.blocks[slot].run == run)
        return victim if deepest in protected else deepest

    def remove(self, slots: SlotArray) -> None:
        for slot in slots.tolist():
            self._drop(slot)

    def stats(self) -> dict[str, float]:
        return {
            "is_lru": float(self.is_lru),
            "shadow_lead": self.lead,
            "history_keys": len(self.history),
            "references": self.references,
        }

    def order(self) -> list[int]:
        return list(self.lru)

    # ---- inside

    def _arrival(self, key: bytes) -> Block:
        known = self.history.get(key)
        if known is None:
            return Block(0, self.now)
        return Block(_class_of(known.count, known.gap), known.last)

    def _coldest(self, slots: list[int], protected: Protected) -> int:
        slot = first_unprotected(slots, protected)
        if slot is None:
            raise PolicyError("no block may leave")
        return slot

    def _first_rows(self, count: int) -> list[int]:
        """The first rows of a batch, which join the order from the last to the first in runs of their own."""
        self._run, self._run_time = -1, -1
        return [*range(count)]

    def _enter_in_run(self, slot: int, block: Block) -> None:
        """Neighbours in a batch with equal times of use are a run."""
        if self._run < 0 or block.last != self._run_time:
            self._run, self._run_time = self._new_run(), block.last
        self._enter(slot, Block(block.block_class, block.last, self._run))

    def _new_run(self) -> int:
        self.num_runs += 1
        return self.num_runs

    def _enter(self, slot: int, block: Block) -> None:
        self.blocks[slot] = block
        self.lru.append(slot)
        self.classes[block.block_class].append(slot)

    def _drop(self, slot: int) -> Block:
        block = self.blocks.pop(slot)
        self.lru.remove(slot)
        self.classes[block.block_class].remove(slot)
        return block


def _octaves(x: int) -> float:
    octave = x.bit_length() - 1
    return octave + (x / (1 << octave) - 1.0)


def _class_of(count: int, gap: float) -> int:
    by_count = sum(count >= least for least in (2, 3, 5, 10))
    by_gap = 0 if gap < 0.0 else min(1 + int(gap), NUM_GAP_CLASSES - 1)
    return by_count * NUM_GAP_CLASSES + by_gap
