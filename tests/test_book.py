"""The course as a site: every page is there, in order, and no link leads nowhere."""

from __future__ import annotations

import html
import re
import shutil
from pathlib import Path

import nbformat
import pytest

import nbddp
from book.__main__ import main
from book.docstrings import as_markdown, reference
from book.links import dead_links
from book.pages import NOTEBOOKS, lessons, write_site
from nbddp.ui.palette import DARK, LIGHT

pytestmark = pytest.mark.timeout(180)  # the first test makes twenty pages
OUTPUT = '<div class="nbddp"><span class="nbddp-rank">two ranks</span></div>'


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site of the notebooks as they are kept; the first one's first cell has outputs."""
    copies, folder = (tmp_path_factory.mktemp(name) for name in ("copies", "site"))
    for path in lessons():
        shutil.copy(path, copies)
    first = copies / lessons()[0].name
    notebook = nbformat.read(first, as_version=4)
    data = {"text/html": OUTPUT, "text/plain": "as text"}
    cell = next(cell for cell in notebook.cells if cell.cell_type == "code")
    cell.outputs = [
        nbformat.v4.new_output("display_data", data),
        nbformat.v4.new_output("stream", text="\x1b[31mred <b>\x1b[0m\x1b[38;5;69mrank 0\x1b[0m"),
    ]
    nbformat.write(notebook, first)
    write_site(folder, copies)
    return folder


def test_no_link_no_anchor_and_no_picture_of_the_site_leads_nowhere(site: Path) -> None:
    assert dead_links(site) == []


def test_the_first_page_has_the_course_in_its_order(site: Path) -> None:
    text = (site / "index.html").read_text()
    main_part = text[text.index("<main") :]
    linked = list(dict.fromkeys(re.findall(r'href="(\d\d_\w+)\.html"', main_part)))
    assert linked == [path.stem for path in sorted(NOTEBOOKS.glob("*.ipynb"))]
    assert 'href="api.html"' in main_part


def test_the_map_of_the_course_is_a_page_and_leads_into_notebooks(site: Path) -> None:
    for name in ("index.html", "course.html"):
        assert '<a href="topics.html">Where each topic is</a>' in (site / name).read_text()
    text = (site / "topics.html").read_text()
    assert 'href="05_faults_and_recovery.html#What-torchrun-does-with-it"' in text


def test_each_page_lists_all_pages_and_says_which_it_is(site: Path) -> None:
    names = {path.name for path in site.glob("*.html")}
    for path in site.glob("*.html"):
        text = path.read_text()
        listed = re.findall(r'<li><a href="([^"]+)"( aria-current="page")?>', text)
        assert {name for name, _ in listed} == names
        assert [name for name, is_here in listed if is_here] == [path.name]


def test_outputs_stand_on_the_page_as_jupyter_would_show_them(site: Path) -> None:
    text = (site / f"{lessons()[0].stem}.html").read_text()
    assert OUTPUT in text
    assert "as text" not in text  # where there is HTML
    assert '<span class="ansi-red-fg">red &lt;b&gt;</span>' in text


def test_a_rank_that_was_printed_has_the_colour_that_is_read_on_the_page(site: Path) -> None:
    style = (site / "style.css").read_text()
    light, dark = style.split("@media (prefers-color-scheme: dark)", 1)
    rule = 'pre span[style="color: rgb(95,135,255)"] {{ color: {} !important; }}'
    assert rule.format(LIGHT[0]) in light
    assert rule.format(DARK[0]) in dark
    text = (site / f"{lessons()[0].stem}.html").read_text()
    assert 'style="color: rgb(95,135,255)"' in text


def test_the_names_of_nbddp_are_all_explained(site: Path) -> None:
    text = (site / "api.html").read_text()
    names = {name for name in nbddp.__all__ if "ipython" not in name}
    assert {f"nbddp.{name}" for name in names} <= set(re.findall(r'id="([^"]+)"', text))
    assert "nbddp.faults.at" in text or "faults.at" in text
    assert "``" not in re.sub(r"<pre>.*?</pre>", "", text, flags=re.DOTALL)
    assert not re.search(r":(func|class|meth|mod):", text)


