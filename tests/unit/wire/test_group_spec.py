"""How to start a worker group: limits in words, the environment merged, no secret recorded."""

import json
import os
import shutil
import socket
import sys
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from fakes import FakeLauncher, FakeLink, fake_session
from refusals import refusal
from syrupy.assertion import SnapshotAssertion

from nbddp.controller.group_actor import start_event
from nbddp.errors import ArgumentError, RequestError
from nbddp.wire import group_spec
from nbddp.wire.group_spec import GroupSpec, check_variables
from nbddp.wire.rank_start import RankStart

WRONG: tuple[dict[str, Any], ...] = (
    *({"nproc": nproc} for nproc in (0, -1, 129, 10_000)),
    *({"timeout": seconds} for seconds in (0.0, -1.5, float("nan"))),
    *({"grace": seconds} for seconds in (0.0, float("nan"))),
    {"threads": -1},
    *({"env": {name: "1"}} for name in ("", "A B", "A=B", "1A")),
    *({"ranks": ranks} for ranks in ((), (0, 2))),
    *({"env": {"PYTHONIOENCODING": value}} for value in ("latin-1", "ascii:replace", ":nonsense")),
)


def test_invalid_group_options_are_refused_with_their_limits(snapshot: SnapshotAssertion) -> None:
    assert (GroupSpec(nproc=1).nproc, GroupSpec(nproc=128).nproc) == (1, 128)
    for encoding in ("", "UTF-8", "utf8:replace", ":ignore"):
        GroupSpec(env={"PYTHONIOENCODING": encoding})
    reasons = {str(values): refusal(ArgumentError, GroupSpec, **values) for values in WRONG}
    assert reasons == snapshot


def test_variables_that_torch_refuses_are_named(
    monkeypatch: pytest.MonkeyPatch, snapshot: SnapshotAssertion
) -> None:
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "lo"), (2, "eth0")])
    debug, interface = "TORCH_DISTRIBUTED_DEBUG", "GLOO_SOCKET_IFNAME"
    accepted = [{debug: value} for value in ("OFF", "info", "Detail")]
    accepted += [{interface: value} for value in ("", "lo", "lo,eth0", "eth0:1", "lo,")]
    for env in ({}, *accepted):
        check_variables(env, is_local=True)
    refused = [{debug: value} for value in ("ON", "1", "WRONG", "", " INFO")]
    refused += [{interface: value} for value in ("eth9", "lo,eth9", "lo, eth0", "et")]
    for env in refused[-4:]:
        check_variables(env, is_local=False)  # nodes have other interfaces
    reasons = [refusal(ArgumentError, check_variables, env, is_local=True) for env in refused]
    assert reasons == snapshot


def pretend_gpus(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    cuda = SimpleNamespace(device_count=lambda: count)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))


def test_only_nccl_needs_a_gpu(
    monkeypatch: pytest.MonkeyPatch, snapshot: SnapshotAssertion
) -> None:
    pretend_gpus(monkeypatch, 1)
    GroupSpec(nproc=2, backend="nccl").check_gpus()  # ranks may share a GPU
    pretend_gpus(monkeypatch, 0)
    prepare = fake_session(FakeLauncher(), FakeLink()).prepare  # before other ranks are ended
    assert refusal(RequestError, prepare, GroupSpec(nproc=1, backend="nccl")) == snapshot
    monkeypatch.setitem(sys.modules, "torch", None)  # importing it would fail
    for backend in ("auto", "gloo"):
        GroupSpec(nproc=100, backend=backend).check_gpus()


@pytest.mark.parametrize(
    ("cores", "nproc", "threads", "per_rank"),
    [(8, 2, 0, 4), (8, 3, 0, 2), (2, 4, 0, 1), (8, 2, 3, 3), (1, 1, 0, 1)],
)
def test_cores_are_divided_among_ranks_unless_threads_are_given(
    monkeypatch: pytest.MonkeyPatch, cores: int, nproc: int, threads: int, per_rank: int
) -> None:
    monkeypatch.setattr(group_spec, "cores_here", lambda: cores)
    assert GroupSpec(nproc=nproc, threads=threads).threads_per_rank() == per_rank


def test_options_override_the_kernels_environment_at_the_time_of_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spec, key = GroupSpec(env={"BOTH": "asked"}), "CUDA_VISIBLE_DEVICES"
    for name in ("BOTH", "LATER", key):
        monkeypatch.setenv(name, "7")
    env = spec.environment()
    assert (env["BOTH"], env["LATER"], env[key]) == ("asked", "7", "7")
    assert env["PATH"] == os.environ["PATH"]
    assert os.environ["BOTH"] == "7"
    assert GroupSpec(gpus=(0, 2)).environment()[key] == "0,2"
    assert GroupSpec(gpus=(0, 2), env={key: "3"}).environment()[key] == "3"


