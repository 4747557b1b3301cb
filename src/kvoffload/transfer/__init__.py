"""Copies of blocks between devices and pools in host memory.

`copies` copies rows between arrays in host memory; it uses the streaming stores of `streaming`. `engine`
defines the interface for all devices, and `cuda` implements it for CUDA tensors. torch is imported only when
a caller passes a tensor. The package does not know keys, and does not choose blocks.
"""

from kvoffload.transfer.copies import Blocks, Rows, check_rows, copy_blocks
from kvoffload.transfer.device import copy_engine_for
from kvoffload.transfer.engine import CopyEngine, HostEngine, Transfer, as_blocks

__all__ = [
    "Blocks",
    "CopyEngine",
    "HostEngine",
    "Rows",
    "Transfer",
    "as_blocks",
    "check_rows",
    "copy_blocks",
    "copy_engine_for",
]
