"""Runs the command line in this process, and returns its output and exit code."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from pathlib import Path
from typing import NamedTuple
from unittest import mock

from kvoffload.cli.main import main


class Done(NamedTuple):
    """Result of a command: exit code and output."""

    returncode: int
    stdout: str
    stderr: str


def kvoffload(*arguments: str | Path, columns: int = 120) -> Done:
    """Run ``kvoffload ARGUMENTS`` at a width of 120 columns, without a terminal."""
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in range(2))
    code: object = 0
    with (
        mock.patch.object(sys, "argv", ["kvoffload", *map(str, arguments)]),
        mock.patch.dict(os.environ, COLUMNS=str(columns)),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            main()
        except SystemExit as end:
            code = end.code or 0
    assert isinstance(code, int)
    texts = (stream.buffer.getvalue().decode() for stream in (out, err))  # type: ignore[attr-defined]
    return Done(code, *texts)
