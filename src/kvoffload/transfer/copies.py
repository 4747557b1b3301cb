"""Copies of scattered blocks between two arrays in host memory, at the speed of one large memcpy.

A block is a row of bytes. Consecutive rows are copied together. Large copies bypass the CPU's caches
(`streaming`), because the copied blocks will not be read again soon. docs/performance.md has measurements.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from kvoffload.structures.jit import ReadI64Array, kernel, long_kernel
from kvoffload.transfer.streaming import fence, memcpy, stream

Blocks: TypeAlias = npt.NDArray[np.uint8]
"""Shape ``(num_blocks, block_bytes)``. The bytes of a row are contiguous; rows may have gaps between them."""

Rows: TypeAlias = npt.NDArray[np.int64] | npt.NDArray[np.int32]
"""Row numbers, shape ``(n,)``."""

STREAM_FROM_BYTES = 16 * 1024
"""Size in bytes from which a copy bypasses the CPU's caches. Smaller copies are probably read again soon."""


STREAM_PARTS_FROM_BYTES = 2 * 1024
"""Size in bytes from which the copy of a part of a block bypasses the CPU's caches. The limit is lower than
`STREAM_FROM_BYTES`, because a call copies many parts.
"""


def copy_blocks(src: Blocks, src_rows: Rows, dst: Blocks, dst_rows: Rows) -> None:
    """Copy blocks: ``dst[dst_rows[i]] = src[src_rows[i]]``, in the order of `i`.

    Args:
        src: ``(any, block_bytes)``.
        dst: ``(any, block_bytes)``, writeable. It must not overlap the source rows.
        src_rows, dst_rows: ``(n,)``. If a row is the destination of several blocks, the last block stays.

    Cost: 6 µs a call, and the time of the memory copy. Thread: any; several threads may copy into different
    rows at a time. Releases the GIL. After the call every thread sees the bytes.

    Raises:
        IndexError: a row is out of range. The message names the first such row; no byte has been copied.
        ValueError: the shapes of the arrays do not match; no byte has been copied.
    """
    _check_blocks("src", src)
    _check_blocks("dst", dst)
    if src.shape[1] != dst.shape[1]:
        raise ValueError(f"src has blocks of {src.shape[1]} bytes and dst of {dst.shape[1]}")
    if not dst.flags.writeable:
        raise ValueError("dst is read-only")
    src_rows = check_rows("src_rows", src_rows, len(src))
    dst_rows = check_rows("dst_rows", dst_rows, len(dst))
    if len(src_rows) != len(dst_rows):
        raise ValueError(f"{len(src_rows)} src_rows but {len(dst_rows)} dst_rows")
    _copy(
        address_of(src), src.strides[0], src_rows, address_of(dst), dst.strides[0], dst_rows, src.shape[1],
        len(src_rows) * src.shape[1] >= STREAM_FROM_BYTES,
    )  # fmt: skip


class PartTable(NamedTuple):
    """Table of many arrays that each hold a part of every block, for `copy_parts`.

    Part `p` of row `i` begins at ``addresses[p] + i * strides[p]`` and has ``widths[p]`` bytes. The caller
    must keep the arrays alive.
    """

    addresses: npt.NDArray[np.int64]
    strides: npt.NDArray[np.int64]
    widths: npt.NDArray[np.int64]


def copy_parts(
    table: PartTable, rows: npt.NDArray[np.int64], pool: Blocks, slots: npt.NDArray[np.int64], to_pool: bool
) -> None:
    """Copy rows that are spread over many arrays into slots of a pool, or back.

    In a slot, the parts of a row are consecutive.

    Args:
        rows, slots: results of `check_rows`. Row ``rows[i]`` is copied to or from slot ``slots[i]``.

    Cost: 6 µs a call, and the time of the memory copy. Thread: any, as for `copy_blocks`.
    Raises: `ValueError` if the pool's width is not the sum of the parts' widths, or the pool is read-only.
    """
    _check_blocks("pool", pool)
    if pool.shape[1] != table.widths.sum():
        raise ValueError(f"the pool has blocks of {pool.shape[1]} bytes, the parts of {table.widths.sum()}")
    if len(rows) != len(slots):
        raise ValueError(f"{len(rows)} rows but {len(slots)} slots")
    if to_pool and not pool.flags.writeable:
        raise ValueError("pool is read-only")
    _copy_parts(*table, rows, address_of(pool), pool.strides[0], slots, to_pool)


