"""The program that made `made_up.jsonl.xz`: chats and agents of the built-in workloads, merged by time.

As in recordings, the last block of most prompts is not full, but has an id. The file is not made again when
the workloads change.
"""

from __future__ import annotations

import json
import lzma
from pathlib import Path

import numpy as np

from kvoffload.traces.sessions import generate
from kvoffload.traces.workloads import builtin


def main() -> None:
    rng, block_numbers, requests = np.random.default_rng(5), {}, []
    for name, sessions, seed in (("chat", 120, 11), ("agent", 4, 12)):
        trace = generate(builtin(name, sessions=sessions, seed=seed))
        for row in range(trace.requests):
            blocks = trace.refs[trace.offsets[row] : trace.offsets[row + 1]].tolist()
            requests.append((int(trace.timestamps_ms[row]), name, blocks, int(trace.output_tokens[row])))
    lines = []
    for timestamp, name, blocks, output_length in sorted(requests, key=lambda r: (r[0], r[1] != "agent")):
        ids = [block_numbers.setdefault((name, block), len(block_numbers)) for block in blocks]
        num_rest_tokens = int(rng.integers(0, 512))
        line = {
            "timestamp": timestamp,
            "input_length": 512 * len(ids) + num_rest_tokens,
            "output_length": output_length,
            "hash_ids": ids + ([10**7 + len(lines)] if num_rest_tokens else []),
        }
        lines.append(json.dumps(line) + "\n")
    content = lzma.compress("".join(lines).encode(), preset=9)
    Path(__file__).with_suffix(".jsonl.xz").write_bytes(content)


if __name__ == "__main__":
    main()
