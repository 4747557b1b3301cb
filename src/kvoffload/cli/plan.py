"""``kvoffload plan``: what to buy for a fleet of engines, from a recording of what it is asked."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import msgspec
from rich.console import Console

from kvoffload.cli.options import (
    in_blocks,
    in_form,
    on_workers,
    quietly,
    report_option,
    sized,
    skipping_bad_lines,
    typed_command,
)
from kvoffload.cli.plan_tables import tables
from kvoffload.cli.simulate import find_machine, without_warnings
from kvoffload.cli.sweep_progress import how_to_go_on, shown
from kvoffload.cli.vllm_config import as_flag, transfer_config
from kvoffload.errors import ConfigError, SweepError
from kvoffload.model.kv_bytes import block_bytes
from kvoffload.pages.page import check_report, write_report
from kvoffload.pages.plan import plan_page
from kvoffload.plan.fleet import Fleet
from kvoffload.plan.plan import Plan, PlanAnswer, Setups
from kvoffload.plan.prices import as_toml, read_prices
from kvoffload.plan.targets import Outcome, Target
from kvoffload.plan.words import PLACEHOLDERS
from kvoffload.replay.routing import ROUTINGS, SESSION
from kvoffload.settings.read import Duration, convert, parse_size
from kvoffload.simulate.classes import CLASSES
from kvoffload.sweep.bootstrap import RESAMPLES
from kvoffload.sweep.grid import axis
from kvoffload.sweep.task import TraceSource
from kvoffload.traces.sources import block_tokens_of

_SSD_PATH = "/data/kv"
"""Where the line for vLLM has the SSDs: to be replaced by theirs."""
_SERVER = "cache-server-{number}:6379"
"""The same of servers."""


class _Times(click.ParamType[float]):
    """A number, also with an ``x`` behind it: ``2x``."""

    name = "times"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        try:
            return float(str(value).removesuffix("x"))
        except ValueError:
            self.fail(f"{value!r} is no number such as 2.5 or 2x", param, ctx)


def _show_prices(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value:
        click.echo(as_toml(read_prices(None)), nl=False)
        ctx.exit()


@click.command()
@click.argument("trace")
@click.option("--gpus", type=int, required=True, metavar="N", help="That serve, all engines together.")
@click.option("--kv-per-gpu", required=True, metavar="SIZE", help="Memory for KV blocks of each: 64GB.")
@sized
@click.option("--replicas", type=int, default=1, show_default=True, metavar="N",
              help="Engines that the GPUs are divided among.")  # fmt: skip
@click.option("--routing", type=click.Choice(ROUTINGS), default=SESSION, show_default=True,
              help="Which engine gets a request.")  # fmt: skip
@click.option(
    "--load", type=_Times(), default=1.0, metavar="2x", help="Sessions at a time, over those recorded."
)
@click.option("--scale", type=_Times(), default=1.0, metavar="2.5",
              help="Requests of the fleet, over those recorded.")  # fmt: skip
@click.option("--budget", type=float, metavar="MONEY", help="Spend no more.")
@click.option("--target-saved", type=float, metavar="SHARE", help="Save this share of the prefill: 0.3.")
@click.option(
    "--target-of-ceiling", type=float, metavar="SHARE", help="The same, of what any cache can save."
)
@click.option("--target-gpu-hours", type=float, metavar="HOURS", help="Save so many GPU-hours a day.")
@click.option(
    "--target-ttft-p90",
    metavar="TIME",
    help="Nine of ten requests wait no longer for their first token: 1.5s, 800ms. Takes --machine.",
)
@click.option("--prefill-tokens-per-s", type=float, default=0.0, metavar="X",
              help="That one GPU computes; the machine's, if not given.")  # fmt: skip
@click.option("--machine", metavar="FILE|CLASS[:PARAMETERS]",
              help="Of an engine, for waiting times: what `kvoffload calibrate` has written, or a class of "
              f"its GPUs: h100-pcie5:70B. Classes: {', '.join(CLASSES)}.")  # fmt: skip
@click.option("--prices", type=click.Path(path_type=Path), metavar="FILE", help="Yours, as TOML or JSON.")
@click.option("--show-prices", is_flag=True, is_eager=True, expose_value=False, callback=_show_prices,
              help="Print such a file, with the defaults, and end.")  # fmt: skip
@click.option("--stores", default=",".join(Setups.stores), show_default=True, help="When to store.")
@click.option("--policies", default=",".join(Setups.policies), show_default=True, help="Of RAM.")
@click.option("--admissions", default=",".join(Setups.admissions), show_default=True, help="Of RAM.")
@click.option("--ssd-policies", default=",".join(Setups.ssd_policies), show_default=True, help="Of SSDs.")
@click.option("--ssd-admissions", default=",".join(Setups.ssd_admissions), show_default=True, help="Of SSDs.")
@click.option("--server-admissions", default=",".join(Setups.server_admissions), show_default=True,
              help="Of servers that replicas share.")  # fmt: skip
@click.option(
    "--sample",
    "one_in",
    type=int,
    metavar="N",
    help="Search on one of N sessions, and measure the answer on all; 1: all. By length, if not given.",
)
@on_workers
@click.option("--output", type=click.Path(path_type=Path), metavar="FILE",
              help="Write every row: .csv, .json, .parquet. Another target goes on from there.")  # fmt: skip
@report_option
@click.option("--force", is_flag=True, help="Replace an existing output.")
@click.option("--seed", default=0, show_default=True, help="Of the confidence intervals.")
@click.option("--resamples", default=RESAMPLES, show_default=True, help="Of the confidence intervals.")
@in_blocks
@skipping_bad_lines
@in_form
@quietly
def plan(
    trace: str,
    gpus: int,
    kv_per_gpu: str,
    model: str | None,
    kv_cache_dtype: str,
    bytes_per_token: str | None,
    replicas: int,
    routing: str,
    load: float,
    scale: float,
    budget: float | None,
    target_saved: float | None,
    target_of_ceiling: float | None,
    target_gpu_hours: float | None,
    target_ttft_p90: str | None,
    prefill_tokens_per_s: float,
    machine: str | None,
    prices: Path | None,
    stores: str,
    policies: str,
    admissions: str,
    ssd_policies: str,
    ssd_admissions: str,
    server_admissions: str,
    one_in: int | None,
    jobs: int | None,
    scheduler: str | None,
    output: Path | None,
    report: Path | None,
    force: bool,
    seed: int,
    resamples: int,
    block_tokens: int | None,
    skip_bad_lines: bool,
    form: str,
    quiet: bool,
) -> None:
    """Say how much RAM and SSD, and how many cache servers, to buy for engines that are asked what TRACE was,
    and what that is worth.

    TRACE is a file (Mooncake JSONL, also .gz, .xz or .zst), or a built-in workload: chat, agent, rag. Every
    number is of a replay, none is interpolated. What cannot be (writes that wear SSDs out, links that are too
    slow, a price above the budget) is shown with the reason and not recommended. Exit code 1 if nothing that
    can be had reaches the target.
    """
    if trace == "-":
        raise ConfigError("trace", "-", "allowed: a file or a name; each process of a plan reads it")
    if report is not None:
        check_report(report, force=force)
    size = block_bytes(model, bytes_per_token, block_tokens_of(trace, block_tokens), kv_cache_dtype)
    if size is None:
        why = "sizes need the bytes of a token: give --model config.json, or --bytes-per-token 128KiB"
        raise ConfigError("model", None, why)
    fleet = Fleet(
        gpus, parse_size("kv-per-gpu", kv_per_gpu), size, read_prices(prices), replicas, routing, load, scale,
        prefill_tokens_per_s,
    )  # fmt: skip
    ttft_p90_s = None if target_ttft_p90 is None else convert("target-ttft-p90", target_ttft_p90, Duration)
    if machine is not None:
        fleet = replace(fleet, machine=find_machine(machine, fleet.gpus_of_engine))
    run = Plan(
        TraceSource(trace, block_tokens, skip_bad_lines),
        fleet,
        Target(budget, target_saved, target_of_ceiling, target_gpu_hours, ttft_p90_s),
        Setups(
            axis("stores", stores), axis("policies", policies), axis("admissions", admissions),
            axis("ssd-policies", ssd_policies), axis("ssd-admissions", ssd_admissions),
            axis("server-admissions", server_admissions),
        ),
        output=output, force=force, jobs=jobs, scheduler=scheduler, seed=seed, resamples=resamples,
        one_in=one_in,
    )  # fmt: skip
    try:
        with without_warnings(), shown(quiet) as on_progress:
            found = run.run(on_progress)
    except KeyboardInterrupt:
        click.echo(f"kvoffload: interrupted{how_to_go_on(run.progress, run.journal_path)}", err=True)
        sys.exit(130)
    except SweepError as error:
        click.echo(f"kvoffload: {error}{how_to_go_on(run.progress, run.journal_path)}", err=True)
        sys.exit(1)
    found = msgspec.structs.replace(found, vllm=_line(found, fleet))
    if report is not None:
        write_report(report, plan_page(found, typed_command()))
    if form == "json":
        click.echo(found.to_json(), nl=False)
    else:
        console = Console()
        for part in tables(found, console.width):
            console.print(part)
        if found.vllm:
            # Not through the console, which folds lines: it is pasted.
            click.echo(f"Each engine ({PLACEHOLDERS}):\n{found.vllm}")
    if found.outcome == Outcome.NOT_REACHED.name:
        sys.exit(1)


def _line(found: PlanAnswer, fleet: Fleet) -> str:
    """The flag for each engine; empty where RAM is not bought."""
    row = found.chosen
    if not row.ram_modules:
        return ""
    given: dict[str, Any] = {
        "cpu_bytes_to_use": _typed(row.ram_bytes // fleet.replicas),
        "policy": row.policy,
        "admission": row.admission,
        "store": row.store,
    }
    if row.ssd_drives:
        size, rules = (
            row.ssd_bytes // fleet.replicas,
            f"policy={row.ssd_policy},admission={row.ssd_admission}",
        )
        given["tiers"] = [f"disk:{_SSD_PATH}:{_typed(size)},{rules}"]
    if row.servers:
        nodes = ",".join(_SERVER.format(number=number + 1) for number in range(row.servers))
        scheme = "valkey+cluster" if row.servers > 1 else "valkey"
        given["tiers"] = [f"{scheme}://{nodes}/kv?admission={row.server_admission}"]
    return as_flag(transfer_config(given, connector=True))


def _typed(num_bytes: int) -> str:
    """A size as people type it, to the byte."""
    for unit, size in (("GiB", 2**30), ("GB", 10**9)):
        if num_bytes % size == 0:
            return f"{num_bytes // size}{unit}"
    return str(num_bytes)
