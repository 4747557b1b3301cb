"""Pages of SGLang's own host pools through its controllers into a disk and back, byte by byte."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from kvoffload.integrations.objects import ObjectPath
from support.sglang_pools import PAGE, PATIENCE_S, Stand

MakeStand = Callable[..., Stand]
LAYOUTS = {
    "mha": ("layer_first", "page_first", "page_first_direct"),
    "mla": ("layer_first", "page_first", "page_first_direct"),
    "asymmetric": ("page_first", "page_first_direct"),
    "mamba": ("page_first",),
}


@pytest.mark.parametrize("zero_copy", ["never", "always"])
@pytest.mark.parametrize(("kind", "layout"), [(kind, layout) for kind in LAYOUTS for layout in LAYOUTS[kind]])
def test_pages_are_loaded_byte_for_byte(stand: MakeStand, kind: str, layout: str, zero_copy: str) -> None:
    sglang = stand(kind=kind, layout=layout, zero_copy=zero_copy)
    tokens = range(20 * PAGE)
    written = sglang.write(tokens)
    assert len({*written}) == len(written)
    assert sglang.stored_tokens == len(tokens)
    assert sglang.read(tokens) == written
    # A prompt with the same beginning.
    longer = [*range(10 * PAGE), *range(500, 500 + 10 * PAGE)]
    expected = [] if kind == "mamba" else written[:10]
    assert sglang.read(longer) == expected


@pytest.mark.parametrize("interface_v1", [0, 1])
def test_both_interfaces(stand: MakeStand, interface_v1: int) -> None:
    sglang = stand(interface_v1=interface_v1)
    written = sglang.write(range(3 * PAGE))
    assert sglang.read(range(3 * PAGE)) == written


def test_more_pages_than_a_batch(stand: MakeStand) -> None:
    sglang = stand(pages=200)
    tokens = range(300 * PAGE)
    written = sglang.write(tokens)
    assert sglang.read(tokens) == written


def test_policies_get_the_path_of_a_prompt(stand: MakeStand, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang writes a prompt in two parts, the second with the keys of the first as its prefix."""
    sglang, half = stand(), 4 * PAGE
    tokens, store, lengths = list(range(2 * half)), sglang.storage.store, list[int]()
    hashes, finish = sglang.hashes(tokens), sglang.storage.store.finish_path

    def recorded(path: ObjectPath) -> None:
        lengths.append(len(path.keys))
        finish(path)

    monkeypatch.setattr(store, "finish_path", recorded)
    for first in (0, 4):
        indices = sglang.controller.mem_pool_host.alloc(half)
        sglang.controller.write_storage(
            indices,
            tokens[first * PAGE : first * PAGE + half],
            hash_value=hashes[first : first + 4],
            prefix_keys=hashes[:first],
        )
        sglang.controller.ack_backup_queue.get(timeout=PATIENCE_S)
    assert lengths[1] == 2 * lengths[0] > 0


@pytest.mark.parametrize("kind", ["mha", "mamba"])
def test_warm_restart(stand: MakeStand, kind: str) -> None:
    first = stand(kind=kind)
    written = first.write(range(8 * PAGE))
    first.close()
    assert stand(kind=kind).read(range(8 * PAGE)) == written


def test_attach_again_after_detach(stand: MakeStand) -> None:
    sglang = stand()
    written = sglang.write(range(4 * PAGE))
    sglang.controller.detach_storage_backend()
    sglang.attach()
    assert sglang.read(range(4 * PAGE)) == written


@pytest.mark.parametrize(
    "other",
    [
        {"dtype": torch.float16},
        {"layout": "page_first_direct"},
        {"kind": "mla"},
        {"identity": "other weights"},
    ],
    ids=str,
)
def test_another_producer_gets_nothing(stand: MakeStand, other: dict[str, object]) -> None:
    first = stand()
    written = first.write(range(4 * PAGE))
    first.close()
    second = stand(**other)
    assert second.read(range(4 * PAGE)) == []
    second.close()
    assert stand().read(range(4 * PAGE)) == written
