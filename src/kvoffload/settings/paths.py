"""Paths that users type. A leading ``~`` is replaced by the home directory.

This package must do this, because a shell expands ``~`` only at the beginning of a word, not in
``disk:~/kv:1GiB``, and because options may also come from JSON or TOML.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, TypeAlias

from kvoffload.errors import ConfigError


def expanded(field: str, path: str) -> str:
    """Replace a leading ``~`` or ``~user`` by the home directory, as a shell does.

    Other paths are returned unchanged, so ``./~`` names a file ``~``. Raises: `ConfigError`, with the option
    name `field`, if the home directory is unknown.
    """
    if not path.startswith("~"):
        return path
    whole_path = os.path.expanduser(path)
    if whole_path.startswith("~"):
        user = path.partition("/")[0]
        why = f"there is no home directory {user}; for a file of this name give ./{user}"
        raise ConfigError(field, path, why)
    return whole_path


class _FileParser:
    allowed = "the path of a file"

    def parse(self, field: str, value: object) -> str:
        if not isinstance(value, (str, Path)):
            raise ConfigError(field, value, f"allowed: {self.allowed}")
        return expanded(field, str(value))


FilePath: TypeAlias = Annotated[str, _FileParser()]
"""Type of an option that is the path of a file. A leading ``~`` is expanded. Empty means no file."""
