"""A chat whose KV cache survives restarts: ``python examples/chat_transformers.py MODEL TIER``.

Reads questions from the terminal. Needs transformers. MODEL is a directory or a name of the hub, such as
``Qwen/Qwen3-0.6B``; TIER is a disk such as ``disk:/nvme/kv:50GiB``. A line after each answer shows how many
tokens came from the cache. After a restart the same questions are warm.
"""

from __future__ import annotations

import sys
import time

from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer

import kvoffload
from kvoffload.integrations.transformers import PrefixCache, kv_layout


def chat(name: str, tier: str) -> None:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(name), AutoTokenizer.from_pretrained(name)
    revision = getattr(model.config, "_commit_hash", None) or "local"
    with kvoffload.open(model=f"{name}@{revision}", layout=kv_layout(model), tiers=[tier]) as cache:
        prefix, messages, before = PrefixCache(model, cache), list[dict[str, str]](), 0
        for line in sys.stdin:
            messages.append({"role": "user", "content": line.strip()})
            text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            inputs = tokenizer(text, return_tensors="pt", add_special_tokens=False).to(model.device)
            start, streamer = time.perf_counter(), TextStreamer(tokenizer, skip_prompt=True)
            output = prefix.generate(**inputs, max_new_tokens=300, streamer=streamer)
            hits = sum(cache.stats().hit_tokens.values())
            width = inputs["input_ids"].shape[1]
            print(f"[{hits - before} of {width} tokens from the cache, {time.perf_counter() - start:.1f} s]")
            answer = tokenizer.decode(output[0, width:], skip_special_tokens=True)
            messages.append({"role": "assistant", "content": answer})
            before = hits


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    chat(*sys.argv[1:])
