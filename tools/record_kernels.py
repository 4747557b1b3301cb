"""Compiles every kernel of the installed package for the baseline processor, and packs them into a file.

    python tools/record_kernels.py FOLDER

Runs in an environment with the package and one version of numba. tools/packages.py runs it for a wheel;
.ci/run runs it once for each numba, and packages.py then uses these files (``--kernels``).
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

BASELINE = {"NUMBA_CPU_NAME": "x86-64-v3", "NUMBA_CPU_FEATURES": ""}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    folder = parser.parse_args().folder
    with tempfile.TemporaryDirectory() as empty:
        os.environ.update(BASELINE, NUMBA_CACHE_DIR=empty)  # numba reads them when it is imported
        record(folder)


def record(folder: Path) -> None:
    from kvoffload.cli.warm import compile_package
    from kvoffload.structures import kernel_cache, shipped

    recorded = shipped.KernelCache.recorded = {}
    count = compile_package()
    if len(recorded) != count:
        raise SystemExit(
            f"{len(recorded)} of {count} kernels were compiled: the others are in {shipped.FOLDER}"
        )
    path = shipped.write(folder, kernel_cache.digest_of_sources(), recorded)
    print(f"{path.name}: {count} kernels, {path.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
