"""Warnings in a rank name the user's line, and never one of nbddp."""

from contextlib import suppress
from pathlib import Path

import pytest
from drivers.ranks import Capture, MakeRanks, Ranks

import nbddp
from nbddp import CellFailedError

pytestmark = pytest.mark.usefixtures("lasting_group")

OURS = str(Path(nbddp.__file__).parent)

PROBE = """
import sys
import warnings
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

def probe():
    for level in range(1, 50):  # however many frames up a library names the caller
        warnings.warn(f"probe {level}", stacklevel=level)

class Probed(nn.Linear):
    def named_parameters(self, *args, **options):
        probe()
        return super().named_parameters(*args, **options)
    def state_dict(self, *args, **options):
        probe()
        return super().state_dict(*args, **options)
    def forward(self, x):
        probe()
        return super().forward(x)

class Samples(Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, place):
        probe()
        return float(place)

class Number(float):
    def __float__(self):
        probe()
        return 1.0
    def __reduce__(self):
        probe()
        return float, (1.0,)

def parameters():
    probe()
    yield nn.Parameter(torch.ones(1))

plain = nn.Linear(2, 2)
warnings.simplefilter("always")
"""

CELLS = {
    "a DDP model": "DistributedDataParallel(Probed(2, 2))(torch.ones(1, 2));",
    "a DDP model that cannot be": "DistributedDataParallel(Probed(2, 2), device_ids=[7, 8])",
    "an optimizer": "optim.SGD(parameters(), lr=0.1);",
    "an optimizer that cannot be": "optim.SGD([{'params': parameters()}, 1], lr=0.1)",
    "a schedule": (
        "sgd = optim.SGD(plain.parameters(), lr=0.1)\n"
        "schedule = optim.lr_scheduler.LambdaLR(sgd, lambda step: (probe(), 1.0)[1])"
    ),
    "a loader": "for each in DataLoader(Samples()): pass",
    "a loader with workers": (
        "loader = DataLoader(Samples(), num_workers=1, persistent_workers=True, timeout=60)\n"
        "for epoch in range(2):\n    for each in loader: pass"
    ),
    "a loader that cannot load": "next(iter(DataLoader(Samples(), collate_fn=lambda _: 1 / 0)))",
    "a collective": "dist.all_gather_object([None] * world_size, Number())",
    "a collective that is left out": (
        "nbddp.faults.at(step=1, rank=rank, kind='skip')\nnbddp.log(step=1, loss=Number())\n"
        "dist.all_gather_object([None] * world_size, Number())"
    ),
    "a group": (
        "class Ranks(list):\n    def __iter__(self):\n        probe()\n"
        "        return super().__iter__()\n"
        "dist.destroy_process_group(dist.new_group(Ranks([0, 1])))"
    ),
    "a group that is there": "dist.init_process_group('gloo')",
    "a prepared model": "nbddp.prepare(Probed(2, 2))(torch.ones(1, 2));",
    "a loader of the kit": "for each in nbddp.loader(Samples(), batch_size=1): pass",
    "a checkpoint": (
        "import tempfile\nfolder = [tempfile.mkdtemp() if rank == 0 else '']\n"
        "dist.broadcast_object_list(folder)\n"
        "nbddp.Checkpoint(folder[0]).save(1, model=Probed(2, 2), more=torch.eye(2).to_sparse())\n"
        "nbddp.Checkpoint(folder[0]).resume(model=Probed(2, 2));"
    ),
}


def test_warnings_name_no_line_of_nbddp(group: Ranks, capsys: Capture) -> None:
    group.run(PROBE)
    for name, cell in CELLS.items():
        capsys.readouterr()
        with suppress(CellFailedError):
            group.run(cell)
        output = capsys.readouterr().out
        assert "Warning: probe" in output or "that is there" in name, name
        assert OURS not in output, name


# the number of frames up to the caller of the constructor is torch's own matter
FILTERED = """
class Old(nn.Linear):
    def named_parameters(self, *args, **options):
        frame, level = sys._getframe(), 1
        while frame.f_code is not DistributedDataParallel.__init__.__wrapped__.__code__:
            frame, level = frame.f_back, level + 1
        warnings.warn("old", FutureWarning, stacklevel=level + 1)
        return super().named_parameters(*args, **options)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("ACTION")
    for _ in range(2):
        DistributedDataParallel(Old(2, 2))
        DistributedDataParallel(Old(2, 2))
print("lines", [each.lineno for each in caught])
"""


@pytest.mark.parametrize(
    ("action", "lines"), [("default", "[12, 13]"), ("once", "[12]"), ("ignore", "[]")]
)
def test_warning_filters_of_the_user_apply_to_the_line_of_the_cell(
    group: Ranks, capsys: Capture, action: str, lines: str
) -> None:
    group.run(PROBE)
    capsys.readouterr()
    group.run(FILTERED.replace("ACTION", action))
    output = capsys.readouterr().out.splitlines()
    assert sorted(output) == [f"[rank 0] lines {lines}", f"[rank 1] lines {lines}"]


OWN = """
import warnings
asked = dist.is_initialized
def is_initialized():
    warnings.warn("of a call that no cell made", FutureWarning, stacklevel=2)
    return asked()
"""


def test_warning_about_a_call_of_nbddp_is_not_shown(make_group: MakeRanks, capsys: Capture) -> None:
    group = make_group(2)
    group.run(f"{OWN}dist.is_initialized = is_initialized")
    group.run("dist.is_initialized();\ndist.is_initialized = asked")
    output = capsys.readouterr().out
    assert output.count("FutureWarning") == 1  # of the cell's own call, on each rank
    assert "that another rank had printed are only in the logs" in output
    assert OURS not in output
