"""The form of the notebooks: opening, sections, and used names."""

import ast
import re
from itertools import groupby
from pathlib import Path

import nbformat
import pytest
from lessons import python_of

import nbddp

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
FENCE = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
EXERCISE = re.compile(
    r"<details><summary><b>Exercise \S+[a-j]\.</b> .+?</summary>\n\n.+?\n</details>", re.DOTALL
)


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
    numbers = [path.name.partition("_")[0] for path in NOTEBOOKS]
    parts = [[*names] for _, names in groupby(numbers, lambda number: number[0])]
    assert [names[0] for names in parts] == ["1.1", "2.1", "3.1", "4.1", "A1"]
    for names in parts:
        assert names == [f"{names[0][:-1]}{place}" for place in range(1, len(names) + 1)]


def test_a_link_to_a_notebook_has_its_number() -> None:
    link = r"\[(?:notebook |exercise )?(A\d|\d[\d.]*)[^\]]*\]\([^)]*?((?:\d\.|A)\d)_\w+\.ipynb"
    pages = [
        *NOTEBOOKS,
        *ROOT.glob("*.md"),
        *ROOT.glob("notebooks/*.md"),
        *ROOT.glob("docs/**/*.md"),
    ]
    links = [each for page in pages for each in re.findall(link, page.read_text())]
    assert len(links) > 100
    assert [(text, number) for text, number in links if not text.startswith(number)] == []


def needed_by(number: str) -> list[str]:
    """Return the notebooks that the opening of a notebook calls necessary."""
    [path] = [path for path in NOTEBOOKS if path.name.startswith(f"{number}_")]
    opening = nbformat.read(path, as_version=4).cells[0].source
    return re.findall(r"\((\S+\.ipynb)\)", opening.partition("**You need** ")[2])


def test_each_list_and_plan_has_the_order_of_the_numbers() -> None:
    names = [path.name for path in NOTEBOOKS]
    for page in ("docs/course.md", "README.md", "mkdocs.yml"):
        rows = re.findall(r"^ *(?:\||-|\S+ \[).*?([\w.]+\.ipynb)", (ROOT / page).read_text(), re.M)
        assert list(dict.fromkeys(rows))[: len(names)] == names, page
    course, core = (ROOT / "docs/course.md").read_text().split("## The core in twelve notebooks")
    parts = re.split(r"^## (?:Part |A)", course, flags=re.M)[1:]
    for part, text in zip("1234A", parts, strict=True):
        assert {number[0] for number in re.findall(r"^\| \[(\S+) ", text, re.M)} == {part}
    plans = (ROOT / "docs/teaching.md").read_text().split("## A plan for two ")[1:]
    for plan in plans:
        numbers = re.findall(r"^(?:\| [\d:]+ ){2}.*?\| \[?([1-4]\.\d)\b", plan, re.M)
        assert len(numbers) > 5
        assert numbers == sorted(numbers)
    twelve = re.findall(r"^\| (\S+) (.+) \| .*\?", core, re.M)
    assert len(twelve) == 12
    for place, (number, title) in enumerate(twelve):
        assert f"| [{number} {title}](" in course
        needed = {name.partition("_")[0] for name in needed_by(number)}
        assert needed <= {each for each, _ in twelve[:place]}


@pytest.mark.parametrize("at", range(len(NOTEBOOKS)), ids=[path.stem for path in NOTEBOOKS])
def test_a_notebook_has_the_form_of_a_lesson(at: int) -> None:
    path = NOTEBOOKS[at]
    lesson = nbformat.read(path, as_version=4)
    nbformat.validate(lesson)
    cells = [cell for cell in lesson.cells if cell.cell_type == "code"]
    texts = [cell.source for cell in lesson.cells if cell.cell_type == "markdown"]
    code, prose = [cell.source for cell in cells], "\n\n".join(texts)
    trees = [python_of(source) for source in code]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    # it has no outputs, and assertions for its content; folded cells have a title
    assert all(not cell.outputs and cell.execution_count is None for cell in cells)
    assert sum(isinstance(node, ast.Assert) for node in nodes) >= 5
    for cell in cells:
        if cell.metadata.get("jupyter", {}).get("source_hidden"):
            assert re.match(r"# \S+", cell.source)
            assert "assert " not in cell.source
    # it begins with goals and requirements, and links to its neighbours
    opening = lesson.cells[0].source
    assert re.match(r"# \S.*\n\n\*\*You will\*\* ", opening)
    assert "\n\n**You need** " in opening
    needed = needed_by(path.name.partition("_")[0])
    assert {*needed} <= {each.name for each in NOTEBOOKS[:at]}
    assert bool(needed) == (at > 0)
    following = re.findall(r"^Next: \[.*?\]\((\S+)\)", texts[-1], re.M)
    assert following == [each.name for each in NOTEBOOKS[at + 1 : at + 2]]
    assert (code[0], code[-1]) == ("%load_ext nbddp", "%ddp stop")
    # it has exercises with folded answers, and a part in the wild
    assert prose.count("<details>") == prose.count("</details>") >= 2
    assert len(EXERCISE.findall(prose)) == prose.count("<details>")
    assert "torchrun" in prose[prose.index("## In the wild") :]
    # it uses public names only
    answers = [python_of(each) for each in FENCE.findall(prose)]
    names = set().union(*map(names_of, [*trees, *answers]))
    private = {name for name in names if re.search(r"\._(?!_)\w", name) or name.startswith("_")}
    private -= {"super()._monitor_workers"}  # torch documents it as a method to override
    ours = {found[1] for name in names if (found := re.match(r"nbddp\.(\w+)", name))}
    assert private | (ours - set(nbddp.__all__)) == set()
    # its pictures and link targets exist
    targets = re.findall(r'\]\(([^)#:]+)\)|src="([^":]+)"', prose)
    assert [a or b for a, b in targets if not (path.parent / (a or b)).exists()] == []
    assert all('alt="' in tag for tag in re.findall(r"<img [^>]+>", prose))
