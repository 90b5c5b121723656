"""notebooks/README.md: what is where in the course, and each link leads to it."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from urllib.parse import unquote

import nbformat
import pytest

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"
MAP = (NOTEBOOKS / "README.md").read_text()
LINKS = re.findall(r"\[([^\]]+)\]\(([^)#]+)(?:#([^)]+))?\)", MAP)
ROWS = [line for line in MAP.splitlines() if line.startswith("| ") and "---" not in line]


@cache
def headings(name: str) -> frozenset[str]:
    """A notebook's headings, as JupyterLab and nbconvert name their anchors."""
    cells = nbformat.read(NOTEBOOKS / name, as_version=4).cells
    prose = "\n\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    outside = re.sub(r"^```.*?^```$", "", prose, flags=re.MULTILINE | re.DOTALL)
    found = re.findall(r"^#+ (.+?)\s*$", outside, re.MULTILINE)
    return frozenset(each.replace("`", "").replace(" ", "-") for each in found)


def test_every_notebook_is_there_in_its_order() -> None:
    listed = [name for _, name, anchor in LINKS if not anchor]
    assert listed[: len(headings_of_all())] == sorted(path.name for path in headings_of_all())


def headings_of_all() -> list[Path]:
    return sorted(NOTEBOOKS.glob("*.ipynb"))


@pytest.mark.parametrize(
    ("text", "name", "anchor"), LINKS, ids=lambda part: part if isinstance(part, str) else ""
)
def test_each_link_leads_to_a_heading_that_is_there(text: str, name: str, anchor: str) -> None:
    assert (NOTEBOOKS / name).is_file()
    if anchor:
        assert unquote(anchor) in headings(name)
    number = re.match(r"\d\d", text)
    assert number is None or name.startswith(number[0]), "the text names another notebook"


def test_each_topic_says_where_it_is_and_whether_it_is_live_or_told() -> None:
    topics = [row.strip("| ").split(" | ") for row in ROWS[ROWS.index("| topic | where | |") :]]
    topics = [row for row in topics if row[0] != "topic"]
    assert len(topics) > 30
    for topic, where, how in topics:
        assert "](" in where, topic
        assert re.search(r"\b(live|told|reckoned)\b", how), topic
