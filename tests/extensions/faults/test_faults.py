"""A fault is written and read in one spelling, and fires at its step, on its rank, once."""

import ctypes
import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from IPython.core.error import UsageError
from refusals import refusal
from sinks import Recorder
from syrupy.assertion import SnapshotAssertion
from torch import nn
from typed import Typed

from nbddp.errors import ArgumentError
from nbddp.extensions.faults import arming, fault_actions
from nbddp.extensions.faults.arming import KINDS, Fault, FaultError, armed, at, clear
from nbddp.extensions.faults.kinds import FAULTS_VARIABLE
from nbddp.record.cell import CellRequest
from nbddp.reporting import log_and_track, this_rank
from nbddp.reporting.log_and_track import log, report_step
from nbddp.worker.heal.namespace_transfer import load_namespace, pickle_namespace


@pytest.fixture(autouse=True)
def sink(monkeypatch: pytest.MonkeyPatch, recorder: Recorder) -> Iterator[Recorder]:
    """Rank 1 of 2, without a launcher that restarts it; disarmed at the end."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("NBDDP_STRUCK", raising=False)
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT", raising=False)
    yield recorder
    clear()


def arm(step: int, kind: str = "raise", **more: Any) -> None:
    at(step=step, rank=1, kind=kind, **more)


def fire(kind: str, step: int = 1) -> None:
    arm(step, kind)
    log(step=step)


def log_and_fail(step: int) -> str:
    return refusal(FaultError, log, step=step)


def fired_at(fault: str, step: int) -> list[Any]:
    return [("fault", {"fault": fault, "at_step": step}), "flush"]


def keep(monkeypatch: pytest.MonkeyPatch, *newest: Path | None) -> None:
    """Let there be checkpoints with these newest files."""
    kept = [SimpleNamespace(newest=lambda path=path: path) for path in newest]
    monkeypatch.setattr(fault_actions, "checkpoints", kept)


@given(
    kind=st.sampled_from(KINDS),
    rank=st.integers(0, 10**6),
    step=st.integers(0, 10**12),
    factor=st.floats(1, exclude_min=True, allow_infinity=False),
)
def test_a_parsed_fault_equals_the_fault(kind: str, rank: int, step: int, factor: float) -> None:
    fault = Fault(kind=kind, rank=rank, step=step, factor=factor if kind == "slow" else 2.0)
    assert Fault.parse(str(fault)) == fault


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        (Fault.parse(" kill @ rank = 1, step = 30\n"), "kill@rank=1,step=30"),
        (Fault.parse("slow@rank=00,step=05,factor=1.50"), "slow@rank=0,step=5,factor=1.5"),
        (Fault.parse("slow@rank=0,step=5"), "slow@rank=0,step=5,factor=2"),
        (Fault(kind="oom", rank=torch.tensor(1), step=True), "oom@rank=1,step=1"),
    ],
)
def test_the_text_of_a_fault_is_canonical(fault: Fault, text: str) -> None:
    assert str(fault) == text


MISSPELLED = (
    *("", "kill", "kill@step=1,rank=3", "kill@rank=1", "kill@rank=1,step=x"),
    *("kil@rank=1,step=30", "SEGFAULT@rank=1,step=3", "xyz@rank=1,step=30"),
    *("kill@rank=-1,step=30", "kill@rank=1,step=-30", "kill@rank=1,step=3,factor=3"),
    *(f"slow@rank=1,step=3,factor={factor}" for factor in ("1", "inf", "nan", "x")),
)
WRONG: tuple[dict[str, Any], ...] = ({"kind": "hangs"}, {"rank": 2})


def test_every_rank_refuses_an_invalid_fault(sink: Recorder, snapshot: SnapshotAssertion) -> None:
    reasons = {text: refusal(ArgumentError, Fault.parse, text) for text in MISSPELLED}
    for wrong in WRONG:
        fault = {"kind": "kill", "rank": 0, "step": 1} | wrong
        reasons[str(wrong)] = refusal(ArgumentError, at, **fault)
    assert reasons == snapshot
    assert (armed(), sink.calls) == ([], [])


def test_a_fault_without_a_target_says_so_once_and_is_disarmed(
    sink: Recorder, monkeypatch: pytest.MonkeyPatch, snapshot: SnapshotAssertion
) -> None:
    monkeypatch.setattr(fault_actions, "prepared_models", [])
    keep(monkeypatch, None)
    texts = {}
    for kind in ("nan", "skip", "corrupt"):
        arm(1, kind)
        texts[kind] = log_and_fail(1)
        assert armed() == []
        log(step=2)
        clear()
    assert texts == snapshot
    assert sink.calls == [1, 2, 1, 2, 1, 2]


def test_faults_that_are_due_fire_once_each_after_the_metrics_of_a_step(sink: Recorder) -> None:
    for step in (2, 1, 2):
        arm(step)
    first, second = "raise@rank=1,step=1", "raise@rank=1,step=2"
    assert [str(fault) for fault in armed()] == [first, second]
    log(step=0)
    assert [log_and_fail(5), log_and_fail(5)] == [f"fault: {first}", f"fault: {second}"]
    assert armed() == []
    log(step=5)
    assert sink.calls == [0, 5, *fired_at(first, 5), 5, *fired_at(second, 5), 5]


def test_loader_steps_count_only_until_a_step_is_logged() -> None:
    arm(2)
    report_step(1, source="loader")
    with pytest.raises(FaultError):
        report_step(2, source="loader")
    arm(3)
    log(step=0)
    report_step(7, source="loader")
    log_and_fail(3)


def test_clear_disarms_faults_and_forgets_which_faults_fired() -> None:
    arm(1)
    arm(2)
    log_and_fail(1)
    clear()
    assert armed() == []
    assert log_and_track._on_step == []
    log(step=2)
    arm(1)
    log_and_fail(1)


def test_no_fault_fires_in_a_child_like_a_loaders_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    arm(1)
    monkeypatch.setattr(os, "getpid", lambda: -1)
    log(step=1)


def test_faults_are_armed_from_the_environment_and_disarmed_by_their_text(
    sink: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = ["kill@rank=1,step=3", "slow@rank=1,step=5,factor=3", "kill@rank=0,step=1"]
    monkeypatch.setenv(FAULTS_VARIABLE, ";".join([*texts, "kill@rank=99,step=1"]))
    monkeypatch.setenv("NBDDP_STRUCK", "")
    arming.arm_from_environment()
    assert sink.calls == []
    assert FAULTS_VARIABLE not in os.environ  # the script does not see it
    assert [str(fault) for fault in armed()] == texts[:2]  # of this rank
    arming.disarm(texts[:1])
    assert [str(fault) for fault in armed()] == texts[1:2]


@pytest.mark.parametrize(
    ("fired", "count", "is_armed"),
    [
        (None, None, True),
        (None, "0", True),
        (None, "1", False),
        ("", "3", True),  # nbddp's count goes up with a restart by hand too
        ("raise@rank=1,step=3", "0", True),
        ("kill@rank=1,step=3;slow@rank=1,step=5,factor=3", "0", False),
        ("slow@rank=1,step=5,factor=3;kill@rank=1,step=3", "0", False),
        ("kill@rank=1,step=30", "0", True),
    ],
)
def test_a_fault_that_already_fired_is_not_armed_after_a_restart(
    monkeypatch: pytest.MonkeyPatch, fired: str | None, count: str | None, *, is_armed: bool
) -> None:
    for name, value in (("NBDDP_STRUCK", fired), ("TORCHELASTIC_RESTART_COUNT", count)):
        if value is not None:
            monkeypatch.setenv(name, value)
    arm(3, "kill")
    assert bool(armed()) is is_armed


def test_a_fault_fires_again_in_new_cells_not_in_replays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NBDDP_STRUCK", "kill@rank=1,step=3")
    monkeypatch.setattr(arming, "_is_again", True)  # and back to it afterwards
    for is_again in (True, False):
        arming.begin_cell(is_again=is_again)
        arm(3, "kill")
        assert bool(armed()) is not is_again


def test_a_fault_fires_again_in_the_same_process_only_if_requested(sink: Recorder) -> None:
    for again in (False, False, True):
        arm(0, again=again)
        with suppress(FaultError):
            log(step=0)
    assert sink.calls.count("flush") == 2


def test_fatal_faults_are_reported_first(sink: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "kill", lambda pid, signum: sink.calls.append((pid, signum)))
    monkeypatch.setattr(os, "_exit", lambda code: sink.calls.append(code))
    monkeypatch.setattr(ctypes, "string_at", lambda address: sink.calls.append(address))
    for step, kind in enumerate(("kill", "stop", "exit", "segfault")):
        arm(step, kind)
    log(step=3)
    acts = [(os.getpid(), signal.SIGKILL), (os.getpid(), signal.SIGSTOP), 3, 0]
    assert sink.calls[3::3] == acts
    assert sink.calls[2::3] == ["flush"] * 4


class Clock:
    """A clock that sleeping moves on; it interrupts the third sleep of an hour."""

    def __init__(self) -> None:
        self.now = 100.0
        self.slept: list[float] = []

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds
        if self.slept == [3600] * 3:
            raise KeyboardInterrupt

    def log_after(self, seconds: float, step: int) -> None:
        self.now += seconds
        log(step=step)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(fault_actions, "time", clock)
    return clock


def test_a_hang_ends_when_it_is_interrupted(clock: Clock) -> None:
    arm(1, "hang")
    with pytest.raises(KeyboardInterrupt):
        log(step=1)
    log(step=1)
    assert clock.slept == [3600] * 3


def test_oom_raises_the_error_of_torch_and_allocates_nothing() -> None:
    arm(1, "oom")
    words = "not enough memory|can't allocate memory|out of memory|Invalid buffer size"
    with pytest.raises(RuntimeError, match=words):
        log(step=1)
    torch.ones(10)


def test_slow_delays_every_following_step_until_it_is_cleared(sink: Recorder, clock: Clock) -> None:
    arm(1, "slow", factor=3)
    for step, seconds in enumerate([5.0, 5.0, 1.0, 2.0, 0.5]):
        clock.log_after(seconds, step)
    clear()
    clock.log_after(1.0, step=5)
    assert clock.slept == [2.0, 4.0, 1.0]
    assert sink.calls.count("flush") == 1


def test_slow_does_not_delay_the_time_between_cells(clock: Clock) -> None:
    arm(0, "slow")
    log(step=0)
    clock.now += 600
    arming.begin_cell(is_again=True)
    clock.log_after(1, step=1)
    assert clock.slept == []
    clock.log_after(1, step=2)
    assert clock.slept == [1.0]


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> torch.nn.Sequential:
    """A prepared model of which a part is frozen, and a part is unused."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))
    model[0].requires_grad_(False)
    model.register_parameter("unused", torch.nn.Parameter(torch.ones(1)))
    monkeypatch.setattr(fault_actions, "prepared_models", [model])
    return model


