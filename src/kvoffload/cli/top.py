"""``kvoffload top``: rates, tiers and faults of a running server, in the terminal."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import click
import msgspec
from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from kvoffload.cli.fields import argument, option, options_of
from kvoffload.cli.options import FormatOptions
from kvoffload.cli.output import Terminal, terminal_table
from kvoffload.errors import ConfigError, UnavailableError
from kvoffload.metrics.fetch import fetch, metrics_url
from kvoffload.metrics.live_counters import (
    EngineRates,
    Reading,
    TenantShown,
    TierRates,
    WhatIfShown,
    rates,
    read,
)
from kvoffload.metrics.scrape import samples
from kvoffload.pages.page import Table
from kvoffload.settings.read import Duration
from kvoffload.text import duration, percent, size
from kvoffload.tiers.shared.printable import printable

_TIMEOUT_S = 5.0
_BAR_CELLS = 6
_MOST_NAME = 14
_MOST_TENANTS = 8
_UNITS = ((1e7, 1e6, "M"), (1e4, 1e3, "k"))
"""Units of rates: (smallest rate shown in the unit, size of the unit, name of the unit)."""
_FAULTS = {
    "verification_failures": "damaged in RAM",
    "failed_load_blocks": "failed loads",
    "failed_store_blocks": "failed stores",
    "internal_errors": "internal errors",
    "failed": "failed",
    "mismatches": "damaged",
    "timeouts": "timed out",
    "errors": "exceptions",
}


@dataclass(frozen=True, kw_only=True)
class TopOptions(FormatOptions):
    """Options of ``kvoffload top``."""

    url: str = argument("http://localhost:8000/metrics")
    interval: Duration = option(2.0, "Time between two scrapes.")
    once: bool = option(False, "Print one interval and exit.")

    def check(self) -> None:
        """Check URL and interval. Raises `ConfigError`."""
        if self.interval <= 0:
            raise ConfigError("interval", self.interval, "allowed: more than 0 seconds")
        metrics_url(self.url)


@click.command()
@options_of(TopOptions)
def top(options: TopOptions) -> None:
    """Show hits by place, misses, tiers and faults of the server at URL, updated in every interval.

    URL is the server's address, such as localhost:8000. The server is vLLM, or an engine that uses the
    library's metrics collector. Each engine of the server has a line. Press q or Ctrl-C to end the display.
    With --format json each interval is printed as one line.
    """
    url = metrics_url(options.url)
    before = scrape(url)
    if not options.once and not options.is_json and sys.stdout.isatty():
        watch(url, before, options.interval)
        return
    while True:
        time.sleep(options.interval)
        try:
            after = scrape(url)
        except UnavailableError as error:
            if options.once:
                raise
            click.echo(f"kvoffload: {error}", err=True)
            continue
        shown, before = rates(before, after), after
        if options.is_json:
            click.echo(msgspec.json.encode(shown))
        else:
            Terminal(highlight=False).print(_view(shown, url))
        if options.once:
            return


# ---- scrapes


def scrape(url: str) -> Reading:
    """Read the server's metrics. Raises `UnavailableError` if kvoffload's metrics are missing."""
    scraped = samples(fetch(url, _TIMEOUT_S))
    if not scraped:
        raise UnavailableError("url", url, "the answer is not in the Prometheus text format")
    reading = read(scraped, time.monotonic())
    if not reading.engines:
        why = (
            "the server has no metrics of kvoffload; start vLLM with the flag that `kvoffload vllm-config` "
            "prints. The first request makes them appear"
        )
        raise UnavailableError("url", url, why)
    return reading


# ---- live display


def watch(url: str, before: Reading, interval_s: float) -> None:
    """Show intervals until the user presses q.

    If a scrape fails, its error is shown until the next scrape succeeds.
    """
    console = Terminal(highlight=False)
    with (
        _keys() as keyboard,
        _remembered_interrupts() as interrupts,
        Live(Text(f"{url}: waiting"), console=console, screen=True, auto_refresh=False) as live,
    ):
        while not _quits(keyboard, interval_s):
            if interrupts:
                raise KeyboardInterrupt
            try:
                after = scrape(url)
            except UnavailableError as error:
                live.update(Text(str(error), "bold red"), refresh=True)
                continue
            live.update(_view(rates(before, after), url), refresh=True)
            before = after


@contextlib.contextmanager
def _remembered_interrupts() -> Iterator[list[int]]:
    """Yield a list of the received SIGINTs; each SIGINT also raises `KeyboardInterrupt`.

    The list is needed because Python drops a `KeyboardInterrupt` that is raised in a finalizer.
    """
    received: list[int] = []

    def handle(number: int, frame: object) -> None:
        received.append(number)
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGINT, handle)
    try:
        yield received
    finally:
        signal.signal(signal.SIGINT, previous)


@contextlib.contextmanager
def _keys() -> Iterator[int | None]:
    """Set the terminal to deliver each key press at once, without Enter.

    Yields the file descriptor of standard input, or None if it is no terminal.
    """
    if not sys.stdin.isatty():
        yield None
        return
    import termios
    import tty

    keyboard = sys.stdin.fileno()
    settings = termios.tcgetattr(keyboard)
    tty.setcbreak(keyboard)
    try:
        yield keyboard
    finally:
        termios.tcsetattr(keyboard, termios.TCSADRAIN, settings)


def _quits(keyboard: int | None, timeout_s: float) -> bool:
    """Wait for the next interval.

    Returns True as soon as the user presses q, or False at the end of the interval.
    """
    if keyboard is None:
        time.sleep(timeout_s)
        return False
    until = time.monotonic() + timeout_s
    while (left := until - time.monotonic()) > 0:
        if select.select([keyboard], [], [], left)[0]:
            pressed = os.read(keyboard, 64)
            if not pressed or b"q" in pressed.lower():
                return True
    return False


# ---- tables


def _view(shown: list[EngineRates], url: str) -> RenderableType:
    title = Text(f"{url}: blocks per second, over {duration(shown[0].seconds)}", "italic")
    parts: list[RenderableType] = [title, terminal_table(_engines(shown), pad_edge=False)]
    several = len(shown) > 1
    for engine in shown:
        if engine.tiers:
            heading = _short(engine.engine) if several else "tier"
            parts.append(terminal_table(_tiers(engine, heading), pad_edge=False))
    for engine in shown:
        parts += _lines(engine, f"{_short(engine.engine)}: " if several else "")
    return Group(*parts)


def _engines(shown: list[EngineRates]) -> Table:
    headings = ("engine", "lookups#", "RAM#", "tiers#", "hits#", "stored#", "evicted#", "in use")
    rows = [
        (
            _short(engine.engine),
            _rate(engine.lookups),
            _rate(engine.ram_hits),
            _rate(_hits_of_tiers(engine)),
            "-" if engine.hit_ratio is None else percent(engine.hit_ratio, 0),
            _rate(engine.stored),
            _rate(engine.evicted),
            _bar(engine.ready, engine.capacity),
        )
        for engine in shown
    ]
    return Table("", headings, rows)


def _short(engine: str) -> str:
    """Shorten an engine's name to 14 characters: drop the model's owner, and cut the model's name."""
    model, space, number = printable(engine).rpartition("/")[2].rpartition(" ")
    most = _MOST_NAME - len(space + number)
    return f"{model if len(model) <= most else model[: most - 1] + '~'}{space}{number}"


