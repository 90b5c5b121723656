"""Measure the CPU, memory and GPU use of a rank's process."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import torch

from nbddp import accelerator
from nbddp.child_processes import find_descendants
from nbddp.wire.messages import ResourceUsage
from nbddp.worker.watch.stall_detector import ProcessSample

# seconds of CPU measurement; over less, the clock ticks of the system distort the result
MIN_INTERVAL = 0.2
_RUNNABLE = re.compile(r"^State:\s+R.*^voluntary_ctxt_switches:\s+(\d+)", re.MULTILINE | re.DOTALL)


class UsageSampler:
    """Read the usage. CPU is the mean since the last reading, over at least ``MIN_INTERVAL``."""

    def __init__(self, device: torch.device) -> None:
        self._process = psutil.Process()
        self._process.cpu_percent()
        self._measured_at = time.monotonic()
        self._cpu = -1.0
        self._memory = 0
        self._device = device
        self._gpu: tuple[str, str] | None = None

    def read(self) -> ResourceUsage:
        """Return the current usage. Do not initialize CUDA if the cells have not done so."""
        with suppress(OSError):  # the cell has opened all file descriptors: keep the last values
            if time.monotonic() - self._measured_at >= MIN_INTERVAL:
                self._cpu, self._measured_at = self._process.cpu_percent(), time.monotonic()
            self._memory = self._process.memory_info().rss
        cpu, memory = self._cpu, self._memory
        module = accelerator.current().module
        if self._device.type == "cpu" or not module.is_initialized():
            return ResourceUsage(cpu=cpu, memory=memory)
        if self._gpu is None:
            found = module.get_device_properties(self._device)
            self._gpu = str(getattr(found, "uuid", "")), str(found.name)
        return ResourceUsage(
            cpu=cpu,
            memory=memory,
            gpu=self._gpu[0],
            gpu_name=self._gpu[1],
            gpu_memory=module.memory_allocated(self._device),
            gpu_reserved=module.memory_reserved(self._device),
        )


def sample_process(state: str, cpu: float) -> ProcessSample:
    """Sample this process and its descendants, and the runnable threads of all of them.

    Args:
        state: the state of the main thread.
        cpu: the CPU use of the process in percent.
    """
    ended = os.times()
    seconds = ended.children_user + ended.children_system
    written, runnable = 0, set(_runnable_threads(os.getpid()))
    for process in find_descendants(os.getpid()):
        with suppress(psutil.Error), process.oneshot():  # the process may have ended
            used = process.cpu_times()
            seconds += used.user + used.system + used.children_user + used.children_system
            if process.status() == psutil.STATUS_DISK_SLEEP:
                state = "D"
            if hasattr(process, "io_counters"):
                written += process.io_counters().write_chars
            runnable.update(_runnable_threads(process.pid))
    return ProcessSample(
        state=state, cpu=cpu, children=seconds, written=written, runnable=frozenset(runnable)
    )


def _runnable_threads(pid: int) -> Iterator[tuple[str, str]]:
    """Yield each runnable thread of a process, with its number of voluntary switches."""
    for path in Path(f"/proc/{pid}/task").glob("*/status"):
        with suppress(OSError):  # the thread has ended
            if found := _RUNNABLE.search(path.read_text()):
                yield path.parent.name, found[1]
