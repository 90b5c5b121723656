"""Ranks that share GPUs: their backend, the notice about its limits, and NCCL on request."""

import os
import socket

import pytest
import torch
from syrupy.assertion import SnapshotAssertion

from nbddp.errors import RequestError
from nbddp.topology import Topology
from nbddp.worker.process_group.nccl import configure_nccl
from nbddp.worker.process_group.process_group import (
    choose_backend,
    describe_missing_gpus,
    describe_shared_gpus,
)


@pytest.mark.parametrize(("ranks", "gpus"), [(2, 1), (4, 3)])
def test_auto_chooses_gloo_for_shared_gpus_and_names_its_limits(
    ranks: int, gpus: int, monkeypatch: pytest.MonkeyPatch, snapshot: SnapshotAssertion
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert choose_backend("auto", ranks) == "gloo"
    assert describe_shared_gpus("auto", ranks) == snapshot


@pytest.mark.parametrize(
    ("backend", "ranks", "gpus", "chosen"),
    [("auto", 2, 2, "nccl"), ("gloo", 4, 2, "gloo"), ("auto", 4, 0, "gloo")],
)
def test_no_message_about_shared_gpus_without_shared_gpus_or_with_gloo(
    backend: str, ranks: int, gpus: int, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert choose_backend(backend, ranks) == chosen
    assert describe_shared_gpus(backend, ranks) == ""


def test_nccl_is_refused_on_a_machine_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert choose_backend("nccl", 2) == "nccl"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(RequestError, match=f"needs a GPU, and {socket.gethostname()} has none"):
        choose_backend("nccl", 2)


@pytest.mark.parametrize(("gpus", "is_shared"), [(0, False), (1, True), (2, False)])
def test_ranks_claim_different_hosts_only_if_they_share_gpus(
    gpus: int, is_shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    hosts = []
    for topology in Topology.local(2):
        monkeypatch.setattr(os, "environ", {})
        configure_nccl(topology)
        hosts.append(os.environ.get("NCCL_HOSTID"))
    assert len({*hosts} - {None}) == (2 if is_shared else 0)


@pytest.mark.parametrize(
    ("visible", "found", "notice"),
    [
        (None, 0, ""),
        ("", 0, ""),
        ("-1", 0, ""),
        ("1,0", 2, ""),
        ("NoDevFiles", 0, ""),  # by SLURM, for a job without GPUs
        ("none", 0, ""),
        ("0, -1,2", 1, ""),
        ("5", 0, "CUDA finds 0 of 1 GPU in CUDA_VISIBLE_DEVICES=5"),
        ("0,5", 1, "CUDA finds 1 of 2 GPUs in CUDA_VISIBLE_DEVICES=0,5"),
    ],
)
def test_gpus_that_do_not_exist_are_named(
    visible: str | None, found: int, notice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible})
    monkeypatch.setattr(torch.cuda, "device_count", lambda: found)
    assert describe_missing_gpus() == notice