def poisoned(model: torch.nn.Module) -> list[str]:
    model.zero_grad()
    model(torch.ones(1, 2)).sum().backward()
    named = model.named_parameters()
    return [name for name, each in named if each.grad is not None and each.grad.isnan().any()]


def test_a_nan_fault_changes_one_gradient_of_one_backward(
    model: torch.nn.Sequential,
) -> None:
    arm(1, "nan")
    assert poisoned(model) == []
    log(step=1)
    assert len(poisoned(model)) == 1
    fire("nan", step=2)
    clear()
    assert poisoned(model) == []
    assert all(not each._backward_hooks for each in model.parameters())


@pytest.fixture
def skips(monkeypatch: pytest.MonkeyPatch, group_of_one: None) -> SimpleNamespace:  # noqa: ARG001
    """A process group of one, which is rank 1 for the faults all the same; yields torch's own."""
    monkeypatch.setattr(fault_actions, "prepared_models", [])
    monkeypatch.setattr(this_rank, "rank", lambda: 1)
    monkeypatch.setattr(this_rank, "world_size", lambda: 2)
    names = [name for name in fault_actions.COLLECTIVES if hasattr(dist, name)]
    return SimpleNamespace(**{name: getattr(dist, name) for name in names})


def gather_one() -> float:
    """Gather a one into a zero; return which of them is there."""
    gathered = [torch.zeros(1)]
    dist.all_gather(gathered, torch.ones(1))
    return gathered[0].item()


