"""Credentials of a bucket: keys from a file, or else from environment variables or the machine's role.

obstore finds the keys that do not come from a file.
"""

from __future__ import annotations

import configparser
from datetime import timedelta
from typing import Any

from kvoffload.errors import ConfigError
from kvoffload.tiers.s3.signing import Signer
from kvoffload.tiers.shared.connection import CONNECT_S

ROLE_KEYS_S = 5.0
"""Longest wait for the keys of the machine's role, in seconds."""
_CREDENTIALS = {"aws_access_key_id", "aws_secret_access_key", "aws_session_token"}


def make_signer(url: str, bucket: str, region: str, endpoint: str, credentials_file: str) -> Signer:
    """Return a signer for a bucket. If `credentials_file` is empty, obstore finds the keys.

    Raises: `ConfigError` if obstore is not installed, or the file has no keys.
    """
    try:
        from obstore.store import S3Store
    except ImportError:
        raise ConfigError("tier", url, "it needs obstore: pip install 'kvoffload[s3]'") from None
    config: dict[str, Any] = {"region": region} if region else {}
    if endpoint:
        config |= {"endpoint": endpoint, "virtual_hosted_style_request": False}
    client: Any = {
        "allow_http": endpoint.startswith("http://"),
        "connect_timeout": timedelta(seconds=CONNECT_S),
        "timeout": timedelta(seconds=ROLE_KEYS_S),
    }

    def make_store(keys: dict[str, str]) -> Any:
        full_config: Any = config | keys
        return S3Store(bucket, config=full_config, client_options=client, retry_config={"max_retries": 0})

    if not credentials_file:
        return Signer(make_store)
    return Signer(make_store, lambda: keys_in(credentials_file), credentials_file)


def keys_in(path: str) -> dict[str, str]:
    """Read the keys from a file in the format of ``~/.aws/credentials``.

    Raises: `ConfigError` if the file cannot be read or has no keys.
    """
    parser = configparser.ConfigParser(interpolation=None)
    try:
        with open(path) as file:
            parser.read_file(file)
        keys = {name: value for name, value in parser["default"].items() if name in _CREDENTIALS}
        if "aws_access_key_id" not in keys or "aws_secret_access_key" not in keys:
            raise KeyError
    except OSError as error:
        why = f"it cannot be read ({error.strerror})"
        raise ConfigError("credentials_file", path, why) from None
    except (configparser.Error, UnicodeDecodeError, KeyError):
        # Not the parser's message, which quotes the line. The line may contain a secret.
        why = "it has no section [default] with aws_access_key_id and aws_secret_access_key"
        raise ConfigError("credentials_file", path, why) from None
    return keys
