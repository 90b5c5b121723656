"""What is written about the package is true of it: README, docs, docstrings, links."""

from __future__ import annotations

import ast
import inspect
import re
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

import pytest
from IPython.core.inputtransformer2 import TransformerManager
from PIL import Image

import nbddp
from nbddp.magics.parser import CELL, COMMANDS
from nbddp.train.faults import KINDS

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()
NOTEBOOKS = ROOT / "notebooks"
REFERENCE = (ROOT / "docs/reference.md").read_text()
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
FOR_USERS = "\n".join(path.read_text() for path in PAGES if path.stem != "CONTRIBUTING")


def parsers() -> dict[str, ArgumentParser]:
    """Every magic's parser, by what one types."""
    return {"%%ddp": CELL, **{f"%ddp {name}": parser for name, parser in COMMANDS.items()}}


def options(parser: ArgumentParser) -> set[str]:
    return {
        option
        for action in parser._actions
        for option in action.option_strings
        if option.startswith("--")
    }


def public_functions() -> list[Any]:
    """The public names that one calls, methods of public classes among them."""
    found: list[Any] = []
    for name in nbddp.__all__:
        thing = getattr(nbddp, name)
        if inspect.isfunction(thing) and "ipython" not in name:
            found.append(thing)
        elif inspect.isclass(thing) and not issubclass(thing, Exception):
            members = {key: getattr(each, "__func__", each) for key, each in vars(thing).items()}
            found += [
                each for key, each in members.items() if inspect.isfunction(each) and key[0] != "_"
            ]
        elif inspect.ismodule(thing):
            found += [getattr(thing, each) for each in ("at", "armed", "clear")]
    return found


def test_the_readme_is_read_in_two_minutes_and_leads_to_every_page() -> None:
    assert len(README.split()) <= 1500
    linked = {ROOT / target for target in re.findall(r"\]\(([^)#:]+)", README)}
    assert set(PAGES) - {ROOT / "README.md"} <= linked


def test_the_reference_names_every_command_and_every_option_of_a_cell() -> None:
    everything = parsers()
    commands = {name.removeprefix("%ddp ") for name in everything} - {"%%ddp", "help"}
    table = REFERENCE[REFERENCE.index("| on a line |") :]
    shown = set(re.findall(r"\w+", " ".join(re.findall(r"`([^`]+)`", table))))
    assert commands <= shown
    flags = options(everything["%%ddp"]) - {"--help", "--auto"}  # the auto mode's own
    assert flags <= set(re.findall(r"--[a-z-]+", FOR_USERS))


def test_the_pages_use_only_options_that_there_are() -> None:
    ours = set().union(*map(options, parsers().values()))
    others = {  # of pip, torchrun, Jupyter and our installer
        *("--test", "--execute", "--to", "--no-input", "--stdout"),
        *("--standalone", "--nproc-per-node", "--max-restarts"),
        *("--node-rank", "--nnodes", "--rdzv-backend", "--rdzv-endpoint", "--join"),
        "--lr",  # of a script
    }
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", FOR_USERS)) <= ours | others


def test_every_kind_of_fault_is_written_about() -> None:
    [line] = [each for each in REFERENCE.splitlines() if each.startswith("| `%ddp fault")]
    docstring, help_text = nbddp.faults.at.__doc__ or "", parsers()["%ddp fault"].format_help()
    for kind in KINDS:
        assert f"`{kind}`" in line
        assert f"``{kind}``" in docstring
        assert kind in help_text


def test_the_pages_use_only_names_that_there_are_and_all_of_them() -> None:
    names = set(re.findall(r"\bnbddp\.([A-Za-z_]+)", FOR_USERS))
    assert names - {"nbddp", "worker"} <= set(nbddp.__all__)
    public = {name for name in nbddp.__all__ if not name[0].isupper() or name == "Checkpoint"}
    assert public - {"load_ipython_extension", "unload_ipython_extension"} <= set(
        re.findall(r"\w+", FOR_USERS)
    )


