"""A run that real ranks left is opened by a process that has no torch and no kernel."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from drivers.inside import imported
from drivers.ranks import Ranks
from notebook import Notebook

from nbddp.errors import CellFailedError
from nbddp.record.finished import RecordedRun

pytestmark = pytest.mark.multiproc

OPEN = f"""
import sys

for name in ("torch", "IPython", "ipykernel", "ipywidgets", "psutil", "multiprocessing"):
    sys.modules[name] = None  # importing it is an error

from pathlib import Path
{imported(RecordedRun)}
[path] = Path(sys.argv[1]).glob(".nbddp/runs/*")
run = RecordedRun(path)
good, bad = run.cells
print(good.outcome, "|", bad.outcome)
print("division by zero" in bad.report, bad.source)
print({{rank: curve.last for rank, curve in run.metrics(good).curves("loss").items()}})
print([(each.rank, each.is_well) for each in run.snapshot(bad).ranks])
print(run.tail(0, 1), run.was_stopped, run.unreadable, run.facts["nproc"])
"""


def test_a_run_is_opened_without_torch_ranks_or_a_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with Ranks(nproc=2) as group:
        group.run("for step in range(3):\n    nbddp.log(step=step, loss=step + rank)\nprint(1)")
        with pytest.raises(CellFailedError):
            group.run("if rank == 1:\n    1 / 0")
    done = subprocess.run(
        [sys.executable, "-c", OPEN, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.stderr == ""
    assert done.stdout.splitlines() == [
        "ok | rank 1: ZeroDivisionError: division by zero, line 2",
        "True if rank == 1:",
        "    1 / 0",
        "{0: 2.0, 1: 3.0}",
        "[(0, True), (1, False)]",
        "1 True 0 2",
    ]


@pytest.mark.full
def test_values_without_a_step_count_by_themselves_in_each_cell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with Ranks(nproc=2) as group:
        for _ in range(2):
            group.run(
                "for _ in range(2):\n    for i in range(3 + rank):\n        nbddp.log(loss=i)"
            )
        live = group.metrics(most=12)
        assert {rank: curve.steps for rank, curve in live.curves["loss"].items()} == {
            rank: tuple(map(float, range(6 + 2 * rank))) for rank in range(2)
        }
        with pytest.raises(CellFailedError, match="FaultError"):
            group.run("nbddp.faults.at(step=2, rank=1, kind='raise')\nwhile True: nbddp.log(x=1)")
        group.run("for _ in range(2):\n    for i in range(4): nbddp.log(step=i, loss=i)")
        again = group.metrics(most=12)
        assert again.falls == {"loss": 1}
        assert again.curves["loss"][0].steps == tuple(map(float, range(8)))
    [path] = tmp_path.glob(".nbddp/runs/*")
    run = RecordedRun(path)
    assert run.metrics(run.cells[1]).curves("loss") == live.curves["loss"]


def test_a_run_whose_kernel_was_killed_is_shown_by_the_next_and_says_so(tmp_path: Path) -> None:
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
    with Notebook(tmp_path / "one") as killed:
        killed.run("%%ddp --nproc 2 --name lost\nprint('in the first cell')")
        request = killed.begin(
            "%%ddp\nimport time\nfor i in range(500):\n    nbddp.log(loss=i)\n    dist.barrier()\n"
            "    print('at', i)\n    time.sleep(0.1)"
        )
        killed.finish(request, until="at 3")
        psutil.Process(killed.pid).kill()
    with Notebook(tmp_path / "other") as notebook:
        assert notebook.run("%ddp show").text == (
            f"UsageError: there is no run below {tmp_path / 'other'}: a `%%ddp` cell makes one\n"
        )
        notebook.run(f"%cd -q {tmp_path / 'one'}")
        reply = notebook.run("%ddp show lost")
        assert reply.status == "ok"
        assert "its kernel ended before it could record the end" in reply.text.splitlines()[0]
        assert "cell 2 · its end is not recorded · ranks 0-1" in reply.text
        assert re.search(r"^loss: \d+, \d+ at last \(ranks 0-1\)$", reply.text, re.MULTILINE)
        reply = notebook.run("%ddp show lost --cell 1")
        assert reply.text.startswith("cell 1 of run ")
        assert "[rank 0] in the first cell\n" in reply.text
        assert "at 3" not in reply.text
        head, line, *_ = notebook.run("%ddp runs lost").text.splitlines()
        assert head.split()[:4] == ["run", "when", "ranks", "loss"]
        assert "  2  " in line
        assert "  killed" in line
        notebook.run("%%ddp --nproc 1 --name next\nnbddp.config(lr=0.1)\nnbddp.log(loss=1.0)")
        reply = notebook.run("%ddp compare lost next")
        assert reply.status == "ok"
        [shown] = reply.displays
        assert shown.keys() == {"image/png", "text/plain"}
        assert "world size  2  1" in shown["text/plain"]
        assert "killed" in shown["text/plain"]
