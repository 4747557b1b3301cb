"""The identity of an SGLang engine includes every argument that is not listed as without effect."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang.srt import runtime_context
from sglang.srt.server_args import ServerArgs

from kvoffload import ConfigError
from kvoffload.integrations.sglang import KVOffloadStorage
from kvoffload.integrations.sglang import producer as producer_module
from kvoffload.integrations.sglang.pages import HostPages
from kvoffload.integrations.sglang.producer import Producer, find_producer
from kvoffload.integrations.sglang.producer_table import WITHOUT_EFFECT
from kvoffload.integrations.sglang.storage import _is_usable
from kvoffload.tiers.spec import parse_tier
from support.sglang_pools import MODEL, device_pool, host_pool, storage_config


@pytest.fixture
def arguments(tmp_path: Path) -> Iterator[ServerArgs]:
    """SGLang's arguments, published as its scheduler does."""
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    given = ServerArgs(model_path=str(tmp_path), device="cpu", page_size=16, skip_tokenizer_init=True)
    state = runtime_context.snapshot_context()
    runtime_context.publish(given, role="scheduler")
    yield given
    runtime_context.restore_context(state)


def pages_of(dtype: torch.dtype = torch.bfloat16) -> HostPages:
    return HostPages("kv", host_pool("mha", device_pool("mha", 4, dtype), "page_first"))


def producer(identity: str = "", dtype: torch.dtype = torch.bfloat16) -> Producer:
    return find_producer(storage_config(["disk:/nvme:1GiB"]), {"kv": pages_of(dtype)}, identity)


def fingerprint(pages: HostPages) -> str:
    return find_producer(storage_config(["disk:/nvme:1GiB"]), {"kv": pages}, "").fingerprint()


@pytest.fixture
def change(arguments: ServerArgs, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A function that replaces values of arguments."""
    original = producer_module.server_arguments()
    assert original is not None

    def replace(**values: Any) -> None:
        monkeypatch.setattr(producer_module, "server_arguments", lambda: {**original, **values})

    return replace


def test_every_argument_is_bound_or_listed(change: Callable[..., None]) -> None:
    names = {*ServerArgs.__struct_fields__}
    assert {*WITHOUT_EFFECT} <= names
    assert len(WITHOUT_EFFECT) < 0.45 * len(names)
    pages = pages_of()
    before = fingerprint(pages)
    of_weights = {"model_path", "revision", "speculative_draft_model_path"}
    for name in names - of_weights:
        change(**{name: "something else"})
        assert (fingerprint(pages) == before) is (name in WITHOUT_EFFECT), name
    for name in of_weights:
        change(**{name: "something else"})
        assert fingerprint(pages) != before, name


def test_weights_are_bound(arguments: ServerArgs, tmp_path: Path) -> None:
    here, everywhere = producer().fingerprint(), producer().shared_fingerprint("")
    assert str(tmp_path) not in everywhere
    (tmp_path / "model.safetensors").write_bytes(b"Weights")
    assert producer().shared_fingerprint("") != everywhere
    (tmp_path / "model.safetensors").write_bytes(b"more weights")
    assert producer().fingerprint() != here
    assert producer("name").shared_fingerprint("") == producer().shared_fingerprint("name")


@pytest.fixture
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """The default cache of the hub, which is empty, and a directory for ``--download-dir``."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub", tmp_path / "downloads"


def download(cache: Path, commit: str) -> None:
    """Write a hub model to a cache, in the layout of the hub's client."""
    repository = cache / "models--org--name"
    (repository / "snapshots" / commit).mkdir(parents=True, exist_ok=True)
    (repository / "refs").mkdir(exist_ok=True)
    (repository / "refs" / "main").write_text(commit)


def test_weights_in_a_download_directory_are_bound(
    change: Callable[..., None], caches: tuple[Path, Path]
) -> None:
    change(model_path="org/name", revision=None, download_dir=str(caches[1]))
    with pytest.raises(ConfigError, match="neither files nor a hub commit of the model 'org/name'"):
        producer().check_weights()
    fingerprints = {producer().fingerprint()}
    for number, commit in enumerate(("a" * 40, "b" * 40, "a" * 40), 2):
        download(caches[1], commit)  # the third time the branch returns to an earlier commit
        producer().check_weights()
        fingerprints.add(producer().fingerprint())
        assert len(fingerprints) == number
    download(caches[0], "c" * 40)
    assert producer().fingerprint() not in fingerprints


@pytest.mark.parametrize("path", ["org/name", "s3://bucket/model", "/not/here"])
def test_weights_that_nothing_binds_need_a_name(
    change: Callable[..., None], caches: tuple[Path, Path], path: str, tmp_path: Path
) -> None:
    change(model_path=path, revision=None)
    for settings in ([], ["identity"], ["salt"], ["commit"], ["seed"]):
        change(
            model_path=path,
            revision="c" * 40 if "commit" in settings else None,
            load_format="dummy" if "seed" in settings else "auto",
        )
        salt = ",salt=weights-1" if "salt" in settings else ""
        config = storage_config([f"disk:{tmp_path / 'kv'}:16MiB{salt}"])
        config.extra_config["identity"] = "weights 1" if "identity" in settings else ""
        storage = KVOffloadStorage(config, {})
        storage.register_mem_pool_host(host_pool("mha", device_pool("mha", 4, torch.bfloat16), "page_first"))
        if settings:
            storage.on_host_pools_registered()
            storage.close()
        else:
            with pytest.raises(ConfigError, match=f"identity: missing; neither files .*'{path}'"):
                storage.on_host_pools_registered()


def test_both_names_of_weights_are_bound(arguments: ServerArgs) -> None:
    texts = {
        producer(identity).shared_fingerprint(name) for identity in ("", "a", "b") for name in ("", "c", "d")
    }
    assert len(texts) == 9


def test_a_drawn_seed_is_known(tmp_path: Path, arguments: ServerArgs) -> None:
    """SGLang draws the seed of random weights, and keeps the user's value, None, in its arguments."""
    bound = producer_module.server_arguments()
    assert bound is not None
    assert arguments.random_seed is None
    assert isinstance(bound["random_seed"], int)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float8_e4m3fn])
