"""What is written about the package is true of it: README, docs, docstrings, links."""

from __future__ import annotations

import ast
import inspect
import re
from argparse import ArgumentParser
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from IPython.core.inputtransformer2 import TransformerManager
from PIL import Image

import nbddp
from nbddp.magics.cell import CellMagics
from nbddp.magics.line import LineMagics
from nbddp.train.faults import KINDS

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()
REFERENCE = (ROOT / "docs/reference.md").read_text()
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
FOR_USERS = "\n".join(path.read_text() for path in PAGES if path.stem != "CONTRIBUTING")


def parsers() -> dict[str, ArgumentParser]:
    """Every magic's parser, by what one types."""
    line = LineMagics(Mock(shell=None))
    found = {f"%ddp {name}": parser for name, parser in line.parsers().items()}
    cell: Any = CellMagics.ddp
    return found | {"%%ddp": cell.parser}


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


def test_contributing_names_every_room_and_only_files_that_there_are() -> None:
    package = ROOT / "nbddp"
    rooms = {
        path.stem
        for path in package.iterdir()
        if (path.is_dir() or path.suffix == ".py") and not path.name.startswith("__")
    }
    assert rooms <= set(re.findall(r"\w+", CONTRIBUTING))
    for name in re.findall(r"`((?:nbddp|tests)/[\w/]+(?:\.py)?)`", CONTRIBUTING):
        assert (ROOT / name).exists(), name


@pytest.mark.parametrize("function", public_functions(), ids=lambda each: each.__qualname__)
def test_a_public_function_says_what_goes_in_and_what_comes_out(function: Any) -> None:
    doc = inspect.getdoc(function) or ""
    assert doc
    signature = inspect.signature(function)
    for name, each in signature.parameters.items():
        if name not in ("self", "cls") and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD):
            assert re.search(rf"\b{name}\b", doc), f"{name} is not explained"
    raised = _raised_in(function)
    assert raised <= set(re.findall(r"\w+Error", doc)), "an error is not named"


def _raised_in(function: Any) -> set[str]:
    source = inspect.getsource(inspect.unwrap(function))
    return set(re.findall(r"^\s+raise (\w+Error)\(", source, re.MULTILINE))


KIT = sorted(
    name
    for name in nbddp.__all__
    if getattr(getattr(nbddp, name), "__module__", "").startswith("nbddp.train")
    and inspect.isfunction(getattr(nbddp, name))
)


@pytest.mark.parametrize("name", [*KIT, "Checkpoint", "Resumed", "WorkerGroup", "Topology"])
def test_it_shows_examples_that_run_as_doctests(name: str) -> None:
    assert ">>> " in (inspect.getdoc(getattr(nbddp, name)) or "")


@pytest.mark.parametrize("function", public_functions(), ids=lambda each: each.__qualname__)
def test_what_a_public_function_returns_is_public_and_told_of(function: Any) -> None:
    returned = str(inspect.signature(function).return_annotation)
    for name in re.findall(r"\w+", returned):
        found = inspect.unwrap(function).__globals__.get(name)
        if inspect.isclass(found) and found.__module__.startswith("nbddp"):
            assert name in [*nbddp.__all__, *nbddp.faults.__all__]
            assert len(inspect.getdoc(found) or "") > 60


def test_every_module_says_what_it_is_for() -> None:
    for path in (ROOT / "nbddp").rglob("*.py"):
        # read, not imported: some need a package that nbddp does not
        assert (ast.get_docstring(ast.parse(path.read_text())) or "").strip(), path
