"""``kvoffload calibrate``: measure this machine, for ``kvoffload simulate`` and for plans."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import click

from kvoffload.calibration.calibrate import Calibration, calibrate
from kvoffload.cli.fields import option, options_of
from kvoffload.cli.output import Terminal, check_output, terminal_table, write_output
from kvoffload.errors import Problems
from kvoffload.pages.page import Table
from kvoffload.settings.read import Count, Size
from kvoffload.simulate.classes import parse_class
from kvoffload.simulate.machine import QUANTITIES, Machine, Quantity


@dataclass(frozen=True, kw_only=True)
class CalibrateOptions:
    out: Path | None = option(None, "File for the machine, as JSON.", metavar="FILE")
    disk: Path | None = option(None, "Directory on the disk to measure; it is left unchanged.", metavar="DIR")
    url: str | None = option(None, "OpenAI-compatible server that is running: http://HOST:PORT.")
    served_model: str | None = option(
        None, "Model of that server.  [default: its first]", "--model", metavar="NAME"
    )
    rest_from: str | None = option(
        None, "Machine class, for all quantities that are not measured: h100-pcie5:8B.",
        metavar="CLASS[:PARAMETERS]",
    )  # fmt: skip
    name: str = option("measured", "Name of the machine, for reports.")
    block_bytes: Size = option("2MiB", "Bytes of a copied block.")
    total_bytes: Size = option(
        "512MiB", "Bytes of one measurement; it takes up to three times as many bytes of disk and memory."
    )
    repeats: Count = option(7, "Repetitions of every measurement.")
    step_tokens: Count = option(8192, "Tokens that the server computes in a step (--max-num-batched-tokens).")
    force: bool = option(False, "Replace an existing file.")
    quiet: bool = option(False, "Show no progress.")

    def calibration(self) -> Calibration:
        """Return the options of the measurements. Raises `ConfigError` if an option is invalid."""
        return Calibration(
            self.name, self.disk, self.url, self.served_model, self.block_bytes, self.total_bytes,
            self.repeats, self.step_tokens,
        )  # fmt: skip

    def rest(self) -> Machine | None:
        """Return the machine of ``--rest-from``, which provides the unmeasured quantities. Raises
        `ConfigError` if there is no such machine.
        """
        return None if self.rest_from is None else parse_class(self.rest_from)

    def check(self) -> None:
        """Check everything before the first measurement. Raises `ConfigError`, all problems at once."""
        problems = Problems("calibrate")
        with problems:
            if self.out is not None:
                check_output("out", self.out, force=self.force)
        with problems:
            self.rest()
        with problems:
            self.calibration()
        problems.check()


@click.command("calibrate")
@options_of(CalibrateOptions)
def command(options: CalibrateOptions) -> None:
    """Measure this machine: memory, GPU copies, a disk, and the speed of a server with prompts.

    Run this command on an idle machine. To measure a disk, give --disk; to measure a server, give --url.
    Quantities that are not measured stay unknown, unless you give --rest-from. With --url, the API key is
    read from OPENAI_API_KEY.
    """
    out = options.out
    machine = calibrate(options.calibration(), lambda line: _report(line, options.quiet))
    default = options.rest()
    if default is not None:
        machine = machine.filled_from(default)
    if out is not None:
        write_output("out", out, machine.to_json())
    Terminal().print(terminal_table(table(machine)))


def _report(line: str, quiet: bool) -> None:
    if not quiet:
        click.echo(f"kvoffload: {line}", err=True)


def table(machine: Machine) -> Table:
    rows = []
    for name in QUANTITIES:
        quantity: Quantity | None = getattr(machine, name)
        numbers = (quantity.value, quantity.p10, quantity.p90) if quantity else ()
        cells = [f"{number:.3g}" for number in numbers] or ["unknown", "", ""]
        rows.append((name, *cells, quantity.source if quantity else ""))
    facts = ", ".join(f"{name} {fact}" for name, fact in machine.facts.items())
    title = " ".join(part for part in (machine.name, machine.made, facts) if part)
    return Table(title, ("quantity", "median#", "p10#", "p90#", "source"), rows)
