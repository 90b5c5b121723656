"""What a process uses is told when there is something to tell."""

from __future__ import annotations

import psutil
import pytest
import torch

from nbddp.worker import usage as usage_module
from nbddp.worker.usage import Usage


def test_no_figure_is_made_of_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    now, figures = 100.0, iter([0.0, 42.0, 7.0])  # the first one is psutil's own beginning
    monkeypatch.setattr(usage_module.time, "monotonic", lambda: now)
    monkeypatch.setattr(psutil.Process, "cpu_percent", lambda _self: next(figures))
    usage = Usage(torch.device("cpu"))
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
