"""The conformance suite of admission rules, as a class that pytest runs.

    from kvoffload.testing.admission_conformance import AdmissionConformance

    class TestMine(AdmissionConformance):
        def make(self):
            return MyRule(window=1000)

The suite does not check that a rule admits the *right* blocks. To check this, use `kvoffload replay`, or
override `AdmissionConformance.twin`.
"""

from __future__ import annotations

import pickle
from typing import ClassVar

import numpy as np

from kvoffload.core.admission import Admission
from kvoffload.structures.keys import Keys
from kvoffload.testing.audit import state_of
from kvoffload.testing.scripts import Step, key_of, random_script
from kvoffload.testing.shrink_limit import run_machine
from kvoffload.testing.state_machine import manager_machine

_KEY_BYTES = 20
_SEEDS = range(4)


class AdmissionConformance:
    """Base class of a rule's tests: override `make`, and pytest runs every check on the rule.

    Attributes:
        max_examples: number of Hypothesis examples.
        remembers_keys: number of new keys after which the state of the rule must stop growing.
    """

    max_examples: ClassVar[int] = 20
    remembers_keys: ClassVar[int] = 4_000

    def make(self) -> Admission:
        """Create a rule for keys of 20 bytes."""
        raise AssertionError(f"{type(self).__name__} does not implement `make`")

    def twin(self) -> Admission | None:
        """Create another rule that must admit the same blocks, or return None."""
        return None

    def test_life_cycle(self) -> None:
        """Check every invariant of a manager with this rule, for two policies."""
        for policy in ("lru", "arc"):
            machine = manager_machine(
                policy,
                self.make,
                capacity_blocks=4,
                key_bytes=_KEY_BYTES,
                max_examples=self.max_examples,
                step_count=30,
            )
            run_machine(machine)

    def test_it_answers_for_each_block_and_admits_a_length(self) -> None:
        """Check that `leading` counts the keys before the first key that `admit` refuses.

        Also checks that `admit` returns one bool per key, and that neither method changes the rule.
        """
        for seed in _SEEDS:
            rule = self.make()
            for _, _, numbers in random_script(seed, num_steps=100):
                keys = _keys(numbers)
                rule.count(keys)
                before = state_of(rule)
                allowed = rule.admit(keys)
                assert state_of(rule) == before, f"seed {seed}: admit() changed the rule"
                assert allowed.dtype == np.bool_, f"admit returns {allowed!r}, not bools"
                assert allowed.shape == (len(keys),), f"admit returns {allowed!r} for {len(keys)} keys"
                refused = np.flatnonzero(~allowed)
                expected = int(refused[0]) if len(refused) else len(keys)
                leading = rule.leading(keys)
                assert leading == expected, f"leading returns {leading}, admit {allowed}"
                assert state_of(rule) == before, f"seed {seed}: leading() changed the rule"
            assert rule.leading(_keys([])) == 0, "leading() of no blocks is not 0"

    def test_it_admits_the_same_again(self) -> None:
        """Check that two new instances of the rule give equal answers to equal calls."""
        for seed in _SEEDS:
            script = random_script(seed, num_steps=250)
            first, second = (_answers(self.make(), script) for _ in range(2))
            assert first == second, f"seed {seed}: another instance gave other answers"

    def test_reset_forgets_everything(self) -> None:
        """Check that after `reset` a rule answers like a new one."""
        for seed in _SEEDS:
            rule = self.make()
            _answers(rule, random_script(seed, num_steps=200))
            rule.reset()
            script = random_script(seed + 1000, num_steps=200)
            assert _answers(rule, script) == _answers(self.make(), script), (
                f"seed {seed}: reset() kept counts"
            )

    def test_it_admits_as_its_twin(self) -> None:
        """Compare the rule with its `twin`, if there is one, on random scripts."""
        if self.twin() is None:
            return
        for seed in range(20):
            script = random_script(seed, num_steps=250)
            twin = self.twin()
            assert twin is not None
            assert _answers(self.make(), script) == _answers(twin, script), f"seed {seed}: the twin differs"

    def test_memory_is_bounded(self) -> None:
        """Check that the rule stops growing during a long scan of fresh keys."""
        rule, sizes = self.make(), []
        for stretch in range(3):
            for number in range(0, self.remembers_keys, 4):
                first = stretch * self.remembers_keys + number
                keys = [(first + i).to_bytes(_KEY_BYTES, "big") for i in range(4)]
                for _ in range(2):
                    rule.count(Keys.pack(keys, _KEY_BYTES))
            sizes.append(len(pickle.dumps(state_of(rule))))
        assert sizes[-1] <= 1.5 * sizes[0] + 256, (
            f"the state grows without limit: {sizes} bytes after 1, 2, 3 times {self.remembers_keys} new "
            "keys; if it has a larger bound, set `remembers_keys`"
        )


def _keys(numbers: list[int]) -> Keys:
    return Keys.pack([key_of(number, _KEY_BYTES) for number in numbers], _KEY_BYTES)


def _answers(rule: Admission, script: list[Step]) -> list[list[bool]]:
    """Return the answers of `admit` before the script and after each of its steps."""
    answers = [rule.admit(_keys([*range(16)])).tolist()]
    for action, _, numbers in script:
        keys = _keys(numbers)
        if action == "finish":
            rule.refresh(keys)
        else:
            rule.count(keys)
        answers.append(rule.admit(keys).tolist())
    return answers
