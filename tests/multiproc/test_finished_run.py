"""Run folders of real ranks match the displayed output, even if the kernel died."""

from __future__ import annotations

import re

import pytest
from drivers.ranks import Ranks
from notebook import Notebook

from nbddp.archive.stored_run import StoredRun

pytestmark = pytest.mark.multiproc
SHARES_KERNEL = True


@pytest.mark.full
def test_values_without_a_step_are_numbered_per_cell(group: Ranks) -> None:
    for _ in range(2):
        group.run("for _ in range(2):\n    for i in range(3 + rank):\n        nbddp.log(loss=i)")
    live = group.metrics(most=12)
    assert {rank: curve.steps for rank, curve in live.curves["loss"].items()} == {
        rank: tuple(map(float, range(6 + 2 * rank))) for rank in range(2)
    }
    fault = "nbddp.faults.at(step=2, rank=1, kind='raise')\nwhile True: nbddp.log(x=1)"
    assert "FaultError" in str(group.failure_of(fault))
    group.run("for _ in range(2):\n    for i in range(4): nbddp.log(step=i, loss=i)")
    again = group.metrics(most=12)
    assert again.curves["loss"][0].steps == tuple(map(float, range(8)))
    folder = group.run_folder
    group.stop()
    run = StoredRun(folder)
    assert run.metrics(run.cells[1]).curves("loss") == live.curves["loss"]


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
