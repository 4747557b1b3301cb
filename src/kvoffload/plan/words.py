"""Sentences of a plan: the recommended purchase, its savings and their certainty, and the alternatives.

Owns the sentences. Knows findings, but measures nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from kvoffload.core.plans import ON_COMPUTE, ON_DEVICE_EVICTION
from kvoffload.plan.clock import InTime
from kvoffload.plan.endurance import Endurance
from kvoffload.plan.evidence import Evidence
from kvoffload.plan.findings import Findings
from kvoffload.plan.fleet import Fleet
from kvoffload.plan.payback import LIFE_DAYS, NO_MORE, gpus_saved, payback_of, saves_less_in_time
from kvoffload.plan.rows import Measured, PlanRow, age
from kvoffload.plan.targets import ABOUT, ENOUGH, Outcome, beside, other_ram
from kvoffload.simulate.report import TimedOutcome, TimedTierReport, break_even_sentence
from kvoffload.sweep import monotone
from kvoffload.sweep.bootstrap import Interval
from kvoffload.sweep.table import YARDSTICK
from kvoffload.sweep.verdict import Certainty, certainty_of
from kvoffload.text import counted, duration, interval, outside_blocks, percent, size

PLACEHOLDERS = "replace paths and addresses by yours"
"""Heading above the command-line flag for vLLM. The flag has placeholders for paths and addresses."""
_STORES = {
    ON_COMPUTE: "RAM takes each block when it is computed",
    ON_DEVICE_EVICTION: "RAM takes the blocks that the GPUs drop",
}
_CERTAINTIES = {
    "(sure)": "(sure: the 95% interval of the difference is above 0)",
    "(likely: the traffic changes slowly)": "(likely: the 95% interval of the difference is above 0, but too "
    "narrow, because the traffic changes slowly)",
}
"""Mapping: certainty -> text that replaces the first occurrence of this certainty in the answer."""


class Section(msgspec.Struct, frozen=True):
    """Sentences of the answer under a title. The title of the recommendation is empty."""

    title: str
    sentences: list[str]


def answer(findings: Findings) -> list[Section]:
    """Write the answer, the most important section and sentence first.

    Terms are explained at their first use. Sections without sentences are left out.
    """
    fleet, row = findings.fleet, findings.row
    recommendation = [*_overload(findings), _recommendation(findings)]
    if row.ram_modules:
        recommendation += [*_payback(findings), _use(row, fleet), *_ssds(findings), *_servers(row)]
    sections = [
        Section("", recommendation),
        Section("Waits", _waits(findings.in_time, row) if findings.in_time is not None else []),
        Section("Other purchases", _other_purchases(findings)),
        Section("Limits", _limits(findings)),
    ]
    explained = _explained(section.sentences for section in sections)
    pairs = zip(sections, explained, strict=True)
    return [Section(section.title, sentences) for section, sentences in pairs if sentences]


def _explained(groups: Iterable[list[str]]) -> Iterator[list[str]]:
    """Yield the groups of sentences, with each certainty explained at its first occurrence."""
    unexplained = dict(_CERTAINTIES)
    for sentences in groups:
        shown = list[str]()
        for sentence in sentences:
            for term in [term for term in unexplained if term in sentence]:
                sentence = sentence.replace(term, unexplained.pop(term), 1)
            shown.append(sentence)
        yield shown


def _other_purchases(findings: Findings) -> list[str]:
    choice, row = findings.choice, findings.row
    sentences = list[str]()
    rival = beside(findings.rows, choice.chosen)
    if rival is not None:
        sentences.append(_sharing(findings, rival))
    sentences += _pooling(findings)
    if choice.smaller is not None and not _same_purchase(choice.smaller, rival):
        sentences.append(_smaller(findings, choice.smaller))
    sentences += _larger(findings, rival)
    sentences += _lru(findings)
    sentences += _more_ssds(row, findings.rows)
    sentences += _best_infeasible(findings)
    sentences += _within_rating(findings)
    if not findings.target.is_given and choice.chosen is not choice.most:
        sentences.append(f"No target was given: {percent(ENOUGH, 0)} of the largest possible gain is enough.")
    return sentences


def _limits(findings: Findings) -> list[str]:
    sentences = [_ceiling(findings.evidence), *outside_blocks(findings.evidence.share_outside_blocks)]
    sentences += monotone.less_with_more(
        _by_ram(measured.row) for measured in (*findings.rows, *findings.sampled)
    )
    if findings.one_in > 1:
        rows = len(findings.rows) - 1
        sentences.append(
            f"Searched on one of {findings.one_in:,} sessions; the {rows:,} rows of this answer were replayed"
            " with all sessions."
        )
    return sentences


def _by_ram(row: PlanRow) -> monotone.Measured:
    """Convert a row for `monotone.less_with_more`, which compares rows that differ in the amount of RAM."""
    name = str(row.setup)
    name += f", {counted(row.ssd_drives, 'drive')} in a host" if row.ssd_drives else ""
    name += f", {counted(row.servers, 'server')}" if row.servers else ""
    name += f", on one of {row.one_in:,} sessions" if row.one_in > 1 else ""
    return monotone.Measured(name, name, row.ram_bytes, size(row.ram_bytes), row.saved)


def _ceiling(evidence: Evidence) -> str:
    most = f"{percent(evidence.ceiling)} (the ceiling)"
    if evidence.whole is not None:
        most += f", and no cache of a single engine more than {percent(evidence.ceiling_apart)}"
    return f"No cache saves more than {most}: the other blocks are requested for the first time."


def goods(row: PlanRow) -> str:
    """Describe a purchase: ``512 GiB of RAM and 3.84 TB of SSD``, ``... and 2 cache servers of 460 GiB``."""
    parts = [f"{size(row.ram_bytes)} of RAM"] if row.ram_bytes else []
    parts += [f"{size(row.ssd_bytes, 1000)} of SSD"] if row.ssd_bytes else []
    parts += [servers(row)] if row.servers else []
    return " and ".join(parts) or "nothing"


def servers(row: PlanRow) -> str:
    """Describe the servers of a row with servers: ``2 cache servers of 460 GiB``."""
    memory = size(row.server_bytes // row.servers)
    return f"{row.servers} cache servers of {memory}" if row.servers > 1 else f"a cache server of {memory}"


def money(price: float, currency: str) -> str:
    """Format a price: ``3,100 USD``."""
    return f"{price:,.0f} {currency}"


def certainty(lead: Interval | None) -> str:
    """Describe how certain it is that one row saves more than another: ``sure``, ``not sure: ...``."""
    level = certainty_of(lead and lead.low, lead and lead.correlation)
    if level is Certainty.SURE:
        return "sure"
    if level is Certainty.LIKELY:
        return "likely: the traffic changes slowly"
    if lead is None:
        return "too few requests to be sure"
    return f"not sure: {100 * lead.low:+.1f} to {100 * lead.high:+.1f} points"


def _saving(row: PlanRow, timed: InTime | None) -> str:
    """Describe savings: ``saves 31.4% of the prefill (28.0% to 34.2%): 12.0% by ..., 19.4% by RAM``.

    If the timed replay of all engines saves less than the untimed replay, the savings of the timed replay
    come first and determine the number of GPUs.
    """
    places = [f"{percent(row.by_gpus)} by the GPUs' own memory", f"{percent(row.by_ram)} by RAM"]
    places += [f"{percent(row.by_ssds)} by SSDs"] if row.ssd_drives else []
    places += [f"{percent(row.by_servers)} by servers"] if row.servers else []
    chance = interval(row.saved_low, row.saved_high)
    counted = f"{percent(row.saved)} of the prefill{chance and f' ({chance})'}"
    if timed is not None and saves_less_in_time(row, timed):
        counted = f"{percent(timed.with_offload.hit_ratio)} of the prefill in time, {counted} without a clock"
    text = f"saves {counted}: {', '.join(places)}"
    if (gpus := gpus_saved(row, timed)) is not None:
        text += f". The purchase does the work of {gpus:,.2f} GPUs"
    return text


def _payback(findings: Findings) -> list[str]:
    """Compare the price of the purchase with the price of the GPU-hours that it saves."""
    payback, currency = payback_of(findings), findings.currency
    if payback is None:
        return []
    if payback.days is None:
        return ["It replaces no GPU: it is worth its price only for shorter waits."]
    hour = f"{findings.fleet.prices.gpu_hour:g} {currency} a GPU-hour"
    a_year = f"{money(payback.saved_a_year, currency)} a year"
    if payback.days > LIFE_DAYS:
        return [f"At {hour} that is {a_year}: less than the price within {LIFE_DAYS // 365} years, so the "
                "purchase is worth its price only for shorter waits."]  # fmt: skip
    return [f"At {hour} that is {a_year}: the purchase pays back in {_days(payback.days)}."]


def _days(days: float) -> str:
    """Format a time to pay back: ``12 days``, ``7 months``, ``2.1 years``."""
    if days < 60:
        return counted(math.ceil(days), "day")
    return counted(math.ceil(12 * days / 365), "month") if days < 730 else f"{days / 365:.1f} years"


def _overload(findings: Findings) -> list[str]:
    """Report that the GPUs are overloaded, and how many more GPUs would serve the requests."""
    timed = findings.in_time
    if timed is None or not timed.without.is_overloaded or not findings.evidence.duration_s:
        return []
    arrival_s = findings.evidence.duration_s / timed.load

    def needed(run: TimedOutcome) -> float:
        return run.seconds * run.device_busy_share / arrival_s

    without, with_purchase = needed(timed.without), needed(timed.with_offload)
    if without <= 1:
        return []
    where = ", if all engines were as busy as the busiest" if timed.is_one_of_several else ""
    missing = math.ceil(findings.fleet.gpus * (without - 1))
    text = (
        f"The GPUs are overloaded: serving the requests takes {without:.2f} times as long as their arrival. "
        f"About {counted(missing, 'more GPU')} would serve them without a purchase{where}."
    )
    if findings.row.ram_modules:
        text += f" With the purchase below serving takes {with_purchase:.2f} times as long."
    return [text]


def _recommendation(findings: Findings) -> str:
    choice, row, target, currency = findings.choice, findings.row, findings.target, findings.currency
    within = "" if target.budget is None else f" for {money(target.budget, currency)}"
    if target.ttft_p90_s is not None:
        return _recommendation_by_wait(findings, target.ttft_p90_s, within)
    if choice.outcome is Outcome.NOT_REACHED:
        assert choice.needed is not None
        most = f"Buying {goods(row)} for {money(row.price, currency)} {_saving(row, findings.in_time)}."
        return f"No feasible purchase{within} saves {percent(choice.needed)} of the prefill. {most}"
    if choice.outcome is Outcome.BUY_NOTHING:
        why = "no feasible purchase is better beyond chance"
        if choice.needed is not None:
            why = f"the target is {percent(choice.needed)}"
        return f"Buy nothing: the GPUs' own memory saves {percent(row.saved)} of the prefill, and {why}."
    return f"Buy {goods(row)} for {money(row.price, currency)}: it {_saving(row, findings.in_time)}."


def _recommendation_by_wait(findings: Findings, limit_s: float, within: str) -> str:
    choice, currency = findings.choice, findings.currency
    row, saving = choice.chosen.row, _saving(choice.chosen.row, findings.in_time)
    assert row.ttft_p90_s is not None
    limit, wait = duration(limit_s), duration(row.ttft_p90_s)
    bought = f"{goods(row)} for {money(row.price, currency)}" if row.ram_modules else "the GPUs' own memory"
    reached = f"p90 of time to first token is {wait}, and the target is {limit}"
    if choice.outcome is Outcome.NOT_REACHED:
        return (
            f"No feasible purchase{within} that was timed reaches a p90 of time to first token of {limit}. "
            f"The nearest is {wait}, with {bought}: it {saving}."
        )
    if choice.outcome is Outcome.BUY_NOTHING:
        return f"Buy nothing: with {bought} {reached}."
    return f"Buy {bought}: {reached}. It {saving}."


def _use(row: PlanRow, fleet: Fleet) -> str:
    where = f"each of {fleet.hosts} hosts" if fleet.hosts > 1 else "the host"
    each = f"{counted(row.ram_modules, 'module')} of {fleet.prices.ram.module}"
    each += f", {counted(row.ssd_drives, 'drive')} of {fleet.prices.ssd.drive}" if row.ssd_drives else ""
    shared = ""
    if row.shared_ram:
        shared = f", as one pool that its {fleet.engines_of_host} engines share"
    if row.servers:
        shared += f", and {servers(row)} that all {fleet.replicas} engines share"
    return f"Use {row.setup}: {_STORES[row.store]}. That is {each} in {where}{shared}."


def _servers(row: PlanRow) -> list[str]:
    if row.server_write_bytes_per_s is None or row.server_read_bytes_per_s is None:
        return []
    written = row.busy * row.server_write_bytes_per_s / 1e9
    read = row.busy * row.server_read_bytes_per_s / 1e9
    return [f"In the busiest minute {written:.2f} GB/s are written to servers, and {read:.2f} GB/s are read."]


def _ssds(findings: Findings) -> list[str]:
    row = findings.row
    if row.drive_writes_a_day is None or row.ssd_write_bytes_per_s is None:
        return []
    busiest = row.ssd_write_bytes_per_s * row.busy / 1e9
    sentences = [
        f"SSDs take {row.drive_writes_a_day:.2f} drive writes a day and last {age(row.ssd_life_years)}; "
        f"in the busiest minute {busiest:.2f} GB/s are written."
    ]
    if row.ssd_write_budget and findings.endurance is not None:
        each = size(row.write_budget_bytes // findings.fleet.replicas, 1000)
        sentences.append(
            f"The SSDs keep their rating only with max_write_bytes_per_day, {each} on each engine. "
            f"{_cost_of_endurance(findings.endurance)}"
        )
    return sentences


def _cost_of_endurance(endurance: Endurance) -> str:
    return (
        f"Endurance costs {100 * endurance.cost:.1f} points: without the limit the purchase would save "
        f"{percent(endurance.unlimited)}, with {endurance.unlimited_writes_a_day:,.1f} drive writes a day. "
        f"Within the limit an oracle's choice of blocks would save {percent(endurance.oracle)}; "
        f"{percent(max(0.0, endurance.of_oracle), 0)} of its gain over the same RAM without SSDs is reached."
    )


def _within_rating(findings: Findings) -> list[str]:
    """Describe the purchase with a write budget, unless it is recommended or the budget costs no savings."""
    endurance = findings.endurance
    if endurance is None or endurance.row == findings.row or endurance.cost < NO_MORE:
        return []
    row = endurance.row
    budget = f"a write budget of {size(row.write_budget_bytes, 1000)} a day"
    return [f"{_offer(row, findings.currency)} with {row.setup}: {budget}. {_cost_of_endurance(endurance)}"]


def _waits(timed: InTime, row: PlanRow) -> list[str]:
    run = timed.with_offload
    sentences = _first_tokens(timed, row)
    if row.ram_modules:
        sentences += _hits(timed, row)
        below = "SSDs" if row.ssd_drives else "servers" if row.servers else ""
        tiers = f"RAM and {below} keep up with their" if below else "RAM keeps up with its"
        slow = [_slow_tier(tier, below) for tier in run.tiers if not tier.keeps_up]
        sentences += slow or [f"{tiers} writes."]
    sentences.append(break_even_sentence("RAM", timed.ram_break_even_tokens))
    if row.ssd_drives:
        sentences.append(break_even_sentence("SSDs", timed.ssd_break_even_tokens))
    if row.servers:
        sentences.append(break_even_sentence("servers", timed.server_break_even_tokens))
    return sentences


def _first_tokens(timed: InTime, row: PlanRow) -> list[str]:
    run, without = timed.with_offload, timed.without
    where = f", on the busiest of {timed.engines:,} engines" if timed.is_one_of_several else ""
    if run.is_overloaded:
        # In an endless queue, waits depend on the length of the recording, not on the machine.
        return [f"Times to first token grow without end{where}."]
    waiting, loading = shares(run)
    # The queue includes reads, because a request stays in the queue while SSDs or servers are read for it.
    queue = "in the queue"
    queue += " or for SSDs" if row.ssd_drives else " or for servers" if row.servers else ""
    split = f"Of the mean, {waiting} is waiting {queue} and {loading} loading"
    if row.ram_modules and not without.is_overloaded:
        pairs = zip(ttft(run), ttft(without), strict=True)
        numbers = ", ".join(
            f"{name} from {duration(old)} to {duration(new)}" for (name, new), (_, old) in pairs
        )
        split += f"; without the purchase, {shares(without)[0]} is waiting"
    else:
        numbers = ", ".join(f"{name} {duration(value)}" for name, value in ttft(run))
    end = "; without the purchase it grows without end" if row.ram_modules and without.is_overloaded else ""
    return [f"Time to first token: {numbers}{where}{end}.", f"{split}."]


def _hits(timed: InTime, row: PlanRow) -> list[str]:
    """Explain why the timed replay has fewer hits than the untimed replay, if it has fewer."""
    run, where = timed.with_offload, " on that engine" if timed.is_one_of_several else ""
    if row.saved - run.hit_ratio < NO_MORE:
        return []
    reasons = ["the last token of each prompt is always computed, and requests overlap"]
    reasons += ["caches are empty at the start of a recording that is shortened"] if timed.load > 1 else []
    reasons += run.misses()
    text = f"The timed replay saves {percent(run.hit_ratio)}{where}, not {percent(row.saved)}"
    return [f"{text}: {'; '.join(reasons)}."]


def ttft(run: TimedOutcome) -> list[tuple[str, float]]:
    """List the mean and percentiles of the time to first token, each as (name, seconds).

    The most important is first.
    """
    ttft_s = run.ttft_s
    return [("p90", ttft_s.p90), ("mean", ttft_s.mean), ("p50", ttft_s.p50), ("p99", ttft_s.p99)]


def shares(run: TimedOutcome) -> tuple[str, str]:
    """Return two texts: the shares of waiting and of loading in the mean time to first token, in percent."""
    mean = run.ttft_s.mean or 1.0
    return percent(run.waiting_s.mean / mean, 0), percent(run.loading_s.mean / mean, 0)


def _slow_tier(tier: TimedTierReport, below: str) -> str:
    is_ram = tier.name == "ram"
    subject = "RAM does" if is_ram else f"The {below} do"
    why = "more than 30 s of writes were queued when the last request ended"
    if tier.not_offered and not is_ram:
        why = f"{tier.not_offered:,} blocks left RAM before they could be written"
    return f"{subject} not keep up with writes: {why}."


def _smaller(findings: Findings, smaller: Measured) -> str:
    chosen = findings.choice.chosen
    less = chosen.row.saved - smaller.row.saved
    lead = findings.difference(chosen, smaller)
    return f"{_offer(smaller.row, findings.currency)}, {100 * less:.1f} points less ({certainty(lead)})."


def _same_purchase(measured: Measured, rival: Measured | None) -> bool:
    return rival is not None and measured.row.purchase == rival.row.purchase


def _sharing(findings: Findings, rival: Measured) -> str:
    """Compare the choice with a rival. Exactly one of the two has servers."""
    chosen = findings.choice.chosen
    points = 100 * (rival.row.saved - chosen.row.saved)
    lead = findings.difference(rival, chosen) if points > 0 else findings.difference(chosen, rival)
    label = "Without servers" if chosen.row.servers else "With servers"
    if rival.row.price > ABOUT * chosen.row.price:
        label = f"The cheapest {label.lower()}"
    gain = f"{abs(points):.1f} points {'more' if points > 0 else 'less'}"
    return f"{label}: {_offer(rival.row, findings.currency)}, {gain} ({certainty(lead)})."


def _pooling(findings: Findings) -> list[str]:
    """Compare one RAM pool in each host with separate RAM, for the recommended purchase."""
    chosen, fleet = findings.choice.chosen, findings.fleet
    rival = other_ram(findings.rows, chosen)
    if rival is None:
        return []
    pool, apart = (chosen, rival) if chosen.row.shared_ram else (rival, chosen)
    gain = pool.row.saved - apart.row.saved
    lead = findings.difference(pool, apart) if gain > 0 else findings.difference(apart, pool)
    number, each = fleet.engines_of_host, size(apart.row.ram_bytes // fleet.replicas)
    engines = f"{number} engines" if fleet.hosts == 1 else f"the {number} engines of each host"
    change = (
        f"One pool of {size(pool.row.ram_bytes // fleet.hosts)} for {engines} instead of {number} of {each}"
    )
    points = f"{abs(100 * gain):.1f} points {'more' if gain > 0 else 'less'} ({certainty(lead)})"
    if pool is chosen:
        return [f"{change} saves {points}; separate RAM saves most with {apart.row.setup}."]
    return [f"{change} would save {points}."]


def _larger(findings: Findings, rival: Measured | None) -> list[str]:
    """Describe two purchases that save more than the choice.

    First the next larger purchase, but not if it is the purchase of `rival`, which the answer already
    describes. Then the purchase that saves most, if it is another purchase.
    """
    choice, currency = findings.choice, findings.currency
    larger, chosen = choice.larger, choice.chosen
    if larger is None:
        return ["No other feasible purchase saves more."]
    sentences = []
    if not _same_purchase(larger, rival):
        lead = findings.difference(larger, chosen)
        gain = larger.row.saved - chosen.row.saved
        sentences.append(f"{_offer(larger.row, currency)}, {100 * gain:.1f} points more ({certainty(lead)}).")
    if choice.most is not larger:
        most = choice.most.row
        label = "The most that can be saved" if findings.target.budget is None else "The most for this budget"
        sentences.append(
            f"{label} is {percent(most.saved)}, with {goods(most)} for {money(most.price, currency)}."
        )
    return sentences


def _lru(findings: Findings) -> list[str]:
    """Compare the recommended setup with ``lru``, vLLM's own policy, for the same purchase."""
    chosen = findings.choice.chosen
    if not chosen.row.ram_modules or (chosen.row.policy, chosen.row.admission) == (YARDSTICK, "all"):
        return []
    best: dict[str, Measured] = {}
    for measured in findings.rows:
        row = measured.row
        is_plain = (row.policy, row.admission) == (YARDSTICK, "all") and not row.shared_ram
        if is_plain and row.purchase == chosen.row.purchase and row.ssd_admission in ("", "all"):
            rival = best.setdefault(row.store, measured)
            best[row.store] = max(rival, measured, key=lambda one: one.row.saved)
    stores = {ON_COMPUTE: "stores as they are computed", ON_DEVICE_EVICTION: "stores as the GPUs drop them"}
    clauses = [
        f"that it {words} save {percent(best[store].row.saved)}, {_points(chosen, best[store])}"
        for store, words in stores.items()
        if store in best
    ]
    return [f"With lru in the same memory, blocks {'; blocks '.join(clauses)}."] if clauses else []


