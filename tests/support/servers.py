"""A Valkey server or a bucket, as the URL of a tier."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

from support import s3_server, valkey_server

KINDS = ("valkey", "s3")


ATTEMPTS = 5


def until_stored(attempt: Callable[[], bool]) -> None:
    """Repeat `attempt` until it returns True: rclone answers 500 to one of a hundred concurrent PUTs."""
    assert any(attempt() for _ in range(ATTEMPTS)), f"{ATTEMPTS} attempts have not stored everything"


class TierServer(NamedTuple):
    """A running server.

    Attributes:
        url: of a tier.
        server: has `stop`.
    """

    url: str
    server: Any


@contextmanager
def running(kind: str, directory: Path, timeout: str = "") -> Iterator[TierServer]:
    """Run a server; `kind` is one of `KINDS`. Meanwhile the environment has a bucket's credentials.

    `timeout`: limit of a request and of a probe; by default short, for tests in which the server goes away. A
    probe that exceeds its limit is a miss, so a test of hits on a busy machine gives a long time.
    """
    directory.mkdir()
    if kind == "valkey":
        with valkey_server.running(directory) as valkey:
            limits = f"timeout={timeout}&probe_timeout={timeout}" if timeout else "timeout=200ms"
            yield TierServer(f"valkey://127.0.0.1:{valkey.port}/team?{limits}", valkey)
        return
    credentials = {"AWS_ACCESS_KEY_ID": s3_server.KEY_ID, "AWS_SECRET_ACCESS_KEY": s3_server.SECRET}
    with s3_server.running(s3_server.Rclone, directory) as rclone, patch.dict(os.environ, credentials):
        limits = f"timeout={timeout}&probe_timeout={timeout}" if timeout else "timeout=2s"
        settings = f"endpoint={rclone.endpoint}&region=us-east-1&{limits}"
        yield TierServer(f"s3://{s3_server.BUCKET}/team?{settings}", rclone)
