"""``s3://BUCKET/PREFIX``: a bucket of an object store that machines share, through obstore."""

from __future__ import annotations

import configparser
import ipaddress
import logging
import re
from dataclasses import dataclass
from datetime import timedelta
from typing import Annotated, Any, TypeAlias
from urllib.parse import urlsplit

import msgspec

from kvoffload.core.admission import DEFAULT_ADMISSION, AdmissionName, create_admission
from kvoffload.errors import ConfigError, UnavailableError
from kvoffload.settings.read import Duration, SizeOrNothing
from kvoffload.tiers.s3.bucket import NO_BUCKET, Bucket, BucketError, Ledger, Prices
from kvoffload.tiers.s3.packed import PackedTier
from kvoffload.tiers.s3.signing import Signer
from kvoffload.tiers.shared.connection import CONNECT_S
from kvoffload.tiers.shared.tier import RemoteOptions
from kvoffload.tiers.spec import TierOptions, TierOwner, redacted

_START_S = 3.0
_REPLAY_S = 30.0
_KEYS_S = 5.0
"""In which the machine's role gives its keys."""
_COUNTED_BLOCKS = 1 << 16
"""An admission rule counts as for a cache of so many blocks: how many there are is not ours to know."""
MOST_IN_AN_OBJECT = 32
"""Blocks: more would leave too much of each path unwritten, half an object's on average."""
_TO_BE_REFUSED = {"301", "400", "401", "403"}
"""With what a server answers to a login or a request that it will never allow."""
_CREDENTIALS = {"aws_access_key_id", "aws_secret_access_key", "aws_session_token"}


