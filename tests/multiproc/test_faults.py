"""Each kind of fault strikes once, at its rank and step, and ends as its report says."""

from __future__ import annotations

import itertools
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from drivers.ranks import Ranks
from hangs import act_when_said, said_of_a_hang

from nbddp import CellFailedError
from nbddp.controller.link import StoreLink

pytestmark = pytest.mark.multiproc

STEP = 3
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


def written(group: Ranks, name: str) -> list[dict[str, Any]]:
    return group.read_lines(name)


def steps(group: Ranks, rank: int) -> list[int]:
    """The steps whose numbers a rank wrote down."""
    return [row["step"] for row in written(group, "metrics.jsonl") if row["rank"] == rank]


def assert_struck_once(group: Ranks, fault: str) -> None:
    """The record has it once, on the time line and in the file, before the rank's exit."""
    expected = {"fault": fault, "at_step": STEP, "rank": 1}
    events = group.events()
    assert [event.facts for event in events if event.kind == "fault"] == [expected]
    kinds = [line["kind"] for line in written(group, "events.jsonl")]
    assert kinds.count("fault") == 1
    assert "exit" not in kinds[: kinds.index("fault")]
    line = next(line for line in written(group, "events.jsonl") if line["kind"] == "fault")
    assert {name: line[name] for name in expected} == expected


# ---- those that end a rank, or its cell


def test_raise_is_the_first_cause_and_all_names_are_kept(group: Ranks) -> None:
    with pytest.raises(CellFailedError) as caught:
        group.run(arm("raise") + LOOP)
    first = caught.value.report.splitlines()[0]
    assert first == "first cause: rank 1: FaultError: fault: raise@rank=1,step=3, line 8"
    assert "in log(" not in caught.value.report, "the traceback goes from the cell to the fault"
    assert_struck_once(group, "raise@rank=1,step=3")
    assert steps(group, 1) == [0, 1, 2, 3]
    assert group.pull("kept") == [0, 1]
    group.run(arm("raise") + LOOP)  # the same process: it has struck
    assert_struck_once(group, "raise@rank=1,step=3")


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("kill", "was killed by SIGKILL"),
        ("segfault", "was killed by SIGSEGV, line 8"),
        ("exit", "exited with code 3"),
    ],
)
def test_a_death_is_the_first_cause_and_its_fault_was_told_before(
    group: Ranks, kind: str, words: str
) -> None:
    with pytest.raises(CellFailedError) as caught:
        group.run(arm(kind) + LOOP)
    report = caught.value.report
    assert report.splitlines()[0] == f"first cause: rank 1 {words}"
    assert_struck_once(group, f"{kind}@rank=1,step=3")
    assert steps(group, 1) == [0, 1, 2, 3]
    assert group.pull("kept", rank=0) == 0
    if kind == "segfault":
        assert "  | Fatal Python error: Segmentation fault" in report
        assert re.search(r'File ".*strikes.py", line \d+ in ', report)


def test_a_fault_is_told_before_the_death_to_a_notebook_that_reads_late(
    make_group: Callable[..., Ranks], monkeypatch: pytest.MonkeyPatch
) -> None:
    collect = StoreLink.collect

    def collect_late(link: StoreLink) -> Any:
        time.sleep(0.3)
        return collect(link)

    monkeypatch.setattr(StoreLink, "collect", collect_late)
    group = make_group(2)
    with pytest.raises(CellFailedError):
        group.run(arm("kill") + LOOP)
    assert_struck_once(group, "kill@rank=1,step=3")


def test_oom_is_torchs_own_error(group: Ranks) -> None:
    with pytest.raises(CellFailedError) as caught:
        group.run(arm("oom") + LOOP)
    first = caught.value.report.splitlines()[0]
    assert first.startswith("first cause: rank 1: ")
    assert re.search("RuntimeError: .*can't allocate memory|OutOfMemoryError: ", first)
    assert_struck_once(group, "oom@rank=1,step=3")
    assert group.pull("kept") == [0, 1]


# ---- those after which nothing moves


def test_hang_is_named_on_the_card_and_an_interrupt_keeps_all_names(
    group: Ranks, capsys: pytest.CaptureFixture[str]
) -> None:
    said = said_of_a_hang(group, arm("hang") + LOOP, capsys)
    assert "  rank 0 waiting in all_reduce #5 float [1], line 7\n" in said
    assert "  rank 1 never came: line 8 in log()\n" in said
    assert_struck_once(group, "hang@rank=1,step=3")
    assert group.pull("kept") == [0, 1]
    group.run(LOOP)
    assert_struck_once(group, "hang@rank=1,step=3")


@pytest.mark.full
def test_a_stopped_rank_is_named_and_kill_ends_it(
    group: Ranks, capsys: pytest.CaptureFixture[str]
) -> None:
    act_when_said(group, "no sign of life", lambda: group.kill(1))
    with pytest.raises(CellFailedError, match=r"^rank 1 was killed by SIGKILL"):
        group.run(arm("stop") + LOOP)
    said = "no sign of life from rank 1: stopped (SIGSTOP); `%ddp kill 1` ends it"
    assert said in capsys.readouterr().out
    assert_struck_once(group, "stop@rank=1,step=3")


def test_a_stopped_rank_that_is_continued_goes_on(group: Ranks) -> None:
    pid = group.pids[1]
    act_when_said(group, "no sign of life", lambda: os.kill(pid, signal.SIGCONT))
    group.run(arm("stop") + LOOP)
    assert_struck_once(group, "stop@rank=1,step=3")
    assert steps(group, 1) == list(range(6))


# ---- those with which it goes on