def test_ranks_do_not_get_the_colours_that_jupyter_forces_on_its_kernel() -> None:
    forced = {"FORCE_COLOR": "1", "CLICOLOR_FORCE": "1", "TERM": "xterm-color"}
    of_kernel = forced | {"JPY_PARENT_PID": "7"}
    assert GroupSpec().environment(base=forced) == forced
    assert GroupSpec().environment(base=of_kernel).keys() == {"TERM", "JPY_PARENT_PID"}
    asked = GroupSpec(env={"FORCE_COLOR": "3"}).environment(base=of_kernel)
    assert asked["FORCE_COLOR"] == "3"


def test_each_rank_sees_only_its_own_mig_device() -> None:
    key, names = "CUDA_VISIBLE_DEVICES", ("MIG-a", "MIG-b")
    spec = GroupSpec(nproc=3, gpus=names)
    assert [spec.environment(rank)[key] for rank in range(3)] == ["MIG-a", "MIG-b", "MIG-a"]
    spec = GroupSpec(nproc=2, gpus=("GPU-a", "GPU-b"))
    assert [spec.environment(rank)[key] for rank in range(2)] == ["GPU-a,GPU-b"] * 2
    assert GroupSpec(gpus=()).environment()[key] == ""


def test_ranks_start_in_the_kernels_folder_or_in_the_home_folder_if_it_was_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    assert GroupSpec().cwd() == gone
    shutil.rmtree(gone)
    assert GroupSpec().cwd() == Path.home()


@pytest.mark.parametrize("wrap", [dict, MappingProxyType])
def test_the_recorded_facts_have_names_of_variables_and_never_their_values(wrap: Any) -> None:
    env = wrap({"TOKEN": "hunter2", "ANOTHER": "hunter3"})
    facts = GroupSpec(nproc=3, env=env, gpus=(0, 1), name="x", threads=2).facts()
    assert facts["env"] == ["ANOTHER", "TOKEN"]
    assert "hunter" not in json.dumps(facts)
    assert (facts["nproc"], facts["gpus"], facts["name"], facts["threads"]) == (3, (0, 1), "x", 2)
    assert facts["cwd"] == str(Path.cwd())


def starts(**spec: Any) -> tuple[Path, list[RankStart]]:
    launcher = FakeLauncher()
    session = fake_session(launcher, FakeLink(), colors="linux")
    launcher.on_launch = launched = Mock(side_effect=launcher.on_launch)
    session.start(GroupSpec(**spec))
    session.close()
    [folder] = Path.cwd().glob(".nbddp/runs/*")
    return folder, [each.args[0] for each in launched.call_args_list]


@pytest.mark.usefixtures("folder")
def test_every_rank_gets_its_topology_and_log_path_and_the_same_other_start_facts() -> None:
    folder, told = starts(nproc=3, backend="gloo", timeout=9.0, env={"A": "1"}, joins_group=False)
    assert [start.topology.rank for start in told] == [0, 1, 2]
    assert [start.log_path for start in told] == [f"{folder}/rank{rank}.log" for rank in range(3)]
    for start in told:
        assert (start.topology.world_size, start.topology.master_port) == (3, 4243)
        assert (start.attempt, start.secret, start.spec.backend) == (1, b"secret", "gloo")
        assert (start.spec.timeout, start.spec.joins_group, start.colors) == (9.0, False, "linux")
        assert (start.kernel_pid, start.run_id) == (os.getpid(), folder.name)
        assert (start.store_port, start.sys_path) == (4242, sys.path)
        assert (start.env["A"], start.cwd) == ("1", str(Path.cwd()))


@pytest.mark.usefixtures("folder")
def test_the_repr_of_a_rank_start_shows_neither_secret_nor_environment() -> None:
    _, [start] = starts(nproc=1, env={"TOKEN": "hunter2"})
    assert "b'secret'" not in repr(start)
    assert "hunter2" not in repr(start)


def test_the_start_event_has_the_options_of_the_group() -> None:
    spec = GroupSpec(nproc=3, joins_group=False, grace=2.0, ranks=(0, 2))
    event = start_event(spec)
    assert (event.world_size, event.joins_group, event.grace) == (3, False, 2.0)
    assert event.ranks == (0, 2)
    assert "ranks" not in spec.facts()
