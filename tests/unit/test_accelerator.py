"""Ranks on Intel GPUs, with a fake of ``torch.xpu``."""

from __future__ import annotations

import pytest
import torch
from fake_devices import FakeDevices

from nbddp import accelerator
from nbddp.errors import RequestError
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
    state = RandomState().state_dict()
    devices.random_state = torch.tensor([2])
    RandomState().load_state_dict(state)
    assert devices.random_state.tolist() == [1]
