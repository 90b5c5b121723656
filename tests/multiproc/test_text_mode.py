"""A notebook that is executed without a page has its progress and its curves in it."""

from __future__ import annotations

import nbformat
import pytest
from nbclient import NotebookClient
from notebook import Notebook

from nbddp.ui.ansi import strip

pytestmark = pytest.mark.multiproc
SHARES_KERNEL = True

TRAIN = """%%ddp --nproc 2
for step in range(20):
    nbddp.log(step=step, loss=2 / (step + 1) + rank)
print("trained")
"""


@pytest.mark.timeout(400)
def test_an_executed_notebook_has_its_curves() -> None:
    cells = ["%load_ext nbddp", TRAIN, "%ddp stop"]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(each) for each in cells])
    NotebookClient(notebook, kernel_name="python3", timeout=150).execute()
    texts = [each.text for each in notebook.cells[1].outputs if each.output_type == "stream"]
    assert "[rank 1] trained\n" in strip("".join(texts))
    [chart] = [each for each in notebook.cells[1].outputs if each.output_type == "display_data"]
    assert chart.data["image/png"].startswith("iVBORw0KGgo")
    assert chart.data["text/plain"] == "loss 0.6"


def test_a_cell_that_reports_nothing_stays_as_it_is(notebook: Notebook) -> None:
    reply = notebook.run("%%ddp --nproc 2\nprint('x')")
    assert sorted(reply.text.splitlines()) == ["[rank 0] x", "[rank 1] x"]
    assert reply.displays == []


def test_an_unfinished_line_is_shown_while_the_cell_runs(notebook: Notebook) -> None:
    reply = notebook.run_until(
        "%%ddp --nproc 1\nimport time\nfrom pathlib import Path\n"
        "print('.', end='', flush=True)\n"
        "while not Path('go_on').exists(): time.sleep(0.05)\n"
        "print(' done')\nprint('next')",
        lambda reply: reply.text.endswith("[rank 0] ."),
    )
    assert reply.status == "ok"
    assert reply.lines(0) == [". done", "next"]
    logs = (notebook.folder / ".nbddp" / "runs").glob("*/rank0.log")
    newest = max(logs, key=lambda path: path.stat().st_mtime)
    assert newest.read_text().endswith(". done\nnext\n")
