"""Login to Valkey servers: passwords and certificates."""

from __future__ import annotations

import contextlib
import math
import os
import ssl
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from kvoffload.errors import ConfigError
from kvoffload.tiers.shared.addresses import Addresses
from kvoffload.tiers.valkey.cluster_map import Address
from kvoffload.tiers.valkey.resp import Connection, Login

USERNAME, PASSWORD = "KVOFFLOAD_VALKEY_USERNAME", "KVOFFLOAD_VALKEY_PASSWORD"


def find_login(password_file: str, tls: ssl.SSLContext | None) -> Login:
    """Return the login from the environment and the password file, if any.

    Raises: `ConfigError` if the password file cannot be read.
    """
    password = os.environ.get(PASSWORD, "")
    if password_file:
        try:
            password = password_in(password_file)
        except (OSError, UnicodeDecodeError) as error:
            why = getattr(error, "strerror", None) or "it is not text"
            raise ConfigError("password_file", password_file, f"it cannot be read ({why})") from None
    return Login(os.environ.get(USERNAME, ""), password, tls)


def tls_context(ca: str, cert: str, cert_key: str) -> ssl.SSLContext:
    """Create a TLS context from these files; an empty name means no file. Raises `ConfigError`."""
    if cert_key and not cert:
        raise ConfigError("cert", None, "allowed: the file of the certificate that belongs to cert_key")
    try:
        context = ssl.create_default_context(cafile=ca or None)
    except OSError as error:
        raise ConfigError("ca", ca, str(error)) from None
    if cert:
        _load_certificate(context, cert, cert_key)
    return context


def _load_certificate(context: ssl.SSLContext, cert: str, cert_key: str) -> None:
    """Load the client's certificate and key. Raises `ConfigError` with the field of the unusable file."""
    try:
        # Errors of `load_cert_chain` do not name the file, so the certificate is read alone first.
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cert)
    except OSError as error:
        raise ConfigError("cert", cert, str(error)) from None
    try:
        context.load_cert_chain(cert, cert_key or None, _no_pass_phrase)
    except OSError as error:
        remedy = "give the key of cert" if cert_key else "give its key in cert_key"
        why = f"{error}; {remedy}" if isinstance(error, ssl.SSLError) else str(error)
        raise ConfigError("cert_key" if cert_key else "cert", cert_key or cert, why) from None


def _no_pass_phrase() -> str:
    """Callback for an encrypted key. Without it, OpenSSL would ask for a pass phrase on the terminal."""
    raise OSError("the key is encrypted; give a key without a pass phrase")


def password_in(path: str) -> str:
    """Return the password in a file, without white space around it.

    Raises `OSError`, `UnicodeDecodeError`.
    """
    return Path(path).read_text().strip()


class Connector:
    """Connects to the servers of one tier, and caches their addresses.

    So that passwords and certificates can be replaced while an engine runs, the password file, if any, is
    read again before each connection, and the certificates are read again after their files have changed.
    While a file is unreadable or empty, the last password or certificates are used.

    Args:
        password_file: empty if the password does not come from a file.
        tls_files: arguments of `tls_context`.
        silence_s: argument of `Connection`.

    Thread: any, several at a time.
    """

    def __init__(
        self,
        login: Login,
        password_file: str = "",
        silence_s: float = math.inf,
        tls_files: tuple[str, str, str] = ("", "", ""),
    ) -> None:
        self.login, self._password_file, self._silence_s = login, password_file, silence_s
        self._tls_files, self._stamps = tls_files, _stamps_of(tls_files)
        self._addresses, self._renewing = Addresses(), threading.Lock()

    def __call__(self, address: Address, deadline: float) -> Connection:
        """Connect and log in by a deadline (of `time.monotonic`). Raises the errors of `Connection`."""
        self._renew_login()
        return Connection(*address, self.login, deadline, self._addresses, self._silence_s)

    def _renew_login(self) -> None:
        # Two threads that replace the login at once could undo each other's change.
        with self._renewing:
            if self._password_file:
                with contextlib.suppress(OSError, UnicodeDecodeError):
                    password = password_in(self._password_file)
                    if password and password != self.login.password:
                        self.login = replace(self.login, password=password)
            if (stamps := _stamps_of(self._tls_files)) != self._stamps:
                with contextlib.suppress(ConfigError):
                    self.login = replace(self.login, tls=tls_context(*self._tls_files))
                    self._stamps = stamps


def _stamps_of(paths: Sequence[str]) -> list[tuple[int, ...]]:
    """Return values that change when the contents of a file change or a symbolic link is replaced."""
    stamps: list[tuple[int, ...]] = []
    for path in filter(None, paths):
        with contextlib.suppress(OSError):
            status = os.stat(path)
            stamps.append((status.st_mtime_ns, status.st_size, status.st_ino))
    return stamps
