"""The notebook that trains with other people's trainers runs from start to end."""

from pathlib import Path

import pytest
from lessons import NOTEBOOKS, check_lesson

pytestmark = [pytest.mark.notebook, pytest.mark.timeout(240)]


def test_the_notebook_with_a_language_model_runs_from_start_to_end(folder: Path) -> None:
    (path,) = (each for each in NOTEBOOKS if each.name.startswith("A2_"))
    check_lesson(path, folder)
