"""Text from servers and the network, made safe for logs, errors and terminals."""

from __future__ import annotations

MOST_CHARACTERS = 200
MASK = "***"


def printable(text: object, *secrets: str) -> str:
    """Reduce a text to one line of printable ASCII, at most 200 characters, and mask `secrets` in it.

    Pass every text from a server through this function before it is logged, raised or printed. A line feed
    would forge a log line, an escape sequence would reach the terminal, and some servers echo the password.
    Idempotent.

    Args:
        text: bytes, or anything that `str` accepts.
        secrets: replaced by ``***`` before the text is cut; empty secrets are ignored.
    """
    plain = text.decode(errors="surrogateescape") if isinstance(text, bytes) else str(text)
    for secret in filter(None, secrets):
        plain = plain.replace(secret, MASK)
    shown = "".join([c if " " <= c <= "~" else ascii(c)[1:-1] for c in plain[: MOST_CHARACTERS + 1]])
    return shown if len(shown) <= MOST_CHARACTERS else f"{shown[: MOST_CHARACTERS - 3]}..."
