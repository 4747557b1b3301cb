"""`kvoffload tier`: output for people, and exit codes for scripts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvoffload.tiers.shared.speeds import Speeds
from kvoffload.tiers.valkey.login import PASSWORD, USERNAME
from support.fault_proxy import FaultProxy
from support.run_cli import Done, kvoffload
from support.valkey_client import Client
from support.valkey_server import Cluster, Server, clustered, running, self_signed

WELL = ("--maxmemory", "200mb", "--maxmemory-policy", "volatile-lru", "--maxmemory-samples", "64")


@pytest.fixture(scope="module")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(tmp_path_factory.mktemp("valkey"), *WELL) as server:
        yield server


@pytest.fixture
def server(shared_server: Server) -> Server:
    shared_server.execute("FLUSHALL")
    return shared_server


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with clustered(tmp_path_factory.mktemp("cluster"), *WELL) as cluster:
        yield cluster


def asked(command: str, url: str, *options: str, code: int = 0) -> Any:
    done = kvoffload("tier", command, url, *options, "--format", "json")
    assert done.returncode == code, done.stderr
    return json.loads(done.stdout)


def one_line(done: Done) -> str:
    """Return the one-line error of a command that failed by a user's mistake."""
    assert done.returncode == 2, done.stdout
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    return line


def test_a_healthy_server(server: Server) -> None:
    (report,) = asked("ping", f"{server.url}/ns?ttl=1h")
    assert report["warnings"] == report["refused"] == []
    assert report["version"].startswith("Valkey 9")
    assert report["eviction_policy"] == "volatile-lru"
    assert report["persistence"] == "no"
    assert report["limit_bytes"] == 200 << 20
    assert 0 < report["round_trip_s"] < 5
    done = kvoffload("tier", "ping", f"{server.url}/ns?ttl=1h")
    assert (done.returncode, done.stderr) == (0, "")
    for text in (
        f"127.0.0.1:{server.port}",
        "Valkey 9",
        "of 200 MiB",
        "volatile-lru",
        "The server can be a tier.",
    ):
        assert text in done.stdout
    assert server.names() == [], "no keys remain in the server"


def test_unsuitable_settings_give_warnings(tmp_path: Path) -> None:
    options = ("--maxmemory-policy", "noeviction", "--appendonly", "yes", "--save", "60 1")
    with running(tmp_path, *options) as server:
        (report,) = asked("ping", f"{server.url}/ns")
        text = "\n".join(report["warnings"])
        for warning in (
            "maxmemory is 0",
            "noeviction",
            'save "60 1": after a crash',
            "appendonly yes: after a crash",
        ):
            assert warning in text
        server.execute("CONFIG", "SET", "maxmemory-policy", "volatile-lfu")
        (report,) = asked("ping", f"{server.url}/ns")
        warning = str(report["warnings"])
        assert "maxmemory-policy is volatile-lfu, which evicts only keys with a time to live" in warning
        assert "maxmemory-samples is 5: " in warning
        server.execute("CONFIG", "SET", "maxmemory-policy", "allkeys-random")
        (report,) = asked("ping", f"{server.url}/ns")
        assert "maxmemory-policy is allkeys-random: it evicts halves of blocks" in str(report["warnings"])
        assert "warning  maxmemory is 0" in kvoffload("tier", "ping", f"{server.url}/ns").stdout


def test_a_replica_is_no_tier(tmp_path: Path, server: Server) -> None:
    with running(tmp_path, "--replicaof", f"127.0.0.1 {server.port}") as replica:
        (report,) = asked("ping", f"{replica.url}/ns", code=1)
        assert "it is a replica: it accepts no writes" in report["warnings"]
        assert any(line.startswith("SET: READONLY") for line in report["refused"])


def test_a_node_of_a_cluster_is_no_single_server(cluster: Cluster) -> None:
    for node in cluster.servers:
        for command in ("ping", "inspect"):
            line = one_line(kvoffload("tier", command, f"{node.url}/ns"))
            assert "it is a node of a cluster: use valkey+cluster:// (CROSSSLOT" in line


