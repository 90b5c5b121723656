"""What checks find stands under the cell in a line that unfolds, and stays there."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect

from browser.conftest import IN_BROWSER, START, Picture, write_notebook
from browser.desk import Desk

pytestmark = [pytest.mark.full, *IN_BROWSER]

SETUP = """%%ddp
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
data = TensorDataset(torch.rand(64, 4))
model = DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""
WRONG = """%%ddp
train = DataLoader(data, batch_size=16, shuffle=True)
for x, in train:
    model(x).sum().backward()
    optimizer.step()
torch.save(model.module.state_dict(), "model.pt")
print("trained")
"""


def test_a_cell_has_one_line_that_unfolds(desk: Desk, picture: Picture) -> None:
    write_notebook(desk.notebooks / "checks.ipynb", START, SETUP, WRONG, "%ddp check")
    with desk.open("checks.ipynb") as notebook:
        for cell in range(4):
            notebook.run(cell)
        notebook.await_text(2, "2 possible mistakes found")
        assert "possible mistake" not in notebook.text(1)
        folded = (
            notebook.code_cell(2).locator("details", has_text="2 possible mistakes found").first
        )
        expect(folded).to_have_count(1)
        fix = folded.get_by_text("Give the loader a DistributedSampler")
        expect(fix).to_be_hidden()
        picture(notebook, "checks_folded")
        folded.locator("summary").first.click()
        expect(fix).to_be_visible()
        picture(notebook, "checks_unfolded")
        notebook.await_text(3, r"2 possible mistakes found in cell \[")
        expect(notebook.code_cell(3).get_by_text("every rank writes 'model.pt'")).to_be_visible()
        assert notebook.problems == []
