"""Prompts of the canary: generated, or read from a file.

The lengths of generated prompts are around block and chunk boundaries. A generated prompt is a list of
records and a question about one of the records. So every part of the KV cache influences some answer.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from kvoffload.errors import ConfigError

Tokenize: TypeAlias = Callable[[str], list[int] | None]
"""Function that returns the token ids of a text, or None if the server has no tokenizer endpoint."""

_THINGS = ["lamp", "kettle", "ladder", "mirror", "basket", "saddle", "anchor", "violin", "bottle", "candle",
           "hammer", "pillow"]  # fmt: skip
_COLOURS = ["red", "green", "blue", "black", "white", "yellow", "purple", "orange", "brown", "grey"]
_CITIES = ["Oslo", "Lima", "Cairo", "Quito", "Delhi", "Seoul", "Turin", "Perth", "Lyon", "Dakar", "Osaka",
           "Porto"]  # fmt: skip
_CHARACTERS_PER_TOKEN = 4
_FAMILY_SHARE = 3
"""Number of prompts in a family. A family has a common beginning, or consists of the turns of one
conversation."""


@dataclass(frozen=True)
class Prompt:
    """A prompt.

    Attributes:
        name: name in reports.
        content: text or token ids.
        family: name of the prompt's family. Prompts of a family have a common beginning and are sent with the
            same cache salt.
    """

    name: str
    content: str | tuple[int, ...]
    family: str


@dataclass(frozen=True)
class PromptSizes:
    """Lengths of generated prompts, in tokens.

    Args:
        block_tokens: tokens of a KV block.
        chunk_tokens: chunk sizes of the engine's prefill and of its connector.
        longest: length of the longest prompt that leaves room for the answer.
    """

    block_tokens: int
    chunk_tokens: tuple[int, ...]
    longest: int

    def lengths(self) -> list[int]:
        """Return lengths around the boundaries of blocks and chunks, ascending."""
        block = self.block_tokens
        edges = [2 * block, 5 * block, 9 * block, 17 * block]
        edges += [edge * chunk for chunk in self.chunk_tokens for edge in (1, 2)]
        wanted = {edge + shift for edge in edges for shift in (-1, 0, 1)} | {17 * block + block // 2}
        lengths = sorted(length for length in wanted if block < length <= self.longest)
        return lengths or [self.longest]


def generated(
    seed: int,
    num_prompts: int,
    sizes: PromptSizes,
    *,
    tokenize: Tokenize,
    token_ids: range | None = None,
) -> list[Prompt]:
    """Generate prompts.

    Half of the prompts share no text with other prompts. A quarter belong to families with a common
    beginning, and a quarter are turns of conversations.

    Args:
        token_ids: range of token ids for prompts of random tokens, for servers whose tokenizer knows no
            English. None: the prompts are English text.

    Raises: `ConfigError` if the server's tokenizer maps English text to too few different tokens.
    """
    rng, lengths = random.Random(seed), sizes.lengths()
    build = _Builder(rng, tokenize, token_ids)
    prompts: list[Prompt] = []
    while len(prompts) < num_prompts:
        number, kind = len(prompts), len(prompts) % (4 * _FAMILY_SHARE)
        # Use every length once before a length repeats, in an order that mixes short and long.
        length = lengths[(number * 7 + number // len(lengths)) % len(lengths)]
        if kind < 2 * _FAMILY_SHARE:
            prompts.append(Prompt(f"alone-{number}-{length}", build.turns([length])[0], f"alone-{number}"))
            continue
        family = f"{'shared' if kind < 3 * _FAMILY_SHARE else 'turns'}-{number}"
        turns = sorted(rng.choice(lengths) for _ in range(_FAMILY_SHARE))
        contents = build.turns(turns) if family.startswith("turns") else build.shared(turns)
        prompts += [
            Prompt(f"{family}-{turn}-{length}", content, family)
            for turn, (content, length) in enumerate(zip(contents, turns, strict=True))
        ]
    return prompts[:num_prompts]


class _Builder:
    def __init__(self, rng: random.Random, tokenize: Tokenize, ids: range | None) -> None:
        self._rng, self._tokenize, self._ids = rng, tokenize, ids

    def turns(self, lengths: Sequence[int]) -> list[str | tuple[int, ...]]:
        """Build prompts. Each begins with the records of the previous prompt."""
        records = self._records(max(lengths))
        return [self._cut(records, length) for length in lengths]

    def shared(self, lengths: Sequence[int]) -> list[str | tuple[int, ...]]:
        """Build prompts whose first halves are equal."""
        common = self._records(max(lengths))
        contents = []
        for length in lengths:
            own = self._records(length)
            half = length // 2
            contents.append(self._cut([*common[:half], *own[: length - half]], length))
        return contents

    def _records(self, length: int) -> list[Any]:
        """Return `length` elements: token ids or, without a tokenizer, pieces of text of about one token
        each."""
        if self._ids is not None:
            return [self._rng.choice(self._ids) for _ in range(length)]
        text = ""
        while len(text) < length * _CHARACTERS_PER_TOKEN * 2:
            text += self._record() + "\n"
        ids = self._tokenize(text)
        if ids is None:
            width = _CHARACTERS_PER_TOKEN
            return [text[at : at + width] for at in range(0, length * width, width)]
        if len(set(ids)) < 16:
            raise ConfigError(
                "prompts",
                "generated English text",
                f"the server's tokenizer has {len(set(ids))} tokens for it; give --token-ids or --prompts",
            )
        return (ids * (length // len(ids) + 1))[:length]

    def _record(self) -> str:
        rng = self._rng
        return (
            f"Record {rng.randrange(100, 1000)}: the {rng.choice(_COLOURS)} {rng.choice(_THINGS)} is in "
            f"{rng.choice(_CITIES)}, shelf {rng.randrange(10, 100)}, price {rng.randrange(100, 10_000)}."
        )

    def _cut(self, records: list[Any], length: int) -> str | tuple[int, ...]:
        records = records[:length]
        if self._ids is not None:
            return tuple(records)
        question = f"\nQuestion: where is the {self._rng.choice(_THINGS)} of the records above?\nAnswer: in"
        if isinstance(records[0], str):
            return "".join(records)[: max(1, length * _CHARACTERS_PER_TOKEN - len(question))] + question
        ending = (self._tokenize(question) or [])[: length // 2]
        return (*records[: length - len(ending)], *ending)


def filler(rng: random.Random, length: int, like: Prompt) -> Prompt:
    """Return a prompt that no cache contains. It has about `length` words or token ids, drawn at random from
    the prompt `like`.
    """
    if isinstance(like.content, str):
        pieces = like.content.split() or ["filler"]
        return Prompt("filler", " ".join(rng.choice(pieces) for _ in range(length)), "filler")
    return Prompt("filler", tuple(rng.choice(like.content) for _ in range(length)), "filler")


def read_prompts(path: Path) -> list[Prompt]:
    """Read prompts: JSON lines with ``prompt`` (text or token ids) and, optionally, ``family``.

    Raises: `ConfigError` for an invalid line. The error names the line.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("prompts", str(path), f"it cannot be read ({error})") from None
    prompts = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            content = row["prompt"]
            family = str(row.get("family", f"line-{number}"))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            content = family = ""
        is_ids = isinstance(content, list) and all(type(token) is int and token >= 0 for token in content)
        if not content or not (is_ids or isinstance(content, str)):
            raise ConfigError(
                "prompts", f"{path}:{number}", 'allowed: {"prompt": TEXT or [TOKEN ID, ...], "family": NAME}'
            )
        prompts.append(Prompt(f"line-{number}", tuple(content) if is_ids else content, family))
    if not prompts:
        raise ConfigError("prompts", str(path), "allowed: a file with at least one prompt")
    return prompts
