"""The names that a new rank gets, the report, and a new rank that dies during the transfer."""

import re
from pathlib import Path

import pytest
from drivers.ranks import Capture, MakeRanks, Ranks
from syrupy.assertion import SnapshotAssertion
from trained import STATE, TRAINED, kill

from nbddp.errors import CellFailedError

pytestmark = pytest.mark.timeout(240)

LOCK = "cannot pickle '_thread.lock' object"


@pytest.fixture
def group(make_group: MakeRanks) -> Ranks:
    group = make_group(3)
    group.run(TRAINED, quiet=True)
    return group


def test_name_that_fails_to_unpickle_is_left_out_of_the_heal(group: Ranks) -> None:
    group.run(
        "class Here:\n    def __reduce__(self): return made, ()\n"
        "def made():\n    if rank == 1: raise OSError('not on this rank')\n    return 7\n"
        "one, two = Here(), [Here()]\nlocks = [threading.Lock() for _ in range(30)]",
        quiet=True,
    )
    kill(group, 1)
    healed = group.heal()
    not_healed = healed.left
    assert [not_healed["one"], not_healed["two"]] == ["not on this rank"] * 2
    assert (not_healed["gate"], "locks[18]" in not_healed, healed.more) == (LOCK, True, {"": 11})
    with pytest.raises(CellFailedError) as caught:
        group.run("gate", quiet=True)
    hint = f"The heal did not carry `gate` ({LOCK}): run the line of cell [1] that makes it again"
    assert hint in caught.value.report
    states = group.evaluate(STATE)
    assert [each["at"] for each in states] == [True, False, True]
    assert states[0]["weights"] == states[1]["weights"] == states[2]["weights"]


