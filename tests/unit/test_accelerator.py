"""Ranks on Intel GPUs: a fake of ``torch.xpu`` has two devices and can lose its context."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from nbddp import accelerator
from nbddp.accelerator import Accelerator
from nbddp.errors import RequestError
from nbddp.extensions.nodes.node_agent import node_facts
from nbddp.extensions.train.checkpoint import state_dicts
from nbddp.reporting import this_rank
from nbddp.wire.group_spec import GroupSpec
from nbddp.worker.cell.failure import describe_out_of_memory
from nbddp.worker.heal.training_state import RandomState
from nbddp.worker.process_group.process_group import (
    choose_backend,
    describe_missing_gpus,
    describe_shared_gpus,
)
from nbddp.worker.watch.resource_usage import UsageSampler

LOST = "XPU error: device lost"


class FakeDevices:
    """Two devices with the functions of ``torch.cuda``."""

    def __init__(self) -> None:
        self.is_used, self.error, self.random_state = True, "", torch.tensor([1])
        self.calls: list[str] = []

    def device_count(self) -> int:
        return 2

    def is_initialized(self) -> bool:
        return self.is_used

    def current_device(self) -> int:
        return 1

    def current_stream(self) -> FakeDevices:
        return self

    def query(self) -> bool:
        self.calls.append("query")
        if self.error:
            raise RuntimeError(self.error)
        return True

    def synchronize(self) -> None:
        self.calls.append("synchronize")

    def get_device_properties(self, device: torch.device) -> SimpleNamespace:
        return SimpleNamespace(name=self.get_device_name(device), uuid=f"uuid {device.index}")

    def get_device_name(self, device: torch.device) -> str:
        return f"Fake {device.index}"

    def memory_allocated(self, device: torch.device) -> int:
        return 10 + device.index

    def memory_reserved(self, device: torch.device) -> int:
        return 20 + device.index

    def mem_get_info(self, _device: torch.device) -> tuple[int, int]:
        return 300, 900

    def get_rng_state(self, _device: torch.device | None = None) -> torch.Tensor:
        return self.random_state

    def set_rng_state(self, state: torch.Tensor, _device: torch.device | None = None) -> None:
        self.random_state = state


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeDevices:
    fake = FakeDevices()
    for number in range(3):
        (tmp_path / f"driver{number}").touch()
    files = str(tmp_path.relative_to("/") / "driver*")
    kind = Accelerator("xpu", "xccl", "ZE_AFFINITY_MASK", files)
    monkeypatch.setattr(torch, "xpu", fake)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("xpu"))
    monkeypatch.setattr(accelerator, "ACCELERATORS", (*accelerator.ACCELERATORS, kind))
    return fake


@pytest.mark.parametrize("found", [None, torch.device("mps")])
def test_without_a_row_for_torchs_accelerator_the_first_kind_is_current(
    monkeypatch: pytest.MonkeyPatch, found: torch.device | None
) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: found)
    assert accelerator.current() is accelerator.ACCELERATORS[0]


@pytest.mark.usefixtures("devices")
def test_ranks_get_the_devices_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    given = []
    for local_rank in "0123":
        monkeypatch.setenv("LOCAL_RANK", local_rank)
        given.append(str(this_rank.device()))
    assert given == ["xpu:0", "xpu:1", "xpu:0", "xpu:1"]


@pytest.mark.usefixtures("devices")
def test_the_backend_is_that_of_the_devices_if_each_rank_has_one() -> None:
    assert choose_backend("auto", 2) == choose_backend("xccl", 3) == "xccl"
    assert choose_backend("auto", 3) == "gloo"
    assert describe_shared_gpus("auto", 3).startswith("3 ranks share 2 GPUs")
    with pytest.raises(RequestError, match="nccl needs a GPU"):
        choose_backend("nccl", 1)
    backends = "xccl", "nccl2", "gloo", "undefined"
    assert [accelerator.is_device_backend(name) for name in backends] == [True, True, False, False]


@pytest.mark.usefixtures("devices")
def test_the_variable_of_the_kind_selects_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    env = GroupSpec(gpus=(0, 1)).environment(base={})
    assert env == {"CUDA_VISIBLE_DEVICES": "0,1", "ZE_AFFINITY_MASK": "0,1"}
    monkeypatch.setenv("ZE_AFFINITY_MASK", "0,1,5")
    assert describe_missing_gpus() == "XPU finds 2 of 3 GPUs in ZE_AFFINITY_MASK=0,1,5"


@pytest.mark.usefixtures("devices")
@pytest.mark.parametrize(
    ("variables", "count", "backend"),
    [
        ({}, 3, "xccl"),
        ({"ZE_AFFINITY_MASK": "2"}, 1, "xccl"),
        ({"ZE_AFFINITY_MASK": ""}, 0, "nccl"),
        ({"CUDA_VISIBLE_DEVICES": "0,1"}, 2, "nccl"),
    ],
)
def test_a_node_counts_devices_without_torch(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], count: int, backend: str
) -> None:
    monkeypatch.setattr(os, "environ", {"CUDA_VISIBLE_DEVICES": "", **variables})
    facts = node_facts(1)
    assert (facts["gpus"], facts["gpu_backend"]) == (count, backend)


@pytest.mark.parametrize(
    ("text", "is_lost"),
    [
        ("", False),
        (LOST, True),
        ("CUDA error: device-side assert triggered", True),
        ("CUDA error: operation not permitted when stream is capturing", False),
        ("CUDA error: operation failed due to a previous error during capture", False),
    ],
)
def test_an_error_of_a_query_is_a_lost_context_except_while_a_graph_is_captured(
    devices: FakeDevices, text: str, is_lost: bool
) -> None:
    devices.error = text
    assert accelerator.has_lost_context() is is_lost
    assert devices.calls == ["query"]


def test_a_device_that_the_process_has_not_used_is_not_called(devices: FakeDevices) -> None:
    devices.is_used, devices.error = False, LOST
    assert not accelerator.has_lost_context()
    accelerator.synchronize()
    assert RandomState().state_dict()["device"] is None
    assert UsageSampler(torch.device("xpu", 1)).read().gpu == ""
    assert devices.calls == []
    devices.is_used = True
    accelerator.synchronize()
    assert devices.calls == ["synchronize"]


@pytest.mark.usefixtures("devices")
def test_name_and_memory_are_those_of_the_ranks_device() -> None:
    usage = UsageSampler(torch.device("xpu", 1)).read()
    assert (usage.gpu, usage.gpu_name) == ("uuid 1", "Fake 1")
    assert (usage.gpu_memory, usage.gpu_reserved) == (11, 21)
    for text, device in (("XPU out of memory. GPU 0 is full", 0), ("no more", 1)):
        report = describe_out_of_memory(torch.OutOfMemoryError(text), [])
        assert report.startswith(f"  xpu:{device}, Fake {device}, has 900 bytes; 300 bytes free")


def test_the_random_state_of_the_device_is_restored(devices: FakeDevices) -> None:
    states = RandomState().state_dict(), state_dicts.random_state()
    devices.random_state = torch.tensor([2])
    RandomState().load_state_dict(states[0])
    assert devices.random_state.tolist() == [1]
    devices.random_state = torch.tensor([3])
    state_dicts.restore_random(states[1])
    assert devices.random_state.tolist() == [1]
