"""Names and meanings of metrics."""

from __future__ import annotations

import pytest

from kvoffload.integrations.vllm.scheduler_side import hints
from kvoffload.metrics.families import (
    FAMILIES,
    KV_HINTS,
    LIBRARY_PREFIX,
    TIER_FAMILIES,
    VLLM_PREFIX,
    Family,
)


def test_every_family_has_a_unique_name_and_a_meaning() -> None:
    names = [family.name for family in FAMILIES]
    assert len(set(names)) == len(names)
    assert all(family.meaning.endswith(".") for family in FAMILIES)
    assert all(family.labels == ("tier",) and family.name.startswith("tier_") for family in TIER_FAMILIES)
    assert all(len(family.labels) == 1 for family in FAMILIES if family.values)


@pytest.mark.parametrize("prefix", [VLLM_PREFIX, LIBRARY_PREFIX])
def test_a_series_is_named_as_prometheus_names_it(prefix: str) -> None:
    assert Family("hits", True, "Hits.").series_name(prefix) == f"{prefix}hits_total"
    assert Family("ready", False, "Ready.").series_name(prefix) == f"{prefix}ready"


def test_the_help_text_explains_each_value_of_a_label() -> None:
    family = Family("refused", True, "Refused.", ("reason",), {"a": "first", "b": "second"})
    assert family.documentation == "Refused (a: first; b: second)."
    assert Family("refused", True, "Refused.").documentation == "Refused."


def test_each_counted_action_of_hints_has_a_meaning() -> None:
    actions = {hints.RETAIN, hints.DEMOTE, hints.PREFETCH, hints.END_SESSION, hints.UNKNOWN, hints.INVALID}
    assert actions == set(KV_HINTS)
