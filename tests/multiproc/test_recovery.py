"""After a failure the ranks start anew, what was done is done again, and the cell goes on."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from drivers.ranks import Ranks
from notebook import Notebook
from processes import wait_until

from nbddp import CellFailedError, RequestError

pytestmark = pytest.mark.multiproc

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
    FAIL
"""
KILL_ONCE = (
    "if step == 12 and rank == 1 and not Path('struck').exists():\n"
    "        Path('struck').touch()\n        os.kill(os.getpid(), signal.SIGKILL)"
)


def train(fail: str) -> str:
    return TRAIN.replace("FAIL", fail)


def events(group: Ranks) -> list[dict[str, object]]:
    return group.read_lines("events.jsonl")


def test_a_killed_rank_costs_the_steps_since_the_checkpoint(
    make_group: Callable[..., Ranks], capsys: pytest.CaptureFixture[str]
) -> None:
    group = make_group(2)
    group.run("model = [rank]")
    group.push({"rate": 0.5})
    group.run("model.append(rate)")
    group.run(train(KILL_ONCE) + "\nmodel.append(step)", max_restarts=3)
    assert group.pull("model") == [[0, 0.5, 19], [1, 0.5, 19]]
    assert group.attempt == 2
    said = capsys.readouterr().out
    assert "nbddp: rank 1 was killed by SIGKILL; restart 1 of 3\n" in said
    assert re.search(
        r"nbddp: noticed after \d+\.\d\d s, restarted in .* s, 2 cells replayed in .* s", said
    )
    resumed = next(event for event in events(group) if event["kind"] == "resumed")
    assert (resumed["step"], resumed["lost"]) == (10, 3)
    recovery = next(event for event in events(group) if event["kind"] == "recovery")
    assert recovery["cells"] == 2
    assert 0 <= recovery["detected"] < 30
    assert re.search(r"nbddp: done after 1 restart, \d+\.\d s lost\n$", said)
    curve = group.metrics(most=1).curves["loss"][0]
    assert curve.steps == tuple(map(float, range(20)))  # one curve, through both attempts
    assert curve.restarts == (10.0,)


def test_a_failure_at_the_same_step_twice_ends_it_early_and_says_so(
    make_group: Callable[..., Ranks], capsys: pytest.CaptureFixture[str]
) -> None:
    group = make_group(2)
    with pytest.raises(CellFailedError, match="rank 0: ZeroDivisionError"):
        group.run(train("if rank == 0 and step == 7: 1 / 0"), max_restarts=5)
    assert group.attempt == 2
    said = capsys.readouterr().out
    assert "nbddp: not started again: it failed at step 7 twice in a row" in said


def test_restarts_are_used_up(
    make_group: Callable[..., Ranks], capsys: pytest.CaptureFixture[str]
) -> None:
    group = make_group(1)
    fails = "n = int(saved.read_text()) if saved.exists() else 0\nnbddp.log(step=n, loss=0)\n"
    source = f"{train('').split('begin')[0]}{fails}saved.write_text(str(n + 1))\nraise OSError(n)"
    with pytest.raises(CellFailedError, match="OSError: 2"):
        group.run(source, max_restarts=2)
    assert group.attempt == 3
    assert "nbddp: not started again: the 2 restarts were used up" in capsys.readouterr().out


def test_without_max_restarts_nothing_is_started_again(group: Ranks) -> None:
    with pytest.raises(CellFailedError):
        group.run("1 / 0")
    assert group.attempt == 1


def test_cells_marked_once_and_cells_that_failed_are_not_replayed(notebook: Notebook) -> None:
    notebook.run("%%ddp --nproc 2\nran = ['first']")
    notebook.run("%%ddp --once\nran.append('once')")
    notebook.run("%%ddp\nran.append('failed')\n1 / 0")
    notebook.run("%%ddp\nran = ran + ['last']")
    reply = notebook.run("%ddp restart --replay")
    assert reply.status == "ok"
    assert notebook.run("%%ddp\nran").text == "Out [ranks 0-1] ['first', 'last']\n"


def test_a_restart_by_hand_replays_nothing_unless_asked(notebook: Notebook) -> None:
    notebook.run("%%ddp --nproc 2\nx = 1")
    notebook.run("%ddp restart")
    assert "NameError" in notebook.run("%%ddp\nx").error
    assert notebook.run("%ddp restart --replay").status == "ok"  # of that attempt: nothing
    assert "NameError" in notebook.run("%%ddp\nx").error


def test_in_a_replay_a_fault_that_struck_is_armed_no_more(notebook: Notebook) -> None:
    notebook.run("%%ddp --nproc 2\nkept = rank")
    notebook.run("%ddp fault kill --rank 1 --step 3")
    train = "%%ddp\nfor step in range(5):\n    nbddp.log(step=step)\nkept"
    assert "rank 1 was killed by SIGKILL" in notebook.run(train).error
    notebook.run("%ddp restart --replay")
    assert notebook.run(train).text.endswith("Out [rank 0] 0\nOut [rank 1] 1\n")
    notebook.run("%ddp fault kill --rank 1 --step 3")  # asked for again: it strikes again
    assert "rank 1 was killed by SIGKILL" in notebook.run(train).error


