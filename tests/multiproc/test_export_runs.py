"""Cells that were exported, under a real torchrun and in the warm ranks again."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from notebook import Notebook
from processes import GLOO_ABORTS

from nbddp.topology import TORCHRUN

pytestmark = pytest.mark.multiproc
SHARES_KERNEL = True

PREPARE = """%%ddp --nproc 2
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

torch.manual_seed(rank)
model = DDP(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)))
"""
TRAIN = """%%ddp --push rate
optimizer = torch.optim.SGD(model.parameters(), lr=rate)
generator = torch.Generator().manual_seed(rank)
for step in range(30):
    x = torch.randn(16, 8, generator=generator)
    loss = (model(x) - x.sum(1, keepdim=True)).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    nbddp.log(step=step, loss=loss.item())
"""
SUM = "%%ddp --out sums\nsum(each.double().sum().item() for each in model.parameters())"


@pytest.fixture
def trained(notebook: Notebook, folder: Path) -> Iterator[Notebook]:
    """A notebook in which ranks were trained, with all that an export leaves out."""
    notebook.run(f"%cd -q {folder}\n%load_ext nbddp\nrate = 0.05")
    for cell in (PREPARE, TRAIN, SUM, "%%ddp --once\nprint('once')"):
        assert notebook.run(cell).status == "ok"
    assert notebook.run("%%ddp\nif rank == 1: raise ValueError('no')").status == "error"
    notebook.run("%ddp fault slow --rank 1 --step 7")
    notebook.run("%%ddp --ranks 0\nprint('not', 'all')")
    notebook.run("loss = %ddp pull loss.item() --rank 0")
    yield notebook
    notebook.run("%ddp stop")


def under_torchrun(*arguments: str) -> list[str]:
    """What the script prints, in the order of the alphabet."""
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"},
    )
    assert done.returncode == 0 or GLOO_ABORTS in done.stderr, done.stderr
    return sorted(done.stdout.splitlines())


@pytest.mark.full
def test_an_export_gives_the_notebooks_numbers_to_the_last_bit(trained: Notebook) -> None:
    reply = trained.run("%ddp export train.py --slurm")
    assert reply.text.splitlines()[:3] == [
        "wrote train.py, train.sbatch; run it with",
        f"    {shlex.join(TORCHRUN)} --standalone --nnodes=1 --nproc-per-node=2 train.py",
        "    sbatch train.sbatch",
    ]
    left = re.findall(r"left out: (.*)", reply.text)
    assert left == ["it is marked --once", "it did not go well", "a fault"]
    assert "%ddp fault slow --rank 1 --step 7: left out: a fault" in reply.text
    sums, loss = trained.run("print(*sums, loss)").text.split()[1:]
    expected = ["not all", f"[rank 0] loss.item() {loss}"]
    expected += [f"[rank {rank}] sums {sums}" for rank in (0, 1)]
    assert under_torchrun("--nproc-per-node=2", "train.py") == sorted(expected)
    assert under_torchrun("--nproc-per-node=2", "train.py", "--rate", "0.01") != sorted(expected)

    again = trained.run("%ddp run train.py").text.splitlines()  # a round trip
    assert sorted(re.sub(r"^\[rank \d\] ", "", line) for line in again) == sorted(expected)


@pytest.mark.full
def test_a_cell_that_makes_its_own_group_is_exported(notebook: Notebook, folder: Path) -> None:
    notebook.run(f"%cd -q {folder}\n%load_ext nbddp")
    reduce = "x = torch.ones(1)\ndist.all_reduce(x)\nx.item()"
    notebook.run(f"%%ddp --nproc 4\n{reduce}")
    notebook.run(
        f"%%ddp --no-init\ndist.init_process_group('gloo')\n{reduce}\n"
        "dist.destroy_process_group()\nx.item()"
    )
    notebook.run(f"%%ddp\n{reduce}")
    assert notebook.run("%ddp export train.py").status == "ok"
    shown = [f"[rank {rank}] Out 4.0" for rank in range(4) for _ in range(3)]
    assert under_torchrun("--nproc-per-node=4", "train.py") == shown
    notebook.run("%ddp stop")


@pytest.mark.full
def test_a_cell_that_leaves_the_group_is_exported(notebook: Notebook, folder: Path) -> None:
    notebook.run(f"%cd -q {folder}\n%load_ext nbddp")
    reduce = "x = torch.ones(1)\ndist.all_reduce(x)\nx.item()"
    sources = (f"%%ddp --nproc 2\n{reduce}", "%%ddp\ndist.destroy_process_group()")
    sources += (f"%%ddp\n{reduce}", "%%ddp --no-init --ranks 0\nmine = 3\nmine")
    for source in (*sources, f"%%ddp\n{reduce}"):
        assert notebook.run(source).status == "ok"
    assert notebook.run("%ddp export train.py").status == "ok"
    shown = [f"[rank {rank}] Out 2.0" for rank in (0, 1) for _ in range(3)]
    assert under_torchrun("--nproc-per-node=2", "train.py") == sorted([*shown, "[rank 0] Out 3"])
    notebook.run("%ddp stop")


@pytest.mark.full
def test_a_cell_begins_when_all_ranks_have_ended_the_one_before(
    notebook: Notebook, folder: Path
) -> None:
    notebook.run(f"%cd -q {folder}\n%load_ext nbddp")
    notebook.run("%%ddp --nproc 2 --ranks 1\nimport time; time.sleep(1); open('data', 'w').close()")
    assert notebook.run("%%ddp\nopen('data').close()").status == "ok"
    assert notebook.run("%ddp export train.py").status == "ok"
    (folder / "data").unlink()
    assert under_torchrun("--nproc-per-node=2", "train.py") == []
    notebook.run("%ddp stop")


@pytest.mark.full
def test_a_store_that_the_notebook_kept_is_kept_by_rank_0(notebook: Notebook, folder: Path) -> None:
    notebook.run(f"%cd -q {folder}\n%load_ext nbddp\nimport torch.distributed as dist")
    notebook.run("store = dist.TCPStore('127.0.0.1', 0, is_master=True)\nport = store.port")
    count = "theirs = dist.TCPStore('127.0.0.1', port)\ntheirs.add('all', 1)\ndist.barrier()"
    assert notebook.run(f"%%ddp --nproc 2 --push port\n{count}").status == "ok"
    assert notebook.run("%%ddp --out counted\ntheirs.add('all', 0)").status == "ok"
    notebook.run("url = f'tcp://127.0.0.1:{port}'")
    meet = "dist.init_process_group('gloo', init_method=url, rank=rank, world_size=2)"
    meet += "\ndist.destroy_process_group()"
    assert notebook.run(f"%%ddp --no-init --push url\n{meet}").status == "ok"
    reply = notebook.run("%ddp export train.py")
    assert reply.text.splitlines()[2:] == [
        "what it does not do, or needs:",
        "  port: the notebook kept a store there: rank 0 keeps one in its place",
        "  url: the notebook kept a store there: rank 0 keeps one in its place",
    ]
    notebook.run("del store")
    shown = [f"[rank {rank}] counted 2" for rank in (0, 1)]
    assert under_torchrun("--nproc-per-node=2", "train.py") == shown
    assert notebook.run("print(*counted)").text.split() == ["2", "2"]
    notebook.run("%ddp stop")


OTHERS = (
    """%%ddp --nproc 2
