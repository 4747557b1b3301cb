"""``kvoffload sweep``: every combination of policies, rules and sizes on some traces."""

from __future__ import annotations

import sys
from pathlib import Path

import click
from rich.console import Console

from kvoffload.cli.options import (
    configured,
    decoding,
    in_blocks,
    in_form,
    on_workers,
    queueing,
    quietly,
    report_option,
    sharing,
    sized,
    skipping_bad_lines,
    typed_command,
)
from kvoffload.cli.sweep_progress import how_to_go_on, shown
from kvoffload.cli.sweep_tables import tables, words
from kvoffload.core.plans import ON_COMPUTE, STORES
from kvoffload.errors import ConfigError, SweepError
from kvoffload.model.kv_bytes import block_bytes
from kvoffload.pages.page import check_report, write_report
from kvoffload.pages.sweep import sweep_page
from kvoffload.replay.replay import ReplayConfig
from kvoffload.sweep.bootstrap import RESAMPLES
from kvoffload.sweep.grid import Grid, axis
from kvoffload.sweep.outputs import as_json
from kvoffload.sweep.sweep import Sweep
from kvoffload.tiers.spec import NO_TIERS
from kvoffload.traces.sources import block_tokens_of


@click.command()
@click.argument("traces", metavar="TRACE...", nargs=-1, required=True)
@configured(policy="policies", admission="admissions", store="stores", ram="capacities", tiers="tiers")
@click.option("--policies", default="lru,arc", show_default=True, help="Names, or module:Class.")
@click.option("--admissions", default="all", show_default=True, help="all, reuse:N.")
@click.option("--capacities", default="1%,2%,5%,10%", show_default=True,
              help="Of the tier: 5000 (blocks), 5% (of the unique), 4GiB.")  # fmt: skip
@click.option("--device-blocks", default="0", show_default=True,
              help="Of an LRU device cache in front: 0 (none), as above, or 0.5x of the tier.")  # fmt: skip
@click.option("--stores", default=ON_COMPUTE, show_default=True, help=f"When to store: {', '.join(STORES)}.")
@click.option("--tiers", default=NO_TIERS, show_default=True, metavar="CAPACITY[,policy=NAME]",
              help="Behind RAM: 10%, 10%,policy=hazard; one behind another with +.")  # fmt: skip
@decoding
@queueing
@sharing
@on_workers
@click.option("--output", type=click.Path(path_type=Path),
              help="Write the rows: .csv, .json, .parquet. Without it nothing is kept.")  # fmt: skip
@report_option
@click.option("--force", is_flag=True, help="Replace an existing output.")
@click.option("--timings", is_flag=True, help="A column of seconds; these differ from run to run.")
@click.option("--seed", default=0, show_default=True, help="Of the confidence intervals.")
@click.option("--resamples", default=RESAMPLES, show_default=True, help="Of the confidence intervals.")
@sized
@in_blocks
@skipping_bad_lines
@in_form
@quietly
def sweep(
    traces: tuple[str, ...],
    policies: str,
    admissions: str,
    capacities: str,
    device_blocks: str,
    stores: str,
    tiers: str,
    decode_tokens_per_s: float,
    queue_requests: int,
    instances: int,
    routing: str,
    jobs: int | None,
    scheduler: str | None,
    output: Path | None,
    report: Path | None,
    force: bool,
    timings: bool,
    seed: int,
    resamples: int,
    model: str | None,
    kv_cache_dtype: str,
    bytes_per_token: str | None,
    block_tokens: int | None,
    skip_bad_lines: bool,
    form: str,
    quiet: bool,
) -> None:
    """Replay every TRACE through every combination, and say which differences mean something.

    TRACE is a file (Mooncake JSONL, also .gz, .xz or .zst), or a built-in workload: chat, agent, rag. Lists
    have commas. Replays are of the decisions alone, without bytes. A sweep with --output that was
    interrupted continues where it stopped when the same command is run again. Exit code 1 if a row is better
    than the optimum, or a replay failed.
    """
    if twice := [name for name in dict.fromkeys(traces) if traces.count(name) > 1]:
        raise ConfigError("traces", twice[0], "it is given twice")
    if report is not None:
        check_report(report, force=force)
    if "-" in traces:
        raise ConfigError("traces", "-", "allowed: files and names; each process of a sweep reads its trace")
    grid = Grid(
        axis("policies", policies),
        axis("admissions", admissions),
        axis("capacities", capacities),
        axis("device-blocks", device_blocks),
        axis("stores", stores),
        _block_bytes(traces, block_tokens, model, bytes_per_token, kv_cache_dtype),
        axis("tiers", tiers),
        ReplayConfig(
            1,
            decode_tokens_per_s=decode_tokens_per_s,
            queue_requests=queue_requests,
            instances=instances,
            routing=routing,
        ),
    )
    run = Sweep(
        traces, grid, block_tokens=block_tokens, skip_bad_lines=skip_bad_lines, output=output, force=force,
        jobs=jobs, scheduler=scheduler, seed=seed, resamples=resamples, timings=timings,
    )  # fmt: skip
    try:
        with shown(quiet) as on_progress:
            result = run.run(on_progress)
    except KeyboardInterrupt:
        click.echo(f"kvoffload: interrupted{how_to_go_on(run.progress, run.journal_path)}", err=True)
        sys.exit(130)
    except SweepError as error:
        click.echo(f"kvoffload: {error}{how_to_go_on(run.progress, run.journal_path)}", err=True)
        sys.exit(1)
    if report is not None:
        write_report(report, sweep_page(result.rows, result.verdicts, typed_command()))
    if form == "json":
        click.echo(as_json(result.rows), nl=False)
    else:
        console = Console()
        for part in (*tables(result.rows, console.width), *words(result.verdicts)):
            console.print(part)
    if result.left_out:
        click.echo(
            f"{result.left_out.total():,} combinations left out: {'; '.join(result.left_out)}", err=True
        )
    for violation in result.violations:
        click.echo(f"kvoffload: better than the best there can be: {violation}", err=True)
    if result.violations:
        sys.exit(1)


def _block_bytes(
    traces: tuple[str, ...], block_tokens: int | None, model: str | None, token_bytes: str | None, dtype: str
) -> int | None:
    """What sizes are divided by: one number for all traces."""
    if block_bytes(model, token_bytes, 1, dtype) is None:
        return None
    first, *others = [block_tokens_of(trace, block_tokens) for trace in traces]
    for trace, tokens in zip(traces[1:], others, strict=True):
        if tokens != first:
            why = (
                f"its blocks have {tokens} tokens, those of {traces[0]} {first}: sizes need a sweep for each"
            )
            raise ConfigError("traces", trace, why)
    return block_bytes(model, token_bytes, first, dtype)
