"""Refusals of a server's certificate. Knows no protocol."""

from __future__ import annotations

from ssl import SSLCertVerificationError

from kvoffload.tiers.shared.printable import printable

CertificateError = SSLCertVerificationError
"""Error of a connection whose certificate cannot be verified. Contains only text of OpenSSL."""

_OTHER_NAMES = {62, 64}
"""OpenSSL's codes for a certificate without the host name, or without the address, of the connection."""
_OTHER_TIMES = {9, 10}
"""OpenSSL's codes for a certificate that is not valid yet, or no longer."""


def certificate_refusal(error: BaseException, ca: str, url: str) -> str | None:
    """Return why the server's certificate is refused, with the remedy; None for any other error.

    Args:
        ca: name of the setting with the CA's certificate.
        url: name of the option with the server's host name.
    """
    if not isinstance(error, CertificateError):
        return None
    remedy = f"give the certificate of its CA in {ca}"
    if error.verify_code in _OTHER_NAMES:
        remedy = f"give a name of the certificate in {url}"
    elif error.verify_code in _OTHER_TIMES:
        remedy = "renew the certificate, or correct the clock"
    return f"certificate verify failed: {printable(error.verify_message)}; {remedy}"