def _hits_of_tiers(engine: EngineRates) -> float | None:
    """Return the sum of the hits of all tiers.

    Return None if there are no tiers or if the hits of a tier are unknown.
    """
    known = [tier.hits for tier in engine.tiers if tier.hits is not None]
    return sum(known) if known and len(known) == len(engine.tiers) else None


def _short_tier(name: str) -> str:
    """Return a tier's name. The middle of a long name is cut out, so that the place and the number remain."""
    shown, half = printable(name), _MOST_NAME // 2
    return shown if len(shown) <= _MOST_NAME else f"{shown[: half - 1]}~{shown[-half:]}"


def _tiers(engine: EngineRates, heading: str) -> Table:
    headings = (heading, "hits#", "read/s#", "written/s#", "in flight#", "state", "in use")
    rows = [
        (
            _short_tier(tier.name),
            _rate(tier.hits),
            _bytes(tier.bytes_read),
            _bytes(tier.bytes_written),
            "-" if tier.in_flight is None else f"{tier.in_flight:,.0f}",
            _state(tier),
            _bar(tier.ready, tier.capacity),
        )
        for tier in engine.tiers
    ]
    return Table("", headings, rows)


def _state(tier: TierRates) -> str:
    if tier.circuits_open:
        return f"{tier.circuits_open:,.0f} open"
    return "no budget" if tier.write_budget_bytes == 0 else "ok"


