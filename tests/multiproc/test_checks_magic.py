"""%ddp check, in a real kernel."""

from __future__ import annotations

from pathlib import Path

import pytest
from notebook import Notebook

pytestmark = pytest.mark.multiproc
SHARES_KERNEL = True

BAD = "%%ddp --nproc 2\nx = torch.ones(1)\nif rank * 0 == 1:\n    dist.all_reduce(x)\n"


def test_the_last_cell_is_looked_at_and_strict_makes_an_error_of_it(notebook: Notebook) -> None:
    notebook.run("%ddp stop")
    notebook.run(BAD)
    reply = notebook.run("%ddp check")
    assert reply.status == "ok"
    assert "1 thing to look at in cell [" in reply.text
    assert "ND101 line 4: dist.all_reduce is under `if rank * 0 == 1` (line 3)" in reply.text
    reply = notebook.run("%ddp check --strict")
    assert reply.status == "error"
    assert reply.error.startswith("FindingsError: 1 thing to look at in cell [")
    assert "ND101 line 4: dist.all_reduce is under " in reply.error
    notebook.run("%%ddp\nx = torch.ones(1)\ndist.all_reduce(x)")
    assert "nothing to find fault with in cell [" in notebook.run("%ddp check --strict").text


def test_a_script_is_looked_at_without_ranks(notebook: Notebook, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import torch.distributed as dist\nif dist.get_rank():\n    dist.barrier()\n")
    reply = notebook.run(f"%ddp check {script}")
    assert f"1 thing to look at in {script}" in reply.text
    assert "ND101 line 3: dist.barrier is under `if dist.get_rank()` (line 2)" in reply.text


def test_a_rule_and_the_checklist_are_explained(notebook: Notebook) -> None:
    reply = notebook.run("%ddp check --explain")
    assert "[ ] sampler" in reply.text
    assert "ND144  work on a GPU before the process group" in reply.text
    reply = notebook.run("%ddp check --explain nd101")
    assert reply.text.startswith("ND101: a collective under a condition on the rank")
    assert "more in notebooks/06_hangs_and_stragglers.ipynb" in reply.text
    assert "there is no rule ND999" in notebook.run("%ddp check --explain ND999").text


def test_what_is_wrong_is_said_under_the_cell_once(notebook: Notebook) -> None:
    notebook.run("%ddp stop")
    notebook.run(
        "%%ddp --nproc 2\nfrom torch.utils.data import DataLoader, DistributedSampler\n"
        "data = torch.arange(8.0)\nx = torch.ones(1)"
    )
    cell = (
        "%%ddp\nown = 10 ** rank\nsampler = DistributedSampler(data, seed=own)\n"
        "it = DataLoader(data, 2, sampler=sampler)"
    )
    assert notebook.run(cell.replace("10 ** rank", "9")).text == ""
    said = "ND202 line 4: the samplers of it have other seeds: rank 0 has 1, rank 1 has 10."
    reply = notebook.run(cell)
    assert reply.text.startswith(f"nbddp: 1 thing to look at\n  {said}\n")
    assert notebook.run("%%ddp\nlen(it)").text == "Out [ranks 0-1] 2\n"
    reply = notebook.run("%ddp check")
    assert "the samplers of it have other seeds: rank 0 has 1, rank 1 has 10." in reply.text
    assert (
        notebook.run(cell.replace("rank", "(2 + rank)").replace("%%ddp", "%%ddp --quiet")).text
        == ""
    )


def test_parameters_that_take_no_part_are_named_in_the_cell_that_fails(notebook: Notebook) -> None:
    notebook.run("%ddp stop")
    notebook.run(
        "%%ddp --nproc 2\nfrom torch import nn\n"
        "from torch.nn.parallel import DistributedDataParallel as DDP\n"
        "class Two(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.used, self.idle = nn.Linear(4, 3), nn.Linear(4, 3)\n"
        "    def forward(self, x):\n        return self.used(x)\n"
        "two = DDP(Two())"
    )
    reply = notebook.run(
        "%%ddp\nfor _ in range(2):\n    two.zero_grad()\n    two(torch.ones(2, 4)).sum().backward()"
    )
    assert reply.status == "error"
    assert "(without a gradient: idle.weight, idle.bias), line 4" in reply.error
    names = "idle.weight, idle.bias"
    said = f"ND216 line 3: 2 parameters of two got no gradient from the loss: {names}."
    assert said in reply.text
