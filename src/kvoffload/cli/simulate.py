"""``kvoffload simulate``: replay a trace on a machine in simulated time; estimate waits and GPU savings."""

from __future__ import annotations

from dataclasses import dataclass

import click

from kvoffload.check.check import Prediction, check
from kvoffload.cli.check_table import exit_with, show_checked
from kvoffload.cli.fields import option, options_of
from kvoffload.cli.machine import DEFAULT_MACHINE, MACHINE_HELP, find_machine
from kvoffload.cli.output import progress_bar, tiers_silenced
from kvoffload.cli.replay import CacheOptions, ServerOptions
from kvoffload.cli.simulate_table import table
from kvoffload.errors import ConfigError, Problems
from kvoffload.settings.read import Count, CountOrNothing, Factor
from kvoffload.simulate.config import Timing
from kvoffload.simulate.timed import NO_TIERS_TO_SHARE, replay_in_time


@dataclass(frozen=True, kw_only=True)
class SimulateOptions(CacheOptions, ServerOptions):
    machine: str = option(DEFAULT_MACHINE, f"Machine: {MACHINE_HELP}", metavar="FILE|CLASS[:PARAMETERS]")
    device_blocks: str = option("1x", "KV blocks of the device: a capacity as for RAM, or 0.5x of RAM.")
    load: Factor = option(1.0, "Arrival rate of sessions, as a multiple of the recording's: 2, 0.5, 2x.")
    at_once: CountOrNothing = option(
        0, "Keep N requests in flight and ignore the recorded times.", show_default=False
    )
    max_running: Count = option(256, "Most concurrent requests of the engine.")
    step_tokens: Count = option(8192, "Prompt tokens that the engine computes in a step.")

    def timing(self, block_tokens: int) -> Timing:
        """Create the assumptions: machine, engine, load. Raises `ConfigError` if an option is invalid."""
        size = self.required_block_bytes(block_tokens, "copies need the bytes of a token")
        machine = find_machine(self.machine)
        return Timing(machine, size, self.max_running, self.step_tokens, self.load, self.at_once)

    def check(self) -> None:
        """Check everything that does not need the trace. Raises `ConfigError`, all problems at once."""
        problems, block_bytes = Problems("simulate"), None
        with problems:
            block_bytes = self.timing(1).block_bytes
        with problems:
            if self.has_managers and self.parsed_tiers():
                raise ConfigError("instances", self.instances, NO_TIERS_TO_SHARE)
        self.check_outputs(problems)
        if block_bytes is not None:
            self.check_sizes(problems, block_bytes)
        problems.check()


@click.command()
@options_of(SimulateOptions)
def simulate(options: SimulateOptions) -> None:
    """Replay TRACE in simulated time on a machine, once with offloading and once without.

    TRACE, policies and sizes are as for `kvoffload replay`. Concurrent requests compete for the GPU, for
    copies and for disks. The time of a copy depends on the bytes of a token, so give --model or
    --bytes-per-token. With --check the exit code is 1 if the server's numbers differ, and 3
    if server and recording have different requests.
    """
    served = options.served()
    loaded = options.read_requests(options.trace)
    timing = options.timing(loaded.block_tokens)
    config = options.config(loaded, timing.block_bytes)
    with tiers_silenced(), progress_bar("simulate", 2 * loaded.requests, options.quiet) as progress:
        report = replay_in_time(loaded, config, timing, progress)
    checked = None if served is None else check(served, Prediction.of_simulation(report, loaded))
    show_checked(report, table(report), checked, is_json=options.is_json, output=options.output)
    exit_with(checked)
