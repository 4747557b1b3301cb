"""Print the table of docs/start-vllm.md: RAM for common models and GPUs.

    python tools/ram_table.py

tests/docs/test_operators.py compares the page with this table. The bytes of a token come from
`kvoffload.model`, the prefill speed from `kvoffload.simulate.classes`. Memory and parameters are listed here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvoffload.model.kv_bytes import bytes_per_token
from kvoffload.simulate.classes import CLASSES, machine_of_class

_GIB = 2**30
_UTILIZATION = 0.92
"""vLLM 0.32's default of ``--gpu-memory-utilization``."""
_MULTIPLE, _STEP_BYTES = 4, 16 * _GIB
"""RAM is this multiple of the KV memory on the GPUs, rounded up to the step."""

_GPU_BYTES = {
    "a100-pcie4": 80e9,
    "h100-pcie5": 80e9,
    "h200-pcie5": 141e9,
    "l40s-pcie4": 48e9,
    "mi300x-pcie5": 192e9,
}
"""Memory of a GPU, from the data sheets named in `CLASSES`."""
_PARAMETERS = {
    "meta-llama/Llama-3.1-8B": 8.03e9,
    "Qwen/Qwen3-8B": 8.19e9,
    "Qwen/Qwen3-32B": 32.8e9,
    "meta-llama/Llama-3.3-70B": 70.6e9,
}
"""Parameters of the models, from their cards."""
PAIRS = (
    ("meta-llama/Llama-3.1-8B", "l40s-pcie4", 1),
    ("meta-llama/Llama-3.1-8B", "a100-pcie4", 1),
    ("meta-llama/Llama-3.1-8B", "h100-pcie5", 1),
    ("Qwen/Qwen3-8B", "h100-pcie5", 1),
    ("Qwen/Qwen3-32B", "h100-pcie5", 2),
    ("Qwen/Qwen3-32B", "h200-pcie5", 1),
    ("meta-llama/Llama-3.3-70B", "h100-pcie5", 4),
    ("meta-llama/Llama-3.3-70B", "h200-pcie5", 2),
    ("meta-llama/Llama-3.3-70B", "mi300x-pcie5", 1),
)
"""Model, class of the GPUs, and number of GPUs of an engine."""


@dataclass(frozen=True)
class Size:
    """RAM for one engine.

    Attributes:
        token_bytes: KV of a token with a 16-bit cache.
        gpu_bytes: memory for KV on all GPUs of the engine: vLLM's share without 16-bit weights. Activations
            and CUDA graphs take a few GB more.
        ram_bytes: a first choice for ``--ram``.
        compute_s: time in which the GPUs compute as many tokens as RAM holds, without attention.
    """

    model: str
    gpus: str
    token_bytes: int
    gpu_bytes: float
    ram_bytes: int
    compute_s: float

    @property
    def ram_tokens(self) -> int:
        return self.ram_bytes // self.token_bytes


def size_of(model: str, kind: str, gpus: int) -> Size:
    """Compute the RAM for `model` on `gpus` GPUs of a class."""
    token_bytes, parameters = bytes_per_token(model), _PARAMETERS[model]
    gpu_bytes = gpus * _UTILIZATION * _GPU_BYTES[kind] - 2 * parameters
    ram_bytes = math.ceil(_MULTIPLE * gpu_bytes / _STEP_BYTES) * _STEP_BYTES
    per_token = machine_of_class(kind, parameters, gpus).prefill_s_per_token
    assert per_token is not None
    name = CLASSES[kind].gpu.replace(" 80 GB", "").removesuffix(" SXM")
    compute_s = ram_bytes // token_bytes * per_token.value
    return Size(model, f"{gpus} x {name}", token_bytes, gpu_bytes, ram_bytes, compute_s)


def table() -> str:
    """Build the table in Markdown."""
    headings = ("model", "GPUs", "KV of 1,000 tokens", "KV memory of the GPUs", "`--ram`", "tokens in RAM",
                "prefill of them")  # fmt: skip
    lines = [f"| {' | '.join(headings)} |", "|---" * len(headings) + "|"]
    for size in (size_of(*pair) for pair in PAIRS):
        cells = (
            size.model.split("/")[1], size.gpus, f"{1000 * size.token_bytes / 2**20:.0f} MiB",
            f"{size.gpu_bytes / _GIB:.0f} GiB", f"{size.ram_bytes // _GIB}GiB",
            f"{size.ram_tokens / 1e6:.1f} million", f"{size.compute_s / 60:.1f} min",
        )  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(table(), end="")
