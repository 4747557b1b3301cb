"""The audit of lists finds exactly the faults that a walk of every list finds."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from kvoffload.structures.lists import LIST, NEXT, PREV, UNLISTED, Lists, push_head
from kvoffload.testing.audit import audit_lists

POSITIONS, NUM_LISTS = 6, 2
ROWS = POSITIONS + NUM_LISTS


def walked(lists: Lists) -> bool:
    """Return true if the lists are sound: every list is walked, link by link."""
    links = lists.links.tolist()
    num_listed = 0
    for sentinel in range(POSITIONS, ROWS):
        row, size = sentinel, 0
        while (following := links[row][NEXT]) != sentinel:
            if not 0 <= following < POSITIONS or size == POSITIONS:
                return False
            if links[following][PREV] != row or links[following][LIST] != sentinel:
                return False
            row, size = following, size + 1
        if links[sentinel][PREV] != row or links[sentinel][LIST] != size:
            return False
        num_listed += size
    return num_listed == sum(links[row][LIST] != UNLISTED for row in range(POSITIONS))


def made(members: list[int | None]) -> Lists:
    lists = Lists(POSITIONS, NUM_LISTS)
    for position, number in enumerate(members):
        if number is not None:
            push_head.py_func(lists.links, lists.sentinel(number), position)  # type: ignore[attr-defined]
    return lists


def sound(lists: Lists) -> bool:
    try:
        audit_lists("the lists", lists)
    except AssertionError:
        return False
    return True


members = st.lists(st.none() | st.integers(0, NUM_LISTS - 1), min_size=POSITIONS, max_size=POSITIONS)
cells = st.tuples(st.integers(0, ROWS - 1), st.sampled_from([PREV, NEXT, LIST]), st.integers(-2, ROWS))


@given(members=members, damage=st.lists(cells, max_size=4))
@example(
    # A second ring of list 0, which its size counts.
    members=[0, 0, 0, None, None, None],
    damage=[(1, NEXT, 1), (1, PREV, 1), (2, NEXT, 0), (0, PREV, 2)],
)
def test_damage_of_links(members: list[int | None], damage: list[tuple[int, int, int]]) -> None:
    lists = made(members)
    assert sound(lists)
    for row, column, value in damage:
        lists.links[row, column] = value
    assert sound(lists) == walked(lists)
