"""The checks find seeded mistakes on real ranks, and a notebook shows each finding once."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from drivers.ranks import Ranks
from notebook import Notebook

from nbddp.checks.registry import Finding

SHARES_KERNEL = True

SETUP = """
import time
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import (
    DataLoader, DistributedSampler, Subset, TensorDataset, random_split
)
torch.manual_seed(3407)
data = TensorDataset(torch.randn(61, 4), torch.randint(3, (61,)))

def make_model():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 3))

model = DDP(make_model())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
sampler = DistributedSampler(data, seed=3407)
train = DataLoader(data, batch_size=16, sampler=sampler)
test = DataLoader(data, batch_size=16, sampler=DistributedSampler(data, shuffle=False))

def fit(model, train, optimizer):
    for x, y in train:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
"""


SEEDED = {  # mistakes that only real ranks show, each with the rule that finds it
    "ND207 a parameter that only one rank changes": (
        "with torch.no_grad():\n    model.module[0].weight.mul_(1 + 0.01 * rank)"
    ),
    "ND210 every epoch in the same order": (
        "for epoch in range(2):\n    for x, y in train:\n        optimizer.zero_grad()\n"
        "        nn.functional.cross_entropy(model(x), y).backward()\n        optimizer.step()"
    ),
    "ND212 more threads than cores": "torch.set_num_threads(64)",
    "ND214 the wrapper in a cell that runs twice": "wrapped = DDP(model)",
}


ONE_THREAD = "torch.set_num_threads(1)\n"  # a mistake of another test may have set more
RIGHT = """
for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, y in train:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
    if rank == 0:
        print(epoch, loss.item())
model.eval()
right = torch.zeros(1)
with torch.no_grad():
    for x, y in test:
        right += (model.module(x).argmax(1) == y).sum()
dist.all_reduce(right)
if rank == 0:
    torch.save(model.module.state_dict(), "right.pt")
dist.barrier()
"""


def found_in(group: Ranks, cell: str, *, runs: bool = True) -> list[Finding]:
    """Return the findings below the cell; a cell that cannot run is checked with earlier facts."""
    result = group.run(cell if runs else f"pass  # {' '.join(cell.split())}", quiet=True)
    return group.findings_of(result, cell)


@pytest.mark.parametrize("mistake", SEEDED)
def test_a_seeded_mistake_is_found(shared_group: Ranks, mistake: str) -> None:
    shared_group.run(ONE_THREAD + SETUP, quiet=True)
    found = {each.rule for each in found_in(shared_group, SEEDED[mistake])}
    assert found == {mistake.split()[0]}


MODELS = """
from torch.distributed.fsdp import fully_shard
norm = DDP(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8)))
still = DDP(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8)), broadcast_buffers=False)
parts = fully_shard(nn.Linear(4, 8))
whole = nn.Linear(4, 8)
"""


def test_forward_on_one_rank_is_found_if_the_forward_synchronizes(shared_group: Ranks) -> None:
    shared_group.run(SETUP + MODELS, quiet=True)
    meets = {"norm": True, "still": False, "model": False, "parts": True, "whole": False}
    for name, is_found in meets.items():
        cell = f"if rank == 0:\n    with torch.no_grad():\n        {name}(x)"
        found = [each.rule for each in found_in(shared_group, cell, runs=False)]
        assert found == (["ND102"] if is_found else []), name


def test_correct_cell_has_no_findings(shared_group: Ranks) -> None:
    assert found_in(shared_group, SETUP) == []
    assert found_in(shared_group, RIGHT) == []


BAD = "%%ddp --nproc 2\nx = torch.ones(1)\nif rank * 0 == 1:\n    dist.all_reduce(x)\n"


def test_ddp_check_checks_the_last_cell_or_a_script(notebook: Notebook, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import torch.distributed as dist\nif dist.get_rank():\n    dist.barrier()\n")
    text = notebook.run(f"%ddp check {script}").text  # no rank is needed for that
    assert str(script) in text
    assert re.search(r"ND101 line 3: dist\.barrier .*`if dist\.get_rank\(\)` \(line 2\)", text)
    notebook.run(BAD)
    reply = notebook.run("%ddp check")
    assert reply.status == "ok"
    found = r"ND101 line 4: dist\.all_reduce .*`if rank \* 0 == 1` \(line 3\)"
    assert re.search(found, reply.text)
    reply = notebook.run("%ddp check --strict")
    assert reply.status == "error"
    assert reply.error.startswith("FindingsError: 1 ")
    assert re.search(found, reply.error)
    notebook.run("%%ddp\nx = torch.ones(1)\ndist.all_reduce(x)")
    assert notebook.run("%ddp check --strict").status == "ok"
    assert notebook.run("%ddp check --explain nd101").text.startswith("ND101: ")
    assert "ND999" in notebook.run("%ddp check --explain ND999").text


SAMPLERS = """%%ddp
own = 10 ** rank
sampler = DistributedSampler(data, seed=own)
it = DataLoader(data, 2, sampler=sampler)
"""


def test_finding_is_shown_once_below_the_cell(notebook: Notebook) -> None:
    notebook.run(
        "%%ddp --nproc 2\nfrom torch.utils.data import DataLoader, DistributedSampler\n"
        "data = torch.arange(8.0)\nx = torch.ones(1)"
    )
    assert notebook.run(SAMPLERS.replace("10 ** rank", "9")).text == ""
    title, line = notebook.run(SAMPLERS).text.splitlines()[:2]
    assert title.startswith("nbddp: 1 ")
    assert re.match("  ND202 line 4: .* rank 0 has 1, rank 1 has 10", line)
    assert notebook.run("%%ddp\nlen(it)").text == "Out [ranks 0-1] 2\n"
    assert "ND202 line 2: " in notebook.run("%ddp check").text
    quiet = SAMPLERS.replace("rank", "(2 + rank)").replace("%%ddp", "%%ddp --quiet")
    assert notebook.run(quiet).text == ""
