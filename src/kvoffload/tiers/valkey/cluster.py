"""A cluster of servers as one tier.

Owns the map from blocks to nodes. Each node is a separate tier with its own connections and circuit breaker.
If a node is dead or hangs, its blocks are misses; blocks of other nodes are not affected. When the cluster
moves a block to another node, the block is a miss until a background thread has read the new map.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from kvoffload.core.admission import Admission
from kvoffload.structures.keys import Keys
from kvoffload.tiers.contract import JobResult, Mask, SharedTier, TierStats
from kvoffload.tiers.divided import DividedSharedTier, sum_of
from kvoffload.tiers.producer_text import producer_of
from kvoffload.tiers.rate_limited_log import RateLimitedLog
from kvoffload.tiers.shared.connection import CONNECT_S, ConnectionThread
from kvoffload.tiers.shared.epochs import EpochHistory
from kvoffload.tiers.shared.exchanges import Exchange
from kvoffload.tiers.shared.remote_tier import CLOSE_S, ConnectingTier, RemoteTier, unavailable
from kvoffload.tiers.shared.server import RemoteOptions, Server
from kvoffload.tiers.valkey.cluster_map import MOST_MASTERS, Address, MapQuestion
from kvoffload.tiers.valkey.divisions import NUM_DIVISIONS, DividedKeyspace, division_of, tags
from kvoffload.tiers.valkey.protocol import Resp
from kvoffload.tiers.valkey.resp import Connection
from kvoffload.tiers.waiting import Backoff, wait_until
from kvoffload.transfer import Blocks, Rows

_FIRST_PAUSE_S, _LONGEST_PAUSE_S, _JITTER = 0.25, 1.0, 0.5
_MAINTAIN_EVERY_S = 0.005
_NO_NODE = -1
_FIRST_ROW = np.zeros(1, np.int64)
_NODES_AT_ONCE = 8
"""Largest number of nodes that one call creates, starts or stops, so that the scheduler's thread is not held
up. Eight nodes take about 2 ms of CPU time."""
_MOST_NODES = 2 * MOST_MASTERS
"""Largest number of nodes. Counts the nodes in the map, and former nodes that still have jobs in flight."""


@dataclass(eq=False)
class _MapChange:
    """A new map of the cluster. The map takes effect when all new nodes have been created.

    Attributes:
        question: the exchange that read the map.
        kept: for each address whose divisions have not changed, the number of its node, which is kept.
        new: addresses whose nodes must still be created.
        made: for each new address whose node has been created, the node. It is not in use yet.
    """

    question: MapQuestion
    kept: dict[Address, int]
    new: list[Address]
    made: dict[Address, RemoteTier] = field(default_factory=dict)


class ClusterTier(DividedSharedTier, ConnectingTier):
    """Blocks in a Valkey or Redis cluster that several machines share. Each node is a `RemoteTier`.

    In addition to what `RemoteTier` documents:

    - The blocks are distributed over 256 divisions (`division_of`). Each division has its own epoch, which is
      stored in the division's hash slot. A reset is confirmed when all masters and all connected replicas
      have performed it.
    - A block is a miss if its node is dead or unknown, or has lost the block. While nodes or exchanges fail,
      a background thread asks a random node about once a second which nodes have which hash slots (the map).
    - If the divisions of a node change, this process forgets which blocks the node has, and probes again.

    Args:
        name: name in reports and metrics.
        place: the cluster, for the log.
        seeds: nodes from which the first map is read.
        connect: connects to a node and logs in, by a deadline.
        admission: chooses the blocks to write. If it is None, all blocks are written.
        clock: returns monotonic seconds.

    Attributes:
        nodes: the nodes in the map, and the former nodes that still have jobs in flight. The keys are the
            nodes' numbers, which are never reused.
        numbers: for each address in the map, the number of its node.
        divisions: for each node's number, the divisions of the node.
        homes: for each division, the number of its node, or -1 for none.
        is_reset_wanted: for each division, True from the request for a reset until the reset is confirmed.

    Memory: 16 MiB a node, for the presence cache. Thread: the scheduler's. Runs three threads for each node,
    and one for the map.
    """

    def __init__(
        self,
        name: str,
        place: str,
        seeds: list[Address],
        connect: Callable[[Address, float], Connection],
        options: RemoteOptions,
        *,
        admission: Admission | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__()
        self.name, self.place, self.options = name, place, options
        self.block_bytes = self.stored_bytes = options.block_bytes
        self.probe_timeout_s = options.probe_timeout_s
        identity = producer_of(f"{name} cluster {options.namespace} {options.fingerprint}")
        self.identity = int.from_bytes(identity[:8], "big")
        self._seeds, self._connect = seeds, connect
        self._admission, self._clock = admission, clock
        self.dialect = Resp()
        self._history, self._log = EpochHistory(), RateLimitedLog("kvoffload.remote")
        self.nodes: dict[int, RemoteTier] = {}
        self.numbers: dict[Address, int] = {}
        self.divisions: dict[int, tuple[int, ...]] = {}
        self._next_number = 0
        self.homes = np.full(NUM_DIVISIONS, _NO_NODE)
        self.is_reset_wanted = np.zeros(NUM_DIVISIONS, np.bool_)
        self._removed_stats = TierStats(ready=0)
        self._changes: list[tuple[list[bytes], bool]] = []
        self._reports_changes = False
        self._ended: deque[Exchange] = deque()
        self._question: MapQuestion | None = None
        self._change: _MapChange | None = None
        self._maintain_at = self._ask_at = 0.0
        self._backoff, self._num_troubles = Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S, _JITTER), 0
        self._candidates: list[Address] = list(seeds)
        self._pid, self._closed = os.getpid(), False
        self.last_error: Exception = TimeoutError("no node has answered")
        tags()  # computed now (50 ms), so that the first map is not delayed
        self._thread = ConnectionThread(
            f"kvoffload-{name}-map", self._connect_to_any, _ask, self._ended.append
        )
        self._maintain()

    def wait_until_open(self, timeout_s: float) -> None:
        """Wait up to `timeout_s` seconds for all nodes. The tier is usable if at least one node has replied.

        Nodes that have not replied are used once they reply.

        Raises: `UnavailableError` if no node has replied. Its cause is the error of a node or the network.
        """

        def is_complete() -> bool:
            self._maintain()
            for node in self.nodes.values():
                node.is_open()
            return self.is_whole()

        wait_until(is_complete, timeout_s)
        errors = [node.peer.last_error for node in self.nodes.values() if not node.peer.is_well]
        self.last_error = errors[0] if errors else self.last_error
        if not any(node.peer.is_well for node in self.nodes.values()):
            raise unavailable(self.place, self.last_error)

    # ---- as any tier

    def contains(self, keys: Keys, request: object | None = None) -> Mask:
        self._maintain()
        return super().contains(keys, request)

    def submit_write(
        self, keys: Keys, pool: Blocks, rows: Rows, request: object | None = None
    ) -> tuple[int, Mask]:
        self._maintain()
        return super().submit_write(keys, pool, rows, request)

    @property
    def queue_room(self) -> int:
        # The maximum, because a hanging node without room must not stop the others. Without nodes, offers are
        # dropped.
        rooms = [self.nodes[number].queue_room for number in self.numbers.values()]
        return max(rooms, default=sys.maxsize)

    def finished(self) -> list[JobResult]:
        self._maintain()
        return super().finished()

    def clear(self) -> None:
        self.is_reset_wanted[:] = True
        for number in self.numbers.values():
            self.nodes[number].clear()

    def take_changes(self) -> list[tuple[list[bytes], bool]]:
        self._reports_changes = True
        changes, self._changes = self._changes, []
        return changes + super().take_changes()

    def drain(self, timeout_s: float) -> bool:
        def is_drained() -> bool:
            self._maintain()
            for node in self.nodes.values():
                node.process_ended()
            for number in self.numbers.values():
                self.nodes[number].is_open()
            # A former node never confirms a reset. The present node of its divisions does.
            return all(node.has_no_jobs for node in self.nodes.values()) and not self.is_reset_wanted.any()

        return wait_until(is_drained, timeout_s)

    def stats(self) -> TierStats:
        return sum_of([self._removed_stats, *(node.stats() for node in self.nodes.values())])

    def close(self) -> None:
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        self._thread.stop()
        for node in self.nodes.values():
            node.stop()
        until = time.monotonic() + CLOSE_S
        for node in self.nodes.values():
            node.join(until)
        self._thread.join(max(0.0, until - time.monotonic()))

    # ---- the map

    def members(self) -> Mapping[int, SharedTier]:
        return self.nodes

    def shares(self, keys: Keys) -> list[tuple[int, SharedTier, npt.NDArray[np.int64]]]:
        homes = self.homes[division_of(keys)]
        numbers = {*homes.tolist()} - {_NO_NODE}
        if len(keys) == 1:  # engines ask key by key
            return [(number, self.nodes[number], _FIRST_ROW) for number in numbers]
        return [(number, self.nodes[number], np.flatnonzero(homes == number)) for number in sorted(numbers)]

    def is_whole(self) -> bool:
        """Return True if every division has a node and all nodes in the map are healthy."""
        return bool((self.homes != _NO_NODE).all()) and all(
            self.nodes[number].peer.is_well for number in self.numbers.values()
        )

    def _maintain(self) -> None:
        """Switch to a new map, start and remove nodes, and request the map again after failures.

        Because the tier calls this often, it does nothing in the 5 ms after a run, unless a map has arrived.
        """
        now = self._clock()
        if (now < self._maintain_at and not self._ended) or self._closed or os.getpid() != self._pid:
            return
        self._maintain_at = now + _MAINTAIN_EVERY_S
        while self._ended:
            question = self._ended.popleft()
            self._question = None
            if question.error is not None:
                self.last_error = question.error
            elif isinstance(question, MapQuestion):
                self.use_map(question)
        self.make_some_nodes()
        self._start_some_nodes()
        for number in self.numbers.values():
            if not self.nodes[number].peer.reset_wanted:
                self.is_reset_wanted[[*self.divisions[number]]] = False
        self._remove_some_nodes()
        num_troubles = sum(self.nodes[number].peer.num_troubles for number in self.numbers.values())
        if num_troubles == self._num_troubles and self.is_whole():
            self._backoff.reset()
        elif self._question is None and now >= self._ask_at:
            self._num_troubles = num_troubles
            self._ask_at = now + self._backoff.next_s()
            self._question = MapQuestion(deadline=time.monotonic() + CONNECT_S)
            self._thread.submit(self._question)

    def _remove_some_nodes(self) -> None:
        """Stop and remove a few of the former nodes that have no job in flight."""
        idle = [number for number in self._leaving() if self.nodes[number].is_idle]
        for number in idle[:_NODES_AT_ONCE]:
            node = self.nodes.pop(number)
            del self.divisions[number]
            node.stop()
            self._changes += node.take_changes()
            stats = replace(node.stats(), in_flight=0, circuit_open=0)
            self._removed_stats = sum_of([self._removed_stats, stats])

    def _leaving(self) -> list[int]:
        """Return the numbers of the nodes that are no longer in the map, the oldest first."""
        return sorted(self.nodes.keys() - {*self.numbers.values()})

    def use_map(self, question: MapQuestion) -> None:
        """Start to switch to a new map. Jobs of nodes that leave the map end normally.

        If this would result in more than `_MOST_NODES` nodes, ignores the new map and stops some former
        nodes. A background thread then reads the map again later.
        """
        kept = {
            address: number
            for address, number in self.numbers.items()
            if question.divisions.get(address) == self.divisions[number]
        }
        new = [address for address in question.divisions if address not in kept]
        if len(self.nodes) + len(new) > _MOST_NODES:
            for number in self._leaving()[:_NODES_AT_ONCE]:
                self.nodes[number].stop()
            self._num_troubles = _NO_NODE  # so that the map is read again
            return
        self._change = _MapChange(question, kept, new)
        self.make_some_nodes()

    def make_some_nodes(self) -> None:
        """Create a few of the nodes that the new map needs. When all exist, the new map takes effect."""
        change = self._change
        if change is None:
            return
        self._change = None  # an exception drops the new map and keeps the old one
        for address in change.new[:_NODES_AT_ONCE]:
            change.made[address] = self.new_node(address, change.question.divisions[address])
        del change.new[:_NODES_AT_ONCE]
        if change.new:
            self._change = change
            return
        numbers = dict(change.kept)
        for number, (address, node) in enumerate(change.made.items(), self._next_number):
            self.nodes[number], numbers[address] = node, number
            self.divisions[number] = change.question.divisions[address]
        self._next_number += len(change.made)
        self.homes[:] = _NO_NODE
        for address, number in numbers.items():
            node, divisions = self.nodes[number], [*self.divisions[number]]
            node.peer.num_replicas = change.question.num_replicas[address]
            self.homes[divisions] = number
            if self.is_reset_wanted[divisions].any() and not node.peer.reset_wanted:
                node.clear()  # the reset was requested while the map changed
        self.numbers = numbers
        self._start_some_nodes()
        well = [address for address, number in numbers.items() if self.nodes[number].peer.is_well]
        self._candidates = [*well, *numbers, *self._seeds]

    def _start_some_nodes(self) -> None:
        """Start the threads of a few nodes. If a start fails, a later call repeats it."""
        waiting = [node for n in self.numbers.values() if not (node := self.nodes[n]).peer.has_begun]
        for node in waiting[:_NODES_AT_ONCE]:
            try:
                node.begin()
            except RuntimeError as error:  # the limit of threads or memory of this process
                self.last_error = error
                self._log.warn("threads", "tier %s: no threads for %s: %s", self.name, node.place, error)
                return

    def new_node(self, address: Address, divisions: tuple[int, ...]) -> RemoteTier:
        """Create a node with these divisions, without starting its threads."""
        (host, port), options = address, self.options
        server = Server(
            f"{host}:{port}/{options.namespace}",
            lambda deadline: self._connect(address, deadline),
            self.dialect,
            DividedKeyspace(options.namespace, options.producer, divisions),
        )
        node = RemoteTier(
            self.name, server, options, admission=self._admission, clock=self._clock, history=self._history
        )
        if self.is_reset_wanted[[*divisions]].any():
            node.clear()
        if self._reports_changes:
            node.take_changes()  # starts its write log
        return node

    def _connect_to_any(self, deadline: float) -> Connection:
        return self._connect(random.choice(self._candidates), deadline)


def _ask(connection: Connection, exchange: Exchange) -> None:
    assert isinstance(exchange, MapQuestion)
    exchange.run(connection)