def test_a_fault_of_the_notebook_strikes_as_often_as_it_is_armed(notebook: Notebook) -> None:
    notebook.run("%ddp start --nproc 2")
    for _ in range(2):
        notebook.run("%ddp fault raise --rank 1 --step 3")
        reply = notebook.run("%%ddp\nfor step in range(5):\n    nbddp.log(step=step)")
        assert "rank 1: FaultError" in reply.error


def test_after_a_recovery_the_same_fault_can_be_asked_for_again(group: Ranks) -> None:
    cell = (
        "nbddp.faults.clear()\nnbddp.faults.at(step=3, rank=1, kind='kill')\n"
        "for step in range(5):\n    nbddp.log(step=step)"
    )
    for _ in range(2):
        before = group.attempt
        group.run(cell, max_restarts=1)
        assert group.attempt == before + 1


def test_a_cell_recovers_in_the_notebook_and_the_cells_around_it_work(notebook: Notebook) -> None:
    notebook.run("%%ddp --nproc 2\nimport os, signal\nfrom pathlib import Path")
    reply = notebook.run(
        "%%ddp --max-restarts 1\nif rank == 1 and not Path('once').exists():\n"
        "    Path('once').touch()\n    os.kill(os.getpid(), signal.SIGKILL)\n"
        "x = torch.ones(1)\ndist.all_reduce(x)\nx.item()"
    )
    assert reply.status == "ok"
    assert "restart 1 of 1" in reply.text
    assert "\nOut [ranks 0-1] 2.0\n" in reply.text
    assert re.search(r"\nnbddp: done after 1 restart, \d+\.\d s lost\n$", reply.text)
    assert "%ddp restart" not in reply.text


def test_an_interrupt_is_no_failure_to_recover_from(notebook: Notebook) -> None:
    notebook.run("%ddp start --nproc 2")
    before = set(re.findall(r"attempt \d+", notebook.run("%ddp status").text))
    request = notebook.begin("%%ddp --max-restarts 3\nprint('on')\nwhile True: pass")
    notebook.finish(request, until="on")
    notebook.interrupt()
    reply = notebook.finish(request)
    assert reply.error.startswith("CellInterruptedError")
    assert set(re.findall(r"attempt \d+", notebook.run("%ddp status").text)) == before


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
def test_an_interrupt_ends_a_replay_as_any_cell_and_what_was_replayed_is_kept(
    notebook: Notebook, how: str
) -> None:
    for name in ("again", "stuck"):
        (notebook.folder / name).unlink(missing_ok=True)
    notebook.run("%%ddp --nproc 2 --fresh\nkept = rank")
    assert notebook.run(f"%%ddp{STUCK_AGAIN}").status == "ok"
    request = notebook.begin(how)
    assert wait_until((notebook.folder / "stuck").exists)
    notebook.interrupt()
    reply = notebook.finish(request)
    assert reply.error.startswith("CellInterruptedError"), reply.error
    after = notebook.run("%%ddp\nx = torch.ones(1)\ndist.all_reduce(x)\nprint(kept, x.item())")
    assert "[rank 0] 0 2.0\n" in after.text, after
    assert "[rank 1] 1 2.0\n" in after.text, after


def test_a_cell_that_fails_when_it_is_replayed_is_said(
    make_group: Callable[..., Ranks], capsys: pytest.CaptureFixture[str]
) -> None:
    group = make_group(1)
    group.run("open('there', 'x').close()")
    with pytest.raises(CellFailedError, match="FileExistsError"):
        group.run("1 / 0", max_restarts=2)
    assert "a cell that had gone well failed when it was replayed" in capsys.readouterr().out


def test_a_refused_cell_in_the_background_is_refused_at_once(notebook: Notebook) -> None:
    notebook.run("%%ddp --nproc 2 --no-wait\nimport time; time.sleep(2)")
    reply = notebook.run("%%ddp --no-wait\npass")
    assert reply.text.startswith("UsageError: a cell is still running")
    assert notebook.run("%ddp wait").status == "ok"


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("%ddp fault kil --rank 1 --step 3", "kill"),
        ("%ddp fault kill --rank 1", "the following arguments are required: --step"),
        ("%ddp fault kill --rank 9 --step 3", "there is no rank 9"),
        ("%%ddp --max-restarts -1\npass", "expected a whole number from 0, got '-1'"),
    ],
)
def test_bad_faults_and_options_get_one_line(notebook: Notebook, line: str, complaint: str) -> None:
    notebook.run("%ddp start --nproc 2")
    reply = notebook.run(line)
    assert reply.status == "error"
    assert complaint in reply.text
    assert reply.text.startswith("UsageError: ")


def test_a_group_that_is_busy_refuses_to_replay(group: Ranks) -> None:
    group.run("x = 1")
    deeds = group.replay_log
    group.stop()
    with pytest.raises(RequestError, match="there is no worker group"):
        group.replay(deeds, say=print)
