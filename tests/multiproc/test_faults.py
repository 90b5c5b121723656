"""Each kind of fault fires once, at its rank and step, with the reported effect."""

from __future__ import annotations

import os
import re
import signal
import time
from typing import Any

import pytest
from conditions import act_on_alarm, output_of_hang
from drivers.ranks import Capture, MakeRanks, Ranks

from nbddp.controller.store_link import StoreLink

pytestmark = pytest.mark.multiproc

ARM = "from nbddp import faults\nfaults.at(step=3, rank=1, kind={kind!r}{more})\n"
LOOP = """
kept = rank
for step in range(6):
    x = torch.ones(1)
    dist.all_reduce(x)
    nbddp.log(step=step, total=x.item())
"""
MODEL = """
torch.manual_seed(0)
model = nbddp.prepare(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""
TRAIN = """
for step in range(6):
    optimizer.zero_grad()
    loss = model(torch.full((2, 4), 1.0 + rank)).square().mean()
    loss.backward()
    optimizer.step()
    nbddp.log(step=step, loss=loss.item(), finite=float(torch.isfinite(model.module.weight).all()))
"""


def arm(kind: str, more: str = "") -> str:
    return ARM.format(kind=kind, more=more)


def rows(group: Ranks, rank: int) -> list[dict[str, Any]]:
    """Return the metric rows that a rank recorded."""
    return [row for row in group.read_lines("metrics.jsonl") if row["rank"] == rank]


def steps(group: Ranks, rank: int) -> list[int]:
    """Return the steps that a rank recorded."""
    return [row["step"] for row in rows(group, rank)]


def assert_fired_once(group: Ranks, fault: str) -> None:
    """Check that the time line and the file have the fault once, before the rank's exit."""
    expected = {"fault": fault, "at_step": 3, "rank": 1}
    assert [event.facts for event in group.events() if event.kind == "fault"] == [expected]
    lines = group.read_lines("events.jsonl")
    kinds = [line["kind"] for line in lines]
    assert kinds.count("fault") == 1
    assert "exit" not in kinds[: kinds.index("fault")]
    assert lines[kinds.index("fault")].items() >= expected.items()


# ---- faults that end a rank or its cell


def test_raise_fault_is_the_first_cause_and_all_names_are_kept(group: Ranks) -> None:
    report = group.failure_of(arm("raise") + LOOP).report
    assert "rank 1: FaultError: fault: raise@rank=1,step=3, line 8" in report.splitlines()[0]
    assert "in log(" not in report, "the traceback goes from the cell to the fault"
    assert_fired_once(group, "raise@rank=1,step=3")
    assert steps(group, 1) == [0, 1, 2, 3]
    assert group.pull("kept") == [0, 1]
    group.run(arm("raise") + LOOP)  # the same process: the fault has fired
    assert_fired_once(group, "raise@rank=1,step=3")


def test_kill_fault_is_recorded_before_the_exit_even_if_the_reader_is_slow(
    make_group: MakeRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    collect = StoreLink.get

    def collect_late(link: StoreLink) -> Any:
        time.sleep(0.1)  # a rank that is about to die waits for its reader, for 2 s in all
        return collect(link)

    monkeypatch.setattr(StoreLink, "get", collect_late)
    group = make_group(2)
    report = group.failure_of(arm("kill") + LOOP).report
    assert re.search("rank 1 .*SIGKILL$", report.splitlines()[0])
    assert_fired_once(group, "kill@rank=1,step=3")
    assert steps(group, 1) == [0, 1, 2, 3]
    assert group.pull("kept", rank=0) == 0


# ---- those after which nothing moves


def test_hang_fault_is_reported_and_an_interrupt_keeps_all_names(
    group: Ranks, capsys: Capture
) -> None:
    said = output_of_hang(group, arm("hang") + LOOP, capsys)
    assert re.search(r"^  rank 0 .*all_reduce #5 float \[1\], line 7$", said, re.MULTILINE)
    assert re.search(r"^  rank 1 .*: line 8 in log\(\)$", said, re.MULTILINE)
    assert_fired_once(group, "hang@rank=1,step=3")
    assert group.pull("kept") == [0, 1]
    group.run(LOOP)
    assert_fired_once(group, "hang@rank=1,step=3")


def test_rank_stopped_by_a_fault_continues_after_sigcont(group: Ranks) -> None:
    pid = group.pids[1]
    act_on_alarm(group, "SIGSTOP", lambda: os.kill(pid, signal.SIGCONT))
    group.run(arm("stop") + LOOP)
    assert_fired_once(group, "stop@rank=1,step=3")
    assert steps(group, 1) == list(range(6))


# ---- faults after which the rank continues


def test_nan_fault_reaches_all_ranks_through_one_gradient(group: Ranks) -> None:
    group.run(arm("nan") + MODEL + TRAIN)
    assert_fired_once(group, "nan@rank=1,step=3")
    for rank in (0, 1):
        is_nan = [row["loss"] != row["loss"] for row in rows(group, rank)]
        assert is_nan == [False] * 5 + [True]  # the loss of step 4 is computed before its backward
    assert group.pull("len(model.module.weight._backward_hooks or ())") == [0, 0]


def test_skip_fault_gives_a_wrong_sum_and_a_hang_at_the_last_all_reduce(
    group: Ranks, capsys: Capture
) -> None:
    said = output_of_hang(group, arm("skip") + LOOP, capsys)
    assert re.search(r"^  rank 0 .*all_reduce #6 float \[1\], line 7$", said, re.MULTILINE)
    assert "  rank 1 done" in said
    assert_fired_once(group, "skip@rank=1,step=3")
    assert [row["total"] for row in rows(group, 1)] == [2.0, 2.0, 2.0, 2.0, 1.0, 2.0]
    group.run(LOOP)
    assert group.pull("x.item()") == [2.0, 2.0]


# ---- corrupt, and faults in a recovery

SAVE = """
checkpoint = nbddp.Checkpoint('saved')
resumed = checkpoint.resume(model=model, optimizer=optimizer)
begin = resumed.step + 1 if resumed else 0
for step in range(begin, {end}):
    optimizer.zero_grad()
    loss = model(torch.full((2, 4), 1.0 + rank)).square().mean()
    loss.backward()
    optimizer.step()
    checkpoint.save(step, model=model, optimizer=optimizer)
    nbddp.log(step=step, loss=loss.item())
"""


def test_corrupt_fault_makes_resume_load_the_previous_checkpoint(
    group: Ranks, capsys: Capture
) -> None:
    group.run(MODEL)
    group.run(arm("corrupt") + SAVE.format(end=4))
    assert_fired_once(group, "corrupt@rank=1,step=3")
    assert group.pull("checkpoint.newest().name") == ["step-00000003.pt"] * 2
    capsys.readouterr()
    group.run(SAVE.format(end=6))
    assert group.pull("begin") == [3, 3]
    assert "step-00000002.pt" in capsys.readouterr().out
    assert_fired_once(group, "corrupt@rank=1,step=3")


def test_manual_restart_rearms_faults(group: Ranks) -> None:
    for count in (1, 2):
        group.failure_of(arm("exit") + LOOP)
        kinds = [line["kind"] for line in group.read_lines("events.jsonl")]
        assert kinds.count("fault") == count
        group.restart()
