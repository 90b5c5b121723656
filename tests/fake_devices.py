"""A fake of ``torch.xpu``, with two devices, which can lose its context."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from nbddp import accelerator
from nbddp.accelerator import Accelerator


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


def fake_devices(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeDevices:
    """Make these the devices of this machine."""
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
