"""What a rank that takes a dead one's place has of another's names, and is told of the rest."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from drivers.ranks import Ranks
from trained import STATE, TRAINED, kill

from nbddp import CellFailedError

pytestmark = pytest.mark.multiproc


@pytest.fixture
def group(make_group: Callable[..., Ranks]) -> Ranks:
    """Three ranks that have trained."""
    group = make_group(3)
    group.run(TRAINED, quiet=True)
    return group


def test_what_a_new_rank_cannot_make_is_left_and_the_rest_is_healed(group: Ranks) -> None:
    group.run(
        "class Here:\n    def __reduce__(self): return made, ()\n"
        "def made():\n    if rank == 1: raise OSError('not on this rank')\n    return 7\n"
        "one, two = Here(), [Here()]",
        quiet=True,
    )
    kill(group, 1)
    left = group.heal().left
    assert {name: left[name] for name in ("one", "two")} == dict.fromkeys(
        ("one", "two"), "not on this rank"
    )
    states = group.run(STATE, quiet=True, wants_value=True).values()
    assert [each["at"] for each in states] == [True, False, True]
    assert states[0]["weights"] == states[1]["weights"] == states[2]["weights"]


def test_who_misses_a_name_is_told_where_to_make_it_again(group: Ranks) -> None:
    """A group that one rank makes alone waits for the others; a whole cell may have many."""
    group.run("every = dist.new_group()\nplace = open(__import__('os').devnull)", quiet=True)
    kill(group, 1)
    lines = group.heal().lines()
    assert (
        "not carried: every (a process group is made by all ranks at once); cell [1] makes it: "
        "run that line on all ranks"
    ) in lines
    assert (
        "not carried: place (a TextIOWrapper that is open belongs to its process); cell [1] makes "
        "it: run that line with --ranks 1"
    ) in lines


def test_a_new_rank_finds_what_cells_have_set_in_the_process(group: Ranks, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("class Mine:\n    value = 3\n")
    group.run(
        f"import os, sys\nos.chdir({str(tmp_path)!r})\nsys.path.insert(0, {str(tmp_path)!r})\n"
        "os.environ['MINE'] = 'kept'\nos.environ.pop('HOME', None)\n"
        "torch.set_default_dtype(torch.float64)\nimport mine\nthing = mine.Mine()",
        quiet=True,
    )
    kill(group, 1)
    assert "thing" not in group.heal().left
    told = group.run(
        "thing.value, os.getcwd(), os.environ['MINE'], 'HOME' in os.environ,"
        " str(torch.ones(1).dtype), os.environ['RANK'] == str(rank)",
        quiet=True,
        wants_value=True,
    ).values()
    assert told == [(3, str(tmp_path), "kept", False, "torch.float64", True)] * 3


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


def test_what_keeps_a_rank_is_told_the_new_ones(group: Ranks) -> None:
    """It would train on the donor's share else, and write the donor's files."""
    group.run(SHARES, quiet=True)
    kill(group, 1)
    healed = group.heal()
    assert {"trainer.rank", "settings['local_rank']"} <= {*healed.own}
    assert "trainer.sampler.rank" in healed.places
    told = group.run(
        "trainer.rank, settings, trainer.lora, [int(each) for each in trainer.loader]",
        quiet=True,
        wants_value=True,
    ).values()
    assert told == [
        (rank, {"local_rank": rank, "seed": 1}, {"rank": 2}, [rank, rank + 3, rank + 6])
        for rank in range(3)
    ]


def test_an_object_comes_without_what_belongs_to_its_process(group: Ranks) -> None:
    """A trainer with a lock in it is not lost, nor is its model."""
    group.run(SHARES, quiet=True)
    kill(group, 1)
    healed = group.heal()
    assert healed.left["trainer.gate"] == "cannot pickle '_thread.lock' object"
    assert (
        "not carried: trainer.gate (cannot pickle '_thread.lock' object); make it again, "
        "with --ranks 1"
    ) in healed.lines()
    group.run("trainer.model(torch.ones(1, 1)).sum().backward()", quiet=True)
    with pytest.raises(CellFailedError, match="a lock of another rank, which could not be") as said:
        group.run("with trainer.gate: pass", quiet=True)
    assert said.value.rank == 1
    group.run("trainer.gate = threading.Lock()", ranks=[1], quiet=True)
    group.run("with trainer.gate: pass", quiet=True)


def test_a_loader_that_keeps_its_workers_starts_others_in_a_new_rank(group: Ranks) -> None:
    group.run(
        "from torch.utils.data import DataLoader\n"
        "keeps = DataLoader(range(6), batch_size=2, num_workers=1, persistent_workers=True)\n"
        "held = [keeps]\nfor _ in keeps: pass",
        quiet=True,
    )
    kill(group, 1)
    assert not {"keeps", "keeps._iterator"} & {*group.heal().left}
    told = group.run(
        "[[each.tolist() for each in keeps] for _ in range(2)], held[0] is keeps",
        quiet=True,
        wants_value=True,
    ).values()
    assert told == [([[[0, 1], [2, 3], [4, 5]]] * 2, True)] * 3


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


@pytest.mark.parametrize("dead", [0, 1])
def test_a_new_rank_has_the_dead_ones_own_values(group: Ranks, dead: int) -> None:
    """With the donor's two ranks would log and save the checkpoint, or none would."""
    group.run(RANKS_OWN, quiet=True)
    kill(group, dead)
    healed = group.heal()
    assert {"ddp_rank", "trainer.gpu_id", "args.gpu"} <= {*healed.own}
    assert healed.unknown == ()
    told = group.run(OWN, quiet=True, wants_value=True).values()
    assert told == [owns(rank) for rank in range(3)]


