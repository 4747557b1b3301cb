"""The packed text of a producer, its size bound, and the differences of two producers."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from kvoffload.tiers.disk.slab_directory import slabs_in
from kvoffload.tiers.producer_text import (
    ABSENT,
    MAX_BYTES,
    add_salt,
    differences,
    fields,
    pack,
    summary,
    unpack,
)
from kvoffload.tiers.spec import open_tier
from support.disk_blocks import Disk
from support.refusals import refusal
from support.run_cli import kvoffload


def text(salt: str = "", num_fields: int = 150, **changed: object) -> str:
    """Return a text as large as a real engine's."""
    known = {f"compilation.pass_config.fuse_{number}": number % 2 == 0 for number in range(num_fields)}
    known |= {"model": "org/llama", "vllm": "0.32.0", "model.hf_config.rope_parameters.rope_theta": 10000.0}
    return add_salt(json.dumps({**known, **changed}, sort_keys=True), salt)


def test_a_short_text_stays_as_it_is() -> None:
    assert pack("llama bf16 tp1") == b"llama bf16 tp1"
    assert unpack(b"llama bf16 tp1") == "llama bf16 tp1"
    assert fields("llama") == {"producer": "llama"}
    assert fields("llama\nrun 7") == {"producer": "llama", "salt": "run 7"}


def test_a_long_text_without_fields_becomes_a_digest() -> None:
    values = fields(unpack(pack("ä" * MAX_BYTES)))
    assert values.keys() == {"producer"}
    assert values["producer"].startswith("sha256 ")


def test_texts_with_different_salts_differ() -> None:
    """Regression: the salt was appended, so that "m1" without a salt equalled "m" with the salt "1"."""
    pairs = [("m1", ""), ("m", "1"), ("m", ""), ('{"a":1}', "x"), ('{"a":1}x', ""), ('{"a":1}', "")]
    assert len({add_salt(*pair) for pair in pairs}) == len(pairs)
    with refusal("allowed: a text of one line"):
        add_salt("m\n1", "")


def test_a_salt_makes_another_producer_of_a_disk(tmp_path: Path) -> None:
    for fingerprint, options in [("m1", ""), ("m", ",salt=1")]:
        open_tier(f"disk:{tmp_path}:1MiB{options}", block_bytes=256, fingerprint=fingerprint).close()
    assert len(list(slabs_in(tmp_path))) == 2


def test_a_long_text_is_compressed_and_keeps_its_fields() -> None:
    long = text(salt="run 7", ignored=[f"model.layers.{number}" for number in range(500)])
    assert len(long) > 2 * MAX_BYTES
    assert len(pack(long)) <= MAX_BYTES
    values = fields(unpack(pack(long)))
    assert values["model.hf_config.rope_parameters.rope_theta"] == 10000.0
    assert values["salt"] == "run 7"
    assert values["ignored"].startswith("sha256 ")
    assert len(values) == len(fields(long))


def test_fields_that_do_not_fit_are_left_out_and_counted() -> None:
    rng = random.Random(1)
    noise = {f"field_{number}": rng.randbytes(40).hex() for number in range(300)}
    packed = pack(json.dumps(noise))
    assert len(packed) <= MAX_BYTES
    values = fields(unpack(packed))
    assert values["(not stored)"] == f"{300 - len(values) + 1} fields"


def test_differences_are_formatted() -> None:
    first, second = text(), text(**{"model.hf_config.rope_parameters.rope_theta": 1e6})
    assert [str(difference) for difference in differences(first, second)] == ["rope_theta: 10000 / 1000000"]
    assert [str(difference) for difference in differences(first, text(salt="b"))] == [f"salt: {ABSENT} / b"]
    assert differences(first, first) == []


def test_fields_with_equal_last_names_have_their_whole_names() -> None:
    first, second = '{"model.dtype": "half", "dtype": "fp8"}', '{"model.dtype": "float", "dtype": "auto"}'
    assert [difference.name for difference in differences(first, second)] == ["dtype", "model.dtype"]


@pytest.mark.parametrize(
    "packed", [b"\0", b"\0rubbish", b"\xff\xfe", b"", b"\0" + b"x" * 5000, b"{", b"[" * 9999]
)
def test_damaged_bytes_raise_nothing(packed: bytes) -> None:
    assert fields(unpack(packed))


def test_a_terminal_gets_no_control_characters() -> None:
    hostile = json.dumps({"model": "\x1b[2J\x07evil", "\x1b[31m": 1})
    assert "\x1b" not in summary(hostile)
    assert not any("\x1b" in str(difference) for difference in differences(hostile, "{}" + hostile))
    assert not any("\x1b" in str(difference) for difference in differences(hostile, '{"a": 1}'))


def test_inspect_shows_how_the_producers_of_a_directory_differ(tmp_path: Path) -> None:
    for theta in (1e6, 10000.0):
        disk = Disk(tmp_path, 100, fingerprint=text(**{"model.hf_config.rope_parameters.rope_theta": theta}))
        disk.write([1])
        disk.tier.close()
    output = kvoffload("disk", "inspect", tmp_path).stdout
    assert "rope_theta: 10000 / 1000000" in output
    assert "model org/llama, vllm 0.32.0" in output
    reports = json.loads(kvoffload("disk", "inspect", tmp_path, "--format", "json").stdout)
    assert [len(fields(report["fingerprint"])) for report in reports] == [153, 153]


@pytest.mark.parametrize("depth", [63, 64, 65, *range(960, 1000), 100_000])
@pytest.mark.parametrize(("opening", "end"), [('{"a":', "}"), ("[", "]")])
def test_deeply_nested_texts_raise_nothing(depth: int, opening: str, end: str) -> None:
    """Any client that can write to a server can store a deeply nested text."""
    nested = f'{{"model":{opening * depth}1{end * depth}}}'
    assert unpack(pack(nested))
    assert summary(nested)
    assert str(differences(nested, "{}")[0])