def _points(chosen: Measured, other: Measured) -> str:
    less = 100 * (chosen.row.saved - other.row.saved)
    return f"{abs(less):.1f} points {'less' if less > 0 else 'more'}"


def _more_ssds(row: PlanRow, rows: Sequence[Measured]) -> list[str]:
    """Report that more SSDs behind the same RAM would save nothing, if this was measured."""
    saved = [measured.row.saved for measured in rows
             if (measured.row.ram_modules, measured.row.servers) == (row.ram_modules, row.servers)
             and measured.row.ssd_drives > row.ssd_drives]  # fmt: skip
    if not saved or max(saved) - row.saved >= NO_MORE:
        return []
    return [f"{'More SSDs save' if row.ssd_drives else 'An SSD saves'} nothing more."]


def _best_infeasible(findings: Findings) -> list[str]:
    """Describe the best infeasible row, if it saves more than every feasible row."""
    infeasible = [measured.row for measured in findings.rows if not measured.row.feasible]
    best = max(infeasible, key=lambda row: (row.saved, -row.price), default=None)
    if best is None or best.saved < findings.choice.most.row.saved + NO_MORE:
        return []
    return [f"{_offer(best, findings.currency)} with {best.setup}, but is infeasible: {best.why_not}."]


def _offer(row: PlanRow, currency: str) -> str:
    """Describe an alternative: ``256 GiB of RAM for 1,400 USD would save 26.0%``."""
    if not row.ram_modules:
        return f"The GPUs' own memory saves {percent(row.saved)}"
    timed = "" if row.ttft_p90_s is None else f", with p90 {duration(row.ttft_p90_s)},"
    return f"{goods(row)} for {money(row.price, currency)}{timed} would save {percent(row.saved)}"
