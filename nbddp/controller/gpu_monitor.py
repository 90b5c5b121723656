"""Sample the load and the memory of the ranks' GPUs.

The kernel queries NVML once for each GPU, at most once a second; the ranks do not query it.
This needs nvidia-ml-py, NVIDIA's Python package (the extra ``gpu``); without it the values are
unknown. NVML creates no CUDA context, so processes that are forked from here can still use a GPU.
"""

from __future__ import annotations

import importlib
import logging
import threading
import time
from collections.abc import Mapping, Set
from functools import cached_property
from typing import Any

from nbddp.record.snapshot import UNKNOWN_USAGE, GpuUsage

logger = logging.getLogger(__name__)

SAMPLE_PERIOD = 1.0  # seconds between two samples: NVML averages over the last 1/6 to 1 s


class GpuMonitor:
    """Samples GPUs on request, at most once per ``SAMPLE_PERIOD``."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sampled_at = 0.0
        self._usage: dict[str, GpuUsage] = {}

    def sample(self, pids: Mapping[str, Set[int]]) -> Mapping[str, GpuUsage]:
        """Return the usage of GPUs.

        Args:
            pids: the process ids of the ranks on each GPU, by its UUID.
        """
        if not pids or not self._lock.acquire(blocking=False):
            return self._usage
        try:
            is_new = not pids.keys() <= self._usage.keys()
            if is_new or time.monotonic() - self._sampled_at >= SAMPLE_PERIOD:
                self._usage = {uuid: self._query(uuid, ranks) for uuid, ranks in pids.items()}
                self._sampled_at = time.monotonic()
        finally:
            self._lock.release()
        return self._usage

    @cached_property
    def _nvml(self) -> Any:
        """The module ``pynvml``, loaded when the first rank has a GPU; None if it does not work."""
        try:
            nvml: Any = importlib.import_module("pynvml")
        except ImportError:
            return None
        try:
            nvml.nvmlInit()
        except nvml.NVMLError as error:
            logger.info("NVML does not start: %s", error)
            return None
        return nvml

    def _query(self, uuid: str, ranks: Set[int]) -> GpuUsage:
        by_uuid = "nvmlDeviceGetHandleByUUID"
        handle = self._ask(by_uuid, f"GPU-{uuid}") or self._ask(by_uuid, f"MIG-{uuid}")
        if not handle:
            return UNKNOWN_USAGE
        memory = self._ask("nvmlDeviceGetMemoryInfo", handle)
        rates = self._ask("nvmlDeviceGetUtilizationRates", handle)
        running = self._ask("nvmlDeviceGetComputeRunningProcesses", handle)
        return GpuUsage(
            load=float(rates.gpu) if rates is not None else -1.0,
            used=int(memory.used) if memory is not None else 0,
            total=int(memory.total) if memory is not None else 0,
            used_by_others=_memory_of_others(running or (), ranks),
        )

    def _ask(self, query: str, argument: Any) -> Any:
        """Return NVML's answer; None without NVML or if a device does not support the query."""
        if self._nvml is None:
            return None
        try:
            return getattr(self._nvml, query)(argument)
        except self._nvml.NVMLError:
            return None


def _memory_of_others(running: Any, ranks: Set[int]) -> int:
    """Return the bytes used by processes that are not ranks; -1 if NVML does not report it.

    In a container NVML lists process ids of the host, or none, and often has no memory figures.
    """
    used = {each.pid: each.usedGpuMemory for each in running}
    if not ranks <= used.keys() or None in used.values():
        return -1
    return sum(each for pid, each in used.items() if pid not in ranks)
