"""The page of private names lists each one that nbddp uses, and no other."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "nbddp"
PAGE = ROOT / "docs" / "development" / "private_names.md"

DOCUMENTED = {  # the documentation of its library describes the name
    "_asdict": "collections.namedtuple",
    "_exit": "os",
    "_fields": "collections.namedtuple",
    "_fields_": "ctypes.Structure",
    "_getframe": "sys",
    "_is_gil_enabled": "sys",
    "_name_": "enum.Enum",
    "_render_traceback_": "IPython",
    "_replace": "collections.namedtuple",
    "_repr_png_": "IPython",
    "_timestamp": "a column of each W&B run",
}
OWN = {  # names of nbddp that a file takes from elsewhere, or that are only text
    "_NUM_THREADS": "the end of the names of environment variables",
    "_RANK": "in the code of an exported script",
    "_Z": "begins the symbols of C++",
    "_ZTV": "begins the symbols of C++",
    "_args": "in the code of an exported script",
    "_dist": "in the code of an exported script",
    "_drop_accumulation": "nbddp.precision",
    "_group": "WorkerGroup, in its methods that are in an extension",
    "_group_options": "in the code of an exported script",
    "_init_process_group": "in the code of an exported script",
    "_ipython_extension": "the end of load_ipython_extension",
    "_nbddp": "the attribute of a shell",
    "_nbddp_live": "the attribute of a kernel",
    "_optimizer": "nbddp.precision",
    "_per_second": "the end of the names of rates",
    "_print_value": "in the code of an exported script",
    "_pushed": "in the code of an exported script",
    "_request": "WorkerGroup, in its methods that are in an extension",
    "_run": "WorkerGroup, in its methods that are in an extension",
    "_wait_for_all": "in the code of an exported script",
    "_way_out": "nbddp's errors of pickling",
    "_what": "nbddp's errors of pickling",
}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and len(name) > 1


def defined_names(tree: ast.AST) -> Iterator[str]:
    """Yield the names that a file defines itself."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield name
            case ast.ClassDef(name=name) | ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name):
                yield name
            case ast.Attribute(value=ast.Name("self" | "cls"), attr=name, ctx=ast.Store()):
                yield name


def used_names(tree: ast.AST) -> Iterator[str]:
    """Yield the names of attributes and imports, and those in strings such as "a._b"."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Load()) | ast.Attribute(attr=name):
                yield name
            case ast.ImportFrom(module=module, names=names):
                yield from (module or "").split(".")
                yield from (each.name for each in names)
            case ast.Import(names=names):
                yield from (part for each in names for part in each.name.split("."))
            case ast.Constant(value=str(text)) if re.fullmatch(r"[\w.]+", text):
                yield from text.split(".")


def overridden_names(tree: ast.AST, used: set[str]) -> Iterator[str]:
    """Yield the members of classes that only a library can use."""
    for kind in (each for each in ast.walk(tree) if isinstance(each, ast.ClassDef)):
        for part in kind.body:
            match part:
                case ast.FunctionDef(name=name) | ast.Assign(targets=[ast.Name(id=name)]):
                    if name not in used:
                        yield name


@cache
def names_in_code() -> frozenset[tuple[str, str]]:
    """Return the private names that are used, each with a file that does not define it."""
    trees = {path: ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")}
    used = {path: set(used_names(tree)) for path, tree in trees.items()}
    all_used = set().union(*used.values())
    found = set()
    for path, tree in trees.items():
        names = used[path] - set(defined_names(tree))
        names |= set(overridden_names(tree, all_used))
        found |= {(name, str(path.relative_to(PACKAGE))) for name in names if is_private(name)}
    return frozenset(found)


def names_on_page() -> set[tuple[str, str]]:
    rows = [line.split(" | ") for line in PAGE.read_text().splitlines() if line.startswith("| `_")]
    return {
        (name, path)
        for cells in rows
        for name in re.findall(r"`(\w+)`", cells[0])
        for path in re.findall(r"`([\w/]+\.py)`", cells[1])
    }


def test_the_page_lists_each_private_name_with_its_files() -> None:
    exceptions = DOCUMENTED.keys() | OWN.keys()
    in_code = {(name, path) for name, path in names_in_code() if name not in exceptions}
    assert sorted(in_code - names_on_page()) == [], "these have no row"
    assert sorted(names_on_page() - in_code) == [], "these rows are out of date"


def test_each_exception_is_still_used() -> None:
    assert DOCUMENTED.keys() | OWN.keys() <= {name for name, _ in names_in_code()}
