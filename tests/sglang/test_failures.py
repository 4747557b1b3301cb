"""Wrong configuration, damage, hanging and lost tiers: SGLang's threads get a miss, never an exception."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvoffload import ConfigError
from kvoffload.integrations.objects import ObjectStore
from support import valkey_server
from support.scripted_tier import ScriptedTier
from support.sglang_pools import PAGE, PATIENCE_S, Stand, extra_config, fill, forks, page_of
from support.timeouts import HANGS_S

MakeStand = Callable[..., Stand]
TOKENS = range(8 * PAGE)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Any]:
    directory = tmp_path / "valkey"
    directory.mkdir()
    with valkey_server.running(directory) as running:
        yield running


def url(server: Any) -> str:
    return f"valkey://127.0.0.1:{server.port}/team"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tiers": []}, r"tiers: \[\] is invalid"),
        ({"tiers": None}, "tiers: missing"),
        ({"tiers": ["disk:/nvme/kv"]}, "its capacity is missing"),
        ({"tiers": ["simulated:100"]}, "a tier that stores bytes: disk, valkey, s3"),
        ({"tier": "disk:/nvme/kv:1TiB"}, "tier"),
        ({"zero_copy": "sometimes"}, "zero_copy: 'sometimes' is invalid; allowed: auto, always, never"),
        ({"deadline": "soon"}, "deadline: 'soon' is invalid"),
        ({"tiers": ["disk:/nvme/kv:1TiB,policy=best"]}, "policy"),
        ({"identity": None}, "identity: missing; SGLang's arguments are unknown"),
    ],
)
def test_a_wrong_option_is_one_clear_error(
    stand: MakeStand, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    config = {**extra_config([f"disk:{tmp_path / 'kv'}:64MiB"]), **changes}
    with pytest.raises(ValueError, match=message):
        stand(config={name: value for name, value in config.items() if value is not None})


def test_a_pool_without_a_dtype_is_refused(stand: MakeStand) -> None:
    sglang = stand()
    sglang.controller.detach_storage_backend()
    dtype, sglang.host.dtype = sglang.host.dtype, None
    try:
        with pytest.raises(ConfigError, match="does not tell the dtype"):
            sglang.attach()
    finally:
        sglang.host.dtype = dtype
    assert sglang.storage is None


def test_damage_is_a_miss(stand: MakeStand, tmp_path: Path) -> None:
    sglang = stand()
    written = sglang.write(TOKENS)
    (slab,) = (tmp_path / "kv").glob("*.slab")
    whole = slab.read_bytes()
    half = len(written[3]) // 2  # a block has the K or the V of a page
    at = whole.index(written[3][:half])
    with slab.open("r+b") as file:
        file.seek(at + 100)
        file.write(bytes([whole[at + 100] ^ 1]))
    assert sglang.read(TOKENS) == written[:3]
    assert sglang.storage.store.stats()[0].mismatches == 1
    # The damaged block is forgotten, and the next backup stores it again.
    assert sglang.query(TOKENS).storage_hit_count == 3 * PAGE
    again = sglang.write(TOKENS, seed=2)
    assert sglang.read(TOKENS) == [*written[:3], again[3][:half] + written[3][half:], *written[4:]]


def test_a_reset_forgets_everything(stand: MakeStand) -> None:
    sglang = stand()
    sglang.write(TOKENS)
    assert sglang.storage.clear() is True
    assert sglang.read(TOKENS) == []
    sglang.close()
    assert stand().read(TOKENS) == []


def test_a_hanging_tier_costs_the_deadline(stand: MakeStand) -> None:
    sglang = stand(deadline="0.05s")
    written = sglang.write(TOKENS)
    storage = sglang.storage
    healthy = storage.store
    hanging = ScriptedTier(healthy.block_bytes)
    hanging.contains = lambda keys, request=None: healthy.tiers[0].contains(keys)  # type: ignore[method-assign]
    storage.store = ObjectStore(
        [hanging], block_bytes=healthy.block_bytes, staging_bytes=1 << 24, deadline_s=0.05
    )
    assert sglang.query(TOKENS).storage_hit_count == len(TOKENS)
    assert sglang.read(TOKENS) == []
    assert storage.store.num_late == 1
    sglang.write(range(1000, 1000 + 4 * PAGE), seed=2)
    assert sglang.stored_tokens == 0
    for job in list(hanging.jobs):
        hanging.end(job)
    storage.store = healthy
    assert sglang.read(TOKENS) == written


def test_an_internal_error_is_a_miss(stand: MakeStand, caplog: pytest.LogCaptureFixture) -> None:
    sglang = stand()
    sglang.write(TOKENS)
    sglang.storage._keys = None
    assert sglang.read(TOKENS) == []
    assert sglang.storage.broken
    sglang.write(range(1000, 1000 + PAGE))
    assert sglang.stored_tokens == 0
    assert "internal error in batch_exists" in caplog.text
    assert sglang.storage.clear() is True, "a later process must not find the pages of older weights"
    sglang.close()
    assert stand().read(TOKENS) == []


def test_a_lost_server(stand: MakeStand, server: Any) -> None:
    sglang = stand(tiers=[f"{url(server)}?timeout=200ms"], deadline="0.3s")
    sglang.write(TOKENS)
    server.stop()
    began = time.monotonic()
    assert sglang.read(TOKENS) == []
    sglang.write(range(1000, 1000 + PAGE))
    assert sglang.stored_tokens == 0
    assert time.monotonic() - began < PATIENCE_S


def test_a_server_that_starts_later(stand: MakeStand, caplog: pytest.LogCaptureFixture) -> None:
    sglang = stand(tiers=[f"valkey://127.0.0.1:{valkey_server.free_port()}/team"])
    assert sglang.read(TOKENS) == []
    assert "does not answer yet" in caplog.text


def test_a_disk_that_cannot_be_used_now(stand: MakeStand, caplog: pytest.LogCaptureFixture) -> None:
    sglang = stand(tiers=["disk:/proc/kv:64MiB"])
    assert sglang.write(TOKENS)
    assert sglang.stored_tokens == 0
    assert sglang.read(TOKENS) == []
    assert "runs WITHOUT a tier" in caplog.text


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a small file system")
def test_a_full_disk(stand: MakeStand, tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=12m", "tmpfs", str(small)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a small tmpfs is not allowed here")
    try:
        sglang = stand(tiers=[f"disk:{small / 'kv'}:64MiB"], pages=400)
        tokens = range(700 * PAGE)
        written = sglang.write(tokens)
        pages_read = sglang.read(tokens)
        assert pages_read == written[: len(pages_read)]
        sglang.close()
    finally:
        subprocess.run(["umount", str(small)], check=True)


_WRITER = """
import sys
from pathlib import Path
from support.sglang_pools import PAGE, Stand, start_distributed
with start_distributed(Path(sys.argv[1]) / "rendezvous"):
    sglang = Stand(tiers=[f"disk:{sys.argv[1]}/kv:64MiB"])
    for number in range(1000):
        sglang.write(range(number * 10_000, number * 10_000 + 8 * PAGE), seed=number)
        print(number, sglang.stored_tokens, flush=True)
"""


def test_a_killed_writer_loses_no_acknowledged_page(stand: MakeStand, tmp_path: Path) -> None:
    output = tmp_path / "output"
    writer = forks().start(["-c", _WRITER, str(tmp_path)], {**os.environ}, output)
    until = time.monotonic() + HANGS_S
    try:
        while len(lines := output.read_text().splitlines() if output.exists() else []) <= 20:
            assert writer.poll() is None, lines
            assert time.monotonic() < until, lines
            time.sleep(0.001)
    finally:
        writer.kill()
    assert writer.wait() == -signal.SIGKILL
    acknowledged = [line.split() for line in lines[:20]]
    sglang = stand()
    for number, stored in acknowledged:
        assert int(stored) == 8 * PAGE
        start = int(number) * 10_000
        tokens = range(start, start + 8 * PAGE)
        pages_read = sglang.read(tokens)
        fill(sglang.host, int(number))  # like the writer, whose first free pages had the same places
        everywhere = {page_of(sglang.host, index) for index in range(0, sglang.host.size, PAGE)}
        assert len(pages_read) == 8
        assert {*pages_read} <= everywhere
