"""Compiles every kernel of the installed package for the baseline, and packs them into a file for a wheel.

Runs in an environment that has the package and the numba to compile with; tools/platform_wheels.py starts it.

    NUMBA_CPU_NAME=x86-64-v3 NUMBA_CPU_FEATURES= NUMBA_CACHE_DIR=EMPTY python tools/record_kernels.py FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path

from kvoffload.cli.warm import compile_package
from kvoffload.structures import kernel_cache, shipped


def main() -> None:
    recorded = shipped.KernelCache.recorded = {}
    count = compile_package()
    if len(recorded) != count:
        raise SystemExit(f"{count} kernels, but {len(recorded)} were compiled: NUMBA_CACHE_DIR is not empty")
    path = shipped.write(Path(sys.argv[1]), kernel_cache.digest_of_sources(), recorded)
    print(f"{path.name}: {count} kernels, {path.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
