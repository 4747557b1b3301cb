"""``kvoffload warm``: what the first start would compile is compiled now."""

from __future__ import annotations

import importlib
import pkgutil
import time

import click

import kvoffload
from kvoffload.structures.jit import compile_all

_WITHOUT_KERNELS = ("kvoffload.integrations", "kvoffload.testing", "kvoffload.cli")
"""What has no kernels of its own, and takes long to import."""


@click.command()
def warm() -> None:
    """Compile every kernel of the package, for this machine and this Python.

    Compiled kernels stay beside the package, or in NUMBA_CACHE_DIR. Run it once when an image of a container
    is built, on the kind of processor that it will run on: then no start waits for the compiler.
    """
    started = time.monotonic()
    for module in pkgutil.walk_packages(kvoffload.__path__, "kvoffload.", onerror=lambda name: None):
        if module.name.startswith(_WITHOUT_KERNELS):
            continue
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as missing:
            # torch, Dask and pyarrow are optional, and without them nothing of that module runs.
            if str(missing.name).startswith("kvoffload"):
                raise
    count = compile_all()
    click.echo(f"{count} kernels are ready, after {time.monotonic() - started:.0f} s")
