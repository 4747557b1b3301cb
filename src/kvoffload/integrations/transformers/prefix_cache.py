"""``model.generate`` with a prefix cache: takes the same arguments, and gives the same answers up to
rounding.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch

from kvoffload.cache.cache import KVCache
from kvoffload.errors import ConfigError
from kvoffload.integrations.transformers.batch import PrefixBatch, first_columns
from kvoffload.integrations.transformers.model import CACHE, configuration_digest, kv_layout
from kvoffload.tiers.rate_limited_log import RateLimitedLog

_REFUSED = {
    **dict.fromkeys(("cache", "past_key_values"), "PrefixCache makes the cache of the model"),
    **dict.fromkeys(
        (
            "assistant_model",
            "assistant_tokenizer",
            "assistant_early_exit",
            "use_mtp",
            "prompt_lookup_num_tokens",
        ),
        "without assisted decoding, which takes tokens back",
    ),
    "token_healing": "without token healing, which changes the prompt",
    "custom_generate": "without a loop of its own",
    "prefill_chunk_size": "without chunks, which begin at the first token",
}
"""Arguments of ``model.generate`` that are refused, each with the rest of the error's message."""


class PrefixCache:
    """A model with a cache of the KV of earlier prompts and answers::

        with kvoffload.open(model="Qwen/Qwen3-8B@9c92", layout=kv_layout(model), ram="16GiB") as cache:
            prefix = PrefixCache(model, cache)
            output = prefix.generate(**tokenizer(text, return_tensors="pt"), max_new_tokens=200)

    In float32, greedy decoding gives the same tokens as ``model.generate``. In bfloat16 or float16 some
    tokens may differ by rounding, because the model computes fewer tokens at once.

    Args:
        model: a decoder-only model with full or sliding attention, on one device.
        cache: from `kvoffload.open`, with ``layout=kv_layout(model)``. Every key of the cache contains the
            model's configuration, but not its weights: name them in the argument `model` of `kvoffload.open`.

    Raises: `ConfigError` for a model that cannot be cached, or a cache of another layout.
    """

    def __init__(self, model: Any, cache: KVCache) -> None:
        self._model, self._cache = model, cache
        self._digest, self._log = configuration_digest(model), RateLimitedLog("kvoffload.transformers")
        if (layout := kv_layout(model, cache.layout.block_tokens)) != cache.layout:
            raise ConfigError("layout", cache.layout, f"the model has {layout}")

    def begin(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None, *, salt: str = ""
    ) -> PrefixBatch:
        """Return a context manager that loads the longest stored prefix of a batch.

        Pass its attribute ``cache`` to ``model(...)`` or ``model.generate``.

        Args:
            input_ids: prompts of equal length; shape ``(batch, tokens)``.
            attention_mask: None or all ones. Padding is refused: without ``position_ids`` a model counts
                padding as positions, so the KV stored for one padding would be wrong for prompts with another
                padding.
            salt: any text, for example a tenant. Prompts with different salts share no KV.

        Raises: `ConfigError` for padding.
        """
        self._check_model(input_ids)
        for row, start in enumerate(first_columns(input_ids, attention_mask)):
            if start:
                raise ConfigError(
                    f"attention_mask[{row}]",
                    f"{start} columns of padding",
                    "allowed: none in begin(); use generate(), or prompts of equal length",
                )
        return self._batch(input_ids, None, salt)

    def generate(
        self, inputs: torch.Tensor | None = None, *arguments: Any, salt: str = "", **options: Any
    ) -> Any:
        """Generate as ``model.generate`` does, and store the KV of prompts and answers.

        If the KV cannot be stored, a warning is logged and the answer is returned nevertheless.

        Raises: `ConfigError` if the arguments contain anything besides the tokens that affects KV (images,
        embeddings, positions), or ask for a static, quantized or paged cache. All arguments are checked
        before the model computes.
        """
        ids = options.pop("input_ids", None) if inputs is None else inputs
        if not isinstance(ids, torch.Tensor):
            raise ConfigError("input_ids", None if ids is None else type(ids).__name__, "give token ids")
        self._check_model(ids)
        options = self._named(arguments, options)
        config = options.get("generation_config")
        self._check(ids, config, options)
        output = None
        try:
            with self._batch(ids, options.get("attention_mask"), salt) as batch:
                beams, answers = (self._setting(name, config, options) or 1 for name in _COPIES)
                if batch.num_cached and max(beams, answers) > 1:
                    batch.cache.batch_repeat_interleave(max(beams, answers))
                output = self._model.generate(ids, **{CACHE: batch.cache}, **options)
                sequences = output if isinstance(output, torch.Tensor) else output.sequences
                batch.store(sequences, prompts_only=beams > 1)
        except Exception as error:
            if output is None:
                raise
            self._log.warn("store", "the answer is not stored: %s: %s", type(error).__name__, error)
        return output

    def _named(self, arguments: tuple[Any, ...], options: dict[str, Any]) -> dict[str, Any]:
        """Return all arguments of ``model.generate`` by name.

        Args:
            arguments: the positional arguments after `inputs`.
        """
        parameters = inspect.signature(self._model.generate).parameters.values()
        names = [known.name for known in parameters if known.kind is known.POSITIONAL_OR_KEYWORD][1:]
        given = dict(zip(names, arguments, strict=False))
        if len(given) < len(arguments) or given.keys() & options:
            raise ConfigError(
                "arguments", f"{len(arguments)} without names", "give each argument once, by name"
            )
        return given | options

    def _batch(self, ids: torch.Tensor, mask: torch.Tensor | None, salt: str) -> PrefixBatch:
        """Create a batch. A model without the argument ``position_ids`` counts padding as positions."""
        counts_padding = "position_ids" not in inspect.signature(self._model.forward).parameters
        salt = f"{self._digest}/{salt}"
        return PrefixBatch(self._cache, ids, mask, salt, counts_padding=counts_padding)

    def _check_model(self, ids: torch.Tensor) -> None:
        """Raise `ConfigError` if the model is in training mode or is not on the device of the prompts."""
        if self._model.training:
            raise ConfigError("model.training", True, "allowed: False, without dropout; call model.eval()")
        if ids.device != self._model.device:
            raise ConfigError(
                "input_ids.device", str(ids.device), f"allowed: {self._model.device}, the model's"
            )

    def _check(self, ids: torch.Tensor, config: Any, options: dict[str, Any]) -> None:
        for name, why in _REFUSED.items():
            value = self._setting(name, config, options)
            if value is not None and value is not False:
                shown = value if isinstance(value, int | float | str) else type(value).__name__
                raise ConfigError(name, shown, f"allowed: {why}")
        kind = self._setting("cache_implementation", config, options)
        if kind not in (None, "dynamic"):
            raise ConfigError(
                "cache_implementation", kind, "allowed: dynamic; its KV is not in whole tensors"
            )
        if self._setting("use_cache", config, options) is False:
            raise ConfigError("use_cache", False, "allowed: True")
        known = {*inspect.signature(self._model.generate).parameters, *vars(self._model.generation_config)}
        for name, value in options.items():
            if name not in known | {"attention_mask", "tokenizer"} and value is not None:
                raise ConfigError(name, type(value).__name__, "allowed: none; it would change KV unseen")
        pad = self._setting("pad_token_id", config, options)
        if options.get("attention_mask") is None and pad is not None and bool((ids == pad).any()):
            raise ConfigError("attention_mask", None, f"give it: the prompts contain the padding token {pad}")

    def _setting(self, name: str, config: Any, options: dict[str, Any]) -> Any:
        """Return a setting from the first of these that has it: `options`, `config`, the model. None if none
        has it.
        """
        for value in (
            options.get(name),
            getattr(config, name, None),
            getattr(self._model.generation_config, name, None),
        ):
            if value is not None:
                return value
        return None


_COPIES = ("num_beams", "num_return_sequences")
