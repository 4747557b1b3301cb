"""A cluster of servers as one tier: which node has which blocks, and what happens when that changes.

Owns the map. Each node is a tier of its own, with lines and a circuit: one that is dead, or hangs, costs its
own blocks and nothing else. A block that is not where the map says is a miss, and the map is asked for again
in the background.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace

import numpy as np
import numpy.typing as npt

from kvoffload.core.admission import Admission
from kvoffload.errors import UnavailableError
from kvoffload.structures.keys import Keys
from kvoffload.tiers.contract import JobResult, Mask, SharedTier, TierStats
from kvoffload.tiers.divided import DividedSharedTier
from kvoffload.tiers.shared.batches import Batch
from kvoffload.tiers.shared.connection import CONNECT_S, Line
from kvoffload.tiers.shared.epochs import EpochHistory
from kvoffload.tiers.shared.identity import producer_of
from kvoffload.tiers.shared.printable import printable
from kvoffload.tiers.shared.tier import CLOSE_S, RemoteOptions
from kvoffload.tiers.valkey.cluster_map import MOST_MASTERS, Address, MapQuestion
from kvoffload.tiers.valkey.divisions import NUM_DIVISIONS, division_of, tags
from kvoffload.tiers.valkey.node import Node
from kvoffload.tiers.valkey.resp import Connection
from kvoffload.transfer import Blocks, Rows

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.25, 1.0
_JITTER = 0.5
_LOOK_EVERY_S = 0.005
_NOBODY = -1
_FIRST_ROW = np.zeros(1, np.int64)
_NODES_AT_ONCE = 8
"""Nodes that one call makes, or starts the threads of: about 2 ms of CPU time."""
_MOST_NODES = 2 * MOST_MASTERS
"""Nodes of the map, and those that have left it and still have jobs in flight."""


@dataclass(eq=False)
class _Change:
    """A map that takes effect when all of its new nodes have been made.

    Attributes:
        stays: numbers of the nodes that keep their divisions. new: addresses without a node yet.
        made: new nodes, in no use yet.
    """

    found: MapQuestion
    stays: dict[Address, int]
    new: list[Address]
    made: dict[Address, Node] = field(default_factory=dict)


class ClusterTier(DividedSharedTier):
    """Blocks in a cluster that several machines share. As `RemoteTier`, node by node; in addition:

    - Each division of the blocks has an epoch of its own, in the slot of its blocks. A reset is confirmed
      when every master and all replicas that are up have it.
    - A block whose node is dead, is unknown, or has given it away is a miss. While anything is amiss the map
      is asked for about once a second, of any node, and never on the scheduler's thread.
    - What is in a node counts as unknown when its divisions have changed.

    Args:
        name: for reports and metrics; place: the cluster as people call it, for the log.
        seeds: nodes that are asked first.
        connect: makes a connection to a node, logged in, by the time that it is given.
        fingerprint: identifies the producer of the blocks, the same on all machines that share them.
        admission: which blocks are written; None for all.
        clock: monotonic seconds.

    Memory: 16 MiB for hints a node, as they are used. Thread: the scheduler's; three for each node, and one
    for the map.
    """

    def __init__(
        self,
        name: str,
        place: str,
        seeds: list[Address],
        connect: Callable[[Address, float], Connection],
        options: RemoteOptions,
        *,
        block_bytes: int,
        fingerprint: str,
        admission: Admission | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__()
        self.name, self.place, self.options = name, place, options
        self.block_bytes = self.stored_bytes = block_bytes
        self.probe_timeout_s, self.measured_read = options.probe_timeout_s, None
        self.identity = int.from_bytes(
            producer_of(f"{name} cluster {options.namespace} {fingerprint}")[:8], "big"
        )
        self._seeds, self._connect = seeds, connect
        self._fingerprint, self._admission, self._clock = fingerprint, admission, clock
        self._history = EpochHistory()
        self._nodes: dict[int, Node] = {}
        self._number_of: dict[Address, int] = {}
        self._next_node = 0
        # Which node has each division now.
        self._homes = np.full(NUM_DIVISIONS, _NOBODY)
        self._reset_wanted = np.zeros(NUM_DIVISIONS, np.bool_)
        self._gone = TierStats(ready=0)
        self._changes: list[tuple[list[bytes], bool]] = []
        self._tells_changes = False
        self._ended: deque[Batch] = deque()
        self._asked: MapQuestion | None = None
        self._change: _Change | None = None
        self._look_at = self._ask_at = 0.0
        self._pause_s, self._num_troubles = _FIRST_PAUSE_S, 0
        self._may_know: list[Address] = list(seeds)
        self._pid, self._closed = os.getpid(), False
        self.last_error: Exception = TimeoutError("no node has answered")
        tags()  # takes 50 ms, once, and not when the first map arrives
        self._line = Line(f"kvoffload-{name}-map", self._connect_to_any, self._ended.append)
        self._tend()

    def wait_until_open(self, timeout_s: float) -> None:
        """Wait until all nodes have answered; if some do not, go on without them. Raises `UnavailableError`,
        with what a node, or the network, says, if none does."""
        until = time.monotonic() + timeout_s
        while not self._is_whole() and time.monotonic() < until:
            self._tend()
            for node in self._nodes.values():
                node.tend()
            time.sleep(0.001)
        errors = [node.last_error for node in self._nodes.values() if not node.is_well]
        self.last_error = errors[0] if errors else self.last_error
        if not any(node.is_well for node in self._nodes.values()):
            why = f"{type(self.last_error).__name__}: {printable(self.last_error)}"
            raise UnavailableError("tier", self.place, why)

    def measure(self, timeout_s: float) -> None:
        """Find out how fast reads from one node are (`measured_read`), and wait for that."""
        for node in self._nodes.values():
            if node.is_well:
                node.measure(timeout_s)
                self.measured_read = node.measured_read
                return

    # ---- as any tier

    def contains(self, keys: Keys, request: object | None = None) -> Mask:
        self._tend()
        return super().contains(keys, request)

    def submit_write(
        self, keys: Keys, pool: Blocks, rows: Rows, request: object | None = None
    ) -> tuple[int, Mask]:
        self._tend()
        return super().submit_write(keys, pool, rows, request)

    @property
    def queue_room(self) -> int:
        # A node that hangs has none, and must not keep the others from getting theirs. Where no node is known
        # what is offered is dropped.
        rooms = [self._nodes[number].queue_room for number in self._number_of.values()]
        return max(rooms, default=sys.maxsize)

    def finished(self) -> list[JobResult]:
        self._tend()
        return super().finished()

    def clear(self) -> None:
        self._reset_wanted[:] = True
        for number in self._number_of.values():
            self._nodes[number].clear()

    def take_changes(self) -> list[tuple[list[bytes], bool]]:
        self._tells_changes = True
        gone, self._changes = self._changes, []
        return gone + super().take_changes()

    def drain(self, timeout_s: float) -> bool:
        until = time.monotonic() + timeout_s
        while True:
            self._tend()
            for number in self._number_of.values():
                self._nodes[number].tend()
            # What has left the map will never confirm a reset; it is asked of who has its divisions now.
            if all(node.has_ended() for node in self._nodes.values()) and not self._reset_wanted.any():
                return True
            if time.monotonic() >= until:
                return False
            time.sleep(0.001)

    def stats(self) -> TierStats:
        return _sum([self._gone, *(node.stats() for node in self._nodes.values())])

    def close(self) -> None:
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        self._line.stop()
        for node in self._nodes.values():
            node.stop()
        until = time.monotonic() + CLOSE_S
        for node in self._nodes.values():
            node.join(until)
        self._line.join(max(0.0, until - time.monotonic()))

    # ---- the map

    def _members(self) -> Mapping[int, SharedTier]:
        return self._nodes

    def _shares(self, keys: Keys) -> list[tuple[int, SharedTier, npt.NDArray[np.int64]]]:
        homes = self._homes[division_of(keys)]
        numbers = {*homes.tolist()} - {_NOBODY}
        if len(keys) == 1:  # engines ask key by key
            return [(number, self._nodes[number], _FIRST_ROW) for number in numbers]
        return [(number, self._nodes[number], np.flatnonzero(homes == number)) for number in sorted(numbers)]

    def _is_whole(self) -> bool:
        """Whether every division has a node that can hold it, as far as is known."""
        return bool((self._homes != _NOBODY).all()) and all(
            self._nodes[number].is_well for number in self._number_of.values()
        )

    def _tend(self) -> None:
        """Take in the map, and ask for it where something is amiss; every 5 ms, since it is called for each
        block."""
        now = self._clock()
        if (now < self._look_at and not self._ended) or self._closed or os.getpid() != self._pid:
            return
        self._look_at = now + _LOOK_EVERY_S
        while self._ended:
            question = self._ended.popleft()
            self._asked = None
            if question.error is not None:
                self.last_error = question.error
            elif isinstance(question, MapQuestion):
                self._follow(question)
        self._advance()
        self._begin_some()
        for number in self._number_of.values():
            if self._nodes[number].was_reset:
                self._reset_wanted[[*self._nodes[number].divisions]] = False
        self._let_go()
        num_troubles = sum(self._nodes[number].num_troubles for number in self._number_of.values())
        if num_troubles == self._num_troubles and self._is_whole():
            self._pause_s = _FIRST_PAUSE_S
        elif self._asked is None and now >= self._ask_at:
            self._num_troubles = num_troubles
            self._ask_at = now + self._pause_s * random.uniform(1.0 - _JITTER, 1.0 + _JITTER)
            self._pause_s = min(2.0 * self._pause_s, _LONGEST_PAUSE_S)
            self._asked = MapQuestion(deadline=time.monotonic() + CONNECT_S)
            self._line.submit(self._asked)

    def _let_go(self) -> None:
        """Stop a few of the nodes that have left the map and have no job in flight."""
        left = [number for number in self._leaving() if self._nodes[number].is_idle]
        for number in left[:_NODES_AT_ONCE]:
            node = self._nodes.pop(number)
            node.stop()
            self._changes += node.take_changes()
            self._gone = _sum([self._gone, replace(node.stats(), in_flight=0, circuit_open=0)])

    def _leaving(self) -> list[int]:
        """Nodes that have left the map, the oldest first."""
        return sorted(self._nodes.keys() - {*self._number_of.values()})

    def _follow(self, found: MapQuestion) -> None:
        """Begin to divide the blocks by this map. Jobs at nodes that leave it end normally."""
        stays = {
            address: number
            for address, number in self._number_of.items()
            if found.divisions.get(address) == self._nodes[number].divisions
        }
        new = [address for address in found.divisions if address not in stays]
        if len(self._nodes) + len(new) > _MOST_NODES:
            for number in self._leaving()[:_NODES_AT_ONCE]:
                self._nodes[number].stop()
            self._num_troubles = _NOBODY  # the map is asked for again
            return
        self._change = _Change(found, stays, new)
        self._advance()

    def _advance(self) -> None:
        """Make a few of the new nodes. After the last the new map replaces the old one, as a whole."""
        change = self._change
        if change is None:
            return
        self._change = None  # an exception drops the new map, and the old one stays
        for address in change.new[:_NODES_AT_ONCE]:
            change.made[address] = self._new_node(address, change.found.divisions[address])
        del change.new[:_NODES_AT_ONCE]
        if change.new:
            self._change = change
            return
        numbers = dict(change.stays)
        for number, (address, node) in enumerate(change.made.items(), self._next_node):
            self._nodes[number] = node
            numbers[address] = number
        self._next_node += len(change.made)
        for address, number in numbers.items():
            self._nodes[number].num_replicas = change.found.num_replicas[address]
        self._homes[:] = _NOBODY
        for number in numbers.values():
            self._homes[[*self._nodes[number].divisions]] = number
            if self._reset_wanted[[*self._nodes[number].divisions]].any() and self._nodes[number].was_reset:
                self._nodes[number].clear()  # the reset was asked for while the map changed
        self._number_of = numbers
        self._begin_some()
        well = [address for address, number in numbers.items() if self._nodes[number].is_well]
        self._may_know = [*well, *numbers, *self._seeds]

    def _begin_some(self) -> None:
        """Start the threads of a few nodes. A node whose threads cannot be started stays absent."""
        waiting = [self._nodes[n] for n in self._number_of.values() if not self._nodes[n].has_begun]
        for node in waiting[:_NODES_AT_ONCE]:
            try:
                node.begin()
            except RuntimeError as error:  # the limit of threads or memory of this process
                self.last_error = error
                self._log.warn("threads", "tier %s: no threads for node %s: %s", self.name, node.place, error)
                return

    def _new_node(self, address: Address, divisions: tuple[int, ...]) -> Node:
        """A node that has these divisions, without threads yet."""
        host, port = address
        node = Node(
            self.name,
            f"{host}:{port}/{self.options.namespace}",
            lambda deadline: self._connect(address, deadline),
            self.options,
            block_bytes=self.block_bytes,
            fingerprint=self._fingerprint,
            divisions=divisions,
            admission=self._admission,
            clock=self._clock,
            history=self._history,
        )
        if self._reset_wanted[[*divisions]].any():
            node.clear()
        if self._tells_changes:
            node.take_changes()  # starts its list of changes
        return node

    def _connect_to_any(self, deadline: float) -> Connection:
        return self._connect(random.choice(self._may_know), deadline)


def _sum(several: list[TierStats]) -> TierStats:
    """Without a write budget."""
    counters = [one.name for one in fields(TierStats) if one.name != "write_budget_bytes"]
    return TierStats(**{name: sum(getattr(stats, name) for stats in several) for name in counters})
