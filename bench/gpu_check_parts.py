"""Parts of ``make gpu-check``: results that a script writes as a JSON list, one after another."""

from __future__ import annotations

import json
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Part = dict[str, Any]


def part(name: str, status: str, why: str = "", **numbers: Any) -> Part:
    """Return a result. `status`: ``passed``, ``failed``, ``ran``, ``not run`` or ``not judged``."""
    return {"part": name, "status": status, "why": why, **numbers}


class PartsFile:
    """The parts of a script. Each part is written at once, because a later part may end the process."""

    def __init__(self, path: Path) -> None:
        self._path, self._parts = path, list[Part]()

    def run(self, name: str, checks: Iterable[Part]) -> None:
        """Run checks. If a check raises an error, the part `name` has failed."""
        try:
            for result in checks:
                self._write(result)
        except Exception as error:
            traceback.print_exc()
            self._write(part(name, "failed", f"{type(error).__name__}: {error}".splitlines()[0]))

    def exit_code(self) -> int:
        """Return 1 if a part has failed, otherwise 0."""
        return int(any(result["status"] == "failed" for result in self._parts))

    def _write(self, result: Part) -> None:
        self._parts.append(result)
        self._path.write_text(json.dumps(self._parts))
