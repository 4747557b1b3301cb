"""``kvoffload explain``: the reasons why blocks were missing in a replay."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import click
from rich.console import Group, RenderableType

from kvoffload.cli.fields import option, options_of
from kvoffload.cli.options import typed_command, with_blocks
from kvoffload.cli.output import Lines, progress_bar, show, terminal_table, tiers_silenced
from kvoffload.cli.replay import LoadedCacheOptions
from kvoffload.core.miss_reasons import EVICTED
from kvoffload.errors import ConfigError, Problems
from kvoffload.explain.capacity import larger_hits, num_replayed
from kvoffload.explain.explanation import Explanation, explain
from kvoffload.explain.misses import find_misses
from kvoffload.explain.prompts import BlockTokens
from kvoffload.explain.recording import has_tokens, read_with_tokens
from kvoffload.explain.words import facts
from kvoffload.pages.explain import explanation_page, summary, tables
from kvoffload.pages.page import check_report, write_report
from kvoffload.settings.read import Count, CountOrNothing
from kvoffload.tiers.kinds.simulated import simulated_like
from kvoffload.tiers.spec import TierOptions
from kvoffload.traces.sources import block_tokens_of
from kvoffload.traces.trace import Trace


@dataclass(frozen=True, kw_only=True)
class ExplainOptions(LoadedCacheOptions):
    request: CountOrNothing | None = option(
        None, "Explain all missing blocks of this request: its position in the trace, from 0."
    )
    top: Count = option(20, "Number of runs of missing blocks, and of places at which prompts differ.")
    no_capacities: bool = option(False, "Do not replay larger capacities: three times faster.")
    kind: str | None = option(
        None,
        "Format of a recording with token ids or text: token_ids or text, with parameters. By default the "
        "format of the first record.",
        "--from",
        metavar="KIND",
    )
    tokenizer: Path | None = option(None, "Tokenizer for text.", metavar="TOKENIZER.JSON")
    report: Path | None = option(None, "Write an offline page. Needs kvoffload[report].", metavar="FILE.html")

    def check(self) -> None:
        """Check everything that does not need the trace. Raises `ConfigError`, all problems at once."""
        problems, block_tokens, block_bytes = Problems("explain"), 1, None
        with problems:
            block_tokens = block_tokens_of(self.trace, self.block_tokens)
        with problems:
            block_bytes = self.known_block_bytes(block_tokens)
        with problems:
            self.parsed_tiers()
        self.check_outputs(problems)
        with problems:
            if self.report is not None:
                check_report(self.report, force=self.force)
        self._check_recording(problems)
        self.check_sizes(problems, block_bytes)
        problems.check()

    def _check_recording(self, problems: Problems) -> None:
        """Refuse options that have no meaning for this kind of TRACE."""
        with_tokens = has_tokens(self.trace, self.kind)
        if with_tokens and self.time_unit is not None:
            why = "leave it out: a recording with token ids or text has seconds, ms since 1970 or ISO 8601"
            problems.add("time-unit", self.time_unit, why)
        if not with_tokens and self.kind is not None:
            problems.add("from", self.kind, "allowed: token_ids, text")
        if not with_tokens and self.tokenizer is not None:
            why = "TRACE has block ids: leave it out, or add --from text"
            problems.add("tokenizer", str(self.tokenizer), why)

    def parsed_tiers(self) -> list[TierOptions]:
        """Parse the tiers and replace each by a simulated tier. Raises `ConfigError`."""
        return [simulated_like("tiers", tier) for tier in super().parsed_tiers()]

    def recording(self) -> tuple[Trace, BlockTokens | None]:
        """Read the trace, with token ids if the recording has them."""
        if not has_tokens(self.trace, self.kind):
            return self.read_requests(self.trace), None
        with progress_bar("read", 1.0, self.quiet) as progress:
            trace, tokens = read_with_tokens(
                self.trace, source=self.kind, block_tokens=self.block_tokens, tokenizer=self.tokenizer,
                skip_bad_lines=self.skip_bad_lines, progress=progress,
            )  # fmt: skip
        return with_blocks(self.trace, trace), tokens


@click.command()
@options_of(ExplainOptions)
def command(options: ExplainOptions) -> None:
    """Replay TRACE and explain for each missing block why it was not in the cache.

    TRACE is a trace as for `kvoffload replay`, or a recording with token ids or text as for
    `kvoffload trace convert`. With token ids or text, the report also shows the tokens at which prompts
    differ. Tiers are simulated, and nothing is written to them. docs/explain.md describes each reason.
    """
    trace, tokens = options.recording()
    if options.request is not None and options.request >= trace.requests:
        raise ConfigError("request", options.request, f"allowed: 0 to {trace.requests - 1:,}")
    config = options.config(trace, options.known_block_bytes(trace.block_tokens))
    total = trace.requests + (0 if options.no_capacities else num_replayed(trace))
    with tiers_silenced(), progress_bar("explain", total, options.quiet) as progress:
        report, misses = find_misses(trace, config, tokens=tokens, progress=progress)
        if not options.no_capacities and EVICTED in misses.counts():
            larger = larger_hits(trace, config, lambda done: progress(trace.requests + done))
            misses = replace(misses, larger_hits=larger)
    explained = explain(
        report, misses, config,
        has_token_ids=tokens is not None, top=options.top, request=options.request,
    )  # fmt: skip
    show(explained.to_json(), _shown(explained), is_json=options.is_json, output=options.output)
    if options.report is not None:
        write_report(options.report, explanation_page(explained, typed_command()))


def _shown(explained: Explanation) -> RenderableType:
    reasons, *details = [terminal_table(table) for table in tables(explained)]
    return Group(Lines([summary(explained)], indent=""), reasons, Lines([*facts(explained), ""]), *details)
