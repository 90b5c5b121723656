"""A fault is written and read in one spelling, and strikes at its step, on its rank, once."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from nbddp.train import checkpoint as checkpoint_module
from nbddp.train import faults, models, place, report, strikes
from nbddp.train.faults import KINDS, Fault, FaultError, armed, at, clear
from nbddp.train.report import LoggerSink, log, reached, set_sink


class Recorder(LoggerSink):
    """A sink that remembers the order of things."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def log(self, step: int, values: dict[str, float]) -> None:  # noqa: ARG002
        self.told.append(step)

    def happened(self, kind: str, facts: dict[str, Any]) -> None:
        self.told.append((kind, facts))

    def flush(self) -> None:
        self.told.append("flush")


@pytest.fixture
def sink(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorder]:
    """Rank 1 of 2, which nobody started and nobody restarts; disarmed at the end."""
    monkeypatch.setattr(report, "_sink", LoggerSink())
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("NBDDP_STRUCK", raising=False)
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT", raising=False)
    recorder = Recorder()
    set_sink(recorder)
    yield recorder
    clear()


def struck_at(fault: str, step: int) -> list[Any]:
    return [("fault", {"fault": fault, "at_step": step}), "flush"]


def a_module(monkeypatch: pytest.MonkeyPatch, name: str, **names: Any) -> None:
    """Put another module in the place of one of the kit's."""
    module = ModuleType(name)
    vars(module).update(names)
    monkeypatch.setitem(sys.modules, name, module)


# ---- spelling

some_faults = st.builds(
    lambda kind, rank, step, factor: Fault(
        kind=kind, rank=rank, step=step, factor=factor if kind == "slow" else 2.0
    ),
    st.sampled_from(KINDS),
    st.integers(0, 10**6),
    st.integers(0, 10**12),
    st.floats(1, exclude_min=True, allow_infinity=False),
)


@given(some_faults)
def test_what_is_written_is_read_back(fault: Fault) -> None:
    assert Fault.parse(str(fault)) == fault


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("kill@rank=1,step=30", Fault(kind="kill", rank=1, step=30)),
        (" kill @ rank = 1, step = 30\n", Fault(kind="kill", rank=1, step=30)),
        ("slow@rank=0,step=5", Fault(kind="slow", rank=0, step=5, factor=2)),
        ("slow@rank=0,step=5,factor=2.5", Fault(kind="slow", rank=0, step=5, factor=2.5)),
    ],
)
def test_a_fault_is_read(text: str, fault: Fault) -> None:
    assert Fault.parse(text) == fault


def test_a_fault_has_one_spelling() -> None:
    assert str(Fault(kind="slow", rank=0, step=5, factor=3)) == "slow@rank=0,step=5,factor=3"
    assert str(Fault.parse("slow@rank=00,step=05,factor=1.50")) == "slow@rank=0,step=5,factor=1.5"
    assert str(Fault(kind="oom", rank=torch.tensor(1), step=True)) == "oom@rank=1,step=1"


ALL = "(kinds: raise, kill, segfault, exit, hang, stop, slow, nan, skip, oom, corrupt)"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("kil@rank=1,step=30", f"there is no fault 'kil'; did you mean 'kill'? {ALL}"),
        ("SEGFAULT@rank=1,step=3", f"there is no fault 'SEGFAULT'; did you mean 'segfault'? {ALL}"),
        ("xyz@rank=1,step=30", f"there is no fault 'xyz'; {ALL}"),
        ("kill@rank=-1,step=30", "rank must be 0 or more, got -1"),
        ("kill@rank=1,step=-30", "step must be 0 or more, got -30"),
        ("kill@rank=1,step=3,factor=3", "factor is for a fault of kind 'slow', not for 'kill'"),
        ("slow@rank=1,step=3,factor=1", "factor must be a number above 1, got 1"),
        ("slow@rank=1,step=3,factor=inf", "factor must be a number above 1, got inf"),
        ("slow@rank=1,step=3,factor=nan", "factor must be a number above 1, got nan"),
        ("slow@rank=1,step=3,factor=x", "factor must be a number above 1, got 'x'"),
    ]
    + [
        (
            text,
            f"cannot read fault {text!r}; write it like 'kill@rank=1,step=30' or "
            f"'slow@rank=1,step=30,factor=3' {ALL}",
        )
        for text in ("", "kill", "kill@step=1,rank=3", "kill@rank=1", "kill@rank=1,step=x")
    ],
)
def test_a_wrong_spelling_shows_the_right_one(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(words)}$"):
        Fault.parse(text)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"kind": "hangs"}, f"there is no fault 'hangs'; did you mean 'hang'? {ALL}"),
        ({"rank": "0"}, "rank must be a whole number, got '0'"),
        ({"step": 1.5}, "step must be a whole number, got 1.5"),
        ({"kind": "slow", "factor": None}, "factor must be a number above 1, got None"),
        ({"rank": 2}, "there is no rank 2: the ranks are 0 to 1"),
    ],
)
def test_a_wrong_fault_is_refused_on_every_rank(
    sink: Recorder, wrong: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(words)}$"):
        at(**{"kind": "kill", "rank": 0, "step": 1} | wrong)
    assert armed() == []
    assert sink.told == []


