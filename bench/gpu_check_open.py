"""The parts of ``make gpu-check`` for `kvoffload.open`: tensors of an engine, and models of transformers.

    python bench/gpu_check_open.py --device cuda --out FILE

`bench/gpu_check.py` starts it in a separate process. FILE is a JSON list of the parts that passed, failed or
did not run.

    open API       for several layouts: stores blocks while a kernel still computes them, loads them into
                   other blocks, and compares bytes; speed of 64 blocks of 2 MiB
    transformers   compares ten turns of tiny models in float32 with ``model.generate``
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch as untyped_torch

import kvoffload
from gpu_check_parts import Part, PartsFile, part
from open_api import BLOCKS, LAYERS, LAYOUTS, TOKENS, seconds

ROOT = Path(__file__).resolve().parent.parent
torch: Any = untyped_torch
DEADLINE_S = 120.0
SLEEP_CYCLES = 100_000_000
"""About 50 ms of a GPU."""


class KV:
    """Tensors of an engine in one layout, filled with random numbers."""

    def __init__(self, name: str, device: str) -> None:
        self.axes, shape = LAYOUTS[name]
        pairs = "head" in self.axes and "kv" not in self.axes
        generator = torch.Generator(device).manual_seed(len(name))
        self.flat = [
            torch.randint(0, 1 << 15, shape, dtype=torch.int16, device=device, generator=generator).view(
                torch.float16
            )
            for _ in range(LAYERS * (1 + pairs))
        ]
        self.tensors: Any = list(zip(self.flat[::2], self.flat[1::2], strict=True)) if pairs else self.flat
        self.layout = kvoffload.KVLayout.of(self.tensors, self.axes, TOKENS)
        self.has_batch = "batch" in self.axes

    def place(self, first: int) -> dict[str, Any]:
        """Return the argument that selects blocks: every second block, from this block on."""
        return {"row": 0} if self.has_batch else {"block_ids": [*range(first, 2 * BLOCKS, 2)]}

    def blocks(self, first: int) -> Any:
        """Return the bytes of these blocks, layer by layer."""
        chosen = []
        for tensor in self.flat:
            bits = tensor.view(torch.int16)
            if self.has_batch:
                chosen.append(bits[:, :, : BLOCKS * TOKENS].reshape(-1))
            else:
                rows = bits.movedim(1, 0) if self.axes.startswith("kv") else bits
                chosen.append(rows[first::2].reshape(-1))
        return torch.cat(chosen).cpu()

    def compute(self) -> None:
        """Submit work that changes every number, and takes a while."""
        if self.flat[0].is_cuda:
            torch.cuda._sleep(SLEEP_CYCLES)
        for tensor in self.flat:
            tensor.view(torch.int16).bitwise_xor_(0x5A5)

    def clear(self) -> None:
        for tensor in self.flat:
            tensor.zero_()


def check_open(device: str) -> Iterator[Part]:
    """Check each layout; yields one part per layout."""
    for name in LAYOUTS:
        kv = KV(name, device)
        tokens, wrong = list(range(BLOCKS * TOKENS)), []
        ram = 4 * BLOCKS * kv.layout.block_bytes
        with kvoffload.open(model="gpu-check", layout=kv.layout, ram=ram, deadline_s=DEADLINE_S) as cache:
            with cache.request(tokens) as request:
                if request.load_into(kv.tensors, **kv.place(0)):
                    wrong.append("a hit in an empty cache")
                kv.compute()
                request.store_from(kv.tensors, **kv.place(0))
            expected = kv.blocks(0)
            kv.clear()
            with cache.request(tokens) as request:
                hit = request.load_into(kv.tensors, **kv.place(1))
            if hit < len(tokens) - 1:  # the last token is always computed, so that a request has logits
                wrong.append(f"{hit} of {len(tokens)} tokens loaded")
            differing = int((kv.blocks(1) != expected).sum())
            if differing:
                wrong.append(f"{differing} of {expected.numel()} numbers differ")
            speeds = {verb: round(speed, 2) for verb, speed in measured(cache, kv).items()}
        yield part(f"open API, {name}", "failed" if wrong else "passed", "; ".join(wrong), **speeds)


def measured(cache: Any, kv: KV, rounds: int = 5) -> dict[str, float]:
    """Median GB/s of stores and loads, without the first round."""
    loads: list[float] = []
    stores: list[float] = []
    for number in range(1, rounds + 2):
        tokens = [token + number * 100_000 for token in range(BLOCKS * TOKENS)]
        with cache.request(tokens) as request:
            stores.append(seconds(lambda: request.store_from(kv.tensors, **kv.place(0))))
        with cache.request(tokens) as request:
            loads.append(seconds(lambda: request.load_into(kv.tensors, **kv.place(0))))
    size = BLOCKS * kv.layout.block_bytes
    return {
        "store GB/s": size / statistics.median(stores[1:]) / 1e9,
        "load GB/s": size / statistics.median(loads[1:]) / 1e9,
    }


def check_transformers(device: str) -> Iterator[Part]:
    """Compare ten turns of each tiny model with the model alone; yields one part per model."""
    if importlib.util.find_spec("transformers") is None:
        yield part("transformers", "not run", "transformers is not installed")
        return
    sys.path.insert(0, str(ROOT / "tests"))
    from kvoffload.integrations.transformers import PrefixCache, kv_layout

    tiny = importlib.import_module("support.tiny_models")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    greedy: dict[str, Any] = {"do_sample": False, "max_new_tokens": 6}
    for name in tiny.MODELS:
        model, text, wrong = tiny.model_of(name).to(device), tiny.tokens(1, 9).to(device), 0
        layout = kv_layout(model, 4)
        with kvoffload.open(model="tiny", layout=layout, ram="16MiB", deadline_s=DEADLINE_S) as cache:
            prefix = PrefixCache(model, cache)
            for turn in range(10):
                mask = torch.ones_like(text)
                expected = model.generate(text, attention_mask=mask, **greedy)
                answer = prefix.generate(text, attention_mask=mask, **greedy)
                wrong += not torch.equal(answer, expected)
                text = torch.cat([expected, tiny.tokens(1, 5, seed=turn).to(device)], 1)
            hit_tokens = sum(cache.stats().hit_tokens.values())
        failed = bool(wrong) or not hit_tokens
        why = f"{wrong} of 10 answers differ, {hit_tokens} tokens loaded" if failed else ""
        yield part(
            f"transformers, {name}", "failed" if failed else "passed", why, turns=10, loaded_tokens=hit_tokens
        )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, required=True)
    chosen = parser.parse_args()
    parts = PartsFile(chosen.out)
    parts.run("open API", check_open(chosen.device))
    parts.run("transformers", check_transformers(chosen.device))
    return parts.exit_code()


if __name__ == "__main__":
    raise SystemExit(main())
