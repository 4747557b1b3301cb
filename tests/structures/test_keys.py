"""Packed batches of keys: their parts and their digests."""

from __future__ import annotations

import numpy as np

from kvoffload.structures.digests import digests_of
from kvoffload.structures.keys import Keys


def test_parts_of_a_batch_share_its_digests() -> None:
    raw = [bytes([number]) * 12 for number in range(6)]
    keys, fresh = Keys.pack(raw, 12), Keys.pack(raw, 12)
    assert keys.digests is keys.digests
    rows, mask = np.array([4, 1]), np.array([1, 0, 1, 0, 0, 1], np.bool_)
    assert keys[2:5].digests.tolist() == fresh[2:5].digests.tolist()
    assert keys.take(rows).digests.tolist() == fresh.take(rows).digests.tolist()
    assert keys.take(mask).digests.tolist() == fresh.take(mask).digests.tolist()


def test_slices_view_the_digests_of_their_batch() -> None:
    keys = Keys.pack([bytes([number]) * 12 for number in range(6)], 12)
    before = keys.digests
    assert np.shares_memory(keys[1:3].digests, before)
    assert digests_of(keys.words, 12).tolist() == before.tolist()
