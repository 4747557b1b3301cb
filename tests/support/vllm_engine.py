"""A tiny model with random weights, and engines that run it.

Engines compute in float32 by default. In bf16 the rounding of a logit may exceed the difference between two
tokens, and answers depend on the processor and on the splits of a prompt. Compared engines run in one thread,
with the same block size: see the documentation of vLLM's CPU backend.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import time
from pathlib import Path
from typing import Any

from support.vllm_traffic import PATIENCE_S

ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "TORCHDYNAMO_DISABLE": "1",  # log-probs would compile a kernel for half a minute
    # One thread, on any core. With two threads each of the thousands of small operations waits for both: this
    # is fifty times slower on a busy machine. vLLM's own variable affects only the workers of servers, and
    # binds them to a core that may be busy.
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
os.environ.update(ENVIRONMENT)

# At its start and end an engine collects garbage eight times, and each collection visits all objects of
# imported modules: 3 s of CPU time. These objects are frozen before each start; engines may not freeze or
# unfreeze objects themselves.
_freeze = gc.freeze
atexit.register(gc.unfreeze)
gc.freeze = gc.unfreeze = lambda: None

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 1024,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "bos_token_id": 0,
    "eos_token_id": 1,
}


TOKENIZER = {
    "version": "1.0",
    "added_tokens": [],
    "normalizer": None,
    "pre_tokenizer": {"type": "WhitespaceSplit"},
    "post_processor": None,
    "decoder": None,
    "model": {"type": "WordLevel", "vocab": {f"t{n}": n for n in range(1024)}, "unk_token": "t0"},
}
"""A tokenizer for servers, with a word for each token."""

HYBRID = LLAMA | {
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 80,
}
"""Two KV groups: every other layer attends to the last 80 tokens."""


def write_llama(directory: Path, config: dict[str, Any] = LLAMA, seed: int = 7) -> Path:
    """Write a Llama with random weights, whose scale gives attention enough effect to show wrong KV."""
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(seed)
    hidden, inner, vocab = LLAMA["hidden_size"], LLAMA["intermediate_size"], LLAMA["vocab_size"]
    heads, kv_heads, head = LLAMA["num_attention_heads"], LLAMA["num_key_value_heads"], LLAMA["head_dim"]

    def weights(*shape: int) -> Any:
        return torch.randn(*shape, generator=generator) * 1.5 / shape[-1] ** 0.5

    tensors = {
        "model.embed_tokens.weight": weights(vocab, hidden) * 16,
        "model.norm.weight": torch.ones(hidden),
        "lm_head.weight": weights(vocab, hidden),
    }
    for layer in range(LLAMA["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        tensors |= {
            prefix + "self_attn.q_proj.weight": weights(heads * head, hidden) * 2,
            prefix + "self_attn.k_proj.weight": weights(kv_heads * head, hidden) * 2,
            prefix + "self_attn.v_proj.weight": weights(kv_heads * head, hidden),
            prefix + "self_attn.o_proj.weight": weights(hidden, heads * head),
            prefix + "mlp.gate_proj.weight": weights(inner, hidden),
            prefix + "mlp.up_proj.weight": weights(inner, hidden),
            prefix + "mlp.down_proj.weight": weights(hidden, inner),
            prefix + "input_layernorm.weight": torch.ones(hidden),
            prefix + "post_attention_layernorm.weight": torch.ones(hidden),
        }
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    (directory / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    save_file(tensors, directory / "model.safetensors")
    return directory


class Engine:
    """A vLLM engine in this process, with access to our parts in it.

    Args:
        offload: options of our specification; None for an engine without offloading.
        connector: use our connector instead of vLLM's.
        settings: of vLLM, in place of the small engine's.
    """

    def __init__(
        self, model: Path, offload: dict[str, Any] | None, *, connector: bool = False, **settings: Any
    ) -> None:
        import torch
        from vllm import LLM

        from kvoffload.integrations.vllm.shared.versions import SINCE_STEADY_KEYS
        from support.vllm_needs import VERSION
        from support.vllm_processes import inspect_models_here

        inspect_models_here()
        assert torch.get_num_threads() == 1, "torch was imported before OMP_NUM_THREADS was set"

        if VERSION < SINCE_STEADY_KEYS:
            os.environ["PYTHONHASHSEED"] = "0"  # servers get it, too
        transfer = None
        if offload is not None:
            transfer = {
                "kv_connector": "OffloadingConnector",
                "kv_role": "kv_both",
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": {
                    "spec_name": "KVOffloadSpec",
                    "spec_module_path": "kvoffload.integrations.vllm",
                    **offload,
                },
            }
            if connector:
                transfer |= {
                    "kv_connector": "KVOffloadConnector",
                    "kv_connector_module_path": "kvoffload.integrations.vllm.connector",
                }
        _freeze()
        self.llm = LLM(
            model=str(model),
            skip_tokenizer_init=True,
            seed=0,
            disable_log_stats=False,
            **{
                "kv_transfer_config": transfer,
                "enforce_eager": True,
                "distributed_executor_backend": "uni",
                "dtype": "float32",
                "block_size": 32,
                "max_model_len": 512,
                "num_gpu_blocks_override": 24,
                "max_num_seqs": 4,
                **settings,
            },
        )

    @property
    def core(self) -> Any:
        """vLLM's ``EngineCore``."""
        return self.llm.llm_engine.engine_core.engine_core

    @property
    def connector(self) -> Any:
        """vLLM's connector on the scheduler's side."""
        return self.core.scheduler.connector

    @property
    def manager(self) -> Any:
        """Our adapter on the scheduler's side."""
        children = getattr(self.connector, "_connectors", [self.connector])
        (our_child,) = (child for child in children if hasattr(child, "connector_scheduler"))
        return our_child.connector_scheduler.manager

    @property
    def worker(self) -> Any:
        """Our worker."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        return get_kv_transfer_group().connector_worker.worker

    def generate(self, prompts: list[list[int]], tokens: int = 16, logprobs: int | None = None) -> list[Any]:
        """Serve prompts together, greedily; returns vLLM's outputs."""
        from vllm import SamplingParams

        sampling = SamplingParams(
            temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False, logprobs=logprobs
        )
        outputs = self.llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False
        )
        return [output.outputs[0] for output in outputs]

    def tokens(self, prompts: list[list[int]], tokens: int = 16) -> list[list[int]]:
        """Return the tokens of each answer."""
        return [list(output.token_ids) for output in self.generate(prompts, tokens)]

    def drain(self) -> None:
        """Step until no transfer is in flight, and all requests have finished.

        Like in a server, the counts of every step reach ``/metrics``.
        """
        deadline = time.monotonic() + PATIENCE_S
        while self.core.scheduler.has_requests():
            assert time.monotonic() < deadline, "transfers do not end"
            self.llm.llm_engine.step()

    def forget_device(self) -> None:
        """Empty the engine's own prefix cache, not ours."""
        self.drain()
        assert self.core.reset_prefix_cache()

    def close(self) -> None:
        """End the engine, so that another engine can start in this process. Idempotent."""
        if not hasattr(self, "llm"):
            return
        from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

        self.llm.llm_engine.engine_core.shutdown()
        del self.llm
        cleanup_dist_env_and_memory()
