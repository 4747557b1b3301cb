"""Admission by expected uses: a write budget is spent on the blocks with the most expected uses."""

from __future__ import annotations

from typing import Annotated

import msgspec
import numpy as np

from kvoffload.admission.reuse import DEFAULT_TRACKER_SIZE, count_keys, refresh_keys
from kvoffload.core.admission import Admission
from kvoffload.structures.index import ABSENT, find, hash_row
from kvoffload.structures.jit import BoolArray, I32Array, ReadU64Matrix, kernel
from kvoffload.structures.keylists import KeyLists
from kvoffload.structures.keys import Keys

MOST_COUNTED = 16
"""Largest number of requests that the rule distinguishes. A block with more requests counts as a block with
this number of requests."""
_PRICED_EVERY = 2_000
"""Number of references after which the rule calculates the price again."""
_MEMORY, _PACE_MEMORY = 0.998, 0.98
"""Decay factors: each calculation of the price multiplies older counts by one of them, so that old references
lose weight. `_MEMORY` applies to the counts of requests, which decay to 1/e within a million references.
`_PACE_MEMORY` applies to the counts of offered blocks and to the earned budget, which decay to 1/e within
a hundred thousand references."""
WARM_UP = 5_000
"""Number of references before the first admission. A price from fewer references would be too inaccurate, and
would waste the budget."""
_DOUBT = 2.0
"""Number of fictitious blocks without a further request that are added to the observed blocks with 1 request,
with 2 requests, and so on. They keep the expected uses low while the rule has observed only few blocks."""
_RESERVE = 0.1
"""Share of the recently earned budget that is reserved for blocks above the price."""


