"""Admission of blocks that are offered to a tier without a request.

RAM offers such blocks when the device drops them, or when they have waited for a busy tier. The offer is no
reference: the blocks were counted when their request finished. The blocks may belong to several requests.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvoffload.core.manager import OffloadingManager
from kvoffload.core.plans import StorePlan
from kvoffload.core.request import RequestContext
from kvoffload.structures.keys import Keys

Rows = npt.NDArray[np.intp]


def admitted_rows(manager: OffloadingManager, keys: Keys, request: RequestContext | None) -> tuple[Rows, int]:
    """Return the rows of `keys` that `prepare_offer` may store, and the number of blocks refused here.

    With a request, or without an admission rule: all rows. Otherwise the missing blocks that the rule admits,
    each by itself: a refused block does not exclude blocks of other requests behind it.
    """
    rule = manager.admission
    if rule is None or request is not None:
        return np.arange(len(keys)), 0
    missing = np.flatnonzero(manager.slots_of(keys) < 0)
    admitted = missing[rule.admit(keys.take(missing))] if len(missing) else missing
    return admitted, len(missing) - len(admitted)


def prepare_offer(manager: OffloadingManager, keys: Keys, request: RequestContext | None) -> StorePlan | None:
    """Call `OffloadingManager.prepare_store` for the blocks of `admitted_rows`."""
    if request is not None or manager.admission is None:
        return manager.prepare_store(keys, request)
    unasked = manager.begin_request("")
    unasked.add(keys)
    # The rule must not count the offer.
    unasked.observed = unasked.length
    return manager.prepare_store(keys, unasked, admitted=True)
