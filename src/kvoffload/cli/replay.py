"""``kvoffload replay``: run a trace through the offloading manager, with real bytes."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from pathlib import Path

import click

from kvoffload.calls.file_format import is_recording
from kvoffload.check.check import Prediction, check
from kvoffload.check.served import Served, read_served
from kvoffload.cli.check_table import exit_with, show_checked
from kvoffload.cli.fields import argument, option, options_of
from kvoffload.cli.options import (
    AdmissionName,
    FormatOptions,
    InstancesOptions,
    LoadOptions,
    ModelOptions,
    OutputOptions,
    PolicyName,
    QuietOptions,
    ReadOptions,
    Store,
    TiersOptions,
    warn,
    warn_of_small_tiers,
)
from kvoffload.cli.output import progress_bar, writable
from kvoffload.cli.replay_calls import check_alone, replay_calls
from kvoffload.cli.replay_table import table
from kvoffload.core.plans import ON_COMPUTE, ON_DEVICE_EVICTION
from kvoffload.core.quotas import ONE_OWNER, Quotas, read_quotas
from kvoffload.core.tenants import Quota
from kvoffload.errors import ConfigError, Problems
from kvoffload.replay.config import ReplayConfig, slots_needed
from kvoffload.replay.data import DataPlane
from kvoffload.replay.faults import Injection, parse_injection
from kvoffload.replay.instances import SharedReplay
from kvoffload.replay.members import replica_name
from kvoffload.replay.replay import Replay
from kvoffload.settings.read import ANY_TRACE, Size, parse_capacity
from kvoffload.sweep.grid import device_blocks
from kvoffload.text import size
from kvoffload.tiers.memory import available_bytes
from kvoffload.tiers.spec import SizedTierOptions
from kvoffload.traces.sources import block_tokens_of
from kvoffload.traces.trace import Trace
from kvoffload.whatif import WhatIf
from kvoffload.whatif.setting import OneIn, WhatIfParser
from kvoffload.whatif.shadows import ONE_IN


@dataclass(frozen=True, kw_only=True)
class CacheOptions(
    InstancesOptions, TiersOptions, ModelOptions, ReadOptions, FormatOptions, OutputOptions, QuietOptions
):
    """Options of ``kvoffload replay``, ``simulate`` and ``explain``: the trace and the caches."""

    trace: str = argument("chat")
    policy: PolicyName = option("lru", "Eviction policy: a name, or module:Class.", setting="policy")
    admission: AdmissionName = option(
        "all", "Admission rule: all, reuse:N, tinylfu or worth.", setting="admission"
    )
    capacity: str = option(
        "5%", "Capacity of RAM: 5000 (blocks), 5% (of the unique blocks), 4GiB.", setting="ram"
    )
    device_blocks: str = option(
        "0", "LRU device cache in front: 0 (none), a capacity as above, or 0.5x of RAM."
    )
    store: Store = option(ON_COMPUTE, "Moment at which a block is offered to RAM.", setting="store")
    tenants: str | None = option(
        None,
        'Quotas of tenants of the trace: {"a": {"min": "10GiB", "max": "5%", "tiers": {"disk": {"min": '
        '"1TiB"}}}}. Sizes as --capacity.',
        metavar="JSON",
    )

    def check_sizes(self, problems: Problems, block_bytes: int | None) -> None:
        """Check the capacities as far as possible, before the trace is read."""
        with problems:
            parse_capacity("capacity", self.capacity, block_bytes, ANY_TRACE)
        with problems:
            device_blocks(self.device_blocks, ANY_TRACE, block_bytes, ANY_TRACE)
        with problems:
            self.quotas(ANY_TRACE, block_bytes)
        with problems:
            tiers = tuple(self.parsed_tiers())
            ReplayConfig(
                1, store=self.store, tiers=tiers, instances=self.instances, shared_ram=self.shared_ram
            )

    def quotas(self, unique_blocks: int, block_bytes: int | None) -> Quotas:
        """Parse ``--tenants``. Raises `ConfigError` for invalid quotas."""

        def blocks(option: str, value: object) -> int:
            return parse_capacity(option, str(value), block_bytes, unique_blocks)

        if self.tenants is None:
            return Quotas({}, {})
        if self.store == ON_DEVICE_EVICTION:
            raise ConfigError("tenants", self.tenants, ONE_OWNER)
        return read_quotas("tenants", self.tenants, blocks)

    def config(self, trace: Trace, block_bytes: int | None) -> ReplayConfig:
        """Create the configuration of the caches and of tenants' quotas, with sizes in blocks of `trace`."""
        quotas = self.quotas(trace.unique_blocks, block_bytes)
        blocks = parse_capacity("capacity", self.capacity, block_bytes, trace.unique_blocks)
        typed = self.parsed_tiers()
        tiers = tuple(tier.in_blocks(block_bytes, trace.unique_blocks) for tier in typed)
        if blocks > trace.unique_blocks:
            warn([f"capacity: {self.capacity} is {blocks:,} blocks, but {trace.name} has only "
                  f"{trace.unique_blocks:,} different blocks: RAM is never full"])  # fmt: skip
        sizes = {str(given): tier.num_blocks for given, tier in zip(typed, tiers, strict=True)
                 if isinstance(tier, SizedTierOptions)}  # fmt: skip
        warn_of_small_tiers(self.capacity, blocks, sizes)
        return ReplayConfig(
            blocks,
            self.policy,
            self.admission,
            device_blocks(self.device_blocks, blocks, block_bytes, trace.unique_blocks),
            self.store,
            tiers,
            instances=self.instances,
            routing=self.routing,
            shared_ram=self.shared_ram,
            tenants={name: Quota(*quota) for name, quota in quotas.ram.items()},
            tier_tenants={
                tier: {name: Quota(*quota) for name, quota in of_tier.items()}
                for tier, of_tier in quotas.tiers.items()
            },
        )


