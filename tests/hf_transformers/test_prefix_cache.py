"""`kvoffload.integrations.transformers`: equal logits and tokens, and refusals."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerFast
from transformers.cache_utils import DynamicCache, StaticCache

import kvoffload
from kvoffload import ConfigError, KVCache
from kvoffload.cache.request import KVRequest
from kvoffload.integrations.transformers import PrefixBatch, PrefixCache, kv_layout
from kvoffload.integrations.transformers.model import CACHE, configuration_digest
from kvoffload.integrations.transformers.rope import check_rope
from support.disk_blocks import slab_in
from support.timeouts import HANGS_S
from support.tiny_models import MODELS, left_padded, model_of, tokens

T = 4
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 6}


def opened(model: Any, **options: Any) -> KVCache:
    return kvoffload.open(
        model="random weights",
        layout=kv_layout(model, T),
        **{"ram": "16MiB", "deadline_s": HANGS_S, **options},
    )


def loaded(cache: KVCache) -> int:
    return sum(cache.stats().hit_tokens.values())


def logits(model: Any, ids: torch.Tensor, cache: Any = None, past: int = 0) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = model(ids[:, past:], **{CACHE: cache}).logits
    return result


@contextmanager
def forward_passes(model: Any) -> Iterator[list[int]]:
    """Record the number of tokens of each forward pass."""
    computed: list[int] = []

    def record(_: Any, arguments: Any, options: dict[str, Any]) -> None:
        computed.append((options["input_ids"] if "input_ids" in options else arguments[0]).shape[1])

    hook = model.register_forward_pre_hook(record, with_kwargs=True)
    try:
        yield computed
    finally:
        hook.remove()


@pytest.mark.parametrize("name", MODELS)
def test_ten_turns_have_the_tokens_of_the_model_alone(name: str) -> None:
    """The chat exceeds the sliding windows. Each turn loads all whole blocks of the previous turn."""
    model, text = model_of(name), tokens(1, 9)
    with opened(model) as cache:
        prefix, before, known = PrefixCache(model, cache), 0, 0
        for turn in range(10):
            mask = torch.ones_like(text)  # an answer may contain the padding token
            expected = model.generate(text, attention_mask=mask, **GREEDY)
            assert torch.equal(prefix.generate(text, attention_mask=mask, **GREEDY), expected)
            hit = loaded(cache) - before
            assert hit == known // T * T
            known, before = expected.shape[1] - 1, before + hit
            text = torch.cat([expected, tokens(1, 5, seed=turn)], 1)


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_equal_and_wrong_kv_is_noticed(name: str) -> None:
    model, text = model_of(name), tokens(1, 40)
    with opened(model) as cache:
        prefix = PrefixCache(model, cache)
        prefix.generate(text, **GREEDY)
        with prefix.begin(text) as batch:
            assert batch.num_cached == 39
            assert torch.allclose(
                logits(model, text, batch.cache, 39), logits(model, text)[:, 39:], atol=1e-4
            )
        with prefix.begin(text[:, :30]) as batch:
            assert batch.num_cached == 28
            again = logits(model, text[:, :30], batch.cache, 28)
            assert torch.allclose(again, logits(model, text[:, :30])[:, 28:], atol=1e-4)
        with prefix.begin(text) as batch:  # negative control: the value of one token, in the last window
            batch.cache.layers[0].values[0, 0, 33] += 1
            assert not torch.allclose(
                logits(model, text, batch.cache, 39), logits(model, text)[:, 39:], atol=1e-4
            )


@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_batches_with_different_prefixes_and_padding(name: str) -> None:
    model, common = model_of(name), tokens(24, seed=5)
    known = [torch.cat([common, tokens(9, seed=1)]), tokens(17, seed=2)]
    with opened(model) as cache:
        prefix = PrefixCache(model, cache)
        for row in known:
            prefix.generate(row[None], **GREEDY)
        for rows, columns in (
            ([known[0], known[1]], 32),
            ([known[0], torch.cat([known[1], tokens(7, seed=3)])], 25),
            ([known[0], torch.cat([common, tokens(11, seed=4)])], 24),
            ([known[0], tokens(35, seed=6)], 0),
            ([tokens(3, seed=7), known[0]], 30),
        ):
            batch = left_padded(rows)
            expected = model.generate(**batch, **GREEDY)
            with forward_passes(model) as computed:
                assert torch.equal(prefix.generate(**batch, **GREEDY), expected)
            assert computed[0] == batch["input_ids"].shape[1] - columns


def test_a_batch_with_padding_serves_its_prompts_without_padding() -> None:
    """`generate` computes KV at positions without padding."""
    model, rows = model_of("llama"), [tokens(30, seed=1), tokens(17, seed=2)]
    with opened(model) as cache:
        prefix = PrefixCache(model, cache)
        prefix.generate(**left_padded(rows), **GREEDY)
        with prefix.begin(rows[1][None]) as batch:
            assert batch.num_cached == 16
            cached_logits = logits(model, rows[1][None], batch.cache, 16)
            assert torch.allclose(cached_logits, logits(model, rows[1][None])[:, 16:], atol=1e-4)


def test_models_that_count_padding_share_kv_only_with_equal_padding() -> None:
    """Bart takes no ``position_ids``: its positions are columns, including padding."""
    model, rows = model_of("bart", decoder_layers=3), [tokens(30, seed=1), tokens(17, seed=2)]
    batch = left_padded(rows)
    with opened(model) as cache:
        prefix, expected = PrefixCache(model, cache), model.generate(**batch, **GREEDY)
        for columns in (0, 28):
            with forward_passes(model) as computed:
                assert torch.equal(prefix.generate(**batch, **GREEDY), expected)
            assert computed[0] == 30 - columns
        with prefix.begin(rows[1][None]) as begun:
            assert begun.num_cached == 0


def test_own_loops_have_no_padding() -> None:
    """Without `generate`, a model counts columns of padding as positions, and rotates keys accordingly."""
    model, rows = model_of("llama"), [tokens(30, seed=1), tokens(17, seed=2)]
    with opened(model) as cache:
        prefix, prompt = PrefixCache(model, cache), rows[1][None]
        with pytest.raises(ConfigError, match=r"attention_mask\[1\]: .*13 columns of padding.*generate"):
            prefix.begin(**left_padded(rows))
        with prefix.begin(prompt, torch.ones_like(prompt)) as batch:
            assert batch.num_cached == 0


def test_a_second_store_continues_the_first() -> None:
    model, full = model_of("llama"), tokens(1, 20)
    with opened(model) as cache, torch.no_grad():
        prefix = PrefixCache(model, cache)
        with prefix.begin(full[:, :8]) as batch:
            for begin, end, stored in ((0, 12, 12), (12, 20, 8), (20, 20, 0)):
                if begin < end:
                    model(full[:, begin:end], **{CACHE: batch.cache})
                assert batch.store(full[:, :end]) == stored
            with pytest.raises(ConfigError, match=r"sequences\[0\]: .*20 tokens of the last store"):
                batch.store(tokens(1, 20, seed=1))
            with pytest.raises(ConfigError, match=r"sequences\[0\]: .*20 tokens of the last store"):
                batch.store(full[:, :12])
            with pytest.raises(ConfigError, match=r"sequences.shape: \(2, 20\)"):
                batch.store(full.repeat(2, 1))
        never_computed = torch.cat([full[:, :12], full[:, 8:]], 1)
        for row, columns in ((full, 19), (never_computed, 12)):
            with prefix.begin(row) as batch:
                assert batch.num_cached == columns
                cached_logits = logits(model, row, batch.cache, columns)
                assert torch.allclose(cached_logits, logits(model, row)[:, columns:], atol=1e-4)


def test_several_answers_and_beams() -> None:
    model, text = model_of("llama"), tokens(2, 21)
    with opened(model) as cache:
        prefix = PrefixCache(model, cache)
        for _ in range(2):
            for options in (
                {"do_sample": False, "num_beams": 3, "max_new_tokens": 7},
                {"do_sample": False, "num_beams": 3, "num_return_sequences": 2, "max_new_tokens": 7},
                {"do_sample": True, "num_return_sequences": 3, "max_new_tokens": 9},
            ):
                torch.manual_seed(3)
                expected = model.generate(text, **options)
                torch.manual_seed(3)
                answers = prefix.generate(text, **options)
                assert torch.equal(answers, expected), options
        for row in answers:  # the answers were stored under their own tokens
            with prefix.begin(row[None]) as batch:
                assert batch.num_cached == 28
                assert torch.allclose(
                    logits(model, row[None], batch.cache, 28), logits(model, row[None])[:, 28:], atol=1e-4
                )


def test_arguments_and_results_equal_generate() -> None:
    model, text = model_of("llama"), tokens(1, 12)
    config = GenerationConfig(
        max_new_tokens=4, do_sample=False, return_dict_in_generate=True, output_scores=True
    )
    with opened(model) as cache:
        prefix = PrefixCache(model, cache)
        for _ in range(2):
            expected, result = model.generate(text, config), prefix.generate(text, config)
            assert torch.equal(result.sequences, expected.sequences)
            for a, b in zip(result.scores, expected.scores, strict=True):
                assert torch.allclose(a, b, atol=1e-4)
        assert torch.equal(prefix.generate(inputs=text, **GREEDY), model.generate(inputs=text, **GREEDY))
        assert loaded(cache) == 24


def test_stop_strings_need_a_tokenizer() -> None:
    words = {f"w{number}": number for number in range(96)} | {"abcdef": 96}  # transformers tokenizes abcdef
    plain = Tokenizer(models.WordLevel(words, "w95"))
    model, text = model_of("llama"), tokens(1, 12)
    answer = model.generate(text, **GREEDY)[0, 12:].tolist()
    options = GREEDY | {
        "stop_strings": [f"w{answer[2]}"], "tokenizer": PreTrainedTokenizerFast(tokenizer_object=plain)
    }  # fmt: skip
    with opened(model) as cache:
        sequences = PrefixCache(model, cache).generate(text, **options)
        assert torch.equal(sequences, model.generate(text, **options))
        assert sequences.shape[1] <= 15


def test_an_answer_is_returned_if_it_cannot_be_stored(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model, text = model_of("llama"), tokens(1, 12)
    expected = model.generate(text, **GREEDY)

    def fail(*_: Any, **__: Any) -> int:
        raise RuntimeError("out of memory")

    with opened(model) as cache:
        prefix = PrefixCache(model, cache)
        with monkeypatch.context() as patched:
            patched.setattr(PrefixBatch, "store", fail)
            for _ in range(3):
                assert torch.equal(prefix.generate(text, **GREEDY), expected)
        assert [
            record.getMessage() for record in caplog.records if record.name == "kvoffload.transformers"
        ] == ["the answer is not stored: RuntimeError: out of memory"]
        with monkeypatch.context() as patched:
            patched.setattr(KVRequest, "finish", fail)
            assert torch.equal(prefix.generate(text, **GREEDY), expected)
        monkeypatch.setattr(model, "forward", fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            prefix.generate(text, **GREEDY)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_shorter_types_load_the_stored_bytes(dtype: torch.dtype) -> None:
    """Compares KV, not tokens: logits round differently if fewer tokens are computed at once."""
    model = model_of("llama", seed=1, num_hidden_layers=2).to(dtype)
    text = tokens(1, 25)
    with opened(model) as cache, torch.no_grad():
        prefix = PrefixCache(model, cache)
        with prefix.begin(text) as batch:
            model(text, **{CACHE: batch.cache})
            assert batch.store(text) == 24
            stored = [(layer.keys, layer.values) for layer in batch.cache.layers]
        with prefix.begin(text) as batch:
            assert batch.num_cached == 24
            for layer, pair in zip(batch.cache.layers, stored, strict=True):
                assert layer.keys.dtype == dtype
                assert torch.equal(layer.keys, pair[0][:, :, :24])
                assert torch.equal(layer.values, pair[1][:, :, :24])
        prefix.generate(text, **GREEDY)


def test_tenants_and_configurations_share_nothing(tmp_path: Path) -> None:
    text = tokens(1, 20)
    model = model_of("llama")
    with opened(model, tiers=[f"disk:{tmp_path}:16MiB"]) as cache:
        prefix = PrefixCache(model, cache)
        prefix.generate(text, **GREEDY, salt="a")
        for salt, columns in (("b", 0), ("", 0), ("a", 19)):
            with prefix.begin(text, salt=salt) as batch:
                assert batch.num_cached == columns
    other = model_of("llama", rope_parameters={"rope_type": "default", "rope_theta": 77.0})
    with opened(other, tiers=[f"disk:{tmp_path}:16MiB"]) as cache:
        prefix = PrefixCache(other, cache)
        with prefix.begin(text, salt="a") as batch:
            assert batch.num_cached == 0


def test_a_damaged_disk_costs_hits_and_no_token(tmp_path: Path) -> None:
    model, text = model_of("qwen3"), tokens(1, 60)
    disk = [f"disk:{tmp_path}:16MiB"]
    with opened(model, tiers=disk) as cache:
        expected = PrefixCache(model, cache).generate(text, **GREEDY)
    slab = slab_in(tmp_path)
    data = np.frombuffer(slab.read_bytes(), np.uint8).copy()
    used = np.flatnonzero(data)
    data[np.random.default_rng(4).choice(used[used > 65536], 30)] ^= 16
    slab.write_bytes(data.tobytes())
    with opened(model, tiers=disk) as cache:
        assert torch.equal(PrefixCache(model, cache).generate(text, **GREEDY), expected)
        assert cache.stats().tiers["disk"].mismatches > 0
        assert loaded(cache) < 56


SECOND_PROCESS = """
import sys
sys.path.insert(0, {tests!r})
import kvoffload
from kvoffload.integrations.transformers import PrefixCache, kv_layout
from support.timeouts import HANGS_S
from support.tiny_models import model_of, tokens
model = model_of("llama")
options = {{"ram": "16MiB", "tiers": [{disk!r}], "deadline_s": 600}}
with kvoffload.open(model="random weights", layout=kv_layout(model, 4), **options) as cache:
    answer = PrefixCache(model, cache).generate(tokens(1, 30), do_sample=False, max_new_tokens=6)
    print(sum(cache.stats().hit_tokens.values()), *answer[0].tolist())
