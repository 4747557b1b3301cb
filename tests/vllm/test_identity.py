"""No tier serves blocks of an engine with another configuration of the same model."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support.valkey_server import running
from support.vllm_engine import LLAMA
from support.vllm_traffic import PATIENCE_S, certain_answers, random_prompts

pytest.importorskip("vllm.v1", reason="vllm is not installed here: `make test-vllm` builds an environment")

pytestmark = pytest.mark.filterwarnings("ignore")

PROMPTS = random_prompts(1, 6, 300)
"""Nine whole blocks each."""
BLOCKS = 54
TOKENS = 8

FP8 = {"kv_cache_dtype": "fp8"}
CHANGES = {
    "rope_theta": {"hf_overrides": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}},
    "rms_norm_eps": {"hf_overrides": {"rms_norm_eps": 0.1}},
}
"""Settings that change a model's KV but not its directory."""


class Tiers:
    """A disk and a server, used by one engine after the other, each with an empty RAM."""

    def __init__(self, start_engine: Callable[..., Any], model: Path, directory: Path, url: str) -> None:
        self._start, self._model = start_engine, model
        server = {"timeout": PATIENCE_S, "probe_timeout": PATIENCE_S}
        self._tiers = [
            {"type": "disk", "path": str(directory), "capacity": "64MiB"},
            {"url": f"{url}/found-out", **server},
            {"url": f"{url}/named", "identity": "tiny-llama", **server},
        ]

    def with_adapter(self, adapter: Path | None, *, offload: bool, connector: bool = True) -> list[list[int]]:
        """Return an engine's answers with LoRA to the first two prompts; `hits` counts hits on the disk."""
        options = (
            {"ram": "6MiB", "tiers": self._tiers[:1], "tier_deadline_s": PATIENCE_S} if offload else None
        )
        engine = self._start(self._model, options, connector=connector, enable_lora=True, max_lora_rank=8)
        answers = []
        for prompt in PROMPTS[:2]:
            answers.append(adapted(engine, prompt, adapter))
            engine.drain()
        if offload and connector:
            assert engine.manager.core.settle(PATIENCE_S)
            self.hits = sum(engine.manager.core.hit_blocks[1:])
        elif offload:
            assert not hasattr(engine.manager.core, "settle"), "it has no tiers"
        engine.close()
        return answers

    def plain(self, **settings: Any) -> list[list[int]]:
        """Return the certain answers of an engine without tiers to the prompts in order."""
        prompts, answers = certain_answers(self._start(self._model, None, **settings), PROMPTS, TOKENS)
        return [answers[prompts.index(prompt)] if prompt in prompts else [] for prompt in PROMPTS]

    def life(self, **settings: Any) -> tuple[list[list[int]], list[int]]:
        """Return the answers of an engine with the tiers, and the hit blocks of each tier behind RAM."""
        offload = {"ram": "6MiB", "tiers": self._tiers, "tier_deadline_s": PATIENCE_S}
        engine = self._start(self._model, offload, **settings)
        answers = []
        for prompt in PROMPTS:
            answers += engine.tokens([prompt], TOKENS)
            engine.drain()
            assert engine.manager.core.settle(PATIENCE_S)
        hits = engine.manager.core.hit_blocks[1:]
        engine.close()
        return answers, hits


def adapted(engine: Any, prompt: list[int], adapter: Path | None) -> list[int]:
    """Return the answer of an engine to a prompt, with a LoRA adapter or without."""
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    sampling = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True, detokenize=False)
    request = None if adapter is None else LoRARequest("adapter", 1, str(adapter))
    (output,) = engine.llm.generate(
        [{"prompt_token_ids": prompt}], sampling, use_tqdm=False, lora_request=request
    )
    return list(output.outputs[0].token_ids)


def write_adapter(directory: Path, seed: int) -> Path:
    """Write a LoRA adapter of rank 8 for the keys' projections, with random weights."""
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(LLAMA["num_hidden_layers"]):
        name = f"base_model.model.model.layers.{layer}.self_attn.k_proj"
        tensors[f"{name}.lora_A.weight"] = torch.randn(8, LLAMA["hidden_size"], generator=generator)
        tensors[f"{name}.lora_B.weight"] = torch.randn(128, 8, generator=generator)
    directory.mkdir(exist_ok=True)
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 8, "target_modules": ["k_proj"], "bias": "none",
              "task_type": "CAUSAL_LM", "base_model_name_or_path": ""}  # fmt: skip
    (directory / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "adapter_model.safetensors")
    return directory


def wrong(answers: list[list[int]], plain: list[list[int]]) -> list[int]:
    """Return the numbers of the prompts whose answers differ from answers without tiers."""
    return [
        row for row, (answer, certain) in enumerate(zip(answers, plain, strict=True))
        if answer[: len(certain)] != certain
    ]  # fmt: skip


@pytest.fixture(scope="module")
def tiers(
    start_engine: Callable[..., Any], llama: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Tiers]:
    """Tiers written by an engine with the model's own configuration."""
    directory, cache = tmp_path_factory.mktemp("tiers"), pytest.MonkeyPatch()
    cache.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
    with running(directory) as server:
        tiers = Tiers(start_engine, llama, directory / "disk", server.url)
        assert tiers.life()[1] == [0, 0, 0]
        yield tiers
    cache.undo()


def test_an_engine_with_the_same_configuration_finds_the_blocks(tiers: Tiers) -> None:
    """Control for the other tests, which find no block."""
    assert sum(tiers.life()[1]) == BLOCKS


@pytest.mark.parametrize("change", list(CHANGES))
def test_an_override_of_the_models_configuration_is_another_producer(tiers: Tiers, change: str) -> None:
    settings = CHANGES[change]
    plain = tiers.plain(**settings)
    answers, hits = tiers.life(**settings)
    assert wrong(answers, plain) == []
    assert hits == [0, 0, 0]


def test_another_model_dtype_under_an_fp8_cache_is_another_producer(tiers: Tiers) -> None:
    """bfloat16 rounds differently on other processors, so the test compares hits, not answers."""
    import torch

    if not (torch.cpu._is_avx512_supported() or torch.cpu._is_amx_tile_supported()):
        pytest.skip("this processor has neither AVX-512 nor AMX, which vLLM needs for an fp8 cache on a CPU")
    tiers.life(**FP8)
    assert tiers.life(**FP8, dtype="bfloat16")[1] == [0, 0, 0]


@pytest.mark.slow
def test_a_retrained_adapter_under_the_same_path_gets_no_old_block(tiers: Tiers, tmp_path: Path) -> None:
    """Keys have the adapter's name and path. Requests without an adapter use the same tier."""
    before = tiers.with_adapter(write_adapter(tmp_path / "adapter", 1), offload=True)
    adapter = write_adapter(tmp_path / "adapter", 2)
    plain = tiers.with_adapter(adapter, offload=False)
    assert plain != before
    assert tiers.with_adapter(adapter, offload=True) == plain
    assert tiers.hits == 0
    tiers.with_adapter(None, offload=True)
    tiers.with_adapter(None, offload=True)
    assert tiers.hits == 18


@pytest.mark.slow
def test_with_adapters_and_vllms_own_connector_an_engine_runs_without_tiers(
    tiers: Tiers, caplog: pytest.LogCaptureFixture
) -> None:
    """vLLM's own connector does not reveal the adapters of requests."""
    tiers.with_adapter(None, offload=True, connector=False)
    assert "WITHOUT the tier disk" in caplog.text
