"""Lightning's Trainer and Fabric in a cell."""

from __future__ import annotations

import re

import pytest
import regression
from drivers.ranks import Ranks
from notebook import Notebook
from processes import wait_until

pytest.importorskip("lightning")
pytestmark = [pytest.mark.multiproc, pytest.mark.ecosystem, pytest.mark.timeout(180)]

TRAINER = f"""{regression.SOURCE}
import warnings
warnings.simplefilter('ignore')
import lightning
from pathlib import Path

class Net(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = make_model()

    def training_step(self, batch, index):
        Path('begun').touch()
        x, y = batch
        loss = nn.functional.mse_loss(self.net(x), y)
        self.log('loss', loss, sync_dist=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

def make_trainer(epochs):
    return lightning.Trainer(
        accelerator='cpu', devices=world_size, strategy='ddp', max_epochs=epochs, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )
"""


def test_lightning_trainer_matches_training_in_one_process(group: Ranks) -> None:
    group.run(TRAINER)
    group.run("net, trainer = Net(), make_trainer(2)\ntrainer.fit(net, make_loader())")
    first, second = group.pull("net.net.weight.tolist()")
    assert first == second
    assert first[0] == pytest.approx(regression.trained(epochs=2, shuffles=True), rel=1e-5)
    assert group.pull("trainer.global_rank, trainer.world_size") == [(0, 2), (1, 2)]
    losses = group.pull("trainer.callback_metrics['loss'].item()")
    assert losses[0] == losses[1]


def test_lightning_fabric_matches_training_in_one_process(group: Ranks) -> None:
    group.run(
        f"{regression.SOURCE}\nfrom lightning.fabric import Fabric\n"
        "fabric = Fabric(accelerator='cpu', devices=world_size, strategy='ddp')\nfabric.launch()\n"
        "model = make_model()\n"
        "model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))\n"
        "for x, y in fabric.setup_dataloaders(make_loader()):\n"
        "    optimizer.zero_grad()\n"
        "    fabric.backward(nn.functional.mse_loss(model(x), y))\n"
        "    optimizer.step()\n"
    )
    first, second = group.pull("model.module.weight.tolist()")
    assert first == second
    assert first[0] == pytest.approx(regression.trained(epochs=1), rel=1e-5)


def test_interrupted_lightning_trainer_can_train_again(
    notebook: Notebook,
) -> None:
    begun = notebook.folder / "begun"
    begun.unlink(missing_ok=True)
    assert notebook.run(f"%%ddp --nproc 2\n{TRAINER}\nkept = rank").status == "ok"
    request = notebook.begin("%%ddp\nnet = Net()\nmake_trainer(10**6).fit(net, make_loader())")
    assert wait_until(begun.exists, timeout=60)
    notebook.interrupt()
    assert notebook.finish(request).error.startswith("CellInterruptedError")
    reply = notebook.run(
        "%%ddp\nnet = Net()\nmake_trainer(1).fit(net, make_loader())\nprint(kept, net.net.weight)"
    )
    assert reply.status == "ok", reply.traceback
    assert reply.lines(0)[-1][2:] == reply.lines(1)[-1][2:]
    request = notebook.begin("%%ddp\nprint('loops')\nwhile True: pass")
    notebook.finish(request, until="loops")
    notebook.interrupt()  # Lightning has made its processes deaf to SIGINT
    assert notebook.finish(request).error.startswith("CellInterruptedError")
    assert notebook.run("%%ddp\nprint(kept)").lines(1) == ["1"]


@pytest.mark.parametrize("strategy", ["ddp_notebook", "ddp_spawn"])
def test_lightning_strategy_that_spawns_is_refused_with_an_alternative(
    group: Ranks, strategy: str
) -> None:
    group.run(TRAINER.replace("'ddp'", f"'{strategy}'"))
    error = str(group.failure_of("make_trainer(1).fit(Net(), make_loader())"))
    assert re.search('strategy="ddp".*devices=world_size', error)
    group.assert_works()
