"""Render notebooks and Markdown as pages of one site."""

from __future__ import annotations

import html
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Template

import nbformat
from nbconvert import HTMLExporter
from nbformat import NotebookNode
from pygments.formatters import HtmlFormatter
from traitlets.config import Config

from book.docstrings import reference
from nbddp.charts.palette import DARK, LIGHT, rank_color

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = ROOT / "notebooks"
DOCS = ROOT / "docs"
HERE = Path(__file__).resolve().parent
STYLES = {"light": "default", "dark": "github-dark"}  # styles of Pygments
TARGET = re.compile(r'\b(href|src|srcset)="([^":#]+)(#[^"]*)?"')
FOLDED = re.compile(
    r'<div class="[^"]*\bcelltag_folded\b.*?(<div class="highlight.*?</pre></div>)', re.DOTALL
)
HEADING = re.compile(r'<h([1-6]) id="([^"]*)">(.*?)<a class="anchor-link" href="[^"]*"', re.DOTALL)


@dataclass(frozen=True, slots=True)
class Page:
    """A page of the site.

    Attributes:
        name: the name of its file, without ``.html``.
        title: its title in the list of pages.
        notebook: its content.
        is_readme: whether its anchors are named as on GitHub.
    """

    name: str
    title: str
    notebook: NotebookNode
    is_readme: bool = False

    @property
    def file(self) -> str:
        """The name of its file."""
        return f"{self.name}.html"


def lessons() -> list[Path]:
    """Return the notebooks of the course in order."""
    return sorted(NOTEBOOKS.glob("*.ipynb"))


def write_site(folder: Path, executed: Path) -> None:
    """Write all pages; read the notebooks from the folder ``executed``."""
    folder.mkdir(parents=True, exist_ok=True)
    exporter = HTMLExporter(
        template_name="basic",
        exclude_input_prompt=True,
        exclude_output_prompt=True,
        config=Config(HighlightMagicsPreprocessor={"languages": {"%%ddp": "python"}}),
    )
    # the HTML is nbddp's own: cleaning it takes half of the time
    exporter.register_filter("clean_html", lambda text: text)
    pages = list(_pages(executed))
    frame = Template((HERE / "page.html").read_text("utf-8"))
    for number, page in enumerate(pages):
        body = _body(exporter, page)
        whole = frame.substitute(
            title=html.escape(page.title),
            pages=_navigation(pages, page),
            body=body,
            steps=_previous_and_next(
                pages[max(0, number - 1)], pages[min(number + 1, len(pages) - 1)], page
            ),
        )
        (folder / page.file).write_text(whole, "utf-8")
    (folder / "style.css").write_text(_style(), "utf-8")
    shutil.copytree(NOTEBOOKS / "pictures", folder / "pictures", dirs_exist_ok=True)
    shutil.copy(ROOT / "LICENSE", folder)


def _pages(executed: Path) -> Iterator[Page]:
    yield Page("index", "The course", _markdown_notebook(_index_source()))
    for path in lessons():
        notebook = nbformat.read(executed / path.name, as_version=4)
        title = re.match(r"# (.+)", notebook.cells[0].source)
        said = title[1] if title else path.stem
        yield Page(path.stem, f"{path.stem[:2]} {said}", notebook)
    topics = (NOTEBOOKS / "README.md").read_text("utf-8")
    yield Page("topics", "Where each topic is", _markdown_notebook(topics), is_readme=True)
    yield Page("api", "The names of nbddp", _markdown_notebook(reference()))
    for path in sorted([*ROOT.glob("*.md"), *DOCS.glob("*.md")]):
        title = re.match(r"# (.+)", path.read_text("utf-8"))
        said = "README" if path.stem == "README" else title[1] if title else path.stem
        source = path.read_text("utf-8")
        yield Page(path.stem.lower(), said, _markdown_notebook(source), is_readme=True)


def _markdown_notebook(source: str) -> NotebookNode:
    notebook: NotebookNode = nbformat.v4.new_notebook()
    notebook.cells.append(nbformat.v4.new_markdown_cell(source))
    return notebook


