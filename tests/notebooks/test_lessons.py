"""The form of the notebooks: what each opens with, what it holds, and which names it uses."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import nbformat
import pytest
from IPython.core.inputtransformer2 import TransformerManager
from nbformat import NotebookNode

import nbddp

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))
FENCE = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
EXERCISE = re.compile(
    r"<details><summary><b>Exercise \d\.</b> .+?</summary>\n\n.+?\n</details>", re.DOTALL
)


@pytest.fixture(params=NOTEBOOKS, ids=lambda path: path.stem)
def path(request: pytest.FixtureRequest) -> Path:
    return Path(request.param)


@pytest.fixture
def lesson(path: Path) -> NotebookNode:
    return nbformat.read(path, as_version=4)


def code_of(lesson: NotebookNode) -> list[str]:
    return [cell.source for cell in lesson.cells if cell.cell_type == "code"]


def prose_of(lesson: NotebookNode) -> str:
    return "\n\n".join(cell.source for cell in lesson.cells if cell.cell_type == "markdown")


def python_of(source: str) -> ast.Module:
    """What a cell says to Python: a cell magic's body, line magics and all."""
    body = source.split("\n", 1)[1] if source.startswith("%%ddp") else source
    return ast.parse(TransformerManager().transform_cell(body))


def names_of(tree: ast.Module) -> set[str]:
    """Every dotted name, and every module that is imported."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            found.add(ast.unparse(node))
        elif isinstance(node, ast.Import):
            found |= {each.name for each in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{each.name}" for each in node.names}
    return found


def test_the_notebooks_are_numbered_without_a_gap() -> None:
    assert [int(path.name[:2]) for path in NOTEBOOKS] == [*range(len(NOTEBOOKS))]


def test_it_is_stored_without_outputs_and_asserts_what_it_teaches(lesson: NotebookNode) -> None:
    nbformat.validate(lesson)
    code = [cell for cell in lesson.cells if cell.cell_type == "code"]
    assert all(not cell.outputs and cell.execution_count is None for cell in code)
    asserts = [
        node
        for source in code_of(lesson)
        for node in ast.walk(python_of(source))
        if isinstance(node, ast.Assert)
    ]
    assert len(asserts) >= 5


def test_what_is_folded_says_what_it_does_and_asserts_nothing(lesson: NotebookNode) -> None:
    for cell in lesson.cells:
        if cell.metadata.get("jupyter", {}).get("source_hidden"):
            assert re.match(r"# \S+", cell.source)
            nodes = ast.walk(python_of(cell.source))
            assert not [node for node in nodes if isinstance(node, ast.Assert)]


def test_it_says_first_what_one_will_learn_and_needs(lesson: NotebookNode, path: Path) -> None:
    opening = lesson.cells[0].source
    assert re.match(r"# \S.*\n\n\*\*You will\*\* ", opening)
    assert "\n\n**You need** " in opening
    before = NOTEBOOKS[NOTEBOOKS.index(path) - 1].name
    assert path == NOTEBOOKS[0] or f"]({before})" in opening
    assert code_of(lesson)[0] == "%load_ext nbddp"


def test_it_has_exercises_with_folded_answers_and_a_part_in_the_wild(lesson: NotebookNode) -> None:
    prose = prose_of(lesson)
    assert (
        len(EXERCISE.findall(prose)) == prose.count("<details>") == prose.count("</details>") >= 2
    )
    assert "torchrun" in prose[prose.index("## In the wild") :]


def test_it_ends_its_ranks_and_names_the_next_one(lesson: NotebookNode, path: Path) -> None:
    assert code_of(lesson)[-1] == "%ddp stop"
    if path != NOTEBOOKS[-1]:
        after = NOTEBOOKS[NOTEBOOKS.index(path) + 1].name
        last = [cell.source for cell in lesson.cells if cell.cell_type == "markdown"][-1]
        assert f"]({after})" in last


def test_it_uses_public_names_only(lesson: NotebookNode) -> None:
    answers = FENCE.findall(prose_of(lesson))
    names = set().union(*(names_of(python_of(each)) for each in [*code_of(lesson), *answers]))
    private = {name for name in names if re.search(r"\._(?!_)\w", name) or name.startswith("_")}
    assert not private
    ours = {found[1] for name in names if (found := re.match(r"nbddp\.(\w+)", name))}
    assert ours <= set(nbddp.__all__)


def test_what_it_shows_and_links_to_is_there(lesson: NotebookNode, path: Path) -> None:
    prose = prose_of(lesson)
    targets = re.findall(r'\]\(([^)#:]+)\)|src="([^":]+)"', prose)
    missing = [a or b for a, b in targets if not (path.parent / (a or b)).exists()]
    assert not missing
    assert all('alt="' in tag for tag in re.findall(r"<img [^>]+>", prose))