def test_slow_draws_out_every_later_step_of_its_rank(group: Ranks) -> None:
    group.run(
        arm("slow", ", factor=4")
        + "import time\nfor step in range(16):\n    time.sleep(0.05)\n    nbddp.log(step=step)"
    )
    assert_struck_once(group, "slow@rank=1,step=3,factor=4")
    for rank, factors in ((0, [1, 1]), (1, [1, 4])):
        times = [row["time"] for row in written(group, "metrics.jsonl") if row["rank"] == rank]
        gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
        # the step after the fault is drawn out once it was reported; some step is not held up
        for gap, factor in zip((min(gaps[:4]), min(gaps[4:])), factors, strict=True):
            assert 0.05 * factor <= gap < 0.05 * factor + 0.1


def test_nan_reaches_all_ranks_through_one_gradient(group: Ranks) -> None:
    group.run(arm("nan") + MODEL + TRAIN)
    assert_struck_once(group, "nan@rank=1,step=3")
    for rank in (0, 1):
        rows = [row for row in written(group, "metrics.jsonl") if row["rank"] == rank]
        is_nan = [row["loss"] != row["loss"] for row in rows]
        assert is_nan == [False] * 5 + [True]  # the loss of step 4 came before its backward
    assert group.pull("len(model.module.weight._backward_hooks or ())") == [0, 0]


def test_nan_without_a_prepared_model_says_what_to_do(group: Ranks) -> None:
    with pytest.raises(CellFailedError, match=r"finds no prepared model on this rank; call nbddp"):
        group.run(arm("nan") + LOOP)
    assert [event for event in group.events() if event.kind == "fault"] == []


def test_skip_of_one_all_reduce_leaves_a_wrong_sum_and_a_rank_that_waits_at_the_end(
    group: Ranks, capsys: pytest.CaptureFixture[str]
) -> None:
    said = said_of_a_hang(group, arm("skip") + LOOP, capsys)
    assert "  rank 0 waiting in all_reduce #6 float [1], line 7\n" in said
    assert "  rank 1 done with the cell: will not come\n" in said
    assert_struck_once(group, "skip@rank=1,step=3")
    rows = [row for row in written(group, "metrics.jsonl") if row["rank"] == 1]
    assert [row["total"] for row in rows] == [2.0, 2.0, 2.0, 2.0, 1.0, 2.0]
    group.run(LOOP)
    assert group.pull("x.item()") == [2.0, 2.0]


def test_skip_of_ddps_averaging_makes_the_ranks_differ(
    group: Ranks, capsys: pytest.CaptureFixture[str]
) -> None:
    group.run(MODEL)
    said = said_of_a_hang(group, arm("skip") + TRAIN, capsys)
    assert "  rank 1 done with the cell: will not come\n" in said
    assert_struck_once(group, "skip@rank=1,step=3")
    by_rank = [[row for row in written(group, "metrics.jsonl") if row["rank"] == r] for r in (0, 1)]
    assert [len(rows) for rows in by_rank] == [5, 6]


# ---- corrupt, and what a recovery makes of a fault

SAVE = """
checkpoint = nbddp.Checkpoint('saved')
resumed = checkpoint.resume(model=model, optimizer=optimizer)
begin = resumed.step + 1 if resumed else 0
for step in range(begin, {end}):
    optimizer.zero_grad()
    loss = model(torch.full((2, 4), 1.0 + rank)).square().mean()
    loss.backward()
    optimizer.step()
    if {when}: checkpoint.save(step, model=model, optimizer=optimizer)
    nbddp.log(step=step, loss=loss.item())
"""


def test_corrupt_makes_the_next_resume_take_the_checkpoint_before(
    group: Ranks, capsys: pytest.CaptureFixture[str]
) -> None:
    group.run(MODEL)
    group.run(arm("corrupt") + SAVE.format(end=4, when="True"))
    assert_struck_once(group, "corrupt@rank=1,step=3")
    assert group.pull("checkpoint.newest().name") == ["step-00000003.pt"] * 2
    capsys.readouterr()
    group.run(SAVE.format(end=6, when="True"))
    assert group.pull("begin") == [3, 3]
    assert "taking step-00000002.pt instead" in capsys.readouterr().out
    assert_struck_once(group, "corrupt@rank=1,step=3")


def test_a_fault_strikes_once_though_its_step_is_done_again(group: Ranks) -> None:
    group.run(arm("kill") + MODEL + SAVE.format(end=8, when="step % 2 == 0"), max_restarts=3)
    assert group.attempt == 2
    assert_struck_once(group, "kill@rank=1,step=3")
    assert steps(group, 1) == [0, 1, 2, 3, 3, 4, 5, 6, 7]


def test_a_restart_by_hand_is_a_new_experiment(group: Ranks) -> None:
    for count in (1, 2):
        with pytest.raises(CellFailedError):
            group.run(arm("exit") + LOOP)
        kinds = [line["kind"] for line in written(group, "events.jsonl")]
        assert kinds.count("fault") == count
        group.restart()


# ---- under torchrun, where nobody says what has struck

SCRIPT = """
import logging, nbddp
logging.basicConfig(level=logging.INFO, format="%(message)s")
nbddp.faults.at(step=3, rank=1, kind="kill")
for step in range(6):
    nbddp.log(step=step, x=1)
"""


@pytest.mark.full
def test_under_torchrun_a_fault_strikes_in_the_first_attempt_alone(folder: Path) -> None:
    (folder / "train.py").write_text(SCRIPT)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*launch, "--nproc-per-node", "2", "--max-restarts", "1", "train.py"],
        check=True,  # the second attempt comes to its end
        capture_output=True,
        text=True,
    )
    assert done.stderr.count("fault fault=kill@rank=1,step=3 at_step=3\n") == 1
    assert done.stderr.count("step 5: x=1\n") in (2, 3)  # rank 0 may be done before rank 1 dies
