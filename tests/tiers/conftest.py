"""Deadlines of connections to servers, long enough for a busy machine."""

from __future__ import annotations

import pytest

from support.valkey_server import PATIENCE_S

DEADLINES = (
    "kvoffload.tiers.shared.connection.CONNECT_S",
    "kvoffload.tiers.s3.bucket.CONNECT_S",
    "kvoffload.tiers.s3.credentials.CONNECT_S",
    "kvoffload.tiers.s3.credentials.ROLE_KEYS_S",
    "kvoffload.tiers.shared.peer.HANDSHAKE_S",
    "kvoffload.tiers.kinds.valkey.ValkeyOptions.start_s",
    "kvoffload.tiers.kinds.s3.S3Options.start_s",
)


@pytest.fixture(autouse=True)
def use_patient_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the deadlines of connections and handshakes to `PATIENCE_S`. Tests of silence set their own."""
    for name in DEADLINES:
        monkeypatch.setattr(name, PATIENCE_S)
