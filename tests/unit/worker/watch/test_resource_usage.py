"""The resource usage of a process is reported if there is any."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from subprocess import PIPE, Popen
from types import SimpleNamespace

import psutil
import pytest
import torch
from processes import wait_until

from nbddp.worker.watch.resource_usage import UsageSampler, sample_process


def test_an_interval_that_is_too_short_gives_no_cpu_usage(monkeypatch: pytest.MonkeyPatch) -> None:
    now, figures = 100.0, iter([0.0, 42.0, 7.0])  # the first one is psutil's own beginning
    monkeypatch.setattr(time, "monotonic", lambda: now)
    monkeypatch.setattr(psutil.Process, "cpu_percent", lambda _self: next(figures))
    usage = UsageSampler(torch.device("cpu"))
    now += 0.01
    use = usage.read()
    assert use.cpu < 0
    assert use.memory > 0
    now += 1.0
    assert usage.read().cpu == 42.0
    now += 0.01
    assert usage.read().cpu == 42.0
    now += 1.0
    assert usage.read().cpu == 7.0


def test_gpu_usage_is_that_of_the_rank_and_is_not_sampled_before_cuda_is_initialized(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    usage, has_begun = UsageSampler(torch.device("cuda", 1)), False
    asked: list[torch.device] = []

    def properties(device: torch.device) -> SimpleNamespace:
        asked.append(device)
        return SimpleNamespace(uuid="8f2a", name="NVIDIA T4")

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: has_begun)
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _device: 5)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _device: 7)
    assert usage.read().gpu == ""
    has_begun = True
    for _ in range(2):
        use = usage.read()
        told = (use.gpu, use.gpu_name, use.gpu_memory, use.gpu_reserved)
        assert told == ("8f2a", "NVIDIA T4", 5, 7)
    assert asked == [torch.device("cuda", 1)]


@contextmanager
def child(*command: str) -> Iterator[Popen[bytes]]:
    """A process, from its first line on; a shell waits there to be let go."""
    with Popen(command, stdin=PIPE, stdout=PIPE) as process:
        process.stdout.readline()
        yield process
        process.stdin.close()


@pytest.mark.process
def test_cpu_time_and_output_of_a_child_and_a_finished_grandchild_are_counted() -> None:
    before = sample_process("S", 0.0)
    count = "i=0; while [ $i -lt 200000 ]; do i=$((i+1)); done"
    script = f"echo one > /dev/null; sh -c '{count}; echo two > /dev/null'; echo; read line"
    with child("sh", "-c", script):
        after = sample_process("S", 0.0)
    assert after.children - before.children >= 0.05
    if sys.platform == "linux":  # elsewhere the output of other processes is unknown
        assert after.written - before.written >= len("one\ntwo\n\n")


@pytest.mark.process
@pytest.mark.skipif(sys.platform != "linux", reason="the state of a thread")
def test_threads_that_never_sleep_are_found() -> None:
    is_busy = "sh", "-c", "echo; while :; do :; done"
    with child("sh", "-c", "echo; read line") as idle, child(*is_busy) as busy:
        assert wait_until(lambda: psutil.Process(idle.pid).status() == psutil.STATUS_SLEEPING)
        first, second = (sample_process("S", 0.0).runnable for _ in range(2))
        busy.kill()
    found = {pid for pid, _ in first & second}
    assert str(busy.pid) in found
    assert str(idle.pid) not in found


@pytest.mark.process
@pytest.mark.skipif(sys.platform != "linux", reason="the state of a process")
def test_a_child_process_that_waits_for_disk_io_is_detected() -> None:
    # a process that has shared its memory with a child of its own waits for it in state "D"
    script = (
        "import ctypes, signal\n"
        "libc = ctypes.CDLL(None)\n"
        "stack = ctypes.create_string_buffer(1 << 16)\n"
        "top = ctypes.c_void_p((ctypes.addressof(stack) + (1 << 16)) & ~15)\n"
        "CLONE_VFORK = 0x4000\n"
        "print(flush=True)\n"
        "libc.clone(libc.usleep, top, CLONE_VFORK | signal.SIGCHLD, ctypes.c_void_p(500_000))"
    )
    assert sample_process("S", 0.0).state == "S"
    with child(sys.executable, "-c", script) as process:
        state = "S"
        while state == "S" and process.poll() is None:
            state = sample_process("S", 0.0).state
    assert state == "D"
