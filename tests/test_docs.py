"""The pages of the documentation agree with the package, and the course becomes a site.

The build of the site checks all links and pictures.
"""

import ast
import html
import inspect
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import nbformat
import pytest
from IPython.core.inputtransformer2 import TransformerManager
from PIL import Image

import nbddp
from nbddp.__main__ import command_parser
from nbddp.extension.installed import installed
from nbddp.extensions.faults.arming import KINDS
from nbddp.magics.magic_parser import MagicParser
from nbddp.magics.parser import CELL, COMMANDS, parse_line
from tools import docstring_examples, site_hooks
from tools.dead_links import dead_links

ROOT = Path(__file__).parents[1]
NOTEBOOKS = ROOT / "notebooks"
README = (ROOT / "README.md").read_text()
DEVELOPMENT = [ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs/development").glob("*.md"))]
PACKAGES = (ROOT / "docs/development/packages.md").read_text()
REFERENCE = (ROOT / "docs/reference.md").read_text()
USER_PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES = [*USER_PAGES, *DEVELOPMENT]
FOR_USERS = "\n".join(path.read_text() for path in USER_PAGES)
KIT = (
    "extensions.course.digits",
    "extensions.course.sonnets",
    "extensions.memory.step_memory",
    "extensions.faults",
    "extensions.train",
    "reporting",
)

LINES = re.MULTILINE | re.DOTALL


def parsers() -> dict[str, MagicParser[Any]]:
    """Return the parser of each magic, by its command."""
    return {"%%ddp": CELL, **{f"%ddp {name}": parser for name, parser in COMMANDS.items()}}


def public_functions() -> list[Any]:
    """Return the public functions, with methods of public classes."""
    found: list[Any] = []
    for name in nbddp.__all__:
        thing = getattr(nbddp, name)
        if inspect.isfunction(thing) and "ipython" not in name:
            found.append(thing)
        elif inspect.isclass(thing) and not issubclass(thing, Exception):
            members = {key: getattr(each, "__func__", each) for key, each in vars(thing).items()}
            found += [
                member
                for key, member in members.items()
                if inspect.isfunction(member) and key[0] != "_"
            ]
        elif inspect.ismodule(thing):
            found += [getattr(thing, each) for each in ("at", "armed", "clear")]
    return found


def linked(page: str) -> set[Path]:
    """Return the files to which a page in the root links."""
    return {ROOT / target for target in re.findall(r"\]\(([^)#:]+)", page)}


def test_readme_and_contributing_are_short_and_link_to_every_page() -> None:
    assert len(README.split()) <= 1500
    assert {*USER_PAGES, ROOT / "CONTRIBUTING.md"} - {ROOT / "README.md"} <= linked(README)
    contributing = DEVELOPMENT[0].read_text()
    assert len(contributing.encode()) <= 6000
    assert set(DEVELOPMENT[1:]) <= linked(contributing)
    assert len(DEVELOPMENT) > 4


def test_overview_of_commands_is_short_and_names_and_links_every_command() -> None:
    assert set(COMMANDS) <= set(re.findall(r"`%ddp ([\w-]+)", REFERENCE))
    assert len(REFERENCE.split()) <= 900
    rows = re.findall(r"^\| (`.+) \| (.+) \|$", REFERENCE, re.MULTILINE)
    assert len(rows) > 30
    assert [row for row in rows if max(len(cell.split()) for cell in row) > 25] == []
    assert [row for row in rows if "](" not in row[1]] == []


def test_pages_use_only_existing_options() -> None:
    of_terminal = [parser for _, _, parser in command_parser()[1].values()]
    all_parsers = [*parsers().values(), *of_terminal]
    ours = {name for parser in all_parsers for name in parser._option_string_actions}
    others = {  # of pip, torchrun, Jupyter, Docker and our installer
        *("--test", "--execute", "--to", "--no-input", "--stdout"),
        *("--standalone", "--nproc-per-node", "--max-restarts"),
        *("--node-rank", "--nnodes", "--rdzv-backend", "--rdzv-endpoint", "--join"),
        "--shm-size",
        "--lr",  # of a script
    }
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", FOR_USERS)) <= ours | others


def test_every_kind_of_fault_is_documented() -> None:
    [line] = [each for each in REFERENCE.splitlines() if each.startswith("| `%ddp fault")]
    docstring, help_text = nbddp.faults.at.__doc__ or "", parsers()["%ddp fault"].format_help()
    for kind in KINDS:
        assert f"`{kind}`" in line
        assert f"``{kind}``" in docstring
        assert kind in help_text


def test_pages_use_all_public_names_and_no_others() -> None:
    names = set(re.findall(r"\bnbddp\.([A-Za-z_]+)", FOR_USERS))
    assert names - {"nbddp", "nodes"} <= set(nbddp.__all__)
    public = {name for name in nbddp.__all__ if not name[0].isupper() or name == "Checkpoint"}
    assert public - {"load_ipython_extension", "unload_ipython_extension"} <= set(
        re.findall(r"\w+", FOR_USERS)
    )


def test_pictures_of_cells_are_small_exist_for_both_themes_and_are_on_a_page() -> None:
    tool = (ROOT / "tools" / "take_pictures.py").read_text()
    taken = {"heal", *re.findall(r'^    "(\w+)": Scene\(', tool, re.MULTILINE)}
    texts = "".join(page.read_text() for page in PAGES)
    for name in taken:
        for theme in ("light", "dark"):
            picture, is_film = f"notebooks/pictures/{name}-{theme}.webp", name == "heal"
            assert picture in (README if is_film else texts)
            assert (ROOT / picture).stat().st_size < (500 if is_film else 120) * 1024
            with Image.open(ROOT / picture) as opened:
                assert (getattr(opened, "n_frames", 1) > 20) is is_film
    assert README.index("prefers-reduced-motion") < README.index("heal-dark")
    assert taken == set(re.findall(r"pictures/(\w+)-light\.", texts))


def test_how_to_pages_have_an_example_before_their_first_heading() -> None:
    nav = (ROOT / "mkdocs.yml").read_text()
    names = re.findall(r"- (\w+\.md)", nav[nav.index("- How to:") : nav.index("- Reference:")])
    features = {*names, "panel.md"} - {"teaching.md"}
    assert len(features) > 9
    pages = {name: (ROOT / "docs" / name).read_text() for name in features}
    openings = {name: text.split("\n## ")[0] for name, text in pages.items()}
    assert [name for name, opening in openings.items() if "```" not in opening] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_python_code_of_pages_parses(page: Path) -> None:
    for block in re.findall(r"^```python\n(.*?)^```", page.read_text(), LINES):
        body = block.split("\n", 1)[1] if block.startswith("%%") else block
        ast.parse(TransformerManager().transform_cell(body))


def test_course_map_lists_all_notebooks_and_how_each_topic_is_taught() -> None:
    text = (NOTEBOOKS / "README.md").read_text()
    links = re.findall(r"\[([^\]]+)\]\(([\dA]\S*?_\w+\.ipynb)(#[^)]+)?\)", text)
    notebooks = sorted(path.name for path in NOTEBOOKS.glob("*.ipynb"))
    assert [name for _, name, anchor in links if not anchor][: len(notebooks)] == notebooks
    numbered = [(re.match(r"(\d\.|A)\d\b", text), name) for text, name, _ in links]
    assert [name for number, name in numbered if number and not name.startswith(number[0])] == []
    table = text[text.index("| topic | where | |") :].split("\n")[2:]
    topics = [row.strip("| ").split(" | ") for row in table if row.startswith("| ")]
    topics = [row for row in topics if row[0] != "topic" and "---" not in row[0]]
    assert len(topics) > 30
    told = re.compile(r"\b(live|told|calculated)\b")
    assert [row for row in topics if "](" not in row[1] or not told.search(row[2])] == []


def test_packages_page_names_every_package_and_its_picture_has_the_layers_of_pyproject() -> None:
    packages = {
        path.stem
        for path in (ROOT / "nbddp").iterdir()
        if (path.is_dir() or path.suffix == ".py") and not path.name.startswith("__")
    }
    assert packages - set(re.findall(r"\w+", PACKAGES)) == set()
    picture = PACKAGES.split("```")[1].strip().splitlines()
    contracts = (ROOT / "pyproject.toml").read_text()
    [layers] = re.findall(r'^containers = \["nbddp"\]$.*?^layers = \[(.*?)^\]', contracts, LINES)
    rows = [re.findall(r"\w+", row) for row in re.findall(r'"(.+)"', layers)]
    assert [re.findall(r"\w+", row.split("  ")[0]) for row in picture] == rows
    assert {name for row in rows for name in row} == packages


def test_files_in_the_tables_of_packages_exist_and_have_the_names_of_their_rows() -> None:
    missing, found = [], 0
    for row in PACKAGES.partition("\n## Where to make a change\n")[2].splitlines():
        if not row.startswith("| "):
            continue
        words = re.findall(r"`([^`]+)`", row)
        files = {word: files_of(word) for word in words if re.search(r"[/*]|\.py$", word)}
        text = "\n".join(path.read_text() for paths in files.values() for path in paths)
        names = [word for word in words if re.fullmatch(r"[A-Z_a-z]\w*(\.\w+)?", word)]
        names = [name for name in names if not name.endswith((".py", ".css", ".md", ".json"))]
        found += len(names) + len(files)
        missing += [word for word, paths in files.items() if not paths]
        missing += [name for name in names if not re.search(rf"\b{name.split('.')[-1]}\b", text)]
    assert found > 100
    assert missing == []


def files_of(place: str) -> list[Path]:
    """Return the files of a place in the tables of packages.md; empty if it names no place."""
    folder = place.removesuffix("/")
    return [
        path
        for found in (ROOT / "nbddp").glob(folder)
        for path in (found.rglob("*.py") if found.is_dir() else [found])
    ]


def test_pages_for_developers_name_only_existing_files() -> None:
    text = "\n".join(page.read_text() for page in DEVELOPMENT)
    names = re.findall(r"`((?:nbddp|tests|tools|binder)/[\w/]+(?:\.\w+)?)`", text)
    assert [name for name in names if not (ROOT / name).exists()] == []


def gaps(function: Any) -> set[str]:
    """Return arguments, errors or results of a function that its docstring does not document."""
    words = set(re.findall(r"\w+", inspect.getdoc(function) or ""))
    signature, plain = inspect.signature(function), inspect.unwrap(function)
    named = {
        name
        for name, parameter in signature.parameters.items()
        if name not in ("self", "cls")
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    }
    named |= set(re.findall(r"^\s+raise (\w+Error)\(", inspect.getsource(plain), re.MULTILINE))
    found = (named - words) if words else {"no docstring"}
    for name in re.findall(r"\w+", str(signature.return_annotation)):
        returned = plain.__globals__.get(name)
        if inspect.isclass(returned) and returned.__module__.startswith("nbddp"):
            is_public = name in [*nbddp.__all__, *nbddp.faults.__all__]
            if not is_public or len(inspect.getdoc(returned) or "") <= 60:
                found.add(name)
    return found


def test_public_functions_document_arguments_returns_and_raises() -> None:
    functions = {each.__qualname__: each for each in public_functions()}
    assert {name: found for name, each in functions.items() if (found := gaps(each))} == {}


def test_training_kit_docstrings_have_doctest_examples() -> None:
    shown = ["Checkpoint", "Resumed", "WorkerGroup", "Topology"]
    for name in nbddp.__all__:
        thing = getattr(nbddp, name)
        if inspect.isfunction(thing) and thing.__module__.startswith(
            tuple(f"nbddp.{name}" for name in KIT)
        ):
            shown.append(name)
    assert len(shown) > 10
    docs = {name: inspect.getdoc(getattr(nbddp, name)) or "" for name in shown}
    assert [name for name, doc in docs.items() if ">>> " not in doc] == []


def test_folded_cell_of_a_notebook_is_collapsed_under_its_first_line() -> None:
    found = 0
    for path in NOTEBOOKS.glob("*.ipynb"):
        on_site = nbformat.reads(site_hooks._lesson(path), as_version=4).cells
        for cell in nbformat.read(path, as_version=4).cells:
            if cell.metadata.get("jupyter", {}).get("source_hidden"):
                title = cell.source.partition("\n")[0].removeprefix("# ")
                folded = f"<details><summary>{title}</summary>\n\n```python\n{cell.source}\n```"
                assert any(each.source.startswith(folded) for each in on_site)
                found += 1
    assert found


def test_the_generated_pages_have_all_options_commands_and_public_names() -> None:
    shown = html.unescape("\n".join(site_hooks._options()))
    for name, parser in parsers().items():
        section = shown.partition(f"## {name}\n")[2].partition("\n## ")[0]
        assert all(f"<code>{option}" in section for option in parser.options()), name
    names = [each for each in nbddp.__all__ if "ipython" not in each]
    names += [name for each in installed().values() for name in each.group_methods]
    assert len(re.findall("(?m)^::: nbddp", "\n".join(site_hooks._names()))) == len(names)


def test_the_example_of_each_command_has_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    # no tracker is installed
    monkeypatch.setattr("nbddp.extensions.publish.notebook.require_package", lambda _kind: None)
    for name, parser in COMMANDS.items():
        example = re.search(rf"%ddp {name} (.*)`", parser.epilog or "")
        parse_line(parser, example[1] if example else "")


def test_a_picture_on_the_site_follows_the_colors_that_the_reader_chose() -> None:
    page: Any = SimpleNamespace(file=SimpleNamespace(src_uri="panel.md"))
    written = """<picture>
  <source media="(prefers-color-scheme: dark)" srcset="../notebooks/pictures/panel-dark.webp">
  <img alt="A panel" src="../notebooks/pictures/panel-light.webp" width="720">
</picture>"""
    light, dark = site_hooks.on_page_markdown(written, page).split("</picture>")[:2]
    for shown, scheme, other in ((light, "light", "dark"), (dark, "dark", "light")):
        assert f'src="course/pictures/panel-{scheme}.webp#only-{scheme}"' in shown
        assert other not in shown


def test_examples_in_docstrings_are_fenced_and_roles_are_code() -> None:
    text = docstring_examples.prepare("Do it with :func:`~nbddp.log`.\n\n>>> 1\n1\n\nThe rest.")
    assert text == "Do it with `log`.\n\n```pycon\n>>> 1\n1\n```\n\nThe rest."


def test_dead_links_finds_missing_targets(tmp_path: Path) -> None:
    page = '<a href="{}">x</a><h1 id="here">x</h1>'
    (tmp_path / "b.html").write_text('<img src="here.png"><source srcset="a.html">')
    (tmp_path / "here.png").touch()
    gone = ("other.html", "#there", "a.html#there", "b.html#here", "pictures/x.png")
    there = ("a.html", "#here", "a.html#here", "here.png")
    for target in (*gone, *there, "https://x.org/y#z", "data:,x", "mailto:a@b.c"):
        (tmp_path / "a.html").write_text(page.format(target))
        assert dead_links(tmp_path) == ([f"a.html: {target}"] if target in gone else [])
