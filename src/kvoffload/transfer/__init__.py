"""Moves blocks between devices and pools in host memory. The only package that uses torch, and only when a
caller passes a tensor: importing it does not import torch.

`copies` copies rows between host arrays, with the stores of `streaming`; `engine` is the one interface over
all devices, `cuda` implements it for CUDA tensors. Nothing here decides what to move or knows keys.
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
