"""The tutorial's listing equals the example, and its test class runs."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from kvoffload.testing import conformance

ROOT = Path(__file__).resolve().parents[2]
TUTORIAL = (ROOT / "docs" / "write-a-policy.md").read_text()
LISTING, TEST = re.findall(r"```python\n(.*?)```", TUTORIAL, re.S)


def test_the_listing_is_the_example() -> None:
    example = (ROOT / "examples" / "my_policy.py").read_text()
    shown, meant = (ast.parse(text).body for text in (LISTING, example))
    assert [ast.dump(node) for node in shown] == [ast.dump(node) for node in meant[1:]]


def test_pytest_collects_the_test_class() -> None:
    scope: dict[str, type] = {}
    exec(TEST, scope)
    assert issubclass(scope["TestMine"], conformance.PolicyConformance)


def test_the_start_page_counts_the_checks() -> None:
    page = (ROOT / "docs" / "start-policy.md").read_text()
    checks = [name for name in vars(conformance.PolicyConformance) if name.startswith("test_")]
    assert f"\n{len(checks)} passed in " in page


def test_every_check_is_explained() -> None:
    explained = set(re.findall(r"`(test_\w+)`", TUTORIAL)) | {"test_it_is_found_and_says_its_name"}
    explained |= {"test_it_decides_the_same_elsewhere"} if "`..._elsewhere`" in TUTORIAL else set()
    assert {name for name in vars(conformance.PolicyConformance) if name.startswith("test_")} == explained
