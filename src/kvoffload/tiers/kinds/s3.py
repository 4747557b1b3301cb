"""The kind ``s3://BUCKET/PREFIX``: a bucket of an object store that machines share."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, TypeAlias
from urllib.parse import urlsplit

import msgspec

from kvoffload.core.admission import Admission
from kvoffload.errors import ConfigError
from kvoffload.settings.paths import FilePath
from kvoffload.settings.read import Duration, SizeOrNothing
from kvoffload.tiers.s3.bucket import NO_BUCKET, Bucket, BucketError, Ledger, Prices
from kvoffload.tiers.s3.credentials import make_signer
from kvoffload.tiers.s3.protocol import s3_tier
from kvoffload.tiers.shared.addresses import is_loopback
from kvoffload.tiers.shared.certificates import certificate_refusal
from kvoffload.tiers.shared.remote_options import LOGGER, SharedTierOptions
from kvoffload.tiers.shared.remote_tier import RemoteTier
from kvoffload.tiers.spec import TierOwner, redacted

MOST_IN_AN_OBJECT = 32
"""Limit of blocks in an object. Only full objects are written, so a higher limit leaves more blocks at
the end of a path unwritten.
"""
_REFUSALS = {"301", "400", "401", "403"}
"""HTTP statuses of permanent errors."""


class _URLParser:
    allowed = (
        "s3://BUCKET/PREFIX, the prefix of letters, digits and ._- with / between; keys from "
        "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or credentials_file=FILE"
    )

    def parse(self, field: str, value: object) -> str:
        # Not . and .., because a client would resolve them.
        pattern = r"s3://[a-z0-9][a-z0-9.-]{1,62}(/(?!\.{1,2}(/|$))[\w.-]{1,64}){1,8}"
        if not re.fullmatch(pattern, str(value), re.ASCII):
            raise ConfigError(field, redacted(value), f"allowed: {self.allowed}")
        return str(value)


class _EndpointParser:
    allowed = "https://HOST:PORT or http://HOST:PORT"

    def parse(self, field: str, value: object) -> str:
        if value == "":
            return ""
        try:
            parts = urlsplit(str(value))
            wrong = (
                parts.port == 0 or "@" in parts.netloc or parts.query or parts.fragment or not parts.hostname
            )
        except ValueError:
            wrong = True
        if wrong or parts.scheme not in ("http", "https"):
            raise ConfigError(field, redacted(value), f"allowed: {self.allowed}")
        return str(value)


URL: TypeAlias = Annotated[str, _URLParser()]
Endpoint: TypeAlias = Annotated[str, _EndpointParser()]
Price: TypeAlias = Annotated[float, msgspec.Meta(ge=0)]


@dataclass(frozen=True, kw_only=True)
class S3Options(SharedTierOptions):
    """Options of a tier in a bucket of Amazon S3 or of a compatible server.

    The tier does not evict blocks: a lifecycle rule of the bucket must expire them.

    Attributes:
        url: the bucket, and the prefix of all object names. An access rule can restrict a user to the prefix.
        endpoint: URL of the server; by default Amazon's.
        region: region of the bucket.
        pack: size of an object, which must be equal on all machines. An object holds as many consecutive
            blocks of a path as fit, at most 32. If `pack` is 0, each object holds one block.
        credentials_file: a file in the format of ``~/.aws/credentials``; the section ``default`` is read. By
            default the keys come from the environment or from the machine's role.
        price_per_1000_puts, price_per_1000_gets, price_per_gb_read: prices for the cost counter. By default
            Amazon's list prices in dollars, for traffic within a region.
    """

    name = "s3"
    schemes = ("s3",)
    start_s = engine_start_s = 3.0

    url: URL
    endpoint: Endpoint = ""
    region: str = ""
    pack: SizeOrNothing = 16 << 20
    probe_timeout: Duration = 0.2
    credentials_file: FilePath = ""
    price_per_1000_puts: Price = 0.005
    price_per_1000_gets: Price = 0.0004
    price_per_gb_read: Price = 0.0

    def connect(self, owner: TierOwner, fingerprint: str, admission: Admission | None) -> RemoteTier:
        bucket, _, namespace = self.url.removeprefix("s3://").partition("/")
        prices = Prices(self.price_per_1000_puts, self.price_per_1000_gets, self.price_per_gb_read)
        ledger = Ledger(prices)
        signer = make_signer(self.url, bucket, self.region, self.endpoint, self.credentials_file)
        self.warn_if_unencrypted()
        return s3_tier(
            self.name,
            self.url.removeprefix("s3://") + (f" at {self.endpoint}" if self.endpoint else ""),
            lambda _: Bucket(signer, ledger),
            self.remote_options(owner, namespace, fingerprint),
            ledger=ledger,
            group_blocks=self.group_blocks(owner),
            admission=admission,
        )

    def refusal(self, error: BaseException) -> str | None:
        if isinstance(error, BucketError) and (error.status in _REFUSALS or error.code == NO_BUCKET):
            return str(error)
        return certificate_refusal(error, "the file of the environment variable SSL_CERT_FILE", "endpoint")

    def group_blocks(self, owner: TierOwner) -> int:
        """Return the number of blocks in an object: 1 if the owner reports no paths (`reports_paths`)."""
        if not owner.reports_paths:
            return 1
        return max(1, min(self.pack // owner.block_bytes, MOST_IN_AN_OBJECT))

    def warn_if_unencrypted(self) -> None:
        """Log a warning if blocks are sent to another machine without TLS. Blocks reveal prompts."""
        parts = urlsplit(self.endpoint)
        if parts.scheme == "http" and not is_loopback(parts.hostname or ""):
            text = "kvoffload: the tier at %s is used without TLS: prompts can be read on the network"
            LOGGER.warning(text, self.endpoint)