def _index_source() -> str:
    """Return the source of the first page: an introduction and the table of the notebooks."""
    readme = (ROOT / "README.md").read_text("utf-8")
    about = re.search(
        r"^nbddp runs distributed PyTorch.*?(?=\n\n)", readme, re.MULTILINE | re.DOTALL
    )
    if about is None:
        raise LookupError("README.md has no first paragraph")
    course = (DOCS / "course.md").read_text("utf-8").partition("\n")[2]
    more = "See also [all public names](api.html) and [the README](README.md)."
    return f"# nbddp\n\n{about[0]}\n{course}\n{more}\n"


def _body(exporter: HTMLExporter, page: Page) -> str:
    folded = [cell for cell in page.notebook.cells if _is_folded(cell)]
    for cell in folded:
        cell.metadata["tags"] = [*cell.metadata.get("tags", ()), "folded"]  # becomes a CSS class
    body, _ = exporter.from_notebook_node(page.notebook)
    titles = iter([cell.source.partition("\n")[0].removeprefix("# ") for cell in folded])
    body = FOLDED.sub(lambda found: _with_details(found, next(titles)), body)
    if page.is_readme:
        body = HEADING.sub(_github_anchor, body)
    return TARGET.sub(_site_link, body)


def _is_folded(cell: NotebookNode) -> bool:
    """Return whether JupyterLab hides the source of a cell until a click."""
    return bool(cell.metadata.get("jupyter", {}).get("source_hidden"))


def _with_details(found: re.Match[str], title: str) -> str:
    summary = f"<summary>{html.escape(title)}</summary>"
    return found[0].replace(found[1], f"<details>{summary}{found[1]}</details>")


def _github_anchor(found: re.Match[str]) -> str:
    level, _, inner = found.groups()
    text = html.unescape(re.sub(r"<[^>]+>", "", inner)).strip().lower()
    anchor = re.sub(r"[^\w\- ]", "", text).replace(" ", "-")
    return f'<h{level} id="{anchor}">{inner}<a class="anchor-link" href="#{anchor}"'


def _site_link(found: re.Match[str]) -> str:
    """Return a link to the page of the site for a file of the project."""
    name, path, anchor = found.groups()
    path = path.replace("notebooks/README.md", "topics.md")
    path = path.removeprefix("../").removeprefix("notebooks/").removeprefix("docs/")
    if path.endswith((".md", ".ipynb")):
        stem, _, ending = path.rpartition(".")
        path = f"{stem.lower() if ending == 'md' else stem}.html"
    return f'{name}="{path}{anchor or ""}"'


def _navigation(pages: Sequence[Page], current: Page) -> str:
    def line(page: Page) -> str:
        here = ' aria-current="page"' if page is current else ""
        return f'<li><a href="{page.file}"{here}>{html.escape(page.title)}</a></li>'

    return "\n".join(map(line, pages))


def _previous_and_next(before: Page, after: Page, page: Page) -> str:
    links = [("←", before), ("→", after)]
    return " ".join(
        f'<a href="{each.file}">{arrow} {html.escape(each.title)}</a>'
        for arrow, each in links
        if each is not page
    )


def _style() -> str:
    """Return the style sheet, with the colors of code for light and dark pages."""
    light, dark = (
        HtmlFormatter(style=style).get_style_defs(".highlight") for style in STYLES.values()
    )
    own = (HERE / "style.css").read_text("utf-8")
    light, dark = f"{light}\n{_rank_styles(LIGHT)}", f"{dark}\n{_rank_styles(DARK)}"
    return f"{light}\n@media (prefers-color-scheme: dark) {{\n{dark}\n}}\n{own}"


def _rank_styles(colors: Sequence[str]) -> str:
    """Return rules that replace the terminal color of each rank by its readable page color."""
    seen = [tuple(bytes.fromhex(rank_color(rank)[1:])) for rank in range(len(colors))]
    return "\n".join(
        f'pre span[style="color: rgb({red},{green},{blue})"] {{ color: {color} !important; }}'
        for (red, green, blue), color in zip(seen, colors, strict=True)
    )
