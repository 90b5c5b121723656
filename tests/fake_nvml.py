"""NVML's functions, as nvidia-ml-py has them, for machines without an NVIDIA GPU."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any


class NVMLError(Exception):
    """The error that every NVML function raises."""


@dataclass
class FakeNvml:
    """GPUs by UUID; a missing value raises an error."""

    gpus: dict[str, dict[str, Any]] = field(default_factory=dict)
    starts: bool = True
    asked: list[str] = field(default_factory=list)
    NVMLError = NVMLError

    def nvmlInit(self) -> None:  # noqa: N802 - NVIDIA's names, here and below
        if not self.starts:
            raise NVMLError("Driver Not Loaded")

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> dict[str, Any]:  # noqa: N802
        self.asked.append(uuid)
        if uuid not in self.gpus:
            raise NVMLError("Not Found")
        return self.gpus[uuid]

    def nvmlDeviceGetMemoryInfo(self, handle: dict[str, Any]) -> Any:  # noqa: N802
        return self._of(handle, "memory")

    def nvmlDeviceGetUtilizationRates(self, handle: dict[str, Any]) -> Any:  # noqa: N802
        return self._of(handle, "rates")

    def nvmlDeviceGetComputeRunningProcesses(self, handle: dict[str, Any]) -> Any:  # noqa: N802
        return self._of(handle, "processes")

    def _of(self, handle: dict[str, Any], name: str) -> Any:
        if name not in handle:
            raise NVMLError("Not Supported")
        return handle[name]


def gpu(*, load: int, used: int, total: int, processes: dict[int, int | None]) -> dict[str, Any]:
    """Return the values that NVML has for a GPU."""
    return {
        "memory": SimpleNamespace(used=used, total=total),
        "rates": SimpleNamespace(gpu=load),
        "processes": [SimpleNamespace(pid=p, usedGpuMemory=m) for p, m in processes.items()],
    }
