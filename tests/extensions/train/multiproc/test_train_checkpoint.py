"""Checkpoints of real ranks: bit for bit after a kill, and an error on one is an error on all."""

import re
from pathlib import Path

import pytest
import torch
from drivers.ranks import MakeRanks, Ranks

from nbddp import CellFailedError

pytestmark = pytest.mark.usefixtures("lasting_group")

# Each rank has random numbers of its own (dropout, noise) and a place of its own in the data.
RUN = """
import os, random, resource, signal, warnings
import numpy as np
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from nbddp import Checkpoint, precision

def make_net():
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 1))

def shard(net):
    return fully_shard(net, mesh=init_device_mesh("cpu", (world_size,)))

def whole(tensor):
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).tolist()

class Loader:
    def __init__(self):
        self.generator = torch.Generator().manual_seed(100 + rank)
    def batch(self):
        return torch.randn(8, 4, generator=self.generator)
    def state_dict(self):
        return {"generator": self.generator.get_state(), "rank": rank}
    def load_state_dict(self, state):
        self.generator.set_state(state["generator"])
        self.rank = state["rank"]

class Run:
    def __init__(self, wrap=DistributedDataParallel, kind="fp32", accumulate=1):
        torch.manual_seed(7)
        self.net = make_net()
        self.model = wrap(self.net)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 60)
        self.amp = precision(kind, accumulate=accumulate, max_norm=1.0)
        self.loader = Loader()
        self.losses = []
        for seed in (torch.manual_seed, random.seed, np.random.seed):
            seed(1000 + rank)

    @property
    def parts(self):
        return dict(model=self.model, optimizer=self.optimizer, scheduler=self.scheduler,
                    precision=self.amp, loader=self.loader)

    def step(self):
        is_done = False
        while not is_done:
            inputs = self.loader.batch() * random.random() + np.random.rand()
            with self.amp.autocast(self.model):
                loss = (self.model(inputs).float() - inputs.sum(1, keepdim=True)).square().mean()
            is_done = self.amp.step(loss, self.optimizer, scheduler=self.scheduler)
        dist.all_reduce(loss := loss.detach())
        self.losses.append(loss.item())

    def train(self, first, last, checkpoint=None, asynchronous=False, die_at=None):
        for step in range(first, last):
            self.step()
            if checkpoint and step % 10 == 9:
                checkpoint.save(step, **self.parts, extra=self.losses, asynchronous=asynchronous)
            if step == die_at and rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
        if checkpoint:
            checkpoint.wait()

    def result(self):
        parameters = [whole(each) for each in self.net.parameters()]
        return parameters, self.losses, self.scheduler.get_last_lr()
"""


# a rank's warnings while it resumes are in ``words``
RESUME = """
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter('always')
    resumed = Checkpoint({folder!r}).resume(**{parts})
words = [str(each.message) for each in caught]
"""


def test_resume_with_another_world_size_warns(make_group: MakeRanks, folder: Path) -> None:
    group = make_group(2)
    group.run(RUN + "run = Run()\nrun.train(0, 10, Checkpoint('kept'))")
    weights = torch.tensor(group.pull("run.net[0].weight.tolist()", rank=0))
    group.close()
    three = make_group(3)
    resume = RESUME.format(folder=str(folder / "kept"), parts="run.parts")
    three.run(f"{RUN}run = Run()\n{resume}run.train(10, 12)")
    [words], *others = three.pull("words")
    assert re.search(r"step-00000009\.pt\b.*\b2\b.*\b3\b.*\brandom\b", words)
    assert others == [[], []]
    assert three.pull("run.loader.rank") == [0, 0, 0]
    found = torch.tensor(three.pull("run.net[0].weight.tolist()", rank=2))
    assert (found - weights).abs().max() < 0.1


ATTEMPT = """
try:
    {attempt}
    words = ""
except Exception as error:
    words = f"{{type(error).__name__}}: {{error}}"
dist.barrier()
"""


def fill_disk(group: Ranks, most: str, save: str) -> list[str]:
    group.run(
        "limit = resource.getrlimit(resource.RLIMIT_FSIZE)\n"
        f"resource.setrlimit(resource.RLIMIT_FSIZE, ({most}, limit[1]))\n"
        + ATTEMPT.format(attempt=f"{save}; checkpoint.wait()")
        + "resource.setrlimit(resource.RLIMIT_FSIZE, limit)"
    )
    words: list[str] = group.pull("words")
    return words