# ---- when


def test_it_strikes_after_the_numbers_of_its_step_were_reported_and_only_once(
    sink: Recorder,
) -> None:
    at(step=2, rank=1, kind="raise")
    log(step=0)
    log(step=1)
    with pytest.raises(FaultError, match=r"^fault: raise@rank=1,step=2$"):
        log(step=2)
    assert sink.told == [0, 1, 2, *struck_at("raise@rank=1,step=2", 2)]
    at(step=2, rank=1, kind="raise")
    for step in range(5):
        log(step=step)
    assert sink.told[5:] == [0, 1, 2, 3, 4]


def test_it_strikes_at_the_first_step_that_is_reported_from_its_own_on(sink: Recorder) -> None:
    at(step=15, rank=1, kind="raise")
    log(step=10)
    with pytest.raises(FaultError):
        log(step=20)
    assert sink.told[-2:] == struck_at("raise@rank=1,step=15", 20)


def test_only_the_rank_that_is_meant_is_armed(sink: Recorder) -> None:
    at(step=1, rank=0, kind="kill")
    assert armed() == []
    log(step=1)
    assert sink.told == [1]


def test_arming_a_fault_twice_is_one_fault_and_the_next_is_first(sink: Recorder) -> None:
    at(step=9, rank=1, kind="raise")
    at(step=4, rank=1, kind="raise")
    at(step=9, rank=1, kind="raise")
    assert [str(fault) for fault in armed()] == ["raise@rank=1,step=4", "raise@rank=1,step=9"]
    assert len(report._on_step) == 1
    for step in (4, 9):
        with pytest.raises(FaultError):
            log(step=step)
    assert armed() == []
    assert len([entry for entry in sink.told if entry == "flush"]) == 2


def test_two_faults_that_are_due_strike_one_after_the_other(sink: Recorder) -> None:
    at(step=2, rank=1, kind="raise")
    at(step=1, rank=1, kind="raise")
    for _ in range(2):
        with pytest.raises(FaultError):
            log(step=5)
    log(step=5)
    assert [entry[1]["fault"] for entry in sink.told if isinstance(entry, tuple)] == [
        "raise@rank=1,step=1",
        "raise@rank=1,step=2",
    ]


def test_a_loader_counts_where_nothing_is_logged(sink: Recorder) -> None:
    at(step=2, rank=1, kind="raise")
    reached(1, source="loader")
    with pytest.raises(FaultError):
        reached(2, source="loader")
    assert sink.told == struck_at("raise@rank=1,step=2", 2)


def test_a_loader_does_not_count_once_something_was_logged(sink: Recorder) -> None:
    at(step=2, rank=1, kind="raise")
    reached(0, source="loader")
    log(step=0)
    reached(7, source="loader")
    assert len(armed()) == 1
    with pytest.raises(FaultError):
        log(step=2)
    assert sink.told[-2:] == struck_at("raise@rank=1,step=2", 2)


def test_clear_disarms_takes_the_hook_away_and_forgets_what_struck(sink: Recorder) -> None:
    at(step=1, rank=1, kind="raise")
    at(step=2, rank=1, kind="raise")
    with pytest.raises(FaultError):
        log(step=1)
    clear()
    assert armed() == []
    assert report._on_step == []
    log(step=2)
    at(step=1, rank=1, kind="raise")
    with pytest.raises(FaultError):
        log(step=1)
    assert len([entry for entry in sink.told if entry == "flush"]) == 2