def test_a_skip_fault_omits_one_collective_and_restores_torch(skips: SimpleNamespace) -> None:
    fire("skip")
    assert dist.all_gather is not skips.all_gather
    assert gather_one() == 0.0
    assert gather_one() == 1.0
    fire("skip", step=2)
    assert dist.barrier is not skips.barrier
    clear()
    assert vars(skips) == {name: getattr(dist, name) for name in vars(skips)}
    assert dist.distributed_c10d.barrier is skips.barrier


def test_a_fault_without_a_target_in_its_cell_is_disarmed_at_its_end(
    skips: SimpleNamespace,
) -> None:
    fire("skip")
    [notice] = arming.end_cell()
    assert "skip@rank=1" in notice
    assert "disarmed" in notice
    assert dist.all_gather is skips.all_gather
    assert arming.end_cell() == []


@pytest.mark.usefixtures("skips")
def test_skip_completes_an_asynchronous_collective_and_ends_with_its_process_group() -> None:
    fire("skip")
    work = dist.all_reduce(torch.ones(1), async_op=True)
    work.wait()
    assert work.is_completed()
    fire("skip", step=2)
    assert gather_one() == 0.0
    fire("skip", step=3)
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert gather_one() == 1.0


@pytest.fixture
def ddp(skips: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> Any:  # noqa: ARG001
    """A DDP model that counts its averaging calls."""
    model: Any = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
    model.averaged = 0

    def average(_state, bucket):  # without annotations: torch reads them
        model.averaged += 1
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    model.register_comm_hook(None, average)
    monkeypatch.setattr(fault_actions, "prepared_models", [model])
    return model


def averaged(model: Any) -> int:
    before = model.averaged
    model(torch.ones(1, 2)).sum().backward()
    return int(model.averaged - before)


def test_skip_keeps_ddp_from_averaging_once(skips: SimpleNamespace, ddp: Any) -> None:
    assert averaged(ddp) == 1
    fire("skip")
    with torch.no_grad():
        ddp(torch.ones(1, 2))  # an evaluation averages nothing
    with ddp.no_sync():
        assert averaged(ddp) == 0  # nor does a micro-step
    assert dist.barrier is not skips.barrier
    assert averaged(ddp) == 0
    assert dist.barrier is skips.barrier
    assert averaged(ddp) == 1
    assert ddp.require_forward_param_sync


def test_skip_applies_to_the_next_averaging_after_a_forward_that_raises(ddp: Any) -> None:
    fire("skip")
    with pytest.raises(RuntimeError):
        ddp(torch.ones(1, 5))
    assert averaged(ddp) == 0
    assert averaged(ddp) == 1
    assert not ddp._forward_pre_hooks
    assert not ddp._forward_hooks


def a_file(path: Path, size: int, *, at: float) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(bytes(size))
    os.utime(path, (at, at))
    return path


def test_corrupt_flips_bytes_of_the_newest_checkpoint(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    now = time.time()
    old, new = a_file(tmp_path / "old", 1000, at=now - 9), a_file(tmp_path / "new", 1000, at=now)
    keep(monkeypatch, new, None, old)
    fire("corrupt")
    log(step=2)
    assert old.read_bytes() == bytes(1000)
    assert new.read_bytes() == bytes(468) + b"\xff" * 64 + bytes(468)


@pytest.mark.parametrize("size", [0, 1, 63, 64, 65])
def test_corrupting_a_folder_flips_bytes_of_its_largest_file(tmp_path: Path, size: int) -> None:
    smallest, path = a_file(tmp_path / "a" / "1", 0, at=0), a_file(tmp_path / "a" / "2", size, at=0)
    fault_actions.flip_bytes(tmp_path)
    assert smallest.read_bytes() == b""
    assert len(path.read_bytes()) == size
    assert (path.read_bytes() == bytes(size)) is (size == 0)


def test_a_fault_is_not_copied_with_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a fault of the donor would be injected on the new rank, too."""
    model = nn.Linear(1, 1, bias=False)
    monkeypatch.setattr(fault_actions, "prepared_models", [model])
    fault_actions.NanAction(Fault(kind="nan", rank=0, step=1)).fire()
    carried = pickle_namespace({"model": model})
    copies: dict[str, Any] = {}
    load_namespace(carried.data, copies, carried.storages)
    copies["model"](torch.ones(1, 1)).backward()
    assert not copies["model"].weight.grad.isnan()


def test_a_fault_is_armed_on_the_given_rank_with_the_given_options(typed: Typed) -> None:
    typed.line("fault slow --rank 1 --step 7 --factor 3")
    request: CellRequest = typed.run.call_args.args[0]
    assert request.ranks == (1,)
    calls: list[dict[str, Any]] = []
    exec(request.source, {"nbddp": Mock(**{"faults.at": lambda **how: calls.append(how)})})
    assert calls == [{"kind": "slow", "rank": 1, "step": 7, "factor": 3.0, "again": True}]
    with pytest.raises(UsageError, match="required: --step; for "):
        typed.line("fault kill --rank 1")
    with pytest.raises(UsageError, match="disarms the faults of all ranks and steps"):
        typed.line("fault off --rank 1")
    typed.line("fault off")
    exec(typed.run.call_args.args[0].source, {"nbddp": (kit := Mock())})
    kit.faults.clear.assert_called_once_with()
