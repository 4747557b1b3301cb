"""KVLayout: size and parts of a block, and tensors that are refused."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from kvoffload import ConfigError, KVLayout
from kvoffload.cache.key_chain import fingerprint
from kvoffload.transfer.device_parts import DeviceParts
from kvoffload.transfer.device_pins import DevicePins
from kvoffload.transfer.parts import HostParts
from support.token_engine import CONTIGUOUS, LAYOUTS, MLA, PAGED, STACKED, WHOLE, TokenEngine, layout_of

torch = pytest.importorskip("torch")


@pytest.mark.parametrize("axes", LAYOUTS)
def test_a_block_has_the_bytes_of_its_tokens(axes: str) -> None:
    layout = layout_of(axes)
    tensors = 1 if axes == MLA else 2
    assert layout.block_bytes == 2 * tensors * layout.heads * 4 * 3 * 4


def test_values_may_be_shorter_than_keys() -> None:
    assert layout_of(PAGED, value_dim=1).block_bytes == 2 * 2 * 4 * (3 + 1) * 4
    kv = [(np.zeros((5, 4, 2, 3), np.float32), np.zeros((5, 4, 2, 1), np.float32)) for _ in range(2)]
    assert len(layout_of(PAGED, value_dim=1).views(kv)) == 4
    assert KVLayout.of(kv, PAGED) == layout_of(PAGED, value_dim=1)


@pytest.mark.parametrize("axes", LAYOUTS)
def test_a_layout_is_read_from_tensors(axes: str) -> None:
    layout = layout_of(axes)
    assert KVLayout.of(TokenEngine(layout).kv, axes, layout.block_tokens) == layout
    assert KVLayout.of(TokenEngine(layout, torch=torch).kv, axes, layout.block_tokens) == layout


@pytest.mark.parametrize(
    ("kv", "axes", "block_tokens", "message"),
    [
        ([], STACKED, None, r"kv: \[\] is invalid; give all layers"),
        ([np.zeros((2, 8, 4, 2, 8))], STACKED, 16, "block_tokens: 16 is invalid; axis token has 4"),
        ([np.zeros((2, 8, 4, 2, 8))], STACKED, 0, "block_tokens: 0"),
        ([np.zeros((8, 4, 2, 8))], STACKED, None, "kv: .* allowed: tensors of 5 axes"),
        ([np.zeros((8, 4, 2, 8))], PAGED, None, "kv: 'ndarray' is invalid; allowed: pairs"),
        ([np.zeros((8, 4, 2, 8))], 5, None, "axes: ''"),
    ],
)
def test_tensors_without_a_layout_are_refused(
    kv: Any, axes: str, block_tokens: int | None, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        KVLayout.of(kv, axes, block_tokens)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"axes": "block token heads dim"}, "axes: 'block token heads dim'"),
        ({"axes": "block batch token head dim"}, "one of block and batch"),
        ({"axes": "block token head"}, "with token, dim"),
        ({"axes": "kv block token dim"}, "kv needs the axis head"),
        ({"layers": 0}, "layers: 0"),
        ({"dtype": "int4"}, "dtype: 'int4'"),
        ({"axes": MLA, "heads": 2}, "heads: 2"),
        ({"axes": STACKED, "value_dim": 1}, "value_dim: 1"),
        ({"value_dim": -8}, "value_dim: -8"),
        ({"value_dim": 0}, "value_dim: 0"),
        ({"layers": True}, "layers: True"),
        ({"layers": np.arange(2)}, "layers: array"),
        ({"axes": None}, "axes: missing; allowed: names from"),
        ({"axes": 5}, "axes: 5 is invalid; allowed: names from"),
    ],
)
def test_an_impossible_layout_is_refused(given: dict[str, Any], named: str) -> None:
    good: dict[str, Any] = {
        "axes": PAGED, "layers": 2, "heads": 1, "head_dim": 3, "block_tokens": 4, "dtype": "float32"
    }  # fmt: skip
    with pytest.raises(ConfigError, match=named):
        KVLayout(**good | given)


def test_sizes_from_numpy_make_the_same_layout() -> None:
    layout = layout_of(PAGED, layers=np.int64(2), head_dim=np.int32(3), block_tokens=np.uint8(4))
    assert layout == layout_of(PAGED)
    assert fingerprint("toy", layout.describe()) == fingerprint("toy", layout_of(PAGED).describe())


def test_all_problems_of_a_layout_are_reported_at_once() -> None:
    with pytest.raises(ConfigError, match=r"(?s)layers: 0.*head_dim: -1.*dtype: 'int4'"):
        KVLayout(PAGED, layers=0, head_dim=-1, block_tokens=4, dtype="int4")


def spoiled(kind: str) -> Any:
    """Return the tensors of a paged cache, one of them wrong."""
    kv: list[Any] = TokenEngine(layout_of(PAGED)).kv
    key = kv[1][0]
    wrong = {
        "shape": key[:, :, :1],
        "axes": key[0],
        "dtype": key.astype(np.float16),
        "blocks": key[:7],
        "kind": key.tolist(),
    }
    if kind in wrong:
        return [kv[0], (wrong[kind], kv[1][1])]
    return {"pair": [kv[0], key], "layers": kv[:1], "list": key}[kind]


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("shape", r"kv\[1\]\[0\].shape: \(24, 4, 1, 3\) is invalid; axis head has 1; allowed: 2"),
        ("axes", r"kv\[1\]\[0\].shape: \(4, 2, 3\) is invalid; allowed: 4 axes: block token head dim"),
        ("dtype", r"kv\[1\]\[0\].dtype: 'float16' is invalid; the layout has float32"),
        ("blocks", r"kv\[1\]\[0\].shape: .* axis block has 7; allowed: 24"),
        ("kind", r"kv\[1\]\[0\]: 'list' is invalid; allowed: a numpy array or a torch tensor"),
        ("pair", r"kv\[1\]: 'ndarray' is invalid; allowed: a pair \(keys, values\)"),
        ("layers", r"kv: '1 layers' is invalid; allowed: a list of 2 layers"),
        ("list", r"kv: 'ndarray' is invalid; allowed: a list of 2 layers"),
    ],
)
def test_tensors_that_do_not_fit_are_named(kind: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        layout_of(PAGED).views(spoiled(kind))


def test_tensors_of_two_devices_are_refused() -> None:
    kv = [(torch.zeros(5, 4, 2, 3), torch.zeros(5, 4, 2, 3, device="meta")) for _ in range(2)]
    with pytest.raises(ConfigError, match=r"kv\[0\]\[1\].device: 'meta' is invalid; kv\[0\]\[0\] is on cpu"):
        layout_of(PAGED).views(kv)


def test_a_place_outside_a_contiguous_cache_is_refused() -> None:
    layout = layout_of(CONTIGUOUS)
    kv = TokenEngine(layout).kv
    for row in (None, -1, 3, 0.5, True, np.True_, "0", np.arange(2)):
        with pytest.raises(ConfigError, match=r"row: .*allowed: 0 to 2, a row of the axis batch"):
            layout.views(kv, row)  # type: ignore[arg-type]
    for start in (97, -1, 1.5, True, None, "0"):
        with pytest.raises(ConfigError, match=r"start: .*allowed: 0 to 96"):
            layout.views(kv, 0, start)  # type: ignore[arg-type]
    assert all(len(view) == 0 for view in layout.views(kv, 0, 96))
    with pytest.raises(ConfigError, match="row: 0"):
        layout_of(PAGED).views(TokenEngine(layout_of(PAGED)).kv, 0)


def device_parts(views: Any) -> DeviceParts:
    return DeviceParts(views, DevicePins())


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("axes", [*LAYOUTS])
def test_parts_of_the_host_and_of_a_device_have_the_same_bytes(axes: str, dtype: str) -> None:
    """The code for devices runs here too, on tensors in host memory."""
    layout = layout_of(axes, dtype)
    engine = TokenEngine(layout_of(axes))
    tensors = [torch.from_numpy(array).to(getattr(torch, dtype)) for array in engine.arrays]
    kv: Any = tensors[0] if axes == WHOLE else tensors
    if "head" in axes and "kv" not in axes:
        kv = list(zip(tensors[::2], tensors[1::2], strict=True))
    for tensor in tensors:
        tensor.copy_(torch.rand(tensor.shape) * 9)
    place: dict[str, Any] = {"row": 1, "start": 3} if axes == CONTIGUOUS else {}
    before = [tensor.clone() for tensor in tensors]
    blocks, slots = np.array([5, 2, 7]), np.array([3, 0, 4])
    pools = [np.full((6, layout.block_bytes), 255, np.uint8) for _ in range(2)]
    for make, pool in zip((HostParts, device_parts), pools, strict=True):
        parts: Any = make(layout.views(kv, **place))
        parts.store(blocks, pool, slots)
        parts.load(pool, slots, np.array([1, 0, 3]))
        parts.store(np.array([1, 0, 3]), pool, slots[::-1].copy())
    assert np.array_equal(pools[0], pools[1])
    assert (pools[0][1] == 255).all(), "no other slot is written"
    changed = sum(int((a.float() != b.float()).sum()) for a, b in zip(tensors, before, strict=True))
    assert changed > 0


@pytest.mark.parametrize("make", [HostParts, device_parts])
@pytest.mark.parametrize("inference", [True, False])
def test_tensors_of_inference_mode_are_copied(make: Any, inference: bool) -> None:
    """Torch has a mode for each thread, and the copy threads are in none."""
    with torch.inference_mode(inference):
        parts = make([torch.zeros(4, 2, 3) for _ in range(2)])
    pool = np.arange(3 * 48, dtype=np.uint8).reshape(3, 48)
    with ThreadPoolExecutor(1) as threads:
        threads.submit(parts.load, pool, np.array([0]), np.array([1])).result()
        threads.submit(parts.store, np.array([1]), pool, np.array([2])).result()
    assert (pool[2] == pool[0]).all()
