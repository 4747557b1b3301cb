"""A refusal: an option that is wrong and stays wrong until the user changes it. An outage is no refusal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from kvoffload.errors import ConfigError, UnavailableError


@contextmanager
def refusal(match: str | None = None) -> Iterator[pytest.ExceptionInfo[ConfigError]]:
    """Expect a `ConfigError` that is no `UnavailableError`, whose message matches `match` (None: any).

    ``pytest.raises(ConfigError)`` also accepts an `UnavailableError`, with which an engine goes on without
    the tier.
    """
    with pytest.raises(ConfigError, match=match) as error:
        yield error
    assert not isinstance(error.value, UnavailableError), f"an outage, not a refusal: {error.value}"
