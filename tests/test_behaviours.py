"""Check that each behaviour for users has a test in the table ``behaviours.ini``."""

import ast
import inspect
import re
from argparse import ArgumentParser
from configparser import ConfigParser
from dataclasses import fields, is_dataclass
from pathlib import Path

import nbddp
from nbddp.__main__ import command_parser
from nbddp.extensions.checks import registry
from nbddp.extensions.checks.checker import ALL_RULES
from nbddp.extensions.faults.arming import KINDS
from nbddp.magics.parser import CELL, COMMANDS

TESTS = Path(__file__).parent
TABLE = ConfigParser(delimiters=("=",), interpolation=None)
TABLE.optionxform = str  # type: ignore[assignment, method-assign]
TABLE.read(TESTS / "behaviours.ini")
WRITTEN = ("failures", "panel")  # sections that no list of the package has

# files that a file of tests reads, with the ids that its tests go through
DATA = {
    "extensions/checks/test_checks.py": [Path(registry.__file__).with_name("rules.md")],
}
# text that a test has instead of the name: a magic, or the function that returns the object
INSTEAD = {
    "--auto": ["%ddp auto on"],
    "Digits": ["digits"],
    "Healed": ["heal"],
    "StepMemory": ["memory_of_step"],
    "Trace": ["trace"],
    "Track": ["track"],
    "load_ipython_extension": ["%load_ext nbddp"],
    "unload_ipython_extension": ["%unload_ext nbddp"],
}


def options(parser: ArgumentParser) -> dict[str, list[str]]:
    """Return the arguments of a command by longest name, each with all names."""
    actions = [each for each in parser._actions if each.dest != "help"]
    return {
        max(action.option_strings, key=len, default=action.dest): [*action.option_strings]
        for action in actions
    }


def public_names() -> dict[str, list[str]]:
    """Return the public names, and public methods and attributes of public classes.

    The fields of a dataclass have no rows: every use of the class reads them.
    """
    names: dict[str, list[str]] = {}
    for name in nbddp.__all__:
        thing, members = getattr(nbddp, name), []
        if inspect.isclass(thing) and not issubclass(thing, Exception):
            field_names = {each.name for each in fields(thing)} if is_dataclass(thing) else set()
            members = [each for each in vars(thing) if each[0] != "_" and each not in field_names]
        elif inspect.ismodule(thing):
            members = thing.__all__
        names |= {name: [name]} | {f"{name}.{each}": [each] for each in members}
    return names


def behaviours() -> dict[str, dict[str, list[str]]]:
    """Return all behaviours by section and row, with the names that their test files mention."""
    parsers: dict[str, ArgumentParser] = {"%%ddp": CELL}
    parsers |= {f"%ddp {name}": parser for name, parser in COMMANDS.items()}
    parsers |= {f"nbddp {name}": parser for name, (*_, parser) in command_parser()[1].items()}
    found = {}
    for magic, parser in parsers.items():
        word = magic.rpartition(" ")[2]  # an argument without dashes has no name in a line
        rows = {name: names or [word] for name, names in options(parser).items()}
        found[magic] = rows | {"runs": [word]}
    found |= {
        "rules": {each: [each] for each in ALL_RULES},
        "faults": {each: [each] for each in KINDS},
    }
    return found | {"names": public_names()}


def functions_in(name: str) -> set[str]:
    nodes = ast.walk(ast.parse((TESTS / name).read_text()))
    functions = [each.name for each in nodes if isinstance(each, ast.FunctionDef)]
    return {f"{name}::{each}" for each in functions if each.startswith("test_")}


def test_table_has_a_row_for_each_behaviour_and_names_existing_tests() -> None:
    rows = {name: set(TABLE[name]) for name in TABLE.sections() if name not in WRITTEN}
    assert rows == {name: set(each) for name, each in behaviours().items()}
    named = {test for rows in TABLE.values() for test in rows.values()}
    files = {name.partition("::")[0] for name in named}
    assert named - set().union(*map(functions_in, files)) == set()


def test_test_file_mentions_the_behaviour_of_its_row() -> None:
    texts: dict[str, str] = {}
    unnamed = []
    for section, rows in behaviours().items():
        for row, names in rows.items():
            file = TABLE[section][row].partition("::")[0]
            if file not in texts:
                paths = [TESTS / file, *DATA.get(file, [])]
                texts[file] = "\n".join(path.read_text() for path in paths)
            words = "|".join(map(re.escape, INSTEAD.get(row, names)))
            if not re.search(rf"(?<![\w-])({words})(?![\w-])", texts[file]):
                unnamed.append(f"{section}: {row} in {file}")
    assert unnamed == []
