"""Hooks of MkDocs: add the pages that are generated or lie outside ``docs/``, and adapt links.

The notebooks come from the folder that the environment variable ``EXECUTED`` names, with outputs
(tools/execute_course.py writes them), or else from ``notebooks/``, without outputs. So does a
notebook that is not in that folder, because it needs packages that were missing.
"""

from __future__ import annotations

import html
import os
import re
from argparse import SUPPRESS, Action
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import nbformat
from markdown.extensions.toc import slugify
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from mkdocs.structure.toc import AnchorLink

import nbddp
from nbddp.charts.palette import DARK, LIGHT, rank_color
from nbddp.extension.installed import installed
from nbddp.magics.parser import CELL, COMMANDS

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = ROOT / "notebooks"
COPIES = ROOT / "build" / "pages"  # of the notebooks, with folded cells
# the link to a file of the repository, as it is written in pages, and its place on the site
LINK = re.compile(r"(\]\(|\bsrc=\"|\bsrcset=\")(?!https?:|#)([^)\"#]+)(#[^)\"]+)?")
PICTURE = re.compile(r"<picture>.*?</picture>", re.DOTALL)
NOTEBOOK_LINK = re.compile(r'href="(?!https?:)(?:([^"#]*)\.(ipynb|md))?(#[^"]*)?"')
GENERATED = {  # a file of the repository, and the page that is made from it
    "nbddp/extensions/checks/rules.md": "reference/checks.md",
    "nbddp/magics/parser.py": "reference/options.md",
}
PAGES_AT_TOP = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "UNTRIED.md")


