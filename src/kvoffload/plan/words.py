"""What a plan says in words: what to buy, what that is worth, how sure it is, and what else there was.

Owns the sentences. Knows a choice and rows; measures nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvoffload.plan.clock import InTime
from kvoffload.plan.evidence import Evidence
from kvoffload.plan.fleet import Fleet, Purchase
from kvoffload.plan.rows import Measured, PlanRow, age
from kvoffload.plan.targets import ABOUT, ENOUGH, Choice, Difference, Outcome, Target, beside
from kvoffload.simulate.report import TimedOutcome, TimedTierReport
from kvoffload.sweep.bootstrap import CORRELATED, Interval
from kvoffload.sweep.verdict import Certainty, certainty_of
from kvoffload.text import duration, interval, percent, size

_A_DAY_S = 86_400
PLACEHOLDERS = "SSDs and servers where yours are"
"""What is to be replaced in the line for vLLM."""
_NO_MORE = 0.0005
"""A share that is printed as 0.0 %."""


def answer(
    choice: Choice,
    rows: Sequence[Measured],
    difference: Difference,
    evidence: Evidence,
    fleet: Fleet,
    target: Target,
    in_time: InTime | None = None,
) -> list[str]:
    """The sentences, the most important first."""
    currency, row = fleet.prices.currency, choice.chosen.row
    said = [_begin(choice, currency, target)]
    if row.ram_modules:
        said += [_use(row, fleet), *_ssds(row), *_servers(row)]
    if in_time is not None:
        said += _waits(in_time, row)
    other = beside(rows, choice.chosen)
    if other is not None:
        said.append(_sharing(choice.chosen, other, difference, currency))
    if choice.smaller is not None and not _is_said(choice.smaller, other):
        said.append(_smaller(choice.chosen, choice.smaller, difference, currency))
    said += _larger(choice, other, difference, currency)
    said += _more_ssds(row, rows)
    said += _cannot_be(choice, rows, currency)
    if not target.is_given and choice.chosen is not choice.most:
        said.append(f"No target was given: {percent(ENOUGH, 0)} of the most that can be added is enough.")
    most = percent(evidence.ceiling)
    if evidence.whole is not None:
        most += f", and none of engines that share nothing more than {percent(evidence.ceiling_apart)}"
    said.append(f"No cache saves more than {most}: the rest is asked for the first time.")
    return said


def searched_on(one_in: int, rows: int) -> list[str]:
    """What is said where a search looked at a part of the sessions."""
    if one_in == 1:
        return []
    return [
        f"Searched on one of {one_in:,} sessions; the {rows:,} rows of this answer were replayed with all of "
        "them."
    ]


def goods(row: PlanRow) -> str:
    """What is bought: ``512 GiB of RAM and 3.84 TB of SSD``, or ``... and 2 cache servers of 460 GiB``."""
    parts = [f"{size(row.ram_bytes)} of RAM"] if row.ram_bytes else []
    parts += [f"{size(row.ssd_bytes, 1000)} of SSD"] if row.ssd_bytes else []
    parts += [servers(row)] if row.servers else []
    return " and ".join(parts) or "nothing"


def servers(row: PlanRow) -> str:
    """Those of a row that has some: ``2 cache servers of 460 GiB``."""
    one = size(row.server_bytes // row.servers)
    return f"{row.servers} cache servers of {one}" if row.servers > 1 else f"a cache server of {one}"


def _several(count: int, what: str) -> str:
    return f"{count} {what}" + "s" * (count != 1)


def money(price: float, currency: str) -> str:
    """``3,100 USD``."""
    return f"{price:,.0f} {currency}"


def certainty(lead: Interval | None) -> str:
    """What chance leaves of a lead: ``sure``, ``likely: ...``, ``not sure: -0.1 to +1.6 points``."""
    found = certainty_of(lead and lead.low, lead and lead.correlation)
    if found is Certainty.SURE:
        return "sure"
    if found is Certainty.LIKELY:
        return "likely: the traffic changes slowly"
    if lead is None:
        return "too few requests to be sure"
    return f"not sure: {100 * lead.low:+.1f} to {100 * lead.high:+.1f} points"


def _saving(row: PlanRow) -> str:
    """``saves 31.4 % of the prefill (28.0 to 34.2 %): 12.0 % by the GPUs alone, 19.4 % by RAM``."""
    parts = [f"{percent(row.by_gpus)} by the GPUs' own memory", f"{percent(row.by_ram)} by RAM"]
    parts += [f"{percent(row.by_ssds)} by SSDs"] if row.ssd_drives else []
    parts += [f"{percent(row.by_servers)} by servers"] if row.servers else []
    chance = interval(row.saved_low, row.saved_high)
    said = f"saves {percent(row.saved)} of the prefill{chance and f' ({chance})'}: {', '.join(parts)}"
    if row.gpus_worth is not None:
        said += f". What is bought does the work of {row.gpus_worth:,.2f} GPUs"
    return said


def _begin(choice: Choice, currency: str, target: Target) -> str:
    row = choice.chosen.row
    within = "" if target.budget is None else f" for {money(target.budget, currency)}"
    if target.ttft_p90_s is not None:
        return _begin_by_wait(choice, currency, target.ttft_p90_s, within)
    if choice.outcome is Outcome.NOT_REACHED:
        assert choice.needed is not None
        most = f"Buying {goods(row)} for {money(row.price, currency)} {_saving(row)}."
        return f"Nothing that can be had{within} saves {percent(choice.needed)} of the prefill. {most}"
    if choice.outcome is Outcome.BUY_NOTHING:
        why = "nothing that can be had can be told apart from that"
        if choice.needed is not None:
            why = f"{percent(choice.needed)} were asked for"
        return f"Buy nothing: the GPUs' own memory saves {percent(row.saved)} of the prefill, and {why}."
    return f"Buy {goods(row)} for {money(row.price, currency)}: it {_saving(row)}."


def _begin_by_wait(choice: Choice, currency: str, asked_s: float, within: str) -> str:
    row = choice.chosen.row
    assert row.ttft_p90_s is not None
    asked, found = duration(asked_s), duration(row.ttft_p90_s)
    bought = f"{goods(row)} for {money(row.price, currency)}" if row.ram_modules else "the GPUs' own memory"
    if choice.outcome is Outcome.NOT_REACHED:
        return (
            f"Nothing that can be had{within} and was timed brings p90 of time to first token down to "
            f"{asked}. What comes nearest is {found}, with {bought}: it {_saving(row)}."
        )
    if choice.outcome is Outcome.BUY_NOTHING:
        return (
            f"Buy nothing: with {bought} p90 of time to first token is {found}, and {asked} were asked for."
        )
    return (
        f"Buy {bought}: p90 of time to first token is {found}, and {asked} were asked for. It {_saving(row)}."
    )


def _use(row: PlanRow, fleet: Fleet) -> str:
    where = f"each of {fleet.hosts} hosts" if fleet.hosts > 1 else "the host"
    each = f"{_several(row.ram_modules, 'module')} of {fleet.prices.ram.module}"
    each += f", {_several(row.ssd_drives, 'drive')} of {fleet.prices.ssd.drive}" if row.ssd_drives else ""
    shared = ""
    if row.servers:
        shared = f", and {servers(row)} that all {fleet.replicas} engines share"
    return f"Use {row.setup}. That is {each} in {where}{shared}."


def _servers(row: PlanRow) -> list[str]:
    if row.server_write_bytes_per_s is None or row.server_read_bytes_per_s is None:
        return []
    written = row.busy * row.server_write_bytes_per_s / 1e9
    read = row.busy * row.server_read_bytes_per_s / 1e9
    return [f"In the busiest minute {written:.2f} GB/s are written to servers, and {read:.2f} GB/s are read."]


def _ssds(row: PlanRow) -> list[str]:
    if row.drive_writes_a_day is None or row.ssd_write_bytes_per_s is None:
        return []
    busiest = row.ssd_write_bytes_per_s * row.busy / 1e9
    return [
        f"SSDs take {row.drive_writes_a_day:.2f} drive writes a day and last {age(row.ssd_life_years)}; "
        f"in the busiest minute {busiest:.2f} GB/s are written."
    ]


def _waits(found: InTime, row: PlanRow) -> list[str]:
    one, other = found.with_offload, found.without
    where = f", on the busiest of {found.engines:,} engines" if found.engines > 1 else ""
    waiting, loading = shares(one)
    # A request stays in the queue while SSDs are read for it.
    queue = "in the queue or for SSDs" if row.ssd_drives else "in the queue"
    parts = f"Of the mean, {waiting} is waiting {queue} and {loading} loading"
    if not row.ram_modules:
        numbers = ", ".join(f"{name} {duration(value)}" for name, value in ttft(one))
        said = [f"Time to first token: {numbers}{where}. {parts}."]
    else:
        pairs = zip(ttft(one), ttft(other), strict=True)
        numbers = ", ".join(f"{name} {duration(old)} -> {duration(new)}" for (name, new), (_, old) in pairs)
        said = [f"Time to first token: {numbers}{where}."]
        said.append(f"{parts}; without what is bought, {shares(other)[0]} is waiting.")
        said += _hits(found, row)
        every = "RAM and SSDs keep up with their" if row.ssd_drives else "RAM keeps up with its"
        behind = [_cannot_keep_up(tier) for tier in one.tiers if not tier.keeps_up]
        said += behind or [f"{every} writes."]
    return [*said, *_break_even(found, row)]


def _hits(found: InTime, row: PlanRow) -> list[str]:
    """Where the clock has fewer hits than the count, and why."""
    run, where = found.with_offload, " on that engine" if found.engines > 1 else ""
    if row.saved - run.hit_ratio < _NO_MORE:
        return []
    why = ["the last block of each prompt is computed, and requests come side by side"]
    why += ["caches begin empty in a recording that is so much shorter"] if found.load > 1 else []
    why += [f"{number:,} {what}" for number, what in (
        (run.not_worth, "blocks are left where they are, because to compute them is faster"),
        (run.no_room, "blocks find no room in RAM on their way from SSDs"),
        (run.lost, "blocks leave the GPUs before they can be stored"),
    ) if number]  # fmt: skip
    return [f"In time {percent(run.hit_ratio)} is saved{where}, not {percent(row.saved)}: {'; '.join(why)}."]


def ttft(run: TimedOutcome) -> list[tuple[str, float]]:
    """Names and seconds of what is said of time to first token, the most telling first."""
    found = run.ttft_s
    return [("p90", found.p90), ("mean", found.mean), ("p50", found.p50), ("p99", found.p99)]


def shares(run: TimedOutcome) -> tuple[str, str]:
    """Of the mean time to first token: waiting in the queue, and loading."""
    mean = run.ttft_s.mean or 1.0
    return percent(run.waiting_s.mean / mean, 0), percent(run.loading_s.mean / mean, 0)


def _cannot_keep_up(tier: TimedTierReport) -> str:
    ram = tier.name == "ram"
    who, does = ("RAM", "does") if ram else ("The SSDs", "do")
    why = "when the last request ended, more than half a minute of writes was left"
    if tier.not_offered and not ram:
        why = f"{tier.not_offered:,} blocks left RAM before they could be written"
    return f"{who} {does} not keep up with what is to be written there: {why}."


def _break_even(found: InTime, row: PlanRow) -> list[str]:
    places = [("RAM", found.ram_break_even_tokens)]
    places += [("SSDs", found.ssd_break_even_tokens)] if row.ssd_drives else []
    said = []
    for place, tokens in places:
        if tokens is None:
            said.append(f"Loading from {place} never beats computing on this machine.")
        elif round(tokens) > 1:
            said.append(f"Below {round(tokens):,} tokens loading from {place} loses to computing.")
        else:
            said.append(f"Loading from {place} beats computing at any length.")
    return said


def _smaller(chosen: Measured, smaller: Measured, difference: Difference, currency: str) -> str:
    less = chosen.row.saved - smaller.row.saved
    lead = difference(chosen, smaller)
    return f"{_offer(smaller.row, currency)}, {100 * less:.1f} points less ({certainty(lead)})."


def _is_said(one: Measured, other: Measured | None) -> bool:
    return other is not None and one.row.purchase == other.row.purchase


def _sharing(chosen: Measured, other: Measured, difference: Difference, currency: str) -> str:
    """What servers bring against what about the same money buys without, or would bring."""
    points = 100 * (other.row.saved - chosen.row.saved)
    lead = difference(other, chosen) if points > 0 else difference(chosen, other)
    which = "Without servers" if chosen.row.servers else "With servers"
    if other.row.price > ABOUT * chosen.row.price:
        which = f"The cheapest {which.lower()}"
    more = f"{abs(points):.1f} points {'more' if points > 0 else 'less'}"
    return f"{which}: {_offer(other.row, currency)}, {more} ({certainty(lead)})."


def _larger(choice: Choice, other: Measured | None, difference: Difference, currency: str) -> list[str]:
    """What more money brings; `other` is said already."""
    larger, chosen = choice.larger, choice.chosen
    if larger is None:
        return ["Nothing else that can be had saves more."]
    found = []
    if not _is_said(larger, other):
        lead = difference(larger, chosen)
        more = larger.row.saved - chosen.row.saved
        found.append(f"{_offer(larger.row, currency)}, {100 * more:.1f} points more ({certainty(lead)}).")
    if choice.most is not larger:
        most = choice.most.row
        found.append(
            f"The most that can be had is {percent(most.saved)}, with {goods(most)} for "
            f"{money(most.price, currency)}."
        )
    return found


def _more_ssds(row: PlanRow, rows: Sequence[Measured]) -> list[str]:
    """Whether SSDs would add to this RAM, whatever they cost and take."""
    more = [one.row for one in rows
            if (one.row.ram_modules, one.row.servers) == (row.ram_modules, row.servers)
            and one.row.ssd_drives > row.ssd_drives]  # fmt: skip
    if not more or max(one.saved for one in more) - row.saved >= _NO_MORE:
        return []
    return [f"{'More SSDs bring' if row.ssd_drives else 'An SSD brings'} nothing."]


def _cannot_be(choice: Choice, rows: Sequence[Measured], currency: str) -> list[str]:
    """The best row that cannot be, if it saves more than all that can."""
    cannot = [one.row for one in rows if not one.row.feasible]
    best = max(cannot, key=lambda row: (row.saved, -row.price), default=None)
    if best is None or best.saved < choice.most.row.saved + _NO_MORE:
        return []
    return [f"{_offer(best, currency)} with {best.setup}, and cannot be: {best.why_not}."]


def _offer(row: PlanRow, currency: str) -> str:
    """``256 GiB of RAM for 1,400 USD would save 26.0 %``."""
    if not row.ram_modules:
        return f"The GPUs' own memory saves {percent(row.saved)}"
    timed = "" if row.ttft_p90_s is None else f", with p90 {duration(row.ttft_p90_s)},"
    return f"{goods(row)} for {money(row.price, currency)}{timed} would save {percent(row.saved)}"


def cannot_tell(
    evidence: Evidence,
    fleet: Fleet,
    chosen: PlanRow,
    in_time: InTime | None = None,
    target: Target | None = None,
) -> list[str]:
    """What an answer from this recording leaves open, in sentences."""
    said = list[str]()
    if not evidence.duration_s:
        said.append(
            "All requests come at one time: nothing is known of bytes per second, so neither SSDs nor "
            "servers can be judged, and none is recommended."
        )
    elif evidence.duration_s < _A_DAY_S:
        hours = evidence.duration_s / 3600
        said.append(
            f"The recording has {hours:,.1f} hours: other hours, other days and what comes back on the "
            "next day are not in it."
        )
    said += _of_waits(fleet, chosen, in_time, target)
    if evidence.busy > _A_DAY_S / 3600 and evidence.duration_s > _A_DAY_S:
        said.append("It has long gaps: the busiest minute has most of its traffic.")
    if evidence.interval(evidence.device_hits) is None:
        said.append(f"It has {evidence.requests:,} requests: too few for an interval of anything.")
    elif chosen.correlation is not None and chosen.correlation > CORRELATED:
        said.append(
            "The traffic changes slowly over it: there are few independent stretches in it, and the "
            "intervals are too narrow."
        )
    if evidence.ceiling_hits == 0:
        said.append("No request begins with blocks of an earlier one: there is nothing to save.")
    holds_all = chosen.ram_blocks + chosen.ssd_blocks >= evidence.footprint_blocks > 0
    if evidence.whole is not None and chosen.servers:
        holds_all = chosen.server_blocks >= evidence.whole.unique_blocks
    if holds_all:
        said.append(
            "What is bought holds all that the recording asks for: it is never full, and what it would "
            "still have later cannot be seen."
        )
    slots = fleet.prices.ram.slots
    if fleet.blocks(fleet.ram_bytes(Purchase(slots, 0))) < evidence.footprint_blocks:
        said.append(f"A host takes {slots} modules of RAM: what more of them would save was not looked at.")
    if len(evidence.traces) < fleet.replicas:
        idle = fleet.replicas - len(evidence.traces)
        said.append(f"{idle:,} of {fleet.replicas:,} replicas get no request.")
    if fleet.scale != 1:
        said.append(
            f"The traffic is taken to be {fleet.scale:g} times the recording's, of sessions like these: "
            "a prompt that all of them share is then counted as if there were several."
        )
    return said


def _of_waits(fleet: Fleet, chosen: PlanRow, in_time: InTime | None, target: Target | None) -> list[str]:
    """What is not known of waits."""
    said = list[str]()
    if fleet.machine is None:
        said.append(
            "How long users wait for first tokens is not known: --machine tells it, with a file of "
            "`kvoffload calibrate` or a class such as h100-pcie5."
        )
    elif chosen.servers:
        said.append(
            "How long users wait with servers is not known: the clock times one engine, and no tier that "
            "several share. With `slots = 0` under [server] the answer is the best without, with its waits."
        )
    elif in_time is None:
        said.append("Without times in the recording, nothing is known of how long users wait.")
    elif in_time.with_offload.is_overloaded:
        said.append("More comes than these GPUs compute: waits say how long that lasts in the recording.")
    elif in_time.without.is_overloaded:
        said.append(
            "Without what is bought, more comes than these GPUs compute: the waits then say how long that "
            "lasts in the recording."
        )
    if target is not None and target.ttft_p90_s is not None:
        said.append(
            "A wait is of one simulated run and has no interval; few purchases are timed, each used in the "
            "way that saves most."
        )
        if fleet.may_share:
            said.append("Servers that engines share are not timed, and were not looked at.")
    return said
