"""The kinds of accelerators that ranks can use, with one row for each kind.

``torch.accelerator`` names the kind for which torch was built. All else comes from torch's module
for this kind, such as ``torch.cuda``, because ``torch.accelerator`` of torch 2.13 cannot name a
device, and cannot say whether a process has used one. This module does not import torch when it is
imported: the kernel starts without torch.
"""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

GPU_NAME = re.compile(r"(GPU|MIG)-[\w/-]+")  # as nvidia-smi -L shows them


@dataclass(frozen=True, slots=True)
class Accelerator:
    """A kind of accelerator: a row of the table.

    Attributes:
        device_type: torch's name of the kind, and of the module with its functions.
        backend: the backend that sends between such devices.
        visible_devices: the environment variable that selects the devices of a process.
        device_files: a pattern below ``/`` for files of the driver, one for each device.
    """

    device_type: str
    backend: str
    visible_devices: str
    device_files: str

    @property
    def module(self) -> Any:
        """The module of torch for this kind, such as ``torch.cuda``."""
        return getattr(importlib.import_module("torch"), self.device_type)


ACCELERATORS = (Accelerator("cuda", "nccl", "CUDA_VISIBLE_DEVICES", "proc/driver/nvidia/gpus/*"),)


# ---- without torch


def is_device_backend(backend: str) -> bool:
    """Return whether a backend sends between accelerators. NCCL's names are nccl and nccl2."""
    return backend.startswith(tuple(kind.backend for kind in ACCELERATORS))


def count_devices() -> tuple[Accelerator, int]:
    """Count the devices that this node's ranks will see, without torch, the driver or CUDA."""
    for kind in ACCELERATORS:
        shown = os.environ.get(kind.visible_devices)
        found = Path("/").glob(kind.device_files) if shown is None else devices_in(shown)
        if count := len(list(found)):
            return kind, count
    return ACCELERATORS[0], 0


def devices_in(names: str) -> list[str]:
    """Return the numbers, UUIDs and MIG devices in a value such as of ``CUDA_VISIBLE_DEVICES``.

    CUDA ignores the first other name and all after it. SLURM writes ``NoDevFiles`` for no GPU.

    >>> devices_in("0, GPU-8f2a,-1,2"), devices_in("NoDevFiles")
    (['0', 'GPU-8f2a'], [])
    """
    parts = (name.strip() for name in names.split(","))
    return list(takewhile(lambda name: name.isdecimal() or GPU_NAME.fullmatch(name), parts))


def select_devices(devices: Sequence[int | str], rank: int) -> dict[str, str]:
    """Return the environment variables that limit a rank to some devices.

    >>> names = (["MIG-1", "MIG-2"], [0, "GPU-8f2a"])
    >>> [select_devices(each, rank=3)["CUDA_VISIBLE_DEVICES"] for each in names]
    ['MIG-2', '0,GPU-8f2a']
    """
    shown = [str(device) for device in devices]
    if shown and all(name.startswith("MIG-") for name in shown):
        shown = [shown[rank % len(shown)]]  # CUDA uses one MIG device in a process
    # for all kinds: the kernel, which has no torch, does not know which one the ranks will use
    return dict.fromkeys((kind.visible_devices for kind in ACCELERATORS), ",".join(shown))


# ---- with torch


def current() -> Accelerator:
    """Return the kind for which torch was built.

    If there is none, or it has no row, return the first row. torch then finds no devices of it.
    """
    device = importlib.import_module("torch").accelerator.current_accelerator()
    kinds = (kind for kind in ACCELERATORS if device and kind.device_type == device.type)
    return next(kinds, ACCELERATORS[0])


def device_count() -> int:
    """Return the number of devices. This creates no context, so processes can still be forked."""
    return int(current().module.device_count())


def has_devices_for(backend: str) -> bool:
    """Return whether this machine has a device for a backend. Gloo and "auto" need none."""
    return all(kind.module.device_count() for kind in ACCELERATORS if kind.backend == backend)


def synchronize() -> None:
    """Wait for the work on the current device, if this process has used one."""
    module = current().module
    if module.is_initialized():
        module.synchronize()


def has_lost_context() -> bool:
    """Return whether an error on a device has ended this process's use of it.

    After such an error, such as a failed assert in a kernel, all calls of CUDA in this process
    fail. A call that the capture of a CUDA graph does not allow fails, too, but ends nothing.
    """
    module = current().module
    if not module.is_initialized():
        return False
    try:
        module.current_stream().query()
    except RuntimeError as error:
        return "captur" not in str(error)  # "not permitted when stream is capturing"
    return False
