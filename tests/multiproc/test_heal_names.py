"""What a rank that takes a dead one's place has of another's names, and is told of the rest."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from trained import STATE, TRAINED, kill

from nbddp import CellFailedError, WorkerGroup

pytestmark = pytest.mark.multiproc


@pytest.fixture
def group() -> Iterator[WorkerGroup]:
    """Three ranks that have trained."""
    with WorkerGroup(nproc=3) as group:
        group.run(TRAINED, quiet=True)
        yield group


def test_what_a_new_rank_cannot_make_is_left_and_the_rest_is_healed(group: WorkerGroup) -> None:
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


def test_who_misses_a_name_is_told_where_to_make_it_again(group: WorkerGroup) -> None:
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


def test_a_new_rank_finds_what_cells_have_set_in_the_process(
    group: WorkerGroup, tmp_path: Path
) -> None:
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


def test_what_keeps_a_rank_is_told_the_new_ones(group: WorkerGroup) -> None:
    """It would train on the donor's share else, and write the donor's files."""
    group.run(SHARES, quiet=True)
    kill(group, 1)
    healed = group.heal()
    assert {"trainer.rank", "trainer.sampler.rank", "settings['local_rank']"} <= {*healed.places}
    told = group.run(
        "trainer.rank, settings, trainer.lora, [int(each) for each in trainer.loader]",
        quiet=True,
        wants_value=True,
    ).values()
    assert told == [
        (rank, {"local_rank": rank, "seed": 1}, {"rank": 2}, [rank, rank + 3, rank + 6])
        for rank in range(3)
    ]


def test_an_object_comes_without_what_belongs_to_its_process(group: WorkerGroup) -> None:
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


FLOOD = """
import threading
class Place:
    def __init__(self):
        self.lock, self.rank = threading.Lock(), rank
places = [Place() for _ in range(300)]
latches = {f"latch{number}": threading.Lock() for number in range(30)}
globals().update(latches)
"""


def test_very_much_that_could_not_be_carried_is_told_in_a_few_lines(group: WorkerGroup) -> None:
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
    [event] = [each for each in group._session.snapshot().events if each.kind == "healed"]
    assert (event.facts["left"], event.facts["more"]) == (healed.left, healed.more)


def test_what_compiled_functions_leave_among_the_names_is_not_the_users(group: WorkerGroup) -> None:
    group.run(
        "plus = torch.compile(lambda x: x + scale, backend='eager')\nplus(torch.ones(1))\n"
        "def split(x):\n    print(x)\n    return x * 2\n"
        "twice = torch.compile(split, backend='eager')\ntwice(torch.ones(1))",
        quiet=True,
    )
    kill(group, 1)
    assert [name for name in group.heal().left if name.startswith("__")] == []


def test_a_checkpoint_that_has_saved_comes_and_saves_on(group: WorkerGroup, tmp_path: Path) -> None:
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