@pytest.mark.parametrize("nproc", [2, 3])
@pytest.mark.parametrize("dead", [0, 1])
def test_values_that_the_dying_cell_set_follow_from_the_rank(
    make_group: Callable[..., Ranks], nproc: int, dead: int
) -> None:
    """No report tells them; one rank alone that lives cannot be compared with another."""
    group = make_group(nproc)
    with pytest.raises(CellFailedError):
        group.run(RANKS_OWN + DIES.format(dead), quiet=True)
    healed = group.heal()
    assert not {"ddp_rank", "master_process", "seed_offset"} & {*healed.unknown}
    told = group.run(OWN.replace(", str(device)", ""), quiet=True, wants_value=True).values()
    assert told == [owns(rank)[:-1] for rank in range(nproc)]


LOOP = """
import os
if "step" not in globals():
    step, is_main = 0, dist.get_rank() == 0
while step < 4:
    step += 1
    if step == 2 and rank == 0: os.kill(os.getpid(), 9)  # its replacement goes on after it
    dist.barrier()
is_main, step
"""


def test_a_loop_that_a_heal_resumes_has_one_main_process(
    make_group: Callable[..., Ranks],
) -> None:
    """Also where the cell makes its names only once, and rank 0 is the one that died."""
    mains = make_group(3).run(LOOP, heal=1, quiet=True, wants_value=True).values()
    assert mains == [(rank == 0, 4) for rank in range(3)]


def test_values_that_are_not_known_are_named(group: Ranks) -> None:
    group.run(
        "import os\nshard = torch.arange(4) + rank\nwriter = 'open' if rank == 0 else None\n"
        "common = 5\npath = [rank]\nfirst = object() if rank == 0 else None",
        quiet=True,
    )
    with pytest.raises(CellFailedError):
        group.run(
            "import random\nlucky = random.random() < 2\nseen = [*range(rank)]\ncommon = 6"
            + DIES.format(1),
            quiet=True,
        )
    healed = group.heal()
    assert {*healed.unknown} == {"shard", "lucky", "seen"}
    [line] = [each for each in healed.lines() if "had other values" in each]
    assert line.startswith("copied from rank 0, although rank 1 had or may have had other values: ")
    assert line.endswith("; set them with --ranks 1 if they must differ")
    told = group.run("writer, common, first is None, path", quiet=True, wants_value=True).values()
    assert told == [("open", 6, False, [0]), (None, 6, True, [1]), (None, 6, True, [2])]


HELD = """
import functools, random
from collections import Counter, namedtuple
from pathlib import Path
import numpy as np
import nbddp.worker.plain_values
nbddp.worker.plain_values.PATIENCE = 9.0  # the machine may be busy
Pair = namedtuple("Pair", "rank x")
def adds(r):
    return lambda x: x + r
def scaled_by(x, by=rank): return x * by
class Data:
    shard_of = rank
    def __init__(self):
        self.folder, self.files = Path("data") / str(rank), [f"{rank}.bin", "all.bin"]
        self.noise, self.move = np.random.default_rng(rank), adds(rank)
        self.shared, self.plus = np.random.default_rng(7), adds(7)
        self.scale = torch.tensor([rank, 1.0])
data, out, number, ids, few = Data(), Path(f"out/{rank}"), np.int64(rank), {rank}, range(rank, 9, 3)
settings, pair = {"peers": [rank + 1, rank - 1]}, Pair(rank, 1)
alias = settings["peers"]
noise, shared = torch.Generator().manual_seed(rank), torch.Generator().manual_seed(7)
part, same = functools.partial(pow, rank), functools.partial(pow, 7)
deck, old, counts = random.Random(rank), np.random.RandomState(rank), Counter({rank: 1})
"""
GIVEN_BACK = (
    "out, number, ids, few, pair, settings, data.folder, data.files, Data.shard_of, "
    "alias is settings['peers'], type(number) is np.int64, type(pair) is Pair"
)


