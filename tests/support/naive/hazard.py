"""The twin of Hazard."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from itertools import takewhile

from kvoffload.core.hints import Hints, Labels
from kvoffload.core.policy import EvictionPolicy
from kvoffload.core.protection import Protected
from kvoffload.core.request import Path
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
from support.naive.choice import first_unprotected
from support.naive.shadow import NaiveShadow, hash_of

NUM_CLASSES, NUM_GAP_CLASSES = history.NUM_CLASSES, history.NUM_GAP_CLASSES
NUM_KINDS, ENDED = history.NUM_KINDS, history.ENDED


@dataclass
class Known:
    """An entry of the history; a negative gap is unknown."""

    count: int
    gap: float
    last: int
    label: int


@dataclass
class Sampled:
    """A life in the table: class, beginning, the age bucket reached so far, and True if the life has stopped
    there because a waiting request expects the block."""

    block_class: int
    began: int
    age: int = 0
    has_stopped: bool = False


@dataclass
class Block:
    """A block in the order: class, last use, and run."""

    block_class: int
    last: int
    run: int = -1


class NaiveHazard(EvictionPolicy):
    """Twin of `policies.hazard.Hazard`, its `History` and its `Lifetimes`: dicts and lists.

    Sums and products are computed in the same order as in `Hazard`, so that ties are equal.

    Attributes:
        blocks: slot to block.
        lru: slots, the coldest first; `classes`: the same for each class.
        history: key to its entry, the most recent first.
        begun: key to its life since its last use. The oldest life comes first; stopped lives are in the
            order in which they stopped.
        ended: key to its life since the end of a request, in the same order.
        labels: numbers of labels, assigned by the manager.
        shadow: the twin of the shadow LRU.
    """

    name = "naive-hazard"
    refuses = True
    history_capacity = Hazard.history_capacity
    sample_capacity = Hazard.sample_capacity
    half_life = Hazard.half_life
    warm_up = Hazard.warm_up
    promise: float | None = None

    def __init__(self, index: Index) -> None:
        super().__init__(index)
        self.bounds: list[int] = age_bounds().tolist()
        self.gap_unit = max(1, self.capacity_blocks // 4)
        self.promised = hazard.promised(self.promise, self.write_cost)
        self.recent = float(max(hazard.RECENT, hazard.RECENT_TURNS * self.capacity_blocks))
        self.max_keys = max(self.history_capacity, 2 * self.capacity_blocks)
        self.sampled_one_in = 4
        while self.sample_capacity * self.sampled_one_in < 3 * self.capacity_blocks:
            self.sampled_one_in *= 2
        self.labels = Labels()
        self.usable_blocks = self.capacity_blocks
        self.reset()

    def reset(self) -> None:
        self.blocks: dict[int, Block] = {}
        self.lru: list[int] = []
        self.classes: list[list[int]] = [[] for _ in range(NUM_CLASSES)]
        self.history: dict[bytes, Known] = {}
        self.begun: dict[bytes, Sampled] = {}
        self.ended: dict[bytes, Sampled] = {}
        # Classes without evidence have no row.
        self.reused: dict[int, list[float]] = defaultdict(lambda: [0.0] * NUM_AGES)
        self.exposed: dict[int, list[float]] = defaultdict(lambda: [0.0] * NUM_AGES)
        self.shadow = NaiveShadow(self.usable_blocks)
        self.oldest_victim = 0.0
        self.now = self.references = self.num_runs = 0
        self.is_victim_tier = False
        self.lru_decides = self.has_labels = False
        self.evaluated = 0
        self._evaluate()

    def resized(self, usable_blocks: int) -> None:
        self.usable_blocks = self.shadow.capacity = usable_blocks
        self.shadow.store([])

    # ---- observations of requests

    def expect(self, path: Keys, start: int) -> None:
        self._age(self.references)
        for key in [*path][start:][::-1]:
            for lives in (self.begun, self.ended):
                if key in lives and not lives[key].has_stopped:
                    lives[key] = lives.pop(key)
                    lives[key].has_stopped = True
        self.shadow.store([key for key in [*path][start:] if key in self.shadow.keys])

    def observe(self, path: Keys, slots: SlotArray, start: int, on_device: int) -> None:
        self.now = self.references
        keys, in_lru, held = list(path), [], []
        self._begin(keys, start)
        self._age(self.now)
        for row in reversed(range(start, len(keys))):
            key, slot = keys[row], int(slots[row - start])
            is_asked, is_held = row >= on_device, slot in self.blocks
            known = self._use(key) if row - start < self.max_keys else Known(1, self.inherited, 0, 0)
            self._live_on(key, _class_of(known), is_asked)
            self._reclass(slot, _class_of(known))
            if row - start < self.max_keys:
                if is_asked:
                    in_lru.append(key in self.shadow.keys)
                    held.append(is_held)
                self.shadow.forget([key])
        self.shadow.judge(in_lru[::-1], held[::-1])
        if not self.is_victim_tier:
            self.shadow.store(keys[start : start + self.max_keys])
        if self.now >= self.next_evaluation:
            self._evaluate()
        self.references += len(slots)
        self._keep_promise(len(slots))

    def finished(self, path: Keys, slots: SlotArray, hints: Hints) -> None:
        label, keys = self.labels.number(hints), list(path)
        # True if no other request has begun or ended since this request was observed.
        leaf = self.history.get(keys[-1]) if keys else None
        is_at_once = self.now + len(keys) == self.references and leaf is not None and leaf.last == self.now
        if not keys or (label == 0 and is_at_once):
            return
        if not is_at_once:
            self.now = self.references
        self.has_labels = True
        self._age(self.now)
        for key, slot in [*zip(keys, slots.tolist(), strict=True)][::-1]:
            known = self.history.get(key)
            if known is None:
                continue
            known.last, known.label = self.now, label or ENDED
            self._live(self.ended, key, _class_of(known))
            self._reclass(slot, _class_of(known))
        if not self.is_victim_tier:
            self.shadow.store([key for key in keys if key in self.shadow.keys])

    def _reclass(self, slot: int, block_class: int) -> None:
        """Record a use of the block in `slot`, if it is ordered."""
        block = self.blocks.get(slot)
        if block is not None:
            self.classes[block.block_class].remove(slot)
            self.classes[block_class].append(slot)
            block.block_class, block.last = block_class, self.now

    def _keep_promise(self, count: int) -> None:
        shadow, recent = self.shadow, self.recent
        shadow.lead = max(shadow.lead * max(1.0 - count / recent, 0.0), -hazard.CREDIT * recent)
        if shadow.lead > hazard.TOLERATED * self.promised * recent:
            self.lru_decides = True
        elif shadow.lead <= hazard.FORGIVEN * self.promised * recent:
            self.lru_decides = False

    @property
    def is_lru(self) -> bool:
        """Return whether LRU decides."""
        known = self.warm_up * self.oldest_victim
        if self.is_victim_tier:
            known = max(known, hazard.VICTIM_TURNS * self.warm_up * self.capacity_blocks)
        return self.oldest_victim == 0 or self.references < known or self.lru_decides

    # ---- the history

    def _begin(self, path: list[bytes], start: int) -> None:
        """Begin a request that uses the blocks of `path` from `start` on: compute the gap of new blocks."""
        keys = path[start : start + self.max_keys]
        leading = [*takewhile(self.history.__contains__, keys)]
        self.inherited = -1.0
        if leading:
            self.inherited = self._gap_now(self.history[leading[-1]])
        elif start > 0 and path[start - 1] in self.history:
            self.inherited = self.history[path[start - 1]].gap

    def _use(self, key: bytes) -> Known:
        known = self.history.pop(key, None)
        if known is None:
            known = Known(1, self.inherited, self.now, 0)
            if len(self.history) == self.max_keys:
                self.shadow.forget([self.history.popitem()[0]])
        else:
            known = Known(known.count + 1, self._gap_now(known), self.now, 0)
        self.history = {key: known, **self.history}
        return known

    def _gap_now(self, known: Known) -> float:
        """Return the moving average of the gaps of a key that is used now."""
        octaves = _octaves(self.now - known.last + self.gap_unit) - _octaves(self.gap_unit)
        if known.gap < 0.0 or known.count < 2:
            return octaves
        return 0.5 * known.gap + 0.5 * octaves

    # ---- the life table

    def _live_on(self, key: bytes, block_class: int, is_asked: bool) -> None:
        for lives in (self.begun, self.ended):
            if key in lives:
                self.reused[lives[key].block_class][lives[key].age] += is_asked
        self.ended.pop(key, None)
        self._live(self.begun, key, block_class)

    def _age(self, now: int) -> None:
        for life in [*self.begun.values(), *self.ended.values()]:
            while (
                not life.has_stopped
                and life.age < NUM_AGES - 1
                and life.began + self.bounds[life.age + 1] <= now
            ):
                life.age += 1
                self.exposed[life.block_class][life.age] += 1.0

    def _live(self, lives: dict[bytes, Sampled], key: bytes, block_class: int) -> None:
        """Begin a life, if the key is sampled."""
        if hash_of(key) % self.sampled_one_in:
            return
        if key not in lives and len(lives) == self.sample_capacity:
            del lives[next((key for key in lives if not lives[key].has_stopped), next(iter(lives)))]
        lives.pop(key, None)
        lives[key] = Sampled(block_class, self.now)
        self.exposed[block_class][0] += 1.0

    def _evaluate(self) -> None:
        """Evaluate the life table: the chance of a reuse for each class and age bucket."""
        half_life = max(self.half_life, 4 * self.capacity_blocks)
        faded = math.pow(0.5, (self.now - self.evaluated) / half_life)
        for table in (self.reused, self.exposed):
            for row in table.values():
                row[:] = [count * faded for count in row]
        self.evidence = {
            each: (list(self.reused[each]), list(self.exposed[each])) for each in sorted(self.exposed)
        }
        self.chances: dict[tuple[int, int], float] = {}
        self.worths: dict[tuple[int, int], float] = {}
        self.had_labels = self.has_labels
        self.entering = lifetimes.ENTERING * self.usable_blocks
        self.evaluated = self.now
        self.next_evaluation = self.now + min(max(self.now // 8, 64), 16384)

    def _pooled(self, members: range, age: int, prior: float, usual: float) -> tuple[float, float]:
        """Return the evidence of some classes, with a larger group as the prior."""
        reused, exposed = prior * usual, prior
        for each, rows in self.evidence.items():
            if each in members:
                reused += rows[0][age]
                exposed += rows[1][age]
        return reused, exposed

    def chance(self, block_class: int, age: int) -> float:
        """Return the chance of a reuse in an age bucket, for a class, as of the last evaluation."""
        if (block_class, age) not in self.chances:
            prior, size = lifetimes.PRIOR_WEIGHT, NUM_GAP_CLASSES * NUM_KINDS
            reused, exposed = 0.5, 1.5
            for rows in self.evidence.values():
                reused += rows[0][age]
                exposed += rows[1][age]
            for width in (size, NUM_KINDS):
                first = block_class // width * width
                reused, exposed = self._pooled(range(first, first + width), age, prior, reused / exposed)
            likely = min(reused / exposed, 1.0)
            rows = self.evidence.get(block_class, ([], []))
            if rows[1] and rows[1][0] > 0.0 and self.had_labels:
                prior = lifetimes.LABEL_PRIOR_WEIGHT
                likely = min((rows[0][age] + prior * likely) / (rows[1][age] + prior), 1.0)
            self.chances[block_class, age] = likely
        return self.chances[block_class, age]

    def worth(self, block_class: int, age: int) -> float:
        """Return the Gittins index of a class at the start of an age bucket: the maximum over all holding
        times.
        """
        if (block_class, age) not in self.worths:
            alive, hits, slot_time = 1.0, 0.0, self.entering
            best_hits, best_time = 0.0, 1.0
            for until in range(age, NUM_AGES):
                reuse = self.chance(block_class, until)
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
        """Return the current worth of a block, interpolated between the starts of two buckets."""
        age = max(self.now - block.last, 0)
        bucket = max(b for b in range(NUM_AGES) if self.bounds[b] <= age)
        if bucket == NUM_AGES - 1:
            return self.worth(block.block_class, bucket)
        share = (age - self.bounds[bucket]) / (self.bounds[bucket + 1] - self.bounds[bucket])
        worth_at_start, worth_at_end = (
            self.worth(block.block_class, bucket),
            self.worth(block.block_class, bucket + 1),
        )
        return worth_at_start * (1.0 - share) + worth_at_end * share

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
            self.shadow.store([key for key in keys if key in self.history])
        if self.is_lru:
            waiting = self._replace_as_lru(arriving, slots, num_free, protected)
        elif protected.one_prefix or protected.admitted:
            waiting = self._replace_prefix(keys, arriving, slots, num_free, protected)
        else:
            waiting = self._replace_one_by_one(keys, arriving, slots, num_free, protected)
        for row in reversed(waiting):
            self._enter_in_run(int(slots[row]), arriving[row])

    def _replace_as_lru(
        self, arriving: list[Block], slots: SlotArray, num_free: int, protected: Protected
    ) -> list[int]:
        rows = range(num_free, len(arriving))
        for row in rows if protected.one_prefix or protected.admitted else reversed(rows):
            slot = self._coldest(self.lru, protected)
            if not Path.over(protected.path).is_quiet:
                self.oldest_victim *= 1.0 - 1.0 / self.capacity_blocks
                self.oldest_victim = max(self.oldest_victim, self.now - self.blocks[slot].last)
            self._drop(slot)
            slots[row] = slot
        return self._first_rows(len(arriving))

    def _replace_prefix(
        self, keys: Keys, arriving: list[Block], slots: SlotArray, num_free: int, protected: Protected
    ) -> list[int]:
        """Choose victims, head first; after the first refusal all blocks are refused."""
        for row in range(num_free, len(arriving)):
            victim = self._victim(arriving[row], protected, protected.expects(keys[row]))
            if victim is None:
                slots[row:] = REFUSED
                return self._first_rows(row)
            self._drop(victim)
            slots[row] = victim
        return self._first_rows(len(arriving))

    def _replace_one_by_one(
        self, keys: Keys, arriving: list[Block], slots: SlotArray, num_free: int, protected: Protected
    ) -> list[int]:
        """Choose victims, tail first; a new block may be replaced by a later one."""
        entered: dict[int, int] = {}
        self._first_rows(0)
        for row in reversed(range(num_free, len(arriving))):
            victim = self._victim(arriving[row], protected, protected.expects(keys[row]))
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

    def _victim(self, arrival: Block, protected: Protected, is_expected: bool) -> int | None:
        """Return the victim for a new block; None if no resident block is worth less than the new block, and
        no request expects the new block.
        """
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
            write_cost = 0.0 if protected.one_prefix else hazard.VICTIM_WRITE_COST
        own = self.worth_of(arrival)
        if not (protected.admitted or is_expected) and (
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
            "shadow_lead": self.shadow.lead,
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
        return Block(_class_of(known), known.last)

    def _coldest(self, slots: list[int], protected: Protected) -> int:
        slot = first_unprotected(slots, protected)
        if slot is None:
            raise PolicyError("no block may leave")
        return slot

    def _first_rows(self, count: int) -> list[int]:
        """Add the first rows of a batch to the order, from last to first, in new runs."""
        self._run, self._run_time = -1, -1
        return [*range(count)]

    def _enter_in_run(self, slot: int, block: Block) -> None:
        """Add a block to the order. Neighbours in a batch with equal last uses form a run."""
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


def _class_of(known: Known) -> int:
    by_count = sum(known.count >= least for least in (2, 3, 5, 10))
    by_gap = 0 if known.gap < 0.0 else min(1 + int(known.gap), NUM_GAP_CLASSES - 1)
    return (by_count * NUM_GAP_CLASSES + by_gap) * NUM_KINDS + known.label
