"""The judge of notebook 19 has the notebook's GPT."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import nbformat
import torch

from nbddp.course.mesh_project import GPT, LENGTH, LETTERS

[NOTEBOOK] = (Path(__file__).parents[3] / "notebooks").glob("19_*.ipynb")


def test_the_gpt_of_the_judge_is_that_of_the_notebook() -> None:
    cells = nbformat.read(NOTEBOOK, as_version=4).cells
    [source] = [each.source for each in cells if "class GPT(nn.Module)" in each.source]
    names: dict[str, Any] = {
        "torch": torch,
        "dist": Mock(get_backend=lambda: "gloo"),
        "device": torch.device("cpu"),
    }
    exec(source.partition("\n")[2], names)
    theirs = names["make_model"]()
    torch.manual_seed(0)
    ours = GPT().double()
    assert [*ours.state_dict()] == [*theirs.state_dict()]
    assert [name for name, _ in ours.named_modules()] == [n for n, _ in theirs.named_modules()]
    numbers = torch.arange(2 * LENGTH).view(2, LENGTH) % LETTERS
    assert torch.equal(ours(numbers), theirs(numbers))
