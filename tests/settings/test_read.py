"""Sizes and capacities as users type them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvoffload.errors import ConfigError
from kvoffload.settings.read import (
    Count,
    Duration,
    Positive,
    Size,
    SizeOrNothing,
    convert,
    parse_capacity,
    parse_size,
)


@pytest.mark.parametrize(
    ("text", "size"),
    [("4096", 4096), ("64KiB", 65536), ("64 kib", 65536), ("1.5GiB", 3 << 29), ("2MB", 2_000_000), ("8B", 8)],
)
def test_size(text: str, size: int) -> None:
    assert parse_size("x", text) == size


@pytest.mark.parametrize(
    "text", ["", "64XiB", "-1", "GiB", "1e3", "64KiB more", 5000 * "9", 400 * "9" + ".5GiB"]
)
def test_invalid_size(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^block_bytes: "):
        parse_size("block_bytes", text)


@pytest.mark.parametrize(
    ("text", "blocks"),
    [
        ("5000", 5000),
        ("5%", 9327),
        ("1%", 1865),
        ("0.1%", 186),
        ("29%", 54099),
        ("100%", 186550),
        ("4GiB", 65536),
    ],
)
def test_capacity_rounds_down(text: str, blocks: int) -> None:
    assert parse_capacity("capacity", text, 65536, 186_550) == blocks


@pytest.mark.parametrize("text", ["0", "2.5", "five", "0.0001%", "1KiB", "5 percent", "-3", 5000 * "9"])
def test_impossible_capacity(text: str) -> None:
    with pytest.raises(ConfigError, match=f"^capacity: {text!r} is invalid; .*allowed: a number of blocks"):
        parse_capacity("capacity", text, 65536, 186_550)


@pytest.mark.parametrize(
    ("value", "kind", "converted"),
    [
        (0.00001, Duration, 0.00001),
        (np.float32(0.5), Duration, 0.5),
        (" 50ms", Duration, 0.05),
        (np.int64(4096), Size, 4096),
        (4096.0, Size, 4096),
        (np.uint8(0), SizeOrNothing, 0),
        (np.float64(2.5), Positive, 2.5),
        ("7", Count, 7),
    ],
)
def test_numbers_of_every_form(value: Any, kind: Any, converted: float) -> None:
    assert convert("x", value, kind) == converted


@pytest.mark.parametrize("kind", [Duration, Size, Positive, Count])
@pytest.mark.parametrize(
    "value", [True, 0, -1, -0.5, float("nan"), float("inf"), "five", "a\udcff", np.arange(2), [1], b"1"]
)
def test_invalid_numbers(value: Any, kind: Any) -> None:
    with pytest.raises(ConfigError, match=r"^x: .*allowed: "):
        convert("x", value, kind)


@pytest.mark.parametrize("kind", [Duration, Size, Positive])
@pytest.mark.parametrize("value", [10**400, "9" * 400])
def test_numbers_that_are_too_large(value: Any, kind: Any) -> None:
    with pytest.raises(ConfigError, match=r"^x: .*allowed: "):
        convert("x", value, kind)
