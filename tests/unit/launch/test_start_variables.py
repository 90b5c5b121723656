"""Which variables need another forkserver, and how many forkservers are kept."""

import os
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from nbddp.launch import local_launcher
from nbddp.launch.local_launcher import LocalLauncher
from nbddp.launch.start_variables import describe_end, read_at_start, start_variables

NEEDED = (
    *("TORCH_LOGS", "TORCHDYNAMO_VERBOSE", "TORCHINDUCTOR_MAX_AUTOTUNE", "TORCH_CPP_LOG_LEVEL"),
    *("PYTHONHASHSEED", "PYTHONOPTIMIZE", "PYTORCH_JIT", "MKL_CBWR", "OMP_PROC_BIND", "LD_PRELOAD"),
    *("ONEDNN_VERBOSE", "AOT_INDUCTOR_DEBUG_COMPILE", "GLOO_DEVICE_TRANSPORT"),
)
NOT_NEEDED = (
    *("RANK", "TORCHELASTIC_RUN_ID", "TORCH_DISTRIBUTED_DEBUG", "TORCH_NCCL_BLOCKING_WAIT"),
    *("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "PYTHONBREAKPOINT", "PYTHONPATH", "TZ"),
    *("KMP_INIT_AT_FORK", "TORCHINDUCTOR_CACHE_DIR", "MY_TORCH_LOGS", "NBDDP_STRUCK"),
)


def test_only_variables_that_are_read_at_the_start_need_another_forkserver() -> None:
    assert [*read_at_start(dict.fromkeys((*NEEDED, *NOT_NEEDED), "1"))] == [*NEEDED]
    assert read_at_start(dict.fromkeys(NEEDED, "")) == {}


def test_the_end_of_a_forkserver_is_told_in_one_line() -> None:
    outputs = {
        "": "it wrote no error message",
        "Fatal Python error: no seed\nPython runtime state\n\n  <no frame>\n": (
            "Fatal Python error: no seed"
        ),
        "OpenBLAS error: no memory\n\n": "OpenBLAS error: no memory",
        "Traceback\n  line 3\nImportError: x\n\nRuntimeError: y\n": "RuntimeError: y",
        "killed": "killed",
    }
    for output, reason in outputs.items():
        text = describe_end(output, {"TORCH_LOGS": "x"})
        assert text.endswith(
            f"has ended: {reason}; it had TORCH_LOGS=x: `--env TORCH_LOGS=`, or "
            "`%env TORCH_LOGS=`, removes such a variable"
        )


def test_only_a_process_started_meanwhile_gets_the_variables(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TORCH_LOGS", "+dynamo")
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    before = dict(os.environ)
    with start_variables({"PYTHONHASHSEED": "7", "OMP_NUM_THREADS": "1"}):
        assert read_at_start(os.environ) == {"PYTHONHASHSEED": "7"}
        assert os.environ["OMP_NUM_THREADS"] == "1"
    assert dict(os.environ) == before


def test_forkservers_without_ranks_are_closed_except_the_first_and_the_newest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    servers: list[Any] = []

    def create(variables: dict[str, str] | None = None, changed: Any = None) -> Any:
        servers.append(Mock(variables=variables, changed=changed, rank_pids=set()))
        return servers[-1]

    monkeypatch.setattr(local_launcher, "Forkserver", create)
    launcher = LocalLauncher("forkserver")

    def start(seed: str) -> None:
        name = "TORCH_LOGS" if seed == "1" else "PYTHONHASHSEED"
        env = {name: seed, "OTHER": seed}
        launcher.launch(SimpleNamespace(env=env, topology=SimpleNamespace(rank=0)))

    for seed in ("0", "1", "0", "1"):
        start(seed)
    assert [server.fork.call_count for server in servers] == [2, 2]
    servers[1].rank_pids.add(77)  # the ranks of a script
    start("2")
    start("3")
    assert [server.close.called for server in servers] == [False, False, True, False]
    changed = [{"TORCH_LOGS": "1"}, {"PYTHONHASHSEED": "2"}, {"PYTHONHASHSEED": "3"}]
    assert [server.changed for server in servers[1:]] == changed
    launcher.close()
    assert all(server.close.called for server in servers[:4])