def check_rows(name: str, rows: Rows, num_rows: int) -> npt.NDArray[np.int64]:
    """Convert `rows` to contiguous int64, and check that every row is in ``[0, num_rows)``.

    Raises: `IndexError` that names the first row out of range; `ValueError` unless `rows` is a
        one-dimensional array of integers.
    """
    array = np.asarray(rows)
    if array.ndim != 1 or (array.dtype.kind not in "iu" and array.size):
        raise ValueError(f"{name}: expected one dimension of integers, not {array.dtype} {array.shape}")
    checked = np.ascontiguousarray(array, np.int64)
    position = _first_outside(checked, num_rows)
    if position < len(checked):
        raise IndexError(f"{name}[{position}] is {array[position]}; there are {num_rows} rows")
    return checked


def coalesce(src_rows: npt.NDArray[np.int64], dst_rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Split a copy into runs, so that the rows of a run are consecutive in the source and in the destination.

    Returns ``starts``, shape ``(runs + 1,)``. Run `r` consists of the rows at the positions ``starts[r]`` to
    ``starts[r + 1] - 1`` of both arguments. The last element of ``starts`` is the number of rows.
    """
    breaks = (src_rows[1:] - src_rows[:-1] != 1) | (dst_rows[1:] - dst_rows[:-1] != 1)
    inner = np.flatnonzero(breaks) + 1
    return np.concatenate(([0], inner, [len(src_rows)])) if len(src_rows) else np.zeros(1, np.int64)


def _check_blocks(name: str, blocks: Blocks) -> None:
    if blocks.dtype != np.uint8 or blocks.ndim != 2 or (blocks.shape[1] > 1 and blocks.strides[1] != 1):
        raise ValueError(
            f"{name}: expected (num_blocks, block_bytes) of uint8 with contiguous rows, "
            f"not {blocks.dtype} {blocks.shape} with strides {blocks.strides}"
        )


def address_of(array: npt.NDArray[np.uint8]) -> int:
    """Return the address of the first byte of `array`."""
    address: int = array.__array_interface__["data"][0]
    return address


@long_kernel
def _copy(
    src: int,
    src_stride: int,
    src_rows: ReadI64Array,
    dst: int,
    dst_stride: int,
    dst_rows: ReadI64Array,
    block_bytes: int,
    streaming: bool,
) -> None:
    """Copy rows, which must have been checked. A run that is contiguous on both sides is a single memcpy."""
    packed = src_stride == block_bytes and dst_stride == block_bytes
    first = 0
    while first < len(src_rows):
        end = first + 1
        while (
            packed
            and end < len(src_rows)
            and src_rows[end] == src_rows[end - 1] + 1
            and dst_rows[end] == dst_rows[end - 1] + 1
        ):
            end += 1
        source, destination = src + src_rows[first] * src_stride, dst + dst_rows[first] * dst_stride
        if streaming:
            stream(destination, source, (end - first) * block_bytes)
        else:
            memcpy(destination, source, (end - first) * block_bytes)
        first = end
    if streaming:
        fence()


@long_kernel
def _copy_parts(
    addresses: ReadI64Array,
    strides: ReadI64Array,
    widths: ReadI64Array,
    rows: ReadI64Array,
    pool: int,
    pool_stride: int,
    slots: ReadI64Array,
    to_pool: bool,
) -> None:
    for i in range(len(rows)):
        slot = pool + slots[i] * pool_stride
        for part in range(len(addresses)):
            place, width = addresses[part] + rows[i] * strides[part], widths[part]
            source, destination = (place, slot) if to_pool else (slot, place)
            if width >= STREAM_PARTS_FROM_BYTES:
                stream(destination, source, width)
            else:
                memcpy(destination, source, width)
            slot += width
    fence()


@kernel
def _first_outside(rows: ReadI64Array, num_rows: int) -> int:
    """Return the position of the first row outside ``[0, num_rows)``, or ``len(rows)``."""
    for position in range(len(rows)):
        if rows[position] < 0 or rows[position] >= num_rows:
            return position
    return len(rows)
