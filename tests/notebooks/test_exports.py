"""The cells of notebooks as scripts: under torchrun they give the notebooks' numbers."""

import re
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import nbformat
import pytest
from notebook import Notebook
from processes import under_torchrun

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"

pytestmark = [pytest.mark.full, pytest.mark.notebook, pytest.mark.timeout(400)]

ENDS = ("%ddp restart", "%ddp stop")  # before them the cells so far are exported
NUMBERS = {  # what ranks have in the end, and have each time
    "1.1_quickstart": ("losses", "accuracy", "after"),
    "1.2_ranks_stores_and_collectives": ("secret",),
    "1.3_collectives": ("seen", "history", "ours", "double"),
    "1.4_from_one_process_to_ddp": ("difference",),
    "1.5_what_ddp_does": ("after", "sizes", "heads", "counts"),
    "3.1_mixed_precision": ("losses", "scales", "skipped", "unscaled"),
    "2.1_checkpoint_and_resume": ("second_half", "runs", "unbroken", "second_piece", "on_four"),
    "2.2_faults_and_recovery": ("mine",),
    "3.2_sharding": ("table", "between", "counts"),
    "3.3_where_the_time_goes": ("loss",),
}
GRADIENTS = re.compile(r", (grad_fn=<\w+>|requires_grad=True)")  # a pulled tensor has no graph
SLOW = [pytest.param(each, marks=pytest.mark.soak) for each in [*NUMBERS][1:]]


@dataclass
class Script:
    """An exported script, and the numbers that it should print."""

    path: Path
    nproc: int
    folder: Path  # where the notebook keeps its files, as they were
    lines: set[str]


def export(notebook: Notebook, at: int, numbers: Iterable[str], folder: Path) -> Script | None:
    """The cells so far as a script, that shows these numbers too; None if there are none."""
    lines: set[str] = set()
    for name in numbers:
        shown = f"globals().get({name!r})"
        if notebook.run(f"found_ = %ddp pull {shown}").status != "ok":
            continue  # a notebook that kills its ranks has nothing to compare with
        texts = notebook.run("print(*map(repr, found_), sep='\\0')").text.strip().split("\0")
        values = [GRADIENTS.sub("", each) for each in texts]
        lines |= {f"[rank {r}] {shown} {each}" for r, each in enumerate(values) if each != "None"}
    reply = notebook.run(f"%ddp export part{at}.py")
    if "nothing to export" in reply.text:
        return None
    assert reply.status == "ok", reply.text
    there = notebook.run("import os; print(os.path.abspath('.'), globals().get('folder', ''))").text
    here, kept = [*there.split(), ""][:2]
    if kept:
        shutil.copytree(kept, folder / f"files{at}")
    [nproc] = re.findall(r"--nproc-per-node=(\d+)", reply.text)
    return Script(Path(here, f"part{at}.py"), int(nproc), folder / f"files{at}", lines)


def exports(name: str, folder: Path) -> Iterator[Script]:
    """Run a notebook; all scripts that its cells are."""
    cells = nbformat.read(NOTEBOOKS / f"{name}.ipynb", 4).cells
    with Notebook(folder, loads=False) as notebook:
        for at, cell in enumerate(each.source for each in cells if each.cell_type == "code"):
            if any(line.startswith(ENDS) for line in cell.splitlines()):
                script = export(notebook, at, NUMBERS[name], folder)
                if script is not None:
                    yield script
            notebook.run(cell, timeout=100)


@pytest.mark.parametrize("name", ["1.1_quickstart", *SLOW])
def test_exported_notebook_gives_the_same_numbers_under_torchrun(folder: Path, name: str) -> None:
    scripts = list(exports(name, folder))
    assert any(script.lines for script in scripts)
    if name == "1.1_quickstart":
        text = scripts[0].path.read_text()
        assert text.count("left out") == 1  # the cell in which rank 1 dies
    for script in scripts:
        text = script.path.read_text()
        options = ("--folder", str(script.folder)) if "'--folder'" in text else ()
        shown = under_torchrun(script.path, *options, nproc=script.nproc)
        found = [GRADIENTS.sub("", line) for line in shown]
        # print() writes the end of a line separately: the line of another rank may come before it
        assert [x for x in script.lines if not any(each.endswith(x) for each in found)] == []
