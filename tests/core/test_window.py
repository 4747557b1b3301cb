"""The window of a victim tier."""

from kvoffload.core.window import Window


def test_the_window_follows_the_largest_step_within_its_bounds_and_decays() -> None:
    window = Window(smallest=4, largest=20)
    assert window.size == 4
    window.follow(2)
    assert window.size == 4
    window.follow(10)
    assert window.size == 10
    window.follow(26)
    assert window.size == 20
    for _ in range(500):
        window.follow(1)
    assert window.size == 4


def test_a_step_of_half_the_size_is_reached_after_70_steps() -> None:
    window = Window(smallest=1, largest=1000)
    window.follow(1000)
    sizes = []
    for _ in range(70):
        window.follow(1)
        sizes.append(window.size)
    assert sizes[68] == 499
    assert sizes[67] > 500


def test_a_small_device_bounds_the_window_below_the_smallest_step() -> None:
    window = Window(smallest=32, largest=3)
    window.follow(32)
    assert window.size == 3
