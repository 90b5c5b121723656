"""Execute a notebook with the answers to its exercises, and check what it shows."""

import ast
import os
import re
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import nbformat
import torch
from IPython.core.inputtransformer2 import TransformerManager
from nbclient import NotebookClient
from nbformat import NotebookNode

MEANT = {  # by notebook: the mistakes that it shows
    "2.3_hangs_and_stragglers": {"ND101"},
    "2.5_checklist": {
        *("ND101", "ND121", "ND123", "ND125", "ND132", "ND133", "ND134"),
        *("ND141", "ND201", "ND202", "ND207", "ND210", "ND215"),
    },
    "A2_two_gpus_and_a_language_model": {"ND128", "ND218"},
}
if torch.cuda.device_count() > 1:  # there, TRL refuses before a trainer can train alone
    MEANT["A2_two_gpus_and_a_language_model"].remove("ND218")
FAILING = {  # answers that are meant to fail
    ("2.1_checkpoint_and_resume", "Exercise 2.1b."): "SIGKILL",
    ("2.2_faults_and_recovery", "Exercise 2.2a."): "collective",
}
NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))


def python_of(source: str) -> ast.Module:
    body = source.split("\n", 1)[1] if source.startswith("%%ddp") else source
    return ast.parse(TransformerManager().transform_cell(body))


def execute(notebook: NotebookNode, folder: Path) -> NotebookNode:
    client = NotebookClient(
        notebook, timeout=180, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
    )
    return client.execute()


def text_of(cells: list[NotebookNode]) -> str:
    streams = [
        output["text"]
        for cell in cells
        for output in cell.get("outputs", [])
        if output["output_type"] == "stream"
    ]
    return re.sub(r"\x1b\[[0-9;]*m", "", "".join(streams))


def answers_of(notebook: NotebookNode) -> list[NotebookNode]:
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


def sources_of(number: str) -> list[str]:
    [path] = [path for path in NOTEBOOKS if path.name.startswith(f"{number}_")]
    notebook = nbformat.read(path, as_version=4)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    return [cell.source for cell in (*cells, *answers_of(notebook))]


def written_file(number: str, name: str) -> str:
    begin = f"%%writefile {name}\n"
    [source] = [each for each in sources_of(number) if each.startswith(begin)]
    return source.removeprefix(begin) + "\n"


def definitions(number: str, *names: str) -> str:
    found = {}
    for written in sources_of(number):
        source = re.sub(r"^(\w+ = )?[%!]", "#", written, flags=re.MULTILINE)
        if re.search(rf"^(def|class) ({'|'.join(names)})\b", source, re.MULTILINE):
            for node in ast.parse(source).body:
                name = getattr(node, "name", "")
                found[name] = ast.get_source_segment(source, node) or ""
    return "\n\n".join(found[name] for name in names) + "\n"


def errors_of(cells: list[NotebookNode]) -> list[str]:
    """Return the texts of the errors; IPython prints a UsageError as text."""
    outputs = [output for cell in cells for output in cell.get("outputs", [])]
    texts = [output.get("evalue", output.get("text", "")) for output in outputs]
    return [
        text
        for text, output in zip(texts, outputs, strict=True)
        if output["output_type"] == "error" or text.startswith("UsageError: ")
    ]


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
                f"\nOut {value['data']['text/plain']}" for value in values_of(answer)
            )
            if not re.search(r"^Out (\[ranks? [-\d, ]+\] )?Right\.$", shown, re.MULTILINE):
                yield answer.source
    yield from meant


def check_lesson(path: Path, folder: Path) -> NotebookNode:
    """Execute a notebook in an empty folder, check it, and return it with its outputs."""
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
    return notebook  # type: ignore[no-any-return] # nbformat is typed in part
