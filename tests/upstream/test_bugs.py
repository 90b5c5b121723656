"""Bugs of other packages for which nbddp has a workaround.

Each test fails when a release has fixed its bug: then remove the workaround, or limit it to the
older versions, and delete the test. docs/development/private_names.md lists the workarounds.
"""

import copy
import io
import multiprocessing.spawn
import os
import signal
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import Mock

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from comm.base_comm import BaseComm
from interrupted_calls import keeps_a_frame
from ipykernel.zmqshell import ZMQInteractiveShell
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

pytestmark = pytest.mark.full


@pytest.fixture
def form_group() -> Iterator[Callable[..., Any]]:
    """Form a default group of one rank."""

    def form(store: dist.Store | None = None) -> None:
        dist.init_process_group("gloo", store=store or dist.HashStore(), rank=0, world_size=1)

    yield form
    if dist.is_initialized():
        dist.destroy_process_group()


def test_an_operation_finds_the_mesh_of_a_destroyed_group(form_group: Callable[..., Any]) -> None:
    def distributed() -> DTensor:
        form_group()
        return distribute_tensor(torch.ones(2), dist.init_device_mesh("cpu", (1,)), [Shard(0)])

    first = distributed()
    _ = first + first
    dist.destroy_process_group()
    second: Any = distributed()
    assert (second + second).device_mesh is not second.device_mesh


def test_a_second_group_writes_the_keys_of_the_first(form_group: Callable[..., Any]) -> None:
    store = dist.HashStore()
    form_group(store)
    number = store.num_keys()
    dist.destroy_process_group()
    form_group(store)
    assert store.num_keys() == number


def test_restoring_a_ddp_model_registers_no_communication_hook(
    form_group: Callable[..., Any],
) -> None:
    calls = []

    def hook(_, bucket):  # torch refuses annotations that are strings
        calls.append(bucket.index())
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    form_group()
    model = DistributedDataParallel(nn.Linear(2, 2))
    model.register_comm_hook(None, hook)
    model(torch.ones(1, 2)).sum().backward()
    assert len(calls) == 1
    not_restored = ("process_group", "reducer", "logger")
    restored = DistributedDataParallel.__new__(DistributedDataParallel)
    restored.__setstate__({k: v for k, v in vars(model).items() if k not in not_restored})
    restored(torch.ones(1, 2)).sum().backward()
    assert len(calls) == 1


@pytest.mark.skipif(torch.__version__ >= "2.14", reason="fixed in torch 2.14")
def test_under_torchrun_a_tcp_address_has_no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    with pytest.raises(dist.DistNetworkError):
        dist.init_process_group(
            "gloo",
            init_method="tcp://127.0.0.1:0",
            rank=0,
            world_size=1,
            timeout=timedelta(seconds=0.5),
        )


def test_a_loader_counts_the_replies_of_an_interrupted_reset() -> None:
    samples: Any = range(4)
    loader = DataLoader(samples, num_workers=1, persistent_workers=True, timeout=5)
    assert len([*loader]) == 4
    iterator: Any = loader._iterator

    def interrupt() -> None:
        raise KeyboardInterrupt

    iterator._get_data = interrupt  # it waits for the workers' replies
    with pytest.raises(KeyboardInterrupt):
        iter(loader)
    del iterator._get_data
    with pytest.raises(KeyError):
        list(loader)
    iterator._shutdown_workers()


@pytest.mark.skipif(torch.__version__ >= "2.13", reason="fixed in torch 2.13")
def test_a_failed_checkpointed_call_is_repeated_by_each_backward() -> None:
    def fail(_: torch.Tensor) -> None:
        raise ZeroDivisionError

    x = torch.ones(2, requires_grad=True)
    with pytest.raises(ZeroDivisionError) as error:
        checkpoint(fail, x, use_reentrant=False)
    with pytest.raises(ZeroDivisionError):
        (x * x).sum().backward()
    del error


@pytest.mark.skipif(torch.__version__ < "2.14", reason="older versions do not warn")
def test_loading_a_sparse_tensor_warns_that_it_is_validated() -> None:
    file = io.BytesIO()
    torch.save(torch.eye(2).to_sparse(), file)
    file.seek(0)
    with pytest.warns(UserWarning, match="Validating sparse tensor invariants"):
        torch.load(file, weights_only=True)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_copying_an_operator_never_ends() -> None:
    pid = os.fork()  # no signal handler can end it
    if not pid:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        try:
            copy.copy(torch.ops.aten.add)
        finally:
            os._exit(0)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGALRM


def test_an_interrupt_in_a_method_of_a_python_group_keeps_the_frame_of_its_caller() -> None:
    class Group(dist.ProcessGroup):
        """With C++ methods, which look for a Python method of the same name."""

    group = Group(0, 1)  # type: ignore[call-arg]
    assert keeps_a_frame(group.rank, interrupts=5_000)


def test_equal_classes_have_different_pickles() -> None:
    def pickled() -> bytes:
        names: dict[str, Any] = {"__name__": "__main__"}
        exec("class A: pass", names)
        return cloudpickle.dumps(names["A"])

    assert pickled() != pickled()


@pytest.mark.skipif(cloudpickle.__version__ < "3.1.3", reason="older versions keep the name")
def test_a_pickled_function_loses_its_file_name() -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile("def f(): pass", "cell.py", "exec"), names)
    assert cloudpickle.loads(cloudpickle.dumps(names["f"])).__code__.co_filename != "cell.py"


def test_a_message_to_a_widget_triggers_the_events_of_a_cell(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    events: list[str] = []
    shell = SimpleNamespace(events=SimpleNamespace(trigger=events.append))
    monkeypatch.setattr("IPython.get_ipython", lambda: shell)
    comm = BaseComm.__new__(BaseComm)
    comm.comm_id, comm._msg_callback = "1", lambda _: events.append("the message")
    comm.handle_msg({})
    assert events == ["pre_execute", "the message", "post_execute"]


def test_a_kernel_asks_programs_for_colors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {})
    ZMQInteractiveShell.init_environment(Mock())
    assert {"FORCE_COLOR", "CLICOLOR_FORCE"} <= os.environ.keys()


def test_multiprocessing_needs_a_spec_of_main(monkeypatch: pytest.MonkeyPatch) -> None:
    main = ModuleType("__main__")
    del main.__spec__  # as %reset -f does
    monkeypatch.setitem(sys.modules, "__main__", main)
    with pytest.raises(AttributeError, match="__spec__"):
        multiprocessing.spawn.get_preparation_data("child")