def test_full_disk_on_rank_0_fails_all_ranks_and_keeps_the_old_checkpoint(
    group: Ranks, folder: Path
) -> None:
    group.run(RUN + "run = Run()\ncheckpoint = Checkpoint('kept')\ncheckpoint.save(1, **run.parts)")
    for options in ("", ", asynchronous=True"):
        reason, others = fill_disk(group, "1000", f"checkpoint.save(2, **run.parts{options})")
        assert reason.startswith("CheckpointError: ")
        assert all(words in reason for words in ("step-00000002.pt", "[Errno 27]"))
        assert others == reason.replace("CheckpointError: ", "CheckpointError: rank 0: ")
        assert [each.name for each in (folder / "kept").iterdir()] == ["step-00000001.pt"]
    group.run("resumed = checkpoint.resume(**run.parts)")
    assert group.pull("resumed.step") == [1, 1]


def test_save_or_resume_error_on_one_rank_fails_all_ranks(group: Ranks) -> None:
    group.run(RUN + "run = Run()\ncheckpoint = Checkpoint('kept')\ncheckpoint.save(1, **run.parts)")
    for bad, act in (
        ("state_dict = lambda: 1 / 0 if rank == 1 else {}", "save(2, **run.parts)"),
        ("load_state_dict = lambda state: 1 / 0 if rank == 1 else {}", "resume(**run.parts)"),
    ):
        group.run(ATTEMPT.format(attempt=f"run.loader.{bad}; checkpoint.{act}"))
        assert group.pull("words") == [
            "CheckpointError: rank 1: ZeroDivisionError: division by zero",
            "ZeroDivisionError: division by zero",
        ]


@pytest.mark.gate_runs("spread")
@pytest.mark.parametrize(
    "made",
    ["Run(kind='bf16', accumulate=2)", "Run(shard, accumulate=2)"],
    ids=["plain", "spread"],
)
def test_killed_and_resumed_run_ends_bit_for_bit_as_an_unbroken_run(
    make_group: MakeRanks, folder: Path, made: str
) -> None:
    group = make_group(2)
    begin = f"{RUN}run = {made}\ncheckpoint = Checkpoint('kept', keep=1)\n"
    group.run(f"{begin}run.train(0, 60)\nfound = run.result()")
    unbroken = group.pull("found")
    group.restart()
    with pytest.raises(CellFailedError, match="rank 1"):
        group.run(f"{begin}run.train(0, 60, checkpoint, asynchronous=True, die_at=35)")
    group.restart()
    group.run(
        f"{begin}resumed = checkpoint.resume(**run.parts)\nrun.losses = resumed['extra']\n"
        "run.train(resumed.step + 1, 60, checkpoint)\nfound = run.result()"
    )
    assert group.pull("resumed.step") in ([29, 29], [19, 19])
    assert group.pull("found") == unbroken
    assert group.pull("run.loader.rank") == [0, 1]
    assert [each.stem for each in (folder / "kept").iterdir()] == ["step-00000059"]


def test_damaged_shard_is_noticed_and_a_plain_model_loads_a_sharded_checkpoint(
    make_group: MakeRanks, group: Ranks, folder: Path
) -> None:
    kept = folder / "kept"
    group.run(
        RUN + "run = Run(shard)\nrun.train(0, 20, Checkpoint('kept'))\nfound = run.result()[0]"
    )
    weights = group.pull("found", rank=0)
    one = make_group(1)
    one.run(
        RUN
        + "net = make_net()\n"
        + RESUME.format(folder=str(kept), parts="dict(model=net)")
        + "found = [each.tolist() for each in net.parameters()]"
    )
    assert one.pull("resumed.step, found") == [(19, weights)]
    piece = max((kept / "step-00000019").glob("__1_*"))
    piece.write_bytes(piece.read_bytes()[:-1])
    group.run(RESUME.format(folder="kept", parts="run.parts"))
    assert group.pull("resumed.step") == [9, 9]
    [words] = group.pull("words", rank=0)
    assert all(name in words for name in (piece.name, "step-00000009"))


