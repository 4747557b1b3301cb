"""``kvoffload trace convert``: turn a recording of another format into a trace."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

import click

from kvoffload.cli.fields import argument, option, options_of
from kvoffload.cli.options import QuietOptions
from kvoffload.cli.output import check_output, progress_bar
from kvoffload.errors import ConfigError
from kvoffload.settings.read import Count
from kvoffload.traces.conversion.block_ids import KeptKeys, Keys
from kvoffload.traces.conversion.convert import IncompleteError
from kvoffload.traces.conversion.convert import convert as convert_trace


@dataclass(frozen=True, kw_only=True)
class ConvertOptions(QuietOptions):
    source: str = argument()
    out: Path | None = argument(None, required=False, metavar="OUT")
    kind: str | None = option(
        None,
        "Format: bailian, kv_events, lengths, mooncake, text, token_ids, with parameters (lengths:none). "
        "By default the format of the first record.",
        "--from",
        metavar="KIND",
    )
    block_tokens: Count | None = option(
        None, "Tokens per block of OUT. Block ids in SOURCE fix the number; for text it is free."
    )
    tokenizer: Path | None = option(None, "Tokenizer for text.", metavar="TOKENIZER.JSON")
    salt: str | None = option(
        None, "Salt of the ids: equal salts give equal ids. Random and unknown by default.", metavar="TEXT"
    )
    keep_ids: bool = option(False, "Keep ids and names of SOURCE, without hashing.")
    skip_bad_lines: bool = option(False, "Skip bad lines, and count them.")
    force: bool = option(False, "Replace an existing file.")

    def check(self) -> None:
        """Check the salt and the output file. Raises `ConfigError`."""
        if self.salt is not None and self.keep_ids:
            raise ConfigError("salt", self.salt, "leave out --salt or --keep-ids")
        if self.out is not None:
            check_output("out", self.out, force=self.force)

    def keys(self) -> Keys:
        """Return the object that computes the trace's ids of blocks."""
        return KeptKeys() if self.keep_ids else Keys(None if self.salt is None else self.salt.encode())

    def completed(self, incomplete: IncompleteError) -> str:
        """Return the user's command line with the missing options added, and ``TEXT`` in place of a salt."""
        example = {option.flag: option.example for option in incomplete.missing}
        kind, out = self.kind, example.get("", str(self.out))
        if parameter := example.get("--from"):
            kind = kind or incomplete.kind
            if kind.startswith(f"{incomplete.kind}:") or parameter.partition("=")[0] in kind:
                kind = incomplete.kind
            kind += f",{parameter}"
        tokenizer = example.get("--tokenizer", self.tokenizer)
        values = {
            "--from": kind,
            "--tokenizer": tokenizer,
            "--block-tokens": self.block_tokens,
            "--salt": None if self.salt is None else "TEXT",
        }
        given = [word for flag, value in values.items() if value is not None for word in (flag, str(value))]
        switches = {
            "--keep-ids": self.keep_ids, "--skip-bad-lines": self.skip_bad_lines, "--force": self.force,
            "--quiet": self.quiet,
        }  # fmt: skip
        given += [flag for flag, is_set in switches.items() if is_set]
        return shlex.join(["kvoffload", "trace", "convert", self.source, out, *given])


@click.command()
@options_of(ConvertOptions)
def convert(options: ConvertOptions) -> None:
    """Convert SOURCE, a recording of another format, to a trace.

    SOURCE is a file (also .gz, .xz or .zst), standard input (- with --from), or the address of vLLM's KV
    events (tcp://host:port), which are recorded until Ctrl-C. OUT is a JSONL file; with the ending .gz, .xz
    or .zst it is compressed. The ids of blocks in OUT are salted hashes, so that OUT reveals nothing of the
    prompts. docs/traces.md describes the formats and their assumptions.
    """
    try:
        with progress_bar("convert", 1.0, options.quiet) as progress:
            done = convert_trace(
                options.source, options.out, source=options.kind, block_tokens=options.block_tokens,
                tokenizer=options.tokenizer, keys=options.keys(), skip_bad_lines=options.skip_bad_lines,
                progress=progress,
            )  # fmt: skip
    except IncompleteError as error:
        error.args = (f"{error}\ncomplete command: {options.completed(error)}",)
        raise
    click.echo(
        f"{options.out}: {done.requests:,} requests, {done.block_refs:,} block references of "
        f"{done.block_tokens} tokens, from {done.source}"
    )
    remarks = [*done.remarks]
    if done.assumed:
        remarks.append(f"assumed: {done.assumed}; reports of this trace mention it")
    if done.skipped_lines:
        remarks.append(f"{done.skipped_lines:,} bad lines left out")
    if done.unordered_requests:
        remarks.append(
            f"{done.unordered_requests:,} of {done.requests:,} requests are earlier than a request before "
            "them; readers of the trace sort them by time"
        )
    for remark in remarks:
        click.echo(f"kvoffload: {remark}", err=True)
