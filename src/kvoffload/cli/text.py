"""How commands write numbers for people."""

from __future__ import annotations


def size_text(num_bytes: int) -> str:
    """``1.5 GiB``."""
    value, units = float(num_bytes), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value, units = value / 1024, units[1:]
    return f"{value:.4g} {units[0]}"
