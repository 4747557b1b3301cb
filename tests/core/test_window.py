"""The window of a victim tier."""

from kvoffload.core.window import Window


def test_the_window_follows_the_largest_step_within_its_bounds_and_decays() -> None:
    window = Window(smallest=4, largest=20)
    assert window.size == 4
    window.adapt(2)
    assert window.size == 4
    window.adapt(10)
    assert window.size == 15
    window.adapt(26)
    assert window.size == 20
    for _ in range(2500):
        window.adapt(1)
    assert window.size == 4


def test_the_size_is_halved_after_693_steps() -> None:
    window = Window(smallest=1, largest=3000)
    window.adapt(2000)
    sizes = [window.size]
    for _ in range(700):
        window.adapt(1)
        sizes.append(window.size)
    assert sizes[0] == 3000
    assert sizes[692] >= 1500 > sizes[693]


def test_a_small_device_bounds_the_window_below_the_smallest_step() -> None:
    window = Window(smallest=32, largest=3)
    window.adapt(32)
    assert window.size == 3
