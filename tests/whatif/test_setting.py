"""What-if settings: forms, labels and mistakes."""

from __future__ import annotations

import pytest

from kvoffload.errors import CombinedConfigError, ConfigError
from kvoffload.whatif.setting import WhatIf, WhatIfParser

HAZARD_AND_DOUBLE = (WhatIf(policy="hazard"), WhatIf(capacity=2.0))


@pytest.mark.parametrize(
    "given",
    [
        [{"policy": "hazard"}, {"capacity": 2.0}],
        [{"policy": "hazard"}, {"capacity": "2x"}],
        '[{"policy": "hazard"}, {"capacity": 2}]',
        "policy=hazard;capacity=2",
        ["policy=hazard", "capacity=2x"],
        HAZARD_AND_DOUBLE,
    ],
)
def test_a_list_has_several_forms(given: object) -> None:
    assert WhatIfParser().parse("what_if", given) == HAZARD_AND_DOUBLE


def test_parameters_of_a_policy_stay_with_the_policy() -> None:
    (setting,) = WhatIfParser().parse("what_if", "policy=s3fifo,small_share=0.2,capacity=0.5")
    assert setting == WhatIf(policy="s3fifo,small_share=0.2", capacity=0.5)
    assert setting.label == "policy=s3fifo,small_share=0.2,capacity=0.5"


def test_labels() -> None:
    assert WhatIf().label == "current"
    assert WhatIf(policy="arc", admission="reuse:2").label == "policy=arc,admission=reuse:2"


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ([{"policy": "hazardd"}], ["what_if[0].policy", "'hazardd'", "did you mean hazard?"]),
        ([{"capacity": 2}, {"capacity": -1}], ["what_if[1].capacity", "-1", "more than 0"]),
        ([{"capacity": 0}], ["what_if[0].capacity", "0", "more than 0"]),
        ([{"admission": "reuse:x"}], ["what_if[0].admission", "reuse:x"]),
        ([{"polcy": "arc"}], ["what_if[0].polcy", "did you mean policy?"]),
        ([{"capacity": 1}], ["what_if[0]", "it changes nothing"]),
        ([{"policy": "arc"}, {"policy": "arc"}], ["what_if[1]", "policy=arc", "given twice"]),
        ("capacity=2;capacity=2.0000001", ["what_if[1]", "capacity=2", "given twice"]),
        ("capacity=1e9", ["what_if[0].capacity", "1e9", "more than 0"]),
        ([{"capacity": 1e9}], ["what_if[0].capacity", "1000000000.0", "up to 100"]),
        ("capacity=100.5x", ["what_if[0].capacity", "100.5", "up to 100"]),
        ("policy=arc,policy=lru", ["what_if[0]", "policy is given twice"]),
        ("hazard", ["what_if[0]", "'hazard'", "policy=hazard"]),
        ("[{", ["what_if", "it is not JSON"]),
        ([], ["what_if", "1 to 8 settings"]),
        (7, ["what_if", "7", "1 to 8 settings"]),
        ([7], ["what_if[0]", "7", "1 to 8 settings"]),
        ([{"capacity": n} for n in range(2, 11)], ["what_if", "1 to 8 settings"]),
    ],
)
def test_an_invalid_setting_is_named(given: object, named: list[str]) -> None:
    with pytest.raises(ConfigError) as raised:
        WhatIfParser().parse("what_if", given)
    assert all(text in str(raised.value) for text in named), raised.value


def test_all_mistakes_are_reported_together() -> None:
    with pytest.raises(CombinedConfigError) as raised:
        WhatIfParser().parse("what_if", [{"policy": "x"}, {"capacity": 0}])
    assert [problem.field for problem in raised.value.problems] == [
        "what_if[0].policy",
        "what_if[1].capacity",
    ]
