"""Setups that a plan tries: all combinations of store modes, policies and admission rules."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

from kvoffload.core.plans import ON_COMPUTE, ON_DEVICE_EVICTION
from kvoffload.plan.rows import SERVER_POLICY, Setup
from kvoffload.sweep.grid import Grid, incompatible

STORES = (ON_COMPUTE, ON_DEVICE_EVICTION)


@dataclass(frozen=True)
class Setups:
    """Setups to try: all combinations of the fields' values. Raises `ConfigError` for an invalid value."""

    stores: tuple[str, ...] = STORES
    policies: tuple[str, ...] = ("lru", "hazard")
    admissions: tuple[str, ...] = ("all", "tinylfu")
    ssd_policies: tuple[str, ...] = ("lru",)
    ssd_admissions: tuple[str, ...] = ("all", "reuse:2")
    server_admissions: tuple[str, ...] = ("all", "reuse:2")
    ssd_budget_admissions: tuple[str, ...] = ("reuse:2", "worth")

    def __post_init__(self) -> None:
        for policies, admissions in (
            (self.policies, self.admissions),
            (self.ssd_policies, self.ssd_admissions),
            (self.ssd_policies, self.ssd_budget_admissions),
            ((SERVER_POLICY,), self.server_admissions),
        ):
            Grid(policies, admissions, ("1",), ("1",), self.stores)

    @property
    def of_ram(self) -> list[Setup]:
        combinations = itertools.product(self.stores, self.policies, self.admissions)
        return [Setup(store, policy, rule) for store, policy, rule in combinations
                if incompatible(policy, rule) is None]  # fmt: skip

    @property
    def with_ssds(self) -> list[Setup]:
        combinations = itertools.product(self.of_ram, self.ssd_policies, self.ssd_admissions)
        return [replace(ram, ssd_policy=policy, ssd_admission=rule) for ram, policy, rule in combinations
                if incompatible(policy, rule) is None]  # fmt: skip

    def within_rating(self, setup: Setup, rated: float) -> list[Setup]:
        """List setups that replace `setup`, with a write budget of `rated` drive writes per day."""
        return [replace(setup, ssd_admission=rule, ssd_write_budget=rated)
                for rule in self.ssd_budget_admissions
                if incompatible(setup.ssd_policy, rule) is None]  # fmt: skip

    @property
    def with_servers(self) -> list[Setup]:
        combinations = itertools.product(self.of_ram, self.server_admissions)
        return [replace(ram, server_admission=rule) for ram, rule in combinations
                if incompatible(SERVER_POLICY, rule) is None]  # fmt: skip
