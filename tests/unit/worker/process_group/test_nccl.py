"""NCCL in a warm rank, as far as that can be tried without a GPU: no end, no wait that stays."""

import os
import threading
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from nbddp.topology import Topology
from nbddp.worker.process_group.nccl import (
    ENVIRONMENT,
    abort_all,
    abort_groups,
    configure_nccl,
    describe_abort,
)

HEADER = Path(torch.__file__).parent / "include/torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp"


def test_groups_are_aborted_at_the_same_time() -> None:
    was_aborted = threading.Event()  # as two communicators of one GPU, one waits for the other
    assert abort_all([Mock(abort=was_aborted.wait), Mock(abort=was_aborted.set)], timeout=30.0)


def test_a_stuck_abort_of_one_group_does_not_delay_other_groups() -> None:
    never, free = threading.Event(), Mock()
    assert not abort_all([Mock(abort=never.wait), free], timeout=0.2)
    free.abort.assert_called_once()
    never.set()


def test_a_backend_without_abort_is_skipped() -> None:
    error, last = RuntimeError("Backend does not support abort"), Mock()
    assert abort_all([Mock(abort=Mock(side_effect=error)), last], timeout=30.0)
    last.abort.assert_called_once()


@pytest.mark.usefixtures("group_of_one")
def test_all_groups_of_a_rank_are_aborted_and_forgotten() -> None:
    dist.new_group([0])
    assert len(dist.distributed_c10d._world.pg_names) == 2
    abort_groups()
    assert not dist.is_initialized()


def test_nccls_watchdog_is_configured_not_to_end_ranks_unless_the_user_sets_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TORCH_NCCL_ENABLE_MONITORING", "1")
    configure_nccl(*Topology.local(1))
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "2"
    assert os.environ["TORCH_NCCL_RETHROW_CUDA_ERRORS"] == "0"
    assert os.environ["TORCH_NCCL_ENABLE_MONITORING"] == "1"


@pytest.mark.skipif(not HEADER.exists(), reason="this torch ships no headers")
def test_torch_reads_the_nccl_variables_and_2_means_clean_up_only() -> None:
    source = HEADER.read_text()
    choice = "TORCH_DIST_USE_NCCL2"  # since torch 2.14
    in_python = choice in Path(dist.distributed_c10d.__file__).read_text()
    assert in_python or "nccl2" not in dist.Backend.backend_list
    assert all(f'"{name}"' in source for name in ENVIRONMENT.keys() - {choice})
    assert "CleanUpOnly = 2" in source
    assert "SHOULD_TEAR_DOWN(a) (a != NoHandling && a != CleanUpOnly)" in source


def group_with_error(name: str) -> Mock:
    """Return a group whose backend for GPUs has this error; the one for CPUs cannot report any."""
    error = SimpleNamespace(name=name)
    backends = {"cpu": SimpleNamespace(), "cuda": Mock(get_error=lambda: error)}
    return Mock(_device_types=[*backends], _get_backend=backends.__getitem__)


@pytest.mark.parametrize(
    ("default", "subgroup", "reason"),
    [
        ("TIMEOUT", "SUCCESS", "collective operation timeout"),
        ("COMM_ERROR", "SUCCESS", "remote process exited"),
        ("SUCCESS", "TIMEOUT", "collective operation timeout in group [0, 2]"),
        ("SUCCESS", "SUCCESS", ""),
    ],
)
def test_a_group_that_the_watchdog_has_aborted_is_recognized(
    monkeypatch: pytest.MonkeyPatch, default: str, subgroup: str, reason: str
) -> None:
    groups = [group_with_error(default), group_with_error(subgroup)]
    world = SimpleNamespace(
        pg_names=dict.fromkeys(groups, ""),
        default_pg=groups[0],
        pg_group_ranks={groups[1]: {0: 0, 2: 1}},
    )
    monkeypatch.setattr(dist.distributed_c10d, "_world", world)
    assert describe_abort() == reason


@pytest.mark.usefixtures("group_of_one")
def test_a_group_of_gloo_is_not_aborted() -> None:
    assert describe_abort() == ""
