"""A module that is edited between two cells is reloaded on all ranks, or on none."""

import itertools
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from notebook import Notebook

NETS = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return 0 * self.layer(x) + 1
"""
TRAINING = """%%ddp --nproc 2
from nets import Net
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
models = [DistributedDataParallel(Net()), fully_shard(Net())]
optimizers = [torch.optim.AdamW(model.parameters()) for model in models]
def step():
    for model, optimizer in zip(models, optimizers):
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
step()
"""
VALUES = "%%ddp\nstep()\n[model(torch.ones(1, 4)).mean().item() for model in models]"
Write = Callable[[str], None]


@pytest.fixture
def write(notebook: Notebook, tmp_path: Path) -> Write:
    """Writes the module of the ranks; a kernel in its folder with IPython's autoreload on."""
    times = itertools.count(1_700_000_000)

    def write(text: str) -> None:
        path = tmp_path / "nets.py"
        path.write_text(text)
        os.utime(path, (seconds := next(times), seconds))

    write(NETS)
    code = (
        f"%cd -q {tmp_path}\n%load_ext autoreload\n%autoreload 2\n%ddp stop\n"
        "get_ipython()._nbddp.notebook.extensions._hooks.load('autoreload')._is_on = None"
    )
    assert notebook.run(code).status == "ok"
    return write


def test_models_get_the_new_code_of_a_module_on_all_ranks(notebook: Notebook, write: Write) -> None:
    assert notebook.run(TRAINING).status == "ok"
    write(NETS.replace("+ 1", "+ self.two()") + "\n    def two(self):\n        return 2\n")
    reply = notebook.run(VALUES)
    assert "nbddp: reloaded nets\n" in reply.text
    assert "Out [ranks 0-1] [2.0, 2.0]" in reply.text
    assert "reloaded" not in notebook.run(VALUES).text
    notebook.run("%ddp restart --replay")  # new ranks import the new file
    assert "Out [ranks 0-1] [2.0, 2.0]" in notebook.run(VALUES).text


def test_no_rank_has_the_new_code_if_it_fails_on_one(notebook: Notebook, write: Write) -> None:
    assert notebook.run(TRAINING).status == "ok"
    write(NETS.replace("+ 1", "+ 2") + "\nimport os\nassert os.environ['RANK'] == '0', 'only 0'\n")
    reply = notebook.run(VALUES)
    assert reply.text == (
        "UsageError: rank 1 cannot reload nets.py: AssertionError in line 14: only 0. All ranks "
        "keep the old version. Correct the file, or run `%ddp autoreload off`\n"
    )
    assert "edited modules only when ranks restart" in notebook.run("%ddp autoreload off").text
    assert "Out [ranks 0-1] [1.0, 1.0]" in notebook.run(VALUES).text
    notebook.run("%ddp autoreload on")
    write(NETS.replace("+ 1", "+ 3"))
    assert "Out [ranks 0-1] [3.0, 3.0]" in notebook.run(VALUES).text


def test_modules_of_aimport_alone_are_reloaded_in_mode_1(notebook: Notebook, write: Write) -> None:
    assert notebook.run("%autoreload 1\n%autoreload").status == "ok"
    assert notebook.run(TRAINING).status == "ok"
    write(NETS.replace("+ 1", "+ 2"))
    assert "Out [ranks 0-1] [1.0, 1.0]" in notebook.run(VALUES).text
    assert notebook.run("%aimport nets").status == "ok"
    assert "Out [ranks 0-1] [2.0, 2.0]" in notebook.run(VALUES).text
