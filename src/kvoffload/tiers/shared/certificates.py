"""Error messages for a refused TLS certificate, of the server or of this client. Knows no protocol."""

from __future__ import annotations

import re
from ssl import SSLCertVerificationError, SSLError

from kvoffload.tiers.shared.printable import printable

CertificateError = SSLCertVerificationError
"""Error of a connection whose certificate cannot be verified. The message contains no text of the server."""

_OTHER_NAMES = {62, 64}
"""OpenSSL's error codes: the certificate contains another host name, or another IP address."""
_OTHER_TIMES = {9, 10}
"""OpenSSL's error codes: the certificate is not valid yet, or has expired."""
_ALERT = re.compile(
    r"ALERT_(HANDSHAKE_FAILURE|UNKNOWN_CA|ACCESS_DENIED|(?:BAD|NO|UNSUPPORTED)_CERTIFICATE|CERTIFICATE_\w+)$"
)
"""OpenSSL's names of the alerts with which a server refuses the client's certificate. With TLS 1.2, a server
that requires a certificate and gets none reports a handshake failure."""


def certificate_refusal(error: BaseException, ca: str, url: str) -> str | None:
    """Return why this client refused the server's certificate, with the remedy; None for any other `error`.

    Args:
        ca: name of the setting with the CA's certificate, for the text.
        url: name of the option with the server's host name, for the text.
    """
    if not isinstance(error, CertificateError):
        return None
    remedy = f"give the certificate of its CA in {ca}"
    if error.verify_code in _OTHER_NAMES:
        remedy = f"give a name of the certificate in {url}"
    elif error.verify_code in _OTHER_TIMES:
        remedy = "renew the certificate, or correct the clock"
    return f"certificate verify failed: {printable(error.verify_message)}; {remedy}"


def client_certificate_refusal(error: BaseException, cert: str) -> str | None:
    """Return why the server refused this client's certificate, with the remedy; None for any other `error`.

    Args:
        cert: names of the settings for the client's certificate, for the text.
    """
    alert = _ALERT.search(error.reason or "") if isinstance(error, SSLError) else None
    if alert is None:
        return None
    reason = alert[1].lower().replace("_", " ")
    return f"the server refuses TLS: {reason}; give a client's certificate that the server accepts in {cert}"
