"""``kvoffload calibrate``: measure this machine, for `kvoffload simulate` and for plans."""

from __future__ import annotations

from pathlib import Path

import click
from rich import box
from rich.console import Console
from rich.table import Table

from kvoffload.calibration.calibrate import Calibration, calibrate
from kvoffload.cli.replay import write_output
from kvoffload.errors import Problems
from kvoffload.settings.read import parse_size
from kvoffload.simulate.classes import parse_class
from kvoffload.simulate.machine import QUANTITIES, Machine, Quantity


@click.command("calibrate")
@click.option("--out", type=click.Path(path_type=Path), metavar="FILE",
              help="Where the machine is written, as JSON.")  # fmt: skip
@click.option("--disk", type=click.Path(path_type=Path), metavar="DIR",
              help="A directory on the disk to measure; it is left as it was.")  # fmt: skip
@click.option("--url", help="An OpenAI-compatible server that runs: http://HOST:PORT.")
@click.option("--model", "served_model", metavar="NAME",
              help="A model that it serves.  [default: its first]")  # fmt: skip
@click.option("--rest-from", metavar="CLASS[:PARAMETERS]",
              help="Take what was not measured from a class of machines: h100-pcie5:8B.")  # fmt: skip
@click.option("--name", default="measured", show_default=True, help="Of the machine, for reports.")
@click.option("--block-bytes", default="2MiB", show_default=True, help="Of the blocks that are moved.")
@click.option("--total-bytes", default="512MiB", show_default=True,
              help="Moved at a time; the disk needs twice as much room, and memory.")  # fmt: skip
@click.option("--repeats", type=int, default=7, show_default=True, help="Of every measurement.")
@click.option("--step-tokens", type=int, default=8192, show_default=True, metavar="N",
              help="Tokens that the server computes in a step (--max-num-batched-tokens).")  # fmt: skip
@click.option("--quiet", is_flag=True, help="Do not say what is being measured.")
def command(
    out: Path | None,
    disk: Path | None,
    url: str | None,
    served_model: str | None,
    rest_from: str | None,
    name: str,
    block_bytes: str,
    total_bytes: str,
    repeats: int,
    step_tokens: int,
    quiet: bool,
) -> None:
    """Measure this machine: memory, GPU copies, a disk, and how fast a server computes prompts.

    What is not there or not asked for stays unknown. Nothing else should run meanwhile. With --url an API key
    is read from OPENAI_API_KEY.
    """
    problems, rest = Problems("calibrate"), None
    with problems:
        rest = parse_class(rest_from) if rest_from is not None else None
    with problems:
        options = Calibration(
            name=name,
            disk=disk,
            url=url,
            served_model=served_model,
            block_bytes=parse_size("block-bytes", block_bytes),
            total_bytes=parse_size("total-bytes", total_bytes),
            repeats=repeats,
            step_tokens=step_tokens,
        )
    problems.check()
    if out is not None and not out.exists():
        # A file that cannot be written is known before the work is done, and none is left if that fails.
        write_output("out", out, b"")
        out.unlink()
    machine = calibrate(options, lambda line: None if quiet else click.echo(f"kvoffload: {line}", err=True))
    if rest is not None:
        machine = machine.filled_from(rest)
    if out is not None:
        write_output("out", out, machine.to_json())
    Console().print(table(machine))


def table(machine: Machine) -> Table:
    """The machine for a terminal."""
    table = Table(
        title=f"{machine.name} {machine.made}".rstrip(),
        title_justify="left",
        caption=", ".join(f"{name} {fact}" for name, fact in machine.facts.items()),
        caption_justify="left",
        box=box.SIMPLE_HEAD,
    )
    for name in ("", "median", "p10", "p90", "which is"):
        table.add_column(name, no_wrap=name != "which is", overflow="fold")
    for name in QUANTITIES:
        found: Quantity | None = getattr(machine, name)
        if found is None:
            table.add_row(name, "unknown")
        else:
            numbers = (found.value, found.p10, found.p90)
            table.add_row(name, *(f"{number:.3g}" for number in numbers), found.source)
    return table
