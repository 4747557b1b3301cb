"""The example and the page for transformers, with a tiny model and a tokenizer of whole words."""

from __future__ import annotations

import io
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from kvoffload.integrations.transformers.model import CACHE
from support.tiny_models import model_of, tokens

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a model with its tokenizer."""
    words = ["<pad>", "<s>", *(f"w{number}" for number in range(2, 97))]
    plain = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, "w96"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, pad_token="<pad>")
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'] + ' ' + m['content'] + ' ' }}{% endfor %}"
    directory = tmp_path_factory.mktemp("model")
    tokenizer.save_pretrained(directory)
    model_of("llama").save_pretrained(directory)
    return directory


def test_the_chat_is_warm_after_a_restart(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    question = " ".join(f"w{number}" for number in range(2, 60))
    monkeypatch.setattr(sys, "argv", ["chat", str(saved), f"disk:{tmp_path}:64MiB"])
    cached_tokens = []
    for _ in range(2):
        monkeypatch.setattr(sys, "stdin", io.StringIO(f"{question}\n{question}\n"))
        runpy.run_path(str(ROOT / "examples" / "chat_transformers.py"), run_name="__main__")
        cached_tokens.append([int(n) for n in re.findall(r"\[(\d+) of \d+ tokens", capsys.readouterr().out)])
    assert cached_tokens[0][0] == 0
    assert cached_tokens[0][1] >= 48, "the second turn continues the first"
    assert cached_tokens[1][0] == 48, "the first turn is known after a restart"


def test_the_code_of_the_page_runs(saved: Path, tmp_path: Path) -> None:
    model, text = model_of("llama"), "w5 w6 w7 " * 11
    first, second = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "transformers.md").read_text(), re.S)
    first = first.replace("disk:/nvme/kv:200GiB", f"disk:{tmp_path}:64MiB").replace("16GiB", "64MiB")
    second = second.replace("cache=batch", f"{CACHE}=batch")
    loop = "\n".join("    " + line for line in second.splitlines())
    ids = tokens(1, 33)
    names: dict[str, Any] = {
        "model": model, "text": text, "tokenizer": PreTrainedTokenizerFast.from_pretrained(saved),
        "input_ids": ids, "attention_mask": torch.ones_like(ids),
    }  # fmt: skip
    exec(first + loop + "\n" + loop, names)
    assert names["output"].shape == (1, 233)
    assert names["batch"].num_cached == 32
    with torch.no_grad():
        assert torch.allclose(names["logits"], model(ids).logits[:, 32:], atol=1e-4)
