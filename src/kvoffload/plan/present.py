"""A running server's present setup, as a row of a plan.

Reads the setup from the server's metrics and replays it, so that `check` can compare the replay with the
metrics.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from kvoffload.check.check import Check, Prediction, check
from kvoffload.check.served import Served
from kvoffload.core.policy import EvictionPolicy
from kvoffload.errors import ConfigError, Problems
from kvoffload.plan.evidence import Evidence
from kvoffload.plan.fleet import Fleet
from kvoffload.plan.rows import Setup
from kvoffload.plan.setups import Setups
from kvoffload.replay.config import ReplayConfig
from kvoffload.simulate.config import Timing
from kvoffload.simulate.timed import run_in_time
from kvoffload.sweep.grid import Point, policy_class
from kvoffload.sweep.measuring import Measuring
from kvoffload.sweep.task import load
from kvoffload.text import percent
from kvoffload.tiers.kinds.simulated import SimulatedOptions


class PresentRow(msgspec.Struct, frozen=True, kw_only=True):
    """The replayed set-up of the server.

    The columns are the columns of `PlanRow`; sizes are in blocks of one engine.
    """

    replicas: int
    store: str
    policy: str
    admission: str
    ssd_policy: str
    ssd_admission: str
    device_blocks: int
    ram_blocks: int
    ssd_blocks: int
    saved: float
    by_gpus: float
    by_ram: float
    by_ssds: float

    @property
    def sentence(self) -> str:
        """Sentence with the set-up and its savings."""
        setup = Setup(self.store, self.policy, self.admission, self.ssd_policy, self.ssd_admission)
        engines = "one engine" if self.replicas == 1 else f"{self.replicas} engines, each"
        parts = [f"{self.by_gpus:.1%} by GPUs", f"{self.by_ram:.1%} by RAM"]
        sizes = f"{self.device_blocks:,} blocks on the GPUs and {self.ram_blocks:,} in RAM"
        if self.ssd_blocks:
            sizes += f", {self.ssd_blocks:,} on SSDs"
            parts.append(f"{self.by_ssds:.1%} by SSDs")
        return (
            f"Compared is the present set-up: {engines} with {sizes}; {setup}. Its replay saves "
            f"{percent(self.saved)} of the prefill: {', '.join(parts)}."
        )


@dataclass(frozen=True)
class Present:
    """A server with its set-up. Sizes are in blocks of one engine; `ssd_blocks` is 0 without a tier."""

    server: Served
    setup: Setup
    device_blocks: int
    ram_blocks: int
    ssd_blocks: int

    def compared(self, fleet: Fleet, evidence: Evidence, measuring: Measuring) -> tuple[PresentRow, Check]:
        """Replay the set-up, and compare the sums of all engines with the server's metrics.

        If the fleet has a machine and the recording has times, times to first token are compared, too.

        Raises: `ConfigError` if an engine gets no requests; the errors of `Measuring.measure` and
        `run_in_time`.
        """
        if len(evidence.traces) < fleet.replicas:
            why = f"with --check allowed: at most {len(evidence.traces)}, the engines that get requests"
            raise ConfigError("replicas", fleet.replicas, why)
        configs = [self._config(trace.unique_blocks) for trace in evidence.traces]
        points = [
            Point(number, config, str(self.ram_blocks), str(self.device_blocks))
            for number, config in enumerate(configs)
        ]
        reports = [measurement.report for measurement in measuring.measure(points)]
        traces = [load(trace.source) for trace in evidence.traces]
        ttft_s = None
        if fleet.machine is not None and evidence.duration_s:
            timing, ttft_s = Timing(fleet.machine, fleet.block_bytes), 0.0
            for trace, config in zip(traces, configs, strict=True):
                timed = run_in_time(trace, timing, self.device_blocks, config)
                ttft_s += timed.ttft_s.mean * trace.requests / evidence.requests
        predicted = Prediction.of_engines(
            [
                Prediction.of_replay(report, trace, fleet.block_bytes)
                for report, trace in zip(reports, traces, strict=True)
            ],
            ttft_s,
        )
        refs, setup = evidence.block_refs, self.setup
        by_ssds = sum(tier.hit_blocks for report in reports for tier in report.tiers[1:])
        by_gpus = sum(report.device_hit_blocks for report in reports)
        saved = sum(report.prefix_hit_blocks for report in reports)
        row = PresentRow(
            replicas=fleet.replicas,
            store=setup.store,
            policy=setup.policy,
            admission=setup.admission,
            ssd_policy=setup.ssd_policy,
            ssd_admission=setup.ssd_admission,
            device_blocks=self.device_blocks,
            ram_blocks=self.ram_blocks,
            ssd_blocks=self.ssd_blocks,
            saved=saved / refs,
            by_gpus=by_gpus / refs,
            by_ram=(saved - by_gpus - by_ssds) / refs,
            by_ssds=by_ssds / refs,
        )
        return row, check(self.server, predicted)

    def _config(self, unique_blocks: int) -> ReplayConfig:
        setup = self.setup
        tiers: tuple[SimulatedOptions, ...] = ()
        if self.ssd_blocks:
            capacity = str(min(self.ssd_blocks, unique_blocks))
            tiers = (
                SimulatedOptions(capacity=capacity, policy=setup.ssd_policy, admission=setup.ssd_admission),
            )
        return ReplayConfig(
            self.ram_blocks, setup.policy, setup.admission, self.device_blocks, setup.store, tiers
        )


def present_of(server: Served, fleet: Fleet, setups: Setups, block_tokens: int) -> Present:
    """Find the set-up of a server among the set-ups that a plan can have.

    The server's metrics state the number of engines, the sizes, and the policy of RAM. They do not state the
    store mode, the admission rules and the policy of SSDs, so `setups` must have a single value of each.

    Raises: `ConfigError` with all problems if a plan cannot have this set-up.
    """
    problems, engines = Problems("plan"), max(1, server.engines)
    ram = server.capacity_blocks // engines
    policy = store = admission = ssd_policy = ssd_admission = ""
    for option, value in (("load", fleet.load), ("scale", fleet.scale)):
        if value != 1:
            problems.add(option, value, "with --check allowed: 1, the requests of the recording")
    if fleet.shared_ram:
        problems.add("shared-ram", True, "not with --check: metrics do not show a shared pool")
    if not ram:
        problems.add("check", "the server", "it does not report the size of its RAM")
    elif engines != fleet.replicas:
        why = f"the metrics are of {engines}; allowed: {engines}, or a file with all metrics of all engines"
        problems.add("replicas", fleet.replicas, why)
    with problems:
        device = _device_blocks(server, fleet, block_tokens)
    with problems:
        policy = _policy(server, setups.policies)
    with problems:
        store = _only("stores", setups.stores)
    with problems:
        admission = _only("admissions", setups.admissions)
    ssd = sum(server.tier_blocks.values()) // engines
    if server.tier_blocks:
        if len(server.tier_blocks) > 1 or not ssd:
            why = "a plan has at most one tier behind RAM, with a known capacity"
            problems.add("tiers of the server", ", ".join(server.tier_blocks), why)
        with problems:
            ssd_policy = _only("ssd-policies", setups.ssd_policies)
        with problems:
            ssd_admission = _only("ssd-admissions", setups.ssd_admissions)
    problems.check()
    return Present(server, Setup(store, policy, admission, ssd_policy, ssd_admission), device, ram, ssd)


def _device_blocks(server: Served, fleet: Fleet, block_tokens: int) -> int:
    """Return the number of blocks on the GPUs of an engine: the server's number or, without it, the plan's.

    Raises `ConfigError` if the numbers differ by more than one block. (vLLM reserves a block.)
    """
    tokens, planned = server.device_blocks * server.device_block_tokens, fleet.device_blocks * block_tokens
    if not tokens:
        return fleet.device_blocks
    if abs(tokens - planned) > max(block_tokens, server.device_block_tokens):
        option = "gpu-tokens" if fleet.gpu_blocks else "kv-per-gpu"
        why = f"the server's engines have {tokens:,}: with --check allowed: --gpu-tokens {tokens}"
        raise ConfigError(option, f"{planned:,} tokens", why)
    return max(1, tokens // block_tokens)


def _policy(server: Served, policies: Sequence[str]) -> str:
    """Return the server's policy. Raises `ConfigError` unless its metrics fit exactly one of `policies`."""
    if server.policies:
        matching = [policy for policy in policies if policy_class(policy).name in server.policies]
        shown = ", ".join(server.policies)
    else:
        # The server reports no state of its policy, so the policy is one without a `stats` of its own.
        matching = [policy for policy in policies if policy_class(policy).stats is EvictionPolicy.stats]
        shown = "a policy without a reported state, such as lru"
    if len(matching) != 1 or len(server.policies) > 1:
        why = f"the server has {shown}: with --check allowed: a list with this policy once"
        raise ConfigError("policies", ",".join(policies), why)
    return matching[0]


def _only(option: str, values: Sequence[str]) -> str:
    if len(values) > 1:
        why = "with --check allowed: one value, the server's, because its metrics do not show it"
        raise ConfigError(option, ",".join(values), why)
    return values[0]
