"""``kvoffload canary``: compare a server's answers from its caches with its computed answers."""

from __future__ import annotations

import os
import secrets
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NoReturn

import click
import msgspec
from rich.console import Group

from kvoffload.canary.prompts import Prompt, PromptSizes, generated, read_prompts
from kvoffload.canary.run import Canary, CanaryOptions, CanaryReport
from kvoffload.canary.server import Pace, Server
from kvoffload.canary.text_metrics import FAILED, text_metrics
from kvoffload.canary.verdict import Verdict
from kvoffload.cli.fields import argument, option, options_of
from kvoffload.cli.options import FormatOptions, QuietOptions
from kvoffload.cli.output import Terminal, terminal_table
from kvoffload.errors import CanaryError, ConfigError
from kvoffload.pages.page import Table
from kvoffload.settings.output_files import check_regular, replaced
from kvoffload.settings.read import Count, Duration, Positive, convert
from kvoffload.text import duration
from kvoffload.tiers.shared.printable import printable

_EXIT_CODES = {Verdict.EQUAL: 0, Verdict.WITHIN_NOISE: 0, Verdict.DIFFERENT: 1, Verdict.NOT_SHOWN: 3}
_BLOCK_TOKENS, _LONGEST_CONTEXT, _LONGEST_FILLER = 16, 8192, 4096


class _TokenRange:
    allowed = "LOWEST:HIGHEST token id, such as 300:30000"

    def parse(self, field: str, value: object) -> range:
        low, _, high = str(value).partition(":")
        if low.isdecimal() and high.isdecimal() and int(low) + 15 <= int(high):
            return range(int(low), int(high) + 1)
        raise ConfigError(field, value, f"allowed: {self.allowed}, at least 16 apart")


class _Numbers:
    allowed = "whole numbers, such as 256,2048"

    def parse(self, field: str, value: object) -> tuple[int, ...]:
        return tuple(convert(field, word.strip(), Count) for word in str(value).split(","))


@dataclass(frozen=True, kw_only=True)
class Options(FormatOptions, QuietOptions):
    """Options of ``kvoffload canary``."""

    url: str = argument()
    model: str | None = option(None, "Model to ask; the first one of the server by default.")
    prompts: Path | None = option(
        None, 'File with your prompts: lines {"prompt": TEXT or TOKEN IDS, "family": NAME}.', metavar="FILE"
    )
    num_prompts: Count = option(24, "Generated prompts.")
    token_ids: Annotated[range, _TokenRange()] | None = option(
        None, "Generate prompts of random token ids instead of English text.", metavar="LOWEST:HIGHEST"
    )
    chunk_tokens: Annotated[tuple[int, ...], _Numbers()] = option(
        "256,2048", "Chunk sizes of prefill and connector: prompts end around them.", metavar="N,..."
    )
    seed: Count | None = option(None, "Of the prompts; drawn and printed by default.")
    answer_tokens: Count = option(16, "Tokens of each answer.")
    concurrency: Count = option(4, "Requests at a time in concurrent phases.")
    may_reset: bool = option(
        False, "Empty the device's cache with POST /reset_prefix_cache; otherwise with filler prompts."
    )
    device_tokens: Count | None = option(None, "Tokens of the device's KV cache; asks vLLM by default.")
    tier_hits_metric: str | None = option(
        None, "Counter of prompt tokens from tiers in /metrics; vLLM's by default.", metavar="NAME"
    )
    max_tokens_per_s: Positive | None = option(None, "Limit of prompt tokens sent per second.")
    timeout: Duration = option(120.0, "For each request.")
    watch: Duration | None = option(None, "Run again after this time, until interrupted.")
    prometheus: Path | None = option(
        None, "Write the last result as Prometheus text, for the node exporter's textfile collector.",
        metavar="FILE",
    )  # fmt: skip

    def check(self) -> None:
        """Check options that exclude each other. Raises `ConfigError`."""
        if self.prompts is not None and self.token_ids is not None:
            text = f"{self.token_ids.start}:{self.token_ids.stop - 1}"
            raise ConfigError("token-ids", text, "allowed: --prompts or --token-ids, not both")
        if self.prometheus is not None:
            check_regular("prometheus", self.prometheus)


@click.command()
@options_of(Options)
def canary(options: Options) -> None:
    """Check that an OpenAI-compatible server at URL gives the same answers from its caches as by computation.

    Compares three kinds of answers to each prompt: computed, from the device's cache, and from the tiers
    behind the device. Computed answers to one prompt differ slightly, too. From these differences the check
    computes a threshold; larger differences are an alarm (docs/canary.md). The requests have a cache_salt, so
    other requests do not use their blocks. The API key is read from OPENAI_API_KEY.

    Exit code 0: equal or within-noise. 1: different. 2: no result. 3: not-shown, because the server reports
    no hits in its tiers.
    """
    counts: Counter[str] = Counter()
    if options.watch is None:
        _run_once(options, counts)
    server = _server(options)
    while True:
        begun = time.monotonic()
        _attempt(server, options, counts)
        time.sleep(max(0.0, begun + options.watch - time.monotonic()))


