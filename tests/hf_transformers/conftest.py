"""Settings of the tests with transformers."""

from __future__ import annotations

import torch

torch.set_num_threads(1)  # with tiny models more threads only wait for each other
