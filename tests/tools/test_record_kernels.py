"""`tools/record_kernels.py` checks its arguments before it compiles."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "record_kernels.py"


@pytest.mark.parametrize(("arguments", "code"), [(["--help"], 0), (["--folder=x"], 2), ([], 2)])
def test_options_are_no_folders(tmp_path: Path, arguments: list[str], code: int) -> None:
    """Regression: ``--help`` compiled all kernels and created a directory ``--help``."""
    command = [sys.executable, str(TOOL), *arguments]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == code
    assert "FOLDER" in done.stdout + done.stderr
    assert not list(tmp_path.iterdir())
