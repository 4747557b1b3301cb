"""The ``kvoffload`` command line. A user's mistake prints one message and exits with code 2."""

from __future__ import annotations

import contextlib
import errno
import importlib
import logging
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any

import click

from kvoffload._version import __version__
from kvoffload.errors import ConfigError, KVOffloadError, MisuseError

_NO_OUTPUT = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
_COMMANDS = {
    "calibrate": ("kvoffload.cli.calibrate:command", "Measure this machine: memory, GPU, disk, server."),
    "canary": ("kvoffload.cli.canary:canary", "Check a server's answers from its caches."),
    "disk": ("kvoffload.cli.disk:disk", "Inspect, verify or delete the directory of a disk tier."),
    "explain": ("kvoffload.cli.explain:command", "Replay a trace; explain why blocks were missed."),
    "metrics": ("kvoffload.cli.metrics:metrics", "Print the dashboard and alert rules of the metrics."),
    "plan": ("kvoffload.cli.plan:plan", "Recommend RAM, SSDs and servers to buy, with their benefit."),
    "policies": ("kvoffload.cli.policies:policies", "List every eviction policy and admission rule."),
    "pool": ("kvoffload.cli.pool:pool", "List or remove RAM pools that engines share."),
    "replay": ("kvoffload.cli.replay:replay", "Replay a trace through the manager; report the saving."),
    "simulate": (
        "kvoffload.cli.simulate:simulate",
        "Replay a trace in simulated time: waiting times, busy links.",
    ),
    "sweep": ("kvoffload.cli.sweep:sweep", "Compare policies, rules and sizes on some traces."),
    "tier": ("kvoffload.cli.tier:tier", "Check a shared cache server: health, contents, break-even."),
    "top": ("kvoffload.cli.top:top", "Show hits, misses and tiers of a running server."),
    "trace": ("kvoffload.cli.trace:trace", "Describe, generate, convert and fit traces."),
    "warm": ("kvoffload.cli.warm:warm", "Compile every kernel now, for container images."),
    "vllm-config": ("kvoffload.cli.vllm_config:vllm_config", "Print the flag that makes vLLM offload."),
}
"""Mapping: command -> its location and help line. Because of these lines, ``kvoffload --help`` need not
import the commands, which would import numba."""


@contextlib.contextmanager
def _no_exit_of_click() -> Iterator[None]:
    """Clear the `errno` of a `BrokenPipeError`. Otherwise click would exit with 1, which is the code of a
    failed check.
    """
    try:
        yield
    except BrokenPipeError:
        raise BrokenPipeError from None


class _Commands(click.Group):
    """Command group that imports a command on demand."""

    def make_context(self, *arguments: Any, **keywords: Any) -> click.Context:
        with _no_exit_of_click():
            return super().make_context(*arguments, **keywords)

    def invoke(self, ctx: click.Context) -> Any:
        with _no_exit_of_click():
            return super().invoke(ctx)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module, _, attribute = _COMMANDS[cmd_name][0].partition(":")
        compiling = logging.getLogger("kvoffload.compiling")
        if not compiling.handlers:
            compiling.addHandler(logging.StreamHandler())
            compiling.setLevel(logging.INFO)
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in sorted(_COMMANDS.items())])


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="kvoffload")
def cli() -> None:
    """Offload an LLM server's KV cache to RAM, disks and cache servers, and measure the benefit."""


@contextlib.contextmanager
def _plugins_reported() -> Iterator[None]:
    """Report an exception in a class of the user, such as a policy, and exit with code 2."""
    try:
        yield
    except (click.exceptions.Exit, click.ClickException, click.Abort, ConfigError):
        raise
    except Exception as error:
        from kvoffload.settings.plugin_failure import plugin_failure  # needless for most commands

        if (failure := plugin_failure(error)) is None:
            raise
        click.echo(f"kvoffload: {failure.summary}\n{failure.traceback}", err=True, nl=False)
        sys.exit(2)


@contextlib.contextmanager
def _interrupts_kept() -> Iterator[None]:
    """Raise `KeyboardInterrupt` instead of an exception that an interrupt has caused.

    If Ctrl-C interrupts a callback from C code, such as LLVM's, Python drops the `KeyboardInterrupt`. numba
    then fails with another exception.
    """
    received = list[int]()

    def handle(number: int, frame: object) -> None:
        received.append(number)
        raise KeyboardInterrupt

    is_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # ignored in background jobs
    if not is_default or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, handle)
    try:
        yield
    except Exception:
        if received:
            raise KeyboardInterrupt from None
        raise
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def main() -> None:
    try:
        with _interrupts_kept(), _plugins_reported():
            cli.main(standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except MisuseError:
        raise  # a bug of kvoffload: the traceback shows its place
    except KVOffloadError as error:
        click.echo(f"kvoffload: {error}", err=True)
        sys.exit(2)
    except (click.Abort, KeyboardInterrupt):
        click.echo("kvoffload: interrupted", err=True)
        sys.exit(130)
    except BrokenPipeError:
        # The reader of our output has closed the pipe (``| head``). Python would report this again at exit.
        sys.stdout = None
        sys.exit(141)
    except OSError as error:
        if error.errno not in _NO_OUTPUT:
            raise
        sys.stdout = None  # Python would report the same error again at exit
        click.echo(f"kvoffload: the output cannot be written ({error.strerror})", err=True)
        sys.exit(2)
