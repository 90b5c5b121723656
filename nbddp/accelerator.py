"""The names of GPUs, and how many a machine has."""

from __future__ import annotations

import os
import re
from itertools import takewhile
from pathlib import Path

GPU_NAME = re.compile(r"(GPU|MIG)-[\w/-]+")  # as nvidia-smi -L shows them


def count_gpus() -> int:
    """Count the NVIDIA GPUs that this node's ranks will see, without the driver or CUDA."""
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    if shown is not None:
        return len(visible_gpus(shown))
    folder = Path("/proc/driver/nvidia/gpus")
    return len(list(folder.iterdir())) if folder.is_dir() else 0


def visible_gpus(names: str) -> list[str]:
    """Return the numbers, UUIDs and MIG devices in a value of ``CUDA_VISIBLE_DEVICES``.

    CUDA ignores the first other name and all after it. SLURM writes ``NoDevFiles`` for no GPU.

    >>> visible_gpus("0, GPU-8f2a,-1,2"), visible_gpus("NoDevFiles")
    (['0', 'GPU-8f2a'], [])
    """
    parts = (name.strip() for name in names.split(","))
    return list(takewhile(lambda name: name.isdecimal() or GPU_NAME.fullmatch(name), parts))