GAN = """
def gan(seed):
    torch.manual_seed(seed)
    parts = {"generator": shard(nn.Linear(4, 4)), "discriminator": shard(nn.Linear(4, 2))}
    for name, net in list(parts.items()):
        parts[f"{name}_optimizer"] = torch.optim.Adam(net.parameters(), lr=0.01)
        net(torch.ones(1, 4)).sum().backward()
        parts[f"{name}_optimizer"].step()
    return {**parts, "average": nn.Linear(4, 1), "loader": Loader()}

def state_of(parts):
    found = []
    for name in sorted(parts.keys() - {"loader"}):  # on all ranks in one order
        states = parts[name].state_dict()
        for each in states.get("state", states).values():
            found += each.values() if isinstance(each, dict) else [each]
    return [whole(each) for each in found]
"""


def test_several_models_and_optimizers_are_restored_by_name(group: Ranks) -> None:
    group.run(
        f"{RUN}{GAN}saved, again = gan(1), gan(2)\nsaved['loader'].batch()\n"
        "checkpoint = Checkpoint('kept')\n"
        "checkpoint.save(7, **saved, best=0.5, asynchronous=True)\ncheckpoint.wait()\n"
        "differs = state_of(again) != state_of(saved)\n"
        "resumed = checkpoint.resume(**again, best=0.0)\n"
    )
    assert group.pull("differs and state_of(again) == state_of(saved)") == [True, True]
    assert group.pull("resumed.step, resumed['best']") == [(7, 0.5)] * 2
    assert group.pull("torch.equal(saved['loader'].batch(), again['loader'].batch())") == [True] * 2
    group.run(
        "alone = {name: again[name] for name in ('generator_optimizer',)}\n"
        "rest = dict.fromkeys(again.keys() - alone.keys())\n"
        + ATTEMPT.format(attempt="checkpoint.resume(**alone, **rest)")
    )
    for words in group.pull("words"):
        assert words.startswith("CheckpointError: generator_optimizer trains")


def test_sharded_and_plain_saves_of_one_step_replace_each_other(group: Ranks, folder: Path) -> None:
    group.run(
        f"{RUN}run, plain = Run(shard), Run()\ncheckpoint = Checkpoint('kept')\n"
        "checkpoint.save(3, model=run.net)\nmodel = make_net()\ndel run\n"
        "checkpoint.save(3, model=model)\n"
    )
    assert [each.name for each in (folder / "kept").iterdir()] == ["step-00000003.pt"]
    group.run("del model\ncheckpoint.save(3, model=Run(shard).net)")
    assert [each.name for each in (folder / "kept").iterdir()] == ["step-00000003"]


def test_full_disk_for_one_shard_fails_all_ranks(group: Ranks, folder: Path) -> None:
    group.run(
        RUN + "run = Run(shard)\ncheckpoint = Checkpoint('kept')\nrun.train(0, 10, checkpoint)"
    )
    for options in ("", ", asynchronous=True"):
        save = f"checkpoint.save(10, **run.parts{options})"
        for words in fill_disk(group, "100 if rank == 1 else limit[0]", save):
            assert words.startswith("CheckpointError: ")
            assert all(each in words for each in (f"{folder / 'kept'}/.step-000", "[Errno 27]"))
    group.run("checkpoint.save(11, **run.parts)")
    found = sorted(each.name for each in (folder / "kept").iterdir())
    assert found == ["step-00000009", "step-00000011"]


def test_sharded_model_rejects_other_sharded_and_plain_checkpoints(
    group: Ranks, folder: Path
) -> None:
    group.run(
        RUN + "checkpoint = Checkpoint('kept')\ncheckpoint.save(1, model=Run(shard).net)\n"
        "other = shard(nn.Linear(3, 3))\n"
        + ATTEMPT.format(attempt="checkpoint.resume(model=other)")
    )
    for words in group.pull("words"):
        assert words.startswith("CheckpointError: ")
        assert all(each in words for each in (f"{folder / 'kept'}/step-00000001 ", " model."))
    group.run(
        "checkpoint = Checkpoint('whole')\ncheckpoint.save(1, model=Run().net)\nrun = Run(shard)\n"
        + ATTEMPT.format(attempt="checkpoint.resume(model=run.model)")
    )
    for words in group.pull("words"):
        assert words.startswith(f"CheckpointError: {folder / 'whole' / 'step-00000001.pt'} ")
