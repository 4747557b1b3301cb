"""Tokens of text, by the tokenizer of a model. The only file that knows the `tokenizers` library."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from kvoffload.errors import ConfigError


class Tokens:
    """Without a tokenizer: refuses."""

    def of(self, text: str) -> list[int]:
        """The ids of the tokens of a text, without any that a tokenizer would put around it.

        Raises `ConfigError`.
        """
        why = "text has as many tokens as the model's tokenizer makes of it: its tokenizer.json must be given"
        raise ConfigError("tokenizer", None, why)


class FileTokens(Tokens):
    """By a ``tokenizer.json`` of Hugging Face, or a directory with one. Raises `ConfigError`.

    Thread: one at a time.
    """

    def __init__(self, path: Path) -> None:
        try:
            from tokenizers import Tokenizer
        except ImportError:
            why = "the library is not installed: pip install 'kvoffload[tokenizers]'"
            raise ConfigError("tokenizer", str(path), why) from None
        file = path / "tokenizer.json" if path.is_dir() else path
        if not file.is_file():
            raise ConfigError("tokenizer", str(path), "there is no such file; allowed: a tokenizer.json")
        try:
            self._tokenizer: Any = Tokenizer.from_file(str(file))
        except Exception as error:  # The library raises no class of its own.
            raise ConfigError("tokenizer", str(path), f"it is no tokenizer.json ({error})") from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

    def of(self, text: str) -> list[int]:
        """As `Tokens.of`."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids


def blocks_of(tokens: list[int], block_tokens: int, start: int = 0) -> list[bytes]:
    """The full blocks of some tokens from block `start` on, each as bytes."""
    end = len(tokens) // block_tokens * block_tokens
    packed = np.array(tokens[start * block_tokens : end], "<i8").tobytes()
    size = 8 * block_tokens
    return [packed[at : at + size] for at in range(0, len(packed), size)]
