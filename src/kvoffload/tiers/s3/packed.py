"""A tier in a bucket, as the scheduler's thread sees it: a `RemoteTier` with several blocks in an object."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from kvoffload.structures.keys import Keys
from kvoffload.tiers.contract import GroupedTier, Mask, TierStats
from kvoffload.tiers.s3.bucket import Ledger
from kvoffload.tiers.s3.objects import OBJECTS, ObjectRead
from kvoffload.tiers.shared.batches import BlockBatch
from kvoffload.tiers.shared.connection import Connect
from kvoffload.tiers.shared.places import Places
from kvoffload.tiers.shared.tier import RemoteOptions, RemoteRequest, RemoteTier
from kvoffload.transfer import Blocks, Rows

_LINES = 4


@dataclass(eq=False)
class _Followed(RemoteRequest):
    """A request, how many blocks of its path have their place, and in which generation of places."""

    num_placed: int = 0
    generation: int = 0


class PackedTier(RemoteTier, GroupedTier):
    """Blocks in objects of a bucket that several machines share, each verified whenever it is read.

    What `RemoteTier` promises. In addition:

    - An object has `group_blocks` consecutive blocks of a path, and is named by their keys: who knows the
      path names it. What is left at the end of a path is not written, nor is a group of which a block is
      missing in a `submit_write`. Blocks of whose path the tier has not been told (`follow`) are not there,
      and are not written.
    - Of an object as much is read as lies between the first and the last block that are wanted.
    - An object of which one block is not sound is deleted.

    Args:
        ledger: counts the requests of all connections.
        group_blocks: blocks in an object, the same on all machines; 1: no path need be told.
        more: as for `RemoteTier`.
    """

    asks_persistence = False

    def __init__(
        self,
        name: str,
        place: str,
        connect: Connect,
        options: RemoteOptions,
        *,
        ledger: Ledger,
        group_blocks: int = 1,
        **more: Any,
    ) -> None:
        self.group_blocks = group_blocks
        self._ledger, self._places = ledger, Places(group_blocks)
        super().__init__(name, place, connect, options, speech=OBJECTS, lines=_LINES, **more)

    def begin_request(self, request_id: str) -> object:
        return _Followed()

    def follow(self, request: object, path: Keys) -> None:
        assert isinstance(request, _Followed)
        length = len(path) - len(path) % self.group_blocks
        if self.group_blocks == 1 or length == 0:
            return
        if request.generation != self._places.generation:
            request.num_placed, request.generation = 0, self._places.generation  # before it is forgotten
        if request.num_placed < length:
            self._places.add(path[request.num_placed : length])
            request.num_placed = length

    def cut(self, keys: Keys, room: int) -> int:
        count = min(room, len(keys))
        if self.group_blocks == 1 or count == len(keys):
            return count
        ends = np.flatnonzero(self._places.ends(keys[:count]))
        return int(ends[-1]) + 1 if len(ends) else count

    def contains(self, keys: Keys, request: object | None = None) -> Mask:
        found: Mask = super().contains(keys, request) & self._places.known(keys.digests)
        return found

    def unknown(self, keys: Keys, request: object | None = None) -> Mask:
        found: Mask = super().unknown(keys, request) & self._places.known(keys.digests)
        return found

    def submit_write(
        self, keys: Keys, pool: Blocks, rows: Rows, request: object | None = None
    ) -> tuple[int, Mask]:
        if self.group_blocks > 1 and self._is_open():
            digests = keys.digests
            for part in self._places.whole(keys):
                if not self._hints.present(digests[part.rows]).all():
                    self._hints.forget(digests[part.rows])  # an object is there as a whole, or not
        return super().submit_write(keys, pool, rows, request)

    def stats(self) -> TierStats:
        ledger = self._ledger
        return replace(super().stats(), puts=ledger.puts, gets=ledger.gets, cost=ledger.cost)

    # ---- inside

    def _writable(self, keys: Keys, wanted: npt.NDArray[np.intp]) -> npt.NDArray[np.intp]:
        if self.group_blocks == 1 or len(wanted) == 0:
            return wanted
        whole = [part.rows for part in self._places.whole(keys.take(wanted))]
        found: npt.NDArray[np.intp] = wanted[np.sort(np.concatenate(whole))] if whole else wanted[:0]
        return found

    def _submit(
        self, kind: type[BlockBatch], keys: Keys, num_rows: int, timeout_s: float, **more: object
    ) -> int:
        places = {"parts": self._places.parts(keys), "group_blocks": self.group_blocks}
        return super()._submit(kind, keys, num_rows, timeout_s, **places, **more)

    def _take_in(self, batch: BlockBatch) -> None:
        super()._take_in(batch)
        if isinstance(batch, ObjectRead) and batch.deleted.any():
            gone = batch.keys.take(batch.deleted).digests
            self._hints.learn(gone, np.zeros(len(gone), np.bool_))
