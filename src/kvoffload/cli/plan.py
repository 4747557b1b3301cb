"""``kvoffload plan``: recommend hardware for a fleet of engines, from a recording of their requests."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
import msgspec

from kvoffload.cli.check_table import exit_with
from kvoffload.cli.fields import argument, option, options_of
from kvoffload.cli.machine import MACHINE_HELP, find_machine
from kvoffload.cli.options import (
    FormatOptions,
    ModelOptions,
    QuietOptions,
    ReadOptions,
    ReplicaOptions,
    WorkOptions,
    typed_command,
    warn,
    warn_of_copies,
    warn_of_windows,
)
from kvoffload.cli.output import Terminal, tiers_silenced
from kvoffload.cli.plan_tables import tables
from kvoffload.cli.replay import ServerOptions
from kvoffload.cli.sweep_progress import shown, stopping_cleanly
from kvoffload.cli.vllm_config import as_flag, transfer_config
from kvoffload.errors import ConfigError, Problems
from kvoffload.pages.page import check_report, write_report
from kvoffload.pages.plan import plan_page
from kvoffload.plan.fleet import Fleet
from kvoffload.plan.plan import Plan, PlanAnswer
from kvoffload.plan.present import Present, present_of
from kvoffload.plan.prices import as_toml, read_prices
from kvoffload.plan.setups import Setups
from kvoffload.plan.targets import Outcome, Target
from kvoffload.plan.words import PLACEHOLDERS
from kvoffload.settings.read import Count, Duration, Factor, Positive, Size
from kvoffload.sweep.grid import axis
from kvoffload.sweep.task import TraceSource
from kvoffload.traces.compressed import is_stream
from kvoffload.traces.sources import block_tokens_of

_SSD_PATH = "/data/kv"
"""Placeholder for the path of the SSDs in the flag for vLLM."""
_SERVER = "cache-server-{number}:6379"
"""Placeholder for the address of a cache server in the flag for vLLM."""


def _show_prices(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value:
        click.echo(as_toml(read_prices(None)), nl=False)
        ctx.exit()


@dataclass(frozen=True, kw_only=True)
class PlanOptions(
    WorkOptions, ReplicaOptions, ModelOptions, ServerOptions, ReadOptions, FormatOptions, QuietOptions
):
    trace: str = argument()
    gpus: Count = option(help="GPUs of all engines together.")
    kv_per_gpu: Size | None = option(None, "Memory for KV blocks on each GPU: 64GB.")
    gpu_tokens: Count | None = option(
        None,
        "Instead of --kv-per-gpu: tokens in the KV cache of one engine, as vLLM logs them (GPU KV cache "
        "size). Needed for models with sliding windows, of which a GPU holds more tokens.",
    )
    replicas: Count = option(1, "Number of engines; each gets an equal share of the GPUs.")
    shared_ram: bool = option(
        False, "Also consider one RAM pool in each host for all engines of the host, instead of one each."
    )
    load: Factor = option(
        1.0, "Concurrent sessions, as a multiple of the recording's.", metavar="2x", show_default=False
    )
    scale: Factor = option(
        1.0, "Requests of the fleet, as a multiple of the recording's.", metavar="2.5", show_default=False
    )
    budget: float | None = option(None, "Highest price.", metavar="MONEY")
    target_saved: float | None = option(None, "Save this share of the prefill: 0.3.", metavar="SHARE")
    target_of_ceiling: float | None = option(
        None, "Save this share of the savings of an unlimited cache: 0.8.", metavar="SHARE"
    )
    target_gpu_hours: float | None = option(None, "Save this many GPU-hours a day.", metavar="HOURS")
    target_ttft_p90: Duration | None = option(
        None, "Limit the 90th percentile of the time to first token: 1.5s, 800ms. Needs --machine."
    )
    prefill_tokens_per_s: Positive | None = option(
        None, "Prefill speed of one GPU in tokens/s.  [default: the machine's]"
    )
    machine: str | None = option(
        None, f"Machine of one engine, for waiting times: {MACHINE_HELP}", metavar="FILE|CLASS[:PARAMETERS]"
    )
    prices: Path | None = option(None, "Your prices, as TOML or JSON.", metavar="FILE")
    stores: str = option(",".join(Setups.stores), "Moments at which blocks are offered to RAM.")
    policies: str = option(",".join(Setups.policies), "Eviction policies of RAM.")
    admissions: str = option(",".join(Setups.admissions), "Admission rules of RAM.")
    ssd_policies: str = option(",".join(Setups.ssd_policies), "Eviction policies of SSDs.")
    ssd_admissions: str = option(",".join(Setups.ssd_admissions), "Admission rules of SSDs.")
    ssd_budget_admissions: str = option(
        ",".join(Setups.ssd_budget_admissions),
        "Admission rules of SSDs with a write budget, for SSDs that would wear out.",
    )
    server_admissions: str = option(
        ",".join(Setups.server_admissions), "Admission rules of shared cache servers."
    )
    one_in: Count | None = option(
        None,
        "Search on one in N sessions, and measure the answer on all.  [default: by length of the recording]",
        "--sample",
    )  # fmt: skip

    def check(self) -> None:
        """Check everything before the trace is read. Raises `ConfigError`, all problems at once."""
        if is_stream(Path(self.trace)):
            why = "allowed: a file or a name, because each process of a plan reads the trace"
            raise ConfigError("trace", self.trace, why)
        problems = Problems("plan")
        with problems:
            if self.report is not None:
                check_report(self.report, force=self.force)
        for build in (self.fleet, self.target, self.setups):
            with problems:
                build()
        problems.check()

    def fleet(self) -> Fleet:
        """Create the fleet: engines, traffic, prices. Raises `ConfigError` if an option is invalid."""
        block_tokens = block_tokens_of(self.trace, self.block_tokens)
        size = self.required_block_bytes(block_tokens, "sizes need the bytes of a token")
        if (self.kv_per_gpu is None) == (self.gpu_tokens is None):
            why = "give one of --kv-per-gpu 64GB and --gpu-tokens 1234567 (vLLM's log: GPU KV cache size)"
            raise ConfigError("kv-per-gpu", self.kv_per_gpu, why)
        if self.gpu_tokens is not None and self.gpu_tokens < block_tokens:
            why = f"it is less than a block of {block_tokens} tokens"
            raise ConfigError("gpu-tokens", self.gpu_tokens, why)
        if self.gpu_tokens is None and self.model is not None:
            warn_of_windows(self.model)
        fleet = Fleet(
            self.gpus, self.kv_per_gpu or 0, size, read_prices(self.prices), self.replicas, self.routing,
            self.load, self.scale, self.prefill_tokens_per_s or 0.0, shared_ram=self.shared_ram,
            gpu_blocks=(self.gpu_tokens or 0) // block_tokens,
        )  # fmt: skip
        if self.model is not None:
            warn_of_copies(self.model, fleet.gpus_of_engine, has_gpu_tokens=self.gpu_tokens is not None)
        if self.machine is None:
            return fleet
        return replace(fleet, machine=find_machine(self.machine, fleet.gpus_of_engine))

    def target(self) -> Target:
        """Return the target that the purchase must reach. Raises `ConfigError` if the target is invalid."""
        return Target(
            self.budget, self.target_saved, self.target_of_ceiling, self.target_gpu_hours,
            self.target_ttft_p90,
        )  # fmt: skip

    def setups(self) -> Setups:
        """Return the store modes, policies and admission rules to try. Raises `ConfigError` for an unknown
        name.
        """
        return Setups(
            axis("stores", self.stores), axis("policies", self.policies),
            axis("admissions", self.admissions), axis("ssd-policies", self.ssd_policies),
            axis("ssd-admissions", self.ssd_admissions), axis("server-admissions", self.server_admissions),
            axis("ssd-budget-admissions", self.ssd_budget_admissions),
        )  # fmt: skip

    def present(self, fleet: Fleet) -> Present | None:
        """Return the server of ``--check`` with its set-up; None without ``--check``.

        Raises `ConfigError` if the metrics of the server cannot be read.
        """
        if (server := self.served()) is None:
            return None
        block_tokens = block_tokens_of(self.trace, self.block_tokens)
        return present_of(server, fleet, self.setups(), block_tokens)


@click.command()
@options_of(PlanOptions)
@click.option("--show-prices", is_flag=True, is_eager=True, expose_value=False, callback=_show_prices,
              help="Print a file of prices with the defaults, and exit.")  # fmt: skip
def plan(options: PlanOptions) -> None:
    """Recommend RAM, SSDs and cache servers to buy for engines that serve the requests of TRACE.

    TRACE is a file (Mooncake JSONL, also .gz, .xz or .zst), or a built-in workload: chat, agent, rag. Every
    number comes from a replay; none is interpolated. Infeasible purchases (too many writes for the SSDs,
    links too slow, price above the budget) are shown with the reason. Exit code 1 if no feasible purchase
    reaches the target.

    With --check the present set-up of a running server is also replayed, and the result is compared with the
    server's metrics. The exit code is 1 if they differ, and 3 if server and recording have different
    requests.
    """
    fleet = options.fleet()
    present = options.present(fleet)
    run = Plan(
        TraceSource(
            options.trace, options.block_tokens, options.skip_bad_lines, time_unit=options.time_unit
        ),
        fleet, options.target(), options.setups(),
        work=options.work(), one_in=options.one_in, present=present,
    )  # fmt: skip
    with stopping_cleanly(run), tiers_silenced(), shown(options.quiet) as on_progress:
        answer = run.run(on_progress)
    answer = msgspec.structs.replace(answer, vllm=_vllm_flag(answer, fleet))
    warn(answer.warnings)
    if options.is_json:
        click.echo(answer.to_json(), nl=False)
    else:
        console = Terminal()
        for part in tables(answer, console.width):
            console.print(part)
        if answer.vllm:
            # Not printed by rich, because it would wrap the flag, which users paste.
            click.echo(f"Each engine ({PLACEHOLDERS}):\n{answer.vllm}")
    if options.report is not None:
        write_report(options.report, plan_page(answer, typed_command()))
    if answer.outcome == Outcome.NOT_REACHED.name:
        sys.exit(1)
    exit_with(answer.check)


def _vllm_flag(answer: PlanAnswer, fleet: Fleet) -> str:
    """Return the flag for each engine, or an empty text if no RAM is bought."""
    row = answer.chosen
    if not row.ram_modules:
        return ""
    ram: dict[str, Any] = {"cpu_bytes_to_use": _exact_size(row.ram_bytes // fleet.replicas)}
    if row.shared_ram:
        ram = {"ram": {"size": _exact_size(row.ram_bytes // fleet.hosts), "shared": "node"}}
    given: dict[str, Any] = {
        **ram,
        "policy": row.policy,
        "admission": row.admission,
        "store": row.store,
    }
    if row.ssd_drives:
        size = _exact_size(row.ssd_bytes // fleet.replicas)
        rules = f"policy={row.ssd_policy},admission={row.ssd_admission}"
        if row.ssd_write_budget:
            rules += f",max_write_bytes_per_day={_exact_size(row.write_budget_bytes // fleet.replicas)}"
        given["tiers"] = [f"disk:{_SSD_PATH}:{size},{rules}"]
    if row.servers:
        nodes = ",".join(_SERVER.format(number=number + 1) for number in range(row.servers))
        scheme = "valkey+cluster" if row.servers > 1 else "valkey"
        given["tiers"] = [f"{scheme}://{nodes}/kv?admission={row.server_admission}"]
    return as_flag(transfer_config(given, connector=True))


def _exact_size(num_bytes: int) -> str:
    """Format a size without rounding: ``64GiB``."""
    for unit, size in (("GiB", 2**30), ("GB", 10**9)):
        if num_bytes % size == 0:
            return f"{num_bytes // size}{unit}"
    return str(num_bytes)