class WorthAdmission(Admission):
    """Admits the blocks with the most expected uses that the tier's write budget can pay.

    The rule learns how useful a block with 1, 2, 3, ... requests so far will be. The *expected uses* of the
    block are the mean number of its further requests that no faster tier can serve.

    The *price* is a threshold: blocks with fewer expected uses do not enter. The rule sets the price as low
    as the budget allows: the recently offered blocks above the price must fit into the recently earned
    budget.

    - Blocks above the price enter while any budget is left. The budget can pay for all of them.
    - Blocks exactly at the price enter while the remaining budget exceeds a reserve. The budget can pay for
      only some of them.

    A block with more requests has at least the same expected uses, and a parent has at least as many requests
    as its child. So the parent of an admitted block is admitted.

    Without a write budget every block is admitted. With a budget, no block is admitted during `warm_up`.

    Attributes:
        warm_up: number of references to count before any block is admitted.

    Differs from ``reuse:N``: N follows from the traffic and the budget. Cost: the cost of ``reuse`` plus two
    index probes for each block. Memory: 40 bytes plus the key for each slot of the tier, at least for 64,000
    keys.

    Source: ours. A price at which spending matches a rate is the dual variable of the budget: Talluri and
    van Ryzin, "An Analysis of Bid-Price Controls for Network Revenue Management", Management Science 44(11),
    1998.
    """

    warm_up: Annotated[int, msgspec.Meta(ge=0)] = WARM_UP

    name = "worth"
    good_for = "a disk with a write budget: the best blocks that the budget can pay, without a threshold"

    def __init__(self, key_bytes: int, num_tracked: int, warm_up: int = WARM_UP) -> None:
        self.key_bytes, self.warm_up = key_bytes, warm_up
        self._tracker = KeyLists(num_tracked, key_bytes, 1)
        self._counts = np.zeros(num_tracked, np.int32)
        self._offered_at = np.zeros(num_tracked, np.int32)
        self._missed_at = np.zeros(num_tracked, np.int32)
        self._begin()

    def _begin(self) -> None:
        shape = MOST_COUNTED + 1
        self._num_seen, self._num_offered = np.zeros(shape), np.zeros(shape)
        self._expected, self._num_missed = np.zeros(shape), np.zeros(shape)
        self._num_beyond = self._num_missed_beyond = 0.0
        self._balance = self._earned = 0.0
        self._references = self._price_at = 0
        self._has_budget = False
        self._least = self._full_price = 1
        """Numbers of requests that a block needs to enter. `_least` applies while the remaining budget
        exceeds the reserve (`_RESERVE`). Below the reserve `_full_price` applies."""

    @classmethod
    def for_cache(cls, key_bytes: int, capacity_blocks: int) -> WorthAdmission:
        return cls(key_bytes, max(DEFAULT_TRACKER_SIZE, capacity_blocks), cls.warm_up)

    def count(self, keys: Keys) -> None:
        count_keys(self._tracker.memory, self._counts, keys.words)
        num_requests, missed = self._look_up(keys)
        counts = np.minimum(num_requests, MOST_COUNTED)
        self._num_seen += np.bincount(counts, minlength=MOST_COUNTED + 1)
        self._num_missed += np.bincount(counts[missed], minlength=MOST_COUNTED + 1)
        is_beyond = num_requests > MOST_COUNTED
        self._num_beyond += int(np.count_nonzero(is_beyond))
        self._num_missed_beyond += int(np.count_nonzero(is_beyond & missed))
        self._references += len(keys)
        if self._references >= self._price_at:
            self._price_at = self._references + _PRICED_EVERY
            self._set_price()

    def missed(self, keys: Keys) -> None:
        known = self._places(keys)
        known = known[known != ABSENT]
        self._missed_at[known] = self._counts[known]

    def refresh(self, keys: Keys) -> None:
        refresh_keys(self._tracker.memory, keys.words)

    def admit(self, keys: Keys) -> BoolArray:
        if not self._has_budget:
            return np.ones(len(keys), np.bool_)
        if self._references < self.warm_up or self._balance <= 0:
            return np.zeros(len(keys), np.bool_)
        least = self._full_price if self._balance < _RESERVE * self._earned else self._least
        allowed: BoolArray = self._look_up(keys)[0] >= least
        return allowed

    def settle(self, offered: Keys, num_written: int, num_earned: float, budget_blocks: float) -> None:
        self._has_budget = True
        self._earned += num_earned
        self._balance = min(self._balance + num_earned, budget_blocks) - num_written
        places = np.unique(self._places(offered))
        # A block that is offered twice after one reference counts once.
        places = places[(places != ABSENT) & (self._offered_at[places] != self._counts[places])]
        counts = self._offered_at[places] = self._counts[places]
        self._num_offered += np.bincount(np.minimum(counts, MOST_COUNTED), minlength=MOST_COUNTED + 1)

    def reset(self) -> None:
        self._tracker.clear()
        self._offered_at[:] = self._missed_at[:] = 0
        self._begin()

    def _set_price(self) -> None:
        """Update the expected uses and the price, then decay the counts of old references."""
        blocks, expected = self._num_seen + _DOUBT, self._expected
        # The last class counts a block again for each further request.
        missed_beyond = self._num_missed_beyond
        goes_on = min(0.999, self._num_beyond / blocks[-1])
        expected[-1] = missed_beyond / blocks[-1] / (1.0 - goes_on)
        for count in range(MOST_COUNTED - 1, 0, -1):
            again, missed = self._num_seen[count + 1], self._num_missed[count + 1]
            if count + 1 == MOST_COUNTED:
                again, missed = again - self._num_beyond, missed - missed_beyond
            expected[count] = (missed + min(again, blocks[count]) * expected[count + 1]) / blocks[count]
        np.maximum.accumulate(expected, out=expected)
        # Entry i: number of offered blocks that at least i requests have used.
        at_least = np.cumsum(self._num_offered[::-1])[::-1]
        paid = np.flatnonzero(at_least <= self._earned + max(0.0, self._balance))
        self._full_price = max(1, int(paid[0])) if len(paid) else MOST_COUNTED
        # Blocks at the price: one request less, and all blocks with equal expected uses.
        price = expected[max(1, self._full_price - 1)]
        self._least = max(1, int(np.searchsorted(expected, price)))
        self._num_seen *= _MEMORY
        self._num_missed *= _MEMORY
        self._num_beyond *= _MEMORY
        self._num_missed_beyond *= _MEMORY
        self._num_offered *= _PACE_MEMORY
        self._earned *= _PACE_MEMORY

    def _look_up(self, keys: Keys) -> tuple[I32Array, BoolArray]:
        """Return the number of requests for each block, and a mask that is True for blocks that no faster
        tier has.
        """
        places = self._places(keys)
        counts = np.where(places != ABSENT, self._counts[places], np.int32(0))
        # `missed` set the mark before this use was counted.
        return counts, (counts > 1) & (self._missed_at[places] == counts - 1)

    def _places(self, keys: Keys) -> I32Array:
        """Return the position of each key in the tracker, or ABSENT."""
        places = np.empty(len(keys), np.int32)
        _find_all(self._tracker.memory, keys.words, places)
        return places


@kernel
def _find_all(tracker: KeyLists, batch: ReadU64Matrix, places: I32Array) -> None:
    for row in range(batch.shape[0]):
        places[row] = find(tracker.index, batch, row, hash_row(batch, row))
