"""Assignment of cells to runs: a restart with a name begins a new run."""

from __future__ import annotations

from pathlib import Path

import pytest
from notebook import Notebook

pytestmark = pytest.mark.multiproc
SHARES_KERNEL = True


def runs_of(base: Path) -> list[tuple[str, int]]:
    """The names of the runs in their order, and how many numbers each has."""
    found = []
    for path in sorted((base / ".nbddp" / "runs").iterdir()):
        numbers = path / "metrics.jsonl"
        count = len(numbers.read_text().splitlines()) if numbers.exists() else 0
        found.append((path.name[len("20260101-000000-") :], count))
    return found


@pytest.mark.full
def test_fresh_with_a_name_begins_a_new_run(notebook: Notebook, base: Path) -> None:
    for line in ("--nproc 1 --name alone", "--fresh --nproc 2 --name pair", "--fresh", ""):
        assert notebook.run(f"%%ddp {line}\nnbddp.log(loss=1.0)").status == "ok"
    assert runs_of(base) == [("alone", 1), ("pair", 6)]
    assert "the next run will be named other" in notebook.run("%%ddp --name other\n1").text


def test_repeated_run_name_means_the_newest_run(notebook: Notebook, base: Path) -> None:
    for loss in (1.0, 2.0):
        cell = f"%%ddp --fresh --nproc 1 --name again\nnbddp.log(loss={loss})"
        assert notebook.run(cell).status == "ok"
    assert [count for _, count in runs_of(base)] == [1, 1]
    code = "import nbddp; print(nbddp.Run('again').metrics()['loss'][0])"
    assert notebook.run(code).text == "2.0\n"


@pytest.mark.full
def test_restart_with_a_name_replays_the_cells_into_a_new_run(
    notebook: Notebook, base: Path
) -> None:
    cell = "%%ddp --nproc 2 --name first\nx = rank\nnbddp.log(loss=x)"
    assert notebook.run(cell).status == "ok"
    assert notebook.run("%ddp restart --name second --replay").status == "ok"
    assert notebook.run("x = %ddp pull x\nprint(x)").text == "[0, 1]\n"
    assert runs_of(base) == [("first", 2), ("second", 2)]
