"""Options that commands share, and the warnings about their values."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import click
import msgspec

from kvoffload.cli.fields import option
from kvoffload.cli.output import check_output
from kvoffload.core.admission import ADMISSIONS
from kvoffload.core.plans import STORES
from kvoffload.core.policy import POLICIES
from kvoffload.errors import ConfigError, Problems
from kvoffload.model import kv_bytes
from kvoffload.replay.engines import QueueLength
from kvoffload.replay.routing import SESSION, Instances, Routing
from kvoffload.settings.read import Count, OneOf, Positive, parse_size
from kvoffload.sweep.bootstrap import MOST_RESAMPLES, RESAMPLES
from kvoffload.tiers.spec import TierOptions, parse_tiers
from kvoffload.traces.sources import load_trace
from kvoffload.traces.trace import MILLISECONDS, SECONDS, Trace

if TYPE_CHECKING:
    from kvoffload.sweep.measuring import Work

_FEWEST_TOKEN_BYTES = 1024
"""Smallest plausible number of KV bytes of a token. A token of a 0.5B model in 16 bits has 12 KiB."""

PolicyName = Annotated[str, POLICIES]
AdmissionName = Annotated[str, ADMISSIONS]
Store = Annotated[str, OneOf(STORES)]
Format = Annotated[str, OneOf(("terminal", "json"))]
Resamples = Annotated[int, msgspec.Meta(ge=1, le=MOST_RESAMPLES)]
TimeUnit = Annotated[str, OneOf((SECONDS, MILLISECONDS))]


def typed_command() -> str:
    """Return the command line as typed, quoted for a shell."""
    return shlex.join(["kvoffload", *sys.argv[1:]])


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Options that determine the KV bytes of a token, to convert sizes such as 64GiB to blocks."""

    model: str | None = option(
        None, "Model, to convert sizes such as 64GiB to blocks.", metavar="CONFIG.JSON|NAME"
    )
    kv_cache_dtype: str = option(
        "auto", "As for vLLM: auto, bfloat16, float16, fp8; with --model.", metavar="DTYPE"
    )
    bytes_per_token: str | None = option(None, "KV bytes per token: 128KiB.", metavar="SIZE")

    def known_block_bytes(self, block_tokens: int) -> int | None:
        """Return the bytes of a block, or None if neither the model nor the bytes of a token are given."""
        size = kv_bytes.block_bytes(self.model, self.bytes_per_token, block_tokens, self.kv_cache_dtype)
        if self.bytes_per_token is not None:
            num_bytes = parse_size("bytes-per-token", self.bytes_per_token)
            if num_bytes < _FEWEST_TOKEN_BYTES:
                why = f"{num_bytes:,} B is less than 1 KiB, and models have more: is it {num_bytes}KiB?"
                _warn_once("small tokens", f"bytes-per-token: {why}")
        return size

    def required_block_bytes(self, block_tokens: int, reason: str) -> int:
        """Return the bytes of a block. If they are unknown, raise `ConfigError` with the text `reason`."""
        size = self.known_block_bytes(block_tokens)
        if size is None:
            why = f"{reason}: give --model config.json, or --bytes-per-token 128KiB"
            raise ConfigError("model", None, why)
        return size


def _warn_once(subject: str, sentence: str) -> None:
    """Print a warning, unless this command has already warned of the `subject`."""
    context, key = click.get_current_context(silent=True), f"kvoffload.cli.options.{subject}"
    if context is not None and not context.meta.get(key):
        context.meta[key] = True
        warn([sentence])


def warn_of_windows(model: str) -> None:
    """Warn once per command if a model has sliding windows. GPUs then hold more tokens than the command
    assumes.
    """
    count, num_layers = kv_bytes.sliding_layers(model)
    if count:
        _warn_once(
            "windows",
            f"model: {count} of {num_layers} layers have a sliding window, so the GPUs hold more tokens than "
            "--kv-per-gpu gives, and RAM saves less: give --gpu-tokens from vLLM's log instead",
        )


def warn_of_copies(model: str, gpus: int, *, has_gpu_tokens: bool) -> None:
    """Warn once per command if several GPUs of an engine store the same KV.

    Together the GPUs then hold fewer tokens than the command assumes.

    Args:
        gpus: number of GPUs of an engine.
        has_gpu_tokens: True if the user gave the number of tokens that the GPUs hold.
    """
    heads = kv_bytes.kv_heads(model)
    if gpus <= max(heads, 1) or (not heads and has_gpu_tokens):
        return
    copies, remedy = f"all {gpus} GPUs of an engine store each block (MLA)", "--gpu-tokens from vLLM's log"
    if heads:
        copies = f"{gpus} GPUs of an engine store {gpus / heads:g} copies of each of the {heads} KV heads"
        remedy = f"--bytes-per-token, {gpus / heads:g} times the model's"
    _warn_once(
        "copies",
        f"model: with tensor parallelism {copies}, so they hold fewer tokens than assumed: give {remedy}, "
        "instead",
    )


