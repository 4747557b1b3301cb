"""``kvoffload``: the command line. Parses, calls, prints; a user's error is one line and exit code 2."""

from __future__ import annotations

import importlib
import logging
import sys

import click

from kvoffload._version import __version__
from kvoffload.errors import ConfigError, PolicyError, TraceError

_COMMANDS = {
    "calibrate": ("kvoffload.cli.calibrate:command", "Measure this machine: memory, GPU, disk, server."),
    "disk": ("kvoffload.cli.disk:disk", "Look into the directory of a disk tier, or delete it."),
    "plan": ("kvoffload.cli.plan:plan", "Say how much RAM and SSD to buy, and what that is worth."),
    "policies": ("kvoffload.cli.policies:policies", "List every eviction policy and admission rule."),
    "replay": ("kvoffload.cli.replay:replay", "Run a trace through the manager; say what it saved."),
    "simulate": ("kvoffload.cli.simulate:simulate", "Run a trace on a machine, in time: who waits how long."),
    "sweep": ("kvoffload.cli.sweep:sweep", "Compare policies, rules and sizes on some traces."),
    "tier": ("kvoffload.cli.tier:tier", "Ask a server that machines share: is it well, is it worth it?"),
    "trace": ("kvoffload.cli.trace:trace", "Describe traces, and make some."),
    "warm": ("kvoffload.cli.warm:warm", "Compile every kernel now: for images of containers."),
    "vllm-config": ("kvoffload.cli.vllm_config:vllm_config", "Print the flag that makes vLLM offload."),
}
"""Where each command stands, and its line in the help: to list them must not wait for numba."""


class _Commands(click.Group):
    """Imports a command when it is asked for."""

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
    """Keep an LLM server's KV-cache blocks in RAM and behind it, and prove what that is worth."""


def main() -> None:
    """Run the command line."""
    try:
        cli.main(standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (ConfigError, PolicyError, TraceError) as error:
        click.echo(f"kvoffload: {error}", err=True)
        sys.exit(2)
    except (click.Abort, KeyboardInterrupt):
        click.echo("kvoffload: interrupted", err=True)
        sys.exit(130)
    except BrokenPipeError:
        # The reader of our output has gone (``| head``); Python would complain again at exit.
        sys.stdout = None
        sys.exit(141)
