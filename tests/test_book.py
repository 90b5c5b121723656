"""The course as a site: every page is there, in order, and no link leads nowhere."""

from __future__ import annotations

import html
import re
import shutil
from pathlib import Path

import nbformat
import pytest
from syrupy.assertion import SnapshotAssertion

import nbddp
from book.__main__ import main
from book.docstrings import as_markdown, reference
from book.links import dead_links
from book.pages import NOTEBOOKS, lessons, write_site
from nbddp.charts.palette import DARK, LIGHT

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


def test_the_first_page_has_the_course_in_its_order_and_the_map_leads_into_it(site: Path) -> None:
    text = (site / "index.html").read_text()
    main_part = text[text.index("<main") :]
    linked = list(dict.fromkeys(re.findall(r'href="(\d\d_\w+)\.html"', main_part)))
    assert linked == [path.stem for path in lessons()]
    assert 'href="api.html"' in main_part
    for name in ("index.html", "course.html"):
        assert '<a href="topics.html">' in (site / name).read_text()
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
    # the colour of a rank that was printed is one that is read on the page
    printed = 'style="color: rgb(95,135,255)"'
    assert printed in text
    light, dark = (site / "style.css").read_text().split("@media (prefers-color-scheme: dark)", 1)
    for part, look in ((light, LIGHT), (dark, DARK)):
        assert f"pre span[{printed}] {{ color: {look[0]} !important; }}" in part


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


def test_the_names_of_nbddp_are_all_explained(site: Path) -> None:
    text = (site / "api.html").read_text()
    names = {name for name in nbddp.__all__ if "ipython" not in name}
    assert {f"nbddp.{name}" for name in names} <= set(re.findall(r'id="([^"]+)"', text))
    assert "nbddp.faults.at" in text or "faults.at" in text
    assert "``" not in re.sub(r"<pre>.*?</pre>", "", text, flags=re.DOTALL)
    assert not re.search(r":(func|class|meth|mod):", text)


def test_a_docstring_keeps_its_sections_examples_and_code(snapshot: SnapshotAssertion) -> None:
    said = as_markdown(
        "Do it.\n\nLike so::\n\n    a = 1\n\nArgs:\n    x: one\n        and more.\n    y: ``two``."
        "\n\nReturns:\n    The rest.\n\n>>> 1\n1"
    )
    assert said == snapshot


def test_a_signature_says_types_without_quotes() -> None:
    found = re.search(r"```python\nnbddp\.log\((.*?)```", reference(), re.DOTALL)
    assert found
    assert "step: int | None = None" in found[1]


PAGE = '<a href="{}">x</a><h1 id="here">x</h1>'


def test_a_target_is_found_where_it_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "b.html").write_text('<img src="here.png"><source srcset="a.html">')
    (tmp_path / "here.png").touch()
    gone = ("other.html", "#there", "a.html#there", "b.html#here", "pictures/x.png")
    there = ("a.html", "#here", "a.html#here", "here.png")
    for target in (*gone, *there, "https://x.org/y#z", "data:,x", "mailto:a@b.c"):
        (tmp_path / "a.html").write_text(PAGE.format(target))
        assert dead_links(tmp_path) == ([f"a.html: {target}"] if target in gone else [])


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
    assert (f"a.html: {target}" in said.err) is bool(code)
    assert said.out.startswith(f"{tmp_path}/index.html: 1 ")


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
    said = capsys.readouterr().err
    assert f" {tmp_path / name} " in said
    assert said.endswith(f": {why}\n")


def test_a_copy_that_is_missing_is_named_and_nothing_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copies, folder = tmp_path / "copies", tmp_path / "site"
    copies.mkdir()
    for path in lessons()[1:]:
        shutil.copy(path, copies)
    with pytest.raises(SystemExit):
        main([str(folder), "--executed", str(copies)])
    assert re.search(f"{copies} .* {lessons()[0].name}$", capsys.readouterr().err)
    assert not folder.exists()
