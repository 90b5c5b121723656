"""Trainers of other libraries after a heal: which cells run again, without those libraries."""

import pytest
from drivers.ranks import Capture, Ranks
from trained import kill

from nbddp.errors import CellFailedError

pytestmark = pytest.mark.timeout(240)

# classes that nbddp takes for those of Transformers; hidden in a function, since no module has them
LIBRARY = """
import os
def library():
    class Arguments:
        def __init__(self, folder): self.folder, self.process_index = folder, rank
    class Trainer:
        def __init__(self, model, args): self.model, self.args = model, args
        def train(self): return f"{self.args.folder} {self.args.process_index}"
    Arguments.__module__, Arguments.__qualname__ = "transformers.training_args", "TrainingArguments"
    Trainer.__module__, Trainer.__qualname__ = "transformers.trainer", "Trainer"
    return Trainer, Arguments
def make_trainer(model, args): return library()[0](model, args)
def make_arguments(folder): return library()[1](folder)
model = torch.nn.Linear(1, 1)
"""
ARGUMENTS = "args = make_arguments('out'); made = 'args'"
DIES = """
if rank == 1 and not os.path.exists('died'):
    open('died', 'w').close()
    os.kill(os.getpid(), 9)
"""


def test_automatic_heal_makes_what_the_trainer_needs_again(group: Ranks, capsys: Capture) -> None:
    trainer = "trainer = make_trainer(model, args)\ndef fit(): return trainer.train()"
    for source in (LIBRARY, ARGUMENTS, trainer, "other = make_trainer(model, args)"):
        group.run(source, quiet=True)
    assert group.evaluate(f"{DIES}\nfit()", heal=1) == ["out 0", "out 1"]
    printed = capsys.readouterr().out
    assert "ran again: cells 2-3; " in printed
    assert "cell [2] makes it, and runs again now" in printed
    group.heal(rerun=True)  # no rank is dead, and one trainer is left
    assert "ran again: cell 4; this has set other\n" in capsys.readouterr().out
    assert group.evaluate("other.args.process_index") == [0, 1]


def test_cell_that_fails_again_prevents_no_other_trainer(group: Ranks, capsys: Capture) -> None:
    first, second = "first = make_trainer(next(rows), args)", "second = make_trainer(model, args)"
    rows = "rows = iter([model])"
    for source in (LIBRARY, ARGUMENTS, rows, first, second):
        group.run(source, quiet=True)
    kill(group, 1)
    with pytest.raises(CellFailedError, match="StopIteration"):
        group.heal(rerun=True)
    printed = capsys.readouterr().out
    assert "cell [4] failed when it ran again (ranks 0-1: StopIteration" in printed
    assert "then `group.heal(rerun=True)`" in printed
    assert "ran again: cells 2,5; this has set args, made, second\n" in printed
    assert group.evaluate("second.args.process_index") == [0, 1]
    group.run(rows, quiet=True)
    group.heal(rerun=True)
    assert "ran again: cell 4; this has set first\n" in capsys.readouterr().out
    assert group.evaluate("first.args.process_index") == [0, 1]
