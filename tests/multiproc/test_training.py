"""The whole training kit: training that loses a rank ends bit for bit as an unbroken run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from drivers.ranks import MakeRanks, Ranks

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(400)]

SETUP = """
import hashlib, os, time, torch, nbddp
from torch.utils.data import Dataset

class Noisy(Dataset):
    '''Augmented in the DataLoader's workers, from torch's generator.'''
    def __init__(self):
        drawn = torch.Generator().manual_seed(1)
        self.inputs = torch.randn(96, 8, generator=drawn)
    def __len__(self):
        return len(self.inputs)
    def __getitem__(self, index):
        return self.inputs[index] + 0.1 * torch.randn(8), index % 3

def digest(value):
    if isinstance(value, torch.Tensor):
        return hashlib.sha256(value.detach().cpu().numpy().tobytes()).hexdigest()
    if isinstance(value, dict):
        return {key: digest(each) for key, each in value.items()}
    return [digest(each) for each in value] if isinstance(value, (list, tuple)) else value
"""
TRAIN = """
torch.manual_seed(rank)
layers = torch.nn.Linear(8, 16), torch.nn.Dropout(0.2), torch.nn.ReLU(), torch.nn.Linear(16, 3)
model = nbddp.prepare(torch.nn.Sequential(*layers))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 20, gamma=0.5)
amp = nbddp.precision("bf16", accumulate=2, max_norm=1.0)
loader = nbddp.loader(Noisy(), 2, num_workers=2)
checkpoint = nbddp.Checkpoint(FOLDER)
parts = dict(model=model, optimizer=optimizer, scheduler=scheduler, precision=amp, loader=loader)
resumed = checkpoint.resume(**parts)
step = resumed.step if resumed else 0
nbddp.faults.at(step=30, rank=1, kind="kill") if STRIKES else None
while step < 60:
    for inputs, labels in loader:
        with amp.autocast(model):
            loss = torch.nn.functional.cross_entropy(model(inputs), labels)
        if amp.step(loss, optimizer):
            scheduler.step()
            step += 1
            while STRIKES and (rank, step) == (1, 30) and not all(map(os.path.exists, BEFORE)):
                time.sleep(0.01)
            nbddp.log(step=step, loss=loss, noise=torch.rand(1))
            if rank == 0 and step == 30:
                open(BEFORE[0], "w").close()
            if step % 11 == 0:
                checkpoint.save(step, **parts, asynchronous=True)
            if step == 60:
                break
checkpoint.wait()
outcome = digest([model.state_dict(), optimizer.state_dict()["state"], scheduler.last_epoch])
"""


def metrics(group: Ranks) -> dict[tuple[int, int], tuple[float, float]]:
    """The numbers of each rank and step; those of a step that was done again, the last time."""
    rows = group.read_lines("metrics.jsonl")
    return {(row["rank"], row["step"]): (row["loss"], row["noise"]) for row in rows}


def train(group: Ranks, folder: Path, *, strikes: bool) -> Any:
    # before a rank dies, the other rank's step is reported and the checkpoint is written
    before = str([f"{folder}-step-30", str(folder / "step-00000022.pt")])
    source = TRAIN.replace("FOLDER", repr(str(folder))).replace("STRIKES", str(strikes))
    source = source.replace("BEFORE", before)
    group.run(SETUP)
    group.run(source, max_restarts=1, quiet=True)
    return group.pull("outcome"), metrics(group), group.attempt


def test_run_that_loses_a_rank_at_step_30_ends_as_an_unbroken_run(
    make_group: MakeRanks, folder: Path
) -> None:
    whole, its_metrics, attempts = train(make_group(2), folder / "a", strikes=False)
    assert attempts == 1
    group = make_group(2)
    broken, metrics_of_broken, attempts = train(group, folder / "b", strikes=True)
    assert attempts == 2
    assert broken == whole
    assert metrics_of_broken == its_metrics
    assert len(its_metrics) == 2 * 60
    events = {event.kind: event.facts for event in group.events()}
    assert events["fault"]["fault"] == "kill@rank=1,step=30"
    assert (events["resume"]["step"], events["resumed"]["step"]) == (22, 23)
    assert events["resumed"]["lost"] == 8
