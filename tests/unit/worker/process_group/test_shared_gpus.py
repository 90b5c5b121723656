"""What is said where ranks share GPUs: in one line, what Gloo cannot do there."""

from __future__ import annotations

import pytest
import torch
from syrupy.assertion import SnapshotAssertion

from nbddp.worker.process_group.process_group import choose_backend, describe_shared_gpus

GPU = torch.device("cuda", 0)


@pytest.mark.parametrize(("ranks", "gpus"), [(2, 1), (4, 3)])
def test_auto_takes_gloo_and_says_what_it_cannot_do(
    ranks: int, gpus: int, monkeypatch: pytest.MonkeyPatch, snapshot: SnapshotAssertion
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert describe_shared_gpus("auto", choose_backend("auto", ranks), GPU, ranks) == snapshot


def test_who_has_a_gpu_each_or_none_or_asked_for_gloo_is_told_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert choose_backend("auto", 2) == "nccl"
    assert describe_shared_gpus("auto", "nccl", GPU, 2) == ""
    assert describe_shared_gpus("gloo", "gloo", GPU, 4) == ""
    assert describe_shared_gpus("auto", "gloo", torch.device("cpu"), 4) == ""
