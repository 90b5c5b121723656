"""The notebooks run from start to end, and a failing %%ddp cell fails a notebook."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from fnmatch import fnmatch
from pathlib import Path

import nbformat
import psutil
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from nbformat import NotebookNode
from notebook import Notebook

pytestmark = [pytest.mark.notebook, pytest.mark.multiproc]

MEANT = {  # by notebook: the mistakes that it shows
    "06_hangs_and_stragglers": {"ND101"},
    "10_checklist": {
        *("ND101", "ND121", "ND123", "ND125", "ND132", "ND133", "ND134"),
        *("ND141", "ND201", "ND202", "ND207", "ND210", "ND215"),
    },
}
FAILING = {  # answers that are meant to fail
    ("04_checkpoint_and_resume", "Exercise 2."): "SIGKILL",
    ("05_faults_and_recovery", "Exercise 1."): "collective",
}
NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))
QUICKSTART = NOTEBOOKS[0]
IN_GATE = ("00", "05", "12")
EACH = [
    pytest.param(path, id=path.stem, marks=() if path.stem[:2] in IN_GATE else pytest.mark.full)
    for path in NOTEBOOKS
]


def execute(notebook: NotebookNode, folder: Path) -> NotebookNode:
    client = NotebookClient(
        notebook, timeout=180, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
    )
    return client.execute()


def of_cells(*sources: str) -> NotebookNode:
    cells = [nbformat.v4.new_code_cell(source) for source in sources]
    return nbformat.v4.new_notebook(cells=cells)


def text_of(cells: list[NotebookNode]) -> str:
    streams = [
        output["text"]
        for cell in cells
        for output in cell.get("outputs", [])
        if output["output_type"] == "stream"
    ]
    return re.sub(r"\x1b\[[0-9;]*m", "", "".join(streams))


def answers_of(notebook: NotebookNode) -> list[NotebookNode]:
    """Return the ``python`` blocks of the folded answers."""
    return [
        nbformat.v4.new_code_cell(
            block, metadata={"answer": exercise, "tags": ["raises-exception"]}
        )
        for cell in notebook.cells
        if cell.cell_type == "markdown"
        for answer in re.findall(r"<details>.*?</details>", cell.source, re.DOTALL)
        for exercise in re.findall(r"<b>(.*?)</b>", answer)[:1]
        for block in re.findall(r"^```python\n(.*?)\n```$", answer, re.DOTALL | re.MULTILINE)
    ]


def errors_of(cells: list[NotebookNode]) -> list[str]:
    outputs = [output for cell in cells for output in cell.get("outputs", [])]
    return [output["evalue"] for output in outputs if output["output_type"] == "error"]


def values_of(cell: NotebookNode) -> list[NotebookNode]:
    """Return the displayed last values of cells."""
    return [each for each in cell.outputs if each["output_type"] == "execute_result"]


def wrong_answers(path: Path, answers: list[NotebookNode]) -> Iterator[str]:
    """The answers that fail and should not, that should fail and do not, or that are not right."""
    meant = {name: words for (stem, name), words in FAILING.items() if stem == path.stem}
    for answer in answers:
        name, errors = answer.metadata["answer"], errors_of([answer])
        if any(meant.get(name, "\0") not in error for error in errors):
            yield answer.source
        elif errors:
            del meant[name]
        if "check_answer" in answer.source:
            shown = text_of([answer]) + "".join(
                f"\nOut {each['data']['text/plain']}" for each in values_of(answer)
            )
            if not re.search(r"^Out (\[ranks? [-\d, ]+\] )?Right\.$", shown, re.MULTILINE):
                yield answer.source
    yield from meant


@pytest.mark.timeout(400)
@pytest.mark.parametrize("path", EACH)
def test_a_notebook_runs_from_start_to_end(path: Path, folder: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    answers = answers_of(notebook)
    *cells, last = notebook.cells  # the last one ends the ranks
    notebook.cells = [*cells, *answers, last]
    execute(notebook, folder)
    notebook.cells = [*cells, last]
    if "EXECUTED" in os.environ:
        nbformat.write(notebook, Path(os.environ["EXECUTED"], path.name))
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.execution_count for cell in code)
    failed = [cell.source for cell in notebook.cells if errors_of([cell])]
    meant = [
        cell.source
        for cell in notebook.cells
        if "raises-exception" in cell.metadata.get("tags", [])
    ]
    assert failed == meant
    shown = [each["data"].get("text/plain", "") for cell in code for each in values_of(cell)]
    assert not [each for each in shown if re.search(r"^<.* at 0x", each)], "it says nothing"
    assert list(wrong_answers(path, answers)) == []
    text = text_of(notebook.cells)
    found = re.findall(r"^  (ND\d+)(?: line \d+)?: ", text, re.MULTILINE)
    assert set(found) - {"ND217"} == MEANT.get(path.stem, set())
    names = [each.name for each in folder.iterdir()]
    ignored = [".nbddp", "checkpoints", "*.pt"]  # of .gitignore
    assert [name for name in names if not any(fnmatch(name, each) for each in ignored)] == []
    if path == QUICKSTART:
        assert re.search(r"\brank 1\b.*SIGKILL", errors_of(notebook.cells)[0])
        assert re.search(r"9\d\.\d%.*\brank 1\b", text)


def memory_of(pid: int) -> int:
    """Return the memory of a process and its descendants; shared pages count once (PSS)."""
    total = 0
    for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
        with suppress(psutil.Error):  # it has just ended, or is about to
            total += process.memory_full_info().pss
    return total


@pytest.mark.full
@pytest.mark.timeout(400)
@pytest.mark.skipif(sys.platform != "linux", reason="PSS is Linux's own measure")
def test_the_quickstart_with_four_ranks_stays_under_a_gigabyte(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEM_LIMIT", str(2 << 30))  # as Binder sets it
    cells = nbformat.read(QUICKSTART, as_version=4).cells
    held, replies = [], []
    with Notebook(folder, loads=False) as notebook:
        for cell in cells:
            if cell.cell_type == "code":
                replies.append(notebook.run(cell.source.replace("--nproc 2", "--nproc 4")))
                held.append(memory_of(notebook.pid))
            if "accuracy = " in cell.source:
                assert notebook.run("%ddp pull accuracy").result.count("0.9") == 4
                shared = notebook.run("%%ddp\nimport sys\n'torch._dynamo' in sys.modules")
                assert shared.text == "Out [ranks 0-3] True\n"
    assert "360 of them on each rank" in "".join(each.text for each in replies)
    assert "SIGKILL" in "".join(each.error for each in replies)
    assert 200 << 20 < max(held) < 10**9, f"kernel and ranks took {max(held) / 1e6:.0f} MB"


@pytest.mark.parametrize(
    ("cell", "error"),
    [
        pytest.param(
            "%%ddp --nproc 2\n1 / 0",
            "ZeroDivisionError: division by zero, line 2",
            marks=pytest.mark.full,
            id="an error",
        ),
        pytest.param("%%ddp --nope\npass", "--nope", id="a wrong option"),
    ],
)
def test_a_failing_cell_fails_the_notebook(folder: Path, cell: str, error: str) -> None:
    notebook = of_cells("%load_ext nbddp", cell, "print('not reached')")
    with pytest.raises(CellExecutionError, match=error):
        execute(notebook, folder)
    assert "not reached" not in text_of(notebook.cells)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # papermill's own
def test_papermill_runs_a_notebook(folder: Path) -> None:
    import papermill  # absent where hosted notebooks are tried

    source, target = folder / "in.ipynb", folder / "out.ipynb"
    nbformat.write(of_cells("%load_ext nbddp", "%%ddp --nproc 2\nworld_size"), source)
    papermill.execute_notebook(source, target, kernel_name="python3", progress_bar=False)
    assert "Out [ranks 0-1] 2" in text_of(nbformat.read(target, as_version=4).cells)
