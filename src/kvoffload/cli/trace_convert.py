"""``kvoffload trace convert``: a trace from a recording of another format."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from kvoffload.cli.options import quietly, skipping_bad_lines
from kvoffload.errors import ConfigError
from kvoffload.traces.conversion.convert import convert as convert_trace


@click.command()
@click.argument("source")
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--from", "kind", metavar="KIND",
              help="bailian, kv_events, lengths, mooncake, text, token_ids, with parameters (lengths:none); "
              "else what the first record looks like.")  # fmt: skip
@click.option("--block-tokens", type=click.IntRange(min=1), metavar="N",
              help="Tokens in a block of OUT: those of the ids in SOURCE; of text, any.")  # fmt: skip
@click.option("--tokenizer", type=click.Path(path_type=Path), metavar="TOKENIZER.JSON", help="For text.")
@click.option("--salt", metavar="TEXT", help="Equal salts give equal ids; without it nobody knows the salt.")
@click.option("--keep-ids", is_flag=True, help="Ids and names as SOURCE has them, not hashed.")
@skipping_bad_lines
@click.option("--force", is_flag=True, help="Replace an existing file.")
@quietly
def convert(
    source: str,
    out: Path,
    kind: str | None,
    block_tokens: int | None,
    tokenizer: Path | None,
    salt: str | None,
    keep_ids: bool,
    skip_bad_lines: bool,
    force: bool,
    quiet: bool,
) -> None:
    """Write SOURCE, a recording of another format, as a trace.

    SOURCE is a file, also .gz, .xz or .zst, - with --from, or the address of vLLM's KV events
    (tcp://host:port), until Ctrl-C. OUT is JSONL; .gz, .xz, .zst compress. Ids are salted hashes: OUT tells
    nothing of what was asked. docs/traces.md says what each kind takes, and what it must assume.
    """
    if salt is not None and keep_ids:
        raise ConfigError("salt", salt, "allowed: without --keep-ids")
    if out.exists() and not force:
        raise ConfigError("out", str(out), "a file that does not exist yet, or --force")
    with _reading(quiet) as progress:
        done = convert_trace(
            source, out, source=kind, block_tokens=block_tokens, tokenizer=tokenizer, salt=salt,
            keep_ids=keep_ids, skip_bad_lines=skip_bad_lines, progress=progress,
        )  # fmt: skip
    click.echo(
        f"{out}: {done.requests:,} requests, {done.block_refs:,} block references of {done.block_tokens} "
        f"tokens, from {done.source}"
    )
    said = [*done.remarks]
    if done.assumed:
        said.append(f"assumed: {done.assumed}; reports of this trace say it")
    if done.skipped_lines:
        said.append(f"{done.skipped_lines:,} bad lines left out")
    if done.early_requests:
        said.append(
            f"{done.early_requests:,} requests are stamped before the first: they count as at its time"
        )
    for one in said:
        click.echo(f"kvoffload: {one}", err=True)


@contextlib.contextmanager
def _reading(quiet: bool) -> Iterator[Callable[[float], None]]:
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f} %"),
               TimeRemainingColumn())  # fmt: skip
    with Progress(*columns, console=console, transient=True, disable=quiet or not console.is_terminal) as bar:
        task = bar.add_task("convert", total=1.0)
        yield lambda share: bar.update(task, completed=share)
