"""What a rank's process uses: CPU and memory, and its GPU where it has one."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from dataclasses import dataclass

import psutil
import torch

from nbddp.descendants import descendants

SPAN = 0.2  # seconds; over less, as right after the start, the system's ticks make any figure


@dataclass(frozen=True, slots=True)
class Use:
    """CPU in percent of one core, below 0 while that is not known; memory (resident) in bytes.

    The GPU's are below 0 without one.
    """

    cpu: float
    memory: int
    gpu: float = -1.0
    gpu_memory: int = 0


class Usage:
    """Reads it; CPU is the mean since the last reading, but over no less than ``SPAN``."""

    def __init__(self, device: torch.device) -> None:
        self._process = psutil.Process()
        self._process.cpu_percent()
        self._measured_at = time.monotonic()
        self._cpu = -1.0
        self._memory = 0
        self._device = device
        self._has_load = True

    def read(self) -> Use:
        """What the process uses now; touches no GPU that the cells have not touched."""
        with suppress(OSError):  # a cell has taken all descriptors: the last figures will do
            self._measure()
        cpu, memory = self._cpu, self._memory
        if self._device.type != "cuda" or not torch.cuda.is_initialized():
            return Use(cpu, memory)
        return Use(cpu, memory, self._load(), torch.cuda.memory_allocated(self._device))

    def _measure(self) -> None:
        if time.monotonic() - self._measured_at >= SPAN:
            self._cpu, self._measured_at = self._process.cpu_percent(), time.monotonic()
        self._memory = self._process.memory_info().rss

    def _load(self) -> float:
        """How busy the GPU is, as NVML says; below 0 where nvidia-ml-py is not installed."""
        if not self._has_load:
            return -1.0
        try:
            return float(torch.cuda.utilization(self._device))
        except (ImportError, RuntimeError):
            self._has_load = False
            return -1.0


def children_cpu_time() -> float:
    """Seconds of CPU that the children of this process have used, those that ended included."""
    ended = os.times()
    seconds = ended.children_user + ended.children_system
    with suppress(OSError):  # no descriptors are left to look with
        for each in descendants(os.getpid()):
            with suppress(psutil.Error):  # it has just ended
                used = each.cpu_times()
                seconds += used.user + used.system
    return seconds