@dataclass(frozen=True, kw_only=True)
class LoadedCacheOptions(CacheOptions, LoadOptions):
    """Options of replays without simulated time: the caches and the assumed load."""

    def config(self, trace: Trace, block_bytes: int | None) -> ReplayConfig:
        """Create the configuration of the replay: caches, decode speed and number of waiting requests."""
        return replace(
            super().config(trace, block_bytes),
            decode_tokens_per_s=self.decode_tokens_per_s or 0.0,
            queue_requests=self.queue_requests,
        )


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Options to compare a result with the metrics of a server."""

    server: str | None = option(
        None,
        "Compare the result with the metrics of the server that made the recording: http://HOST:PORT, or a "
        "file with saved metrics.",
        "--check",
        metavar="URL|FILE",
    )
    since: str | None = option(
        None,
        "With --check: metrics saved when the recording began, if the server ran before.",
        metavar="FILE",
    )

    def served(self) -> Served | None:
        """Read the metrics of the server of ``--check``; None without ``--check``. Raises `ConfigError` if
        this fails.
        """
        if self.server is None:
            if self.since is not None:
                raise ConfigError("since", self.since, "it needs --check")
            return None
        now = read_served("check", self.server)
        return now if self.since is None else now.since(read_served("since", self.since))


@dataclass(frozen=True, kw_only=True)
class ReplayOptions(LoadedCacheOptions, ServerOptions):
    block_bytes: Size = option(
        "64KiB", "Bytes to copy and verify per block, instead of the real size; a multiple of 8."
    )
    no_data: bool = option(False, "Replay only the decisions, without bytes.")
    inject: str | None = option(
        None, "Damage stored blocks on purpose: bitflip:1e-4, swap, ...", metavar="KIND:RATE"
    )
    seed: int = option(0, "Seed of --inject.", show_default=True)
    decisions: Path | None = option(None, "Write every decision to a file.")
    what_if: tuple[str, ...] = option(
        (),
        "Estimate the hit ratio of another setting of RAM on a sample: policy=hazard, admission=reuse:2, "
        "capacity=2 (twice the capacity), or several separated by commas. May be repeated.",
        metavar="SETTING",
    )
    what_if_sample: OneIn = option(ONE_IN, "Sample one block in N for --what-if.", show_default=True)
    as_recorded: bool = option(
        False, "TRACE is a recording of calls (NAME.calls): repeat them and compare every decision."
    )

    def check(self) -> None:
        """Check everything that does not need the trace. Raises `ConfigError`, all problems at once."""
        problems, block_tokens, block_bytes = Problems("replay"), 1, None
        self.check_outputs(problems, decisions=self.decisions)
        if self.as_recorded:
            with problems:
                check_alone()
            problems.check()
            return
        if is_recording(Path(self.trace)):
            raise ConfigError("trace", self.trace, "it is a recording of calls: add --as-recorded")
        with problems:
            block_tokens = block_tokens_of(self.trace, self.block_tokens)
        with problems:
            block_bytes = self.known_block_bytes(block_tokens)
        if self.block_bytes % 8:
            problems.add("block-bytes", self.block_bytes, "allowed: a multiple of 8 bytes")
        with problems:
            if self.injection() is not None and self.no_data:
                raise ConfigError("inject", self.inject, "it needs bytes to damage: leave out --no-data")
        with problems:
            if self.has_managers:
                self._check_managers()
        with problems:
            ReplayConfig(1, store=self.store, instances=self.instances, what_if=self.what_ifs())
        self.check_sizes(problems, block_bytes)
        problems.check()

    def what_ifs(self) -> tuple[WhatIf, ...]:
        """Parse ``--what-if``. Raises `ConfigError` for an invalid setting."""
        return WhatIfParser().parse("what-if", self.what_if) if self.what_if else ()

    def _check_managers(self) -> None:
        tiers = self.parsed_tiers()
        if self.decisions is not None:
            why = "instances with separate RAM have no common log: leave it out, or use --shared-ram"
            raise ConfigError("decisions", str(self.decisions), why)
        if tiers and not self.no_data:
            why = "with separate RAM the tiers of several instances are simulated: add --no-data"
            raise ConfigError("instances", self.instances, why)
        if tiers and not isinstance(tiers[-1], SizedTierOptions):
            raise ConfigError("tiers", str(tiers[-1]), "with several instances allowed: simulated:CAPACITY")

    def config(self, trace: Trace, block_bytes: int | None) -> ReplayConfig:
        return replace(
            super().config(trace, block_bytes), what_if=self.what_ifs(), what_if_sample=self.what_if_sample
        )

    def injection(self) -> Injection | None:
        """Parse ``--inject``. Raises `ConfigError` for an unknown fault."""
        return parse_injection(self.inject, self.seed) if self.inject else None

    def data(self, trace: Trace, config: ReplayConfig) -> list[DataPlane]:
        """Create for each manager a data plane, which stores the bytes of blocks. The list is empty with
        ``--no-data``.

        Raises: `ConfigError` if the blocks do not fit in the free memory.
        """
        if self.no_data:
            return []
        managers = config.instances if self.has_managers else 1
        slots, available = slots_needed(trace, config.pool_blocks), available_bytes()
        needed = managers * slots * self.block_bytes
        if needed > available:
            raise ConfigError(
                "capacity",
                self.capacity,
                f"{managers * slots:,} blocks of {size(self.block_bytes)} need {size(needed)} of memory, and "
                f"{size(available)} are available; use a smaller --capacity or --block-bytes, or --no-data",
            )
        injections = [
            parse_injection(self.inject, self.seed + number) if self.inject else None
            for number in range(managers)
        ]
        return [DataPlane(slots, self.block_bytes, injection) for injection in injections]


@click.command()
@options_of(ReplayOptions)
def replay(options: ReplayOptions) -> None:
    """Replay TRACE through the offloading manager and report the saving.

    TRACE is a file (Mooncake JSONL, also .gz, .xz or .zst), or a built-in workload: chat, agent, rag. Blocks
    are stored, evicted, loaded and verified with real bytes. The bytes of a block are computed from its key,
    so every wrong byte is found. The exit code is 1 if a wrong byte was served. With --check the exit code is
    also 1 if the server's numbers differ, and it is 3 if server and recording have different requests.

    With `--as-recorded`, TRACE is an engine's recording of calls. The calls are repeated on a new manager,
    and every decision is compared. The replay ends at the first difference, shows it with its context, and
    exits with code 1. Give NAME.calls to replay all parts of the recording that exist, or NAME.part3.calls to
    replay only this part.
    """
    if options.as_recorded:
        path = Path(options.trace)
        if not replay_calls(path, is_json=options.is_json, output=options.output, quiet=options.quiet):
            raise SystemExit(1)
        return
    served = options.served()
    loaded, injection = options.read_requests(options.trace), options.injection()
    config = options.config(loaded, options.known_block_bytes(loaded.block_tokens))
    if not options.no_data:
        _announce_files(config, options.block_bytes)
    with contextlib.ExitStack() as stack:
        log = stack.enter_context(writable("decisions", options.decisions)) if options.decisions else None
        data = options.data(loaded, config)
        for plane in data:
            stack.callback(plane.close)
        run: Replay | SharedReplay
        if options.has_managers:
            run = SharedReplay(loaded, config, data)
        else:
            run = Replay(loaded, config, data[0] if data else None, log)
        with progress_bar("replay", loaded.requests, options.quiet) as progress:
            report = run.run(progress)
    checked = None
    if served is not None:
        block_bytes = options.known_block_bytes(loaded.block_tokens)
        checked = check(served, Prediction.of_replay(report, loaded, block_bytes))
    show_checked(report, table(report), checked, is_json=options.is_json, output=options.output)
    if injection is not None and not options.is_json:
        click.echo(f"  Damage: {injection.kind}, seed {injection.seed}", err=True)
    if report.mismatches_served:
        raise SystemExit(1)
    exit_with(checked)


def _announce_files(config: ReplayConfig, block_bytes: int) -> None:
    """Print the disk space that the replay will take, and the commands that free it."""
    num_engines = config.engines_of_pool
    names = [replica_name(engine, num_engines) for engine in range(num_engines)]
    for tier in config.tiers:
        for path in getattr(tier, "path", ()):
            each = " in each of its subdirectories" if num_engines > 1 else ""
            commands = "; ".join(f"kvoffload disk rm {Path(path) / name}" for name in names)
            click.echo(
                f"kvoffload: {path} takes up to {size(tier.num_blocks * block_bytes)}{each} and stays; "
                f"delete it with: {commands}",
                err=True,
            )
