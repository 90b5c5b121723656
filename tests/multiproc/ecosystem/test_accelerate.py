"""Hugging Face's Accelerate in a cell."""

from __future__ import annotations

from pathlib import Path

import pytest
import regression
from drivers.ranks import Ranks
from notebook import Notebook
from processes import wait_until

pytest.importorskip("accelerate")
pytestmark = [pytest.mark.multiproc, pytest.mark.ecosystem, pytest.mark.timeout(180)]

TRAINING = f"""{regression.SOURCE}
from pathlib import Path
from accelerate import Accelerator

def train(repeats=1):
    accelerator = Accelerator(cpu=True)
    model = make_model()
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1), make_loader(repeats)
    )
    for x, y in loader:
        Path('begun').touch()
        optimizer.zero_grad()
        accelerator.backward(nn.functional.mse_loss(model(x), y))
        optimizer.step()
    return accelerator, model
"""


def test_accelerate_matches_training_in_one_process(group: Ranks) -> None:
    group.run(f"{TRAINING}\naccelerator, model = train()")
    first, second = group.pull("accelerator.unwrap_model(model).weight[0].tolist()")
    assert first == second == pytest.approx(regression.trained(epochs=1), rel=1e-5)
    found = "accelerator.process_index, accelerator.num_processes, accelerator.is_main_process"
    assert group.pull(found) == [(0, 2, True), (1, 2, False)]
    everyone = "accelerator.gather(torch.tensor([rank])).tolist()"
    assert group.pull(everyone) == [[0, 1]] * 2


def test_interrupted_training_keeps_its_names_and_can_continue(notebook: Notebook) -> None:
    begun = notebook.folder / "begun"
    begun.unlink(missing_ok=True)
    assert notebook.run(f"%%ddp --nproc 2\n{TRAINING}\nkept = rank").status == "ok"
    request = notebook.begin("%%ddp\ntrain(repeats=10**5)")
    assert wait_until(begun.exists, timeout=60)
    notebook.interrupt()
    assert notebook.finish(request).error.startswith("CellInterruptedError")
    reply = notebook.run(
        "%%ddp\naccelerator, model = train()\nprint(kept, model.module.weight.tolist())"
    )
    assert reply.status == "ok", reply.traceback
    assert reply.lines(0)[-1][2:] == reply.lines(1)[-1][2:]


SCRIPT = f"""{TRAINING}
accelerator, model = train()
everyone = accelerator.gather(torch.tensor([accelerator.process_index])).tolist()
accelerator.print(everyone, accelerator.unwrap_model(model).weight[0].tolist())
"""


def test_accelerate_script_can_run_repeatedly_and_between_cells(
    group: Ranks, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = folder / "script.py"
    script.write_text(SCRIPT)
    group.run(f"{TRAINING}\naccelerator, model = train()")
    said = []
    for _ in range(2):
        capsys.readouterr()
        group.run_script(str(script))
        said.append(capsys.readouterr().out)
    assert said[0] == said[1]
    assert "[0, 1]" in said[0]
    group.run("everyone = accelerator.gather(torch.tensor([rank])).tolist()")
    assert group.pull("everyone") == [[0, 1], [0, 1]]


def test_notebook_launcher_is_refused_with_an_alternative(group: Ranks) -> None:
    launch = (
        "from accelerate import notebook_launcher\nnotebook_launcher(train, (), num_processes=2)"
    )
    assert "train()" in str(group.failure_of(f"{TRAINING}\n{launch}"))
    group.assert_works()


def test_accelerate_training_continues_after_a_heal_in_mid_epoch(
    group: Ranks,
) -> None:
    prepared = f"""{regression.SOURCE}
import os
from accelerate import Accelerator
from accelerate.state import PartialState
accelerator = Accelerator(cpu=True)
model = make_model()
model, optimizer, loader = accelerator.prepare(
    model, torch.optim.SGD(model.parameters(), lr=0.1), make_loader(3)
)
def train(dies_at=None):
    for step, (x, y) in enumerate(loader):
        if step == dies_at and rank == 1: os.kill(os.getpid(), 9)
        optimizer.zero_grad()
        accelerator.backward(nn.functional.mse_loss(model(x), y))
        optimizer.step()
"""
    group.run(prepared)
    group.failure_of("train(dies_at=2)")
    group.heal()
    group.run("train()")
    first, second = group.pull("model.module.weight.tolist()")
    assert first == second
    found = "accelerator.process_index, PartialState().process_index, PartialState().num_processes"
    assert group.pull(found) == [(0, 0, 2), (1, 1, 2)]