def test_missing_rights_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running(tmp_path) as server:
        rights = "on >hunter2 ~kvo1:team-a:* +get +set +exists +del"
        server.execute("ACL", "SETUSER", "a", *rights.split())
        monkeypatch.setenv(USERNAME, "a")
        monkeypatch.setenv(PASSWORD, "hunter2")
        (report,) = asked("ping", f"{server.url}/team-a")
        assert report["refused"] == []
        assert report["persistence"] == "not known"
        assert "INFO" in str(report["warnings"])
        (report,) = asked("ping", f"{server.url}/team-b", code=1)
        assert [line.split(":")[0] for line in report["refused"]] == ["SET", "GET", "EXISTS", "DEL"]
        done = kvoffload("tier", "ping", f"{server.url}/team-b")
        assert "REFUSED  SET: NOPERM" in done.stdout
        assert "The server cannot be a tier." in done.stdout
        done = kvoffload("tier", "inspect", f"{server.url}/team-a")
        assert done.returncode == 1
        assert "REFUSED  NOPERM" in done.stdout
        server.execute("ACL", "SETUSER", "a", "-del")
        assert asked("ping", f"{server.url}/team-a", code=1)[0]["refused"][0].startswith("DEL: NOPERM")


@pytest.mark.slow
def test_an_unusable_server_is_a_one_line_error(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    for command in ("ping", "inspect", "bench"):
        line = one_line(kvoffload("tier", command, "valkey://127.0.0.1:1/ns"))
        assert "'127.0.0.1:1/ns' cannot be used now: ConnectionRefusedError" in line
        line = one_line(kvoffload("tier", command, "valkey://me:hunter2@h/ns"))
        assert "valkey://***@h/ns" in line
        assert "hunter2" not in line
        line = one_line(kvoffload("tier", command, "disk:/data/kv:5GiB"))
        assert "kvoffload disk inspect" in line
        monkeypatch.setenv(PASSWORD, "hunter2")
        line = one_line(kvoffload("tier", command, f"{server.url}/ns"))
        assert "AUTH" in line or "WRONGPASS" in line
        assert "hunter2" not in line
        monkeypatch.delenv(PASSWORD)
        line = one_line(kvoffload("tier", command, f"valkey+cluster://127.0.0.1:{server.port}/ns"))
        assert "cluster support disabled" in line
    pem, key = self_signed(tmp_path)
    with FaultProxy(server.port, tls=(pem, key)) as proxy:
        url = f"valkeys://127.0.0.1:{proxy.port}/ns"
        assert "certificate verify failed" in one_line(kvoffload("tier", "ping", url))
        assert asked("ping", f"{url}?ttl=1h&ca={pem}")[0]["refused"] == []
    line = one_line(kvoffload("tier", "bench", f"{server.url}/ns", "--prefill-tokens-per-s", "5000"))
    assert "prefill-tokens-per-s" in line
    line = one_line(kvoffload("tier", "bench", f"{server.url}/ns", "--block-bytes", "64KiB,0"))
    assert "block-bytes: '0' is invalid; allowed: bytes, or a size" in line


def test_inspect_counts_the_blocks_of_a_namespace(server: Server) -> None:
    url = f"{server.url}/ns"
    texts = [json.dumps({"vllm": "0.32.0", "model.hf_config.rope_theta": theta}) for theta in (1e4, 1e6)]
    client, other = Client(server, ttl=3600.0, fingerprint=texts[0]), Client(server, fingerprint=texts[1])
    Client(server, namespace="elsewhere").write(1, 2, 3)
    client.write(1, 2)
    client.tier.clear()
    assert client.tier.drain(60.0)
    client.write(*range(1, 31))
    other.write(1, 2, 3)
    report = asked("inspect", url)
    assert report["looked_at"] == report["num_names"] == 6 + 2 * (2 + 30 + 3 + 3), "three epochs"
    first, second = report["producers"]
    assert first["producer"] == client.tier.peer.keyspace.producer.hex()
    assert (first["in_epoch"], first["older"], first["block_bytes"]) == (30, 2, 24 * 1024)
    assert (second["in_epoch"], second["older"]) == (3, 0)
    done = kvoffload("tier", "inspect", url)
    assert [first["about"], second["about"]] == texts
    for text in ("ns: 82 of 82 keys read", "30, 24 KiB each", client.tier.peer.keyspace.producer.hex()):
        assert text in done.stdout
    assert "rope_theta: 10000 / 1000000" in done.stdout
    server.execute(
        "SET", f"kvo1:ns:{other.tier.peer.keyspace.producer.hex()}:about", "\x1b[2Jevil [bold]" * 10_000
    )
    done = kvoffload("tier", "inspect", url)
    assert "evil" in done.stdout
    assert "\x1b" not in done.stdout
    assert kvoffload("tier", "inspect", f"{server.url}/nothing").returncode == 0


def test_inspect_is_bounded(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    server.execute("EVAL", "for i = 1, 5000 do redis.call('SET', 'kvo1:ns:x:0:' .. i, '') end", "0")
    monkeypatch.setattr("kvoffload.tiers.valkey.inspection.MOST_NAMES", 2000)
    report = asked("inspect", f"{server.url}/ns")
    assert (report["looked_at"], report["num_names"]) == (2000, 5000)
    assert 1000 < report["producers"][0]["older"] < 4000


@pytest.mark.slow
def test_a_cluster_node_by_node(cluster: Cluster) -> None:
    reports = asked("ping", f"{cluster.url}/ns?ttl=1h")
    assert {report["address"] for report in reports} == {
        f"127.0.0.1:{master.port}" for master in cluster.masters
    }
    for report in reports:
        assert report["refused"] == []
        assert report["num_replicas"] == 1
        assert "cluster-require-full-coverage is yes" in str(report["warnings"])
    client = Client(cluster)
    client.write(*range(1, 61))
    report = asked("inspect", f"{cluster.url}/ns")
    (producer,) = report["producers"]
    assert producer["in_epoch"] == 60
    assert report["num_names"] == 2 * 60 + 256 + len(cluster.masters), "each node has the producer's text"
    assert producer["about"] == "model"
    client.tier.close()
    cluster.servers[3].stop()
    cluster.servers[0].stop()
    try:
        one_dead = kvoffload("tier", "ping", f"{cluster.url}/ns")
        assert "cannot be used now" in one_line(one_dead)
    finally:
        cluster.servers[0].start()
        cluster.servers[3].start()
        cluster.wait(cluster.is_ready)


def test_bench_of_a_server_with_little_memory(tmp_path: Path) -> None:
    """A round writes 64 blocks of 512 KiB."""
    little = ("--maxmemory", "16mb", "--maxmemory-policy", "allkeys-lru")
    with running(tmp_path, *little) as server:
        line = one_line(
            kvoffload("tier", "bench", f"{server.url}/ns", "--rounds", "1", "--block-bytes", "512KiB")
        )
    assert line.startswith(f"kvoffload: tier: '{server.url}/ns' cannot be used now: ")
    assert line.endswith(
        "; if the server has evicted them, give it more memory, or give a smaller --block-bytes"
    )


@pytest.mark.parametrize("kind", ["server", "cluster"])
def test_bench(kind: str, request: pytest.FixtureRequest) -> None:
    place = request.getfixturevalue(kind)
    url = f"{place.url}/bench"
    report = asked("bench", url, "--rounds", "2", "--block-bytes", "4KiB,64KiB")
    assert [speed["block_bytes"] for speed in report["speeds"]] == [4096, 65536]
    assert all(speed["num_wrong"] == 0 and speed["get_bytes_per_s"] > 0 for speed in report["speeds"])
    assert report["verdict"] is None
    model = ("--bytes-per-token", "4KiB", "--rounds", "1", "--prefill-tokens-per-s")
    verdict = asked("bench", url, *model, "0.001")["verdict"]
    assert verdict["worth_it"]
    done = kvoffload("tier", "bench", url, *model, "1e15")
    assert "Not worth it: the tier reads " in done.stdout
    assert "Every block was verified." in done.stdout


def test_the_verdict_is_arithmetic() -> None:
    """A probe of 1 ms, a latency of 1 ms and 1 GB/s: against 0.5 GB/s the break-even is 2 MB."""
    speeds = Speeds(
        block_bytes=1_000_000,
        num_blocks=1,
        probe_s=0.001,
        first_s=0.002,
        put_bytes_per_s=1e9,
        get_bytes_per_s=1e9,
        num_wrong=0,
    )
    assert speeds.seconds_for(1e6) == pytest.approx(0.003)
    assert speeds.worth_from_bytes(0.5e9) == pytest.approx(2e6)
    assert speeds.worth_from_bytes(1e9) is None
    assert speeds.worth_from_bytes(2e9) is None
