"""``kvoffload``: the command line. Parses, calls, prints; a user's error is one line and exit code 2."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import click

from kvoffload._version import __version__
from kvoffload.errors import ConfigError, PolicyError, TraceError

_COMMANDS = {
    "disk": "kvoffload.cli.disk:disk",
    "policies": "kvoffload.cli.policies:policies",
    "replay": "kvoffload.cli.replay:replay",
    "sweep": "kvoffload.cli.sweep:sweep",
    "trace": "kvoffload.cli.trace:trace",
    "vllm-config": "kvoffload.cli.vllm_config:vllm_config",
}
_KERNEL_CACHE = Path(__file__).resolve().parent.parent / "structures" / "__pycache__"


class _Commands(click.Group):
    """Imports a command when it is asked for: ``--help`` must not wait for numba."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        module, _, attribute = _COMMANDS.get(cmd_name, "").partition(":")
        if not attribute:
            return None
        if sys.stderr.isatty() and not any(_KERNEL_CACHE.glob("*.nbi")):
            click.echo("kvoffload: compiling kernels, once for this installation (about 10 s) ...", err=True)
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command


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
        # The reader of our output has gone (``| head``); Python would complain once more at exit.
        sys.stdout = None
        sys.exit(141)