def _server(options: Options) -> Server:
    return Server(
        options.url,
        model=options.model,
        api_key=os.environ.get("OPENAI_API_KEY", ""),
        timeout_s=options.timeout,
        tier_hits_metric=options.tier_hits_metric,
        pace=Pace(options.max_tokens_per_s),
    )


def _run_once(options: Options, counts: Counter[str]) -> NoReturn:
    """Run the canary, and exit with the code of its verdict. A failed run is written to the metrics, too."""
    try:
        report = _run(_server(options), options)
    except CanaryError:
        _write_metrics(options, None, counts)
        raise
    _write_metrics(options, report, counts)
    _show(report, options)
    sys.exit(_EXIT_CODES[Verdict(report.verdict)])


def _attempt(server: Server, options: Options, counts: Counter[str]) -> None:
    """Run the canary once, for ``--watch``.

    If the server does not answer, or the metrics cannot be written now, print the error.
    """
    report = None
    try:
        report = _run(server, options)
    except CanaryError as error:
        click.echo(f"kvoffload: {error}", err=True)
    try:
        _write_metrics(options, report, counts)
    except ConfigError as error:
        click.echo(f"kvoffload: {error}", err=True)
    if report is not None:
        _show(report, options)


def _run(server: Server, options: Options) -> CanaryReport:
    seed = options.seed or secrets.randbelow(2**31) + 1
    context = min(server.max_model_tokens or _LONGEST_CONTEXT, _LONGEST_CONTEXT)
    longest = context - options.answer_tokens
    if longest < 1:
        raise ConfigError("answer-tokens", options.answer_tokens, f"allowed: below {context}")
    run_options = CanaryOptions(
        seed=seed,
        answer_tokens=options.answer_tokens,
        concurrency=options.concurrency,
        may_reset=options.may_reset,
        device_tokens=options.device_tokens,
        filler_tokens=min(longest, _LONGEST_FILLER),
    )

    def show_phase(phase: str) -> None:
        if not options.quiet and not options.is_json:
            click.echo(f"{phase} ...", err=True)

    return Canary(server, _prompts(server, options, seed, longest), run_options, show_phase).run()


def _prompts(server: Server, options: Options, seed: int, longest: int) -> list[Prompt]:
    if options.prompts is not None:
        return read_prompts(options.prompts)
    block_tokens = server.device_tokens()[0] or _BLOCK_TOKENS
    sizes = PromptSizes(block_tokens, options.chunk_tokens, longest)
    return generated(seed, options.num_prompts, sizes, tokenize=server.tokenize, token_ids=options.token_ids)


def _write_metrics(options: Options, report: CanaryReport | None, counts: Counter[str]) -> None:
    """Count a run, and write the metrics to the file of ``--prometheus``. For a failed run, `report` is None.

    Raises `ConfigError` if the file cannot be written.
    """
    counts[FAILED if report is None else report.verdict] += 1
    if options.prometheus is not None:
        # Replaced atomically, because a collector must not read an incomplete file.
        with replaced("prometheus", options.prometheus) as path:
            path.write_text(text_metrics(report, counts, time.time()))


def _show(report: CanaryReport, options: Options) -> None:
    if options.is_json:
        click.echo(msgspec.json.encode(report))
        return
    lines = [f"{report.verdict}: {'; '.join(report.reasons)}"]
    lines.append(
        f"{printable(report.model)} at {report.url}, {report.prompts} prompts of seed {report.seed}, "
        f"{report.tokens_sent:,} prompt tokens sent in {duration(report.seconds)}"
    )
    if report.verdict == Verdict.DIFFERENT.value:
        lines.append(f"confidence {report.confidence:.6f} that noise alone does not do this")
    Terminal(highlight=False).print(
        Group("\n".join(lines), *map(terminal_table, _tables(report))), markup=False
    )


def _tables(report: CanaryReport) -> list[Table]:
    phases = [
        (
            phase.name,
            str(phase.requests),
            _tokens(phase.device_tokens),
            _tokens(phase.tier_tokens),
            str(phase.differing),
            f"{phase.median:.3g}",
            f"{phase.largest:.3g}",
        )
        for phase in report.phases
    ]
    headings = ("answers", "requests#", "device hits#", "tier hits#", "other tokens#", "median#", "largest#")
    tables = [Table("differences from the computed answers, in log-probability", headings, phases)]
    if report.differences:
        rows = [
            (
                row.prompt,
                row.phase,
                str(row.position),
                _logprob(row.computed_logprob),
                _logprob(row.cached_logprob),
                f"{row.difference:.3g}",
                repr(row.token),
            )
            for row in report.differences
        ]
        headings = ("prompt", "answer", "position#", "computed#", "cached#", "difference#", "token")
        tables.append(Table("largest differences", headings, rows))
    return tables


def _tokens(tokens: float | None) -> str:
    return "-" if tokens is None else f"{tokens:,.0f}"


def _logprob(logprob: float | None) -> str:
    return "-" if logprob is None else f"{logprob:.3f}"
