"""What a rank's process uses: CPU and memory, and its GPU where it has one."""

from __future__ import annotations

from dataclasses import dataclass

import psutil
import torch


@dataclass(frozen=True, slots=True)
class Use:
    """CPU in percent of one core, memory (resident) in bytes; the GPU's below 0 without one."""

    cpu: float
    memory: int
    gpu: float = -1.0
    gpu_memory: int = 0


class Usage:
    """Reads it; CPU is the mean since the last reading."""

    def __init__(self, device: torch.device) -> None:
        self._process = psutil.Process()
        self._process.cpu_percent()
        self._device = device
        self._has_load = True

    def read(self) -> Use:
        """What the process uses now; touches no GPU that the cells have not touched."""
        cpu, memory = self._process.cpu_percent(), self._process.memory_info().rss
        if self._device.type != "cuda" or not torch.cuda.is_initialized():
            return Use(cpu, memory)
        return Use(cpu, memory, self._load(), torch.cuda.memory_allocated(self._device))

    def _load(self) -> float:
        """How busy the GPU is, as NVML says; below 0 where nvidia-ml-py is not installed."""
        if not self._has_load:
            return -1.0
        try:
            return float(torch.cuda.utilization(self._device))
        except (ImportError, RuntimeError):
            self._has_load = False
            return -1.0
