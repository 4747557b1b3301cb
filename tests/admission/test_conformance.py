"""The conformance suite of admission rules, run on the built-in rules and on planted faults."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvoffload.admission.reuse import ReuseAdmission
from kvoffload.core.admission import Admission
from kvoffload.structures.jit import BoolArray
from kvoffload.structures.keys import Keys
from kvoffload.testing.admission_conformance import AdmissionConformance
from support.naive.reuse import NaiveReuse


class TestReuse(AdmissionConformance):
    max_examples = 4

    def make(self) -> Admission:
        return ReuseAdmission(20, 2, 9)

    def twin(self) -> Admission:
        return NaiveReuse(2, 9)


class TestNaiveReuse(AdmissionConformance):
    max_examples = 2

    def make(self) -> Admission:
        return NaiveReuse(3, 40)


class Faulty(NaiveReuse):
    def __init__(self) -> None:
        super().__init__(2, 9)


class CountsInAdmit(Faulty):
    def admit(self, keys: Keys) -> BoolArray:
        allowed = super().admit(keys)
        self.count(keys)
        return allowed


class AdmitsAll(Faulty):
    def admit(self, keys: Keys) -> BoolArray:
        return super().admit(keys).all(keepdims=True)


class LeadsFromTheEnd(Faulty):
    def leading(self, keys: Keys) -> int:
        return int(np.count_nonzero(self.admit(keys)[::-1]))


class NeverForgets(Faulty):
    def count(self, keys: Keys) -> None:
        for key in keys:
            self.counts[key] = self.counts.get(key, 0) + 1


class RemembersAcrossReset(Faulty):
    def reset(self) -> None:
        pass


class SharesItsCounts(Faulty):
    seen: dict[bytes, int] = {}  # noqa: RUF012  (that is the fault)

    def __init__(self) -> None:
        super().__init__()
        self.counts = self.seen

    def count(self, keys: Keys) -> None:
        super().count(keys)
        self.seen.update(self.counts)
        self.counts = self.seen


class IsOffByOne(Faulty):
    def admit(self, keys: Keys) -> BoolArray:
        return np.array([self.counts.get(key, 0) > self.store_threshold for key in keys], np.bool_)


FAULTS: list[tuple[type[Any], str, str]] = [
    (CountsInAdmit, "test_it_answers_for_each_block_and_admits_a_length", "admit\\(\\) changed the rule"),
    (AdmitsAll, "test_it_answers_for_each_block_and_admits_a_length", "admit returns"),
    (LeadsFromTheEnd, "test_it_answers_for_each_block_and_admits_a_length", "leading returns"),
    (NeverForgets, "test_memory_is_bounded", "grows without limit"),
    (RemembersAcrossReset, "test_reset_forgets_everything", "kept counts"),
    (SharesItsCounts, "test_it_admits_the_same_again", "gave other answers"),
    (IsOffByOne, "test_it_admits_as_its_twin", "the twin differs"),
]


@pytest.mark.parametrize(("fault", "check", "message"), FAULTS, ids=[f[0].__name__ for f in FAULTS])
def test_a_planted_fault_is_detected(fault: type[Any], check: str, message: str) -> None:
    class Suite(AdmissionConformance):
        def make(self) -> Admission:
            made: Admission = fault()
            return made

        def twin(self) -> Admission:
            return NaiveReuse(2, 9)

    with pytest.raises(AssertionError, match=message):
        getattr(Suite(), check)()