def test_heal_copies_folder_path_environment_and_dtype(group: Ranks, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("class Mine:\n    value = 3\n")
    group.run(
        f"import os, sys\nos.chdir({str(tmp_path)!r})\nsys.path.insert(0, {str(tmp_path)!r})\n"
        "os.environ['MINE'] = 'kept'\nos.environ.pop('HOME', None)\n"
        "torch.set_default_dtype(torch.float64)\nimport mine\nthing = mine.Mine()",
        quiet=True,
    )
    kill(group, 1)
    assert "thing" not in group.heal().left
    found = group.evaluate(
        "thing.value, os.getcwd(), os.environ['MINE'], 'HOME' in os.environ,"
        " str(torch.ones(1).dtype), os.environ['RANK'] == str(rank)"
    )
    assert found == [(3, str(tmp_path), "kept", False, "torch.float64", True)] * 3


SHARES = """
import threading
from torch.utils.data import DataLoader, DistributedSampler
class Trainer:
    def __init__(self):
        self.rank, self.world_size, self.lora = dist.get_rank(), dist.get_world_size(), {"rank": 2}
        self.model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))
        self.sampler = DistributedSampler(range(9), shuffle=False)
        self.loader = DataLoader(range(9), sampler=self.sampler)
        self.gate = threading.Lock()
trainer = Trainer()
settings = {"local_rank": rank, "seed": 1}
"""


def test_healed_objects_get_the_new_rank_and_lose_process_local_parts(group: Ranks) -> None:
    """Otherwise the new rank would train on the donor's shard and write the donor's files."""
    group.run(SHARES, quiet=True)
    kill(group, 1)
    healed = group.heal()
    assert {"trainer.rank", "settings['local_rank']"} <= {*healed.own}
    assert "trainer.sampler.rank" in healed.places
    assert "trainer.gate" in healed.left
    found = group.evaluate(
        "trainer.rank, settings, trainer.lora, [int(each) for each in trainer.loader]"
    )
    assert found == [
        (rank, {"local_rank": rank, "seed": 1}, {"rank": 2}, [rank, rank + 3, rank + 6])
        for rank in range(3)
    ]
    group.run("trainer.model(torch.ones(1, 1)).sum().backward()", quiet=True)
    group.run("trainer.gate = threading.Lock()", ranks=[1], quiet=True)
    group.run("with trainer.gate: pass", quiet=True)


RANKS_OWN = """
import argparse, os
ddp = int(os.environ.get("RANK", -1)) != -1
if ddp:
    ddp_rank = int(os.environ["RANK"])
    ddp_local_rank = int(os.environ["LOCAL_RANK"])
    master_process = ddp_rank == 0
    seed_offset = ddp_rank
else:
    master_process, seed_offset = True, 0
is_main = rank == 0
device = f"meta:{ddp_local_rank}"
run_name = f"run of {seed_offset}"
class Trainer:
    def __init__(self):
        self.gpu_id = int(os.environ["LOCAL_RANK"])
        self.model = torch.nn.Linear(1, 1)
trainer = Trainer()
args = argparse.Namespace(gpu=rank, epochs=1)
"""
OWN = (
    "ddp_rank, ddp_local_rank, seed_offset, trainer.gpu_id, args.gpu, master_process, is_main, "
    "run_name, str(device)"
)
DIES = "\nif rank == {}: os.kill(os.getpid(), 9)\ndist.barrier()"


def owns(rank: int) -> tuple[object, ...]:
    return (*[rank] * 5, rank == 0, rank == 0, f"run of {rank}", f"meta:{rank}")


def test_new_rank_gets_the_rank_specific_values_of_the_dead_rank(group: Ranks) -> None:
    """With the donor's values, two ranks or no rank would log and save the checkpoint."""
    group.run(RANKS_OWN, quiet=True)
    kill(group, 0)
    healed = group.heal()
    assert {"ddp_rank", "trainer.gpu_id", "args.gpu"} <= {*healed.own}
    assert healed.unknown == ()
    assert group.evaluate(OWN) == [owns(rank) for rank in range(3)]


@pytest.mark.gate_runs("0-3", "1-2")
@pytest.mark.parametrize("nproc", [2, 3])
@pytest.mark.parametrize("dead", [0, 1])
def test_values_set_by_the_failing_cell_are_derived_from_the_rank(
    make_group: MakeRanks, nproc: int, dead: int
) -> None:
    """No report lists them; a single surviving rank cannot be compared with another."""
    group = make_group(nproc)
    group.failure_of(RANKS_OWN + DIES.format(dead), quiet=True)
    healed = group.heal()
    assert not {"ddp_rank", "master_process", "seed_offset"} & {*healed.unknown}
    found = group.evaluate(OWN.replace(", str(device)", ""))
    assert found == [owns(rank)[:-1] for rank in range(nproc)]


def test_heal_reports_names_that_may_differ_from_the_dead_rank(
    group: Ranks, snapshot: SnapshotAssertion, tmp_path: Path
) -> None:
    group.push({"share": "all"})
    group.push({"share": "mine"}, ranks=[1])
    group.run(
        f"{SHARES}import os\nimport numpy as np\n"
        f"from multiprocessing.shared_memory import SharedMemory\nos.chdir({str(tmp_path)!r})\n"
        "at = 0  # an address, which may differ between ranks\n"
        "shard = torch.arange(4) + rank\ncommon, path = 5, [rank]\n"
        "writer, first = ('open', object()) if rank == 0 else (None, None)\n"
        # a group that one rank makes alone would wait for the others
        "every, null = dist.new_group(), open(os.devnull)\n"
        "rows = np.memmap(f'rows{rank}', mode='w+', shape=(3,))\n"
        "segment = SharedMemory(create=True, size=8)",
        quiet=True,
    )
    group.run("only = {'a': torch.ones(2)}", ranks=[1])
    dying = "import random\nlucky = random.random() < 2\nseen = [*range(rank)]\ncommon = 6"
    group.failure_of(dying + DIES.format(1), quiet=True)
    healed = group.heal()
    assert {*healed.unknown} == {"shard", "lucky", "seen"}
    found = group.evaluate("writer, common, first is None, path, share")
    assert found == [
        ("open", 6, False, [0], "all"),
        (None, 6, True, [1], "mine"),
        (None, 6, True, [2], "all"),
    ]
    assert re.sub(r"in \S+ s \(.*\)", "in S s (NAMES, BYTES)", str(healed)) == snapshot


@pytest.mark.full
def test_heal_ignores_globals_created_by_torch_compile(group: Ranks) -> None:
    group.run(
        "plus = torch.compile(lambda x: x + scale, backend='eager')\nplus(torch.ones(1))\n"
        "def split(x):\n    print(x)\n    return x * 2\n"
        "twice = torch.compile(split, backend='eager')\ntwice(torch.ones(1))",
        quiet=True,
    )
    kill(group, 1)
    assert [name for name in group.heal().left if name.startswith("__")] == []


WRAPPED = """
class Sharp(torch.optim.Optimizer):  # as SAM is made: torch pickles none of its own attributes
    def __init__(self, inner):
        super().__init__(inner.param_groups, {})
        self.inner, self.radius = inner, 0.05
    def step(self): self.inner.step()
class Wrapper(torch.optim.Optimizer):  # as Lightning Fabric's: never made by torch
    def __init__(self, inner):
        own = {k: v for k, v in vars(inner).items() if k not in ("state", "step")}
        self.__dict__.update(own, _inner=inner)
    @property
    def state(self): return self._inner.state
    def __getattr__(self, name): return getattr(self._inner, name)
    def step(self): self._inner.step()
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
sharp = Sharp(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
wrapper = Wrapper(sharp.inner)
def train(optimizer):
    optimizer.zero_grad()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
train(sharp), train(wrapper)
"""
TRAIN_AGAIN = "train(sharp), train(wrapper)\nsharp.radius, model.module.weight.tolist()"


def test_heal_copies_wrapped_optimizers_completely(group: Ranks, capsys: Capture) -> None:
    group.run(WRAPPED)
    kill(group, 1)
    assert not group.heal().unknown
    capsys.readouterr()
    first, *others = group.run(TRAIN_AGAIN, wants_value=True).values()
    assert others == [first] * 2
    assert "nbddp:" not in capsys.readouterr().out  # the ranks have equal states


HOOKS = """
import collections, threading
from torch.optim.optimizer import register_optimizer_step_post_hook
counts = collections.Counter()
def counted(name):
    def hook(*_): counts[name] += 1
    return hook
net = torch.nn.Linear(4, 4)
ddp = torch.nn.parallel.DistributedDataParallel(net)
sgd = torch.optim.SGD(ddp.parameters(), lr=1.0)
clip = torch.nn.utils.clip_grad_norm_
sgd.register_step_pre_hook(lambda *_: clip(net.parameters(), 0.01) and None)
for kind in ("step", "state_dict", "load_state_dict"):
    getattr(sgd, f"register_{kind}_pre_hook")(counted(f"before {kind}"))
    handle = getattr(sgd, f"register_{kind}_post_hook")(counted(f"after {kind}"))
net.weight.register_hook(counted("gradient"))
net.bias.register_post_accumulate_grad_hook(counted("accumulated"))
net.register_forward_hook(counted("forward"))
plain = torch.ones(2, requires_grad=True)
doubled = plain.register_hook(lambda gradient: gradient * 2)
locked = torch.ones(2, requires_grad=True)
locked.register_hook(lambda _, lock=threading.Lock(): lock.acquire())
register_optimizer_step_post_hook(lambda *_: None)
torch.nn.modules.module.register_module_forward_hook(lambda *_: None)
def gradients():
    plain.grad = None
    plain.sum().backward()
    return plain.grad.tolist()
def train():
    counts.clear()
    for _ in range(3):
        sgd.zero_grad()
        ddp(torch.ones(2, 4)).square().mean().backward()
        sgd.step()
    sgd.load_state_dict(sgd.state_dict())
    return dict(counts), net.weight.tolist(), gradients()
wanted = train()[0]
"""


def test_hooks_of_optimizers_and_tensors_are_copied_or_named(group: Ranks) -> None:
    """A new rank without the hook that clips gradients got other weights, without an error."""
    group.run(HOOKS, quiet=True)
    kill(group, 1)
    not_healed = dict(group.heal().left)
    assert not_healed.pop("gate")
    assert {*not_healed} == {
        "a lock in locked",
        "global hook of modules",
        "global hook of optimizers",
    }
    found = group.evaluate("train()")
    assert found == [found[0]] * 3
    assert (found[0][0], found[0][2]) == (group.evaluate("wanted")[0], [2.0] * 2)
    group.run("doubled.remove(), handle.remove()")
    assert group.evaluate("gradients(), train()[0]['after step']") == [([1.0] * 2, 3)] * 3
    with pytest.raises(CellFailedError, match="a lock that the heal did not copy to this rank"):
        group.run("locked.sum().backward()", ranks=[1], quiet=True)


def test_heal_names_a_loader_that_cannot_resume(group: Ranks, capsys: Capture) -> None:
    group.run("own = nbddp.loader(range(40 - 8 * (rank == 2)), 4)", quiet=True)
    kill(group, 1)
    group.heal()
    group.run("pass")
    [line] = re.findall("no longer usable: own: (.*)", capsys.readouterr().out)
    assert "ArgumentError" in line
    assert line.endswith("(rank 2)")


SHARING = "class Shared:\n    state = {}\n    def __init__(self): self.__dict__ = self.state\n"
REFERENCES = """
import weakref
from sharing import Shared
class Part: pass
part = Part()
seen, gone = weakref.ref(part), weakref.ref(Part())
weights = torch.ones(2)
of_weights = weakref.ref(weights)  # of a tensor nobody can ask whether it is true
one, two = Shared(), Shared()
one.count = 5
"""


SAVED = """
saved = nbddp.Checkpoint("saved")
saved.save(1, model=model)
saved.save(2, asynchronous=True, model=model)
"""
KEEPS_WORKERS = """
from torch.utils.data import DataLoader
keeps = DataLoader(range(6), batch_size=2, num_workers=1, persistent_workers=True)
held = [keeps]
for _ in keeps: pass
"""


def test_heal_copies_references_checkpoints_and_loaders(group: Ranks, tmp_path: Path) -> None:
    (tmp_path / "sharing.py").write_text(SHARING)
    group.run(f"import sys\nsys.path.append({str(tmp_path)!r})\n{REFERENCES}")
    group.run(SAVED + KEEPS_WORKERS, quiet=True)
    kill(group, 1)
    healed = group.heal()
    assert {*healed.left} == {"gate"}  # a lock
    assert not healed.unknown
    found = group.evaluate(
        "two.more = 6\n"
        "seen() is part, gone() is None, of_weights() is weights, "
        "one.count, one.more, type(one).state is vars(two)"
    )
    assert found == [(True, True, True, 5, 6, True)] * 3
    found = group.evaluate("saved.save(3, model=model)\nsaved.resume(model=model).step")
    assert found == [3] * 3
    found = group.evaluate(
        "[[each.tolist() for each in keeps] for _ in range(2)], held[0] is keeps"
    )
    assert found == [([[[0, 1], [2, 3], [4, 5]]] * 2, True)] * 3