def test_a_docstring_keeps_its_sections_examples_and_code() -> None:
    said = as_markdown(
        "Do it.\n\nLike so::\n\n    a = 1\n\nArgs:\n    x: one\n        and more.\n    y: ``two``."
        "\n\nReturns:\n    The rest.\n\n>>> 1\n1"
    )
    assert said == (
        "Do it.\n\nLike so:\n\n```python\na = 1\n```\n\n**Args**\n\n* `x`: one and more.\n"
        "* `y`: `two`.\n\n**Returns**\n\nThe rest.\n\n```pycon\n>>> 1\n1\n```"
    )


def test_a_signature_says_types_without_quotes() -> None:
    found = re.search(r"```python\nnbddp\.log\((.*?)```", reference(), re.DOTALL)
    assert found
    assert "step: int | None = None" in found[1]


PAGE = '<a href="{}">x</a><h1 id="here">x</h1>'


@pytest.mark.parametrize(
    "target", ["other.html", "#there", "a.html#there", "b.html#here", "pictures/x.png"]
)
def test_a_target_that_is_not_there_is_found(tmp_path: Path, target: str) -> None:
    (tmp_path / "a.html").write_text(PAGE.format(target))
    (tmp_path / "b.html").write_text('<img src="here.png"><source srcset="a.html">')
    (tmp_path / "here.png").touch()
    assert dead_links(tmp_path) == [f"a.html: {target}"]


@pytest.mark.parametrize(
    "target",
    ["a.html", "#here", "a.html#here", "here.png", "https://x.org/y#z", "data:,x", "mailto:a@b.c"],
)
def test_a_target_that_is_there_or_elsewhere_is_not(tmp_path: Path, target: str) -> None:
    (tmp_path / "a.html").write_text(PAGE.format(target))
    (tmp_path / "here.png").touch()
    assert dead_links(tmp_path) == []


@pytest.mark.parametrize(("target", "code"), [("gone.html", 1), ("#here", 0)])
def test_a_dead_link_fails_the_command(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    target: str,
    code: int,
) -> None:
    def write(folder: Path, executed: Path) -> None:
        (folder / "a.html").write_text(PAGE.format(target) + executed.name)

    monkeypatch.setattr("book.__main__.write_site", write)
    assert main([str(tmp_path), "--executed", str(NOTEBOOKS)]) == code
    said = capsys.readouterr()
    assert said.err == (f"leads nowhere: a.html: {target}\n" if code else "")
    assert said.out == f"{tmp_path}/index.html: 1 pages\n"


@pytest.mark.parametrize(
    ("name", "why"),
    [("file", "File exists"), ("file/site", "Not a directory"), ("locked", "Permission denied")],
)
def test_where_the_site_cannot_be_written_nothing_is_executed(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    why: str,
) -> None:
    monkeypatch.setattr("book.__main__.execute_all", lambda *_: pytest.fail("it was executed"))
    monkeypatch.setattr("os.access", lambda path, _mode: Path(path).name != "locked")
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit):
        main([str(tmp_path / name)])
    assert capsys.readouterr().err.endswith(f"{tmp_path / name} cannot be written: {why}\n")


def test_a_folded_cell_is_there_under_its_first_line(site: Path) -> None:
    found = 0
    for path in lessons():
        cells = nbformat.read(path, as_version=4).cells
        folded = [each for each in cells if each.metadata.get("jupyter", {}).get("source_hidden")]
        text = (site / f"{path.stem}.html").read_text()
        inputs = re.findall(
            r'<div class="input_area">\s*<details><summary>(.*?)</summary>(.*?)</details>',
            text,
            re.DOTALL,
        )
        assert len(inputs) == len(folded), path.stem
        for (title, code), cell in zip(inputs, folded, strict=True):
            shown = html.unescape(re.sub(r"<[^>]+>", "", code)).strip()
            assert shown == cell.source
            assert f"# {html.unescape(title)}" == cell.source.partition("\n")[0]
        found += len(folded)
    assert found


def test_a_copy_that_is_missing_is_named_and_nothing_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copies, folder = tmp_path / "copies", tmp_path / "site"
    copies.mkdir()
    for path in lessons()[1:]:
        shutil.copy(path, copies)
    with pytest.raises(SystemExit):
        main([str(folder), "--executed", str(copies)])
    assert capsys.readouterr().err.endswith(f"{copies} has no copy of {lessons()[0].name}\n")
    assert not folder.exists()
