"""Options that commands share with engines: their defaults may stand in the environment or in a file."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from kvoffload.replay.routing import ROUTINGS, SESSION
from kvoffload.settings.layers import SHARED, gathered
from kvoffload.tiers.spec import NO_TIERS, parse_tiers

F = TypeVar("F", bound=Callable[..., Any])

CONFIG = "kvoffload.settings.read"
"""Where the context of a command keeps the file that was given."""


def configured(**parameters: str) -> Callable[[F], F]:
    """Give a command ``--config FILE``, and defaults from that file and from ``KVOFFLOAD_*``.

    Args:
        parameters: shared option -> the command's parameter: ``ram="capacity"``. ``tiers`` is given to a
            parameter that may be repeated as texts, and to another as one text.
    """

    def set_defaults(ctx: click.Context, param: click.Parameter, value: Path | None) -> None:
        ctx.meta[CONFIG] = value
        found = gathered({"config": value}, SHARED)
        defaults: dict[str, Any] = {}
        for name, parameter in parameters.items():
            if name not in found:
                continue
            defaults[parameter] = found[name]
            if name == "tiers":
                tiers = [str(tier) for tier in parse_tiers("tiers", found[name])]
                options = (one for one in ctx.command.params if isinstance(one, click.Option))
                repeated = any(one.name == parameter and one.multiple for one in options)
                defaults[parameter] = tiers if repeated else "+".join(tiers) or NO_TIERS
        ctx.default_map = {**defaults, **(ctx.default_map or {})}

    return click.option(
        "--config",
        type=click.Path(path_type=Path),
        is_eager=True,
        expose_value=False,
        callback=set_defaults,
        help="A TOML file with policy, admission, store, ram, tiers. [env: KVOFFLOAD_CONFIG]",
    )


def sized(function: F) -> F:
    """Give a command ``--model``, ``--kv-cache-dtype`` and ``--bytes-per-token``: what sizes are divided by
    (`models`)."""
    for option in (
        click.option("--bytes-per-token", metavar="SIZE", help="The same in bytes: 128KiB."),
        click.option("--kv-cache-dtype", default="auto", show_default=True, metavar="DTYPE",
                     help="As vLLM is told: auto, bfloat16, float16, fp8; with --model."),
        click.option("--model", metavar="CONFIG.JSON|NAME",
                     help="Whose KV blocks these are: for sizes such as 64GiB."),
    ):  # fmt: skip
        function = option(function)
    return function


def decoding(function: F) -> F:
    """Give a command ``--decode-tokens-per-s``: when requests of a replay end (`replay.ends`)."""
    return click.option(
        "--decode-tokens-per-s", type=float, default=0.0, metavar="X",
        help="Requests end when they have generated their answers at this speed; without it, at once.",
    )(function)  # fmt: skip


def sharing(function: F) -> F:
    """Give a command ``--instances`` and ``--routing``: how many engines share the last tier."""
    for option in (
        click.option("--routing", type=click.Choice(ROUTINGS), default=SESSION, show_default=True,
                     help="With --instances: where a request goes."),
        click.option("--instances", type=int, default=1, show_default=True, metavar="N",
                     help="Engines with RAM of their own, which share the last tier behind it."),
    ):  # fmt: skip
        function = option(function)
    return function


def in_blocks(function: F) -> F:
    """Give a command ``--block-tokens``: None where the trace's own header is to say it."""
    return click.option(
        "--block-tokens", type=click.IntRange(min=1), metavar="N",
        help="Tokens in a block of the trace, if its header does not say it.  [default: 512]",
    )(function)  # fmt: skip


def queueing(function: F) -> F:
    """Give a command ``--queue``: how many requests of a replay wait (`replay.queue`)."""
    return click.option(
        "--queue", "queue_requests", type=int, default=0, metavar="N",
        help="The next N requests wait in the engine's queue: what they will ask for leaves last.",
    )(function)  # fmt: skip


def in_form(function: F) -> F:
    """Give a command ``--format``: what is printed, for people or for programs."""
    return click.option(
        "--format", "form", type=click.Choice(["terminal", "json"]), default="terminal", show_default=True
    )(function)


def skipping_bad_lines(function: F) -> F:
    """Give a command ``--skip-bad-lines``."""
    return click.option("--skip-bad-lines", is_flag=True, help="Leave bad lines out, and count them.")(
        function
    )


def quietly(function: F) -> F:
    """Give a command ``--quiet``."""
    return click.option("--quiet", is_flag=True, help="Say nothing of the progress.")(function)


def on_workers(function: F) -> F:
    """Give a command ``--jobs`` and ``--scheduler``: who replays (`sweep.workers`)."""
    for option in (
        click.option("--scheduler", metavar="tcp://HOST:PORT", help="Let a running Dask cluster do it."),
        click.option("--jobs", type=int, help="Processes; one for each CPU if not given."),
    ):
        function = option(function)
    return function


def report_option(function: F) -> F:
    """Give a command ``--report``: its result as a page (`report.page`)."""
    return click.option(
        "--report", type=click.Path(path_type=Path), metavar="FILE.html",
        help="Write a page with charts: one file, offline. Takes kvoffload[report].",
    )(function)  # fmt: skip


def typed_command() -> str:
    """What was typed, quoted for a shell."""
    return shlex.join(["kvoffload", *sys.argv[1:]])
