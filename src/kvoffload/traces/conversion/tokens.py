"""Tokenization of text with a model's tokenizer. The only file that imports the `tokenizers` library."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from kvoffload.errors import ConfigError


class Tokens:
    """Placeholder for a tokenizer that the user did not give. Every call raises `ConfigError`.

    Attributes:
        is_given: True if the user gave a tokenizer.
    """

    is_given: ClassVar[bool] = False

    @staticmethod
    def missing() -> ConfigError:
        return ConfigError("tokenizer", None, "text needs the model's tokenizer: give its tokenizer.json")

    def of(self, text: str) -> list[int]:
        """Return the token ids of a text, without special tokens around it."""
        raise self.missing()


class FileTokens(Tokens):
    """A Hugging Face tokenizer, loaded from a ``tokenizer.json`` or the directory that contains it.

    Thread: any, one call at a time. Raises: `ConfigError` if it cannot be loaded.
    """

    is_given = True

    def __init__(self, path: Path) -> None:
        try:
            from tokenizers import Tokenizer
        except ImportError:
            why = "the library tokenizers is not installed: pip install 'kvoffload[tokenizers]'"
            raise ConfigError("tokenizer", str(path), why) from None
        file = path / "tokenizer.json" if path.is_dir() else path
        if not file.is_file():
            raise ConfigError("tokenizer", str(path), "there is no such file; allowed: a tokenizer.json")
        try:
            self._tokenizer: Any = Tokenizer.from_file(str(file))
        except Exception as error:  # The library has no exception class.
            raise ConfigError("tokenizer", str(path), f"it is not a tokenizer.json ({error})") from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

    def of(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids


def blocks_of(tokens: list[int], block_tokens: int, start: int = 0) -> list[bytes]:
    """Return the content of each full block from block number `start` on: 8 bytes per token."""
    end = len(tokens) // block_tokens * block_tokens
    packed = np.array(tokens[start * block_tokens : end], "<i8").tobytes()
    size = 8 * block_tokens
    return [packed[at : at + size] for at in range(0, len(packed), size)]