def test_the_dtype_of_the_pool_is_bound(arguments: ServerArgs, dtype: torch.dtype) -> None:
    assert producer(dtype=dtype).fingerprint() != producer().fingerprint()


def test_a_variable_is_bound(arguments: ServerArgs, monkeypatch: pytest.MonkeyPatch) -> None:
    before = producer().fingerprint()
    monkeypatch.setenv("SGLANG_LOG_MS", "1")
    monkeypatch.setenv("SGLANG_TEST_SOMETHING", "1")
    assert producer().fingerprint() == before
    monkeypatch.setenv("SGLANG_ENABLE_JIT_DEEPGEMM", "0")
    assert producer().fingerprint() != before


def test_random_weights_depend_on_the_seed(change: Callable[..., None]) -> None:
    def with_seed(seed: int, load_format: str) -> str:
        change(random_seed=seed, load_format=load_format)
        return producer().fingerprint()

    assert with_seed(1, "auto") == with_seed(2, "auto")
    assert with_seed(1, "dummy") != with_seed(2, "dummy")


def test_adapters_need_a_name(
    change: Callable[..., None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tier, named = (parse_tier("tier", f"disk:{tmp_path}:1GiB{salt}") for salt in ("", ",salt=adapters-1"))
    assert _is_usable(tier, producer())
    change(enable_lora=True)
    assert not _is_usable(tier, producer())
    assert "nothing binds the contents of adapters" in caplog.text
    assert _is_usable(named, producer())
    assert _is_usable(tier, producer("adapters-1"))


def test_without_arguments_a_name_is_needed() -> None:
    with pytest.raises(ConfigError, match="identity: missing; SGLang's arguments are unknown"):
        producer()
    assert producer("named").fingerprint() != producer("other").fingerprint()


def test_the_text_is_readable(arguments: ServerArgs) -> None:
    facts: dict[str, Any] = json.loads(producer().fingerprint())
    assert facts["pages"]["kv"]["dtype"] == "torch.bfloat16"
    assert facts["sglang.page_size"] == 16
    assert facts["libraries"]["sglang"]
