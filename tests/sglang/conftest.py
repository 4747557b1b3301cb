"""SGLang's own host pools and controllers on a CPU."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from support.sglang_pools import Stand, start_distributed


@pytest.fixture(scope="session", autouse=True)
def _distributed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A process group of one rank, which SGLang's controllers need."""
    with start_distributed(tmp_path_factory.mktemp("distributed") / "rendezvous"):
        yield


@pytest.fixture
def stand(tmp_path: Path) -> Iterator[Callable[..., Stand]]:
    """A function that makes a host pool with a controller and our storage; closes all of them at the end."""
    made: list[Stand] = []

    def make(**settings: Any) -> Stand:
        settings.setdefault("tiers", [f"disk:{tmp_path / 'kv'}:64MiB"])
        made.append(Stand(**settings))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Ignore warnings of SGLang and its libraries at import and use."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("ignore"))