@event_priority(100)  # before mkdocs-jupyter looks for notebooks
def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are not in ``docs/``."""

    def add(uri: str, **source: Any) -> None:
        files.append(File.generated(config, uri, **source))

    add("index.md", content=(ROOT / "README.md").read_text("utf-8"))
    for name in PAGES_AT_TOP:
        add(name, content=(ROOT / name).read_text("utf-8"))
    add("LICENSE", abs_src_path=str(ROOT / "LICENSE"))
    add("course/README.md", content=(NOTEBOOKS / "README.md").read_text("utf-8"))
    for picture in sorted((NOTEBOOKS / "pictures").iterdir()):
        add(f"course/pictures/{picture.name}", abs_src_path=str(picture))
    executed = Path(os.environ.get("EXECUTED", NOTEBOOKS))
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        uri = f"course/{path.name}"
        (COPIES / uri).parent.mkdir(parents=True, exist_ok=True)
        copy = executed / path.name
        (COPIES / uri).write_text(_lesson(copy if copy.exists() else path), "utf-8")
        files.append(File(uri, str(COPIES), config.site_dir, config.use_directory_urls))
    add("reference/options.md", content="\n".join(_options()))
    add("reference/names.md", content="\n".join(_names()))
    add(
        "reference/checks.md",
        content=(ROOT / "nbddp/extensions/checks/rules.md").read_text("utf-8"),
    )
    add("rank_colors.css", content=_rank_colors())
    add("llms.txt", content=_llms(config))
    return files


def on_page_markdown(markdown: str, page: Page, **_more: Any) -> str:
    """Adapt links to files of the repository to the places of their pages."""
    uri = page.file.src_uri
    here = Path("notebooks") if uri.startswith("course/") else Path("docs", uri).parent
    if uri == "index.md" or uri in PAGES_AT_TOP:
        here = Path()
    depth = uri.count("/")

    def adapt(found: re.Match[str]) -> str:
        target = os.path.normpath(here / found[2])
        anchor = found[3] or ""
        if target.endswith(".ipynb"):
            anchor = _anchor(anchor)
        return f"{found[1]}{'../' * depth}{_place(target)}{anchor}"

    if uri.startswith("reference/"):
        return markdown
    return PICTURE.sub(_for_both_schemes, LINK.sub(adapt, markdown))


def _for_both_schemes(found: re.Match[str]) -> str:
    """Return a light and a dark picture: the theme hides one, also if the reader switches colors.

    A hidden picture is not loaded if it is lazy.
    """
    light = re.sub(r"\s*<source [^>]*color-scheme: dark[^>]*>", "", found[0])
    light = re.sub(r'(<img [^>]*src="[^"]+)"', r'\1#only-light" loading="lazy"', light)
    return light + light.replace("-light.", "-dark.").replace("#only-light", "#only-dark")


def on_page_content(content: str, page: Page, config: MkDocsConfig, **_more: Any) -> str:
    """Adapt the links of notebooks and their tables of contents, and add links that open them."""
    if not page.file.src_uri.endswith(".ipynb"):
        return content
    anchors = re.findall(r'<h\d id="([^"]+)"', content)
    for entry in _entries(page.toc):  # mkdocs-jupyter leaves out code in the anchor of a heading
        if entry.id not in anchors:
            entry.id = next((each for each in anchors if each.startswith(entry.id)), entry.id)
    content = NOTEBOOK_LINK.sub(_adapt_notebook_link, content)
    return _links_to_open(Path(page.file.src_uri).name, config.repo_url or "") + content


def _links_to_open(notebook: str, repository: str) -> str:
    """Return links that open a notebook of a repository on GitHub; "" without a repository.

    >>> print(_links_to_open("1.1_quickstart.ipynb", "https://github.com/a/b"))
    <p>Open in <a href="https://mybinder.org/v2/gh/a/b/HEAD?urlpath=lab/tree/notebooks/\
1.1_quickstart.ipynb">Binder</a> or
    <a href="https://colab.research.google.com/github/a/b/blob/HEAD/notebooks/\
1.1_quickstart.ipynb">Colab</a></p>
    """
    if not repository:
        return ""
    name = repository.removeprefix("https://github.com/").strip("/")
    binder = f"https://mybinder.org/v2/gh/{name}/HEAD?urlpath=lab/tree/notebooks/{notebook}"
    colab = f"https://colab.research.google.com/github/{name}/blob/HEAD/notebooks/{notebook}"
    return f'<p>Open in <a href="{binder}">Binder</a> or\n<a href="{colab}">Colab</a></p>'


def _entries(toc: Iterable[AnchorLink]) -> Iterator[AnchorLink]:
    for entry in toc:
        yield entry
        yield from _entries(entry.children)


def _place(path: str) -> str:
    """Return the place on the site of a file of the repository.

    >>> [_place(each) for each in ("README.md", "docs/panel.md", "notebooks/2.2_faults.ipynb")]
    ['index.md', 'panel.md', 'course/2.2_faults.ipynb']
    """
    if path == "README.md":
        return "index.md"
    path = GENERATED.get(path, path)
    return re.sub("^docs/", "", re.sub("^notebooks/", "course/", path))


def _anchor(anchor: str) -> str:
    """Return the anchor of a notebook's heading on the site for the one in JupyterLab.

    >>> _anchor("#Every-change,-written-out")
    '#every-change-written-out'
    """
    words = unquote(html.unescape(anchor)).removeprefix("#").replace("-", " ")
    return f"#{slugify(words, '-')}" if words else ""


def _adapt_notebook_link(found: re.Match[str]) -> str:
    if found[1] is None:
        return f'href="{_anchor(found[3] or "")}"'
    target = os.path.normpath(Path("notebooks") / f"{found[1]}.{found[2]}")
    return f'href="../{_place(target).rpartition(".")[0]}.html{_anchor(found[3] or "")}"'


# ---- notebooks


def _lesson(path: Path) -> str:
    """Return a notebook in which cells with a hidden source are folded."""
    notebook = nbformat.read(path, as_version=4)
    cells = []
    for cell in notebook.cells:
        is_hidden = cell.metadata.get("jupyter", {}).get("source_hidden")
        if not is_hidden:
            cells.append(cell)
            continue
        title = cell.source.partition("\n")[0].removeprefix("# ")
        folded = (
            f"<details><summary>{title}</summary>\n\n```python\n{cell.source}\n```\n\n</details>"
        )
        cells.append(nbformat.v4.new_markdown_cell(folded))
        if cell.outputs:
            cells.append(nbformat.v4.new_code_cell(outputs=cell.outputs))
    notebook.cells = cells
    return str(nbformat.writes(notebook))


def _rank_colors() -> str:
    """Return rules that replace the terminal color of each rank by its readable page color."""
    seen = [tuple(bytes.fromhex(rank_color(rank)[1:])) for rank in range(len(LIGHT))]
    return "\n".join(
        f'[data-md-color-scheme="{scheme}"] pre span[style*="rgb({red},{green},{blue})"] '
        f"{{ color: {color} !important; }}"
        for scheme, colors in (("default", LIGHT), ("slate", DARK))
        for (red, green, blue), color in zip(seen, colors, strict=True)
    )


# ---- reference


def _options() -> Iterator[str]:
    """Yield the options of a cell and all commands, as ``%ddp help`` knows them."""
    yield "# All options and commands\n"
    yield "This page is made from the texts of `%ddp help COMMAND` and `%%ddp?`.\n"
    for title, parser in {"%%ddp": CELL, **{f"%ddp {n}": p for n, p in COMMANDS.items()}}.items():
        yield f"## {title}\n\n{parser.description}\n"
        rows = [_row(each) for each in parser._actions if each.help not in (None, SUPPRESS)]
        yield "\n".join(["| | |", "|---|---|", *rows, ""] if rows else [])
        if parser.epilog:
            yield f"{parser.epilog}\n"


def _row(action: Action) -> str:
    """Return a row of a table: how an option or argument is written, and what it does."""
    names = action.option_strings or [str(action.metavar or action.dest)]
    value = "" if not action.option_strings or action.nargs == 0 else str(action.metavar or "")
    if action.choices and action.option_strings:
        value = "|".join(map(str, action.choices))
    usage = [f"{each} {value}".strip() for each in names]
    shown = " ".join(f"<code>{html.escape(each).replace('|', '&#124;')}</code>" for each in usage)
    return f"| {shown} | {str(action.help).replace('|', '&#124;')} |"


def _llms(config: MkDocsConfig) -> str:
    """Return the list of pages for language models; see https://llmstxt.org."""
    lines = [f"# {config.site_name}", f"> {config.site_description}"]
    for section in config.nav or []:
        for title, entries in section.items():
            lines.append(f"## {title}")
            for entry in entries:
                uri = entry if isinstance(entry, str) else next(iter(entry.values()))
                lines.append(f"- [{Path(uri).stem}]({uri.rpartition('.')[0]}.html)")
    return "\n\n".join(lines[:2]) + "\n\n" + "\n".join(lines[2:]) + "\n"


def _names() -> Iterator[str]:
    yield "# Public names\n"
    yield "All names of `import nbddp`, from their docstrings.\n"
    for name in nbddp.__all__:
        if not name.endswith("_ipython_extension"):
            value = getattr(nbddp, name)
            module = getattr(value, "__module__", "")
            path = value.__name__ if not module else f"{module}.{value.__qualname__}"
            yield f"::: {path}\n"
    for extension in installed().values():
        for target in extension.group_methods.values():
            yield f"::: {target.replace(':', '.')}\n"