"""


def test_two_processes_share_a_disk_one_after_the_other(tmp_path: Path) -> None:
    model, disk = model_of("llama"), f"disk:{tmp_path}:16MiB"
    with opened(model, tiers=[disk]) as cache:
        expected = PrefixCache(model, cache).generate(tokens(1, 30), **GREEDY)
    code = SECOND_PROCESS.format(tests=str(Path(__file__).parents[1]), disk=disk)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    hits, *answer = map(int, done.stdout.split())
    assert hits == 28
    assert answer == expected[0].tolist()


def test_a_saved_model_has_the_keys_of_the_original(tmp_path: Path) -> None:
    model = model_of("gemma3_text", seed=4)
    before = configuration_digest(model)
    model.save_pretrained(tmp_path)
    assert configuration_digest(model) == before
    assert configuration_digest(AutoModelForCausalLM.from_pretrained(tmp_path)) == before
    assert configuration_digest(model_of("gemma3_text", sliding_window=13)) != before


# ---- refusals


DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
LONG = {
    "rope_type": "longrope", "rope_theta": 1e4, "factor": 16.0, "original_max_position_embeddings": 32,
    "short_factor": [1.0] * 4, "long_factor": [8.0, 6.0, 4.0, 2.0],
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "fields", "named"),
    [
        ("llama", {"rope_parameters": DYNAMIC}, "rope_parameters.rope_type: 'dynamic'"),
        (
            "llama",
            {"rope_scaling": {"type": "dynamic", "factor": 4.0}},
            "rope_parameters.type: 'dynamic'",
        ),
        ("llama", {"rope_parameters": LONG}, "rope_parameters.rope_type: 'longrope'"),
        (
            "phi3",
            {"rope_parameters": LONG, "original_max_position_embeddings": 32},
            "rope_parameters.rope_type: 'longrope'",
        ),
        (
            "gemma3_text",
            {"rope_parameters": {"full_attention": DYNAMIC, "sliding_attention": {"rope_type": "default"}}},
            "rope_parameters.full_attention.rope_type: 'dynamic'",
        ),
    ],
)
def test_rope_that_depends_on_the_total_length_is_refused(
    name: str, fields: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        kv_layout(model_of(name, **fields), T)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"text_config": {"rope_scaling": {"type": "dynamic"}}}, "text_config.rope_scaling.type: 'dynamic'"),
        ({"rope_scaling": {"rope_type": "my_dynamic_ntk"}}, "rope_scaling.rope_type: 'my_dynamic_ntk'"),
        ({"layers": [{"rope_parameters": {"a": {"type": "longrope"}}}]}, "layers.0.rope_parameters.a.type: "),
    ],
)
def test_rope_is_found_at_every_depth_of_a_configuration(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        check_rope(fields)
    check_rope({"type": "dynamic", "rope_scaling": {"type": "linear"}, "rope_parameters": None})


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"cache_implementation": "static"}, "cache_implementation: 'static'"),
        ({"cache_implementation": "quantized"}, "cache_implementation: 'quantized'"),
        ({"cache_implementation": "offloaded"}, "cache_implementation: 'offloaded'"),
        ({"cache_implementation": "paged"}, "cache_implementation: 'paged'"),
        ({"past_key_values": DynamicCache()}, "past_key_values"),
        ({"cache": DynamicCache()}, "cache"),
        ({"use_cache": False}, "use_cache: False"),
        ({"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens: 3"),
        ({"prefill_chunk_size": 4}, "prefill_chunk_size: 4"),
        ({"assistant_model": "small"}, "assistant_model: 'small'"),
        ({"assistant_early_exit": 1}, "assistant_early_exit: 1"),
        ({"use_mtp": True}, "use_mtp: True"),
        ({"token_healing": True}, "token_healing: True"),
        ({"position_ids": torch.zeros((1, 9))}, "position_ids: 'Tensor'"),
        ({"pixel_values": torch.zeros((1, 9))}, "pixel_values: 'Tensor'"),
        ({"inputs_embeds": torch.zeros((1, 9, 32))}, "inputs_embeds: 'Tensor'"),
        ({"attention_mask": torch.tensor([[1] * 8 + [0]])}, r"attention_mask\[0\]: .*padding on the left"),
        ({"attention_mask": torch.ones((1, 8))}, r"attention_mask.shape: \(1, 8\)"),
        ({"attention_mask": torch.full((1, 9), 2)}, "attention_mask: 2 is invalid; allowed: 0 for padding"),
        ({"attention_mask": torch.full((1, 9), 0.5)}, "attention_mask: 0.5"),
    ],
)
def test_arguments_that_cannot_work_are_named(options: dict[str, Any], named: str) -> None:
    model = model_of("llama")
    with opened(model) as cache:
        prefix = PrefixCache(model, cache)
        with pytest.raises(ConfigError, match=named):
            prefix.generate(tokens(1, 9), **GREEDY, **options)
        if "cache_implementation" in options:
            with pytest.raises(ConfigError, match=named):
                prefix.generate(tokens(1, 9), GenerationConfig(max_new_tokens=2, **options))


def test_arguments_without_names_are_checked() -> None:
    model = model_of("llama")
    with opened(model) as cache:
        prefix = PrefixCache(model, cache)
        with pytest.raises(ConfigError, match="assistant_model: 'small'"):
            prefix.generate(tokens(1, 9), None, None, None, None, None, "small")
        for arguments, options in (([None] * 20, {}), ([None], {"generation_config": GenerationConfig()})):
            with pytest.raises(ConfigError, match=f"arguments: '{len(arguments)} without names'"):
                prefix.generate(tokens(1, 9), *arguments, **options)
        with pytest.raises(ConfigError, match="use_mtp: True"):
            prefix.generate(tokens(1, 9), GenerationConfig(max_new_tokens=2, use_mtp=True))


def test_prompts_with_padding_need_a_mask() -> None:
    model = model_of("llama")
    with opened(model) as cache:
        with pytest.raises(ConfigError, match="attention_mask: missing"):
            PrefixCache(model, cache).generate(left_padded([tokens(3), tokens(5)])["input_ids"], **GREEDY)
        with pytest.raises(ConfigError, match="input_ids: missing"):
            PrefixCache(model, cache).generate(**GREEDY)


@pytest.mark.parametrize("name", ["mamba", "qwen3_next", "t5", "jamba"])
def test_models_without_prefixes_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="model"):
        kv_layout(unsupported(name), T)


def test_layers_of_different_shapes_are_refused() -> None:
    model = model_of(
        "gemma4_text", layer_types=["sliding_attention", "sliding_attention", "full_attention"],
        global_head_dim=16, num_global_key_value_heads=1, num_kv_shared_layers=0,
        hidden_size_per_layer_input=0, vocab_size_per_layer_input=97, sliding_window=12,
    )  # fmt: skip
    with pytest.raises(ConfigError, match=r"model: 'Gemma4ForCausalLM'.*equal.*kv\[2\]\[0\].shape"):
        kv_layout(model, T)


def test_a_cache_of_another_layout_is_refused() -> None:
    with opened(model_of("llama")) as cache, pytest.raises(ConfigError, match="layout"):
        PrefixCache(model_of("llama", num_hidden_layers=2), cache)


def test_a_static_cache_is_no_dynamic_cache() -> None:
    """`kv_layout` accepts only the class of dynamic caches."""
    assert not isinstance(StaticCache(model_of("llama").config, max_cache_len=8), DynamicCache)


def unsupported(name: str) -> Any:
    import transformers

    if name == "t5":
        return transformers.T5ForConditionalGeneration(
            transformers.T5Config(vocab_size=97, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2)
        )
    if name == "mamba":
        return transformers.MambaForCausalLM(
            transformers.MambaConfig(vocab_size=97, hidden_size=16, state_size=4, num_hidden_layers=2)
        )
    if name == "jamba":
        return model_of(
            "jamba", use_mamba_kernels=False, attn_layer_period=2, attn_layer_offset=1, num_experts=2
        )
    return model_of(
        "qwen3_next", layer_types=["linear_attention", "full_attention", "linear_attention"],
        linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=8, linear_value_head_dim=8,
        num_experts=2, num_experts_per_tok=1, moe_intermediate_size=8, shared_expert_intermediate_size=8,
    )  # fmt: skip


def test_layers_on_two_devices_are_refused() -> None:
    model = copy.deepcopy(model_of("llama"))

    def move(_: Any, __: Any, output: Any) -> None:
        layer = getattr(output, CACHE).layers[1]
        layer.keys, layer.values = layer.keys.to("meta"), layer.values.to("meta")

    model.register_forward_hook(move)
    with pytest.raises(ConfigError, match=r"equal shapes, dtypes and devices; kv\[1\]\[0\].device: 'meta'"):
        kv_layout(model, T)


def test_prompts_on_another_device_are_refused() -> None:
    model = model_of("llama")
    with opened(model) as cache:
        prefix = PrefixCache(model, cache)
        for call in (prefix.begin, prefix.generate):
            with pytest.raises(ConfigError, match=r"input_ids\.device: 'meta' is invalid; allowed: cpu"):
                call(tokens(1, 9).to("meta"))


def test_a_model_in_training_mode_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"model.training: True .*call model.eval\(\)"):
        kv_layout(copy.deepcopy(model_of("llama")).train(), T)
    model = copy.deepcopy(model_of("llama"))
    with opened(model) as cache:
        prefix = PrefixCache(model, cache)
        model.train()
        for call in (prefix.begin, prefix.generate):
            with pytest.raises(ConfigError, match=r"model.training: True .*call model.eval\(\)"):
                call(tokens(1, 9))
