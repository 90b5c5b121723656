"""The promises that hold for the package as a whole."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from drivers.inside import imported

import nbddp
from nbddp.publish.publication import Publication
from nbddp.publish.tracker import KINDS, require
from nbddp.wire import payloads, queues, start

PACKAGE = Path(nbddp.__file__).parent
MAX_LINES = 500


def test_a_file_is_read_in_one_sitting() -> None:
    lengths = {
        str(path.relative_to(PACKAGE)): len(path.read_text().splitlines())
        for path in sorted(PACKAGE.rglob("*.py"))
    }
    assert len(lengths) > 10
    assert {name: count for name, count in lengths.items() if count > MAX_LINES} == {}


def test_the_public_names_are_sorted_all_there_and_complete() -> None:
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


def test_a_name_that_does_not_exist_is_missed_in_the_usual_words() -> None:
    with pytest.raises(AttributeError) as caught:
        nbddp.nothing_of_this_name  # noqa: B018 - asking is the test
    assert str(caught.value) == "module 'nbddp' has no attribute 'nothing_of_this_name'"


PAGE = {"IPython", "ipywidgets", "ipykernel"}
STAGES = {  # what a fresh Python does, one after the other, and what it has not loaded then
    "import nbddp": {"torch", "numpy", "psutil", *PAGE},
    imported(queues, payloads, start): {"torch", *PAGE},  # what every rank needs
    "nbddp.sonnets()": {"torch"},
    "import nbddp.magics, nbddp.group": {"torch", "numpy"},
    f"{imported(require, Publication)}for kind in {KINDS}:\n"
    "    try: require(kind)\n    except nbddp.NbddpError: pass": {"torch", *KINDS},
    "nbddp.digits()": {"sklearn"},
}


@pytest.mark.process
def test_nothing_is_loaded_before_it_is_needed(tmp_path: Path) -> None:
    show = "print(*{name.split('.')[0] for name in sys.modules})"
    program = "\n".join(["import sys", *(f"{stage}\n{show}" for stage in STAGES)])
    done = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True, cwd=tmp_path
    )
    for line, (stage, unwanted) in zip(done.stdout.splitlines(), STAGES.items(), strict=True):
        loaded = set(line.split())
        assert "nbddp" in loaded
        assert loaded & unwanted == set(), stage
