"""Changes of the policy, as rules of a state machine."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import rule

from kvoffload.testing.state_machine import ManagerMachine


def with_policy_changes(machine: type[ManagerMachine], policies: tuple[Any, ...]) -> type[ManagerMachine]:
    """Add rules to a state machine that change the policy."""

    class Changing(machine):  # type: ignore[misc, valid-type]
        @rule(policy=st.sampled_from(policies))
        def change_policy(self, policy: Any) -> None:
            if not self.manager.advance_policy_change(0):
                self.manager.begin_policy_change(self.manager.prepare_policy_change(policy))

        @rule(num_blocks=st.integers(1, 3))
        def advance(self, num_blocks: int) -> None:
            self.manager.advance_policy_change(num_blocks)

    return Changing