import sys
from dataclasses import dataclass
from torch.utils.data import DataLoader, Dataset
SCALE = 10
class Squares(Dataset):
    def __len__(self): return 4
    def __getitem__(self, i): return i * SCALE
@dataclass
class Batch:
    values: list
def collate(items): return Batch(items)
""",
    """%%ddp
seen = []
for way in ("fork", "spawn"):
    loader = DataLoader(
        Squares(), 2, num_workers=1, collate_fn=collate, multiprocessing_context=way
    )
    seen.append((way, [each.values for each in loader]))
seen
""",
    "%%ddp --push table\ntable.sum().item(), rank",
    "%%ddp\n_[0]",
    "%%ddp --ranks 1\n%%writefile own.py\nvalue = 7",
    "%%ddp\nsys.path.insert(0, '.')\nimport own\nfrom own import *\nvalue",
    "%%ddp\nfrom time import time\ncallable(time)",
    "%%ddp\nimport time\ncallable(time.sleep)",
    "%%ddp\nasync def late(n): return n\nawait late(5)",
    "%%ddp\nimport torch.distributions as dist\ndef main(): return rank\nos = rank = 9\nmain()",
    "%%ddp --ranks 0\nif rank: y: int = 3\ny",
    "%%ddp\nexec('made = 4')\nnames = 'made' in locals()\nmade, names",
)
# by the script's own function, which writes a line at once: print() does not
SHOWN = (
    "[rank {rank}] Out [('fork', [[0, 10], [20, 30]]), ('spawn', [[0, 10], [20, 30]])]",
    "[rank {rank}] Out (15.0, {rank})",
    "[rank {rank}] Out 15.0",
    "[rank {rank}] Out 7",
    "[rank {rank}] Out True",
    "[rank {rank}] Out True",
    "[rank {rank}] Out 5",
    "[rank {rank}] Out 9",
    "[rank {rank}] Out (4, True)",
)


def test_cells_of_all_habits_do_the_same_in_a_script(notebook: Notebook, folder: Path) -> None:
    notebook.run(f"%cd -q {folder}\n%load_ext nbddp\nimport torch\ntable = torch.arange(6.0)")
    for source in OTHERS:
        assert notebook.run(source).status == "ok"
    assert notebook.run("%ddp export train.py").status == "ok"
    expected = [line.format(rank=rank) for rank in (0, 1) for line in SHOWN]
    expected.append("[rank 0] Out 3")
    found = under_torchrun("--nproc-per-node=2", "train.py")
    assert found == sorted(expected)
    again = notebook.run("%ddp run train.py").text.splitlines()
    assert sorted(re.sub(r"^\[rank \d\] ", "", line) for line in again) == sorted(expected)
    notebook.run("%ddp stop")


@pytest.mark.full
def test_ranks_that_never_wait_for_each_other_all_come_to_the_end(
    notebook: Notebook, folder: Path
) -> None:
    notebook.run(f"%cd -q {folder}\n%load_ext nbddp")
    notebook.run("%%ddp --nproc 2\nx = 1")
    notebook.run("%ddp export train.py")
    late = "import os, time\ntime.sleep(int(os.environ['RANK']))\n"  # as a busy machine may be
    (folder / "late.py").write_text(late + (folder / "train.py").read_text())
    assert under_torchrun("--nproc-per-node=2", "late.py") == []
    notebook.run("%ddp stop")


def test_a_script_stands_in_the_way_of_no_module(notebook: Notebook, folder: Path) -> None:
    notebook.run(f"%cd -q {folder}\n%load_ext nbddp\n")
    notebook.run("%%ddp --nproc 2\nx = 1")
    for name in ("random", "torch"):
        assert notebook.run(f"%ddp export {name}.py").text.strip() == (
            f"UsageError: {name}.py would stand in the way of the module {name}: give it another "
            "name"
        )
    (folder / "train.py").write_text("")
    assert notebook.run("import train\n%ddp export train.py --force").status == "ok"
    notebook.run("%ddp stop")


@pytest.mark.full
def test_a_script_elsewhere_is_run_where_it_lies(notebook: Notebook, folder: Path) -> None:
    notebook.run(f"%cd -q {folder}\n%load_ext nbddp\nrows = list(range(30))")
    notebook.run("%%ddp --nproc 2 --push rows\nlen(rows)")
    (folder / "my runs").mkdir()
    reply = notebook.run("%ddp export 'my runs/train.py' --slurm")
    *launch, path = shlex.split(reply.text.splitlines()[1])
    assert launch == [*TORCHRUN, "--standalone", "--nnodes=1", "--nproc-per-node=2"]
    assert under_torchrun(launch[-1], path) == ["[rank 0] Out 30", "[rank 1] Out 30"]
    assert "    'my runs/train.py'\n" in (folder / "my runs" / "train.sbatch").read_text()
    notebook.run("%ddp stop")


def test_what_is_there_is_not_replaced_unless_asked(trained: Notebook, folder: Path) -> None:
    (folder / "mine.py").write_text("mine")
    reply = trained.run("%ddp export mine.py")
    assert reply.text.strip() == (
        "UsageError: mine.py: there already; `--force` replaces what is there"
    )
    assert (folder / "mine.py").read_text() == "mine"
    assert trained.run("%ddp export mine.py --force").status == "ok"
    assert "form_group" in (folder / "mine.py").read_text()
    reply = trained.run("%ddp export mine.txt")
    assert reply.text.strip() == (
        "UsageError: expected the name of a Python file like train.py, got 'mine.txt'"
    )
    assert (
        "cannot be written: No such file or directory"
        in trained.run("%ddp export nowhere/train.py").text
    )


def test_nothing_done_is_said(notebook: Notebook, folder: Path) -> None:
    notebook.run(f"%cd -q {folder}\n%load_ext nbddp\n%ddp start --nproc 2")
    reply = notebook.run("%ddp export train.py")
    assert "no cell has gone well since the ranks started: nothing to export" in reply.text
    assert not (folder / "train.py").exists()