def test_the_moving_picture_is_there_for_light_and_dark_and_is_small() -> None:
    for theme in ("light", "dark"):
        name = f"notebooks/pictures/heal-{theme}.webp"
        assert name in README
        with Image.open(ROOT / name) as picture:
            assert picture.is_animated
            assert picture.n_frames > 20
        assert (ROOT / name).stat().st_size < 500 * 1024
    assert README.index("prefers-reduced-motion") < README.index("heal-dark")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_and_pictures_lead_somewhere_and_code_can_be_read(page: Path) -> None:
    text = page.read_text()
    targets = re.findall(r'\]\(([^)#:]+)\)|(?:src|srcset)="([^":]+)"', text)
    assert [a or b for a, b in targets if not (page.parent / (a or b)).exists()] == []
    for block in re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        body = block.split("\n", 1)[1] if block.startswith("%%") else block
        ast.parse(TransformerManager().transform_cell(body))


def test_the_map_of_the_course_names_all_notebooks_and_says_how_each_topic_is_taught() -> None:
    """That its links lead to headings which are there, ``tests/test_book.py`` sees."""
    text = (NOTEBOOKS / "README.md").read_text()
    links = re.findall(r"\[([^\]]+)\]\((\d\d_\w+\.ipynb)(#[^)]+)?\)", text)
    notebooks = sorted(path.name for path in NOTEBOOKS.glob("*.ipynb"))
    assert [name for _, name, anchor in links if not anchor][: len(notebooks)] == notebooks
    numbered = [(re.match(r"\d\d", text), name) for text, name, _ in links]
    assert [name for number, name in numbered if number and not name.startswith(number[0])] == []
    table = text[text.index("| topic | where | |") :].split("\n")[2:]
    topics = [row.strip("| ").split(" | ") for row in table if row.startswith("| ")]
    topics = [row for row in topics if row[0] != "topic" and "---" not in row[0]]
    assert len(topics) > 30
    told = re.compile(r"\b(live|told|reckoned)\b")
    assert [row for row in topics if "](" not in row[1] or not told.search(row[2])] == []


def test_contributing_names_every_room_and_only_files_that_there_are() -> None:
    rooms = {
        path.stem
        for path in (ROOT / "nbddp").iterdir()
        if (path.is_dir() or path.suffix == ".py") and not path.name.startswith("__")
    }
    assert rooms - set(re.findall(r"\w+", CONTRIBUTING)) == set()
    files = re.findall(r"`((?:nbddp|tests)/[\w/]+(?:\.py)?)`", CONTRIBUTING)
    assert [name for name in files if not (ROOT / name).exists()] == []


def gaps(function: Any) -> set[str]:
    """What a function takes, raises or returns, and its docstring or ours does not tell."""
    words = set(re.findall(r"\w+", inspect.getdoc(function) or ""))
    signature, plain = inspect.signature(function), inspect.unwrap(function)
    named = {
        name
        for name, each in signature.parameters.items()
        if name not in ("self", "cls") and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
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


def test_public_functions_say_what_goes_in_and_what_comes_out() -> None:
    functions = {each.__qualname__: each for each in public_functions()}
    assert {name: found for name, each in functions.items() if (found := gaps(each))} == {}


def test_the_kit_and_its_classes_show_examples_that_run_as_doctests() -> None:
    shown = ["Checkpoint", "Resumed", "WorkerGroup", "Topology"]
    for name in nbddp.__all__:
        thing = getattr(nbddp, name)
        if inspect.isfunction(thing) and thing.__module__.startswith("nbddp.train"):
            shown.append(name)
    assert len(shown) > 10
    docs = {name: inspect.getdoc(getattr(nbddp, name)) or "" for name in shown}
    assert [name for name, doc in docs.items() if ">>> " not in doc] == []


def test_every_module_says_what_it_is_for() -> None:
    # read, not imported: some need a package that nbddp does not
    paths = list((ROOT / "nbddp").rglob("*.py"))
    assert len(paths) > 10
    assert [path for path in paths if not ast.get_docstring(ast.parse(path.read_text()))] == []
