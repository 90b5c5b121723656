"""notebooks/README.md: what is where in the course, and each link leads to it."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from urllib.parse import unquote

import nbformat

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


def wrong(text: str, name: str, anchor: str) -> str:
    """What is wrong with a link; empty if it leads where its text says."""
    if not (NOTEBOOKS / name).is_file():
        return "no such file"
    if anchor and unquote(anchor) not in headings(name):
        return "no such heading"
    number = re.match(r"\d\d", text)
    return "" if number is None or name.startswith(number[0]) else "names another notebook"


def test_every_notebook_is_there_in_its_order() -> None:
    notebooks = sorted(path.name for path in NOTEBOOKS.glob("*.ipynb"))
    listed = [name for _, name, anchor in LINKS if not anchor]
    assert listed[: len(notebooks)] == notebooks


def test_each_link_leads_to_a_heading_that_is_there() -> None:
    assert len(LINKS) > 80
    assert {link: found for link in LINKS if (found := wrong(*link))} == {}


def test_each_topic_says_where_it_is_and_whether_it_is_live_or_told() -> None:
    topics = [row.strip("| ").split(" | ") for row in ROWS[ROWS.index("| topic | where | |") :]]
    topics = [row for row in topics if row[0] != "topic"]
    assert len(topics) > 30
    assert [topic for topic, where, _ in topics if "](" not in where] == []
    told = re.compile(r"\b(live|told|reckoned)\b")
    assert [topic for topic, _, how in topics if not told.search(how)] == []
