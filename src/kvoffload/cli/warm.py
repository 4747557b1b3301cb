"""``kvoffload warm``: compile every kernel before the first start."""

from __future__ import annotations

import importlib
import pkgutil
import time

import click

import kvoffload
from kvoffload.structures.jit import compile_all

_WITHOUT_KERNELS = ("kvoffload.integrations", "kvoffload.testing", "kvoffload.cli")
"""Packages that have no kernels, and are slow to import."""


@click.command()
def warm() -> None:
    """Compile every kernel of the package, for this machine and this Python.

    Kernels that the wheel contains in compiled form for this Python and numba are not compiled again. The
    other kernels are compiled and cached beside the package, or in NUMBA_CACHE_DIR. Run this command when you
    build a container image, on the kind of processor on which the image will run. Then no start of an engine
    waits for the compiler.
    """
    started = time.monotonic()
    count = compile_package()
    click.echo(f"{count} kernels are ready, after {time.monotonic() - started:.0f} s")


def compile_package() -> int:
    """Import every module that has kernels, and compile the kernels; return the number of kernels."""
    for module in pkgutil.walk_packages(kvoffload.__path__, "kvoffload.", onerror=lambda name: None):
        if module.name.startswith(_WITHOUT_KERNELS):
            continue
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as missing:
            # torch, Dask and pyarrow are optional. Without them, the module's kernels are not needed.
            if str(missing.name).startswith("kvoffload"):
                raise
    return compile_all()
