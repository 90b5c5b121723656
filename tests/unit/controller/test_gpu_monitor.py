"""The GPUs of the ranks: sampled once each, and shown with the other processes on them."""

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from syrupy.assertion import SnapshotAssertion

from nbddp.controller.gpu_monitor import GpuMonitor
from nbddp.lifecycle.group_state import GroupState, Life, RankLife, RankState
from nbddp.record.event_log import EventLog
from nbddp.record.rank_monitor import RankMonitor
from nbddp.record.snapshot import UNKNOWN_USAGE, GpuUsage, RankSnapshot, build_snapshot
from nbddp.ui.wording import format_gpu_facts, gpu_facts
from nbddp.wire.messages import RankStatus, Ready

GIB = 1 << 30
MEMORY = "nvmlDeviceGetMemoryInfo"


class FakeNvml:
    """NVML as nvidia-ml-py has it: GPUs by UUID, each with what its functions return."""

    class NVMLError(Exception):
        """The error that every NVML function raises."""

    def __init__(self, gpus: dict[str, dict[str, Any]], *, starts: bool = True) -> None:
        self.gpus, self.starts = gpus, starts
        self.asked: list[str] = []

    def nvmlInit(self) -> None:  # noqa: N802 - NVIDIA's name
        if not self.starts:
            raise self.NVMLError("Driver Not Loaded")

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:  # noqa: N802 - NVIDIA's name
        self.asked.append(uuid)
        if uuid not in self.gpus:
            raise self.NVMLError("Not Found")
        return uuid

    def __getattr__(self, name: str) -> Callable[[str], Any]:
        def call(uuid: str) -> Any:
            if name not in self.gpus[uuid]:
                raise self.NVMLError("Not Supported")
            return self.gpus[uuid][name]

        return call


def gpu(*, load: int, used: int, total: int, processes: dict[int, int | None]) -> dict[str, Any]:
    listed = [SimpleNamespace(pid=p, usedGpuMemory=m) for p, m in processes.items()]
    return {
        MEMORY: SimpleNamespace(used=used, total=total),
        "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=load),
        "nvmlDeviceGetComputeRunningProcesses": listed,
    }


def monitor(patch: pytest.MonkeyPatch, nvml: FakeNvml | None) -> GpuMonitor:
    """Return a monitor that finds this NVML; None is none."""
    patch.setitem(sys.modules, "pynvml", nvml)
    return GpuMonitor()


BUSY = gpu(load=70, used=12 * GIB, total=16 * GIB, processes={11: 4 * GIB, 12: 5 * GIB, 99: GIB})


def test_nvml_is_queried_once_per_gpu_and_at_most_once_per_interval(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    nvml = FakeNvml({"GPU-a": BUSY})
    watch = monitor(monkeypatch, nvml)
    expected = GpuUsage(load=70.0, used=12 * GIB, total=16 * GIB, used_by_others=GIB)
    assert watch.sample({"a": {11, 12}}) == {"a": expected}
    assert watch.sample({"a": {11, 12}}) == {"a": expected}
    assert nvml.asked == ["GPU-a"]
    now += 1.5
    assert watch.sample({"a": {11, 12}}) == {"a": expected}
    assert nvml.asked == ["GPU-a"] * 2
    watch.sample({"a": {11}, "b": {12}})  # another one is not waited for
    assert nvml.asked == ["GPU-a"] * 3 + ["GPU-b", "MIG-b"]


@pytest.mark.parametrize(
    "processes",
    [{}, {4711: GIB}, {11: None, 12: None}],
    ids=["none are told", "the host's ids", "no figures"],
)
def test_memory_of_others_is_unknown_if_nvml_lists_none_of_our_processes(
    monkeypatch: pytest.MonkeyPatch, processes: dict[int, int | None]
) -> None:
    nvml = FakeNvml({"GPU-a": gpu(load=1, used=GIB, total=GIB, processes=processes)})
    assert monitor(monkeypatch, nvml).sample({"a": {11, 12}})["a"].used_by_others == -1


def test_a_mig_device_reports_only_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = gpu(load=0, used=GIB, total=5 * GIB, processes={})
    watch = monitor(monkeypatch, FakeNvml({"MIG-a": {MEMORY: whole[MEMORY]}}))
    assert watch.sample({"a": {11}}) == {"a": GpuUsage(used=GIB, total=5 * GIB)}


def test_without_nvml_the_gpu_usage_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    for nvml in (None, FakeNvml({"GPU-a": BUSY}, starts=False)):
        watch = monitor(monkeypatch, nvml)
        assert watch.sample({}) == {}
        assert watch.sample({"a": {11}}) == {"a": UNKNOWN_USAGE}


def test_a_snapshot_samples_each_shared_gpu_once() -> None:
    rank_monitor = RankMonitor(is_stopped=lambda _rank: False)
    ranks = tuple(RankLife(rank, RankState.IDLE) for rank in range(4))
    for rank, uuid in enumerate(["a", "a", "b"]):
        pulse = RankStatus(cell=0, line=0, function="", gpu=uuid, gpu_name="NVIDIA T4")
        rank_monitor.add(rank, pulse, 0.0)
    look = Mock(return_value={"a": GpuUsage(load=3.0)})
    snapshot = build_snapshot(
        replace(Life(), state=GroupState.IDLE, attempt=1, ranks=ranks),
        cell=None,
        rank_monitor=rank_monitor,
        event_log=EventLog(lambda _text: None),
        ready={
            r: Ready(pid=10 + r, device="", backend="", host="", cores=2, threads=1)
            for r in range(4)
        },
        sample_gpus=look,
    )
    look.assert_called_once_with({"a": {10, 11}, "b": {12}})
    assert [each.gpu_ranks for each in snapshot.ranks] == [(1,), (0,), (), ()]
    assert [each.gpu_usage.load for each in snapshot.ranks] == [3.0, 3.0, -1.0, -1.0]


def test_the_gpu_of_a_rank_has_a_short_and_a_long_description(snapshot: SnapshotAssertion) -> None:
    shared = RankSnapshot(
        rank=1,
        state="running",
        gpu="Tesla T4",
        gpu_memory=2 * GIB,
        gpu_reserved=3 * GIB,
        gpu_usage=GpuUsage(load=70.0, used=12 * GIB, total=16 * GIB, used_by_others=GIB),
        gpu_ranks=(0, 2),
    )
    alone = RankSnapshot(rank=0, state="idle", gpu="NVIDIA H100")
    assert [list(gpu_facts(it)) for it in (shared, alone, replace(alone, gpu=""))] == snapshot
    assert [format_gpu_facts(shared).splitlines(), format_gpu_facts(alone).splitlines()] == snapshot