@dataclass(frozen=True, kw_only=True)
class ReadOptions:
    """Options to read a trace."""

    block_tokens: Count | None = option(
        None, "Tokens per block, for a trace whose header lacks the number.  [default: 512]"
    )
    skip_bad_lines: bool = option(False, "Skip bad lines, and count them.")
    time_unit: TimeUnit | None = option(
        None, "Unit of the times in a trace without header: s or ms.  [default: ms, s with fractions]"
    )

    def read(self, trace: str, progress: Callable[[float], None] | None = None) -> Trace:
        return load_trace(
            trace,
            block_tokens=self.block_tokens,
            skip_bad_lines=self.skip_bad_lines,
            time_unit=self.time_unit,
            progress=progress,
        )

    def read_requests(self, trace: str) -> Trace:
        """Read a trace. Raises `ConfigError` if the trace has no block."""
        return with_blocks(trace, self.read(trace))


def with_blocks(name: str, trace: Trace) -> Trace:
    """Return `trace`, and print its warnings. Raises `ConfigError` if the trace has no block."""
    trace.check_blocks(name)
    warn(trace.warnings)
    return trace


def warn(sentences: Iterable[str]) -> None:
    """Print warnings, one on a line."""
    for sentence in sentences:
        click.echo(f"kvoffload: {sentence}", err=True)


def warn_of_small_tiers(ram: str, ram_size: int, tiers: Mapping[str, int]) -> None:
    """Warn of each tier that is smaller than the tier (or RAM) in front of it.

    Args:
        ram: size of RAM as typed.
        tiers: mapping: tier as typed -> size in the unit of `ram_size`. The fastest tier comes first.
    """
    before, size_before = f"RAM of {ram}", ram_size
    for tier, tier_size in tiers.items():
        if tier_size < size_before:
            warn([f"tiers: {tier} is smaller than the {before} before it, and saves little"])
        before, size_before = f"tier {tier}", tier_size


@dataclass(frozen=True, kw_only=True)
class FormatOptions:
    """Option for the format of the printed result."""

    form: Format = option("terminal", None, "--format")

    @property
    def is_json(self) -> bool:
        return self.form == "json"


@dataclass(frozen=True, kw_only=True)
class QuietOptions:
    """Option to hide the progress on standard error."""

    quiet: bool = option(False, "Show no progress.")


@dataclass(frozen=True, kw_only=True)
class TiersOptions:
    """Option for the tiers behind RAM."""

    tiers: tuple[str, ...] = option(
        (),
        "Tier behind RAM; simulated:CAPACITY keeps no bytes. Options follow: ,policy=NAME,admission=RULE. "
        "May be repeated.",
        "--tiers",
        "--tier",
        setting="tiers",
        metavar="disk:PATH:CAPACITY",
    )

    def parsed_tiers(self) -> list[TierOptions]:
        """Parse the tiers, from the fastest to the slowest. Raises `ConfigError` for an invalid tier."""
        return [tier for text in self.tiers for tier in parse_tiers("tiers", text)]


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """Options for facts that no trace records: the time at which a request ends, and the number of waiting
    requests."""

    decode_tokens_per_s: Positive | None = option(
        None, "Generation speed in tokens/s: a request ends with its answer. If not given, at once."
    )
    queue_requests: QueueLength = option(
        0, "The next N requests wait in the engine's queue; their blocks are evicted last.", "--queue",
        show_default=False,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class OutputOptions:
    """Options of a command that writes its report to a file."""

    output: Path | None = option(None, "Write the report to a file.", metavar="FILE")
    force: bool = option(False, "Replace existing files.")

    def check_outputs(self, problems: Problems, **others: Path | None) -> None:
        """Check that no output file exists already, unless ``--force`` is given.

        `others`: output files of the command's other options, by name of the option.
        """
        for name, path in {"output": self.output, **others}.items():
            with problems:
                if path is not None:
                    check_output(name, path, force=self.force)


@dataclass(frozen=True, kw_only=True)
class WorkOptions:
    """Options of commands that run many replays: workers, files and confidence intervals."""

    jobs: Count | None = option(None, "Processes; one for each CPU if not given.")
    scheduler: str | None = option(None, "Replay on a running Dask cluster.", metavar="tcp://HOST:PORT")
    output: Path | None = option(None, "File for every row: .csv, .json, .parquet. A later run continues it.")
    report: Path | None = option(
        None, "Write an offline page with charts. Needs kvoffload[report].", metavar="FILE.html"
    )
    force: bool = option(False, "Replace an existing output.")
    seed: int = option(0, "Seed of the confidence intervals.", show_default=True)
    resamples: Resamples = option(RESAMPLES, "Resamples of the confidence intervals.")

    def work(self) -> Work:
        """Return these options as `Work`. Raises `ConfigError` if a value is invalid."""
        from kvoffload.sweep.measuring import Work  # other commands need no workers

        return Work(self.output, self.force, self.jobs, self.scheduler, self.seed, self.resamples)


@dataclass(frozen=True, kw_only=True)
class ReplicaOptions:
    """Option for the rule that assigns requests to engines."""

    routing: Routing = option(SESSION, "Rule that assigns requests to engines.")


@dataclass(frozen=True, kw_only=True)
class InstancesOptions(ReplicaOptions):
    """Options for several engines. Each engine has RAM of the given size, or all engines share one pool."""

    instances: Instances = option(
        1,
        "Number of engines. Each has a device, RAM and tiers of the given sizes; they share the last tier if "
        "it is simulated:CAPACITY.",
    )
    shared_ram: bool = option(
        False, "All N engines of --instances share one RAM pool of N times the given size."
    )

    @property
    def has_managers(self) -> bool:
        """True if each of several engines has its own manager."""
        return self.instances > 1 and not self.shared_ram
