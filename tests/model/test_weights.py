"""Identity of a model's weights: equal for copies, different for other weights, refused if unknown."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from kvoffload.errors import ConfigError
from kvoffload.integrations.vllm.shared import tiers
from kvoffload.integrations.vllm.shared.tiers import Producer, fingerprint, shared_fingerprint
from kvoffload.model.weights import weights_identity

COMMIT, OTHER = "0123456789abcdef" * 2 + "01234567", "f" * 40


@pytest.fixture(autouse=True)
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Use a directory of the test for the cached digests and the downloads."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path


def model(place: Path, weights: bytes = b"weights", config: str = "{}") -> str:
    place.mkdir(parents=True)
    (place / "model.safetensors").write_bytes(weights)
    (place / "config.json").write_text(config)
    return str(place)


def test_a_file_whose_name_is_not_utf_8_is_part_of_the_weights(tmp_path: Path) -> None:
    first, second = model(tmp_path / "a"), model(tmp_path / "b")
    Path(os.fsdecode(os.fsencode(first) + b"/\xff.json")).write_text("{}")
    assert weights_identity(first) != weights_identity(second)
    assert weights_identity(first) == weights_identity(first)


def test_a_full_disk_leaves_no_file_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(source: object, target: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", refuse)
    assert weights_identity(model(tmp_path / "a")).startswith("content ")
    assert not list((tmp_path / "cache/kvoffload").iterdir())


def test_copies_have_equal_identities_and_other_weights_do_not(tmp_path: Path) -> None:
    first = model(tmp_path / "a")
    shutil.copytree(first, tmp_path / "b")
    os.utime(tmp_path / "b/model.safetensors", (1, 1))
    assert weights_identity(first) == weights_identity(str(tmp_path / "b"))
    different = [
        model(tmp_path / "c", weights=b"weighty"),
        model(tmp_path / "d", config="{ }"),
        model(tmp_path / "e", weights=b"weights "),
    ]
    (Path(model(tmp_path / "f")) / "model-2.safetensors").write_bytes(b"")
    assert len({weights_identity(path) for path in [first, *different, str(tmp_path / "f")]}) == 5


def test_replaced_weights_are_read_again_and_others_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = model(tmp_path / "a")
    before = weights_identity(path)
    (tmp_path / "a/model.safetensors").write_bytes(b"WEIGHTS")
    os.utime(tmp_path / "a/model.safetensors", (1, 1))
    assert weights_identity(path) != before
    after = weights_identity(path)
    monkeypatch.setattr(
        "kvoffload.model.weights.digest_of", lambda path: pytest.fail(f"{path} is read again")
    )
    assert weights_identity(path) == after


@pytest.mark.parametrize("damage", [b"", b"{", b"[1]", b'{"a": 1}', b"\xff"])
def test_a_damaged_cache_of_digests_is_rebuilt(tmp_path: Path, damage: bytes) -> None:
    path = model(tmp_path / "a")
    identity = weights_identity(path)
    (tmp_path / "cache/kvoffload/weights.json").write_bytes(damage)
    assert weights_identity(path) == identity
    assert json.loads((tmp_path / "cache/kvoffload/weights.json").read_bytes())


def test_a_cache_that_cannot_be_written_costs_only_time(tmp_path: Path) -> None:
    (tmp_path / "cache").write_bytes(b"a file where a directory should be")
    path = model(tmp_path / "a")
    assert weights_identity(path) == weights_identity(path)


def test_a_model_of_a_hub_is_identified_by_its_commit(tmp_path: Path) -> None:
    path = model(tmp_path / "hub/models--org--name/snapshots" / COMMIT)
    assert weights_identity("org/name") == weights_identity(path) == f"commit {COMMIT}"


def test_weights_in_a_second_cache_are_found(tmp_path: Path) -> None:
    second_cache = str(tmp_path / "more")
    model(tmp_path / "more/models--org--name/snapshots" / COMMIT)
    assert weights_identity("org/name", second_cache) == f"commit {COMMIT}"
    model(tmp_path / "hub/models--org--name/snapshots" / COMMIT)  # the configuration of the same commit
    assert weights_identity("org/name", second_cache) == f"commit {COMMIT}"
    model(tmp_path / "hub/models--org--name/snapshots" / OTHER)
    with pytest.raises(ConfigError, match="several revisions"):
        weights_identity("org/name", second_cache)


def test_unknown_weights_are_refused(tmp_path: Path) -> None:
    model(tmp_path / "hub/models--org--two/snapshots" / COMMIT)
    model(tmp_path / "hub/models--org--two/snapshots" / OTHER)
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty/config.json").write_text("{}")
    for name, why in [("org/two", "several revisions"), ("org/none", "does not have it"), ("", "not have it"),
                      ("org/*", "does not have it"), (str(tmp_path / "empty"), "no weights")]:  # fmt: skip
        with pytest.raises(ConfigError, match=rf"{why}.*identity=NAME"):
            weights_identity(name)


# ---- as part of an engine's fingerprint


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiers, "is_on_cpu", lambda: False)


def of_engine(
    path: str, *, commit: str = "", theta: float = 1e4, draft: str = "", **options: Any
) -> Producer:
    identity = {"model": path, "vllm": "0.32.0", "dtype": "bfloat16", "parallel": [1, 1], **options}
    models = [(path, commit)] + [(draft, "")] * bool(draft)
    return Producer(identity, {"model.hf_config.rope_theta": theta}, tuple(models), lambda named: "")


@pytest.mark.usefixtures("on_gpu")
def test_engines_with_copies_of_a_model_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = model(tmp_path / "a")
    copy = str(shutil.copytree(first, tmp_path / "b"))
    os.utime(tmp_path / "b/model.safetensors", (1, 1))
    assert fingerprint(of_engine(first)) != fingerprint(of_engine(copy)), "a disk belongs to one machine"
    shared = shared_fingerprint(of_engine(first), "")
    assert shared_fingerprint(of_engine(copy), "") == shared
    monkeypatch.setattr(tiers, "cpu_capability", lambda: "another processor")
    assert shared_fingerprint(of_engine(copy), "") == shared, "a device's layout does not depend on it"
    monkeypatch.setattr(tiers, "is_on_cpu", lambda: True)
    assert shared_fingerprint(of_engine(copy), "") != shared
    assert str(tmp_path) not in shared


@pytest.mark.usefixtures("on_gpu")
def test_engines_with_different_kv_do_not_share(tmp_path: Path) -> None:
    path = model(tmp_path / "a")
    engines = [
        of_engine(path),
        of_engine(path, dtype="float16"),
        of_engine(path, parallel=[2, 1]),
        of_engine(path, vllm="0.33.0"),
        of_engine(path, theta=1e6),
        of_engine(path, commit=COMMIT),
        of_engine(path, draft=model(tmp_path / "draft", weights=b"drafts")),
        of_engine(model(tmp_path / "b", weights=b"others")),
    ]
    assert len({shared_fingerprint(engine, "") for engine in engines}) == len(engines)
    assert len({fingerprint(engine) for engine in engines}) == len(engines)
    before = fingerprint(engines[0]), shared_fingerprint(engines[0], "")
    (tmp_path / "a/modeling_mine.py").write_text("def forward(): ...")
    assert before[0] != fingerprint(engines[0]), "code in the model's folder is part of the identity"
    assert before[1] != shared_fingerprint(engines[0], "")


@pytest.mark.usefixtures("on_gpu")
def test_the_loaded_commit_is_used_if_several_are_cached(tmp_path: Path) -> None:
    for commit in (COMMIT, OTHER):
        model(tmp_path / "hub/models--org--two/snapshots" / commit)
    first, second = (of_engine("org/two", commit=commit) for commit in (COMMIT, OTHER))
    assert shared_fingerprint(first, "") != shared_fingerprint(second, "")
    assert fingerprint(first) != fingerprint(second)


@pytest.mark.usefixtures("on_gpu")
def test_a_given_name_replaces_the_identity_of_the_weights() -> None:
    shared = shared_fingerprint(of_engine("org/none"), "llama-3.1 run 7")
    assert shared == shared_fingerprint(of_engine("elsewhere/of/another/path"), "llama-3.1 run 7")
    assert shared != shared_fingerprint(of_engine("org/none"), "llama-3.1 run 8")
    assert shared != shared_fingerprint(of_engine("org/none", theta=1e6), "llama-3.1 run 7"), (
        "the name replaces only the weights"
    )
    assert shared == shared_fingerprint(of_engine("org/none", commit=COMMIT), "llama-3.1 run 7")
    with pytest.raises(ConfigError, match="identity=NAME"):
        shared_fingerprint(of_engine("org/none"), "")


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize(("seed", "refused"), [(None, True), ("random", True), ("0", False), ("17", False)])
def test_keys_with_a_random_seed_are_refused(
    monkeypatch: pytest.MonkeyPatch, seed: str | None, refused: bool
) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    if seed is not None:
        monkeypatch.setenv("PYTHONHASHSEED", seed)
    assert shared_fingerprint(of_engine("m", vllm="0.29.0"), "name")
    if refused:
        with pytest.raises(ConfigError, match=r"PYTHONHASHSEED: .* the same number"):
            shared_fingerprint(of_engine("m", vllm="0.28.1"), "name")
    else:
        assert shared_fingerprint(of_engine("m", vllm="0.28.1"), "name")
