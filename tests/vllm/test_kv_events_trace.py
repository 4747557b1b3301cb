"""Traces made from vLLM's KV events equal a recording of the same requests."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from kvoffload.traces.conversion.convert import convert
from kvoffload.traces.format import read_trace
from support.vllm_needs import CONNECTOR, needs
from support.vllm_traffic import Expected

# vLLM's warnings are not ours.
pytestmark = [pytest.mark.filterwarnings("ignore"), needs(*CONNECTOR)]


def test_events_of_an_engine_give_its_requests(
    start_engine: Callable[..., Any],
    llama: Path,
    on_llama: Expected,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from vllm.config import KVEventsConfig

    engine = start_engine(
        llama,
        {"ram": "8MiB", "record": str(tmp_path / "recorded.jsonl")},
        connector=True,
        kv_events_config=KVEventsConfig(enable_kv_cache_events=True, publisher="null"),
    )
    batches: list[Any] = []
    publisher = engine.core.scheduler.kv_event_publisher
    monkeypatch.setattr(publisher, "publish", batches.append)
    prompts = [on_llama.prompts[0], on_llama.prompts[1], on_llama.prompts[0], on_llama.prompts[0][:100]]
    # The head of the third prompt is on the device; the last prompt computes no whole block.
    prompts.insert(2, prompts[1][:150] + prompts[0][:140])
    for number, prompt in enumerate(prompts):
        engine.tokens([prompt])
        engine.drain()
        for batch in batches:
            # A fake clock: requests are ten seconds apart on any machine.
            batch.ts = 10.0 * number if batch.ts > 1e6 else batch.ts
    engine.connector._recording.recorder.close()
    lines = [json.dumps(_plain(msgspec.msgpack.decode(msgspec.msgpack.encode(batch)))) for batch in batches]
    (tmp_path / "events.jsonl").write_text("\n".join(lines))
    out = tmp_path / "events.gap-2s.jsonl"
    done = convert(str(tmp_path / "events.jsonl"), out, block_tokens=32)
    assert done.source == "kv_events"
    inferred, recorded = read_trace(out), read_trace(tmp_path / "recorded.jsonl")
    assert inferred.block_tokens == recorded.block_tokens == 32
    lengths = np.diff(recorded.offsets).tolist()
    assert lengths == [len(prompt) // 32 for prompt in prompts]
    result = np.diff(inferred.offsets).tolist()
    # Blocks loaded from RAM are stored on the device again, with an event.
    assert result == [*lengths[:4]], "the last prompt is missing: the device had all of its whole blocks"
    assert inferred.refs.tolist() == recorded.refs[: sum(result)].tolist(), (
        "the same blocks in the same order"
    )


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    return value