def _lines(engine: EngineRates, prefix: str) -> Iterator[RenderableType]:
    """Yield lines on an engine's tokens, copies, misses, tenants, what-if estimates and faults."""
    if engine.is_restarted:
        yield Text(f"{prefix}the server has restarted: counters began again", "yellow")
    if engine.requests is not None:
        tokens, cached = _rate(engine.prompt_tokens), _rate(engine.device_tokens)
        requests = _rate(engine.requests)
        yield Text(f"{prefix}{requests} requests/s, {tokens} prompt tokens/s, {cached} from the GPU's cache")
    if engine.load_bytes is not None and engine.store_bytes is not None:
        loaded, stored = _bytes(engine.load_bytes), _bytes(engine.store_bytes)
        yield Text(f"{prefix}copies: {loaded}/s loaded, {stored}/s stored")
    for label, reasons in (
        ("misses", engine.misses),
        ("not stored", engine.refused),
        ("not loaded from tiers", engine.not_promoted),
    ):
        if text := _reasons(reasons):
            yield Text(f"{prefix}{label}: {text}")
    if engine.tenants:
        shown = [*map(_tenant, engine.tenants[:_MOST_TENANTS])]
        if num_others := len(engine.tenants) - len(shown):
            shown.append(f"{num_others} more")
        yield Text(f"{prefix}tenants: {'; '.join(shown)}")
    if engine.what_if:
        yield Text(f"{prefix}what if: {'; '.join(map(_setting, engine.what_if))}")
    faults = [_counted(engine.faults)]
    faults += [f"{printable(tier.name)}: {text}" for tier in engine.tiers if (text := _counted(tier.faults))]
    if any(faults):
        yield Text(f"{prefix}since the start: {'; '.join(filter(None, faults))}", "bold red")
    else:
        yield Text(f"{prefix}no faults since the start")


def _setting(shown: WhatIfShown) -> str:
    """Format the estimated hit ratio of another setting: ``policy=hazard 16.6±2.2% (+4.3±1.7)``."""
    text = f"{printable(shown.setting)} {_points(shown.hit_ratio)}±{_points(shown.error)}%"
    gain = f" ({_points(shown.gain, '+')}±{_points(shown.gain_error)})" if shown.gain_error else ""
    return text + gain


def _tenant(shown: TenantShown) -> str:
    """Format the blocks of a tenant: ``team-a 1,204 held, 30 loaded/s, 2.0 evicted/s``."""
    held = "-" if shown.held is None else f"{shown.held:,.0f}"
    rates_of = f"{_rate(shown.loaded)} loaded/s, {_rate(shown.evicted)} evicted/s"
    return f"{printable(shown.tenant)} {held} held, {rates_of}"


def _points(share: float | None, sign: str = "") -> str:
    return "-" if share is None else f"{100 * share:{sign}.1f}"


def _reasons(by_reason: Mapping[str, float | None]) -> str:
    ordered = sorted(by_reason.items(), key=lambda row: -(row[1] or 0.0))
    return ", ".join(f"{printable(reason)} {_rate(value)}" for reason, value in ordered if value)


def _counted(faults: Mapping[str, float]) -> str:
    return ", ".join(f"{count:,.0f} {_FAULTS[name]}" for name, count in faults.items() if count)


def _rate(value: float | None) -> str:
    if value is None:
        return "-"
    for limit, unit, name in _UNITS:
        if value >= limit:
            return f"{value / unit:.0f}{name}"
    return f"{value:,.0f}" if value >= 10 or value == 0 else f"{value:.1f}"


def _bytes(value: float | None) -> str:
    return "-" if value is None else size(round(value), 1000)


def _bar(used: float | None, capacity: float | None) -> str:
    if used is None:
        return "-"
    if not capacity:
        return f"{used:,.0f}"
    filled = round(_BAR_CELLS * min(1.0, used / capacity))
    return f"{'#' * filled}{'.' * (_BAR_CELLS - filled)} {percent(used / capacity, 0)}"
