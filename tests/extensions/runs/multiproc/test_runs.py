"""Run folders of real ranks: the facts in ``run.json``, the names, the run of a killed kernel."""

import os
import re
from pathlib import Path
from typing import Any

import pytest
from drivers.ranks import Capture, MakeRanks, Ranks
from limits import set_limits
from notebook import Notebook
from processes import wait_until

from nbddp.errors import CellFailedError
from nbddp.extensions.runs.stored_run import StoredRun
from nbddp.extensions.runs.summary import summarize
from nbddp.record.run_folder import read_facts

SHARES_KERNEL = True
ANOTHER_USER = 54321

TRAIN = """
data = nbddp.digits()
train = nbddp.loader(data.train, batch_size=16)
nbddp.config(lr=0.1, model=torch.nn.Linear(2, 2))
for step in range(6):
    nbddp.log(step=step, loss=1.0 / (step + 1) + rank)
"""


def facts_at_end(group: Ranks) -> dict[str, Any]:
    """All of them: after a cell they are written when its result has been handed over."""
    folder = group.run_folder
    group.stop()
    return read_facts(folder)


def test_run_json_has_the_facts_of_the_run(make_group: MakeRanks) -> None:
    group = make_group(2)
    group.run(TRAIN)
    group.run("test = nbddp.loader(data.test, batch_size=50)\nfor x, y in test: pass")
    with pytest.raises(CellFailedError):
        group.run("assert rank == 0, 'not so'\ndist.barrier()")
    run = StoredRun(group.run_folder)
    states = [each.state for each in run.snapshot(run.cells[-1]).ranks]
    assert states == ["interrupted in barrier #1, line 2", "AssertionError: not so, line 1"]
    facts = facts_at_end(group)
    assert (facts["world_size"], facts["nproc"]) == (2, 2)
    assert (facts["backend"], facts["backend_used"]) == ("auto", "gloo")
    assert (facts["devices"], len(facts["device_names"])) == (["cpu", "cpu"], 2)
    assert all(facts["device_names"])
    assert facts["config"] == {"lr": 0.1, "model": "Linear, 6 parameters"}
    assert "cells" not in facts  # events.jsonl has them
    assert "not so" in facts["outcome"]
    assert (facts["steps"], facts["samples_per_step"], facts["failures"]) == (6, 32, 1)
    assert facts["samples_per_second"] == pytest.approx(32 * facts["steps_per_second"], rel=1e-3)
    loss = facts["last"]["loss"]
    assert (loss["low"], loss["high"]) == (pytest.approx(1 / 6), pytest.approx(7 / 6))
    assert facts["curves"]["loss"][0] in ([1.0, 1.0], [2.0, 2.0])
    assert facts["ended"]
    assert "git" not in facts


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")
def test_another_user_in_a_shared_folder_cannot_redirect_a_run(
    make_group: MakeRanks, folder: Path, capsys: Capture
) -> None:
    victim, runs = folder / "victim", folder / ".nbddp" / "runs"
    victim.write_text("kept")
    group = make_group(1)
    run, name = group.run_folder, group.run_folder.name
    runs.parent.rename(folder / "moved")  # another user may write to the notebook's folder
    (runs / name).mkdir(parents=True)
    for file in ("rank0.log", "metrics.jsonl", "run.json", "run.json.tmp", "events.jsonl"):
        (runs / name / file).symlink_to(victim)
    for path in (runs.parent, runs, runs / name):
        os.chown(path, ANOTHER_USER, -1)
    group.run("print('one')\nnbddp.log(loss=1.0)")
    group.restart()
    group.run("print('two')\nnbddp.log(loss=1.0)")
    output = capsys.readouterr().out
    assert f"the record in {run} is not complete: {name} belongs to another user" in output
    assert f"{folder} cannot be used for the run (.nbddp belongs to another user)" in output
    assert not group.run_folder.is_relative_to(folder)
    assert "two" in group.log(0).read_text()
    assert "one" in (folder / "moved" / "runs" / name / "rank0.log").read_text()
    assert victim.read_text() == "kept"


def test_second_run_of_a_kernel_has_no_facts_of_the_first(make_group: MakeRanks) -> None:
    group = make_group(1)
    group.run(TRAIN)
    group.stop()
    group.start()
    group.run("x = 1")
    assert [each.source for each in StoredRun(group.run_folder).cells] == ["x = 1"]
    facts = facts_at_end(group)
    assert facts["config"] == {}
    assert "steps" not in facts


GOES_ON = """
import time
for step in range(100_000):
    nbddp.log(step=step, loss=1.0)
    time.sleep(0.01)
"""


def test_running_cell_is_recorded_and_an_interrupt_is_no_failure(
    make_group: MakeRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_limits(monkeypatch, write_interval=0.0)
    group = make_group(2)
    folder = group.run_folder
    group.begin(GOES_ON)
    assert wait_until(lambda: read_facts(folder).get("steps", 0) > 3, timeout=30)
    facts = read_facts(folder)
    assert facts["outcome"] == ""
    assert "ended" not in facts
    assert summarize(folder).outcome == "running"
    group.interrupt()
    assert wait_until(lambda: bool(read_facts(folder)["outcome"]), timeout=30)
    assert (summarize(folder).outcome, summarize(folder).is_live) == ("interrupted", True)
    facts = facts_at_end(group)
    assert facts["outcome"].startswith("ranks 0-1 interrupted, line ")
    assert (facts["interrupted"], facts["failures"]) == (True, 0)


def test_run_of_a_killed_kernel_is_shown_by_the_next_kernel(
    fresh_notebook: Notebook, notebook: Notebook
) -> None:
    killed = fresh_notebook
    [number] = killed.run("%%ddp --nproc 2 --name lost\nprint('in the first cell')").counts
    request = killed.begin(
        "%%ddp\nimport time\nfor i in range(500):\n    nbddp.log(loss=i)\n    dist.barrier()\n"
        "    print('at', i)\n    time.sleep(0.1)"
    )
    killed.finish(request, until="at 3")
    killed.kill()

    notebook.run(f"%cd -q {notebook.folder}")  # no run is recorded there
    missing = notebook.run("%ddp show").text
    assert missing.startswith("UsageError: ")
    assert "`%%ddp`" in missing
    notebook.run(f"%cd -q {killed.folder}")
    reply = notebook.run("%ddp show lost")
    assert reply.status == "ok"
    assert "kernel" in reply.text.splitlines()[0]
    assert re.search(rf"^{number + 1} .*not recorded .*ranks 0-1", reply.text, re.MULTILINE)
    assert re.search(r"^loss: \d+, \d+ at last \(ranks 0-1\)$", reply.text, re.MULTILINE)
    first = notebook.run(f"%ddp show lost --cell {number}").text
    assert "rank 0\n  in the first cell\n" in first
    assert "at 3" not in first
    _, _, line, *_ = notebook.run("%ddp runs lost").text.splitlines()
    assert "  2  " in line
    assert "  killed" in line