def test_a_child_such_as_a_loaders_worker_is_not_struck(
    sink: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    at(step=1, rank=1, kind="raise")
    monkeypatch.setattr(os, "getpid", lambda: -1)
    log(step=1)
    assert sink.told == [1]


# ---- not again after a restart


def test_what_struck_before_is_not_armed_again(
    sink: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert sink.told == []
    monkeypatch.setenv("NBDDP_STRUCK", "kill@rank=1,step=3;slow@rank=1,step=5,factor=3")
    at(step=3, rank=1, kind="kill")
    at(step=5, rank=1, kind="slow", factor=3.0)
    assert armed() == []
    at(step=4, rank=1, kind="kill")
    at(step=5, rank=1, kind="slow", factor=2.5)
    assert [str(fault) for fault in armed()] == [
        "kill@rank=1,step=4",
        "slow@rank=1,step=5,factor=2.5",
    ]


def test_in_a_cell_that_the_user_runs_what_struck_before_strikes_anew(
    sink: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert sink.told == []
    monkeypatch.setenv("NBDDP_STRUCK", "kill@rank=1,step=3")
    monkeypatch.setattr(faults, "_is_again", True)  # and back to it afterwards
    for is_again in (True, False):
        faults.begin_cell(is_again=is_again)
        at(step=3, rank=1, kind="kill")
        assert bool(armed()) is not is_again


def test_in_the_same_process_it_strikes_again_only_if_told_to(sink: Recorder) -> None:
    for again in (False, False, True):
        at(step=0, rank=1, kind="raise", again=again)
        with suppress(FaultError):
            log(step=0)
    assert sink.told.count("flush") == 2


@pytest.mark.parametrize(
    ("struck", "count", "is_armed"),
    [
        (None, None, True),
        (None, "0", True),
        (None, "1", False),
        ("", "3", True),  # nbddp's count goes up with a restart by hand too
        ("raise@rank=1,step=3", "0", True),
        ("kill@rank=1,step=3", "0", False),
    ],
)
def test_torchruns_count_of_restarts_decides_where_nbddp_does_not(
    sink: Recorder,
    monkeypatch: pytest.MonkeyPatch,
    struck: str | None,
    count: str | None,
    is_armed: bool,
) -> None:
    assert sink.told == []
    for name, value in (("NBDDP_STRUCK", struck), ("TORCHELASTIC_RESTART_COUNT", count)):
        if value is not None:
            monkeypatch.setenv(name, value)
    at(step=3, rank=1, kind="kill")
    assert bool(armed()) is is_armed


# ---- what they do


def test_those_that_end_the_process_say_so_first(
    sink: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "kill", lambda pid, signum: sink.told.append((pid, signum)))
    monkeypatch.setattr(os, "_exit", lambda code: sink.told.append(code))
    monkeypatch.setattr(strikes.ctypes, "string_at", lambda address: sink.told.append(address))
    for step, kind in enumerate(("kill", "stop", "exit", "segfault")):
        at(step=step, rank=1, kind=kind)
    log(step=3)
    acts = [(os.getpid(), signal.SIGKILL), (os.getpid(), signal.SIGSTOP), 3, 0]
    assert sink.told[3::3] == acts
    assert sink.told[2::3] == ["flush"] * 4


def test_a_hang_ends_when_it_is_interrupted(
    sink: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    naps: list[float] = []

    def nap(seconds: float) -> None:
        naps.append(seconds)
        if len(naps) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(strikes.time, "sleep", nap)
    at(step=1, rank=1, kind="hang")
    with pytest.raises(KeyboardInterrupt):
        log(step=1)
    assert sink.told[-1] == "flush"
    log(step=1)
    assert len(naps) == 3


def test_oom_is_torchs_own_error_and_takes_nothing(sink: Recorder) -> None:
    at(step=1, rank=1, kind="oom")
    words = "not enough memory|can't allocate memory|out of memory|Invalid buffer size"
    with pytest.raises(RuntimeError, match=words):
        log(step=1)
    assert sink.told[-1] == "flush"
    torch.ones(10)


class Clock:
    """A clock that sleeping moves on."""

    def __init__(self) -> None:
        self.now = 100.0
        self.slept: list[float] = []

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Time stands still but for what a test says."""
    clock = Clock()
    monkeypatch.setattr(strikes, "time", clock)
    return clock


def test_slow_draws_out_every_step_that_follows(sink: Recorder, clock: Clock) -> None:
    at(step=1, rank=1, kind="slow", factor=3)
    for step, seconds in enumerate([5.0, 5.0, 1.0, 2.0, 0.5]):
        clock.now += seconds
        log(step=step)
    assert clock.slept == [2.0, 4.0, 1.0]
    assert sink.told.count("flush") == 1


def test_slow_does_not_draw_out_the_time_between_two_cells(sink: Recorder, clock: Clock) -> None:
    at(step=0, rank=1, kind="slow")
    log(step=0)
    clock.now += 600
    faults.begin_cell(is_again=True)
    clock.now += 1
    log(step=1)
    assert clock.slept == []
    clock.now += 1
    log(step=2)
    assert clock.slept == [1.0]
    assert sink.told.count("flush") == 1


def test_clear_ends_slow(sink: Recorder, clock: Clock) -> None:
    at(step=0, rank=1, kind="slow")
    log(step=0)
    clear()
    clock.now += 1
    log(step=1)
    assert clock.slept == []
    assert sink.told[-1] == 1


# ---- nan


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> torch.nn.Sequential:
    """Two layers, prepared."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))
    a_module(monkeypatch, models.__name__, prepared=lambda: [model])
    return model


def poisoned(model: torch.nn.Module) -> list[str]:
    model.zero_grad()
    model(torch.ones(1, 2)).sum().backward()
    named = model.named_parameters()
    return [name for name, each in named if each.grad is not None and each.grad.isnan().any()]


def test_nan_is_one_gradient_of_one_backward(sink: Recorder, model: torch.nn.Sequential) -> None:
    at(step=1, rank=1, kind="nan")
    assert poisoned(model) == []
    log(step=1)
    assert sink.told == [1, *struck_at("nan@rank=1,step=1", 1)]
    assert len(poisoned(model)) == 1
    assert poisoned(model) == []
    assert all(not each._backward_hooks for each in model.parameters())


def test_nan_takes_a_gradient_that_there_is(sink: Recorder, model: torch.nn.Sequential) -> None:
    model[0].requires_grad_(False)
    model.register_parameter("unused", torch.nn.Parameter(torch.ones(1)))
    at(step=1, rank=1, kind="nan")
    log(step=1)
    assert len(poisoned(model)) == 1
    assert sink.told[-1] == "flush"


def test_clear_takes_nan_back(sink: Recorder, model: torch.nn.Sequential) -> None:
    at(step=1, rank=1, kind="nan")
    log(step=1)
    clear()
    assert poisoned(model) == []
    assert sink.told[-1] == "flush"


def test_nan_without_a_prepared_model_says_what_to_do_and_stays_armed(
    sink: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    a_module(monkeypatch, models.__name__, prepared=list)
    at(step=1, rank=1, kind="nan")
    with pytest.raises(FaultError) as caught:
        log(step=1)
    assert str(caught.value) == (
        "fault: nan@rank=1,step=1 finds no prepared model on this rank; "
        "call nbddp.prepare(model) first"
    )
    assert sink.told == [1]
    assert len(armed()) == 1


# ---- skip


@pytest.fixture
def alone(sink: Recorder, monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorder]:
    """A process group of one, which is rank 1 for the faults all the same."""
    a_module(monkeypatch, models.__name__, prepared=list)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    monkeypatch.setattr(place, "rank", lambda: 1)
    monkeypatch.setattr(place, "world_size", lambda: 2)
    yield sink
    dist.destroy_process_group()


def test_skip_leaves_out_one_collective_and_gives_torch_its_functions_back(
    alone: Recorder,
) -> None:
    before = {name: getattr(dist, name) for name in strikes.COLLECTIVES if hasattr(dist, name)}
    at(step=1, rank=1, kind="skip")
    log(step=1)
    assert dist.all_gather is not before["all_gather"]
    gathered = [torch.zeros(1)]
    assert dist.all_gather(gathered, torch.ones(1)) is None
    assert gathered[0].item() == 0.0
    assert before == {name: getattr(dist, name) for name in before}
    dist.all_gather(gathered, torch.ones(1))
    assert gathered[0].item() == 1.0
    assert alone.told == [1, *struck_at("skip@rank=1,step=1", 1)]


def test_skip_of_an_asynchronous_collective_gives_work_that_is_done(alone: Recorder) -> None:
    at(step=1, rank=1, kind="skip")
    log(step=1)
    work = dist.all_reduce(torch.ones(1), async_op=True)
    work.wait()
    assert work.is_completed()
    assert alone.told[-1] == "flush"


def test_skip_leaves_a_process_group_alone_that_came_later(alone: Recorder) -> None:
    at(step=1, rank=1, kind="skip")
    log(step=1)
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    gathered = [torch.zeros(1)]
    dist.all_gather(gathered, torch.ones(1))
    assert gathered[0].item() == 1.0
    assert alone.told[-1] == "flush"


def test_clear_takes_skip_back(alone: Recorder) -> None:
    before = dist.barrier
    at(step=1, rank=1, kind="skip")
    log(step=1)
    assert dist.barrier is not before
    clear()
    assert dist.barrier is before
    assert dist.distributed_c10d.barrier is before
    assert alone.told[-1] == "flush"


@pytest.fixture
def ddp(alone: Recorder, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A DDP model whose averaging is counted."""
    assert alone.told == []
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
    model.averaged = 0

    def average(_state, bucket):  # without annotations: torch reads them
        model.averaged += 1
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    model.register_comm_hook(None, average)
    a_module(monkeypatch, models.__name__, prepared=lambda: [model])
    return model


def averaged(model: Any) -> int:
    before = model.averaged
    model(torch.ones(1, 2)).sum().backward()
    return int(model.averaged - before)


def test_skip_keeps_ddp_from_averaging_once(alone: Recorder, ddp: Any) -> None:
    assert averaged(ddp) == 1
    before = dist.barrier
    at(step=1, rank=1, kind="skip")
    log(step=1)
    with torch.no_grad():
        ddp(torch.ones(1, 2))  # an evaluation averages nothing
    with ddp.no_sync():
        assert averaged(ddp) == 0  # nor does a micro-step
    assert dist.barrier is not before
    assert averaged(ddp) == 0
    assert dist.barrier is before
    assert averaged(ddp) == 1
    assert ddp.require_forward_param_sync
    assert alone.told[-1] == "flush"


def test_skip_outlives_a_forward_that_raises(alone: Recorder, ddp: Any) -> None:
    at(step=1, rank=1, kind="skip")
    log(step=1)
    with pytest.raises(RuntimeError):
        ddp(torch.ones(1, 5))
    assert averaged(ddp) == 0
    assert averaged(ddp) == 1
    assert not ddp._forward_pre_hooks
    assert not ddp._forward_hooks
    assert alone.told[-1] == "flush"


def test_skip_without_a_process_group_says_so(sink: Recorder) -> None:
    at(step=1, rank=1, kind="skip")
    with pytest.raises(FaultError) as caught:
        log(step=1)
    assert str(caught.value) == (
        "fault: skip@rank=1,step=1 finds no process group on this rank, so no collective to skip"
    )
    assert sink.told == [1]


# ---- corrupt


class Kept:
    """A checkpoint whose newest file is this."""

    def __init__(self, path: Path | None) -> None:
        self._path = path

    def newest(self) -> Path | None:
        return self._path


def a_file(path: Path, size: int, *, at: float) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(bytes(size))
    os.utime(path, (at, at))
    return path


def test_corrupt_flips_bytes_of_the_newest_checkpoint(
    sink: Recorder, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    now = time.time()
    old, new = a_file(tmp_path / "old", 1000, at=now - 9), a_file(tmp_path / "new", 1000, at=now)
    kept = [Kept(new), Kept(None), Kept(old)]
    a_module(monkeypatch, checkpoint_module.__name__, checkpoints=lambda: kept)
    at(step=1, rank=1, kind="corrupt")
    log(step=1)
    log(step=2)
    assert old.read_bytes() == bytes(1000)
    assert new.read_bytes() == bytes(468) + b"\xff" * 64 + bytes(468)
    assert sink.told[:-1] == [1, *struck_at("corrupt@rank=1,step=1", 1)]


@pytest.mark.parametrize("size", [0, 1, 63, 64, 65])
def test_a_small_file_is_flipped_too(tmp_path: Path, size: int) -> None:
    path = a_file(tmp_path / "small", size, at=0)
    strikes.flip(path)
    assert len(path.read_bytes()) == size
    assert (path.read_bytes() == bytes(size)) is (size == 0)


def test_of_a_folder_the_largest_file_is_flipped(tmp_path: Path) -> None:
    small, large = a_file(tmp_path / "a" / "1", 10, at=0), a_file(tmp_path / "a" / "2", 20, at=0)
    strikes.flip(tmp_path)
    assert small.read_bytes() == bytes(10)
    assert large.read_bytes() == b"\xff" * 20


def test_corrupt_without_a_checkpoint_says_what_to_do(
    sink: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    a_module(monkeypatch, checkpoint_module.__name__, checkpoints=lambda: [Kept(None)])
    at(step=1, rank=1, kind="corrupt")
    with pytest.raises(FaultError) as caught:
        log(step=1)
    assert str(caught.value) == (
        "fault: corrupt@rank=1,step=1 finds no checkpoint; save one before that step"
    )
    assert sink.told == [1]
