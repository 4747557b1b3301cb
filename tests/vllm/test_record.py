"""``record`` in a real engine: the recording has the requests and the sources of their prompts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvoffload.errors import ConfigError
from kvoffload.explain.explanation import explain
from kvoffload.explain.misses import find_misses
from kvoffload.replay.config import ReplayConfig
from kvoffload.traces.format import read_trace
from support.vllm_needs import CONNECTOR, needs
from support.vllm_traffic import Expected

# vLLM's warnings are not ours.
pytestmark = [pytest.mark.filterwarnings("ignore"), needs(*CONNECTOR)]


def test_requests_and_their_sources_are_recorded(
    start_engine: Callable[..., Any], llama: Path, on_llama: Expected, tmp_path: Path
) -> None:
    """Prompts have nine whole blocks; the device has room for two prompts."""
    path = tmp_path / "kv.jsonl"
    engine = start_engine(llama, {"ram": "8MiB", "record": str(path)}, connector=True)
    order = [0, 1, 2, 0, 0]
    for number in order:
        assert engine.tokens([on_llama.prompts[number]])[0] == on_llama.answers[number]
        engine.drain()
    (output,) = engine.generate([on_llama.prompts[0][:40]], 3)
    assert len(output.token_ids) == 3
    engine.drain()
    engine.connector._recording.recorder.close()
    header, *lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert (header["block_tokens"], header["in_order"]) == (32, False)
    lengths = [len(on_llama.prompts[number]) for number in order] + [40]
    assert [line["input_length"] for line in lines] == lengths
    assert [line["output_length"] for line in lines] == [len(on_llama.answers[0])] * 5 + [3]
    assert {line["finish_reason"] for line in lines} == {"length"}
    assert all(line["finished"] >= line["timestamp"] for line in lines)
    served = [line["served_tokens"] for line in lines]
    assert served[:3] == [{}, {}, {}], "computed"
    assert served[3]["host"] > 0, "the device had evicted the prompt, or its tail"
    assert sum(served[3].values()) == 288
    assert served[4] == {"gpu": 288}
    assert served[5] == {"gpu": 32}
    trace = read_trace(path)
    assert np.diff(trace.offsets).tolist() == [9, 9, 9, 9, 9, 1]
    # A replay without a limit finds the blocks that device and RAM served together.
    config = ReplayConfig(trace.unique_blocks)
    report, misses = find_misses(trace, config)
    assert report.prefix_hit_blocks * 32 == sum(sum(item.values()) for item in served)
    explained = explain(report, misses, config)
    assert explained.served is not None
    assert (explained.served.tokens_less, explained.served.tokens_more) == (0, 0)
    assert explained.reasons == {"new_prompt": 27}
    assert engine.manager.metrics.counts["unrecorded_requests"] == 0


def test_an_aborted_request_is_recorded_and_none_is_kept(
    start_engine: Callable[..., Any], llama: Path, on_llama: Expected, tmp_path: Path
) -> None:
    from vllm import SamplingParams

    path = tmp_path / "kv.jsonl"
    engine = start_engine(llama, {"ram": "8MiB", "record": str(path)}, connector=True)
    sampling = SamplingParams(temperature=0.0, max_tokens=50, ignore_eos=True, detokenize=False)
    llm = engine.llm.llm_engine
    for name in ("running", "waiting"):
        llm.add_request(name, {"prompt_token_ids": on_llama.prompts[0]}, sampling)
        if name == "running":
            for _ in range(5):
                llm.step()
        llm.abort_request([name])
    engine.drain()
    recording = engine.connector._recording
    assert (recording._served, recording._on_gpu) == ({}, {})
    recording.recorder.close()
    _, *lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["finish_reason"] for line in lines] == ["abort", "abort"]
    assert lines[0]["output_length"] > 0
    assert lines[1]["output_length"] == 0


def test_vllms_own_connector_cannot_record(
    start_engine: Callable[..., Any], llama: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"record: .* only with kv_connector: KVOffloadConnector"):
        start_engine(llama, {"ram": "8MiB", "record": str(tmp_path / "kv.jsonl")})
