"""The promises that hold for the package as a whole."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import nbddp

PACKAGE = Path(nbddp.__file__).parent
MAX_LINES = 500


def modules_after(statement: str) -> set[str]:
    """The top-level packages that a fresh Python has loaded after this statement."""
    program = f"import sys\n{statement}\nprint(*{{name.split('.')[0] for name in sys.modules}})"
    done = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    )
    return set(done.stdout.split())


def test_a_file_is_read_in_one_sitting() -> None:
    lengths = {
        str(path.relative_to(PACKAGE)): len(path.read_text().splitlines())
        for path in sorted(PACKAGE.rglob("*.py"))
    }
    assert len(lengths) > 10
    assert {name: count for name, count in lengths.items() if count > MAX_LINES} == {}


def test_the_public_names_are_sorted() -> None:
    assert nbddp.__all__ == sorted(set(nbddp.__all__))


def test_the_public_names_are_all_there() -> None:
    for name in nbddp.__all__:
        assert getattr(nbddp, name) is not None


def test_the_public_names_are_complete() -> None:
    defined = {
        name
        for name, value in vars(nbddp).items()
        if not name.startswith("_")
        and getattr(value, "__module__", "").startswith("nbddp")
        and isinstance(value, type | type(lambda: None))
    }
    assert defined <= set(nbddp.__all__)
    assert set(nbddp._LAZY) <= set(nbddp.__all__)


def test_a_name_that_does_not_exist_is_missed_in_the_usual_words() -> None:
    with pytest.raises(AttributeError) as caught:
        nbddp.nothing_of_this_name  # noqa: B018 - asking is the test
    assert str(caught.value) == "module 'nbddp' has no attribute 'nothing_of_this_name'"


@pytest.mark.process
def test_importing_nbddp_is_light() -> None:
    loaded = modules_after("import nbddp")
    assert "nbddp" in loaded
    assert loaded & {"torch", "numpy", "IPython", "ipywidgets", "ipykernel", "psutil"} == set()


@pytest.mark.process
@pytest.mark.parametrize("module", ["nbddp.magics", "nbddp.group"])
def test_importing_what_the_kernel_needs_does_not_import_torch(module: str) -> None:
    loaded = modules_after(f"import {module}")
    assert "nbddp" in loaded
    assert loaded & {"torch", "numpy"} == set()


@pytest.mark.process
@pytest.mark.parametrize("module", ["nbddp.wire.queues", "nbddp.wire.parcels", "nbddp.wire.start"])
def test_what_every_rank_needs_reaches_neither_ipython_nor_widgets(module: str) -> None:
    loaded = modules_after(f"import {module}")
    assert loaded & {"torch", "IPython", "ipywidgets", "ipykernel"} == set()


def test_the_version_has_three_numbers() -> None:
    assert len([int(part) for part in nbddp.__version__.split(".")]) == 3
