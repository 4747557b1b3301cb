"""Runs a vLLM engine with LMCache's connector, and prints its answers and hits as JSON.

    python -m support.lmcache_engine MODEL URL PROMPTS

`MODEL` is the directory of a tiny model, which is written if it is missing. `URL` is the address of a
``lmcache server``; without a server (``-``) the engine has no connector. `PROMPTS` is a JSON list of token
lists. Each prompt is answered alone. The connector is LMCache's own class for vLLM.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from support.vllm_engine import (
    ENVIRONMENT,
    Engine,
    write_llama,
)  # the first import: it sets the number of threads before torch is imported


def main(model: str, url: str, prompts: str) -> None:
    os.environ.update(ENVIRONMENT)  # a fork has the environment of its caller
    transfer: dict[str, Any] | None = None
    if url != "-":
        host, _, port = url.rpartition(":")
        transfer = {
            "kv_connector": "LMCacheMPConnector",
            "kv_connector_module_path": "lmcache.integration.vllm.lmcache_mp_connector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "lmcache.mp.host": host,
                "lmcache.mp.port": int(port),
                "lmcache.mp.mp_transfer_mode": "engine_driven",
            },
        }
    if not Path(model).exists():
        write_llama(Path(model))
    engine = Engine(Path(model), None, kv_transfer_config=transfer, num_gpu_blocks_override=40)
    from vllm import SamplingParams

    sampling, answers = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, detokenize=False), []
    for prompt in json.loads(prompts):
        (output,) = engine.llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
        answers.append({"tokens": list(output.outputs[0].token_ids), "hit": output.num_cached_tokens})
        engine.drain()
    print("ANSWERS", json.dumps(answers), flush=True)
    engine.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