def test_values_that_hold_a_rank_are_given_back_or_named(group: Ranks) -> None:
    """With the donor's two ranks would write one folder, and draw the same noise."""
    group.run(HELD, quiet=True)
    before = group.run(GIVEN_BACK, quiet=True, wants_value=True).values()
    with pytest.raises(CellFailedError):
        group.run("import os" + DIES.format(1), quiet=True)
    healed = group.heal()
    assert {*healed.unknown} == {
        *("data.noise", "data.move", "data.scale", "noise", "part", "deck", "old", "counts"),
        "scaled_by",
    }
    assert group.run(GIVEN_BACK, quiet=True, wants_value=True).values() == before
    assert len({*map(str, before)}) == 3


def test_pushed_values_are_a_ranks_own(group: Ranks) -> None:
    group.push({"share": "all"})
    group.push({"share": "mine"}, ranks=[1])
    kill(group, 1)
    group.heal()
    assert group.pull("share") == ["all", "mine", "all"]


FLOOD = """
import threading
class Place:
    def __init__(self):
        self.lock, self.rank = threading.Lock(), rank
places = [Place() for _ in range(300)]
latches = {f"latch{number}": threading.Lock() for number in range(30)}
globals().update(latches)
"""


def test_very_much_that_could_not_be_carried_is_told_in_a_few_lines(group: Ranks) -> None:
    group.run(FLOOD, quiet=True)
    kill(group, 1)
    healed = group.heal()
    why = "cannot pickle '_thread.lock' object"
    assert len(healed.left) + healed.more[why] == 300 + 30 + 30 + 1  # and the gate
    assert [name for name in healed.left if name.startswith("places")] == [
        f"places[{number}].lock" for number in range(5)
    ]
    assert len([name for name in healed.left if name.isidentifier()]) == 20
    _, places, *lines = healed.lines()
    assert places.endswith(" more")
    assert len(lines) == 20 + 5 + 1
    [event] = [each for each in group.snapshot().events if each.kind == "healed"]
    assert (event.facts["left"], event.facts["more"]) == (healed.left, healed.more)


@pytest.mark.full
def test_what_compiled_functions_leave_among_the_names_is_not_the_users(group: Ranks) -> None:
    group.run(
        "plus = torch.compile(lambda x: x + scale, backend='eager')\nplus(torch.ones(1))\n"
        "def split(x):\n    print(x)\n    return x * 2\n"
        "twice = torch.compile(split, backend='eager')\ntwice(torch.ones(1))",
        quiet=True,
    )
    kill(group, 1)
    assert [name for name in group.heal().left if name.startswith("__")] == []


def test_a_checkpoint_that_has_saved_comes_and_saves_on(group: Ranks, tmp_path: Path) -> None:
    group.run(
        f"saved = nbddp.Checkpoint({str(tmp_path)!r})\nsaved.save(1, model=model)\n"
        "saved.save(2, asynchronous=True, model=model)",
        quiet=True,
    )
    kill(group, 1)
    assert "saved" not in group.heal().left
    group.run("saved.save(3, model=model)", quiet=True)
    assert (
        group.run("saved.resume(model=model).step", quiet=True, wants_value=True).values()
        == [3] * 3
    )


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


def test_optimizers_that_wrap_another_are_carried_whole(
    group: Ranks, capsys: pytest.CaptureFixture[str]
) -> None:
    group.run(WRAPPED)
    kill(group, 1)
    assert not group.heal().unknown
    capsys.readouterr()
    train = "train(sharp), train(wrapper)\nsharp.radius, model.module.weight.tolist()"
    first, *others = group.run(train, wants_value=True).values()
    assert others == [first] * 2
    assert "not on the new process group" not in capsys.readouterr().out


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


def test_weak_references_and_attributes_that_a_class_shares_are_carried(
    group: Ranks, tmp_path: Path
) -> None:
    (tmp_path / "sharing.py").write_text(SHARING)
    group.run(f"import sys\nsys.path.append({str(tmp_path)!r})\n{REFERENCES}")
    kill(group, 1)
    healed = group.heal()
    assert {*healed.left} == {"gate"}  # a lock
    assert not healed.unknown
    values = group.run(
        "two.more = 6\n"
        "seen() is part, gone() is None, of_weights() is weights, "
        "one.count, one.more, type(one).state is vars(two)",
        wants_value=True,
    ).values()
    assert values == [(True, True, True, 5, 6, True)] * 3
