"""A probe finds rope that depends on the length of the sequence, whatever its name."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from kvoffload import ConfigError
from kvoffload.integrations.transformers import kv_layout
from support.tiny_models import model_of

LONGEST = 512
"""``max_position_embeddings`` of the tiny models."""


class Stretched(LlamaRotaryEmbedding):
    """Rope that divides positions in sequences longer than `limit`."""

    limit = 10**9

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> Any:
        length = int(position_ids.max()) + 1
        return super().forward(x, position_ids.float() / (4 if length > self.limit else 1))


class Remembering(LlamaRotaryEmbedding):
    """Rope that divides positions in all sequences after the first long one."""

    limit, seen = 10**9, False

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> Any:
        factor = 4 if self.seen else 1
        self.seen = self.seen or int(position_ids.max()) + 1 > self.limit
        return super().forward(x, position_ids.float() / factor)


class Angles(torch.nn.Module):
    """`Stretched` under a name and with attributes that do not reveal rope."""

    limit = 10**9

    def __init__(self, inner: LlamaRotaryEmbedding) -> None:
        super().__init__()
        self._inner = [inner]

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> Any:
        length = int(position_ids.max()) + 1
        return self._inner[0](x, position_ids.float() / (4 if length > self.limit else 1))


class ByLength(torch.nn.Module):
    """Cosine and sine for a length instead of positions, as in models of 2023."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit
        self.register_buffer("inv_freq", 1 / 1e4 ** (torch.arange(0, 8, 2) / 8))

    def forward(self, x: torch.Tensor, seq_len: int) -> Any:
        places = torch.arange(seq_len) / (4 if seq_len > self.limit else 1)
        angles = torch.outer(places, self.inv_freq).repeat(1, 2)
        return angles.cos(), angles.sin()


def model_with(rope: type[torch.nn.Module], limit: int) -> Any:
    model = copy.deepcopy(model_of("llama"))
    own = rope(model.model.rotary_emb) if rope is Angles else rope(model.config)
    own.limit = limit
    model.model.rotary_emb = own
    return model


@pytest.mark.parametrize("rope", [Stretched, Remembering, Angles])
def test_rope_that_changes_below_the_longest_sequence_is_refused(rope: type[torch.nn.Module]) -> None:
    with pytest.raises(ConfigError, match=r"changes? .*allowed: rope whose KV does not depend"):
        kv_layout(model_with(rope, LONGEST - 10))


@pytest.mark.parametrize("rope", [Stretched, Remembering])
@pytest.mark.parametrize("limit", [LONGEST, 20 * LONGEST])
def test_rope_that_changes_beyond_it_is_refused(rope: type[torch.nn.Module], limit: int) -> None:
    with pytest.raises(ConfigError, match=f"its {rope.__name__} changes for all tokens"):
        kv_layout(model_with(rope, limit))


@pytest.mark.parametrize("rope", [Stretched, Remembering, Angles])
def test_the_same_modules_without_a_change_are_accepted(rope: type[torch.nn.Module]) -> None:
    assert kv_layout(model_with(rope, 10**9)) == kv_layout(model_of("llama"))


def model_by_length(limit: int) -> Any:
    """Return a model with a module that takes the length of the sequence as a number."""
    model = copy.deepcopy(model_of("llama"))
    by_length = ByLength(limit)

    class Both(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.by_length = by_length

        def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> Any:
            cosine, sine = self.by_length(x, seq_len=int(position_ids.max()) + 1)
            return cosine[position_ids].to(x.dtype), sine[position_ids].to(x.dtype)

    model.model.rotary_emb = Both()
    return model


@pytest.mark.parametrize("limit", [LONGEST - 10, LONGEST])
def test_rope_of_a_length_is_probed_too(limit: int) -> None:
    with pytest.raises(ConfigError, match="its ByLength changes for all tokens"):
        kv_layout(model_by_length(limit))
    kv_layout(model_by_length(10**9))


def test_a_probe_makes_no_huge_table(monkeypatch: pytest.MonkeyPatch) -> None:
    longest = 0

    def recorded(self: ByLength, x: torch.Tensor, seq_len: int) -> Any:
        nonlocal longest
        longest = max(longest, seq_len)
        return forward(self, x, seq_len)

    forward = ByLength.forward
    monkeypatch.setattr(ByLength, "forward", recorded)
    monkeypatch.setattr("kvoffload.integrations.transformers.rope.LONGEST_TABLE", 4 * LONGEST)
    kv_layout(model_by_length(10**9))
    assert longest == 4 * LONGEST


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
        {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
         "original_max_position_embeddings": 128},
    ],
)  # fmt: skip
def test_types_that_do_not_depend_on_the_length_are_accepted(rope: dict[str, Any]) -> None:
    kv_layout(model_of("llama", rope_parameters={"rope_theta": 1e4, **rope}))


def test_positions_in_a_table_are_accepted() -> None:
    """GPT-2 has no positions beyond its table."""
    kv_layout(model_of("gpt2", n_embd=32, n_layer=2, n_head=4, n_positions=64))


class Table(LlamaRotaryEmbedding):
    """A table of `limit` positions, as in models of 2023."""

    limit = 10**4

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> Any:
        cosine, sine = super().forward(x, torch.arange(self.limit)[None])
        return cosine[0][position_ids], sine[0][position_ids]


def test_a_table_that_ends_before_the_longest_sequence_is_refused() -> None:
    """On a GPU an index beyond the table would make the device unusable for the process."""
    with pytest.raises(ConfigError, match=f"its Table does not compute position {LONGEST - 1}"):
        kv_layout(model_with(Table, LONGEST - 1))
    kv_layout(model_with(Table, LONGEST))


def test_a_probe_leaves_the_model_as_it_was() -> None:
    model = copy.deepcopy(model_of("llama"))
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    kv_layout(model)
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())
    assert not any(module._forward_pre_hooks for module in model.modules())


class Wrapper(torch.nn.Module):
    """A model that forwards all arguments, and hides their names."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner, self.config, self.device = inner, inner.config, inner.device

    def forward(self, input_ids: torch.Tensor, **options: Any) -> Any:
        return self.inner(input_ids, **options)


def test_a_wrapped_model_is_probed() -> None:
    kv_layout(Wrapper(copy.deepcopy(model_of("llama"))).eval())
    with pytest.raises(ConfigError, match="Stretched changes for all tokens"):
        kv_layout(Wrapper(model_with(Stretched, LONGEST - 1)).eval())


def test_a_long_model_with_tables_is_probed_at_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model keeps the table that the probe creates."""
    monkeypatch.setattr("kvoffload.integrations.transformers.rope.LONGEST_TABLE", LONGEST // 2)
    model = model_by_length(10**9)
    lengths: list[int] = []
    forward = ByLength.forward

    def recorded(self: ByLength, x: torch.Tensor, seq_len: int) -> Any:
        lengths.append(seq_len)
        return forward(self, x, seq_len)

    monkeypatch.setattr(ByLength, "forward", recorded)
    kv_layout(model)
    assert max(lengths) == LONGEST // 2
