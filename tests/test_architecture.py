"""The promises that hold for the package as a whole."""

import ast
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from drivers.inside import imported
from runs_on_disk import make_run

import nbddp
from nbddp.extension.installed import installed
from nbddp.extensions.publish import TRACKER_CLASSES
from nbddp.extensions.publish.publication import Publication
from nbddp.extensions.publish.tracker import require_package
from nbddp.wire import payloads, queues, rank_start

PACKAGE = Path(nbddp.__file__).parent
MAX_LINES = 500


def test_source_files_and_folders_are_short() -> None:
    lengths = {
        str(path.relative_to(PACKAGE)): len(path.read_text().splitlines())
        for path in sorted(PACKAGE.rglob("*.py"))
    }
    assert len(lengths) > 10
    assert {name: count for name, count in lengths.items() if count > MAX_LINES} == {}
    counts = Counter(path.parent.relative_to(PACKAGE) for path in MODULES.values())
    assert len(counts) > 10
    assert {str(folder): count for folder, count in counts.items() if count > 15} == {}


def test_public_names_are_sorted_importable_and_complete_and_others_are_refused() -> None:
    assert nbddp.__all__ == sorted(set(nbddp.__all__))
    assert [name for name in nbddp.__all__ if getattr(nbddp, name) is None] == []
    defined = {
        name
        for name, value in vars(nbddp).items()
        if not name.startswith("_")
        and getattr(value, "__module__", "").startswith("nbddp")
        and isinstance(value, type | type(lambda: None))
    }
    assert defined <= set(nbddp.__all__)
    with pytest.raises(AttributeError) as caught:
        nbddp.nothing_of_this_name  # noqa: B018 - asking is the test
    assert str(caught.value) == "module 'nbddp' has no attribute 'nothing_of_this_name'"


PAGE = {"IPython", "ipywidgets", "ipykernel"}
STAGES = {  # statements of a fresh Python, and the modules that each must not load
    "import nbddp": {"torch", "numpy", "psutil", *PAGE},
    "run = nbddp.runs()[0]; run.metrics(), run.cells, run.events, run.config": {
        *("torch", "numpy", "matplotlib", *PAGE)
    },
    imported(queues, payloads, rank_start): {"torch", *PAGE},  # what every rank needs
    "nbddp.sonnets()": {"torch"},
    "import nbddp.magics.load, nbddp.group.worker_group": {"torch", "numpy"},
    f"{imported(require_package, Publication)}for kind in {TRACKER_CLASSES}:\n"
    "    try: require_package(kind)\n    except nbddp.NbddpError: pass": {
        "torch",
        *TRACKER_CLASSES,
    },
    "nbddp.digits()": {"sklearn"},
}


@pytest.mark.process
def test_modules_are_imported_lazily(tmp_path: Path) -> None:
    make_run(tmp_path)
    show = "print(*{name.split('.')[0] for name in sys.modules})"
    program = "\n".join(["import sys", *(f"{stage}\n{show}" for stage in STAGES)])
    done = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True, cwd=tmp_path
    )
    for line, (stage, unwanted) in zip(done.stdout.splitlines(), STAGES.items(), strict=True):
        loaded = set(line.split())
        assert "nbddp" in loaded
        assert loaded & unwanted == set(), stage


@pytest.mark.process
def test_load_ext_loads_only_the_manifests_of_extensions() -> None:
    show = "print(*(name for name in sys.modules if '.extensions.' in name))"
    command = [sys.executable, "-c", f"import sys, nbddp.magics.load\n{show}"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    names = [name.split(".") for name in done.stdout.split()]
    assert {parts[2] for parts in names if len(parts) > 3} == set()


MODULES = {
    "nbddp." + ".".join(path.relative_to(PACKAGE).with_suffix("").parts): path
    for path in sorted(PACKAGE.rglob("*.py"))
    if path.name != "__init__.py"
}


def imports_of(path: Path) -> set[str]:
    """Modules of nbddp that one imports, also in functions, for types alone, or by its name."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Import(names=names):
                found |= {each.name for each in names}
            case ast.ImportFrom(module=str(package), names=names):
                found |= {package, *(f"{package}.{each.name}" for each in names)}
            case ast.Constant(value=str(text)):
                found.add(text)
    return found & set(MODULES)


def test_modules_have_no_import_cycles() -> None:
    waiting = {name: imports_of(path) - {name} for name, path in MODULES.items()}
    while free := {name for name, imports in waiting.items() if not imports & set(waiting)}:
        waiting = {name: imports for name, imports in waiting.items() if name not in free}
    assert waiting == {}  # these modules are in cycles, or import one


EXTENSIONS = "nbddp.extensions."
PARTS = {"group_methods", "messages", "notebook", "rank", "view"}  # each extension may have them
SHARED_NAMES = {"__main__", "display", "figure"}  # one topic at several layers


def test_file_name_is_used_for_one_topic() -> None:
    counts = Counter(
        name.rpartition(".")[2]
        for name in MODULES
        if not (name.startswith(EXTENSIONS) and name.rpartition(".")[2] in PARTS)
    )
    assert {name for name, count in counts.items() if count > 1} == SHARED_NAMES


def test_extension_imports_only_the_extensions_that_it_needs() -> None:
    found: dict[str, set[str]] = {}
    for name, path in MODULES.items():
        if name.startswith(EXTENSIONS):
            extension = name.split(".")[2]
            imported = {each for each in imports_of(path) if each.startswith(EXTENSIONS)}
            found.setdefault(extension, set()).update(each.split(".")[2] for each in imported)
    assert len(found) == 19
    needs = {name: {*extension.needs} for name, extension in installed().items()}
    assert {name: imported - {name} for name, imported in found.items()} == needs
