"""Moves blocks between devices and pools in host memory. The only room that knows torch, and that only
when a caller hands it a tensor: importing it does not import torch.

`copies` copies rows between host arrays, with the stores of `streaming`; `engine` is the one interface over
all devices, `cuda` its form for CUDA tensors. Nothing here decides what to move, and nothing knows keys.
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
