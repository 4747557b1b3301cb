"""A Valkey server or a bucket, as the URL of a tier."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

from support import s3_server, valkey_server

KINDS = ("valkey", "s3")


class TierServer(NamedTuple):
    """A running server.

    Attributes:
        url: of a tier.
        server: has `stop`.
    """

    url: str
    server: Any


@contextmanager
def running(kind: str, directory: Path) -> Iterator[TierServer]:
    """Run a server; `kind` is one of `KINDS`. Meanwhile the environment has a bucket's credentials."""
    directory.mkdir()
    if kind == "valkey":
        with valkey_server.running(directory) as valkey:
            yield TierServer(f"valkey://127.0.0.1:{valkey.port}/team?timeout=200ms", valkey)
        return
    credentials = {"AWS_ACCESS_KEY_ID": s3_server.KEY_ID, "AWS_SECRET_ACCESS_KEY": s3_server.SECRET}
    with s3_server.running(s3_server.Rclone, directory) as rclone, patch.dict(os.environ, credentials):
        url = f"s3://{s3_server.BUCKET}/team?endpoint={rclone.endpoint}&region=us-east-1&timeout=2s"
        yield TierServer(url, rclone)
