"""Options of shared tiers as users write them."""

from __future__ import annotations

import pytest

from kvoffload.tiers.kinds.s3 import S3Options
from kvoffload.tiers.kinds.valkey import ValkeyOptions
from kvoffload.tiers.spec import TierOptions, parse_tier, parse_tiers
from support.refusals import refusal

CLUSTER = "valkey+cluster://a:7201,b,[::1]:7203/team.a"


@pytest.mark.parametrize(
    ("text", "options"),
    [
        (
            "valkey://cache:6380/team.a?ttl=1d&timeout=500ms&admission=reuse:2",
            ValkeyOptions(url="valkey://cache:6380/team.a", ttl=86400.0, timeout=0.5, admission="reuse:2"),
        ),
        (f"{CLUSTER}?ttl=1d", ValkeyOptions(url=CLUSTER, ttl=86400.0)),
        (
            "valkey://cache/ns?identity=a%26b%3D100%25&password_file=/run/a%2Bb",
            ValkeyOptions(url="valkey://cache/ns", identity="a&b=100%", password_file="/run/a+b"),
        ),
        (
            "s3://bucket/team/a?endpoint=https://minio:9000&region=eu-1&pack=8MiB&admission=reuse:2",
            S3Options(
                url="s3://bucket/team/a",
                endpoint="https://minio:9000",
                region="eu-1",
                pack=8 << 20,
                admission="reuse:2",
            ),
        ),
    ],
)
def test_text_of_a_tier_is_read_and_written(text: str, options: TierOptions) -> None:
    assert parse_tier("tier", text) == options
    assert parse_tier("tier", str(options)) == options


def test_addresses_of_a_cluster_behind_a_disk() -> None:
    disk, cluster = parse_tiers("tiers", f"disk:/data/kv:5GiB+{CLUSTER}?ttl=1d")
    assert (disk.name, cluster.name) == ("disk", "valkey")
    assert cluster == ValkeyOptions(url=CLUSTER, ttl=86400.0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "valkey://me:hunter2@host/ns",
            "tier.url: 'valkey://***@host/ns' is invalid; allowed: valkey://HOST",
        ),
        ("valkey://me@host/ns", "user and password from KVOFFLOAD_VALKEY_USERNAME"),
        ("valkey://host:6379", "tier.url: 'valkey://host:6379' is invalid"),
        ("valkey://host:6379/a/b", "tier.url: "),
        ("valkey://host:6379/a:b", "tier.url: "),
        ("valkey://host:port/ns", "tier.url: "),
        ("valkey://host:0/ns", "tier.url: "),
        ("s3://bucket/..", "tier.url: "),
        ("s3://bucket/a/./b", "tier.url: "),
        ("valkey:///ns", "tier.url: "),
        ("valkey:host:6379", "a tier on a network is a URL; allowed: valkey://"),
        ("valkey://host/ns?ttl=soon", "tier.ttl: 'soon' is invalid; allowed: seconds"),
        ("valkey://host/ns?timeout=0", "tier.timeout: '0' is invalid"),
        ("valkey://host/ns?admission=some", "tier.admission: 'some' is invalid"),
        ("valkey://host/ns?capacity=5GiB", "tier.capacity: '5GiB' is invalid; there is no such option"),
        ("redis://host/ns", "allowed: s3://, valkey://, valkeys://, valkey+cluster://"),
        ("valkey://a,b/ns", "tier.url: 'valkey://a,b/ns' is invalid"),
        ("valkey+cluster://a,,b/ns", "tier.url: 'valkey+cluster://a,,b/ns' is invalid"),
        ("valkey+cluster://me:hunter2@a,b/ns", "tier.url: 'valkey+cluster://***@a,b/ns' is invalid"),
        ("s3://me:hunter2@bucket/ns", "tier.url: 's3://***@bucket/ns' is invalid; allowed: s3://BUCKET"),
        ("s3://bucket", "tier.url: 's3://bucket' is invalid"),
        ("s3://Bucket/ns", "tier.url: "),
        ("s3://bucket/a//b", "tier.url: "),
        ("s3://bucket/ns?endpoint=host:9000", "tier.endpoint: 'host:9000' is invalid"),
        ("s3://bucket/ns?endpoint=http://me:hunter2@host", "tier.endpoint: 'http://***@host' is invalid"),
        ("s3://bucket/ns?secret_access_key=hunter2", "a secret belongs in the environment or in a file"),
        ("s3://bucket/ns?pack=some", "tier.pack: 'some' is invalid"),
        ("s3://bucket/ns?price_per_1000_puts=-1", "tier.price_per_1000_puts: '-1' is invalid"),
        ("s3://bucket/ns?timeout=0", "tier.timeout: '0' is invalid"),
        ("s3://bucket/ns?capacity=5GiB", "there is no such option"),
        (
            "valkey:/me:hunter2@host/ns",
            "'valkey:***' is invalid; a tier on a network is a URL; allowed: valkey://",
        ),
        ("valkeys:me:hunter2@host/ns", "allowed: valkeys://"),
        ("disk:/a:1GiB+valkey:/me:hunter2@host/ns", "tier.capacity: '***@host/ns' is invalid"),
        ("me:hunter2@host/ns:", "allowed: disk:PATH:CAPACITY"),
    ],
)
def test_invalid_text_is_refused_without_secrets(text: str, message: str) -> None:
    with refusal() as refused:
        parse_tier("tier", text)
    assert message in str(refused.value)
    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize(
    "tiers",
    [
        {"url": "valkey://me:hunter2@host/ns"},
        {"type": "valkey", "password": "hunter2"},
        [["valkey://me:hunter2@host/ns"]],
        [{"type": "disk", "path": ["valkey://me:hunter2@host/ns", ""], "capacity": "1GiB"}],
    ],
)
def test_invalid_mappings_and_lists_are_refused_without_secrets(tiers: object) -> None:
    with refusal() as refused:
        parse_tiers("tiers", tiers)
    assert "***" in str(refused.value)
    assert "hunter2" not in str(refused.value)
