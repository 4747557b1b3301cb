"""Sentences about the questions that a plan leaves open. Knows findings, but measures nothing."""

from __future__ import annotations

from kvoffload.plan.findings import Findings
from kvoffload.plan.fleet import Purchase
from kvoffload.simulate.report import OVERLOADED
from kvoffload.sweep.bootstrap import CORRELATED

_A_DAY_S = 86_400


def cannot_tell(findings: Findings) -> list[str]:
    """List the questions that a plan from this recording leaves open."""
    evidence = findings.evidence
    sentences = [warning[0].upper() + warning[1:] for warning in evidence.warnings]
    if not evidence.duration_s:
        sentences.append(
            "All requests arrive at one time, so bytes per second are unknown: neither SSDs nor servers can"
            " be checked, and none is recommended."
        )
    elif evidence.duration_s < _A_DAY_S:
        hours = evidence.duration_s / 3600
        sentences.append(
            f"The recording covers {hours:,.1f} hours: other hours, other days and sessions that return on"
            " the next day are missing."
        )
    sentences += _open_waits(findings)
    if evidence.busy > _A_DAY_S / 3600 and evidence.duration_s > _A_DAY_S:
        sentences.append("It has long gaps: most of its traffic is in the busiest minute.")
    if evidence.interval(evidence.device_hits) is None:
        sentences.append(f"It has {evidence.requests:,} requests: too few for any interval.")
    elif findings.row.correlation is not None and findings.row.correlation > CORRELATED:
        sentences.append(
            "The traffic changes slowly: the recording has few independent stretches, and the intervals are "
            "too narrow."
        )
    if evidence.ceiling_hits == 0:
        sentences.append("No request begins with blocks of an earlier request: nothing can be saved.")
    return sentences + _open_sizes(findings)


def _open_sizes(findings: Findings) -> list[str]:
    evidence, fleet, row = findings.evidence, findings.fleet, findings.row
    sentences = list[str]()
    holds_all = row.ram_blocks + row.ssd_blocks >= evidence.footprint_blocks > 0
    if evidence.whole is not None and row.shared_ram:
        holds_all = row.ram_blocks * fleet.engines_of_host >= evidence.whole.unique_blocks
    if evidence.whole is not None and row.servers:
        holds_all = row.server_blocks >= evidence.whole.unique_blocks
    if holds_all:
        sentences.append(
            "The purchase holds all blocks of the recording and is never full: a longer recording would show "
            "later hits."
        )
    slots = fleet.prices.ram.slots
    if fleet.blocks(fleet.ram_bytes(Purchase(slots, 0))) < evidence.footprint_blocks:
        sentences.append(f"A host takes {slots} modules of RAM: savings of more modules were not measured.")
    if len(evidence.traces) < fleet.replicas:
        idle = fleet.replicas - len(evidence.traces)
        sentences.append(f"{idle:,} of {fleet.replicas:,} replicas get no request.")
    if fleet.scale != 1:
        sentences.append(
            f"The traffic is assumed to be {fleet.scale:g} times the recording's, with sessions like these: "
            "a prompt that all sessions share then counts as several prompts."
        )
    return sentences


def _open_waits(findings: Findings) -> list[str]:
    """List the questions about waits that the plan leaves open."""
    fleet, in_time, target = findings.fleet, findings.in_time, findings.target
    sentences = list[str]()
    if fleet.machine is None:
        sentences.append(
            "Times to first token are unknown: give --machine, a file from `kvoffload calibrate` or a class "
            "such as h100-pcie5."
        )
    elif findings.row.shared_ram and fleet.hosts > 1:
        sentences.append(
            "Waits with a pool of RAM in each of several hosts are unknown. `kvoffload simulate` with "
            f"--instances {fleet.engines_of_host} --shared-ram times the engines of one host."
        )
    elif in_time is None:
        sentences.append("The recording has no times, so waits are unknown.")
    elif in_time.with_offload.is_overloaded:
        sentences.append(OVERLOADED)
    elif in_time.without.is_overloaded:
        sentences.append(f"Without the purchase: {OVERLOADED[0].lower()}{OVERLOADED[1:]}")
    if target.ttft_p90_s is not None:
        sentences.append(
            "A wait comes from one simulated run and has no interval; few purchases are timed, each with the "
            "setup that saves most."
        )
        if fleet.may_share:
            sentences.append(
                "With a target in seconds no servers are searched: each purchase would be timed on all"
                " engines."
            )
        if fleet.shared_ram:
            sentences.append(
                "With a target in seconds no RAM pools are searched: each purchase would be timed on all"
                " engines."
            )
    return sentences
