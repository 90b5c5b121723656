"""Exported cells, run under a real torchrun and again in the warm ranks."""

import os
import re
from pathlib import Path

import pytest
from notebook import Notebook
from processes import under_torchrun
from syrupy.assertion import SnapshotAssertion

SHARES_KERNEL = True

REDUCE = "x = torch.ones(1)\ndist.all_reduce(x)\nx.item()"


@pytest.fixture
def there(notebook: Notebook, folder: Path) -> Notebook:
    notebook.run(f"%cd -q {folder}")
    return notebook


def sorted_output(*arguments: str) -> list[str]:
    env = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    return sorted(under_torchrun(*arguments, env=env))


def again_in(notebook: Notebook, script: str) -> list[str]:
    lines = notebook.run(f"%ddp run '{script}'").text.splitlines()
    return sorted(re.sub(r"^\[rank \d\] ", "", line) for line in lines)


@pytest.mark.full
def test_cells_that_create_or_destroy_the_process_group_are_exported(there: Notebook) -> None:
    with_group = (
        f"dist.init_process_group('gloo')\n{REDUCE}\ndist.destroy_process_group()\nx.item()"
    )
    for source in (
        f"%%ddp --nproc 2 --timeout 99\nfrom datetime import datetime\n{REDUCE}",
        f"%%ddp --no-init\n{with_group}",
        "%%ddp\ndist.destroy_process_group()",
        f"%%ddp\n{REDUCE}",
        "%%ddp --no-init --ranks 0\nmine = 3\nmine",
        f"%%ddp\n{REDUCE}",
    ):
        assert there.run(source).status == "ok"
    assert there.run("%ddp export train.py").status == "ok"
    shown = [f"[rank {rank}] Out 2.0" for rank in (0, 1) for _ in range(4)]
    expected = sorted([*shown, "[rank 0] Out 3"])
    assert sorted_output("train.py") == expected
    assert again_in(there, "train.py") == expected


@pytest.mark.full
def test_exported_cells_wait_for_each_other_and_late_ranks(there: Notebook, folder: Path) -> None:
    there.run("%%ddp --nproc 2 --ranks 1\nimport time; time.sleep(1); open('data', 'w').close()")
    assert there.run("%%ddp\nopen('data').close()").status == "ok"
    assert there.run("%ddp export train.py").status == "ok"
    (folder / "data").unlink()
    late = "import os, time\ntime.sleep(int(os.environ['RANK']))\n"  # as a busy machine may be
    (folder / "late.py").write_text(late + (folder / "train.py").read_text())
    assert sorted_output("late.py") == []


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
loader = DataLoader(Squares(), 2, num_workers=1, collate_fn=collate)
[each.values for each in loader]
""",
    "%%ddp --push table\ntable.sum().item(), rank",
    "%%ddp --ranks 1\n%%writefile own.py\nvalue = 7",
    "%%ddp\nsys.path.insert(0, '.')\nimport own\nfrom own import *\nvalue",
    "%%ddp\nfrom time import time\ncallable(time)",
    "%%ddp\nimport time\ncallable(time.sleep)",
    "%%ddp\nimport torch.distributions as dist\ndef main(): return rank\nos = rank = 9\nmain()",
    "%%ddp --ranks 0\nif rank: y: int = 3\ny",
    "%%ddp\nexec('made = 4')\nnames = 'made' in locals()\nmade, names",
)
# by the script's own function, which writes a line at once: print() does not
SHOWN = (
    "[rank {rank}] Out [[0, 10], [20, 30]]",
    "[rank {rank}] Out (15.0, {rank})",
    "[rank {rank}] Out 7",
    "[rank {rank}] Out True",
    "[rank {rank}] Out True",
    "[rank {rank}] Out 9",
    "[rank {rank}] Out (4, True)",
)


def test_exported_cells_of_all_kinds_print_the_same_in_a_script(there: Notebook) -> None:
    there.run("import torch\ntable = torch.arange(6.0)")
    for source in OTHERS:
        assert there.run(source).status == "ok"
    assert there.run("%ddp export train.py").status == "ok"
    expected = [line.format(rank=rank) for rank in (0, 1) for line in SHOWN]
    expected.append("[rank 0] Out 3")
    assert sorted_output("train.py") == sorted(expected)
    assert again_in(there, "train.py") == sorted(expected)


def test_export_refuses_bad_file_names_and_an_empty_history(
    there: Notebook, folder: Path, snapshot: SnapshotAssertion
) -> None:
    there.run("%ddp start --nproc 2")
    assert "UsageError" in there.run("%ddp export train.py").text  # no cell has run
    assert not (folder / "train.py").exists()
    there.run("%%ddp\nx = 1")
    (folder / "mine.py").write_text("mine = 1")
    files = ("random.py", "torch.py", "mine.py", "mine.txt", "nowhere/train.py")
    assert {file: there.run(f"%ddp export {file}").text for file in files} == snapshot
    assert (folder / "mine.py").read_text() == "mine = 1"
    assert there.run("import mine\n%ddp export mine.py --force").status == "ok"
    assert "init_process_group" in (folder / "mine.py").read_text()
