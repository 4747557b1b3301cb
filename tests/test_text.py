"""One form for bytes, shares and durations."""

from __future__ import annotations

import pytest

from kvoffload.text import duration, interval, percent, size, unbroken


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (2.26e-6, "2.26 us"), (0.00034, "340 us"), (0.9997, "1 s"), (1.5, "1.5 s"), (600, "10 min"),
     (8000, "2.22 h"), (3 * 86_400, "3 days"), (1000 * 86_400, "2.74 years")],
)  # fmt: skip
def test_durations_have_three_digits(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_sizes_are_binary_or_as_drives_are_sold() -> None:
    assert [size(100), size(1536), size(20 * 2**50)] == ["100 B", "1.5 KiB", "20 PiB"]
    assert size(3_840 * 10**9, 1000) == "3.84 TB"
    assert [size(2**20 - 1), size(999_990_000, 1000)] == ["1 MiB", "1 GB"]


def test_numbers_stay_with_their_units() -> None:
    """A terminal of 80 columns showed ``21.3`` at the end of a line, and ``%)`` on the next."""
    text = (
        "320 GiB of RAM for 3,200 USD saves 31.3 % (27.3% to 35.2%), 5 of 6 modules, 2.1 points less, in 3 s"
    )
    kept = (
        "320~GiB of RAM for 3,200~USD saves 31.3~% (27.3%~to~35.2%), 5 of 6~modules, 2.1~points less, in 3~s"
    )
    assert unbroken(text).replace("\u00a0", "~") == kept


def test_shares() -> None:
    assert [percent(0.3141), percent(0.3141, 0)] == ["31.4%", "31%"]
    assert [interval(0.1, 0.25), interval(None, 0.25)] == ["10.0% to 25.0%", ""]
