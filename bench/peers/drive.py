"""Plays a product's scenes, or times it, in the product's Python: ``python -m peers.drive``.

`bench/integrity.py` is the parent process. Writes JSON lines to stdout: first version and configuration, then
one object per row.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
from pathlib import Path

from peers.scenes import KINDS, play
from peers.speed import serve


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("damage", "speed"))
    parser.add_argument("module")
    parser.add_argument("product")
    parser.add_argument("--directory", type=Path, default=Path())
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--kind", action="append", choices=KINDS)
    arguments = parser.parse_args()
    # Products print to stdout: redirect that to stderr.
    with os.fdopen(os.dup(1), "w", buffering=1) as out:
        os.dup2(2, 1)
        adapter = importlib.import_module(f"peers.{arguments.module}").ADAPTERS[arguments.product]
        print(json.dumps({"version": adapter.version, "configuration": adapter.configuration}), file=out)
        if arguments.what == "speed":
            serve(adapter, out)
            return
        for kind in arguments.kind or KINDS:
            place = arguments.directory / "scene"
            for row in play(adapter, kind, place, arguments.seed, rounds=arguments.rounds):
                print(json.dumps(row), file=out)


if __name__ == "__main__":
    main()
