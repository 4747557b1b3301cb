"""The KV of one batch of prompts: loads the longest stored prefixes, and stores newly computed blocks."""

from __future__ import annotations

from contextlib import ExitStack

import torch
from transformers.cache_utils import DynamicCache

from kvoffload.cache.cache import KVCache
from kvoffload.cache.request import KVRequest
from kvoffload.errors import ConfigError


class PrefixBatch:
    """A context manager for a batch of prompts. When it is entered, it loads KV into `cache`: the first
    columns of the batch, up to the first column that is not stored for every row.

    A column is a position in the padded prompts. The tokens of a left-padded row begin after its padding, and
    the padding's columns in `cache` contain zeros.

    Attributes:
        cache: a `DynamicCache` of `num_cached` columns, for ``model(..., cache=cache)``. Before transformers
            5.24 the argument is named ``past_key_values``. Layers with a sliding window also keep all tokens,
            because later prompts may continue any prefix.
        num_cached: number of leading columns of the batch that are in `cache`. The last column of the batch
            is never among them, because the model must compute at least one token.
    """

    def __init__(
        self,
        kv_cache: KVCache,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None,
        salt: str,
        *,
        counts_padding: bool = False,
    ) -> None:
        """Begin a batch.

        Args:
            counts_padding: True if the model counts padded columns as positions. Then rows with different
                padding share no KV.
        """
        self._kv_cache, self._ids = kv_cache, input_ids
        self._starts = first_columns(input_ids, attention_mask)
        self._prompts = [row[start:].clone() for row, start in zip(input_ids, self._starts, strict=True)]
        self._salts = [f"{start if counts_padding else 0}/{salt}" for start in self._starts]
        self._sequences = list(self._prompts)
        self._requests: list[KVRequest] = []
        self._open = ExitStack()
        self.cache, self.num_cached = DynamicCache(), 0

    def __enter__(self) -> PrefixBatch:
        with ExitStack() as opened:
            self._requests = [
                opened.enter_context(self._kv_cache.request(prompt, salt=salt))
                for prompt, salt in zip(self._prompts, self._salts, strict=True)
            ]
            self._load()
            self._open = opened.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def store(self, sequences: torch.Tensor, *, prompts_only: bool = False) -> int:
        """Store the KV in `cache` after a model has extended it; return the number of stored tokens.

        May be called again when the model has added columns to `cache`.

        Args:
            sequences: token ids of all rows: prompts and generated tokens. If several sequences were
                generated for a prompt, their rows follow one another, as in the result of ``model.generate``.
            prompts_only: True to store only the prompts. Needed after beam search, which reorders the rows of
                `cache`.

        Raises: `ConfigError` if a sequence does not begin with its prompt and with the sequence that the
        previous call received for its row.
        """
        kv = [(layer.keys, layer.values) for layer in self.cache.layers]
        if not kv:
            return 0
        width, rows = self._ids.shape[1], len(kv[0][0])
        if not prompts_only and (sequences.ndim != 2 or len(sequences) != rows):
            raise ConfigError(
                "sequences.shape", tuple(sequences.shape), f"allowed: ({rows}, tokens), the rows of the cache"
            )
        computed = min(self.cache.get_seq_length(), width if prompts_only else sequences.shape[1])
        copies, stored = rows // len(self._ids), 0
        for row in range(0, rows, copies if prompts_only else 1):
            number, copy = divmod(row, copies)
            start, request, known = self._starts[number], self._requests[number], self._sequences[number]
            with ExitStack() as done:
                if copy:
                    known = self._prompts[number]
                    request = done.enter_context(self._kv_cache.request(known, salt=self._salts[number]))
                if not prompts_only:
                    sequence = sequences[row, start:]
                    request.extend(_continuation(sequence, known, f"sequences[{row}]"))
                    if not copy:
                        self._sequences[number] = sequence.clone()
                stored += request.store_from(kv, row=row, start=start, num_tokens=max(0, computed - start))
        return stored

    def _load(self) -> None:
        """Load the longest stored prefix of each row, then keep only the columns that every row has."""
        layout, (rows, width) = self._kv_cache.layout, self._ids.shape
        kv = [
            tuple(
                torch.empty(
                    (rows, layout.heads, width, size),
                    dtype=getattr(torch, layout.dtype),
                    device=self._ids.device,
                )
                for size in (layout.head_dim, layout.value_dim or layout.head_dim)
            )
            for _ in range(layout.layers)
        ]
        hits = [
            start + request.load_into(kv, row=row, start=start)
            for row, (request, start) in enumerate(zip(self._requests, self._starts, strict=True))
        ]
        self.num_cached = count = min(min(hits), width - 1)
        if count == 0:
            return
        for layer, tensors in enumerate(kv):
            for tensor in tensors:
                for row, start in enumerate(self._starts):
                    tensor[row, :, :start] = 0
            self.cache.update(*(tensor[:, :, :count] for tensor in tensors), layer)


def _continuation(sequence: torch.Tensor, known: torch.Tensor, name: str) -> torch.Tensor:
    """Return the tokens of `sequence` after `known`. Raises `ConfigError` if `known` is not its beginning."""
    begin = sequence[: len(known)].to(known.device)
    if len(begin) < len(known) or not bool((begin == known).all()):
        raise ConfigError(
            name,
            f"{len(sequence)} other tokens",
            f"allowed: sequences that begin with the {len(known)} tokens of the last store (or the prompt)",
        )
    return sequence[len(known) :]


def first_columns(input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> list[int]:
    """Return the column of each row's first token. Raises `ConfigError` if padding is not on the left."""
    if input_ids.ndim != 2 or 0 in input_ids.shape:
        raise ConfigError("input_ids.shape", tuple(input_ids.shape), "allowed: (batch, tokens)")
    if attention_mask is None:
        return [0] * len(input_ids)
    if attention_mask.shape != input_ids.shape:
        raise ConfigError(
            "attention_mask.shape", tuple(attention_mask.shape), f"allowed: {tuple(input_ids.shape)}"
        )
    mask = attention_mask.to(torch.long)
    # Models compute positions from sums of the mask, so another number would give other KV to equal tokens.
    if not bool(((attention_mask == 0) | (attention_mask == 1)).all()):
        invalid = attention_mask[(attention_mask != 0) & (attention_mask != 1)]
        raise ConfigError("attention_mask", invalid[0].item(), "allowed: 0 for padding, 1 for a token")
    for row, is_falling in enumerate((mask[:, 1:] < mask[:, :-1]).any(1).tolist()):
        if is_falling or not mask[row, -1]:
            raise ConfigError(f"attention_mask[{row}]", mask[row].tolist(), "allowed: padding on the left")
    starts: list[int] = (mask == 0).sum(1).tolist()
    return starts