class _URLParser:
    allowed = (
        "s3://BUCKET/PREFIX, the prefix of letters, digits and ._- with / between; keys from "
        "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or credentials_file=FILE"
    )

    def parse(self, field: str, value: object) -> str:
        if not re.fullmatch(r"s3://[a-z0-9][a-z0-9.-]{1,62}(/[\w.-]{1,64}){1,8}", str(value), re.ASCII):
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
class S3Options(TierOptions):
    """A bucket of Amazon S3 or of what speaks its protocol. A rule of the bucket decides what expires.

    Attributes:
        url: the bucket, and the prefix of all names: an access rule can fence it.
        endpoint: of another server than Amazon's. region: of the bucket.
        pack: about how large an object is: as many consecutive blocks of a path as fit, at most 32; 0 for an
            object for each block. The same on all machines.
        timeout: a read has ended by then, with what has arrived. probe_timeout: the same for a probe.
        identity: what the weights are called, equal on all machines; by default it is found out.
        admission: which blocks are written.
        credentials_file: a file as ``~/.aws/credentials``, of which the section ``default`` is read; by
            default keys are in the environment, or the machine's role has them.
        price_per_1000_puts, price_per_1000_gets, price_per_gb_read: for the counted cost; by default Amazon's
            list prices in dollars within a region.
    """

    name = "s3"
    schemes = ("s3",)

    url: URL
    endpoint: Endpoint = ""
    region: str = ""
    pack: SizeOrNothing = 16 << 20
    timeout: Duration = 2.0
    probe_timeout: Duration = 0.2
    identity: str = ""
    admission: AdmissionName = DEFAULT_ADMISSION
    credentials_file: str = ""
    price_per_1000_puts: Price = 0.005
    price_per_1000_gets: Price = 0.0004
    price_per_gb_read: Price = 0.0

    def open(self, owner: TierOwner) -> PackedTier:
        """Waits three seconds at most for the server. An engine starts without it, and finds it when it is
        there.
        """
        if owner.block_bytes == 0:
            raise ConfigError(
                "tier", str(self), "without data it has nothing to hold; take simulated:CAPACITY"
            )
        bucket, _, namespace = self.url.removeprefix("s3://").partition("/")
        fingerprint = owner.fingerprint + self.identity
        if owner.shared_fingerprint is not None:
            fingerprint = owner.shared_fingerprint(self.identity)
        # A replay has time, and its decisions may not depend on how fast a server answers.
        patience_s = _REPLAY_S if owner.counts_blocks else 0.0
        prices = Prices(self.price_per_1000_puts, self.price_per_1000_gets, self.price_per_gb_read)
        ledger = Ledger(prices)
        signer = self._signer(bucket)
        self._warn_if_in_the_clear()
        tier = PackedTier(
            self.name,
            self.url.removeprefix("s3://") + (f" at {self.endpoint}" if self.endpoint else ""),
            lambda _: Bucket(signer, ledger),
            RemoteOptions(
                namespace=namespace,
                timeout_s=max(self.timeout, patience_s),
                probe_timeout_s=max(self.probe_timeout, patience_s),
                write_timeout_s=patience_s or None,
                gives_up_at_once=owner.counts_blocks,
            ),
            ledger=ledger,
            group_blocks=self._group_blocks(owner),
            block_bytes=owner.block_bytes,
            fingerprint=fingerprint,
            admission=create_admission(self.admission, owner.key_bytes, _COUNTED_BLOCKS),
        )
        try:
            tier.wait_until_open(_START_S)
            if not owner.counts_blocks:
                tier.measure(_START_S)
        except UnavailableError as error:
            said = tier.last_error
            if isinstance(said, BucketError) and (said.status in _TO_BE_REFUSED or said.code == NO_BUCKET):
                tier.close()
                raise ConfigError("tier", tier.place, str(said)) from None
            if owner.go_on_without is None:
                tier.close()
                raise
            text = "kvoffload: tier %s is not there yet; it is used when it is: %s"
            logging.getLogger("kvoffload.remote").error(text, self.name, error)
        return tier

    def _group_blocks(self, owner: TierOwner) -> int:
        if not owner.tells_paths:
            return 1
        return max(1, min(self.pack // owner.block_bytes, MOST_IN_AN_OBJECT))

    def _signer(self, bucket: str) -> Signer:
        try:
            from obstore.store import S3Store
        except ImportError:
            raise ConfigError("tier", self.url, "it needs obstore: pip install 'kvoffload[s3]'") from None
        config: dict[str, Any] = {"region": self.region} if self.region else {}
        if self.endpoint:
            config |= {"endpoint": self.endpoint, "virtual_hosted_style_request": False}
        client: Any = {
            "allow_http": self.endpoint.startswith("http://"),
            "connect_timeout": timedelta(seconds=CONNECT_S),
            "timeout": timedelta(seconds=_KEYS_S),
        }

        def make_store(keys: dict[str, str]) -> Any:
            given: Any = config | keys
            return S3Store(bucket, config=given, client_options=client, retry_config={"max_retries": 0})

        if not self.credentials_file:
            return Signer(make_store)
        return Signer(make_store, self._credentials, self.credentials_file)

    def _credentials(self) -> dict[str, str]:
        """The keys in the file. Raises `ConfigError`."""
        parser = configparser.ConfigParser(interpolation=None)
        try:
            with open(self.credentials_file) as file:
                parser.read_file(file)
            found = {name: value for name, value in parser["default"].items() if name in _CREDENTIALS}
            if "aws_access_key_id" not in found or "aws_secret_access_key" not in found:
                raise KeyError
        except OSError as error:
            why = f"it cannot be read ({error.strerror})"
            raise ConfigError("credentials_file", self.credentials_file, why) from None
        except (configparser.Error, UnicodeDecodeError, KeyError):
            # What the parser says quotes the line.
            why = "it has no section [default] with aws_access_key_id and aws_secret_access_key"
            raise ConfigError("credentials_file", self.credentials_file, why) from None
        return found

    def _warn_if_in_the_clear(self) -> None:
        parts = urlsplit(self.endpoint)
        try:
            is_near = ipaddress.ip_address(parts.hostname or "").is_loopback
        except ValueError:
            is_near = parts.hostname == "localhost"
        if parts.scheme == "http" and not is_near:
            text = (
                "kvoffload: the tier at %s is used without TLS: who is on the way can read prompts out of it"
            )
            logging.getLogger("kvoffload.remote").warning(text, self.endpoint)
