"""Ranks restart after a failure, cells are replayed, and faults fire once and are recorded."""

import re
import time
from typing import Any

import pytest
from drivers.ranks import Capture, MakeRanks, Ranks
from golden.walks import KEEP, assert_ranks_work
from notebook import Notebook

from nbddp.controller.store_link import StoreLink

# a checkpoint in its smallest form: the step, in a file
TRAIN = """
import os, signal, time
from pathlib import Path
saved = Path('saved')
begin = int(saved.read_text()) if saved.exists() else 0
for step in range(begin, 20):
    dist.barrier()
    nbddp.log(step=step, loss=1.0)
    if step % 5 == 4 and rank == 0:
        saved.write_text(str(step + 1))
    dist.barrier()
    if step == 12 and rank == 1 and not Path('struck').exists():
        Path('struck').touch()
        os.kill(os.getpid(), signal.SIGKILL)
model.append(step)
"""


def test_recovery_loses_only_the_steps_since_the_checkpoint(
    make_group: MakeRanks, capsys: Capture
) -> None:
    group = make_group(2)
    group.run("model = [rank]")
    group.push({"rate": 0.5})
    group.run("model.append(rate)\nnbddp.log(step=0, loss=5.0)\nnbddp.log(step=1, loss=4.0)")
    group.run(TRAIN, max_restarts=3)
    assert group.pull("model") == [[0, 0.5, 19], [1, 0.5, 19]]
    assert group.attempt == 2
    output = capsys.readouterr().out
    assert re.search(r"^nbddp: rank 1 .*SIGKILL.*\b1 of 3$", output, re.MULTILINE)
    assert re.search(r"^nbddp: .*\b2 cells\b", output, re.MULTILINE)
    recorded = group.read_lines("events.jsonl")
    attempts = [
        (e["kind"], e["attempt"]) for e in recorded if e["kind"] in ("start", "exit", "stopped")
    ]
    assert attempts == [("start", 1), ("exit", 1), ("stopped", 1), ("start", 2)]
    events = {each["kind"]: each for each in recorded}
    assert (events["resumed"]["step"], events["resumed"]["lost"]) == (10, 3)
    assert events["recovery"]["cells"] == 2
    assert 0 <= events["recovery"]["detected"] < 30
    assert re.search(r"nbddp: .*\b1 restart, \d+\.\d s lost\n$", output)
    curve = group.metrics(most=1).curves["loss"][0]
    assert curve.steps == tuple(map(float, range(20)))  # one curve, through both attempts
    assert curve.resume_points == (10.0,)
    rows = group.read_lines("metrics.jsonl")
    losses = [row["loss"] for row in rows if row["rank"] == 0 and row["loss"] > 1]
    assert losses == [5.0, 4.0]  # the replay does not report them again


def test_cells_marked_once_and_cells_that_failed_are_not_replayed(notebook: Notebook) -> None:
    notebook.run("%%ddp --nproc 2\nran = ['first']")
    notebook.run("%%ddp --once\nran.append('once')")
    notebook.run("%%ddp\nran.append('failed')\n1 / 0")
    notebook.run("%%ddp\nran = ran + ['last']")
    assert notebook.run("%ddp restart --replay").status == "ok"
    assert notebook.run("%%ddp\nran").text == "Out [ranks 0-1] ['first', 'last']\n"
    notebook.run("%ddp restart")
    assert "run cell [5] again" in notebook.run("%%ddp\nran").traceback
    assert "nothing to replay" in notebook.run("%ddp restart --replay").text  # of that attempt
    assert "NameError" in notebook.run("%%ddp\nran").error


# quick when it runs for the first time, stuck in a collective when it runs again
STUCK_AGAIN = """
import os
if os.path.exists('again'):
    if rank == 0:
        open('stuck', 'w').close()
        dist.all_reduce(torch.ones(1))
elif rank == 0:
    open('again', 'w').close()
dist.barrier()
"""


@pytest.mark.parametrize("how", ["%ddp restart --replay", "%%ddp --max-restarts 3\n1 / 0"])
def test_interrupt_ends_a_replay_and_keeps_replayed_names(notebook: Notebook, how: str) -> None:
    for name in ("again", "stuck", "all.py"):
        (notebook.folder / name).unlink(missing_ok=True)
    notebook.run(f"%%ddp --nproc 2 --fresh\n{KEEP}")
    assert notebook.run(f"%%ddp{STUCK_AGAIN}").status == "ok"
    reply = notebook.run_and_stop_at(how, "stuck")
    assert reply.error.startswith("CellInterruptedError"), reply.error
    assert_ranks_work(notebook)
    assert notebook.run("%ddp export all.py").status == "ok"
    assert "stuck" in (notebook.folder / "all.py").read_text()
    (notebook.folder / "again").unlink()
    assert notebook.run("%ddp restart --replay").status == "ok"
    assert (notebook.folder / "again").exists()


LOOP = """
kept = rank
for step in range(6):
    x = torch.ones(1)
    dist.all_reduce(x)
    nbddp.log(step=step, total=x.item())
"""


def arm(kind: str) -> str:
    return f"nbddp.faults.at(step=3, rank=1, kind={kind!r})\n"


def steps(group: Ranks, rank: int) -> list[int]:
    return [row["step"] for row in group.read_lines("metrics.jsonl") if row["rank"] == rank]


def assert_fired_once(group: Ranks, fault: str) -> None:
    """Check that the time line and the file have the fault once, before the rank's exit."""
    expected = {"fault": fault, "at_step": 3, "rank": 1}
    assert [event.facts() for event in group.events() if event.kind == "fault"] == [expected]
    lines = group.read_lines("events.jsonl")
    kinds = [line["kind"] for line in lines]
    assert kinds.count("fault") == 1
    assert "exit" not in kinds[: kinds.index("fault")]
    assert lines[kinds.index("fault")].items() >= expected.items()


def test_raise_fault_is_the_first_cause_and_all_names_are_kept(group: Ranks) -> None:
    report = group.failure_of(arm("raise") + LOOP).report
    assert "rank 1: FaultError: fault: raise@rank=1,step=3, line 7" in report.splitlines()[0]
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

    def collect_late(link: StoreLink, *, is_urgent: bool) -> Any:
        if not is_urgent:
            time.sleep(0.1)  # a rank that is about to die waits for its reader, for 2 s in all
        return collect(link, is_urgent=is_urgent)

    monkeypatch.setattr(StoreLink, "get", collect_late)
    group = make_group(2)
    report = group.failure_of(arm("kill") + LOOP).report
    assert re.search("rank 1 .*SIGKILL after .*kill@rank=1,step=3$", report.splitlines()[0])
    assert_fired_once(group, "kill@rank=1,step=3")
    assert steps(group, 1) == [0, 1, 2, 3]
    assert group.pull("kept", rank=0) == 0


def test_manual_restart_rearms_faults(group: Ranks) -> None:
    for count in (1, 2):
        group.failure_of(arm("exit") + LOOP)
        kinds = [line["kind"] for line in group.read_lines("events.jsonl")]
        assert kinds.count("fault") == count
        group.restart()
