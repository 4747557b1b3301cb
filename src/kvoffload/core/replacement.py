"""The question to a policy: who leaves for these blocks. Its answer is checked, not believed.

Knows neither the free slots nor the index: `steps.enter` checks what needs them.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvoffload.core.policy import REFUSED, EvictionPolicy
from kvoffload.core.protection import Protected
from kvoffload.core.victim import VictimTier
from kvoffload.errors import PolicyError
from kvoffload.structures.jit import I32Array
from kvoffload.structures.keys import Keys

_NONE = np.empty(0, np.int32)


def replace_blocks(
    policy: EvictionPolicy,
    victim: VictimTier | None,
    rows: I32Array,
    fresh: npt.NDArray[np.uint64],
    slots: I32Array,
    num_given: int,
    protected: Protected,
) -> int:
    """Let the policy fill `slots` from `num_given` on, for the blocks whose keys are `fresh`.

    Returns: how many of them it refuses; those end up behind the others, in `rows`, `fresh` and `slots`.
    Raises: `PolicyError` when the policy breaks its contract.
    """
    given = slots[:num_given].copy() if num_given else _NONE
    policy.replace(Keys(fresh, policy.index.key_bytes), slots, num_given, protected)
    if num_given and not np.array_equal(slots[:num_given], given):
        raise PolicyError(f"policy {policy.name!r} changed the free slots that it was given")
    if victim is not None and len(victim.duplicates):
        named = slots[num_given:]
        if victim.duplicates.holds_any(named[(named >= 0) & (named < policy.capacity_blocks)]):
            raise PolicyError(f"policy {policy.name!r} named blocks that had been removed from it")
    if not policy.refuses:
        return 0
    refused = slots == REFUSED
    num_refused = int(np.count_nonzero(refused))
    if num_refused and protected.admitted:
        raise PolicyError(f"policy {policy.name!r} refused blocks that were admitted")
    if num_refused and not refused[-num_refused:].all():
        if protected.one_prefix:
            raise PolicyError(f"policy {policy.name!r} refused a block and took one behind it")
        order = np.argsort(refused, kind="stable")
        fresh[:], slots[:], rows[: len(slots)] = fresh[order], slots[order], rows[order]
    return num_refused
