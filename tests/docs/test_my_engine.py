"""examples/my_engine.py: the answers of the example engine do not depend on the cache."""

from __future__ import annotations

import importlib.util
import random
from pathlib import Path
from types import ModuleType

import pytest

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "my_engine.py"


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("my_engine", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("policy", ["lru", pytest.param("s3fifo,small_share=0.2", marks=pytest.mark.slow)])
def test_answers_equal_an_engine_that_computes_everything(example: ModuleType, policy: str) -> None:
    chance = random.Random(5)
    engine = example.Engine(ram_blocks=30, policy=policy)
    texts = [[chance.randrange(1000) for _ in range(chance.randrange(16, 700))] for _ in range(6)]
    num_computed_alone = 0
    for turn in range(60):
        tokens = chance.choice(texts)[: chance.randrange(16, 700)]
        fresh = example.Engine(ram_blocks=100)
        assert engine.run(f"turn-{turn}", tokens) == fresh.run("alone", tokens)
        num_computed_alone += fresh.num_computed
    assert engine.num_computed < num_computed_alone


def test_a_damaged_block_is_computed_again(example: ModuleType) -> None:
    engine = example.Engine(ram_blocks=100)
    tokens = list(range(20 * 16))
    expected = engine.run("first", tokens)
    engine.ram.pool[3] ^= 1
    assert engine.run("second", tokens) == expected
    assert 20 < engine.num_computed < 40
